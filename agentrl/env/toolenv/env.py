"""ToolEnv: the environment contract implemented from typed methods.

One instance plays one episode at a time. `reset` clears what the last episode left on the instance, runs `setup`
with the data row, and opens with the class docstring as system prompt; `step` runs the calls of a message in
order and answers each; a message without a call ends the episode, unless `respond` has something to say.
"""

from __future__ import annotations

import asyncio
import random
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from agentrl.env.env import DeclaredReward, Env, StepInfo
from agentrl.env.images import returns_image
from agentrl.env.mcp import McpConnection, McpServer, mcp_tools
from agentrl.env.solved import SolvedAt, SolvedRule
from agentrl.env.toolenv import toolbox
from agentrl.env.toolenv.asked import asking
from agentrl.env.toolenv.dispatch import BoundTool, CallOutcome, Mistake, call_function, run_call
from agentrl.env.toolenv.held_back import HeldBack, acts_outside
from agentrl.env.toolenv.observe import (
    cut_content,
    error_text,
    plain_text,
    text_only,
    to_content,
)
from agentrl.env.toolenv.rewards import BadReward, Rewards, TurnView, check_group, check_number, weight_of
from agentrl.env.toolenv.settings import ToolSettings
from agentrl.env.toolenv.spec import ClassSpec, RewardSpec, class_spec, reserve_names, unknown_weights
from agentrl.env.toolenv.threads import CallTimeout, EpisodeThread, ToolRaised, current
from agentrl.errors import ConfigError, EnvError, InfraError, JudgeError, RewardError, traceback_of
from agentrl.sandbox import Box, Sandbox, pool_for
from agentrl.types import CallRecord, Episode, Message, StopReason, Task, ToolCall

HOOK_S = 2.0
"""How long an `on_timeout` may take."""

Step = tuple[Sequence[Message], float, bool, bool, StepInfo]


class ToolEnv(Env):
    """Base of environments written as typed methods; the docstring of the subclass is the system prompt."""

    settings: ToolSettings = ToolSettings()
    sandbox: Sandbox | None = None
    """What `self.box` is: `sandbox = Sandbox(...)` on a class leases a fresh one for every episode."""
    box: Box
    """The sandbox of this episode, on classes that declare one; from before `setup` until after `teardown`."""
    toolboxes: Sequence[Callable[[], Any]] = ()
    """Classes with @tool methods (those in `agentrl.tools`, for instance) whose tools join the declared ones. They
    work in `self.box` where the class declares a sandbox, else in one of their own."""
    mcp: Sequence[McpServer] = ()
    """MCP servers whose tools join the declared ones; each episode has sessions of its own."""
    task: Task
    rng: random.Random
    """Seeded with the task's seed before `setup`: the only source of randomness an episode needs."""

    _pristine: dict[str, Any] | None = None
    _open: bool = False
    _was_set_up: bool = False
    _leases: dict[Sandbox, Box]
    _connections: list[McpConnection]
    _toolboxes: list[Any]
    _thread: EpisodeThread
    _unweighted: dict[str, float]

    def __new__(cls, *args: Any, **kwargs: Any) -> ToolEnv:
        if (args or kwargs) and cls.__init__ is object.__init__:  # Python itself would let them pass
            given = ", ".join([*map(repr, args), *kwargs])
            raise TypeError(f"{cls.__name__} takes no arguments (it has no __init__), got {given}")
        env = super().__new__(cls)
        env._tools, env._leases, env._connections, env._toolboxes = None, {}, [], []
        env._turns = 0
        env._num_calls = 0
        env._thread = EpisodeThread(env._interrupt)
        env._unweighted = {}
        return env

    _tools: dict[str, BoundTool] | None
    _turns: int
    _num_calls: int

    @classmethod
    def spec(cls) -> ClassSpec:
        """The declared tools, rewards and row arguments. Raises ConfigError where they cannot be used."""
        return class_spec(cls)

    # What an author may write beside @tool and @reward.

    def setup(self, *args: Any, **row: Any) -> Any:
        """Begin an episode with one data row as keyword arguments; may be async.

        Returns the user message (text or parts), or a sequence of messages that follow the system prompt.
        """
        return ""

    def system(self) -> str:
        """The system prompt; asked after `setup`. No system message where it is empty."""
        return class_spec(type(self)).system

    def respond(self, message: Message) -> Any:
        """What the user answers to a message without a tool call; may be async. None ends the episode."""
        return None

    def teardown(self) -> Any:
        """Free what `setup` took; may be async; runs exactly once an episode, however it ended."""
        return None

    def on_timeout(self, name: str) -> Any:
        """End a plain method that outlived its limit, for instance `self.db.interrupt()`; may be async.

        Runs on another thread while the method still runs, for two seconds at most. Toolboxes may have one too.

        Args:
            name: of the method: a tool, `setup`, `respond`, `teardown` or a reward.
        """
        return None

    def more_tools(self) -> Sequence[BoundTool]:
        """Tools beside the declared ones, asked anew for each episode; for classes that make them from data."""
        return ()

    # The contract.

    @classmethod
    def check_class(cls) -> None:
        """Raises ConfigError where a tool, a reward or `setup` is declared in a way that cannot be used."""
        cls.spec()

    @classmethod
    def row_problem(cls, row: Mapping[str, Any]) -> str:
        """Why a data row does not fit the arguments of `setup`; empty where it does."""
        return cls.spec().setup.problem(row) or ""

    def configure(
        self, settings: Mapping[str, Any], reward_weights: Mapping[str, float], solved_at: SolvedAt = None
    ) -> None:
        """Apply the settings, reward weights and `solved_at` of a run; see `Env.configure`."""
        weights = {"reward_weights": reward_weights} if reward_weights else {}
        if settings or weights:
            self.settings = self.settings.changed({**settings, **weights})
            self.check_weights()
        super().configure({}, {}, solved_at)
        if isinstance(solved_at, Mapping):
            self.check_solved_at(solved_at)

    def declared_rewards(self) -> Mapping[str, DeclaredReward]:
        """The methods marked `@reward`, in the order of definition."""
        weights = self.settings.reward_weights
        return {r.name: DeclaredReward(r.mark.per, weight_of(r, weights)) for r in self.spec().rewards}

    @property
    def scores_groups(self) -> bool:
        """Whether a reward per group is declared, or `score_group` overridden."""
        return type(self).score_group is not ToolEnv.score_group or any(
            reward.mark.per == "group" for reward in self.spec().rewards
        )

    def outside_tools(self) -> Sequence[str]:
        """Tools of MCP servers, and those of toolboxes that say `outside = True`."""
        return [name for name, tool in self._bound().items() if acts_outside(tool)]

    def image_tools(self) -> Sequence[str]:
        """Methods whose return type names `Image`."""
        return [name for name, tool in self._bound().items() if returns_image(tool)]

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Schemas of all tools, in the order of definition."""
        return [tool.schema for tool in self._bound().values()]

    async def reset(self, task: Task) -> tuple[Sequence[Message], Mapping[str, Any]]:
        """Begin an episode.

        Raises:
            ConfigError: the row does not fit `setup`.
            InfraError: `setup` failed or ran out of time.
        """
        if self._open:
            await self.close()
        self._restore()
        self._thread = EpisodeThread(self._interrupt)
        with self._on_thread():
            return await self._begin(task)

    async def _begin(self, task: Task) -> tuple[Sequence[Message], Mapping[str, Any]]:
        where = type(self).__name__
        if problem := self.spec().setup.problem(task.row):
            raise ConfigError(f"task {task.id!r}: {problem}")
        self.check_weights()
        self.task, self.rng = task, random.Random(task.seed)
        self._open = True
        await self.prepare()
        try:
            opening = await call_function(self.setup, dict(task.row), self.settings.setup_timeout_s)
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
        messages = [Message("system", text)] if text else []
        return [*messages, *self._opening(opening)], {}

    def check_weights(self) -> None:
        """Raises ConfigError when a weight of the run names no reward."""
        unknown_weights(self.spec(), self.settings.reward_weights, f"reward weights of {type(self).__name__}")

    def check_solved_at(self, thresholds: Mapping[str, float]) -> None:
        """Raises ConfigError when a threshold of the run names no reward per episode."""
        known = [name for name, reward in self.declared_rewards().items() if reward.per == "episode"]
        if unknown := [name for name in thresholds if name not in known]:
            raise ConfigError(
                f"env.solved_at: {unknown[0]!r} is no reward per episode of {type(self).__name__}; "
                f"they are: {', '.join(known) or 'none'}"
            )

    async def prepare(self) -> None:
        """Acquire what the class declares (a sandbox, tool servers); runs before `setup`."""
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
        """A sandbox for this episode; the same one whenever the same spec is asked for. Raises SandboxError."""
        if spec not in self._leases:
            self._leases[spec] = await pool_for(spec).acquire(self.task.id)
        return self._leases[spec]

    async def step(self, message: Message) -> Step:
        """Run the calls of `message`, or end. Rewards of the turn are in `info.metrics` as `reward/<name>`.

        Raises:
            InfraError: what the policy cannot cause.
        """
        info, view = StepInfo(), list[Message]()
        metrics: dict[str, float] = {}
        penalties, fatal = 0.0, False
        with self._on_thread():
            outcomes = await self._run_calls(message.tool_calls)
        mistakes: list[Mistake | str] = [o.outcome for o in outcomes if o.outcome not in ("ok", "not_run")]
        records: list[CallRecord] = []
        for outcome in outcomes:
            content = outcome.content
            if not self.reads_images:
                content, left_out = text_only(content)
                _add(metrics, {"images_left_out": 1.0} if left_out else {})
            content, cut = cut_content(content, self.settings.observation_tokens, self.count_tokens)
            if cut:
                mistakes.append("output_truncated")
            call = outcome.call
            view.append(Message("tool", content, tool_call_id=call.id, name=call.name))
            records.append(CallRecord(call, plain_text(content), outcome.outcome, outcome.seconds))
            _add(metrics, outcome.metrics)
        for error in message.parse_errors:
            text, _ = cut_content(f"Error: {error}", self.settings.observation_tokens, self.count_tokens)
            view.append(Message("tool", text))
            mistakes.append("parse_error")
        for mistake in mistakes:
            _add(metrics, {mistake: 1.0})
            policy = self.settings.mistakes.get(mistake, "observe")
            penalties += self.settings.mistake_penalty if policy == "penalise" else 0.0
            fatal |= policy == "terminate"
        if not outcomes and not message.parse_errors:
            view.extend(await self._ask_user(message))
            info.stop_reason = None if view else StopReason.ANSWERED
        elif any(o.stop for o in outcomes):
            info.stop_reason = StopReason.STOPPED_BY_TOOL
        elif fatal:
            info.stop_reason = StopReason.TERMINATED
        elif self._over_limit():
            info.stop_reason = StopReason.TOOL_CALL_LIMIT
        if self._thread.lost and info.stop_reason in (None, StopReason.TOOL_CALL_LIMIT):
            info.stop_reason = StopReason.TIMEOUT
            _add(metrics, {"stuck_calls": 1.0})
        truncated = info.stop_reason in (StopReason.TOOL_CALL_LIMIT, StopReason.TIMEOUT)
        terminated = info.stop_reason is not None and not truncated
        info.calls = tuple(records)
        turn = TurnView(self._turns, message, info.calls, tuple(view), terminated)
        info.faults = faults = dict[str, str]()
        earned = sum(self._earned(outcome, faults) for outcome in outcomes)
        for name, part in (("reward/tools", earned), ("reward/mistakes", -penalties)):
            if part:
                _add(metrics, {name: part})
        reward = earned - penalties + await self._turn_rewards(turn, metrics, faults)
        self._turns += 1
        info.metrics = metrics
        return view, reward, terminated, truncated, info

    async def score(self, episode: Episode) -> Mapping[str, float]:
        """Rewards of the episode by name, weighted.

        Raises:
            RewardError: one raised, ran out of time, or returned no finite number; the error holds the others.
            InfraError: a judge cannot be reached.
        """
        return (await self._ask_all("episode", episode)).result()

    def solved_rule(self) -> SolvedRule | None:
        """`solved_at` where it is given, else what the rewards declare (see `agentrl.env.solved`)."""
        return super().solved_rule() or self.spec().solved

    def solved_verdict(self, rewards: Mapping[str, float], total: float) -> bool | None:
        """As any env; parts are compared before their weights."""
        return super().solved_verdict({**rewards, **self._unweighted}, total)

    async def score_group(self, episodes: Sequence[Episode]) -> list[dict[str, float]]:
        """Rewards per group: for each of the scored episodes of one task, weighted values by name.

        The instance has what its `__init__` made, and was never set up.

        Raises:
            RewardError: as `score`, or there is not one number for each episode.
            InfraError: a judge cannot be reached.
        """
        found: list[dict[str, float]] = [{} for _ in episodes]
        rewards = Rewards(type(self).__name__, self.settings.reward_timeout_s)
        for spec in self.spec().rewards:
            if spec.mark.per == "group":
                values = [0.0 for _ in episodes]

                def read(value: Any, values: list[float] = values) -> Mapping[str, float]:
                    values[:] = check_group(value, len(episodes))
                    return {}

                await self._ask_reward(rewards, spec, getattr(self, spec.attribute), episodes, read)
                weight = weight_of(spec, self.settings.reward_weights)
                for parts, value in zip(found, values, strict=True):
                    parts[spec.name] = weight * value
        if not self._open:
            await self._thread.close()
        if rewards.faults:
            raise RewardError(rewards.faults, found)
        return found

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
                # After a setup that failed, what teardown misses is no news: the failure itself has been raised.
                if self._was_set_up:
                    raise InfraError(f"{type(self).__name__}.teardown: {error_text(e)}") from e
            finally:
                self._was_set_up = False
                await self.release()
                await self._thread.close()

    async def release(self) -> None:
        """Give back what `prepare` took; runs after `teardown` even when that failed."""
        failures = await toolbox.end(self._toolboxes, self.settings.teardown_timeout_s)
        leases, self._leases = self._leases, {}
        for spec, box in leases.items():
            await pool_for(spec).release(box)
        for connection in self._connections:
            await connection.close()
        if failures:
            raise InfraError("; ".join(failures))

    # The machinery.

    @property
    def _plain_system(self) -> bool:
        """Whether `system` is ours, so that it needs no thread."""
        return type(self).system.__module__.startswith("agentrl.env.")

    @contextmanager
    def _on_thread(self) -> Iterator[None]:
        """Inside, plain functions run on the thread of this episode."""
        token = current.set(self._thread)
        try:
            yield
        finally:
            current.reset(token)

    async def _interrupt(self, name: str) -> bool:
        """Ask the `on_timeout` of env and toolboxes to end the method of this name; whether there is any."""
        current.set(None)  # nobody is asked to end a hook
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
            tools += self.more_tools()
            found = {tool.name: tool for tool in tools}
            if len(found) < len(tools):
                names = [tool.name for tool in tools]
                twice = next(name for name in names if names.count(name) > 1)
                raise ConfigError(f"{type(self).__name__}: two tools are named {twice!r}")
            if self.hold_back:
                found = {name: HeldBack(tool) if acts_outside(tool) else tool for name, tool in found.items()}
            self._tools = found
        return self._tools

    def _open_toolbox(self, make: Callable[[], Any]) -> Sequence[BoundTool]:
        made = make()
        self._toolboxes.append(made)
        return toolbox.toolbox_tools(made)

    def _connect(self, server: McpServer) -> Sequence[BoundTool]:
        connection = McpConnection(server)
        self._connections.append(connection)
        return mcp_tools(server, connection)

    def _restore(self) -> None:
        """Forget whatever the last episode put on the instance."""
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
                    "hold_back",
                )
                if key in self.__dict__
            }
            self.__dict__.clear()
            self.__dict__.update(pristine | run)
            self._pristine = pristine
        self._turns = self._num_calls = 0
        self._leases, self._unweighted = {}, {}

    def _opening(self, opening: Any) -> list[Message]:
        if isinstance(opening, list | tuple) and opening and all(isinstance(m, Message) for m in opening):
            return list(opening)
        if opening is None or opening == "":
            return []
        try:
            return [Message("user", to_content(opening))]
        except TypeError as e:
            raise ConfigError(f"{type(self).__name__}.setup returned no user message: {e}") from None

    async def _ask_user(self, message: Message) -> list[Message]:
        if type(self).respond is ToolEnv.respond:
            return []
        limit_s = self.settings.setup_timeout_s
        try:
            with self._on_thread(), asking() as asked:
                said: Any = await call_function(self.respond, {"message": message}, limit_s)
        except (InfraError, ConfigError):
            raise
        except Exception as e:
            if isinstance(e, CallTimeout) and asked.waiting:
                text = f"{type(self).__name__}.respond: no answer of {asked.waiting[0]} within {limit_s:g} s"
                raise JudgeError(text) from None
            cause = e.cause if isinstance(e, ToolRaised) else e
            text = f"{type(self).__name__}.respond: {error_text(cause)}\n{traceback_of(cause)}"
            raise EnvError(text) from cause
        if said is None:
            return []
        if isinstance(said, Message):
            return [said]
        try:
            return [Message("user", to_content(said))]
        except TypeError as e:
            raise EnvError(f"{type(self).__name__}.respond: {e}") from None

    def _over_limit(self) -> bool:
        limit = self.settings.max_tool_calls
        return limit is not None and self._num_calls > limit

    async def _run_calls(self, calls: Sequence[ToolCall]) -> list[CallOutcome]:
        """Run the calls in order; neighbours whose tools are parallel at the same time; all are answered."""
        outcomes: list[CallOutcome] = []
        position = 0
        while position < len(calls):
            batch = self._next_batch(calls, position)
            position += len(batch)
            if any(o.stop for o in outcomes):
                outcomes += [CallOutcome(c, "Not run: the episode has ended.", "not_run") for c in batch]
            elif len(batch) == 1:
                outcomes.append(await self._run_one(batch[0], len(outcomes)))
            else:
                numbers = range(len(outcomes), len(outcomes) + len(batch))
                outcomes += await _together([self._run_one(c, n) for c, n in zip(batch, numbers, strict=True)])
        return outcomes

    def _next_batch(self, calls: Sequence[ToolCall], start: int) -> Sequence[ToolCall]:
        tools, end = self._bound(), start
        while end < len(calls) and (bound := tools.get(calls[end].name)) is not None and bound.parallel:
            end += 1
        return calls[start : max(end, start + 1)]

    async def _run_one(self, call: ToolCall, position: int) -> CallOutcome:
        self._num_calls += 1
        if position >= self.settings.max_calls_per_turn:
            text = f"Error: not run: more than {self.settings.max_calls_per_turn} calls in one message"
            return CallOutcome(call, text, "too_many_calls")
        if self._over_limit():
            text = f"Error: not run: more than {self.settings.max_tool_calls} calls in this episode"
            return CallOutcome(call, text, "too_many_calls")
        if await self._thread.held():
            text = f"Error: not run: {self._thread.lost} ran out of time and could not be ended"
            return CallOutcome(call, text, "tool_timeout")
        return await run_call(self._bound(), call, self.settings.tool_timeout_s)

    def _earned(self, outcome: CallOutcome, faults: dict[str, str]) -> float:
        """What the tool gave for this call; 0 where that is no number."""
        try:
            return 0.0 if outcome.reward is None else check_number(outcome.reward)
        except BadReward as e:
            faults[outcome.call.name] = f"reward of tool {outcome.call.name!r} of {type(self).__name__}: it {e}"
            return 0.0

    async def _turn_rewards(self, turn: TurnView, metrics: dict[str, float], faults: dict[str, str]) -> float:
        rewards = await self._ask_all("turn", turn)
        faults.update(rewards.faults)
        _add(metrics, {f"reward/{name}": value for name, value in rewards.values.items()})
        return sum(rewards.values.values())

    async def _ask_all(self, per: str, argument: Any) -> Rewards:
        rewards = Rewards(type(self).__name__, self.settings.reward_timeout_s)
        for spec in self.spec().rewards:
            if spec.mark.per == per:
                weight, name = weight_of(spec, self.settings.reward_weights), spec.name

                def read(value: Any, weight: float = weight, name: str = name) -> Mapping[str, float]:
                    number = check_number(value)
                    if per == "episode":
                        self._unweighted[name] = number
                    return {name: weight * number}

                await self._ask_reward(rewards, spec, getattr(self, spec.attribute), argument, read)
        return rewards

    async def _ask_reward(
        self,
        rewards: Rewards,
        spec: RewardSpec,
        function: Callable[..., Any],
        argument: Any,
        read: Callable[[Any], Mapping[str, float]],
    ) -> None:
        """Ask one reward on the thread of the episode; see `Rewards.ask`."""
        await self._thread.held()
        with self._on_thread():
            await rewards.ask(spec, function, argument, read)


reserve_names(ToolEnv)


def _add(metrics: dict[str, float], more: Mapping[str, float]) -> None:
    for name, value in more.items():
        metrics[name] = metrics.get(name, 0.0) + value


async def _together(calls: Sequence[Awaitable[CallOutcome]]) -> list[CallOutcome]:
    """Run them at the same time; where one fails, stop the others and raise its error as it is."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        raise
