"""A chat harness of verifiers that runs in its own process: `agentrl_chat` as harness id.

It does what the `null` harness of verifiers does, without a new program for each episode.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.compaction import bound_tool_message
from verifiers.v1.harnesses.utils.core import gate_tool_call
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["ChatHarness"]

ended: dict[str, asyncio.Event] = {}
"""By model: set when the adapter ends the episode."""


class ChatConfig(vf.HarnessConfig):  # type: ignore[misc, unused-ignore]
    """Without additional settings."""


class ChatHarness(vf.Harness[ChatConfig]):  # type: ignore[misc, unused-ignore]
    """Asks the model and calls tools until it answers without a call."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
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
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        """Hold the conversation."""
        try:
            return await self.hold(ctx, trace, endpoint, secret, mcp_urls, data, tool_interception_url)
        except ExceptionGroup as e:  # the MCP client's tasks fail in groups, whose text names no cause
            raise first_of(e) from e

    async def hold(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        gate: str | None,
    ) -> vf.ProgramResult:
        """Talk until there is no call or the adapter ends the episode."""
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        async with AsyncExitStack() as stack:
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            tools, *connected = await connect_mcp({"mcpServers": servers}, stack)
            client = httpx.AsyncClient(
                base_url=endpoint, headers={"Authorization": f"Bearer {secret}"}, timeout=None, trust_env=False
            )
            await stack.enter_async_context(client)
            denial = functools.partial(denied, client, gate, secret) if gate else allowed
            talk = asyncio.create_task(converse(client, ctx.model, messages, tools, connected, denial))
            stop = asyncio.create_task(ended.setdefault(ctx.model, asyncio.Event()).wait())
            await asyncio.wait([talk, stop], return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            if talk.done():
                return talk.result()
            trace.stop("ended_by_run")
            talk.cancel()
            return vf.ProgramResult(0, "", "")


def first_of(group: ExceptionGroup) -> Exception:
    """The first plain error in a group."""
    first = group.exceptions[0]
    return first_of(first) if isinstance(first, ExceptionGroup) else first


async def allowed(call: dict[str, Any]) -> None:
    """The answer of a taskset that denies no call."""


async def denied(client: httpx.AsyncClient, gate: str, secret: str, call: dict[str, Any]) -> Any:
    """The message that the taskset puts in place of a call; None if it allows the call."""
    wanted = SimpleNamespace(id=call["id"], function=SimpleNamespace(**call["function"]))
    decision = await gate_tool_call(client, gate, secret, wanted)
    return decision["message"] if decision["action"] == "deny" else None


async def converse(
    client: httpx.AsyncClient,
    model: str,
    messages: list[Any],
    tools: list[Any],
    connected: list[Any],
    denial: Callable[[dict[str, Any]], Awaitable[Any]],
) -> vf.ProgramResult:
    """Ask and call until there is no call; `denial` answers the calls that the taskset denies."""
    dispatch, servers = connected
    while True:
        body = {"model": model, "messages": messages} | ({"tools": tools} if tools else {})
        answer = await client.post("/chat/completions", json=body)
        if answer.is_error:
            return vf.ProgramResult(1, "", f"{answer.status_code}: {answer.text}")
        message = answer.json()["choices"][0]["message"]
        messages.append({key: value for key, value in message.items() if value is not None})
        if not message.get("tool_calls"):
            return vf.ProgramResult(0, "", "")
        for call in message["tool_calls"]:
            if (result := await denial(call)) is None:
                content = await result_of(call["function"], dispatch, servers)
                name = call["function"]["name"]
                result = {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}
            messages.append(bound_tool_message(result))


async def result_of(function: dict[str, Any], dispatch: dict[str, Any], servers: dict[str, Any]) -> Any:
    """What a tool answers; mistakes are answers too, in the words of verifiers' own harness."""
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except json.JSONDecodeError as e:
        return f"error: invalid JSON in tool arguments ({e}); resend the call with valid JSON"
    if not isinstance(arguments, dict):
        return f"error: tool arguments must be a JSON object, got {type(arguments).__name__}; resend as an object"
    if function["name"] not in dispatch:
        return f"error: unknown tool {function['name']!r}"
    return await call_mcp(servers, dispatch, function["name"], arguments)
