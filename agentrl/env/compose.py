"""An environment without a class: tools, rewards and rows are listed in YAML.

    env:
      use: agentrl.env.compose:ComposedEnv
      options:
        tools:
          - my_tools.py:lookup                       # a typed function, or a class with @tool methods
          - mcp: {command: [python, server.py]}      # or {url: http://127.0.0.1:8000/mcp}
          - {class_name: my_tools.py:MyTool, config: {}, tool_schema: {...}}   # verl's form
        reward: my_rewards.py:score                  # f(episode), or verl's compute_score; a list of them; name: f
        system: Answer with the tools.

A row is `{"prompt": text or list of messages, ...}`; reward functions read other columns from `episode.task.row`.
verl's rows have this form.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from agentrl.chat.messages import MessageFormatError, read_well_formed
from agentrl.env.env import Env
from agentrl.env.mcp import McpServer
from agentrl.env.solved import BY_NAME, SolvedRule
from agentrl.env.toolenv.declare import TOOL_MARK, RewardMark
from agentrl.env.toolenv.dispatch import BoundTool
from agentrl.env.toolenv.env import ToolEnv
from agentrl.env.toolenv.json_schema import shorten
from agentrl.env.toolenv.observe import error_text
from agentrl.env.toolenv.rewards import Rewards, read_parts
from agentrl.env.toolenv.spec import MethodTool, RewardSpec, tool_from
from agentrl.env.toolenv.threads import name_of
from agentrl.env.verl import (
    SCORE_ARGUMENTS,
    VerlTool,
    VerlToolEntry,
    accepted,
    check_ground_truth,
    column,
    is_compute_score,
    score_arguments,
    verl_names,
)
from agentrl.errors import ConfigError, InfraError
from agentrl.importing import load_object
from agentrl.sandbox import Sandbox
from agentrl.suggest import did_you_mean
from agentrl.types import Episode, Message

Reward = str | Callable[..., object] | Mapping[str, Any]
"""A function, its name, or `{use: name, options: {...}}` with keyword arguments for it."""
Entry = str | Callable[..., object] | Mapping[str, Any]
Loaded = McpServer | VerlToolEntry | MethodTool | Callable[[], object]


class ComposedEnv(ToolEnv):
    """An env composed of named tools and rewards.

    Args:
        tools: functions, toolboxes, MCP servers and verl-style entries, in the order shown to the model.
        reward: one reward, a list of them, or a mapping of names to them.
        system: system prompt; omitted if empty or if the row's prompt has one.
        sandbox: arguments of one `Sandbox` shared by all toolboxes; by default each has a separate one.
        base: folder that relative paths are resolved against; None for the working directory.

    Raises:
        ConfigError: an entry cannot be loaded or used.
    """

    def __init__(
        self,
        tools: Sequence[Entry] = (),
        reward: Reward | Sequence[Reward] | Mapping[str, Reward] = (),
        system: str = "",
        sandbox: Mapping[str, object] | None = None,
        base: str | Path | None = None,
    ) -> None:
        self._base = None if base is None else Path(base)
        self._system_text = system
        if sandbox is not None:
            self.sandbox = _sandbox(sandbox)
        self._entries = [_load_entry(entry, self._base) for entry in tools]
        self._rewards = _load_rewards(reward, self._base)
        self._verl: list[VerlTool] = []
        self._bound()  # report invalid entries early
        self._prompt_has_system = False

    def more_tools(self) -> Sequence[BoundTool]:
        """The composed tools, with new toolboxes, verl instances and server sessions."""
        self._verl = []
        return [tool for entry in self._entries for tool in self._make_tools(entry)]

    def system(self) -> str:
        """The configured system prompt, unless the row has one."""
        return "" if self._prompt_has_system else self._system_text

    async def setup(self, prompt: str | list[dict[str, object]], **row: Any) -> str | list[Message]:
        """Open with the row's prompt; verl-style tools are created with the row's `extra_info.tools_kwargs`."""
        extra = column(self.task, "extra_info")
        for name, function in self._rewards.items():  # the policy should not play a row that cannot be scored
            if is_compute_score(function):
                check_ground_truth(self.task, name, function)
        selected = extra.get("tool_selection")
        if selected is not None:
            known = self._bound()
            if unknown := [name for name in selected if name not in known]:
                raise ConfigError(
                    f"task {self.task.id!r}: tool_selection names {unknown[0]!r}, which is not a tool"
                )
            self._tools = {name: tool for name, tool in known.items() if name in selected}
        kwargs: Mapping[str, Any] = extra.get("tools_kwargs") or {}
        for tool in self._verl:
            await tool.begin(kwargs.get(tool.name) or {})
        if isinstance(prompt, str):
            return prompt
        messages = [_message(m, self.task.id) for m in prompt]
        self._prompt_has_system = any(m.role == "system" for m in messages)
        return messages

    async def release(self) -> None:
        """Release what `prepare` and `setup` acquired; one failure does not prevent the rest."""
        failures: list[str] = []
        try:
            for tool in self._verl:
                try:
                    await tool.end()
                except Exception as e:
                    failures.append(f"{tool.name}.release: {error_text(e)}")
        finally:
            try:
                await super().release()
            except InfraError as e:
                failures.append(str(e))
        if failures:
            raise InfraError("; ".join(failures))

    def own_code(self) -> Sequence[object]:
        """The functions and classes of `tools` and `reward`."""
        tools = [entry.cls if isinstance(entry, VerlToolEntry) else entry for entry in self._entries]
        return [
            *(tool.function if isinstance(tool, MethodTool) else tool for tool in tools),
            *self._rewards.values(),
        ]

    def rewards_of_record(self) -> Sequence[str]:
        """The functions of `reward`; those of verl's kind read the verl-style tools as well, if there are any."""
        return [
            name for name, function in self._rewards.items() if not (is_compute_score(function) and self._verl)
        ]

    async def score(self, episode: Episode) -> Mapping[str, float]:
        """The composed rewards by name, weighted; if there are none, the rewards of the verl-style tools."""
        rewards = Rewards(type(self).__name__, self.settings.reward_timeout_s)
        for name, function in self._rewards.items():
            spec = RewardSpec(name, name, RewardMark(name, 1.0, "episode", None), None)
            call = functools.partial(function, episode)
            if is_compute_score(function):
                known = score_arguments(episode, self._verl, self.decode)
                call = functools.partial(function, **accepted(function, known))
            only = "score" if is_compute_score(function) else None
            await self._ask_reward(rewards, spec, call, None, functools.partial(self._parts, name, only))
        weights = self.settings.reward_weights
        for tool in self._verl:
            if tool.judges and (not self._rewards or tool.name in weights):
                spec = RewardSpec(tool.name, "", RewardMark(tool.name, 1.0, "episode", None), None)
                read = functools.partial(self._parts, tool.name, None)
                await self._ask_reward(rewards, spec, tool.calc_reward, None, read)
        return rewards.result()

    def _parts(self, name: str, only: str | None, value: object) -> dict[str, float]:
        """The return value of a reward as weighted parts by name; for a mapping each entry, or just `only`."""
        if isinstance(value, Mapping) and only is not None:
            value = value.get(only)
        spec = RewardSpec(name, name, RewardMark(name, 1.0, "episode", None), None)
        numbers, weighted = read_parts(spec, value, self.settings.reward_weights)
        self._unweighted |= numbers
        return weighted

    def solved_rule(self) -> SolvedRule | None:
        """`solved_at`, a part named `solved`, or the only reward if it is annotated to return bool."""
        if (rule := Env.solved_rule(self)) is not None:
            return rule
        if len(self._rewards) == 1:
            ((name, function),) = self._rewards.items()
            if getattr(function, "__annotations__", {}).get("return") in (bool, "bool"):
                return SolvedRule("the only reward, a bool", {name: 1.0})
        return BY_NAME

    def check_weights(self) -> None:
        """Raises ConfigError when a weight of the run names no reward, or two."""
        of_tools = [t.name for t in self._verl if t.judges]
        known = [*self._rewards, *of_tools]
        for name in self.settings.reward_weights:
            if name in self._rewards and name in of_tools:
                raise ConfigError(
                    f"env.reward_weights.{name}: a reward and a tool with `calc_reward` have this name; give the "
                    "reward another one, in a mapping of names to functions"
                )
            if name.split("/")[0] not in known:
                hint = did_you_mean(name, known, otherwise=f"the rewards are: {', '.join(known) or 'none'}")
                raise ConfigError(f"env.reward_weights.{name}: the env has no such reward; {hint}")

    def check_solved_at(self, thresholds: Mapping[str, float]) -> None:
        """No check: the parts of a composed reward are unknown until it has scored an episode."""

    def _make_tools(self, entry: Loaded) -> Sequence[BoundTool]:
        if isinstance(entry, McpServer):
            return self._connect(entry)
        if isinstance(entry, VerlToolEntry):
            made = entry.make()
            self._verl.append(made)
            return [made]
        return [entry] if isinstance(entry, MethodTool) else self._open_toolbox(entry)


def _sandbox(options: Mapping[str, object]) -> Sandbox:
    known = [f.name for f in fields(Sandbox)]
    if unknown := [key for key in options if key not in known]:
        raise ConfigError(f"sandbox: unknown key {unknown[0]!r}; the keys are: {', '.join(known)}")
    # YAML has lists where the spec has tuples, and variables are most readable as a mapping.
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    if isinstance(variables := values.get("env"), Mapping):
        values["env"] = tuple((str(k), str(v)) for k, v in variables.items())
    return Sandbox(**values)


def _load_entry(entry: Entry, base: Path | None) -> Loaded:
    if not isinstance(entry, Mapping):
        return _load_named(entry, {}, base)
    if "class_name" in entry:
        return VerlToolEntry.load(entry, base)
    if "mcp" in entry:
        if len(entry) > 1 or not isinstance(entry["mcp"], Mapping):
            raise ConfigError("tools: write `mcp:` with a mapping below it and no other keys")
        return McpServer.from_mapping(entry["mcp"])
    if "use" not in entry:
        raise ConfigError(f"tools: {shorten(dict(entry))}: one of `use`, `mcp` and `class_name` is needed")
    if unknown := [key for key in entry if key not in ("use", "options")]:
        raise ConfigError(f"tools: unknown key {unknown[0]!r} next to use; known: use, options")
    return _load_named(entry["use"], dict(entry.get("options") or {}), base)


def _load_named(
    use: str | Callable[..., object], options: Mapping[str, object], base: Path | None
) -> MethodTool | Callable[[], object]:
    with verl_names():
        found = load_object(use, base=base) if isinstance(use, str) else use
    if isinstance(found, type):
        if not any(hasattr(getattr(found, name, None), TOOL_MARK) for name in dir(found)):
            raise ConfigError(f"tools: class {found.__name__} has no @tool method")
        parameters = inspect.signature(found).parameters
        if base is not None and "base" in parameters and "base" not in options:
            options = {**options, "base": base}  # its paths are relative to the file that names it, too
        try:
            inspect.signature(found).bind(**options)
        except TypeError as e:
            raise ConfigError(f"tools: {found.__name__}: options: {e}") from None
        return functools.partial(found, **options)
    if not callable(found):
        raise ConfigError(f"tools: {use!r} is neither a function nor a class with @tool methods")
    if options:
        raise ConfigError(f"tools: {use!r} is a function and takes no options")
    return tool_from(found)


def _load_rewards(
    reward: Reward | Sequence[Reward] | Mapping[str, Reward], base: Path | None
) -> dict[str, Callable[..., object]]:
    named: dict[str, Reward] = {}
    if isinstance(reward, Mapping) and "use" not in reward:
        named = dict(reward.items())
    else:
        single = isinstance(reward, str | Mapping) or callable(reward)
        listed: Sequence[Any] = [reward] if single else list(reward)  # type: ignore[arg-type]
        for item in listed:
            name = _reward_name(item)
            if name in named:
                raise ConfigError(f"reward: two are named {name!r}; write a mapping of names to functions")
            named[name] = item
    found: dict[str, Callable[..., object]] = {}
    for name, item in named.items():
        use, options = (item.get("use"), item.get("options") or {}) if isinstance(item, Mapping) else (item, {})
        with verl_names():
            function = load_object(use, base=base) if isinstance(use, str) else use
        if not callable(function):
            raise ConfigError(f"reward {name!r}: {use!r} is not a function")
        if "/" in name:
            raise ConfigError(f"reward {name!r}: a name must not contain `/`, which precedes the name of a part")
        if unknown := [key for key in options if not _takes(function, key)]:
            raise ConfigError(f"reward {name!r}: options: {use!r} has no argument {unknown[0]!r}")
        function = functools.partial(function, **options) if options else function
        if not _can_be_called(function):
            raise ConfigError(
                f"reward {name!r}: write f(episode), or verl's compute_score(data_source, solution_str, "
                f"ground_truth, extra_info); got ({', '.join(inspect.signature(function).parameters)})"
            )
        found[name] = function
    return found


def _can_be_called(function: Callable[..., object]) -> bool:
    """Whether a reward takes an episode, or nothing that verl does not pass."""
    parameters = inspect.signature(function).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [p for p in parameters if p.default is p.empty and p.kind in named]
    if is_compute_score(function):
        return {p.name for p in needed} <= SCORE_ARGUMENTS
    # TRL's rewards take the completions of a batch, by this name
    return len(needed) == 1 and needed[0].kind is named[0] and needed[0].name != "completions"


def _reward_name(item: object) -> str:
    use: Any = item.get("use") if isinstance(item, Mapping) else item
    return use.rpartition(":")[2] if isinstance(use, str) else name_of(use)


def _takes(function: Callable[..., object], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _message(value: object, task: str) -> Message:
    try:
        return read_well_formed(value)
    except MessageFormatError as e:
        shape = 'a prompt is a list of {"role": "user", "content": "..."}'
        raise ConfigError(f"task {task!r}: {shape}; {e}, got {shorten(value)}") from None
