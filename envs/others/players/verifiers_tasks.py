"""Play the tasks of a verifiers taskset: `python verifiers_tasks.py '{"id", "args", "harness", "path", "limit"}'`.

The taskset's environment, harness, tool servers and rewards are those of verifiers. The model that it asks is a
small server in this process, which asks the adapter.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from contextlib import AsyncExitStack
from typing import Any

from wire import Json, Session, Stopped, Wire, contained

wire = Wire()
try:
    import agentrl_chat
    import verifiers.v1 as vf
    from aiohttp import web
    from verifiers.v1.utils.loaders import default_harness_id, load_environment, resolve_env_config
except ModuleNotFoundError as e:
    wire.fail(
        f"needs {e.name}, which {sys.executable} does not have: pip install 'verifiers>=0.4' there, or set "
        "env.options.python to a Python that has it"
    )
except ImportError as e:
    wire.fail(f"needs verifiers 0.4 or later in {sys.executable}: {e}")

sessions: dict[str, Session] = {}


def message_of(message: Json) -> Json:
    """A message of the chat API for the adapter."""
    shown: Json = {"role": message["role"], "content": message.get("content") or ""}
    shown |= {key: message[key] for key in ("tool_call_id", "name") if message.get(key)}
    if isinstance(shown["content"], list) and all(part["type"] == "text" for part in shown["content"]):
        shown["content"] = "".join(part["text"] for part in shown["content"])
    if message.get("tool_calls"):
        shown["tool_calls"] = [
            {"id": c["id"], "name": c["function"]["name"], "arguments": c["function"]["arguments"]}
            for c in message["tool_calls"]
        ]
    return shown


def reply_of(reply: Json, model: str) -> Json:
    """The policy's message as an answer of the chat API."""
    message: Json = {"role": "assistant", "content": reply["content"]}
    if reply.get("reasoning"):
        message["reasoning_content"] = reply["reasoning"]
    if calls := reply.get("tool_calls"):
        message["tool_calls"] = [
            {
                "id": c["id"],
                "type": "function",
                "function": {"name": c["name"], "arguments": text_of(c["arguments"])},
            }
            for c in calls
        ]
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
    return {
        "id": f"chatcmpl-{time.time_ns()}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }


def text_of(arguments: object) -> str:
    """Arguments as the chat API has them."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


async def complete(request: web.Request) -> web.StreamResponse:
    """Ask the adapter for a completion."""
    body = await request.json()
    model = str(body["model"])
    try:
        said = await sessions[model].ask([message_of(m) for m in body["messages"]], body.get("tools") or [])
    except Stopped as e:
        agentrl_chat.ended.setdefault(model, asyncio.Event()).set()
        await asyncio.sleep(1.0)  # our own harness is gone by then
        return web.json_response({"error": {"message": str(e), "type": "invalid_request_error"}}, status=400)
    answer = reply_of(said, model)
    if not body.get("stream"):
        return web.json_response(answer)
    chunk = answer | {"object": "chat.completion.chunk"}
    message = answer["choices"][0]["message"]
    for index, call in enumerate(message.get("tool_calls", ())):
        call["index"] = index
    chunk["choices"] = [{"index": 0, "delta": message, "finish_reason": answer["choices"][0]["finish_reason"]}]
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await stream.prepare(request)
    await stream.write(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())
    return stream


def rewards_of(episode: vf.Episode) -> dict[str, float]:
    """The weighted rewards by name, with the agent's name where several are trained. Raises RuntimeError."""
    problems = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if problems:
        raise RuntimeError(f"{problems[0].type}: {problems[0].message}")
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    return {
        (f"{trace.agent.name}/{name}" if len(traces) > 1 else name): float(reward.value)
        for trace in traces
        for name, reward in trace.rewards.items()
        if reward is not None
    }


def load(given: Json) -> tuple[vf.Env[Any], list[vf.Task[Any]]]:
    """The environment and its tasks."""
    if given["path"]:
        sys.path[:0] = [given["path"]]
        known = os.environ.get("PYTHONPATH")  # tool servers are programs that import the taskset
        os.environ["PYTHONPATH"] = os.pathsep.join([given["path"], *([known] if known else [])])
    bundled = default_harness_id(given["id"])
    harness = given["harness"] or ("agentrl_chat" if bundled == "bash" else bundled)
    config: Json = {"taskset": {"id": given["id"], **given["args"]}}
    config |= {"id": given["env"]} if given["env"] else {"agent": seat(harness)}
    env = load_environment(resolve_env_config(config))
    taskset = env.taskset if env.taskset.bounded else env.taskset.take(given["limit"])
    return env, list(taskset)


def seat(harness: str) -> Json:
    """The settings of the one agent."""
    return {"harness": {"id": harness}, "runtime": {"type": "subprocess"}}


async def play(env: vf.Env[Any], task: vf.Task[Any], session: Session, url: str) -> None:
    """One episode."""
    model = f"policy-{session.number}"
    sessions[model] = session
    client = vf.EvalClientConfig(base_url=url, api_key_var="AGENTRL_NO_KEY")
    try:
        episode = await contained(env.run_episode(task, vf.ModelContext(model=model, client=client)))
        session.done(rewards_of(episode))
    except Exception as e:
        session.done({}, str(e) or type(e).__name__)
    finally:
        sessions.pop(model)
        agentrl_chat.ended.pop(model, None)


async def main() -> None:
    """Play until stdin ends."""
    given: Json = json.loads(sys.argv[1])
    try:
        env, tasks = load(given)
    except Exception as e:
        wire.fail(f"cannot be loaded: {type(e).__name__}: {' '.join(str(e).split())}")
    app = web.Application(client_max_size=2**30)
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    running: set[asyncio.Task[None]] = set()

    def start(session: Session) -> None:
        task = asyncio.create_task(play(env, tasks[session.index], session, url))
        running.add(task)
        task.add_done_callback(running.discard)

    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(env.serving())
        except Exception as e:
            wire.fail(f"cannot start its servers: {type(e).__name__}: {' '.join(str(e).split())}")
        wire.listen(start)
        wire.send({"ready": {"ids": [str(task.data.id or f"{given['id']}-{i}") for i, task in enumerate(tasks)]}})
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
