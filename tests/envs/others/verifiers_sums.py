"""A taskset of verifiers with a tool server. Run by a Python with verifiers, it prints verifiers' own rewards."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumsState(vf.State):
    sums: int = 0


class AddToolset(vf.Toolset[vf.SharedToolsetConfig, SumsState]):
    TOOL_PREFIX = "calc"

    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        self.state.sums += 1
        return "too large" if a > 40 else str(a + b)


class SumsData(vf.TaskData):
    answer: int


class SumsTask(vf.Task[SumsData, SumsState]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        if trace.last_reply == "crash":
            raise KeyError("no ruler")
        if trace.last_reply in ("exit", "bolt"):
            raise {"exit": SystemExit, "bolt": BaseException}[trace.last_reply]("the end")
        return float(trace.last_reply.strip().split(" ")[-1].rstrip(".") == str(self.data.answer))

    @vf.reward(weight=0.25)
    async def closeness(self, trace: vf.Trace) -> dict[str, float]:
        used = trace.state.sums / 10
        return {"digits": float(trace.last_reply.isdigit()), "turns": trace.num_turns / 10, "sums": used}

    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 5


class SumsConfig(vf.TasksetConfig):
    num_tasks: int = 70
    tooled: bool = False
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    @classmethod
    def toolsets(cls, config: SumsConfig) -> list[vf.Toolset]:
        return [AddToolset(config.tools)] if config.tooled else []

    def load(self) -> list[SumsTask]:
        return [
            SumsTask(
                SumsData(
                    prompt=f"What is {i} + {3 * i % 7}?",
                    system_prompt="Answer.",
                    answer=i + 3 * i % 7,
                    id=f"sum-{i}",
                ),
                self.config.task,
            )
            for i in range(self.config.num_tasks)
        ]


def said(kind: str, question: str, turn: int, tools: bool) -> tuple[str, dict[str, int]]:
    """What a policy says at a turn: a text, or a call's arguments."""
    a, b = (int(w) for w in question.removeprefix("What is ").removesuffix("?").split(" + "))
    if kind == "oracle":
        return ("", {"a": a, "b": b}) if tools and turn == 0 and a < 41 else (str(a + b), {})
    if kind == "random":
        pick = (a * 7919 + b * 104729 + turn * 31) % 11
        if tools and pick < 8 and turn < 6:
            return "", {"a": pick * 9, "b": turn} if pick else {"c": 1}
        return str(pick * 3), {}
    return ("thinking", {"a": 45, "b": 1}) if tools and turn < 2 else (f"I think it is {a + b}.", {})


KINDS = ("oracle", "random", "scripted")


async def own_rewards(num_tasks: int) -> dict[str, dict[str, dict[str, float]]]:
    """The rewards of verifiers' own episodes by policy and task; the model is a scripted server."""
    from aiohttp import web
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        question = next(m["content"] for m in body["messages"] if m["role"] == "user")
        turn = sum(m["role"] == "assistant" for m in body["messages"])
        text, arguments = said(body["model"], question, turn, True)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if arguments:
            function = {"name": "calc_add", "arguments": json.dumps(arguments)}
            message["tool_calls"] = [{"id": f"call_{turn}_0", "type": "function", "function": function}]
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if arguments else "stop"}
        answer = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        return web.json_response(answer)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    agent = {"harness": {"id": "agentrl_chat"}, "runtime": {"type": "subprocess"}}
    taskset = {"id": "verifiers_sums", "tooled": True, "num_tasks": num_tasks}
    env = load_environment(resolve_env_config({"taskset": taskset, "agent": agent}))
    client = vf.EvalClientConfig(base_url=f"http://127.0.0.1:{runner.addresses[0][1]}/v1", api_key_var="NO_KEY")
    found: dict[str, dict[str, dict[str, float]]] = {kind: {} for kind in KINDS}
    async with env.serving():
        for kind in KINDS:
            for task in env.taskset:
                episode = await env.run_episode(task, vf.ModelContext(model=kind, client=client))
                assert episode.ok, episode.errors
                rewards = episode.traces[0].rewards
                found[kind][str(task.data.id)] = {name: reward.value for name, reward in rewards.items()}
    return found


def main() -> None:
    """A tool server if verifiers starts one; else print its rewards: `verifiers_sums.py PLAYERS NUM_TASKS`."""
    if "VF_CONFIG" in os.environ:
        AddToolset.run()
        return
    here, players = os.path.dirname(os.path.abspath(__file__)), sys.argv[1]
    sys.path[:0] = [here, players]
    os.environ["PYTHONPATH"] = here
    sys.stdout.write(json.dumps(asyncio.run(own_rewards(int(sys.argv[2])))))


if __name__ == "__main__":
    main()
