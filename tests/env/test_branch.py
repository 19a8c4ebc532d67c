"""`self.model`: the policy in conversations of its own, trained or not by choice."""

import asyncio
import json
import re
from typing import ClassVar

import pytest

from agentrl.chat.template import Renderer
from agentrl.chat.token_check import TokenCheckBudget
from agentrl.chat.transcript import rows_of
from agentrl.env import ToolEnv, reward, tool
from agentrl.learner.pack import packed_size
from agentrl.models.tiny import make_tokenizer
from agentrl.rollout.episode import Player, TokenCheck, run_episode
from agentrl.rollout.limits import EpisodeLimits
from agentrl.testing.engine import ScriptedEngine
from agentrl.testing.policy import call, say
from agentrl.trainer.samples import episode_samples
from agentrl.types import Message, Sampling, StopReason, Task


class Delegate(ToolEnv):
    """Ask the helper."""

    train = False

    async def setup(self) -> str:
        hint = await self.model.chat([Message("user", "Give a hint.")], train=self.train)
        return f"Hint: {hint.content}"

    @tool
    async def ask(self, question: str) -> str:
        """Ask the helper."""
        answer = await self.model.chat([Message("user", question)], train=self.train)
        return str(answer.content)

    @reward
    def solved(self) -> bool:
        return True


class TrainedDelegate(Delegate):
    train = True


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(directory, [json.dumps(list(Delegate().tools))] * 4, vocab=400, max_context=4096)
    return Renderer.from_directory(directory)


class Engine(ScriptedEngine):
    """The main session has its script; every branch gets one answer."""

    async def generate(self, ids, sampling, *, session=None):
        if "/branch" in (session or ""):
            self._turns[session] = 10
        return await super().generate(ids, sampling, session=session)


def script(turn: int) -> Message:
    return [call("ask", question="How?"), say("Done.")][turn] if turn < 2 else say("like this")


@pytest.mark.parametrize("env", [Delegate, TrainedDelegate])
async def test_branches_answer_and_train_by_choice(renderer, env):
    engine = Engine(renderer, script, tools=env().tools)
    player = Player(engine, renderer, env, EpisodeLimits(), Sampling())
    episode = await run_episode(player, Task("t"), episode_id="e", seed=0)
    assert episode.error is None
    assert (episode.reward, episode.stop_reason) == (1.0, StopReason.ANSWERED)
    assert episode.turns[0].observation[0].content == "like this"
    assert sorted(engine.released) == ["e", "e/branch0", "e/branch1"]
    rows = [row for row in rows_of(episode.segments) if any(row.loss_mask)]
    texts = [renderer.decode([i for i, m in zip(row.ids, row.loss_mask, strict=True) if m]) for row in rows]
    main = [text for text in texts if "Done." in text]
    assert len(main) == 1
    assert "Hint: like this" in renderer.decode(
        next(r for r, t in zip(rows, texts, strict=True) if t == main[0]).ids
    )
    assert len(rows) == (3 if env.train else 1)
    assert [text for text in texts if text.startswith("like this")] == (
        ["like this<|im_end|>"] * 2 if env.train else []
    )


@pytest.mark.parametrize("train", [True, False])
async def test_a_conversation_of_several_turns_keeps_its_ids_and_trains_once(renderer, train):
    prompts: list[tuple[int, ...]] = []

    class Records(Engine):
        async def generate(self, ids, sampling, *, session=None):
            if "/branch" in (session or ""):
                prompts.append(tuple(ids))
            completion = await super().generate(ids, sampling, session=session)
            if "/branch" in (session or ""):
                prompts[-1] += completion.ids
            return completion

    class Talks(Delegate):
        async def setup(self) -> str:
            said = [Message("user", "Give a hint.")]
            for more in ("More.", "And more."):
                said += [await self.model.chat(said, train=train), Message("user", more)]
            await self.model.chat(said, train=train)
            return "Go."

    player = Player(
        Records(renderer, lambda turn: say("like this" if turn >= 10 else "Done.")),
        renderer,
        Talks,
        EpisodeLimits(),
        Sampling(),
    )
    episode = await run_episode(player, Task("t"), episode_id="e", seed=0)
    assert episode.error is None
    first, second, third = prompts
    assert (second[: len(first)], third[: len(second)]) == (first, second)
    rows = [row for row in rows_of(episode.segments) if any(row.loss_mask)]
    texts = [renderer.decode([i for i, m in zip(r.ids, r.loss_mask, strict=True) if m]) for r in rows]
    assert sorted(text.count("like this") for text in texts) == ([0, 3] if train else [0])


class Simulated(Delegate):
    """Ask the helper, who is given the question twenty times; the user listens in."""

    @tool
    async def ask(self, question: str) -> str:
        """Ask the helper."""
        return await super().ask(question * 20)

    async def respond(self, message: Message) -> str | None:
        return await super().ask(str(message.content) * 20)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("where", ["tool", "respond"])
async def test_a_conversation_that_the_policy_makes_too_long_is_not_replayed(renderer, where: str, train: bool):
    env = type("Env", (Simulated,), {"train": train})
    long = "a b c d " * 180
    first = call("ask", question=long) if where == "tool" else say(long)
    turns = [first, say("Done."), *[say("Hm.")] * 9]
    engine = Engine(renderer, turns.__getitem__, tools=env().tools, max_context=4096)
    limits = EpisodeLimits(max_tokens=3000, token_budget=8000)
    player = Player(engine, renderer, env, limits, Sampling())
    episode = await run_episode(player, Task("t"), episode_id="e", seed=0)
    assert episode.error is None
    if where == "tool":
        (record,) = episode.turns[0].calls
        assert (record.outcome, episode.reward) == ("tool_exception", 1.0)
        assert "ValueError: self.model: " in record.result
    else:
        assert (episode.stop_reason, episode.reward) == (StopReason.FAULT, 0.0)
        assert "tokens leave no room in 4096" in episode.faults["step"]


class Debate(ToolEnv):
    """Ask the helper three times at once."""

    words = 1
    train = True
    failed: ClassVar[list[str]] = []

    async def setup(self) -> str:
        said = [Message("user", "Why? " * self.words)]
        asked = [self.model.chat([*said, Message("user", str(n))], train=self.train) for n in range(3)]
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answer, Exception):
                self.failed.append(str(answer))
        return "Go."


def debate(renderer, env, *, budget: int, check: TokenCheck | None = None) -> Player:
    engine = Engine(renderer, lambda turn: say("like this" if turn >= 10 else "Done."), max_context=4096)
    return Player(engine, renderer, env, EpisodeLimits(token_budget=budget), Sampling(), check)


@pytest.mark.parametrize("train", [True, False])
async def test_trained_conversations_share_the_token_budget_of_the_episode(renderer, train):
    env = type("Env", (Debate,), {"words": 100, "train": train, "failed": []})
    whole = await run_episode(debate(renderer, env, budget=4000), Task("t"), episode_id="e", seed=0)
    assert (whole.stop_reason, env.failed) == (StopReason.ANSWERED, [])
    size = packed_size(episode_samples(whole)) if train else 300
    tight = await run_episode(debate(renderer, env, budget=size - 100), Task("t"), episode_id="e", seed=0)
    if not train:
        assert (tight.segments, env.failed) == (whole.segments, []), "these are no part of the episode"
        return
    assert packed_size(episode_samples(tight)) <= size - 100
    assert len(env.failed) > 0
    assert "(rollout.token_budget)" in env.failed[0]


async def test_conversations_at_once_are_not_cut_by_what_others_might_have_said(renderer):
    env = type("Env", (Debate,), {"words": 100, "train": True, "failed": []})
    whole = await run_episode(debate(renderer, env, budget=4000), Task("t"), episode_id="e", seed=0)
    size = sum(len(segment.ids) for segment in whole.segments)
    close = await run_episode(debate(renderer, env, budget=size + 1), Task("t"), episode_id="e", seed=0)
    assert env.failed == []
    said = {segment.ids for segment in whole.segments if segment.origin == "sampled"}
    assert {segment.ids for segment in close.segments if segment.origin == "sampled"} == said


async def test_every_trained_conversation_has_its_tokens_checked(renderer):
    counted = TokenCheckBudget()
    check = TokenCheck("strict", counted)
    episode = await run_episode(
        debate(renderer, Debate, budget=4000, check=check), Task("t"), episode_id="e", seed=0
    )
    assert (counted.checked, episode.metrics["tokens/identical"]) == (4, 4.0)
    untrained = type("Env", (Debate,), {"train": False})
    player = debate(renderer, untrained, budget=4000, check=check)
    await run_episode(player, Task("t"), episode_id="e", seed=0)
    assert counted.checked == 5


@pytest.mark.parametrize(
    ("messages", "tools", "said"),
    [
        ("Hello", (), "takes a list of Message with text, such as .*, got 'Hello'"),
        ([{"role": "user", "content": "Hello"}], (), "takes a list of Message"),
        (Message("user", "Hello"), (), "takes a list of Message"),
        ([Message("user", None)], (), "takes a list of Message with text"),
        ([Message("user", "Hello")], ["ask"], r"takes tools as a list of schemas, .*, got \['ask'\]"),
        ([Message("user", "Hello")], [{"name": "ask"}], "takes tools as a list of schemas"),
        ([Message("user", "Hello")], Delegate.ask, "takes tools as a list of schemas"),
    ],
)
async def test_a_conversation_of_something_else_is_one_clear_error(renderer, messages, tools, said):
    class Mistaken(ToolEnv):
        """Ask the helper."""

        async def setup(self) -> str:
            await self.model.chat(messages, tools=tools)
            return "Go."

    player = debate(renderer, Mistaken, budget=4000)
    episode = await run_episode(player, Task("t"), episode_id="e", seed=0)
    assert re.search(f"TypeError: self.model.chat {said}", episode.error.splitlines()[0])
