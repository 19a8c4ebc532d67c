"""An environment of agentrl as a taskset of verifiers, written by `agentrl env package --as verifiers`.

`agentrl env serve` plays the environment, in the Python that has agentrl; this module needs only verifiers. The
harness sends each message of the model to the server, which answers with tool results and messages of the user.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import json
import os
import re
import subprocess
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import verifiers.v1 as vf

__all__ = ["ServedEnv", "ServedHarness", "ServedTaskset"]

SETTINGS: dict[str, Any] = json.loads(Path(__file__).with_name("served.json").read_text())
"""What is served: `python`, `target`, `options` and `folder` of the command, or `url`; and `name`."""
OPENED_AT_ONCE = 16
FREE_SESSION_S = 600.0
"""How long an episode waits for a free session of the server."""


class ServedState(vf.State):  # type: ignore[misc, unused-ignore]
    """What the server says at the end of an episode."""

    rewards: dict[str, float] | None = None
    solved: bool | None = None
    stop_reason: str = ""


class ServedData(vf.TaskData):  # type: ignore[misc, unused-ignore]
    """The position of a task."""

    split: str
    index: int


class ServedConfig(vf.TasksetConfig):  # type: ignore[misc, unused-ignore]
    """Settings of the taskset: `--env.taskset.split test`."""

    split: str = "train"
    """`train`, or `test` for the held-out tasks."""
    num_tasks: int = 1000
    """The first tasks of the split."""
    url: str = ""
    """A running `agentrl env serve`; by default $AGENTRL_ENV_URL, else one is started."""
    python: str = ""
    """The Python that has agentrl; by default $AGENTRL_PYTHON, else the one that wrote this package."""


class ServedTask(vf.Task[ServedData, ServedState]):  # type: ignore[misc, unused-ignore]
    """An episode on the server; the rewards are those of the environment."""

    url = ""
    """The server, if the taskset has started or found one."""

    @property
    def key(self) -> str:
        """A name that survives changes of the prompt."""
        return f"{SETTINGS['name']}/{self.data.split}/{self.data.index}"

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        """Name the server of the episode. Raises RuntimeError if another harness is to play it."""
        harness = trace.agent.config.harness.id if trace.agent else ""
        if _module_name(harness) != _module_name(SETTINGS["name"]):
            raise RuntimeError(
                f"{SETTINGS['name']} is played by the harness of its own package, not by {harness!r}: "
                "remove --env.agent.harness.id"
            )
        _sessions[trace.id] = Session(self.url or await asyncio.to_thread(server_of, "", ""))

    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        """Have an episode that was cut off scored as it stands."""
        if trace.state.rewards is not None:
            return
        session = _sessions[trace.id]
        session.record(await session.ask("step", {"type": "finish"}), trace.state)

    @vf.reward  # type: ignore[untyped-decorator, unused-ignore]
    async def rewards(self, trace: vf.Trace) -> dict[str, float]:
        """The weighted rewards by name."""
        return dict(trace.state.rewards or {})

    @vf.metric  # type: ignore[untyped-decorator, unused-ignore]
    async def outcome(self, trace: vf.Trace) -> dict[str, float]:
        """Whether the task was solved, if the environment says so."""
        return {} if trace.state.solved is None else {"solved": float(trace.state.solved)}


class ServedTaskset(vf.Taskset[ServedTask, ServedConfig]):  # type: ignore[misc, unused-ignore]
    """The tasks of one split."""

    def load(self) -> Iterator[ServedTask]:
        """Open each task once for its prompt, a few at a time and only as far as tasks are taken."""
        url = server_of(self.config.url, self.config.python)
        split, skipped = self.config.split, None
        for at in range(0, self.config.num_tasks, OPENED_AT_ONCE):
            indices = range(at, min(at + OPENED_AT_ONCE, self.config.num_tasks))
            with ThreadPoolExecutor(1) as apart:  # there may be a running event loop
                opened = apart.submit(asyncio.run, openings(url, split, indices)).result()
            for index, messages in zip(indices, opened, strict=True):
                if messages is None:
                    return
                if isinstance(messages, vf.SandboxError):
                    skipped = f"{split}-{index} cannot be set up: {messages}"
                    warnings.warn(f"{SETTINGS['name']}: task {skipped}; it is left out", stacklevel=2)
                    continue
                yield self._task(index, messages, url)
            if at == 0 and skipped and all(isinstance(messages, vf.SandboxError) for messages in opened):
                raise RuntimeError(
                    f"{SETTINGS['name']}: none of the first {len(opened)} tasks can be set up; the last: {skipped}"
                )

    def _task(self, index: int, messages: list[dict[str, Any]], url: str) -> ServedTask:
        split = self.config.split
        system = [m["content"] for m in messages if m["role"] == "system"]
        prompt = [m for m in messages if m["role"] != "system"]
        data = ServedData(
            id=f"{split}-{index}",
            split=split,
            index=index,
            prompt=prompt[0]["content"] if _one_text(prompt) else prompt,
            system_prompt=system[0] if system else None,
        )
        task = ServedTask(data, self.config.task)
        task.url = url
        return task


class ServedHarnessConfig(vf.HarnessConfig):  # type: ignore[misc, unused-ignore]
    """Without additional settings."""


class ServedHarness(vf.Harness[ServedHarnessConfig]):  # type: ignore[misc, unused-ignore]
    """Asks the model with the task's tools and sends every message to the server, until the episode ends."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Play the episode."""
        if (session := _sessions.get(trace.id)) is None:
            raise RuntimeError(f"this harness plays only the tasks of {SETTINGS['name']}")
        messages = await session.reset(data.split, data.index)
        if data.system_prompt is not None:  # verifiers may have replaced it
            others = [m for m in messages if m["role"] != "system"]
            messages = [{"role": "system", "content": data.system_prompt}, *others]
        tools = await session.tools()
        headers = {"Authorization": f"Bearer {secret}"}
        async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout()) as http:
            while True:
                body = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
                async with http.post(f"{endpoint}/chat/completions", json=body) as answer:
                    if answer.status >= 400:  # a limit of the rollout, or a lost model: verifiers knows which
                        return vf.ProgramResult(1, "", f"{answer.status}: {await answer.text()}")
                    message = (await answer.json())["choices"][0]["message"]
                said = {key: message.get(key) for key in ("content", "tool_calls")}
                step = await session.ask("step", {"type": "message", **said})
                if step["done"]:
                    session.record(step, trace.state)
                    return vf.ProgramResult(0, "", "")
                messages.append({key: value for key, value in message.items() if value is not None})
                messages += step["observation"]["messages"]

    async def cleanup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        """Close the episode."""
        if session := _sessions.pop(trace.id, None):
            await session.close()


class ServedAgentConfig(vf.AgentConfig):  # type: ignore[misc, unused-ignore]
    """An agent without a sandbox: everything it does happens on the server."""

    runtime: vf.RuntimeConfig = vf.SubprocessConfig()


class ServedEnvConfig(vf.EnvConfig):  # type: ignore[misc, unused-ignore]
    """The settings of the one agent."""

    agent: ServedAgentConfig = ServedAgentConfig()


class ServedEnv(vf.Env[ServedEnvConfig]):  # type: ignore[misc, unused-ignore]
    """One agent plays one task."""

    async def run(self, task: vf.Task, agents: Any) -> None:
        """Play the task."""
        await agents.agent.run(task)


class Session:
    """One episode on the server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def ask(self, kind: str, data: dict[str, Any]) -> Any:
        """Send a request and wait for its answer. Raises SandboxError if the episode is lost."""
        try:
            if self._socket is None:
                token = os.environ.get("AGENTRL_TOKEN")
                headers = {"Authorization": f"Bearer {token}"} if token else {}
                self._http = aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout())
                self._socket = await self._http.ws_connect(f"{self.url}/ws", max_msg_size=0)
            with contextlib.suppress(ConnectionError):  # the reason may be waiting to be read
                await self._socket.send_json({"type": kind, "data": data})
            answer = await self._socket.receive_json()
        except (aiohttp.ClientError, OSError, TypeError) as e:
            raise vf.SandboxError(f"the server at {self.url} is lost: {type(e).__name__}: {e}") from e
        if answer["type"] == "error":
            raise vf.SandboxError(f"{answer['data']['code']}: {answer['data']['message']}")
        return answer["data"]

    async def reset(self, split: str, index: int) -> list[dict[str, Any]]:
        """Start an episode, when the server has a free session; returns its opening messages."""
        loop = asyncio.get_running_loop()
        deadline, wait_s = loop.time() + FREE_SESSION_S, 0.05
        while True:
            try:
                opening = await self.ask("reset", {"split": split, "index": index})
                return list(opening["observation"]["messages"])
            except vf.SandboxError as e:
                if not str(e).startswith("CAPACITY_REACHED") or loop.time() > deadline:
                    raise
            await self.close()
            await asyncio.sleep(wait_s)
            wait_s = min(2.0, 2 * wait_s)

    async def tools(self) -> list[dict[str, Any]]:
        """The task's tools in the form of the chat API, without the one that stands for a message."""
        listed = (await self.ask("step", {"type": "list_tools"}))["observation"]["tools"]
        return [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool["description"],
                    "parameters": tool["input_schema"],
                },
            }
            for tool in listed
            if tool["name"] != "send_message"
        ]

    def record(self, step: dict[str, Any], state: Any) -> None:
        """Keep the rewards of the episode that this step ended."""
        about = step["observation"]["metadata"]
        state.rewards = {name: float(value) for name, value in about["rewards"].items()}
        of_turns = about["episode_reward"] - sum(state.rewards.values())
        if abs(of_turns) > 1e-9:
            state.rewards["turns"] = of_turns
        state.solved, state.stop_reason = about.get("solved"), about["stop_reason"]

    async def close(self) -> None:
        """End the episode; idempotent."""
        if self._http is not None:
            if self._socket is not None:
                await self._socket.close()
            await self._http.close()
        self._http = self._socket = None


_sessions: dict[str, Session] = {}
"""The episodes being played, by trace."""


Opening = Any
"""Messages, why there are none (a SandboxError), or None: there is no such task."""


async def openings(url: str, split: str, indices: range) -> list[Opening]:
    """The opening messages of tasks; why one cannot be set up; None after the last task of the split."""

    async def one(index: int) -> Opening:
        session = Session(url)
        try:
            return await session.reset(split, index)
        except vf.SandboxError as e:
            if str(e).startswith("VALIDATION_ERROR: index "):
                return None
            if str(e).startswith("SESSION_ERROR: "):
                return e
            raise
        finally:
            await session.close()

    return list(await asyncio.gather(*[one(index) for index in indices]))


def _one_text(prompt: list[dict[str, Any]]) -> bool:
    return len(prompt) == 1 and prompt[0]["role"] == "user" and isinstance(prompt[0]["content"], str)


def _module_name(plugin: str) -> str:
    """The module that verifiers imports for an id."""
    return plugin.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()


def server_of(url: str, python: str) -> str:
    """The address of the server, which is started if none is given."""
    if found := url or os.environ.get("AGENTRL_ENV_URL", "") or SETTINGS.get("url", ""):
        return found.rstrip("/")
    return started(python or os.environ.get("AGENTRL_PYTHON", "") or SETTINGS["python"])


@functools.lru_cache(maxsize=4)
def started(python: str) -> str:
    """Start the server; it ends with this process. Raises RuntimeError."""
    command = [python, "-m", "agentrl", "env", "serve", SETTINGS["target"], "--port", "0", "--until-eof"]
    pipe = subprocess.PIPE
    how = "set AGENTRL_PYTHON to a Python that has agentrl, or AGENTRL_ENV_URL to a running `agentrl env serve`"
    try:
        process = subprocess.Popen(
            [*command, *SETTINGS["options"]], stdin=pipe, stdout=pipe, cwd=SETTINGS["folder"], text=True
        )
    except OSError as e:
        raise RuntimeError(f"cannot run {python} in {SETTINGS['folder']}: {e.strerror}; {how}") from e
    assert process.stdout is not None
    assert process.stdin is not None
    for line in process.stdout:
        if found := re.search(r" at (http://\S+), MCP at", line):
            threading.Thread(target=process.stdout.read, daemon=True).start()
            atexit.register(process.stdin.close)
            return found.group(1)
    raise RuntimeError(f"`agentrl env serve` ended with {process.wait()}; its error is above; {how}")
