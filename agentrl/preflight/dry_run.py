"""A dry run without the model: check env, tasks, tokenizer, template and rewards by playing episodes."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.agents.players import check_agent
from agentrl.async_tasks import time_limit
from agentrl.chat.demonstrate import imitate
from agentrl.chat.proof import Proof, prove
from agentrl.chat.template import Renderer, same_meaning
from agentrl.chat.token_check import check_tokens
from agentrl.chat.transcript import Transcript
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.needs import require_extras
from agentrl.config.run import RunConfig
from agentrl.env.checker import EnvCheckError, check_env
from agentrl.env.env import Env, PolicyAccess
from agentrl.env.images import refuse_images
from agentrl.env.load import load_env, said_by
from agentrl.env.play import Policy, ScriptedPolicy, call, play, random_arguments
from agentrl.env.solved import NOT_DECLARED
from agentrl.env.toolenv.rewards import weight_of_nothing
from agentrl.errors import ConfigError, EnvError, InfraError, RewardError
from agentrl.learner.lora import refuse_unknown_targets
from agentrl.models.folder import check_model_folder
from agentrl.models.tiny import make_tokenizer
from agentrl.plural import plural
from agentrl.reporting.report import Silent
from agentrl.rollout.content import Content, check_held_out, corpus, fewer_tasks, load_content, repeated_ids
from agentrl.rollout.episode_metrics import reward_parts
from agentrl.rollout.group import with_group_rewards
from agentrl.rollout.oracle import author_method
from agentrl.rollout.prompts import fitting, prompt_tokens
from agentrl.rollout.renderer import load_renderer, require_template
from agentrl.rollout.rewards.model import check_reward_model
from agentrl.rollout.task_tools import task_tools, task_tools_now
from agentrl.run_folder.records import EpisodeRecord
from agentrl.sandbox import close_pools
from agentrl.scratch import ScratchFolder
from agentrl.trainer.algorithm import Algorithm, algorithm_of
from agentrl.trainer.estimator import check_penalties, check_weights, make_estimator
from agentrl.trainer.feed import check_feed
from agentrl.trainer.hints import check_hints, hint_of
from agentrl.trainer.rewardless import no_reward
from agentrl.trainer.room import too_long
from agentrl.trainer.samples import to_records
from agentrl.trainer.teacher_check import check_teacher_folder
from agentrl.trainer.warmup import imitated, not_offered, too_long_to_sample
from agentrl.types import LIMITS, Episode, Group, Task

BY_ORACLE = "the env's oracle"
SLOW_TURN_S, SLOW_TURNS = 1.0, 3
"""From so many seconds of a turn, the env is checked on one task with so many turns: it is played many times."""
PROBED_TASKS = 32
"""Opening messages that are rendered to see how long they get."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The parts of a run, without weights.

    Attributes:
        played_by: what the first episode follows: the env's `oracle`, or a generated call to its first tool.
        episodes: two episodes of the same task, the scripted one and one whose policy says nothing of use; their
            advantages are those of a group in which half of the episodes go like each.
        prompt_tokens: the longest opening of the first tasks.
        max_context: what the model can take, None if its config does not say.
        demonstration_tokens: the longest demonstration, None without demonstrations.
        findings: violations of the env contract and later problems; empty for a valid run.
        notes: remarks that do not make a run invalid.
        decode: ids to text.
    """

    config: RunConfig
    tools: tuple[str, ...]
    rewards: tuple[str, ...]
    solved: str
    num_train: int
    num_held_out: int
    num_demonstrations: int
    played_by: str
    episodes: tuple[EpisodeRecord, EpisodeRecord]
    prompt_tokens: int
    max_context: int | None
    demonstration_tokens: int | None
    proof: Proof
    findings: tuple[str, ...]
    notes: tuple[str, ...]
    decode: Callable[[Sequence[int]], str]


def rehearsals(
    config: RunConfig, *, play_outside: bool = False, say: Callable[[str], None] = lambda text: None
) -> dict[str, Rehearsal]:
    """The rehearsal of each env by name; see `rehearse`."""
    require_extras(config)
    content = load_content(config)
    check_held_out(config, content)
    check_hints(config, content)
    check_penalties(config, content)
    check_weights(config, content)
    check_reward_model(config.reward_model, [part.make_env() for part in content.by_env.values()])
    if config.model.path is not None:
        check_teacher_folder(config, Path(config.model.path))
    refuse_unknown_targets(config)
    for view in config.by_env.values():
        make_estimator(view.algorithm)
    check_feed(config, content)
    return {
        name: rehearse(view, play_outside=play_outside, content=content.by_env[name], everything=content, say=say)
        for name, view in config.by_env.items()
    }


def rehearse(
    config: RunConfig,
    *,
    play_outside: bool = False,
    content: Content | None = None,
    everything: Content | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Rehearsal:
    """Load everything but the weights, play two episodes and prove the chat template.

    Args:
        play_outside: call tools that act outside of the episode (MCP servers, HTTP) as well.
        content: of the env, if it has been loaded.
        everything: the content of all envs of the run, for a tokenizer that is made from it.
        say: called with what a person who waits should know.

    Raises:
        ConfigError: the env, its tasks, a tool, a reward or the tokenizer cannot be used.
        TemplateError: the chat template cannot be used.
    """
    if content is None:
        content = load_content(config)
        check_held_out(config, content)
    corpus_of = everything or content
    if config.agent is not None:
        check_agent(config.agent, config.places, timeout_s=config.rollout.timeout_s)
    held_back = () if play_outside else tuple(content.make_env().outside_tools())
    if held_back:
        content = replace(content, make_env=partial(_holding_back, content.make_env))
    with ScratchFolder("check") as temp:
        folder, max_context = _tokenizer(config, corpus_of, temp.path)
        renderer = load_renderer(config, folder)
        proof = prove(renderer)
        tools = task_tools_now(content.make_env, content.train_tasks)
        require_template(renderer, tools)
        try:
            found = asyncio.run(_closing_pools(_rehearse(config, content, renderer, proof, max_context, say)))
        except (InfraError, EnvError, RewardError) as e:
            raise ConfigError(f"{config.sole_env.shown}: {e}") from e
    if not held_back:
        return found
    note = f"these tools act outside of the episode and were not called: {', '.join(held_back)}; --play calls them"
    return replace(found, notes=(*found.notes, note))


def _holding_back(make_env: Callable[[], Env]) -> Env:
    env = make_env()
    env.hold_back = True
    return env


class _Noting(Silent):
    """Collects a run's notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        """Keep it."""
        self.notes.append(text)


async def _closing_pools(work: Coroutine[None, None, Rehearsal]) -> Rehearsal:
    try:
        return await work
    finally:
        await close_pools()


async def _rehearse(
    config: RunConfig,
    content: Content,
    renderer: Renderer,
    proof: Proof,
    max_context: int | None,
    say: Callable[[str], None],
) -> Rehearsal:
    noting = _Noting()
    if config.data.overlong_prompts is not None:
        room = max_context or config.rollout.token_budget
        content = await fitting(content, config, renderer, room, noting)
    task = content.train_tasks[0]
    refuse_images(content.make_env())
    policy, played_by = _policy(config, content, task)
    scripted, transcript = await _episode(config, content, renderer, task, policy, "scripted")
    silent, _ = await _episode(config, content, renderer, task, ScriptedPolicy([]), "silent")
    turn_s = max((turn.env_seconds for turn in scripted.turns), default=0.0)
    if slow := turn_s > SLOW_TURN_S:
        noting.note(f"a turn took {turn_s:.1f} s, so the env was checked on one task with few turns")
        say(f"a turn takes {turn_s:.1f} s: checking the env takes about {turn_s * SLOW_TURNS * 5:.0f} s")
    findings = await _env_findings(content, slow=slow)
    findings += _ledger_findings(renderer, transcript)
    prompt_tokens = await _longest_opening(content, renderer)
    findings += _length_findings(config, prompt_tokens, max_context)
    findings += _limit_findings(config, scripted)
    notes = [*repeated_ids(content), *fewer_tasks(config, content)]
    notes += [*config.algorithm.notes(config.rollout.max_staleness, config.critic), *noting.notes]
    env = content.make_env()
    rewards = config.reward_model is None and config.algorithm.advantage.name != "none"
    if rewards and (nothing := no_reward(env, (scripted, silent))):
        (notes if env.declared_rewards() is None else findings).append(nothing)
    given = {part for episode in (scripted, silent) for part in reward_parts(episode)}
    if nothing := weight_of_nothing(config.sole_env.reward_weights, given):
        findings.append(nothing)
    notes += _failed_tools(scripted)
    notes += _solved_notes(env, scripted, silent, by_oracle=played_by == BY_ORACLE)
    longest, completions = _demonstration_lengths(content, renderer, scripted)
    if said := too_long_to_sample(completions, config.rollout):
        notes.append(said)
    if content.demonstrations:
        offered = await task_tools(content.make_env, content.train_tasks)
        notes += filter(None, [not_offered(content.demonstrations, offered)])
    if longest is not None and max_context is not None and longest > max_context:
        findings.append(f"the longest demonstration has {longest} tokens, the model takes {max_context}")
    return Rehearsal(
        config=config,
        tools=tuple(_tool_line(schema["function"]) for schema in scripted.tools),
        rewards=_reward_names(content.make_env(), scripted),
        solved=_solved_line(content.make_env(), scripted),
        num_train=len(content.train_tasks),
        num_held_out=len(content.held_out_tasks),
        num_demonstrations=len(content.demonstrations),
        played_by=played_by,
        episodes=await _compared(config, content, scripted, silent),
        prompt_tokens=prompt_tokens,
        max_context=max_context,
        demonstration_tokens=longest,
        proof=proof,
        findings=tuple(findings),
        notes=tuple(notes),
        decode=renderer.decode,
    )


def _tokenizer(config: RunConfig, content: Content, temp: Path) -> tuple[Path, int | None]:
    """The folder with the tokenizer (made in `temp` for a tiny model) and the length of the model's context."""
    tiny = config.model.tiny
    if tiny is not None:
        make_tokenizer(temp, corpus(content), vocab=tiny.vocab, max_context=tiny.max_context)
        return temp, tiny.max_context
    folder = Path(config.model.path or "")
    check_model_folder(folder, f"model.path {folder}")
    try:
        model = json.loads((folder / "config.json").read_bytes())
    except ValueError as e:
        raise ConfigError(f"{folder / 'config.json'}: not JSON: {e}") from None
    length = model.get("max_position_embeddings")
    return folder, length if isinstance(length, int) else None


def _policy(config: RunConfig, content: Content, task: Task) -> tuple[Policy, str]:
    env_class = load_env(config.sole_env.use, config.sole_env.options)
    oracle = author_method(env_class, "oracle")
    if oracle is not None:
        try:
            policy: Policy = oracle(task)
        except Exception as e:
            raise ConfigError(f"{config.sole_env.shown}.oracle on task {task.id!r}: {said_by(e)}") from e
        if not callable(policy):
            raise ConfigError(
                f"{config.sole_env.shown}.oracle must return a policy (ScriptedPolicy([...])), got {policy!r}"
            )
        return policy, BY_ORACLE
    tools = task_tools_now(content.make_env, [task])
    if not tools:
        return ScriptedPolicy(["hello"]), "a plain answer (the env has no tools)"
    function = tools[0]["function"]
    arguments = random_arguments(function["parameters"], random.Random(config.seed))
    return ScriptedPolicy([call(function["name"], **arguments)]), f"a generated call to {function['name']}"


async def _episode(
    config: RunConfig, content: Content, renderer: Renderer, task: Task, policy: Policy, name: str
) -> tuple[Episode, Transcript]:
    """Play with messages, then lay the tokens under them as a policy would have sampled them."""
    rollout = config.rollout
    async with time_limit(rollout.timeout_s):
        env = content.make_env()
        env.gives_hints = config.asks_hints
        env.bind(PolicyAccess(reads_images=False))  # as in the rollout: renderers take text only
        episode = await play(env, task, policy, max_turns=rollout.max_turns, episode_id=name)
    transcript = imitate(renderer, episode.messages, episode.tools)
    sampled = [segment for segment in transcript.segments if segment.origin == "sampled"]
    turns = tuple(
        replace(turn, tokens=len(segment.ids), message=transcript.messages[segment.message or 0])
        for turn, segment in zip(episode.turns, sampled, strict=True)
    )
    return replace(episode, messages=transcript.messages, turns=turns, segments=transcript.segments), transcript


async def _env_findings(content: Content, *, slow: bool) -> list[str]:
    tasks = [content.train_tasks[i] for i in range(min(1 if slow else 4, len(content.train_tasks)))]
    turns = SLOW_TURNS if slow else 12
    try:
        await check_env(content.make_env, tasks, reward_range=(float("-inf"), float("inf")), max_turns=turns)
    except EnvCheckError as e:
        return str(e).splitlines()
    return []


def _ledger_findings(renderer: Renderer, transcript: Transcript) -> list[str]:
    """The ledger agrees with a fresh rendering, and the parser reads what the template writes."""
    findings = []
    report = check_tokens(transcript, "ignore_strippable")
    if report.failed:
        findings += [f"tokens of the episode and a fresh rendering differ: {d}" for d in report.differences]
    for segment in transcript.segments:
        if segment.origin != "sampled" or segment.message is None:
            continue
        written = transcript.messages[segment.message]
        read = renderer.parse(segment.ids, tools=transcript.tools)
        if not same_meaning(written, read):
            text = renderer.decode(segment.ids)
            findings.append(f"the parser {renderer.parser} does not read what the template writes: {text!r}")
    return findings


async def _longest_opening(content: Content, renderer: Renderer) -> int:
    """Tokens of the longest prompt among the first tasks of both splits."""
    longest = 0
    for tasks in (content.train_tasks, content.held_out_tasks, *content.eval_sets.values()):
        for task in [tasks[i] for i in range(min(PROBED_TASKS, len(tasks)))]:
            longest = max(longest, await prompt_tokens(content, task, renderer))
    return longest


def _length_findings(config: RunConfig, prompt: int, max_context: int | None) -> list[str]:
    rollout = config.rollout
    findings = [said] if (said := too_long(config)) else []
    if max_context is not None and prompt >= max_context:
        findings.append(f"a prompt has {prompt} tokens, the model takes {max_context}: nothing can be sampled")
    if prompt >= rollout.token_budget:
        findings.append(
            f"a prompt has {prompt} tokens, rollout.token_budget is {rollout.token_budget}: nothing can be sampled"
        )
    return findings


async def _compared(
    config: RunConfig, content: Content, scripted: Episode, silent: Episode
) -> tuple[EpisodeRecord, EpisodeRecord]:
    """Both with the advantages that they would have in a group in which half of the episodes go like each.

    Where advantages wait for the learner, the rewards are compared with their mean instead.
    """
    half = max(config.rollout.group_size // 2, 1)
    episodes = [replace(e, id=f"{e.id}/{i}") for e in (scripted, silent) for i in range(half)]
    episodes = list(await with_group_rewards(content.make_env(), episodes))
    if faults := {name: text for episode in episodes for name, text in episode.faults.items()}:
        raise RewardError(faults)
    groups = [Group(scripted.task, tuple(episodes))]
    algorithm = algorithm_of(config, reference_apart=False, hints=None, record=False)
    if algorithm.late or "greedy_E" in algorithm.estimator.needs:
        algorithm = Algorithm(AlgorithmConfig.model_validate({"advantage": "dr_grpo"}))
    teacher = config.teacher
    told = {} if teacher is None else {e.id: hint_of(teacher, e, groups[0]) for e in episodes}
    hints = {name: text for name, text in told.items() if text is not None}
    records = to_records(groups, algorithm.advantages(algorithm.rows(groups)).by_segment, step=0, hints=hints)
    first, last = records[0], records[-1]
    return (
        replace(first, episode=replace(first.episode, id=scripted.id)),
        replace(last, episode=replace(last.episode, id=silent.id)),
    )


def _failed_tools(episode: Episode) -> list[str]:
    """Tools that raised or took too long, with what the policy would read of each."""
    calls = [call for turn in episode.turns for call in turn.calls]
    failed = {call.call.name: call for call in calls if call.outcome in ("tool_exception", "tool_timeout")}
    return [
        f"the tool {name} failed in the scripted episode: {call.result[:200]}" for name, call in failed.items()
    ]


def _limit_findings(config: RunConfig, episode: Episode) -> list[str]:
    """Limits that the scripted episode runs into: a policy that does it right would, too."""
    rollout, findings = config.rollout, []
    if episode.stop_reason in LIMITS:
        findings.append(
            f"the scripted episode was cut: {episode.stop_reason} after {plural(len(episode.turns), 'turn')}"
        )
    longest = max((turn.tokens for turn in episode.turns), default=0)
    if longest > rollout.max_tokens:
        findings.append(
            f"a scripted completion has {longest} tokens, rollout.max_tokens is {rollout.max_tokens}: the policy "
            f"would be cut there; set rollout.max_tokens to {longest} or more"
        )
    total = sum(len(segment.ids) for segment in episode.segments)
    if total > rollout.token_budget:
        findings.append(
            f"the scripted episode has {total} tokens, rollout.token_budget is {rollout.token_budget}: raise "
            "it, or let tools return less (env.settings.observation_tokens)"
        )
    return findings


def _demonstration_lengths(content: Content, renderer: Renderer, like: Episode) -> tuple[int | None, list[int]]:
    """Tokens of the longest demonstration, and of the longest completion of each."""
    longest, completions = None, []
    for number, given in enumerate(content.demonstrations, 1):
        segments = imitated(renderer, given, like.tools, f"warmup: demonstration {number}").segments
        longest = max(longest or 0, sum(len(segment.ids) for segment in segments))
        sampled = [len(segment.ids) for segment in segments if segment.origin == "sampled"]
        completions.append(max(sampled, default=0))
    return longest, completions


def _tool_line(function: dict[str, object]) -> str:
    """`calculator(expression: string)`, what is optional with a question mark."""
    parameters = function.get("parameters")
    schema = parameters if isinstance(parameters, dict) else {}
    required = schema.get("required", ())
    arguments = ", ".join(
        f"{name}{'' if name in required else '?'}: {_kind(part)}"
        for name, part in schema.get("properties", {}).items()
    )
    return f"{function['name']}({arguments})"


def _kind(schema: Mapping[str, Any]) -> str:
    """The type that a JSON schema stands for, in short."""
    if "enum" in schema:
        return " | ".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(map(_kind, schema["anyOf"])))
    return str(schema.get("type", "any"))


def _solved_line(env: Env, scripted: Episode) -> str:
    """What counts as solved."""
    rule = env.solved_rule()
    return NOT_DECLARED if rule is None or scripted.solved is None else str(rule)


def _solved_notes(env: Env, scripted: Episode, silent: Episode, *, by_oracle: bool) -> list[str]:
    """Signs that the declaration of what counts as solved is not what the author means."""
    rule, notes = env.solved_rule(), []
    if by_oracle and scripted.solved is False:
        notes.append(
            f"the oracle's episode does not count as solved ({rule}); correct the declaration or the oracle"
        )
    if silent.solved:
        notes.append(f"an episode whose policy only says 'done' counts as solved ({rule})")
    return notes


def _reward_names(env: Env, scripted: Episode) -> tuple[str, ...]:
    """The rewards in the order in which they are declared, each with what is not usual about it."""
    names = dict.fromkeys(scripted.rewards, "")
    for name, reward in (env.declared_rewards() or {}).items():
        if name not in names and any(part.startswith(f"{name}/") for part in names):
            continue  # its parts are there
        per = "" if reward.per == "episode" else f" per {reward.per}"
        names[name] = per + ("" if reward.weight == 1 else f" (weight {reward.weight:g})")
    return tuple(name + more for name, more in names.items())
