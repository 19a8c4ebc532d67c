"""Train on an environment of agentrl with TRL's `GRPOTrainer`.

    agentrl env serve agentrl.envs.calculator:Calculator
    pip install trl==1.16.* datasets websockets
    python examples/trl/train.py http://127.0.0.1:8000 --model Qwen/Qwen3-0.6B

The tools become methods of the class that `environment_factory` makes, as TRL wants them; rewards come
from the server.
"""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from websockets.sync.client import connect

Answer = dict[str, Any]
TYPES = {"integer": int, "number": float, "boolean": bool, "array": list, "object": dict}


class Session:
    """One WebSocket session of OpenEnv."""

    def __init__(self, url: str) -> None:
        self.socket = connect("ws" + url.rstrip("/").removeprefix("http") + "/ws", proxy=None, max_size=None)

    def ask(self, kind: str, **data: Any) -> Answer:
        self.socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(self.socket.recv())
        if answer["type"] == "error":
            raise RuntimeError(answer["data"]["message"])
        found: Answer = answer["data"]
        return found


class ServedEnv:
    """One session of the server; TRL makes one for each concurrent rollout and resets it."""

    url = ""

    def __init__(self) -> None:
        self._session = Session(self.url)
        self._total, self._done = 0.0, True

    def reset(self, split: str = "train", index: int = 0, **_: Any) -> str:
        self._total, self._done = 0.0, False
        return str(self._session.ask("reset", split=split, index=index)["observation"]["prompt"])

    def _act(self, **action: Any) -> str:
        if self._done:
            return "The episode has ended."
        result = self._session.ask("step", **action)
        self._total, self._done = self._total + (result["reward"] or 0.0), result["done"]
        seen = result["observation"]
        return str(seen["error"]["message"] if seen.get("error") else seen.get("result", ""))

    def _finish(self, completion: Sequence[Mapping[str, Any]]) -> float:
        """Send the final answer if there is one, end the episode, and return its reward."""
        last = completion[-1]
        if last["role"] == "assistant" and not last.get("tool_calls"):
            self._act(type="message", content=last.get("content") or "")
        self._act(type="finish")
        return self._total


def served_env(url: str, *, send_message: bool = False) -> type[ServedEnv]:
    """The class of a server, with its tools as methods.

    With `send_message`, the policy talks to the user of an env through this tool; text without a call ends a
    rollout.
    """
    tools = Session(url).ask("step", type="list_tools")["observation"]["tools"]
    methods = {tool["name"]: _method(tool) for tool in tools if tool["name"] != "send_message" or send_message}
    return type("ServedEnv", (ServedEnv,), {"url": url, **methods})


def _method(tool: Mapping[str, Any]) -> Any:
    def call(self: ServedEnv, **arguments: Any) -> str:
        return self._act(type="call_tool", tool_name=tool["name"], arguments=arguments)

    schema = tool["input_schema"]
    arguments = []
    for name, shape in schema.get("properties", {}).items():
        default = inspect.Parameter.empty if name in schema.get("required", ()) else shape.get("default")
        kind = TYPES.get(shape.get("type"), str)
        arguments.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind))
    told = [f"    {p.name}: {schema['properties'][p.name].get('description', p.name)}" for p in arguments]
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    call.__name__ = tool["name"]
    call.__doc__ = (
        "\n".join([tool["description"] or tool["name"], "", "Args:", *told]) if told else tool["description"]
    )
    call.__annotations__ = {p.name: p.annotation for p in arguments} | {"return": str}
    call.__signature__ = inspect.Signature([this, *arguments], return_annotation=str)  # type: ignore[attr-defined]
    return call


def reward(
    completions: Sequence[Sequence[Mapping[str, Any]]], environments: Sequence[ServedEnv], **_: Any
) -> list[float]:
    """The rewards of the served env."""
    return [env._finish(completion) for env, completion in zip(environments, completions, strict=True)]


def rows(url: str, num: int) -> list[dict[str, Any]]:
    """A row for each of the first `num` tasks; `reset` adds the task to the user message."""
    system = Session(url).ask("reset", index=0)["observation"]["system"]
    prompt = [{"role": "system", "content": system}, {"role": "user", "content": ""}]
    return [{"prompt": prompt, "split": "train", "index": index} for index in range(num)]


def main() -> None:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--tasks", type=int, default=1000)
    args = parser.parse_args()
    GRPOTrainer(
        model=args.model,
        reward_funcs=reward,
        train_dataset=Dataset.from_list(rows(args.url, args.tasks)),
        environment_factory=served_env(args.url),
        args=GRPOConfig(output_dir="trl-calculator", max_completion_length=256, log_completions=True),
    ).train()


if __name__ == "__main__":
    main()
