"""Inspect tasks, played by a Python that has inspect-ai, against Inspect's own evaluation."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl.env.env import PolicyAccess
from agentrl.env.load import load_env
from agentrl.env.play import Policy, ScriptedPolicy, call, play, say
from agentrl.envs.others.outside import Player
from agentrl.errors import ConfigError, InfraError
from agentrl.testing import check_env
from agentrl.types import Message

PYTHON = Path(os.environ.get("AGENTRL_INSPECT_PYTHON", f"{sys.prefix}/inspect/bin/python"))
FILE = Path(__file__).parent / "inspect_tasks.py"
needs_inspect = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"no Python with inspect-ai at {PYTHON}: make {PYTHON.parents[1]}/.done"
)
NUMBERS: Mapping[object, float] = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}


def inspect_task(name: str, **options: Any) -> Any:
    """The class for `inspect:FILE@NAME`, loaded as a run does."""
    return load_env(f"inspect:{FILE}@{name}", {"python": str(PYTHON), "held_out": "all", **options})


def policy(kind: str, tools: bool) -> Policy:
    """The policy of `inspect_tasks.said`."""

    def speak(messages: Sequence[Message]) -> Message:
        question = next(str(m.content) for m in messages if m.role == "user")
        text, arguments = _said()(kind, question, sum(m.role == "assistant" for m in messages), tools)
        if not arguments:
            return say(text)
        asked = call("add", **arguments)
        return Message("assistant", text, asked.tool_calls)

    return speak


def _said() -> Any:
    """`said`, without importing what its module imports."""
    source = FILE.read_text().split("def said")[1].split("@modelapi")[0]
    found: dict[str, Any] = {}
    exec("def said" + source, found)
    return found["said"]


@pytest.fixture(scope="module", name="own_scores")
def inspects_own_scores() -> dict[str, dict[str, Any]]:
    return own_scores()


def own_scores() -> dict[str, dict[str, Any]]:
    """What evaluations by Inspect alone say, by task and policy, and by sample."""
    done = subprocess.run([PYTHON, FILE], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def flat(scores: Mapping[str, Any]) -> dict[str, float]:
    """Inspect's scores as our parts."""
    parts = {}
    for name, value in scores.items():
        items = {f"{name}/{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
        parts |= {k: NUMBERS[v] if isinstance(v, str) else float(v) for k, v in items.items()}
    return parts


@needs_inspect
@pytest.mark.slow
@pytest.mark.parametrize("name", ["sums", "tools"])
@pytest.mark.parametrize("kind", ["oracle", "random", "scripted"])
async def test_rewards_equal_those_of_an_evaluation_by_inspect(
    name: str, kind: str, own_scores: dict[str, dict[str, Any]]
) -> None:
    env = inspect_task(name)
    episodes = await asyncio.gather(*[play(env(), t, policy(kind, name == "tools")) for t in env.tasks()])
    own = own_scores[f"{name}/{kind}"]
    assert len(own) == len(episodes) == 50
    assert {e.task.id: dict(e.rewards) for e in episodes} == {i: flat(scores) for i, scores in own.items()}
    if kind == "oracle":
        assert all(e.rewards["match"] == 1.0 for e in episodes)


@needs_inspect
async def test_check_env_passes_and_tools_are_those_of_the_task() -> None:
    env = inspect_task("tools", args={"num": 10}, scorers=["match"], held_out="fifth")
    assert len(env.tasks("train")) == 8
    assert [t.id for t in env.tasks("held_out")] == ["sum-4", "sum-9"]
    await check_env(env, env.tasks("train"))
    played = env()
    await played.reset(env.tasks("train")[0])
    assert [t["function"]["name"] for t in played.tools] == ["add"]
    await played.close()


@needs_inspect
async def test_an_episode_that_is_cut_off_is_scored_as_it_stands() -> None:
    env = inspect_task("tools", scorers=["closeness"])
    asking = ScriptedPolicy([call("add", a=1, b=1)] * 9)
    episode = await play(env(), env.tasks()[0], asking, max_turns=3)
    assert episode.rewards["closeness/tools"] == pytest.approx(0.3)
    assert episode.rewards["closeness/right"] == 0.0


@needs_inspect
async def test_mistakes_are_observations_and_a_task_that_raises_is_a_fault() -> None:
    env = inspect_task("tools")
    script = [call("sub", a=1), call("add", a="x", b=1), Message("assistant", parse_errors=("not JSON",)), "0"]
    episode = await play(env(), env.tasks()[0], ScriptedPolicy(script))
    said = [str(t.observation[-1].content) for t in episode.turns if t.observation]
    assert ["sub" in said[0], "Error" in said[1], "not JSON" in said[2]] == [True] * 3
    assert (episode.metrics["parse_error"], episode.rewards["match"]) == (1.0, 1.0)
    with pytest.raises(RuntimeError, match="the abacus fell down"):
        await play(env(), env.tasks()[0], ScriptedPolicy([call("add", a=-1, b=1)]))
    unscored = inspect_task("unscored")
    with pytest.raises(RuntimeError, match="no ruler"):
        await play(unscored(), unscored.tasks()[0], ScriptedPolicy(["1"]))


@needs_inspect
async def test_a_program_that_a_tool_starts_does_not_read_what_is_sent_to_the_player() -> None:
    env = inspect_task("shells")
    reads = [call("shell", command="read line; echo got $line")] * 3
    others = [call("shell", command="echo hi")] * 3
    scripts = [[*reads, "1"], [*others, "1"], [*reads, "1"], [*others, "1"]]
    episodes = await asyncio.gather(
        *[play(env(), t, ScriptedPolicy(script)) for t, script in zip(env.tasks(), scripts, strict=True)]
    )
    said = [[str(m.content).strip() for t in e.turns for m in t.observation] for e in episodes]
    assert said == [["got"] * 3, ["hi"] * 3] * 2
    assert [e.reward for e in episodes] == [1.0] * 4


@needs_inspect
async def test_whatever_a_scorer_or_tool_raises_is_a_fault_of_its_episode_only() -> None:
    env = inspect_task("shells")
    other = env()
    await other.reset(env.tasks()[0])
    player = env.player()
    for said, fault in (("exit", "SystemExit"), ("interrupt", "KeyboardInterrupt"), ("bolt", "Bolt")):
        with pytest.raises(RuntimeError, match=f"{fault}: the end"):
            await play(env(), env.tasks()[1], ScriptedPolicy([said]))
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        await play(env(), env.tasks()[1], ScriptedPolicy([call("shell", command="exit")]))
    with pytest.raises(RuntimeError, match="the scorer odd returned no score"):
        await play(env(), env.tasks()[1], ScriptedPolicy(["nothing"]))
    await other.step(say("1"))
    assert await other.score(None) == {"odd": 1.0}
    assert env.player() is player
    await other.close()


class Grader:
    """The policy as its own grader."""

    async def chat(self, messages: Sequence[Message], **_: Any) -> Message:
        assert "[Criterion]: 0" in str(messages[-1].content)
        return say("It is right. GRADE: C")


@needs_inspect
async def test_a_request_outside_the_conversation_asks_the_policy_separately() -> None:
    env = inspect_task("graded")
    alone = env()
    await alone.reset(env.tasks()[0])
    with pytest.raises(InfraError, match="its own grader"):
        await alone.step(say("0"))
    await alone.close()
    played = env()
    played.bind(PolicyAccess(model=Grader()))
    await played.reset(env.tasks()[0])
    await played.step(say("0"))
    assert await played.score(None) == {"model_graded_qa": 1.0}
    await played.close()


@needs_inspect
async def test_a_lost_player_is_infrastructure_and_the_next_episode_gets_a_new_one() -> None:
    env = inspect_task("sums", args={})
    played = env()
    await played.reset(env.tasks()[0])
    env.player().stop()
    with pytest.raises(InfraError, match="its program ended"):
        await played.step(say("0"))
    played = await asyncio.gather(*[play(env(), env.tasks()[0], ScriptedPolicy(["0"])) for _ in range(4)])
    assert [episode.reward for episode in played] == [1.0] * 4


@needs_inspect
async def test_a_lost_player_is_started_again_once_however_many_episodes_wait() -> None:
    env = inspect_task("sums", args={})
    env.player().stop()
    assert len(set(await asyncio.gather(*[asyncio.to_thread(env.player) for _ in range(4)]))) == 1


@needs_inspect
@pytest.mark.parametrize(
    ("rest", "options", "said"),
    [
        ("nowhere.py@x", {}, "no such file: nowhere.py"),
        (f"{FILE}", {}, "write FILE@TASK: the tasks .* sums, tools, graded, unscored, scorerless, shells, twins"),
        (f"{FILE}@missing", {}, "missing"),
        (f"{FILE}@tools", {"args": {"size": 3}}, "size"),
        (f"{FILE}@scorerless", {}, "scorerless has no scorer"),
        (f"{FILE}@twins", {}, "samples 1 and 2 have the same id '1'"),
        (f"{FILE}@twins", {"args": {"first": "2", "second": None}}, "samples 1 and 2 have the same id '2'"),
        (f"{FILE}@sums", {"held_out": "none"}, "use fifth or all"),
        (f"{FILE}@sums", {"python": "/nowhere/python"}, "cannot run '/nowhere/python'"),
        (f"{FILE}@sums", {"python": sys.executable}, "needs inspect_ai, which .* pip install 'inspect-ai"),
    ],
)
def test_a_wrong_name_or_option_is_one_line(rest: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as found:
        load_env(f"inspect:{rest}", {"python": str(PYTHON), **options})
    assert "\n" not in str(found.value)


def test_a_player_that_is_stopped_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    script = tmp_path / "player.py"
    script.write_text('import sys\nprint(\'{"ready": {"ids": []}}\', flush=True)\nsys.stdin.read()\n')
    player = Player(sys.executable, str(script), "", "none")
    assert len(list(tmp_path.glob("agentrl-player-*"))) == 1
    player.stop()
    assert not list(tmp_path.glob("agentrl-player-*"))
