"""The examples of docs/environments.md for simulated users and demonstrations do what the page says."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentrl.config.run import RunConfig
from agentrl.env import ToolEnv, ToolSettings
from agentrl.env.judge import Judge
from agentrl.errors import ConfigError, EnvError, JudgeError
from agentrl.rollout.content import load_content
from agentrl.testing.env import check_env
from agentrl.testing.policy import ScriptedPolicy, call, play, say
from agentrl.types import Message, StopReason, Task
from tests.env.judge_server import judge_server

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def block(defines: str) -> str:
    """The one example of the page that defines this class."""
    (found,) = [text for text in BLOCKS if f"class {defines}(" in text]
    return found


@pytest.fixture
def server():
    with judge_server("The one about Emma.", "DONE") as server:
        yield server


def bookshop(port: int) -> tuple[type[ToolEnv], Judge]:
    text = block("Bookshop")
    assert text.count("http://127.0.0.1:8000/v1") == 1
    scope: dict[str, object] = {}
    exec(text.replace("127.0.0.1:8000", f"127.0.0.1:{port}"), scope)
    made = SimpleNamespace(**scope)
    made.customer.retries = 0
    return made.Bookshop, made.customer


async def test_a_user_behind_an_endpoint_talks_until_it_is_served(server):
    env_class, customer = bookshop(server.server_port)
    script = [say("Which book?"), call("order", title="Emma"), say("It is ordered.")]
    episode = await play(env_class(), Task("t", {"title": "Emma"}), ScriptedPolicy(script))
    assert (episode.rewards, episode.solved, episode.stop_reason) == ({"solved": 1.0}, True, StopReason.ANSWERED)
    assert [m.content for m in episode.messages if m.role == "user"] == [
        "Hello, I am looking for a book.",
        "The one about Emma.",
    ]
    first, second = (body["messages"] for body in server.seen)
    assert [m["role"] for m in first] == ["system", "user", "assistant", "user"]
    assert "'Emma'" in first[0]["content"]
    assert [m["content"] for m in second[3:]] == ["Which book?", "The one about Emma.", "It is ordered."]
    assert customer.asked == 2


async def test_an_endpoint_that_is_down_or_silent_is_infrastructure_and_one_that_refuses_is_not(server):
    env_class, _ = bookshop(server.server_port)
    task, ask = Task("t", {"title": "Emma"}), Message("assistant", "Which book?")
    env = env_class()
    await env.reset(task)
    server.plan = [(500, {"error": "out of order"})]
    with pytest.raises(JudgeError, match="500"):
        await env.step(ask)
    server.plan = [(200, "Emma."), (400, {"error": "this text is refused"}), (200, "OK")]
    await env.step(ask)
    with pytest.raises(EnvError, match=r"Bookshop\.respond: JudgeAnswerError: .*Error code: 400"):
        await env.step(ask)
    await env.close()

    held = asyncio.Event()

    async def never(reader, writer) -> None:
        await held.wait()
        writer.close()

    async with await asyncio.start_server(never, "127.0.0.1", 0) as silent:
        env_class, _ = bookshop(silent.sockets[0].getsockname()[1])
        env = env_class()
        env.settings = ToolSettings(setup_timeout_s=0.5)
        await env.reset(task)
        with pytest.raises(
            JudgeError, match=r"Bookshop\.respond: no answer of judge user-model at .* within 0.5 s"
        ):
            await env.step(ask)
        held.set()
        await env.close()


async def test_a_respond_that_runs_out_of_time_by_itself_is_a_fault_of_the_episode():
    class Slow(ToolEnv):
        settings = ToolSettings(setup_timeout_s=0.1)

        def setup(self) -> str:
            return "go"

        async def respond(self, message: Message) -> str:
            await asyncio.sleep(60)
            return "never"

    env = Slow()
    await env.reset(Task("t"))
    with pytest.raises(EnvError, match=r"Slow\.respond: CallTimeout: no result after 0.1 s"):
        await env.step(Message("assistant", "Well?"))
    await env.close()


def ledger(tmp_path: Path) -> Path:
    file = tmp_path / "ledger.py"
    file.write_text("\n".join(block(name) for name in ("Ledger", "Endless", "Shown", "Written")))
    return file


def demonstrated(file: Path, name: str, **warmup: object) -> list[list[Message]]:
    config = RunConfig.model_validate(
        {"env": f"{file}:{name}", "model": {"path": "m"}, "warmup": {"num": 12, **warmup}}
    )
    return [list(messages) for messages in load_content(config).demonstrations]


def written(messages: list[Message]) -> list[tuple[object, ...]]:
    return [(m.role, m.content, [(c.name, dict(c.arguments)) for c in m.tool_calls]) for m in messages]


async def test_an_oracle_solves_the_tasks_and_its_episodes_are_the_demonstrations(tmp_path):
    file = ledger(tmp_path)
    config = RunConfig.model_validate({"env": f"{file}:Shown", "model": {"path": "m"}, "warmup": {"num": 12}})
    content = load_content(config)
    tasks = [content.train_tasks[i] for i in range(12)]
    await check_env(type(content.make_env()), tasks[:4], reward_range=(-1, 1))
    assert len(content.demonstrations) == 12
    for messages, task in zip(content.demonstrations, tasks, strict=True):
        assert messages[1].content == f"The balance is {task.row['start']}. Make it {task.row['target']}."
        assert [m.role for m in messages] == ["system", "user", "assistant", "tool", "assistant"]
        assert messages[3].content == f"balance={task.row['target']}"
    with pytest.raises(
        ConfigError, match=r"warmup.options has no effect: the oracle of .* writes the demonstrations"
    ):
        demonstrated(file, "Shown", options={"wrong": 0.2})
    with pytest.raises(ConfigError, match="does not generate demonstrations"):
        demonstrated(file, "Endless")


def test_the_example_tasks_do_not_repeat_in_the_held_out_split(tmp_path):
    config = RunConfig.model_validate({"env": f"{ledger(tmp_path)}:Shown", "model": {"path": "m"}})
    shown = type(load_content(config).make_env())
    train, held_out = (
        {tuple(shown.tasks(split)[n].row.values()) for n in range(2000)} for split in ("train", "held_out")
    )
    assert len(train) > 1990
    assert len(train & held_out) <= 2


def asked(messages: list[Message]) -> list[int]:
    """The numbers in the question of a ledger."""
    return [int(number) for number in re.findall(r"\d+", str(messages[1].content))]


async def test_written_demonstrations_read_as_the_env_would_write_them(tmp_path):
    file = ledger(tmp_path)
    right = demonstrated(file, "Written")
    assert len(right) == 12
    env = load_content(RunConfig.model_validate({"env": f"{file}:Written", "model": {"path": "m"}})).make_env()
    for messages in right:
        task = Task("t", dict(zip(("start", "target"), asked(messages), strict=True)))
        script = [m for m in messages if m.role == "assistant"]
        episode = await play(env, task, ScriptedPolicy(script))
        assert written(list(episode.messages))[: len(messages)] == written(messages)
        assert episode.rewards["solved"] == 1.0
    off = demonstrated(file, "Written", options={"wrong": 1.0})
    assert all(m[3].content == f"balance={asked(m)[1] + 1}" for m in off)
    with pytest.raises(ConfigError, match=r"demonstrations with warmup.options .*unexpected keyword"):
        demonstrated(file, "Written", options={"wrongs": 1.0})
