"""One tool call, from the policy's request to its answer. No policy output raises here."""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar, get_args, runtime_checkable

from agentrl.async_tasks import cancellations, forget_cancellations
from agentrl.env.toolenv.asked import tracked
from agentrl.env.toolenv.declare import Content, Stop, ToolResult
from agentrl.env.toolenv.json_schema import InvalidArguments, shorten
from agentrl.env.toolenv.observe import answered_error, to_content
from agentrl.env.toolenv.threads import CallTimeout, ToolRaised, current, run_apart
from agentrl.errors import infra_error
from agentrl.types import ToolCall

T = TypeVar("T")
Mistake = Literal[
    "parse_error",
    "unknown_tool",
    "invalid_args",
    "tool_exception",
    "tool_timeout",
    "too_many_calls",
    "output_truncated",
]
MISTAKES: tuple[Mistake, ...] = get_args(Mistake)


@runtime_checkable
class BoundTool(Protocol):
    """A tool bound to one episode: a method of the env or an external tool."""

    @property
    def name(self) -> str:
        """The name shown to the policy."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """The schema in the OpenAI format."""

    @property
    def parallel(self) -> bool:
        """Whether it may run concurrently with adjacent calls."""

    @property
    def timeout_s(self) -> float | None:
        """Timeout of one call; None means the setting's."""

    def validate(self, arguments: Mapping[str, object]) -> dict[str, Any]:
        """Validate and convert the arguments. Raises InvalidArguments."""

    def call(self, arguments: dict[str, Any], timeout_s: float | None) -> Awaitable[object]:
        """Run the tool; raises CallTimeout after `timeout_s`, and whatever the tool raises."""


@dataclass(slots=True)
class CallOutcome:
    """The result of one call."""

    call: ToolCall
    content: Content
    outcome: str = "ok"
    seconds: float = 0.0
    reward: object = 0.0
    """As the tool returned it; validated when rewards are summed."""
    stop: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


async def run_call(tools: Mapping[str, BoundTool], call: ToolCall, default_timeout_s: float) -> CallOutcome:
    """Validate and run one call.

    Raises:
        InfraError: a failure the policy cannot cause; cancellation also propagates.
    """
    bound = tools.get(call.name)
    if bound is None:
        known = ", ".join(tools) or "none"
        return CallOutcome(call, f"Error: unknown tool {call.name[:80]!r}; the tools are: {known}", "unknown_tool")
    try:
        arguments = bound.validate(call.arguments)
    except InvalidArguments as e:
        return CallOutcome(call, f"Error: invalid arguments: {e}", "invalid_args")
    timeout_s = bound.timeout_s if bound.timeout_s is not None else default_timeout_s
    start, before = time.perf_counter(), cancellations()
    try:
        outcome = _read_result(call, await bound.call(arguments, timeout_s))
    except CallTimeout as e:
        outcome = CallOutcome(call, f"Error: {call.name} timed out: {e}", "tool_timeout")
    except asyncio.CancelledError:
        if cancellations() > before:
            raise
        outcome = CallOutcome(call, "Error: CancelledError", "tool_exception")  # raised by the tool itself
    except Exception as e:
        cause = e.cause if isinstance(e, ToolRaised) else e
        if (infra := infra_error(cause)) is not None:
            raise infra from (None if infra is cause else cause)
        outcome = CallOutcome(call, answered_error(cause), "tool_exception")
    outcome.seconds = time.perf_counter() - start
    return outcome


def _read_result(call: ToolCall, value: object) -> CallOutcome:
    if isinstance(value, Stop):
        return CallOutcome(call, to_content(value.content), reward=value.reward, stop=True)
    if isinstance(value, ToolResult):
        return CallOutcome(
            call, to_content(value.content), reward=value.reward, stop=value.stop, metrics=value.metrics
        )
    return CallOutcome(call, to_content(value))


async def call_function(
    function: Callable[..., object],
    arguments: Mapping[str, object],
    timeout_s: float | None,
    *,
    inline: bool = False,
    apart: bool = False,
) -> Any:
    """Call a plain function on the episode's thread, or an async one with an enforced deadline.

    Args:
        function: the function to call.
        arguments: its keyword arguments.
        timeout_s: the deadline; None means no deadline.
        inline: call a plain function directly, without a deadline.
        apart: call a plain function on a separate thread, as outside of an episode.

    Raises:
        CallTimeout: the deadline has passed; an async function that ignores its cancellation is abandoned.
        InfraError: no thread could be started.
    """
    if inspect.iscoroutinefunction(function):
        return await within(function(**arguments), timeout_s)
    if inline:
        with wrapping_exits():
            value = function(**arguments)
    else:
        bound, thread = tracked(functools.partial(function, **arguments)), current.get()
        if thread is None or apart:
            value = await run_apart(bound, timeout_s, thread.on_timeout if thread else None)
        else:
            value = await thread.run(bound, timeout_s)
    return await within(value, timeout_s) if inspect.isawaitable(value) else value


def listed(function: Callable[..., object]) -> Callable[..., object]:
    """A plain function whose generator or other iterator is read where the function runs."""
    if inspect.iscoroutinefunction(function):
        return function

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        value = function(*args, **kwargs)
        if isinstance(value, Stop):  # not `replace`: a subclass may take other arguments
            return Stop(_read(value.content), value.reward)
        if isinstance(value, ToolResult):
            return ToolResult(_read(value.content), value.reward, value.stop, value.metrics)
        return _read(value)

    return call


async def read_returned(
    value: object, function: Callable[..., object], timeout_s: float | None, apart: bool
) -> Any:
    """Read an iterator that an async tool returned, on a thread; other values are unchanged."""
    if not isinstance(value.content if isinstance(value, Stop | ToolResult) else value, Iterator):
        return value
    returned = functools.wraps(function)(lambda: value)
    return await call_function(listed(returned), {}, timeout_s, apart=apart)


def _read(value: Any) -> Any:
    if not isinstance(value, Iterator):
        return value
    return [item for item in _items(value)]  # noqa: C416  # no timeout can end `list` over an iterator written in C


def _items(iterator: Any) -> Iterator[object]:
    """Its items. Raises TypeError if it is a generator that also returns a value, which nobody would see."""
    returned = yield from iterator
    if returned is not None:
        raise TypeError(
            f"a function that yields cannot also return a value, and this one returned {type(returned).__name__}: "
            "return a list of the items, or a ToolResult or Stop that contains it"
        )


async def within(coroutine: Awaitable[Any], timeout_s: float | None, grace_s: float = 1.0) -> Any:
    """Await `coroutine` for at most `timeout_s`; then cancel it and wait `grace_s` for cleanup.

    Raises:
        CallTimeout: the time is up. Exceptions of the coroutine propagate.
    """
    task = asyncio.ensure_future(no_exit(lambda: coroutine))
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task}, timeout=grace_s)
        _let_go(task, coroutine)
        raise
    if done:
        return task.result()
    task.cancel()
    await asyncio.wait({task}, timeout=grace_s)
    _let_go(task, coroutine)
    raise CallTimeout(f"no result after {timeout_s:g} s")


def _let_go(task: asyncio.Future[Any], coroutine: Awaitable[Any]) -> None:
    """Mark the exception of a cancelled task as read, and its coroutine as closed if it never began: both would be
    warned about."""
    if not task.done():
        return
    if not task.cancelled():
        task.exception()
    elif inspect.iscoroutine(coroutine):
        coroutine.close()


def awaitable(method: Callable[..., Awaitable[T]], *arguments: object) -> Awaitable[T]:
    """Call an async method of an author. Raises TypeError if it is a plain one, whose result cannot be awaited."""
    found = method(*arguments)
    if inspect.isawaitable(found):
        return found
    name = getattr(method, "__qualname__", method)
    raise TypeError(f"{name} returned {shorten(found)}, which cannot be awaited: write `async def`")


async def no_exit(method: Callable[..., Awaitable[T]], *arguments: object) -> T:
    """Call an author's async method and await it; see `awaitable` and `wrapping_exits`."""
    with wrapping_exits():
        return await awaitable(method, *arguments)


@contextmanager
def wrapping_exits() -> Iterator[None]:
    """Raise `ToolRaised` for what would end the event loop or its task.

    These are exceptions that are not plain ones, such as SystemExit, and a CancelledError of something that the
    author's code awaited, although nobody cancelled the current task. Requests to cancel it that the author's code
    has caught, or that a TaskGroup has left behind (before Python 3.13), are dropped when the code ends.
    """
    before = cancellations()
    try:
        yield
    except (GeneratorExit, KeyboardInterrupt):
        raise
    except asyncio.CancelledError as e:
        if cancellations() > before:
            raise
        raise ToolRaised(e) from None
    except BaseException as e:
        forget_cancellations(before)
        if isinstance(e, Exception) and not isinstance(e, StopIteration):  # that would leave no coroutine
            raise
        raise ToolRaised(e) from None
    else:
        forget_cancellations(before)
