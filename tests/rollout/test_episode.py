"""One episode: what it records, why it stops, and what becomes of trouble. See also tests/env/test_close.py."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agentrl.chat.template import History, Renderer
from agentrl.chat.transcript import Transcript, rows_of
from agentrl.env import ToolEnv, reward, tool
from agentrl.env.env import Env, StepInfo
from agentrl.envs.calculator import Calculator
from agentrl.errors import (
    EngineError,
    EnvError,
    InfraError,
    JudgeAnswerError,
    JudgeError,
    SandboxError,
    TemplateError,
)
from agentrl.learner.pack import packed_size
from agentrl.models.tiny import make_tokenizer
from agentrl.rollout.episode import Player, run_episode
from agentrl.rollout.episode_metrics import episode_metrics
from agentrl.rollout.limits import EpisodeLimits
from agentrl.sandbox import SandboxBroken
from agentrl.testing.engine import ScriptedEngine
from agentrl.testing.policy import call, calls, say
from agentrl.trainer.samples import episode_samples
from agentrl.types import Completion, Episode, Group, Message, Sampling, StopReason, Task
from agentrl.view.episode_text import mistakes
from tests.chat.test_check import DROPS_THINKING
from tests.chat.test_forks import build

CHAIN = Task("chain", {"start": 2, "operations": [["+", 3], ["*", 4]]})
PLAIN = Task("plain")


class Recording(ScriptedEngine):
    """Remembers what it was asked."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.asked: list[tuple[tuple[int, ...], Sampling, str | None]] = []

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, session: str | None = None) -> Completion:
        self.asked.append((tuple(ids), sampling, session))
        return await super().generate(ids, sampling, session=session)


def make_player(
    renderer: Renderer, make_env: Callable[[], Env], script: Any, *, max_context: int = 4096, **limits: Any
) -> Player:
    engine = Recording(renderer, script, max_context=max_context)
    return Player(engine, renderer, make_env, EpisodeLimits(**limits), Sampling(temperature=0.8, top_p=0.9))


class Scene(Env):
    """An env without ToolEnv around it, whose parts can be replaced; counts how often it was closed."""

    def __init__(self, **parts: Any) -> None:
        self.parts = {"reward": 0.0, "score": {"solved": 1.0}, "truncated": False, "info": StepInfo()} | parts
        self.closed = 0

    async def _part(self, name: str) -> Any:
        part = self.parts.get(name)
        if isinstance(part, BaseException):
            raise part
        if part == "for ever":
            await asyncio.sleep(1e9)
        return part

    async def reset(self, task: Task) -> tuple[Sequence[Message], dict[str, Any]]:
        await self._part("reset")
        return [Message("user", "Hello.")], {}

    async def step(self, message: Message) -> tuple[Sequence[Message], float, bool, bool, StepInfo]:
        await self._part("step")
        earned, truncated = await self._part("reward"), await self._part("truncated")
        return [Message("user", "Go on.")], earned, message.content == "bye", truncated, self.parts["info"]

    async def score(self, episode: Episode) -> Any:
        return await self._part("score")

    async def close(self) -> None:
        self.closed += 1
        await self._part("close")


@pytest.mark.parametrize("history", ["keep", "fork"])
async def test_the_budget_counts_all_contexts_of_an_episode(tmp_path: Path, history: History):
    """A template that drops earlier thinking makes contexts shorter, and episodes longer than each of them."""
    renderer = build(tmp_path, DROPS_THINKING, history)
    thinking = "<think>\n" + "well " * 30 + "\n</think>\n\nhi"
    player = make_player(renderer, Scene, [thinking] * 20, token_budget=600, max_turns=20)
    episode = await run_episode(player, PLAIN, episode_id="e", seed=0)
    assert episode.stop_reason is StopReason.TOKEN_BUDGET
    rows = episode_samples(episode)
    assert (len(rows) > 1) == (history == "fork")
    assert 500 < packed_size(rows) <= 600


class TestAWholeEpisode:
    @pytest.fixture
    async def played(self, renderer: Renderer) -> tuple[Episode, Player]:
        script = [
            calls(("calculator", {"expression": "2+3"}), ("calculator", {"expression": "1/"})),
            call("calculator", expression="5*4"),
            say("20"),
        ]
        player = make_player(renderer, Calculator, script, max_turns=4, max_tokens=200, token_budget=2000)
        return await run_episode(player, CHAIN, episode_id="s1/g0/e0", seed=7), player

    async def test_it_records_what_happened(self, played: tuple[Episode, Player]):
        episode, _ = played
        assert (episode.error, episode.stop_reason) == (None, StopReason.ANSWERED)
        assert (episode.reward, episode.rewards) == (1.0, {"solved": 1.0})
        assert [[r.outcome for r in t.calls] for t in episode.turns] == [["ok", "tool_exception"], ["ok"], []]
        assert [m.content for m in episode.turns[1].observation] == ["20"]
        assert episode.metrics["tool_exception"] == 1
        assert [m.role for m in episode.messages] == [
            *("system", "user"),
            *("assistant", "tool", "tool"),
            *("assistant", "tool"),
            "assistant",
        ]
        assert [t["function"]["name"] for t in episode.tools] == ["calculator"]
        assert episode.seconds >= sum(t.engine_seconds + t.env_seconds for t in episode.turns) >= 0

    async def test_its_tokens_are_those_that_the_engine_saw_and_gave(self, played, renderer: Renderer):
        episode, player = played
        (row,) = rows_of(episode.segments)
        contexts = [ids for ids, _, _ in player.engine.asked]
        assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(contexts))
        assert row.ids[: len(contexts[-1])] == contexts[-1]
        sampled = [s for s in episode.segments if s.origin == "sampled"]
        assert sum(row.loss_mask) == sum(len(s.ids) for s in sampled) == sum(t.tokens for t in episode.turns)
        assert renderer.decode(sampled[2].ids) == "20<|im_end|>"
        assert renderer.decode(sampled[0].ids).count("<tool_call>") == 2

    async def test_every_turn_draws_with_its_own_seed(self, played, renderer: Renderer):
        _, player = played
        samplings = [s for _, s, _ in player.engine.asked]
        assert {session for *_, session in player.engine.asked} == {"s1/g0/e0"} == set(player.engine.released)
        assert len({s.seed for s in samplings}) == 3
        assert all((s.temperature, s.top_p) == (0.8, 0.9) for s in samplings)
        again = make_player(renderer, Calculator, [call("calculator", expression="1"), say("x")])
        await run_episode(again, CHAIN, episode_id="other", seed=7)
        assert [s.seed for _, s, _ in again.engine.asked] == [s.seed for s in samplings[:2]]
        await run_episode(again, CHAIN, episode_id="third", seed=8)
        assert again.engine.asked[2][1].seed != samplings[0].seed

    async def test_rewards_of_turns_join_those_of_the_episode(self, renderer: Renderer):
        player = make_player(
            renderer, lambda: Scene(reward=0.25, score={"a": 1.0, "b": -0.5}), [say("x"), say("bye")]
        )
        episode = await run_episode(player, PLAIN, episode_id="e", seed=0)
        assert (episode.reward, episode.rewards) == (1.0, {"a": 1.0, "b": -0.5})
        assert [t.reward for t in episode.turns] == [0.25, 0.25]


class TestWhyItStops:
    async def lengths(self, renderer: Renderer) -> tuple[int, int]:
        """Tokens before the first completion of a scene, and before its second."""
        player = make_player(renderer, Scene, [say("hi"), say("bye")])
        await run_episode(player, PLAIN, episode_id="e", seed=0)
        first, second = (len(ids) for ids, _, _ in player.engine.asked)
        return first, second

    async def stopped(self, renderer: Renderer, **limits: Any) -> tuple[StopReason, int, str]:
        player = make_player(renderer, Scene, [say("hi")] * 20, **limits)
        episode = await run_episode(player, PLAIN, episode_id="e", seed=0)
        assert (episode.error, episode.reward) == (None, 1.0), "what was cut is scored all the same"
        return episode.stop_reason, len(episode.turns), episode.turns[-1].finish if episode.turns else ""

    async def test_by_what_runs_out(self, renderer: Renderer):
        first, second = await self.lengths(renderer)
        full, budget = StopReason.CONTEXT_FULL, StopReason.TOKEN_BUDGET
        found = {
            "the opening fills the context": await self.stopped(renderer, max_context=first),
            "it is longer than the context": await self.stopped(renderer, max_context=first - 3),
            "it fills the budget": await self.stopped(renderer, token_budget=first),
            "it fills both": await self.stopped(renderer, max_context=first - 1, token_budget=first - 2),
            "the second turn has no room in the context": await self.stopped(renderer, max_context=second),
            "nor in the budget": await self.stopped(renderer, token_budget=second),
            "the context cuts a completion": await self.stopped(renderer, max_context=second + 1),
            "the budget cuts a completion": await self.stopped(renderer, token_budget=second + 1),
            "both cut it": await self.stopped(renderer, max_context=second + 1, token_budget=second + 1),
            "a completion is too long": await self.stopped(renderer, max_tokens=1),
            "too long, and the context ends there": await self.stopped(
                renderer, max_tokens=1, max_context=first + 1
            ),
            "the turns are used up": await self.stopped(renderer, max_turns=3),
            "turns and context end together": await self.stopped(renderer, max_turns=1, max_context=second),
        }
        assert found == {
            "the opening fills the context": (full, 0, ""),
            "it is longer than the context": (full, 0, ""),
            "it fills the budget": (budget, 0, ""),
            "it fills both": (full, 0, ""),
            "the second turn has no room in the context": (full, 1, "stop"),
            "nor in the budget": (budget, 1, "stop"),
            "the context cuts a completion": (full, 2, "length"),
            "the budget cuts a completion": (budget, 2, "length"),
            "both cut it": (full, 2, "length"),
            "a completion is too long": (StopReason.MAX_TOKENS, 1, "length"),
            "too long, and the context ends there": (full, 1, "length"),
            "the turns are used up": (StopReason.MAX_TURNS, 3, "stop"),
            "turns and context end together": (StopReason.MAX_TURNS, 1, "stop"),
        }

    async def test_the_budget_is_that_of_all_contexts_that_a_template_rewrites(self, tmp_path):
        make_tokenizer(tmp_path, ["Hello. Go on. hi"] * 4, vocab=360, max_context=4096)
        template = tmp_path / "chat_template.jinja"
        older = "('' if loop.index0 + 2 >= messages | length else 'older: ')"  # but for the last exchange
        template.write_text(
            template.read_text().replace("+ message.role + '\\n'", f"+ message.role + '\\n' + {older}")
        )
        forks = Renderer.from_directory(tmp_path, history="fork")
        whole = await run_episode(
            make_player(forks, Scene, [say("hi")] * 9, max_turns=6), PLAIN, episode_id="e", seed=0
        )
        rows = episode_samples(whole)
        assert (len(whole.turns), len(rows)) == (6, 6)
        size, longest = packed_size(rows), max(len(row.ids) for row in rows)
        assert size > 1.4 * longest
        budget = (size + longest) // 2
        player = make_player(forks, Scene, [say("hi")] * 9, max_turns=6, token_budget=budget)
        episode = await run_episode(player, PLAIN, episode_id="e", seed=0)
        assert (episode.stop_reason, episode.error) == (StopReason.TOKEN_BUDGET, None)
        assert budget // 2 < packed_size(episode_samples(episode)) <= budget

    async def test_a_completion_that_was_cut_is_not_played(self, renderer: Renderer):
        player = make_player(renderer, Calculator, [call("calculator", expression="2+3")], max_tokens=4)
        episode = await run_episode(player, CHAIN, episode_id="e", seed=0)
        assert (episode.stop_reason, episode.reward) == (StopReason.MAX_TOKENS, 0.0)
        (turn,) = episode.turns
        assert (turn.calls, turn.observation, turn.tokens, turn.finish) == ((), (), 4, "length")
        assert sum(rows_of(episode.segments)[0].loss_mask) == 4
        assert turn.message.parse_errors, "the call is not closed"
        assert not episode.metrics.get("parse_error"), "and the env has not seen it"
        counted = episode_metrics([Group(CHAIN, (episode,))])["malformed"]
        assert (counted, mistakes(episode)) == (1, {"parse_error": 1}), "summary and show count it"

    @pytest.mark.parametrize(
        ("parts", "script", "wanted"),
        [
            ({}, [say("bye")], StopReason.TERMINATED),
            ({"truncated": True}, [say("x")], StopReason.MAX_TURNS),
            ({"truncated": True}, [say("bye")], StopReason.TERMINATED),
            (
                {"truncated": True, "info": StepInfo(stop_reason=StopReason.TOOL_CALL_LIMIT)},
                [say("x")],
                StopReason.TOOL_CALL_LIMIT,
            ),
            ({"info": StepInfo(stop_reason=StopReason.STOPPED_BY_TOOL)}, [say("bye")], StopReason.STOPPED_BY_TOOL),
        ],
    )
    async def test_by_the_env(self, renderer: Renderer, parts, script, wanted: StopReason):
        player = make_player(renderer, lambda: Scene(**parts), script, max_turns=1)
        assert (await run_episode(player, PLAIN, episode_id="e", seed=0)).stop_reason is wanted

    async def test_a_timeout_keeps_the_turns_before_it_and_is_scored(self, renderer: Renderer):
        class Slow(ScriptedEngine):
            async def generate(self, ids, sampling, *, session=None):
                if self._turns.get(session, 0):
                    await asyncio.sleep(1e9)
                return await super().generate(ids, sampling, session=session)

        scene = Scene(reward=0.5)
        player = make_player(renderer, lambda: scene, [], timeout_s=0.2)
        player = replace(player, engine=Slow(renderer, [say("hi")] * 3))
        episode = await run_episode(player, PLAIN, episode_id="e", seed=0)
        assert (episode.stop_reason, episode.error, len(episode.turns)) == (StopReason.TIMEOUT, None, 1)
        assert (episode.reward, scene.closed) == (1.5, 1)

    @pytest.mark.parametrize("swallows", [False, True])
    async def test_a_turn_that_the_env_never_answers_does_not_earn_what_the_one_before_did(
        self, renderer: Renderer, swallows: bool
    ):
        class Hangs(Scene):
            async def step(self, message: Message) -> Any:
                try:
                    await self._part("for ever" if message.content == "more" else "")
                except asyncio.CancelledError:
                    if not swallows:
                        raise
                return await super().step(message)

        hangs = Hangs(reward=0.5, **{"for ever": "for ever"})
        player = make_player(renderer, lambda: hangs, [say("hi"), say("more")], timeout_s=0.3)
        episode = await run_episode(player, PLAIN, episode_id="e", seed=0)
        assert (episode.stop_reason, episode.reward) == (StopReason.TIMEOUT, 1.5)
        assert [(turn.message.content, turn.reward) for turn in episode.turns] == [("hi", 0.5), ("more", 0.0)]
        (row,) = episode_samples(episode)
        first = episode.turns[0].tokens
        assert row.columns["turn"] == (0.0,) * first + (1.0,) * episode.turns[1].tokens
        assert (row.columns["reward"][first - 1], row.columns["reward"][-1]) == (0.5, 1.0)


async def test_a_turn_whose_step_meets_a_template_that_refuses_its_text_is_recorded(renderer: Renderer):
    class Refused(Scene):
        async def step(self, message: Message) -> Any:
            if message.content == "more":
                raise TemplateError("refuses what `self.model` is asked")
            return await super().step(message)

    player = make_player(renderer, lambda: Refused(reward=0.5), [say("hi"), say("more")])
    episode = await run_episode(player, PLAIN, episode_id="e", seed=0)
    assert (episode.stop_reason, list(episode.faults)) == (StopReason.FAULT, ["template"])
    assert [(turn.message.content, turn.reward) for turn in episode.turns] == [("hi", 0.5), ("more", 0.0)]
    with pytest.raises(TemplateError):
        await run_episode(make_player(renderer, Refused, [say("more")]), PLAIN, episode_id="e", seed=0)


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "reset raises": ({"reset": KeyError("x")}, "InfraError: Scene.reset: KeyError: 'x'\nTraceback"),
    "reset loses its sandbox": ({"reset": SandboxError("gone")}, "SandboxError: gone"),
    "reset hangs": ({"reset": "for ever"}, "InfraError: Scene.reset took longer than 0.3 s"),
    "reset meets a timeout of its own": (
        {"reset": TimeoutError("no server")},
        "InfraError: Scene.reset: TimeoutError: no server",
    ),
    "reset raises an error of agentrl": (
        {"reset": EnvError("x")},
        "InfraError: Scene.reset: EnvError: x\nTraceback",
    ),
    "reset meets a judge that refuses": (
        {"reset": JudgeAnswerError("no")},
        "InfraError: Scene.reset: JudgeAnswerError: no",
    ),
    "step loses its service": ({"step": InfraError("gone")}, "InfraError: gone"),
    "score loses its judge": ({"score": JudgeError("gone")}, "JudgeError: gone"),
}
FAULTS: dict[str, tuple[dict[str, Any], str, str, float]] = {
    "step raises": ({"step": RuntimeError("a bug")}, "step", "Scene.step: RuntimeError: a bug\nTraceback", 0.0),
    "step recurses for ever": ({"step": RecursionError("deep")}, "step", "Scene.step: RecursionError: deep", 0.0),
    "step meets a timeout of its own": ({"step": TimeoutError("x")}, "step", "Scene.step: TimeoutError: x", 0.0),
    "step meets a judge that refuses": (
        {"step": JudgeAnswerError("no")},
        "step",
        "Scene.step: JudgeAnswerError: no\nTraceback",
        0.0,
    ),
    "a turn's reward is nan": ({"reward": math.nan}, "step", "Scene.step returned the reward nan", 1.0),
    "a turn's reward is text": ({"reward": "1"}, "step", "Scene.step returned the reward '1'", 1.0),
    "score raises": ({"score": ValueError("no")}, "score", "Scene.score raised ValueError: no\nTraceback", 0.0),
    "score hangs": ({"score": "for ever"}, "score", "Scene.score took longer than 0.3 s", 0.0),
    "score meets a timeout of its own": ({"score": TimeoutError("x")}, "score", "Scene.score raised Timeout", 0.0),
    "score meets a judge that refuses": (
        {"score": JudgeAnswerError("no")},
        "score",
        "Scene.score raised JudgeAnswerError: no\nTraceback",
        0.0,
    ),
    "score raises an error of agentrl": ({"score": EnvError("x")}, "score", "Scene.score raised EnvError: x", 0.0),
    "a reward is nan": ({"score": {"ok": 1.0, "a": math.nan}}, "a", "reward 'a' of Scene is nan", 1.0),
    "a reward is infinite": ({"score": {"a": -math.inf}}, "a", "reward 'a' of Scene is -inf", 0.0),
    "a reward is text": ({"score": {"a": "0.5"}}, "a", "reward 'a' of Scene is '0.5'", 0.0),
    "a reward is nothing": ({"score": {"a": None}}, "a", "reward 'a' of Scene is None", 0.0),
}


class TestTrouble:
    @pytest.mark.parametrize("what", BROKEN)
    async def test_it_is_the_episodes_error_and_the_env_is_closed_once(self, renderer: Renderer, what: str):
        parts, said = BROKEN[what]
        scene = Scene(**parts)
        player = make_player(renderer, lambda: scene, [say("bye")], timeout_s=0.3)
        episode = await run_episode(player, PLAIN, episode_id="e", seed=0)
        assert (episode.stop_reason, episode.reward, scene.closed) == (StopReason.INFRA, None, 1)
        assert episode.error is not None
        assert episode.error.startswith(said)
        assert player.engine.released == ["e"]

    @pytest.mark.parametrize("what", FAULTS)
    async def test_what_raises_after_the_policy_acted_is_scored_and_never_played_again(self, renderer, what: str):
        parts, name, said, reward = FAULTS[what]
        scene = Scene(**parts)
        player = make_player(renderer, lambda: scene, [say("bye")], timeout_s=0.3)
        episode = await run_episode(player, PLAIN, episode_id="e", seed=0)
        assert (episode.error, episode.reward, scene.closed) == (None, reward, 1)
        assert episode.faults[name].startswith(said)
        assert (episode.stop_reason is StopReason.FAULT) == ("step" in parts)

    @pytest.mark.parametrize(("earned", "reward"), [(0.5, 0.0), (-0.5, -0.5)])
    async def test_a_step_that_raises_never_leaves_more_than_before(self, renderer, earned: float, reward: float):
        class Later(Scene):
            async def step(self, message):
                if self.last:
                    raise RuntimeError("a bug")
                self.last = True
                return await super().step(message)

            last = False

        player = make_player(renderer, lambda: Later(reward=earned), [say("hi"), say("hi")])
        episode = await run_episode(player, PLAIN, episode_id="e", seed=0)
        assert (episode.stop_reason, episode.reward, len(episode.turns)) == (StopReason.FAULT, reward, 2)

    @pytest.mark.parametrize("earned", [2.0, 0.0, -2.0])
    async def test_a_broken_sandbox_earns_what_it_says_and_solves_nothing(self, renderer: Renderer, earned: float):
        """Whatever earlier turns have earned, and although the total reaches the threshold."""

        class Breaks(Scene):
            solved_at = 0.25
            last = False

            async def step(self, message: Message) -> tuple[Sequence[Message], float, bool, bool, StepInfo]:
                if self.last:
                    raise SandboxBroken("gone", 0.5)
                self.last = True
                return await super().step(message)

        player = make_player(renderer, lambda: Breaks(reward=earned), [say("hi"), say("hi")])
        episode = await run_episode(player, PLAIN, episode_id="e", seed=0)
        assert (episode.stop_reason, episode.error, len(episode.turns)) == (StopReason.SANDBOX_BROKEN, None, 2)
        assert (episode.reward, episode.solved) == (0.5, False)
        assert episode.metrics["sandbox_broken"] == 1.0

    async def test_an_episode_with_a_fault_is_not_solved(self, renderer: Renderer):
        class Faulty(Scene):
            solved_at = 0.25

        scene = Faulty(info=StepInfo(faults={"tool": "raised"}))
        episode = await run_episode(
            make_player(renderer, lambda: scene, [say("bye")]), PLAIN, episode_id="e", seed=0
        )
        assert (episode.reward, episode.solved) == (1.0, False)

    async def test_a_timeout_that_is_not_the_episodes_is_not_scored(self, renderer: Renderer):
        class Late(ScriptedEngine):
            async def generate(self, ids: Any, sampling: Sampling, *, session: str | None = None) -> Completion:
                raise TimeoutError("a bug of ours")

        scene = Scene()
        player = Player(Late(renderer, []), renderer, lambda: scene, EpisodeLimits(), Sampling())
        with pytest.raises(TimeoutError, match="a bug of ours"):
            await run_episode(player, PLAIN, episode_id="e", seed=0)
        assert scene.closed == 1

    async def test_a_bug_of_agentrl_is_raised_as_it_is_and_the_env_is_closed(self, renderer, monkeypatch):
        def buggy(self: Transcript, completion: Completion) -> Message:
            raise TypeError("a bug of ours")

        monkeypatch.setattr(Transcript, "complete", buggy)
        scene = Scene()
        player = make_player(renderer, lambda: scene, [say("bye")])
        with pytest.raises(TypeError, match="a bug of ours"):
            await run_episode(player, PLAIN, episode_id="e", seed=0)
        assert scene.closed == 1

    async def test_an_env_that_cannot_be_made(self, renderer: Renderer):
        def make() -> Env:
            raise OSError("no disk")

        player = make_player(renderer, make, [])
        episode = await run_episode(player, PLAIN, episode_id="e", seed=0)
        assert episode.reward is None
        assert (episode.error or "").startswith("InfraError: making the env: OSError: no disk\nTraceback")

    @pytest.mark.parametrize("number", [math.nan, "1", None])
    async def test_a_tool_envs_reward_that_is_no_number(self, renderer: Renderer, number: Any):
        class Odd(ToolEnv):
            """Odd."""

            def setup(self) -> str:
                return "Go."

            @reward
            def good(self) -> float:
                return 1.0

            @reward
            def odd(self) -> float:
                return number

        player = make_player(renderer, Odd, [say("x")])
        episode = await run_episode(player, PLAIN, episode_id="e", seed=0)
        assert (episode.error, episode.reward, episode.rewards) == (None, 1.0, {"good": 1.0, "odd": 0.0})
        assert repr(number) in episode.faults["odd"]

    async def test_a_completion_that_was_aborted(self, renderer: Renderer):
        class Aborts(ScriptedEngine):
            async def generate(self, ids, sampling, *, session=None):
                return replace(await super().generate(ids, sampling, session=session), finish="abort")

        scene = Scene()
        player = replace(make_player(renderer, lambda: scene, []), engine=Aborts(renderer, [say("hi")]))
        episode = await run_episode(player, PLAIN, episode_id="e", seed=0)
        assert (episode.error, scene.closed) == ("EngineError: the engine aborted the completion of turn 0", 1)

    async def test_an_engine_that_cannot_even_release_leaves_no_env_open(self, renderer: Renderer):
        class Lost(ScriptedEngine):
            error: Exception = EngineError("lost")

            async def release(self, session):
                raise self.error

        scene, engine = Scene(), Lost(renderer, [say("bye")] * 2)
        player = replace(make_player(renderer, lambda: scene, []), engine=engine)
        episode = await run_episode(player, PLAIN, episode_id="e", seed=0)
        assert (episode.reward, scene.closed) == (1.0, 1)
        engine.error = RuntimeError("a bug of ours")
        with pytest.raises(RuntimeError, match="a bug of ours"):
            await run_episode(player, PLAIN, episode_id="e", seed=0)
        assert scene.closed == 2

    @pytest.mark.parametrize(
        ("close", "said"),
        [
            ("for ever", r"Scene\.close: took longer than 0\.2 s"),
            (OSError("busy"), r"Scene\.close: OSError: busy"),
        ],
    )
    async def test_a_close_that_fails_or_hangs_is_told_and_loses_nothing(self, renderer: Renderer, close, said):
        player = make_player(renderer, lambda: Scene(close=close), [say("bye")], timeout_s=0.2)
        with pytest.warns(UserWarning, match=said):
            episode = await run_episode(player, PLAIN, episode_id="e", seed=0)
        assert (episode.error, episode.reward) == (None, 1.0)

    async def test_closing_outlasts_any_number_of_cancellations(self, renderer: Renderer):
        closing, closed = asyncio.Event(), []

        class Careful(Scene):
            async def close(self) -> None:
                closing.set()
                await asyncio.sleep(0.1)
                closed.append(True)

        player = make_player(renderer, lambda: Careful(step="for ever"), [say("x")])
        task = asyncio.ensure_future(run_episode(player, PLAIN, episode_id="e", seed=0))
        await asyncio.sleep(0.05)
        task.cancel()
        await closing.wait()
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.01)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert closed == [True]


async def test_tools_with_state_do_not_leak_between_episodes(renderer: Renderer):
    class Notes(ToolEnv):
        """Take notes."""

        def setup(self) -> str:
            self.notes: list[str] = []
            return "Write."

        @tool
        def write(self, text: str) -> int:
            """Write it down."""
            self.notes.append(text)
            return len(self.notes)

    script = [call("write", text="a"), call("write", text="b"), say("done")]
    player = make_player(renderer, Notes, script)
    episodes = await asyncio.gather(*[run_episode(player, PLAIN, episode_id=f"e{n}", seed=n) for n in range(8)])
    for episode in episodes:
        assert [r.result for t in episode.turns for r in t.calls] == ["1", "2"]


async def test_a_turn_keeps_its_rewards_by_name(renderer: Renderer):
    info = StepInfo(metrics={"reward/near": 0.5, "reward/odd\x1b": math.nan, "looked": 1.0})
    player = make_player(renderer, lambda: Scene(reward=0.5, info=info), [say("hi"), say("bye")])
    episode = await run_episode(player, PLAIN, episode_id="e0", seed=1)
    assert [(turn.reward, turn.rewards) for turn in episode.turns] == [(0.5, {"near": 0.5})] * 2
