"""ToolEnv: the environment contract, implemented with typed methods.

One instance plays one episode at a time. `reset` clears state of the last episode, runs `setup` with the data row,
and opens with the class docstring as system prompt; `step` runs the calls of a message in order and answers each;
a message without a call ends the episode, unless `respond` returns an answer.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.chat.messages import MessageFormatError, read_well_formed
from agentrl.env.env import StepInfo
from agentrl.env.images import returns_image
from agentrl.env.mcp import McpConnection, McpServer, mcp_tools
from agentrl.env.toolenv import toolbox
from agentrl.env.toolenv.asked import asking
from agentrl.env.toolenv.calls import CallRunner, add_counts, answer, checked_metrics
from agentrl.env.toolenv.declare import Stop, ToolResult, is_content
from agentrl.env.toolenv.dispatch import BoundTool, call_function
from agentrl.env.toolenv.held_back import HeldBack, acts_outside
from agentrl.env.toolenv.json_schema import shorten
from agentrl.env.toolenv.observe import error_text, to_content
from agentrl.env.toolenv.rewards import TurnView
from agentrl.env.toolenv.scoring import ScoredEnv
from agentrl.env.toolenv.spec import class_spec, reserve_names
from agentrl.env.toolenv.threads import CallTimeout, EpisodeThread, ToolRaised, current
from agentrl.errors import ConfigError, EnvError, InfraError, JudgeError, infra_error, traceback_of
from agentrl.sandbox import Box, Sandbox, pool_for
from agentrl.types import Message, StopReason, Task

HOOK_S = 2.0
"""Timeout of `on_timeout`."""

Step = tuple[Sequence[Message], float, bool, bool, StepInfo]


class ToolEnv(ScoredEnv):
    """Base of environments written as typed methods; the docstring of the subclass is the system prompt."""

    sandbox: Sandbox | None = None
    """The sandbox behind `self.box`: `sandbox = Sandbox(...)` on a class leases a new one for every episode."""
    box: Box
    """The sandbox of this episode, on classes that declare one; available from before `setup` until after
    `teardown`."""
    toolboxes: Sequence[Callable[[], object]] = ()
    """Classes with @tool methods (for example, those in `agentrl.tools`) whose tools are added to the declared
    ones. They run in `self.box` if the class declares a sandbox, otherwise each in a separate one."""
    mcp: Sequence[McpServer] = ()
    """MCP servers whose tools are added to the declared ones; each episode gets separate sessions."""
    task: Task
    rng: random.Random
    """Random generator seeded with the task's seed before `setup`; use it for all randomness in an episode."""

    _pristine: dict[str, object] | None = None
    _was_set_up: bool = False
    _leases: dict[Sandbox, Box]
    _connections: list[McpConnection]
    _toolboxes: list[Any]

    def __new__(cls, *args: Any, **kwargs: object) -> ToolEnv:
        if (args or kwargs) and cls.__init__ is object.__init__:  # Python would accept them
            given = ", ".join([*map(repr, args), *kwargs])
            raise TypeError(f"{cls.__name__} takes no arguments (it has no __init__), got {given}")
        env = super().__new__(cls)
        env._tools, env._leases, env._connections, env._toolboxes = None, {}, [], []
        env._turns = 0
        env._calls = CallRunner()
        env._thread = EpisodeThread(env._interrupt)
        env._unweighted = {}
        return env

    _tools: dict[str, BoundTool] | None
    _turns: int
    _calls: CallRunner

    # Optional hooks, in addition to @tool and @reward.

    def setup(self, *args: Any, **row: Any) -> object:
        """Start an episode with one data row as keyword arguments; may be async.

        Returns the user message (text or parts), or a sequence of messages that follow the system prompt, as
        `Message` or as `{"role": "user", "content": "..."}`.
        """
        return ""

    def system(self) -> str:
        """The system prompt; called after `setup`. If empty, there is no system message."""
        return class_spec(type(self)).system

    def respond(self, message: Message) -> object:
        """The user's answer to a message without a tool call; may be async.

        None ends the episode; `Stop(text, reward)` ends it with a last message; `ToolResult(text, reward=...)`
        adds a reward to the turn.
        """
        return None

    def teardown(self) -> object:
        """Release what `setup` acquired; may be async; called exactly once per episode, however it ended."""
        return None

    def on_timeout(self, name: str) -> object:
        """Interrupt a plain method that exceeded its timeout, for example with `self.db.interrupt()`; may be
        async.

        Runs on another thread while the method is still running, for at most two seconds. Toolboxes may define it,
        too.

        Args:
            name: name of the method: a tool, `setup`, `respond`, `teardown` or a reward.
        """
        return None

    def more_tools(self) -> Sequence[BoundTool]:
        """Additional tools, created for each episode before `setup`; for classes that build tools from data.

        They may depend on `self.task`. Build tools from functions with `agentrl.env.toolenv.spec.tool_from`.
        """
        return ()

    # The contract.

    @classmethod
    def check_class(cls) -> None:
        """Raises ConfigError if the declaration of a tool, a reward, `setup` or another hook is invalid."""
        cls.spec()

    @classmethod
    def row_problem(cls, row: Mapping[str, object]) -> str:
        """Why a data row does not fit the arguments of `setup`; empty if it fits."""
        return cls.spec().setup.problem(row) or ""

    def outside_tools(self) -> Sequence[str]:
        """Tools of MCP servers, and of toolboxes with `outside = True`."""
        return [name for name, tool in self._bound().items() if acts_outside(tool)]

    def image_tools(self) -> Sequence[str]:
        """Methods whose return type includes `Image`."""
        return [name for name, tool in self._bound().items() if returns_image(tool)]

    @property
    def tools(self) -> Sequence[Mapping[str, object]]:
        """Schemas of all tools, in the order of definition."""
        return [tool.schema for tool in self._bound().values()]

    async def reset(self, task: Task) -> tuple[Sequence[Message], Mapping[str, object]]:
        """Start an episode.

        Raises:
            ConfigError: the row does not fit `setup`.
            InfraError: `setup` failed or timed out.
        """
        if self._open:
            await self.close()
        self._restore()
        self._thread = EpisodeThread(self._interrupt)
        with self._on_thread():
            return await self._begin(task)

    async def _begin(self, task: Task) -> tuple[Sequence[Message], Mapping[str, object]]:
        where = type(self).__name__
        if problem := self.spec().setup.problem(task.row):
            raise ConfigError(f"task {task.id!r}: {problem}")
        self.check_weights()
        # All episodes share the tasks, and an env may modify its row.
        task = replace(task, row={name: _copied(value, name, task) for name, value in task.row.items()})
        self.task, self.rng = task, random.Random(task.seed)
        self._open = True
        await self.prepare()
        try:
            row = self.spec().setup.converted(task.row)
            opening = await call_function(self.setup, row, self.settings.setup_timeout_s)
            self._was_set_up = True
            text = await call_function(self.system, {}, self.settings.setup_timeout_s, inline=self._plain_system)
        except CallTimeout as e:
            raise InfraError(f"{where}.setup on task {task.id!r}: {e}") from None
        except (InfraError, ConfigError):
            raise
        except Exception as e:
            cause = e.cause if isinstance(e, ToolRaised) else e
            error = f"{where}.setup on task {task.id!r}: {error_text(cause)}\n{traceback_of(cause)}"
            raise InfraError(error) from cause
        if not isinstance(text, str):
            raise ConfigError(f"{where}.system returned {shorten(text)}; return text")
        messages = [Message("system", text)] if text else []
        return [*messages, *self._opening(opening)], {}

    async def prepare(self) -> None:
        """Acquire the declared resources (a sandbox, tool servers); runs before `setup`."""
        self._tools, self._toolboxes, self._connections = None, [], []  # toolboxes live as long as an episode
        self._bound()
        if not self.hold_back:
            await asyncio.gather(*[connection.open() for connection in self._connections])
        if self.sandbox is not None:
            self.box = await self.lease(self.sandbox)
        for made in self._toolboxes:
            if isinstance(wanted := getattr(made, "sandbox", None), Sandbox):
                made.box = await self.lease(self.sandbox or wanted)
        await toolbox.begin(self._toolboxes, self.settings.setup_timeout_s)

    async def lease(self, spec: Sandbox) -> Box:
        """The episode's sandbox for a spec; the same spec returns the same sandbox. Raises SandboxError."""
        if spec not in self._leases:
            self._leases[spec] = await pool_for(spec).acquire(self.task.id)
        return self._leases[spec]

    async def step(self, message: Message) -> Step:
        """Run the calls of `message`, or end the episode. Turn rewards are in `info.metrics` as `reward/<name>`.

        Raises:
            InfraError: a failure the policy cannot cause.
        """
        info = StepInfo()
        with self._on_thread():
            outcomes = await self._calls.run(message.tool_calls, self._bound(), self.settings, self._thread)
        info.faults = faults = dict[str, str]()
        for outcome in outcomes:
            outcome.metrics = checked_metrics(outcome.metrics, outcome.call.name, faults)
        answers = answer(outcomes, message, self.settings, self.count_tokens, images=self.reads_images)
        view, metrics, user = answers.view, answers.metrics, ToolResult([])
        if not outcomes and not message.parse_errors:
            user = await self._ask_user(message)
            view.extend(user.content)
            if user.stop:
                info.stop_reason = StopReason.TERMINATED if view else StopReason.ANSWERED
            add_counts(metrics, checked_metrics(user.metrics, "respond", faults))
        elif any(o.stop for o in outcomes):
            info.stop_reason = StopReason.STOPPED_BY_TOOL
        elif answers.fatal:
            info.stop_reason = StopReason.TERMINATED
        elif self._calls.over_limit(self.settings):
            info.stop_reason = StopReason.TOOL_CALL_LIMIT
        if self._thread.lost and info.stop_reason in (None, StopReason.TOOL_CALL_LIMIT):
            info.stop_reason = StopReason.TIMEOUT
            add_counts(metrics, {"stuck_calls": 1.0})
        truncated = info.stop_reason in (StopReason.TOOL_CALL_LIMIT, StopReason.TIMEOUT)
        terminated = info.stop_reason is not None and not truncated
        info.calls = answers.records
        turn = TurnView(self._turns, message, info.calls, tuple(view), terminated)
        earned = sum(self._reward_of(outcome.call.name, outcome.reward, faults) for outcome in outcomes)
        said = self._reward_of("respond", user.reward, faults)
        for name, part in (("reward/tools", earned), ("reward/mistakes", -answers.penalty), ("reward/env", said)):
            if part:
                add_counts(metrics, {name: part})
        reward = earned + said - answers.penalty + await self._turn_rewards(turn, metrics, faults)
        self._turns += 1
        info.metrics = metrics
        return view, reward, terminated, truncated, info

    async def close(self) -> None:
        """Run `teardown` once; idempotent."""
        if not self._open:
            return
        self._open = False
        with self._on_thread():
            try:
                if type(self).teardown is not ToolEnv.teardown:
                    await call_function(self.teardown, {}, self.settings.teardown_timeout_s)
            except asyncio.CancelledError:
                raise
            except Exception as e:
                # After a failed setup, teardown errors add no information: the failure has been raised already.
                if self._was_set_up:
                    cause = e.cause if isinstance(e, ToolRaised) else e
                    raise InfraError(f"{type(self).__name__}.teardown: {error_text(cause)}") from e
            finally:
                self._was_set_up = False
                try:
                    await self.release()
                finally:
                    await self._thread.close()

    async def release(self) -> None:
        """Release what `prepare` acquired; runs after `teardown`, even if that failed or took too long."""
        failures: list[str] = []
        try:
            failures += await toolbox.end(self._toolboxes, self.settings.teardown_timeout_s)
        finally:
            leases, self._leases = self._leases, {}
            for spec, box in leases.items():
                try:
                    await pool_for(spec).release(box)
                except InfraError as e:  # the others are released all the same
                    failures.append(str(e))
            for connection in self._connections:
                await connection.close()
        if failures:
            raise InfraError("; ".join(failures))

    # Internals.

    @property
    def _plain_system(self) -> bool:
        """Whether `system` is the default, which needs no thread."""
        return type(self).system.__module__.startswith("agentrl.env.")

    async def _interrupt(self, name: str) -> bool:
        """Call `on_timeout` of the env and toolboxes for the method with this name; returns whether any is
        defined."""
        current.set(None)  # hooks have no `on_timeout`
        owners = [] if type(self).on_timeout is ToolEnv.on_timeout else [self]
        owners += [made for made in self._toolboxes if hasattr(made, "on_timeout")]
        for owner in owners:
            try:
                await call_function(owner.on_timeout, {"name": name}, HOOK_S)
            except Exception as e:
                warnings.warn(f"{type(owner).__name__}.on_timeout({name!r}): {error_text(e)}", stacklevel=2)
        return bool(owners)

    def _bound(self) -> dict[str, BoundTool]:
        if self._tools is None:
            tools: list[BoundTool] = [spec.bind(self) for spec in self.spec().tools]
            for make in self.toolboxes:
                tools += self._open_toolbox(make)
            for server in self.mcp:
                tools += self._connect(server)
            tools += self._tools_of_task()
            found = {tool.name: tool for tool in tools}
            if len(found) < len(tools):
                names = [tool.name for tool in tools]
                twice = next(name for name in names if names.count(name) > 1)
                hint = "rename one, or give its MCP server a `prefix`" if self._connections else "rename one"
                raise ConfigError(f"{type(self).__name__}: two tools are named {twice!r}; {hint}")
            if self.hold_back:
                found = {name: HeldBack(tool) if acts_outside(tool) else tool for name, tool in found.items()}
            self._tools = found
        return self._tools

    def _tools_of_task(self) -> Sequence[BoundTool]:
        where = f"{type(self).__name__}.more_tools"
        try:
            found: object = self.more_tools()
        except (ConfigError, InfraError):
            raise
        except Exception as e:
            if isinstance(e, AttributeError) and e.name == "task" and e.obj is self:
                return ()  # asked before `reset`: there is no task yet
            raise ConfigError(f"{where}: {error_text(e)}\n{traceback_of(e)}") from e
        if not isinstance(found, Sequence) or not all(hasattr(tool, "schema") for tool in found):
            raise ConfigError(
                f"{where}: return a list of tools made with tool_from(function), got {found!r}"[:300]
            )
        return found

    def _open_toolbox(self, make: Callable[[], object]) -> Sequence[BoundTool]:
        made = make()
        self._toolboxes.append(made)
        return toolbox.toolbox_tools(made)

    def _connect(self, server: McpServer) -> Sequence[BoundTool]:
        connection = McpConnection(server)
        self._connections.append(connection)
        return mcp_tools(server, connection)

    def _restore(self) -> None:
        """Remove the attributes that the last episode set on the instance."""
        if self._pristine is None:
            self._pristine = dict(self.__dict__)
        else:
            pristine = self._pristine
            run = {
                key: self.__dict__[key]
                for key in (
                    "settings",
                    "solved_at",
                    "count_tokens",
                    "decode",
                    "reads_images",
                    "model",
                    "gives_hints",
                    "hold_back",
                )
                if key in self.__dict__
            }
            self.__dict__.clear()
            self.__dict__.update(pristine | run)
            self._pristine = pristine
        self._turns, self._calls = 0, CallRunner()
        self._leases, self._unweighted = {}, {}

    def _opening(self, opening: object) -> list[Message]:
        where = f"{type(self).__name__}.setup"
        if opening is None or (isinstance(opening, str) and opening == ""):
            return []
        if _is_no_message(opening):
            raise ConfigError(f"{where} returned {shorten(opening)}; return the user's message, or messages")
        try:
            messages = _messages(opening)
        except (TypeError, MessageFormatError) as e:
            raise ConfigError(f"{where} returned no user message: {e}") from None
        if (odd := _odd_content(messages)) is not None:
            raise ConfigError(f"{where} returned a message whose content is {odd}, not text")
        return messages

    async def _ask_user(self, message: Message) -> ToolResult:
        """The user's answer: a list of messages as content, empty if the episode ends without one."""
        if type(self).respond is ToolEnv.respond:
            return ToolResult([], stop=True)
        limit_s = self.settings.setup_timeout_s
        try:
            with self._on_thread(), asking() as asked:
                said: object = await call_function(self.respond, {"message": message}, limit_s)
        except ConfigError:
            raise
        except Exception as e:
            if (infra := infra_error(e)) is not None:
                raise infra from (None if infra is e else e)
            if isinstance(e, CallTimeout) and asked.waiting:
                text = f"{type(self).__name__}.respond: no answer of {asked.waiting[0]} within {limit_s:g} s"
                raise JudgeError(text) from None
            cause = e.cause if isinstance(e, ToolRaised) else e
            text = f"{type(self).__name__}.respond: {error_text(cause)}\n{traceback_of(cause)}"
            raise EnvError(text) from cause
        if said is None:
            return ToolResult([], stop=True)
        if isinstance(said, Stop):
            said = ToolResult(said.content, said.reward, stop=True)
        given = said if isinstance(said, ToolResult) else ToolResult(said)
        return replace(given, content=self._user_messages(given))

    def _user_messages(self, said: ToolResult) -> list[Message]:
        where = f"{type(self).__name__}.respond"
        if _is_no_message(said.content):
            raise EnvError(f"{where} returned {shorten(said.content)}; return text, or None")
        if said.stop and said.content in ("", None):
            return []
        try:
            messages = _messages(said.content)
        except (TypeError, MessageFormatError) as e:
            raise EnvError(f"{where}: {e}") from None
        if (odd := _odd_content(messages)) is not None:
            raise EnvError(f"{where} returned a message whose content is {odd}, not text")
        return messages


def _copied(value: Any, name: str, task: Task) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception as e:
        said = "nested too deeply" if isinstance(e, RecursionError) else f"{type(e).__name__}: {e}"
        raise ConfigError(
            f"task {task.id!r}: the value of {name!r} cannot be copied ({said}), and every episode needs its own"
        ) from None


def _messages(value: object) -> list[Message]:
    """The messages that a method returned, as `Message` or in OpenAI's form; anything else is the user's.

    Raises:
        MessageFormatError: a message in OpenAI's form cannot be read.
        TypeError: the value has no JSON form.
    """
    parts = list(value) if isinstance(value, list | tuple) else [value]
    if parts and all(isinstance(part, Message) or _is_openai_message(part) for part in parts):
        return [part if isinstance(part, Message) else read_well_formed(part) for part in parts]
    return [Message("user", to_content(value))]


def _is_openai_message(value: object) -> bool:
    return isinstance(value, Mapping) and "role" in value and ("content" in value or "tool_calls" in value)


def _odd_content(messages: Sequence[Message]) -> str | None:
    """The first content that is neither text nor parts; None if there is none."""
    odd = (shorten(m.content) for m in messages if not isinstance(m.content, str) and not is_content(m.content))
    return next(odd, None)


def _is_no_message(value: object) -> bool:
    """Whether a value is never meant to be read, although it could be written as JSON."""
    return isinstance(value, bool | Stop | ToolResult) or inspect.isgenerator(value)


reserve_names(ToolEnv)
