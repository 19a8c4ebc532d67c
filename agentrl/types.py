"""What flows through the house: plain frozen dataclasses, no behaviour.

Token data are tuples of Python numbers: they pickle, print and compare; tensors begin in `agentrl.trainer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
Origin = Literal["prompt", "sampled", "observation", "glue"]
ToolSchema = Mapping[str, Any]
"""A tool in the OpenAI shape: {"type": "function", "function": {...}}."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the policy asked for: `arguments` is the parsed JSON object, not yet validated."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Image:
    """An image content part; `data` is the encoded file, `mime_type` says which encoding."""

    data: bytes
    mime_type: str = "image/png"


Part = str | Image


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message. `content` is text, or a tuple of parts where images are among them.

    `reasoning` is the think block of an assistant message, kept apart from `content`; `parse_errors` says
    what was malformed in a sampled assistant message (the calls that did parse are in `tool_calls`).
    """

    role: Role
    content: str | tuple[Part, ...] = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None
    parse_errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Task:
    """One problem: `row` is handed to the env (for ToolEnv: the keyword arguments of `setup`)."""

    id: str
    row: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    env: str = ""
    """The name of its env in a run of several (`envs`)."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one completion is drawn. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 switch the filters off.

    `seed` together with the position in the completion determines each draw, whatever else is in the batch.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop_ids: frozenset[int] = frozenset()
    seed: int | None = None
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class Filters:
    """Which tokens may be drawn: `min_p` is a share of the largest probability. Off by default; never in training,
    whose log-probabilities are those of the whole distribution."""

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


EVERY_TOKEN = Filters()


@dataclass(frozen=True, slots=True)
class Routes:
    """The experts that the routers of a model chose for consecutive tokens.

    `data` holds `layers` x `top_k` signed integers of `width` bytes for each token, in the machine's byte order;
    all of a token are -1 where its experts are not known. `start` is the number of tokens before them.
    """

    data: bytes
    layers: int
    top_k: int
    width: int
    start: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """The tokens of one turn, exactly as sampled: the stop token, if one was drawn, is the last id.

    `logprobs` are under the temperature-scaled, otherwise unfiltered distribution (greedy: temperature 1);
    `versions` holds the policy version of each token. All three have the same length. `routes`, if the engine
    returns them, cover the context except its last token, which the model has not read. They may leave out
    tokens at its start whose routes came with an earlier completion of the session.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: Literal["stop", "length", "abort"]
    cached_tokens: int = 0
    routes: Routes | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens of one origin, a node of the transcript tree; `parent` is an index, -1 at a root.

    `logprobs` and `versions` are given exactly when origin is "sampled"; `message` is the index of the
    message in the episode that these tokens belong to, None for glue. `routes` are those of its first tokens, as
    many as are known; run folders do not record them.
    """

    ids: tuple[int, ...]
    origin: Origin
    parent: int
    message: int | None = None
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    routes: Routes | None = None


class StopReason(StrEnum):
    """Why an episode ended. Where several apply at once, the one listed first wins."""

    INFRA = "infra"
    """The sandbox, engine, judge or env broke: the episode does not train and does not vote."""
    SANDBOX_BROKEN = "sandbox_broken"
    """The sandbox died after a program had run in it, and nothing outside explains why: the policy's doing. The
    episode is scored with `Sandbox.death_reward`, trains and votes."""
    FAULT = "fault"
    """Code of the env, or the chat template, raised after the policy had acted: the episode earns nothing."""
    TIMEOUT = "timeout"
    """The episode ran past its wall-clock limit."""
    STOPPED_BY_TOOL = "stopped_by_tool"
    """A tool returned Stop."""
    TERMINATED = "terminated"
    """The env ended the episode."""
    ANSWERED = "answered"
    """The policy replied without a tool call."""
    CONTEXT_FULL = "context_full"
    """The next turn would not fit into the model's context."""
    TOKEN_BUDGET = "token_budget"
    """The tokens of all turns together reached `token_budget`."""
    MAX_TOKENS = "max_tokens"
    """A completion was cut at `max_tokens`."""
    TOOL_CALL_LIMIT = "tool_call_limit"
    """The policy asked for more calls than an episode may make."""
    MAX_TURNS = "max_turns"
    """The policy used all its turns."""


LIMITS = frozenset(
    {
        StopReason.TIMEOUT,
        StopReason.CONTEXT_FULL,
        StopReason.TOKEN_BUDGET,
        StopReason.MAX_TOKENS,
        StopReason.TOOL_CALL_LIMIT,
        StopReason.MAX_TURNS,
    }
)
"""Stop reasons that say that an episode was cut."""


SANDBOX_FAULT = "sandbox"
"""Among an episode's faults: a reward raised what a file operation met in a sandbox. That is the policy's doing,
so it never stops a run as the faults of an author's code do."""
HINT_FAULT = "teacher_hint"
"""Among an episode's faults: the env's `teacher_hint` raised, or returned no text. Rewards count as they are."""
SOLVED_FAULT = "solved_at"
"""Among an episode's faults: it lacks a reward that decides whether it is solved. Its other rewards count."""


@dataclass(frozen=True, slots=True)
class CallRecord:
    """What became of one tool call. `outcome` is "ok" or the name of the policy's mistake."""

    call: ToolCall
    result: str
    outcome: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion and the env's answer to it. `tokens` counts the sampled ids.

    `rewards` are the parts of `reward` that have a name, weights included. `start_s` is when the completion was
    requested, in seconds from the start of the episode; 0 where that is not known.
    `place` is the index of `message` among the episode's messages; None where that is not known.
    `branch` says why an agent's turn begins a branch: `sub_agent`, `opening`, `repeat`, `rewind`, or how the
    history differed.
    """

    message: Message
    observation: tuple[Message, ...]
    reward: float
    finish: str
    tokens: int
    engine_seconds: float
    env_seconds: float
    calls: tuple[CallRecord, ...] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)
    start_s: float = 0.0
    branch: str | None = None
    place: int | None = None


@dataclass(frozen=True, slots=True)
class Episode:
    """All turns of one policy on one task. `reward` is None exactly when `error` is set (it did not end).

    `faults` says by name (of a reward, "step", "template", ...) what raised on what the policy did: such a reward
    counts 0.
    """

    id: str
    task: Task
    messages: tuple[Message, ...]
    turns: tuple[Turn, ...]
    segments: tuple[Segment, ...]
    stop_reason: StopReason
    reward: float | None
    rewards: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0
    tools: tuple[Mapping[str, Any], ...] = ()
    faults: Mapping[str, str] = field(default_factory=dict)
    solved: bool | None = None
    """What the env's or run's declaration says (see `agentrl.env.solved`); None where nothing is declared."""
    worker: int | None = None
    """The number of the env worker that played it; None without `rollout.workers`."""
    start_s: float = 0.0
    """When it began, in seconds since 1970."""
    hint: str | None = None
    """What the env's `teacher_hint` returned."""
    crash: str = ""
    """How the agent program failed (`agent.crash: score`); it is scored as it stands."""


@dataclass(frozen=True, slots=True)
class Group:
    """The episodes of one task. `failed` are infrastructure failures: kept for the record, never scored.

    `greedy` is one more episode of the task, played greedily, where the run compares with one. It does not train;
    rewards per group judge it together with the others.
    """

    task: Task
    episodes: tuple[Episode, ...]
    failed: tuple[Episode, ...] = ()
    greedy: Episode | None = None


@dataclass(frozen=True, slots=True)
class HintedOpening:
    """The opening of a row as its teacher reads it, with a hint: `ids` instead of the first `length` tokens."""

    length: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One token row ready for the loss; all per-token tuples have the length of `ids`.

    `loss_mask` is True on sampled tokens. `logprobs`, `advantages` and `versions` are meaningful there only.
    `columns` holds more about them by name (what the learner said before the step, for instance): one number for
    each token under the mask, in order. `routes`, where known, cover all tokens. `hinted` is set if the
    teacher reads another opening than the policy. `observed` is True on the tokens of the env's answers, for the
    observation loss; () if there is none. `env` is the env's name in a mixture.
    """

    ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    advantages: tuple[float, ...]
    versions: tuple[int, ...]
    episode_id: str
    group: int = 0
    columns: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    routes: Routes | None = None
    hinted: HintedOpening | None = None
    observed: tuple[bool, ...] = ()
    env: str = ""


def has_teacher(row: Sample) -> bool:
    """Whether the KL penalty counts on the row: its column `taught`, where some episodes have no teacher."""
    return any(row.columns.get("taught", (1.0,)))
