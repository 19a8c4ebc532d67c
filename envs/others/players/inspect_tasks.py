"""Play the samples of an Inspect task: `python inspect_tasks.py '{"file", "task", "args", "roles", "scorers"}'`.

One endless evaluation of Inspect plays all episodes: each is a sample that is added to it, with the task's own
solver, tools, limits and sandbox. The model of the evaluation asks the adapter.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import json
import math
import os
import sys
import tempfile
from typing import Any

from wire import Json, Session, Stopped, Wire, contained

wire = Wire()
try:
    from inspect_ai import SampleSource, Task, enqueue_sample, eval_async, task_with
    from inspect_ai._eval.loader import load_tasks
    from inspect_ai._util.registry import registry_lookup, registry_unqualified_name
    from inspect_ai.dataset import Sample
    from inspect_ai.log import EvalSample
    from inspect_ai.model import (
        ChatCompletionChoice,
        ChatMessage,
        ChatMessageAssistant,
        ChatMessageTool,
        Content,
        ContentReasoning,
        ContentText,
        GenerateConfig,
        ModelAPI,
        ModelOutput,
        modelapi,
    )
    from inspect_ai.scorer import value_to_float
    from inspect_ai.solver import chain
    from inspect_ai.solver._chain import unroll
    from inspect_ai.solver._task_state import sample_state
    from inspect_ai.tool import ToolCall, ToolChoice, ToolInfo
    from inspect_ai.util import LimitExceededError
except ModuleNotFoundError as e:
    wire.fail(
        f"needs {e.name}, which {sys.executable} does not have: pip install 'inspect-ai>=0.3.285' there, or set "
        "env.options.python to a Python that has it"
    )
except ImportError as e:
    wire.fail(f"needs inspect-ai 0.3.285 or later in {sys.executable}: {e}")

sessions: dict[tuple[str, int], Session] = {}


def message_of(message: ChatMessage) -> Json:
    """A message of Inspect as one of OpenAI's."""
    shown: Json = {"role": message.role, "content": content_of(message.content)}
    if isinstance(message, ChatMessageTool):
        error = message.error.message if message.error else ""
        content = f"Error: {error}" if error and error not in message.text else shown["content"]
        shown |= {"tool_call_id": message.tool_call_id, "name": message.function, "content": content}
    if isinstance(message, ChatMessageAssistant) and message.tool_calls:
        shown["tool_calls"] = [
            {"id": c.id, "name": c.function, "arguments": c.arguments} for c in message.tool_calls
        ]
    return shown


def content_of(content: str | list[Content]) -> str | list[Json]:
    """Text, or parts where images are among them."""
    if isinstance(content, str):
        return content
    parts: list[Json] = []
    for part in content:
        if part.type == "text":
            parts.append({"type": "text", "text": part.text})
        elif part.type == "image":
            parts.append({"type": "image_url", "image_url": {"url": part.image}})
        elif part.type != "reasoning":
            raise ValueError(f"a message has content of type {part.type}, which agentrl does not support")
    return parts if any(p["type"] == "image_url" for p in parts) else "".join(p["text"] for p in parts)


def reply_of(reply: Json) -> ChatMessageAssistant:
    """The policy's message as one of Inspect's."""
    content: str | list[Content] = reply["content"]
    if reply.get("reasoning"):
        content = [ContentReasoning(reasoning=reply["reasoning"]), ContentText(text=reply["content"])]
    calls = [call_of(c) for c in reply.get("tool_calls", ())]
    return ChatMessageAssistant(content=content, tool_calls=calls or None, model="policy", source="generate")


def call_of(call: Json) -> ToolCall:
    """A call of the policy as one of Inspect's."""
    if isinstance(call["arguments"], dict):
        return ToolCall(call["id"], call["name"], call["arguments"])
    return ToolCall(call["id"], call["name"], {}, parse_error="the arguments are not a JSON object")


@modelapi(name="agentrl")
class Policy(ModelAPI):  # type: ignore[misc, unused-ignore]
    """The policy, as a model of Inspect."""

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        """Ask the adapter."""
        state = sample_state()
        if state is None:
            raise RuntimeError("the policy was asked outside an episode")
        session = sessions[str(state.sample_id), state.epoch]
        functions = [
            {
                "name": t.name,
                "description": t.description,
                "parameters": t.parameters.model_dump(exclude_none=True),
            }
            for t in tools
        ]
        try:
            reply = await session.ask(
                [message_of(m) for m in input], [{"type": "function", "function": f} for f in functions]
            )
        except Stopped:
            limit = {"value": 1, "limit": 1, "message": "the episode was ended"}
            raise LimitExceededError("custom", **limit) from None
        said = reply_of(reply)
        stop = "tool_calls" if said.tool_calls else "stop"
        return ModelOutput(model="policy", choices=[ChatCompletionChoice(message=said, stop_reason=stop)])

    def max_connections(self) -> int:
        """No limit of our own."""
        return 100_000


def rewards_of(sample: EvalSample, wanted: list[str]) -> dict[str, float]:
    """The scores as numbers, as Inspect's own metrics read them; a mapping has a part for each key."""
    found: dict[str, float] = {}
    number = value_to_float()
    for name, score in (sample.scores or {}).items():
        if wanted and name not in wanted:
            continue
        values = score.value if isinstance(score.value, dict) else {"": score.value}
        for key, value in values.items():
            if isinstance(value, list | dict):
                raise ValueError(
                    f"the score of {name} is a list, which is no reward; choose others with `scorers`"
                )
            scored = number("" if value is None else value)
            found[f"{name}/{key}" if key else name] = 0.0 if math.isnan(scored) else scored
    if missing := [name for name in wanted if name not in (sample.scores or {})]:
        raise ValueError(f"no score of {missing[0]!r}; the scorers are: {', '.join(sample.scores or {})}")
    return found


class Episodes(SampleSource):  # type: ignore[misc, unused-ignore]
    """Samples that the adapter asks for."""

    def __init__(self, samples: list[Sample], scorers: list[str]) -> None:
        self.samples, self.scorers = samples, scorers
        self.epochs = [0] * len(samples)
        self.waiting: list[Session] = []
        self.arrived = asyncio.Event()
        self.inside: contextvars.Context | None = None

    def start(self, session: Session) -> None:
        """Add an episode."""
        self.waiting.append(session)
        self.arrived.set()
        if self.inside is not None:
            self.inside.run(self.add)

    def add(self) -> None:
        """Add the samples of the waiting episodes to the evaluation."""
        while self.waiting:
            session = self.waiting.pop()
            self.epochs[session.index] += 1
            sample, epoch = self.samples[session.index], self.epochs[session.index]
            sessions[str(sample.id), epoch] = session
            enqueue_sample(sample.model_copy(deep=True), epoch=epoch)

    async def next_samples(self) -> list[Sample] | None:
        """Wait for an episode; called while there is none."""
        self.inside = contextvars.copy_context()
        if not self.waiting:
            self.arrived.clear()
            await self.arrived.wait()
        self.add()
        return []

    async def sample_complete(self, sample: EvalSample) -> list[Sample] | None:
        """Report the scores."""
        session = sessions.pop((str(sample.id), sample.epoch))
        try:
            if sample.error is not None:
                session.done({}, sample.error.message)
            else:
                session.done(rewards_of(sample, self.scorers))
        except ValueError as e:
            session.done({}, str(e))
        return None


def contain(task: Task, wanted: list[str]) -> None:
    """Make whatever a solver or scorer raises, and a scorer without a score, an error of the sample."""

    def solver_of(solve: Any) -> Any:
        @functools.wraps(solve)
        async def solved(state: Any, generate: Any) -> Any:
            return await contained(solve(state, generate))

        return solved

    def scorer_of(rate: Any) -> Any:
        @functools.wraps(rate)
        async def rated(state: Any, target: Any) -> Any:
            score = await contained(rate(state, target))
            if score is None and not wanted:
                raise ValueError(f"the scorer {registry_unqualified_name(rate)} returned no score")
            return score

        return rated

    task.solver = chain([solver_of(solve) for solve in unroll(task.solver)])
    task.scorer = [scorer_of(rate) for rate in task.scorer or ()] or None


def unknown_argument(task: Task, args: Json) -> str | None:
    """The first argument that the task's function does not take; Inspect would ignore it."""
    known = inspect.signature(registry_lookup("task", task.name)).parameters
    if any(p.kind is p.VAR_KEYWORD for p in known.values()):
        return None
    return next((name for name in args if name not in known), None)


def load(given: Json) -> Task:
    """The task of the file."""
    os.chdir(os.path.dirname(os.path.abspath(given["file"])))
    name = os.path.basename(given["file"]) + (f"@{given['task']}" if given["task"] else "")
    found = load_tasks([name], given["args"])
    if len(found) == 1 and (unknown := unknown_argument(found[0], given["args"])):
        wire.fail(f"env.options.args.{unknown}: {found[0].name} has no such argument")
    if len(found) != 1:
        names = ", ".join(task.name for task in found) or "none"
        wire.fail(f"write FILE@TASK: the tasks of {given['file']} are: {names}")
    return found[0]


def check_ids(samples: list[Sample], file: str) -> None:
    """Number the samples without an id. Ids that are equal as text are refused, as by Inspect."""
    known: dict[str, int] = {}
    for number, sample in enumerate(samples, 1):
        sample.id = number if sample.id is None else sample.id
        if (first := known.setdefault(str(sample.id), number)) != number:
            wire.fail(
                f"{file}: samples {first} and {number} have the same id {str(sample.id)!r}; give each its own "
                "(a sample without one gets its number)"
            )


async def main() -> None:
    """Play until stdin ends."""
    given: Json = json.loads(sys.argv[1])
    try:
        task = load(given)
    except Exception as e:
        wire.fail(f"{given['file']}: {type(e).__name__}: {e}")
    samples: list[Sample] = list(task.dataset)
    check_ids(samples, given["file"])
    if not task.scorer:
        wire.fail(f"{given['file']}: {task.name} has no scorer, so nothing gives a reward")
    contain(task, given["scorers"])
    episodes = Episodes(samples, given["scorers"])
    task_with(task, dataset=episodes, epochs=1, fail_on_error=False)
    wire.listen(episodes.start)
    wire.send({"ready": {"ids": [str(sample.id) for sample in samples]}})
    options: dict[str, Any] = {"model_roles": given["roles"]} if given["roles"] else {}
    await eval_async(
        task, model="agentrl/policy", log_dir=tempfile.mkdtemp(prefix="agentrl-inspect-"), log_level="error",
        max_samples=100_000, max_connections=100_000, log_realtime=False, log_images=False, retry_on_error=0,
        log_samples=False, **options,
    )  # fmt: skip


if __name__ == "__main__":
    asyncio.run(main())
