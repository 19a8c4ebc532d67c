"""Resources servers of NeMo Gym, played unchanged over HTTP: `/seed_session`, one path per tool, `/verify`.

A row is one of NeMo Gym: `responses_create_params` (input and tools of the Responses API) and the server's
columns. The tools of the row are the tools of the task; each call is posted to the path of its name, in a session
of cookies. The conversation is sent to `/verify` as a Responses object; its `reward`, or the parts that add up to
it, is the reward. A connection that is lost in a call, or a call that is not answered in time, may be the policy's
doing: it is an observation if the server then opens a new session, else an infrastructure failure.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import re
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

import httpx

from agentrl.config.address import address_problem, without_credentials
from agentrl.env.adapter import Adapter
from agentrl.env.toolenv.declare import reward
from agentrl.env.toolenv.dispatch import BoundTool
from agentrl.env.toolenv.env import ToolEnv
from agentrl.env.toolenv.jsonschema import check_arguments
from agentrl.env.toolenv.observe import ToolError, error_text, plain_text
from agentrl.env.toolenv.threads import CallTimeout
from agentrl.errors import ConfigError, InfraError
from agentrl.types import Episode, Message, Role, ToolCall

JsonObject: TypeAlias = "dict[str, object]"
RESERVED = ("seed_session", "verify", "aggregate_metrics", "mcp")
"""Paths of the server that no tool may have."""
UNAVAILABLE = (429, 502, 503, 504)
"""Status codes of a server that is busy or not there; what the policy wrote does not cause them."""
WAITS_S = (0.5, 1.0, 2.0, 4.0)
"""How long to wait before each further request to such a server."""
BUSY = (429, 503)
"""Those of a server that has not begun with the request."""
PROBE_S = 30.0
"""Timeout of a new session that shows whether the server is up."""
SPARE_S = 5.0
"""How much longer `setup` may take than its request."""
VERIFY_S = 86_400.0
"""Limit of the reward; each request of it ends after `verify_timeout_s`."""
_ROLES: Mapping[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True)
class NemoGymOptions:
    """Options of `nemo_gym:URL`."""

    system: str = ""
    """System prompt for rows without one."""
    verify_timeout_s: float = 300.0
    """Timeout of `/seed_session` and `/verify`."""


class NemoGym(ToolEnv, Adapter):
    """A resources server of NeMo Gym."""

    Options = NemoGymOptions
    options: NemoGymOptions

    def __init__(self) -> None:
        self.url = without_credentials(self.rest.rstrip("/"))

    @classmethod
    def check_name(cls) -> None:
        """Raises ConfigError if `rest` is no address."""
        if problem := address_problem(cls.rest):
            raise ConfigError(
                f"nemo_gym: url {without_credentials(cls.rest)!r}: {problem}; write e.g. nemo_gym:http://127.0.0.1:8000"
            )
        needed_s = cls.options.verify_timeout_s + SPARE_S
        cls.settings = replace(cls.settings, setup_timeout_s=max(cls.settings.setup_timeout_s, needed_s))

    def system(self) -> str:
        """The configured system prompt, unless the row has one."""
        return "" if any(message.role == "system" for message in self._opening_messages) else self.options.system

    def more_tools(self) -> Sequence[BoundTool]:
        """The tools of the row."""
        params = _object(self.task.row.get("responses_create_params"))
        return [_RowTool(self, _object(tool)) for tool in _list(params.get("tools"))]

    async def setup(self, responses_create_params: Mapping[str, object], **row: object) -> list[Message]:
        """Open a session with the row."""
        self._opening_messages = read_input(responses_create_params, self.task.id)
        self.http = self._client()
        answer = await self.post("seed_session", dict(self.task.row), self.options.verify_timeout_s)
        if answer.is_error:
            raise InfraError(f"nemo_gym: {self.url}/seed_session: {answer.status_code}: {answer.text[:300]}")
        if answer.content and isinstance(said := answer.json(), dict) and said.get("mcp"):
            raise ConfigError(f"nemo_gym: {self.url} offers its tools over MCP, which this adapter does not use")
        return self._opening_messages

    def _client(self) -> httpx.AsyncClient:
        local = httpx.URL(self.url).host in ("localhost", "127.0.0.1", "::1")
        return httpx.AsyncClient(
            base_url=self.rest,
            verify=_certificates(),
            trust_env=not local,
            timeout=None,
            # Servers close idle connections after 5 s; a request sent while one is closing is lost.
            limits=httpx.Limits(keepalive_expiry=2.0),
        )

    async def call(self, name: str, arguments: JsonObject, timeout_s: float | None) -> str:
        """Call a tool; the body of the answer is the result, also of an error. A busy server is asked again.

        Raises:
            ToolError: the connection was lost, and the server opens new sessions.
            CallTimeout: no answer in time, and the server opens new sessions.
            InfraError: the server is down, stays busy, or was not there to begin with.
        """
        for wait_s in (*WAITS_S, 0.0):
            try:
                answer = await self.post(name, arguments, timeout_s)
            except CallTimeout as e:
                await self._check_up(f"nemo_gym: {self.url}/{name}: {e}")
                raise
            except _Lost as e:
                await self._check_up(str(e))
                raise ToolError("the connection to the tool server was lost during the call") from e
            problem = f"nemo_gym: {self.url}/{name}: {answer.status_code}: {answer.text[:300]}"
            if answer.status_code not in BUSY:
                if answer.status_code in UNAVAILABLE:  # a proxy has lost the server
                    await self._check_up(problem)
                return answer.text
            await asyncio.sleep(wait_s)
        raise InfraError(problem)

    async def _check_up(self, problem: str) -> None:
        """Raises InfraError if the server opens no new session."""
        said = ""
        for wait_s in (*WAITS_S, 0.0):
            async with self._client() as http:
                try:
                    answer = await http.post("/seed_session", json=dict(self.task.row), timeout=PROBE_S)
                    if answer.is_success:
                        return
                    said = f"{answer.status_code}: {answer.text[:300]}"
                except httpx.TimeoutException:
                    said = f"no answer after {PROBE_S:g} s"
                    break
                except httpx.HTTPError as e:
                    said = error_text(e)
            await asyncio.sleep(wait_s)
        raise InfraError(f"{problem}, and the server is down: /seed_session: {said}")

    async def post(self, path: str, body: JsonObject, timeout_s: float | None) -> httpx.Response:
        """Post to a path of the server in the episode's session.

        Raises:
            CallTimeout: no answer in time.
            InfraError: the server cannot be reached, or (_Lost) the connection is lost.
            ConfigError: it redirects.
        """
        try:
            answer = await self.http.post(f"/{path}", json=body, timeout=timeout_s)
        except httpx.TimeoutException:
            raise CallTimeout(f"no result after {timeout_s or math.inf:g} s") from None
        except httpx.HTTPError as e:
            kind = InfraError if isinstance(e, httpx.ConnectError) else _Lost
            raise kind(f"nemo_gym: {self.url}/{path}: {error_text(e)}") from e
        if answer.is_redirect:
            raise ConfigError(
                f"nemo_gym: {self.url}/{path}: {answer.status_code}, a redirect to {answer.headers['location']}; "
                "write the address that it leads to"
            )
        return answer

    async def _verified(self, body: JsonObject) -> httpx.Response:
        """The answer of `/verify`. A busy or absent server is asked again for some seconds.

        Raises:
            InfraError: it stays busy or absent, or does not answer in time.
            ValueError: it loses the connection and then opens new sessions: this episode may be the cause.
        """
        lost = ""
        for wait_s in (*WAITS_S, 0.0):
            try:
                answer = await self.post("verify", body, self.options.verify_timeout_s)
                problem = f"nemo_gym: {self.url}/verify: {answer.status_code}: {answer.text[:300]}"
                if answer.status_code not in UNAVAILABLE:
                    return answer
            except CallTimeout as e:
                raise InfraError(f"nemo_gym: {self.url}/verify: {e}") from None
            except _Lost as e:
                problem = lost = str(e)
            except InfraError as e:
                problem = str(e)
            await asyncio.sleep(wait_s)
        if not lost:
            raise InfraError(problem)
        await self._check_up(problem)
        raise ValueError(lost)

    @reward(timeout_s=VERIFY_S)
    async def verify(self, episode: Episode) -> Mapping[str, float]:
        """The server's reward: its named parts if they add up to it."""
        row = dict(self.task.row)
        said = episode.messages[len(episode.messages) - _num_played(episode) :]
        body = {**row, "response": responses_object(said, _object(row["responses_create_params"]), episode.id)}
        answer = await self._verified(body)
        if answer.is_error:  # what the policy wrote may be the cause
            raise ValueError(f"{self.url}/verify: {answer.status_code}: {answer.text[:300]}")
        result = _object(answer.json())
        if result.get("mask_sample"):
            raise InfraError(
                f"nemo_gym: {self.url}/verify asks to leave the episode out of training (mask_sample)"
            )
        return read_rewards(result)

    async def release(self) -> None:
        """End the session."""
        if http := getattr(self, "http", None):
            await http.aclose()
        await super().release()


class _Lost(InfraError):
    """The connection ended after the request had begun."""


class _RowTool:
    """A tool of one episode. The server checks the arguments, as it does for NeMo Gym's agents."""

    parallel = False
    timeout_s: float | None = None

    def __init__(self, env: NemoGym, tool: JsonObject) -> None:
        self._env, self.name = env, str(tool.get("name", ""))
        if tool.get("type", "function") != "function":
            raise ConfigError(f"task {env.task.id!r}: {json.dumps(tool)[:120]} is not a function tool of a server")
        if not re.fullmatch(r"[A-Za-z0-9_-]+", self.name):
            raise ConfigError(
                f"task {env.task.id!r}: tool {self.name!r}: a name may have only letters, digits, _ and -"
            )
        if self.name in RESERVED:
            raise ConfigError(
                f"task {env.task.id!r}: tool {self.name!r}: /{self.name} is a path of NeMo Gym's protocol"
            )
        function = {k: v for k, v in tool.items() if k in ("name", "description", "parameters") and v}
        function.setdefault("parameters", {"type": "object", "properties": {}})
        self.schema: Mapping[str, object] = {"type": "function", "function": function}

    def validate(self, arguments: Mapping[str, object]) -> JsonObject:
        """Leave all but the shape to the server. Raises InvalidArguments."""
        return check_arguments({}, arguments)

    async def call(self, arguments: JsonObject, timeout_s: float | None) -> str:
        """Post the arguments; see `NemoGym.call`."""
        return await self._env.call(self.name, arguments, timeout_s)


def read_input(params: Mapping[str, object], task: str) -> list[Message]:
    """The opening messages of `responses_create_params`. Raises ConfigError."""
    given = params.get("input")
    opening = [Message("system", str(params["instructions"]))] if params.get("instructions") else []
    if isinstance(given, str):
        return [*opening, Message("user", given)]
    for item in map(_object, _list(given)):
        kind = item.get("type", "message")
        if kind == "function_call":
            arguments = cast(Mapping[str, object], json.loads(str(item.get("arguments") or "{}")))
            call = ToolCall(str(item.get("call_id")), str(item.get("name")), arguments)
            opening.append(Message("assistant", tool_calls=(call,)))
        elif kind == "function_call_output":
            opening.append(Message("tool", str(item.get("output")), tool_call_id=str(item.get("call_id"))))
        elif kind == "message" and item.get("role") in _ROLES:
            opening.append(Message(_ROLES[str(item["role"])], _text(item.get("content"), task)))
        else:
            raise ConfigError(
                f"task {task!r}: responses_create_params.input: cannot read {json.dumps(item)[:120]}"
            )
    if not opening:
        raise ConfigError(f"task {task!r}: responses_create_params.input is empty")
    return opening


def responses_object(said: Sequence[Message], params: JsonObject, name: str) -> JsonObject:
    """The episode's messages as the object that the Responses API returns."""
    output: list[JsonObject] = []
    for number, message in enumerate(said):
        if message.role == "user" or (message.role == "tool" and message.tool_call_id is None):
            # Of a call that could not be parsed there is no item that its answer could belong to.
            output.append({"type": "message", "role": "user", "content": plain_text(message.content)})
            continue
        if message.role == "tool":
            answer = {"call_id": message.tool_call_id, "output": plain_text(message.content)}
            output.append({"type": "function_call_output", **answer})
            continue
        if message.reasoning:
            summary = [{"type": "summary_text", "text": message.reasoning}]
            output.append({"type": "reasoning", "id": f"rs_{number}", "summary": summary})
        if text := plain_text(message.content):
            part = {"type": "output_text", "text": text, "annotations": []}
            status = {"status": "completed", "id": f"msg_{number}"}
            output.append({"type": "message", "role": "assistant", "content": [part], **status})
        for call in message.tool_calls:
            given = dict(call.arguments) if isinstance(call.arguments, Mapping) else call.arguments
            arguments = json.dumps(given, ensure_ascii=False)
            asked = {"call_id": call.id, "name": call.name, "arguments": arguments}
            output.append({"type": "function_call", "id": f"fc_{call.id}", "status": "completed", **asked})
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": time.time(),
        "model": "policy",
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": _list(params.get("tools")),
    }


def read_rewards(result: JsonObject) -> dict[str, float]:
    """The parts of a verification if they add up to its reward, else the reward alone. Raises ValueError."""
    total = result.get("reward")
    if isinstance(total, bool) or not isinstance(total, int | float) or not math.isfinite(total):
        raise ValueError(f"/verify returned the reward {total!r}")
    components = _object(result.get("reward_components")).items()
    parts = {k: float(v) for k, v in components if isinstance(v, int | float) and math.isfinite(v)}
    return parts if parts and math.isclose(sum(parts.values()), total, abs_tol=1e-9) else {"reward": float(total)}


def _num_played(episode: Episode) -> int:
    return sum(1 + len(turn.observation) for turn in episode.turns)


def _text(content: object, task: str) -> str:
    if isinstance(content, str):
        return content
    parts = [_object(part) for part in _list(content)]
    if other := [part for part in parts if "text" not in part]:
        raise ConfigError(f"task {task!r}: responses_create_params.input: {other[0].get('type')!r} is not text")
    return "".join(str(part["text"]) for part in parts)


def _object(value: object) -> JsonObject:
    return cast(JsonObject, dict(value)) if isinstance(value, Mapping) else {}


def _list(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else []


@functools.cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()
