"""Contexts that fill up: the episode goes on in a shorter branch, token by token what the policy saw."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl import ToolEnv, reward, tool
from agentrl.chat.template import Renderer
from agentrl.chat.token_check import TokenCheckBudget
from agentrl.chat.transcript import rows_of
from agentrl.config import RunConfig
from agentrl.config.compact import CompactConfig
from agentrl.errors import ConfigError, JudgeError
from agentrl.learner.pack import packed_size
from agentrl.models.tiny import make_tokenizer
from agentrl.rollout.compaction import DROPPED, INTRODUCTION, Compaction
from agentrl.rollout.episode import Player, TokenCheck, run_episode
from agentrl.rollout.limits import EpisodeLimits
from agentrl.run_folder.records import EpisodeRecord, decode, encode
from agentrl.testing.engine import ScriptedEngine
from agentrl.testing.policy import call, say
from agentrl.trainer.samples import episode_samples, segment_turns
from agentrl.types import Completion, Episode, Message, Sampling, StopReason, Task

SUMMARY = "pages 0 and 1 say 7"


class Book(ToolEnv):
    """Read the pages."""

    def setup(self) -> str:
        return "Read four pages, then answer."

    @tool
    def read(self, page: int) -> str:
        """Read a page."""
        return f"page {page}: " + "lorem ipsum " * 12 + "7"

    @reward(solved=True)
    def right(self, episode: Episode) -> bool:
        return episode.messages[-1].content == "28"


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    directory = tmp_path_factory.mktemp("tokenizer")
    text = '{"name": "read", "arguments": {"page": 1}} lorem ipsum Your summary of the work so far: pages say 7 '
    make_tokenizer(directory, [text] * 4, vocab=400, max_context=4096)
    return Renderer.from_directory(directory)


class Watched(ScriptedEngine):
    """Keeps the contexts that it was asked to continue."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.asked: list[tuple[int, ...]] = []

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, session: str | None = None) -> Completion:
        self.asked.append(tuple(ids))
        return await super().generate(ids, sampling, session=session)


def reading(summaries: Sequence[int], *lines: Message | str, pages: int = 4) -> list[Message | str]:
    """The script: pages in order, a summary before the turns in `summaries`, then the answer."""
    said: list[Message | str] = []
    waiting = list(lines)
    for page in range(pages):
        said += [waiting.pop(0)] if page in summaries else []
        said.append(call("read", page=page))
    said += [waiting.pop(0)] if pages in summaries else []
    return [*said, say("28")]


async def play(
    renderer: Renderer, script: Sequence[Message | str], context: int = 640, budget: int = 4000, **compact: Any
) -> tuple[Episode, Watched]:
    engine = Watched(renderer, script, tools=Book().tools, max_context=1000)
    asked = {} if "how" in compact else {"prompt": "Summarize."}
    config = CompactConfig(**({"at": 0.7, "context": context, "keep_turns": 1} | asked | compact))
    player = Player(
        engine,
        renderer,
        Book,
        EpisodeLimits(max_turns=9, max_tokens=60, token_budget=budget),
        Sampling(max_tokens=60, stop_ids=renderer.stop_ids),
        TokenCheck("strict", TokenCheckBudget(None)),
        Compaction(config, context, config.max_tokens or 60),
    )
    return await run_episode(player, Task("t"), episode_id="e", seed=1), engine


def check_exact(episode: Episode, engine: Watched) -> None:
    """Every context that the engine continued is a path of the tree, and each completion follows it."""
    paths = []
    for number, segment in enumerate(episode.segments):
        if segment.origin == "sampled":
            ids: tuple[int, ...] = ()
            place = segment.parent
            while place >= 0:
                ids = episode.segments[place].ids + ids
                place = episode.segments[place].parent
            paths.append(ids)
            assert episode.segments[number].logprobs
    assert set(paths) <= set(engine.asked)
    trained = sum(sum(row.loss_mask) for row in rows_of(episode.segments))
    assert trained == sum(len(s.ids) for s in episode.segments if s.origin == "sampled")


async def test_a_summary_replaces_the_turns_before_it(renderer: Renderer):
    found, engine = await play(renderer, reading([3], say(SUMMARY)))
    assert found.error is None
    assert found.solved is True
    assert found.stop_reason is StopReason.ANSWERED
    assert found.metrics["compact/times"] == 1.0
    assert found.metrics["compact/tokens_after"] < found.metrics["compact/tokens_before"]
    check_exact(found, engine)
    text = renderer.decode(engine.asked[4])
    assert INTRODUCTION.strip() + "\n" + SUMMARY in text
    assert "page 2:" in text, "one turn is kept"
    assert "page 0:" not in text
    assert len(found.turns) == 5, "a summary is no turn"
    rows = episode_samples(found)
    assert len(rows) == 3
    assert SUMMARY in renderer.decode(rows[1].ids)
    assert sum(map(sum, (row.loss_mask for row in rows))) == sum(
        len(s.ids) for s in found.segments if s.origin == "sampled"
    )


async def test_a_summary_that_says_what_the_next_turn_says_is_not_taken_for_it(renderer: Renderer):
    found, _ = await play(renderer, reading([3], say("28"), pages=3))
    sampled = [i for i, segment in enumerate(found.segments) if segment.origin == "sampled"]
    assert found.metrics["compact/times"] == 1.0
    read = decode(encode(EpisodeRecord(1, 0, found))).episode
    assert list(segment_turns(read)) == sampled
    assert list(segment_turns(read).values()) == [0, 1, 2, 2, 3]


@pytest.mark.parametrize("how", ["summary", "untrained", "in vain", "drop_tool_results"])
async def test_every_answer_is_observed_once_and_no_prompt_is(renderer: Renderer, how: str):
    if how == "in vain":
        found, _ = await play(
            renderer, [call("read", page=0), say("x " * 200), say("28")], at=0.45, max_tokens=130
        )
    elif how == "drop_tool_results":
        found, _ = await play(renderer, reading([]), how=how)
    else:
        found, _ = await play(renderer, reading([3], say(SUMMARY)), train=how == "summary")
    rows = rows_of(found.segments)
    seen = renderer.decode([i for row in rows for i, on in zip(row.ids, row.observed, strict=True) if on])
    pages = [seen.count(f"page {page}:") for page in range(4)]
    assert pages == ([1, 0, 0, 0] if how == "in vain" else [1, 1, 1, 1])
    assert "Summarize." not in seen
    assert DROPPED not in seen


async def test_a_summary_that_does_not_train_is_no_part_of_the_episode(renderer: Renderer):
    found, engine = await play(renderer, reading([3], say(SUMMARY)), train=False)
    assert found.solved is True
    rows = episode_samples(found)
    assert sum(s.origin == "sampled" for s in found.segments) == 5
    assert all(renderer.decode(row.ids).count(SUMMARY) <= 1 for row in rows)
    assert SUMMARY in renderer.decode(engine.asked[4])
    assert found.metrics["compact/times"] == 1.0


async def test_it_happens_again_and_keeps_the_task(renderer: Renderer):
    script = reading([3, 6], say("first"), say("second"), pages=6)
    found, engine = await play(renderer, script, keep_turns=0)
    assert found.error is None
    assert found.metrics["compact/times"] == 2.0
    text = renderer.decode(engine.asked[-1])
    assert "Read four pages" in text
    assert "second" in text
    assert "first" not in text, "the newer summary replaces the older one"
    check_exact(found, engine)


async def test_old_tool_results_are_dropped_without_asking(renderer: Renderer):
    found, engine = await play(renderer, reading([]), how="drop_tool_results")
    assert found.solved is True
    assert found.metrics["compact/times"] >= 1.0
    text = renderer.decode(engine.asked[-1])
    assert DROPPED in text
    assert "page 3: lorem" in text
    assert "page 0: lorem" not in text
    assert len(engine.asked) == 5
    check_exact(found, engine)


@pytest.mark.parametrize(
    ("line", "metric"),
    [(say(""), "compact/empty"), (say("7 " * 90), "compact/cut"), (call("read", page=9), "compact/empty")],
)
async def test_a_poor_summary_is_the_doing_of_the_policy(renderer: Renderer, line: Message, metric: str):
    found, engine = await play(renderer, reading([3], line), max_tokens=20 if line.content else 40)
    assert found.error is None
    assert found.metrics[metric] == 1.0
    assert found.metrics["compact/times"] == 1.0
    assert found.solved is True
    check_exact(found, engine)


async def test_nothing_gained_goes_on_in_the_same_branch(renderer: Renderer):
    """A summary that is longer than what it replaces."""
    found, _ = await play(renderer, [call("read", page=0), say("x " * 200), say("28")], at=0.45, max_tokens=130)
    assert found.error is None
    assert found.metrics["compact/in_vain"] >= 1.0
    assert "compact/times" not in found.metrics
    assert found.solved is True


async def test_the_budget_counts_every_branch(renderer: Renderer):
    found, _ = await play(renderer, reading([3], say("a")), budget=530)
    assert found.stop_reason is StopReason.TOKEN_BUDGET
    assert found.metrics["compact/in_vain"] == 1.0


async def test_own_function(renderer: Renderer, tmp_path: Path):
    engine = Watched(renderer, reading([]), tools=Book().tools, max_context=1000)
    config = CompactConfig(at=0.6, context=520, use="own:f")

    async def newest(messages: Sequence[Message]) -> list[Message]:
        return [*messages[:2], *messages[-2:]]

    def broken(messages: Sequence[Message]) -> object:
        return "text"

    async def without_a_model(messages: Sequence[Message]) -> list[Message]:
        raise JudgeError("no answer")

    def leaving(messages: Sequence[Message]) -> object:
        raise SystemExit("missing key")

    for function in (newest, broken, leaving, without_a_model):
        limits = EpisodeLimits(max_turns=9, max_tokens=60)
        sampling = Sampling(max_tokens=60, stop_ids=renderer.stop_ids)
        player = Player(engine, renderer, Book, limits, sampling, None, Compaction(config, 520, 60, function))
        found = await run_episode(player, Task("t"), episode_id=function.__name__, seed=1)
        if function is newest:
            assert found.solved is True
            assert found.metrics["compact/times"] >= 1.0
        elif function is without_a_model:
            assert found.error == "JudgeError: no answer"
        else:
            assert found.stop_reason is StopReason.FAULT
            said = (
                "must return a list of agentrl"
                if function is broken
                else "leaving raised SystemExit: missing key\n"
            )
            assert said in found.faults["step"]


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("left", [5, 60, 130])
async def test_a_summary_and_its_request_stay_within_the_budget(renderer: Renderer, train: bool, left: int):
    _, engine = await play(renderer, reading([3], say(SUMMARY)))
    budget = len(engine.asked[3]) + left  # a little more than the context before the first summary
    request = "Summarize. " * 12
    found, _ = await play(
        renderer, reading([3], say(SUMMARY)), budget=budget, prompt=request, max_tokens=20, train=train
    )
    assert found.error is None
    trained = max(stop for row in rows_of(found.segments) for _, _, stop in row.spans)
    assert trained <= budget
    assert packed_size(episode_samples(found)) <= budget
    asked = [m for m in found.messages if m.content == request]
    assert len(asked) == (train and left == 130), "what the policy was not asked is not in the episode"


async def test_an_opening_that_is_due_already_waits_for_a_turn_to_sum_up(renderer: Renderer):
    _, engine = await play(renderer, reading([3], say(SUMMARY)))
    opening = len(engine.asked[0])
    found, engine = await play(
        renderer, reading([1], say("a")), context=opening + 200, max_tokens=180, at=0.95, keep_turns=0
    )
    assert len(engine.asked[0]) == opening, "no summary before the first turn"
    assert found.metrics["compact/times"] >= 1.0
    assert found.turns[1].message.tool_calls[0].arguments == {"page": 1}


def settings(**rollout: Any) -> RunConfig:
    env = {"use": "agentrl.envs.calculator:Calculator"}
    return RunConfig.model_validate({"name": "r", "env": env, "model": {"path": "."}, "rollout": rollout})


@pytest.mark.parametrize(
    ("rollout", "text"),
    [
        ({"compact": {"at": 1.0}}, "less than 1"),
        ({"compact": {"at": 0.5, "context": 100, "max_tokens": 100}}, "does not fit into context"),
        ({"compact": {"how": "drop_tool_results", "train": False}}, "train"),
        ({"compact": {"use": "a:b", "keep_turns": 2}}, "keep_turns"),
        ({"compact": {}, "max_turns": 1}, r"compact has no effect with rollout\.max_turns 1:"),
        (
            {"compact": {"how": "drop_tool_results"}, "max_turns": 5},
            r"no effect with rollout\.max_turns 5 and rollout\.compact\.keep_turns 4",
        ),
    ],
)
def test_settings_without_sense_are_refused(rollout: dict[str, Any], text: str):
    with pytest.raises((ValueError, ConfigError), match=text):
        settings(**rollout)


def test_settings_that_cannot_have_an_effect_are_refused(renderer: Renderer):
    engine = ScriptedEngine(renderer, [], max_context=1000)
    with pytest.raises(ConfigError, match="begins at 800 tokens of context"):
        Compaction.of(settings(compact={}, token_budget=530), engine)
    with pytest.raises(ConfigError, match="context is 2000, more than the 1000 tokens"):
        Compaction.of(settings(compact={"context": 2000}), engine)
    for compact, longest in (({"context": 200}, 256), ({"max_tokens": 1000}, 1000)):
        with pytest.raises(ConfigError, match=f"a summary may have {longest} tokens .* do not fit into a context"):
            Compaction.of(settings(compact=compact), engine)
    settings(compact={"how": "drop_tool_results"}, max_turns=6)
    settings(compact={"use": "a:b"}, max_turns=1)
    assert Compaction.of(settings(), engine) is None
    made = Compaction.of(settings(compact={}), engine)
    assert made is not None
    assert (made.context, made.max_tokens) == (1000, 256)
