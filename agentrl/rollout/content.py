"""Load and check the env, tasks and demonstrations of a run before any model is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentrl.chat.messages import MessageFormatError, read_well_formed
from agentrl.config.address import without_credentials
from agentrl.config.eval_config import EvalConfig
from agentrl.config.place import located
from agentrl.config.reward_model import RewardModelConfig
from agentrl.config.run import RunConfig
from agentrl.config.schemes import scheme_of
from agentrl.config.teacher import TeacherConfig
from agentrl.env.env import Env
from agentrl.env.load import load_env, said_by
from agentrl.env.rows import load_rows, read_jsonl
from agentrl.env.solved import NOT_DECLARED
from agentrl.env.tasks import NamedTasks
from agentrl.errors import AgentRLError, ConfigError, InfraError, JudgeError
from agentrl.reachable import unreachable, unreachable_of
from agentrl.rollout.oracle import Demonstration, author_method, oracle_demonstrations
from agentrl.rollout.task_tools import task_tools_now
from agentrl.types import Message, Task

_FIELDS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning", "refusal")
"""What is read of a message in a file of demonstrations."""


@dataclass(frozen=True, slots=True)
class Content:
    """The env of a run with its tasks and demonstrations."""

    make_env: Callable[[], Env]
    train_tasks: Sequence[Task]
    held_out_tasks: Sequence[Task]
    demonstrations: Sequence[Demonstration]
    eval_sets: Mapping[str, Sequence[Task]] = field(default_factory=dict)
    """The tasks of `eval.sets` by name."""
    parts: Mapping[str, Content] = field(default_factory=dict)

    @property
    def by_env(self) -> Mapping[str, Content]:
        """The content of each env by name; with one env, this content itself under ''."""
        return self.parts or {"": self}

    @property
    def held_out_sets(self) -> Sequence[Sequence[Task]]:
        """Every held-out set of this env."""
        return self.held_out_tasks, *self.eval_sets.values()


def load_content(config: RunConfig) -> Content:
    """Import the env, read or generate tasks and demonstrations; everything is checked before a model is loaded.

    With several envs, the content of each is in `parts`, and nothing else is set.

    Raises:
        ConfigError: names the problem, its location and a remedy.
    """
    if config.envs:
        return mixed({name: _load_part(name, view) for name, view in config.by_env.items()})
    with located(config.places):
        return _load_one(config)


def mixed(parts: Mapping[str, Content]) -> Content:
    """The content of several envs."""
    return Content(_no_sole_env, (), (), (), parts=parts)


def _no_sole_env() -> Env:
    raise AssertionError("this content has several envs: use `by_env`")


def _load_part(name: str, config: RunConfig) -> Content:
    """The content of one of several envs; its tasks name the env."""
    with located(config.places, f"envs.{name}"):
        try:
            found = _load_one(config)
        except ConfigError as e:
            raise ConfigError(f"envs.{name}: {e}") from e
    return replace(
        found,
        train_tasks=NamedTasks(found.train_tasks, name),
        held_out_tasks=NamedTasks(found.held_out_tasks, name),
        eval_sets={key: NamedTasks(tasks, name) for key, tasks in found.eval_sets.items()},
    )


def _load_one(config: RunConfig) -> Content:
    env_class = load_env(config.sole_env.use, config.sole_env.options)
    make_env = env_factory(env_class, config)
    train = _tasks(env_class, config, "train", config.data.train)
    return Content(
        make_env,
        train,
        held_out := _tasks(env_class, config, "held_out", config.data.held_out),
        _demonstrations(env_class, config, make_env, train),
        {name: _eval_set(env_class, config, name, held_out) for name in config.eval.sets},
    )


def _eval_set(env_class: type[Env], config: RunConfig, name: str, held_out: Sequence[Task]) -> Sequence[Task]:
    """The tasks of one of `eval.sets`: its rows, generated tasks, or the held-out tasks."""
    settings = config.eval.sets[name]
    found = held_out
    if settings.data is not None or settings.options:
        options = config.data.options | settings.options
        data = config.data.model_copy(update={"train": None, "held_out": settings.data, "options": options})
        try:
            found = _tasks(env_class, config.model_copy(update={"data": data}), "held_out", settings.data)
        except ConfigError as e:
            raise ConfigError(f"eval.sets.{name}: {e}") from e
    if not len(found):
        raise ConfigError(f"eval.sets.{name}: no held-out tasks; set its `data`")
    return found[: config.eval.by_set[name].tasks]


def check_held_out(config: RunConfig, content: Content) -> None:
    """Evaluation settings require tasks. Raises ConfigError if there are none."""
    without = [name for name, part in content.by_env.items() if not any(map(len, part.held_out_sets))]
    given: dict[str, object] = {}
    if len(without) == len(content.by_env):
        given = {f"eval.{key}": value for key, value in _not_default(config.eval)}
        if config.checkpoint.best and "best" in config.checkpoint.written:
            given["checkpoint.best"] = True
    for name in without:
        if name and (own := config.envs[name].eval) is not None:
            given |= {f"envs.{name}.eval.{key}": value for key, value in _not_default(own)}
    for key, value in given.items():
        data = f"{key.partition('.eval.')[0]}.data" if key.startswith("envs.") else "data"
        raise ConfigError(
            f"{key} is {str(value).lower()}, and there are no held-out tasks: name a file under {data}.held_out, "
            "or remove the key"
        )


def _not_default(settings: EvalConfig) -> Iterator[tuple[str, object]]:
    default = type(settings)()
    for key in sorted(settings.written - {"sets"}):
        if (value := getattr(settings, key)) != getattr(default, key):
            yield key, value


def require_solved(content: Content, what: str) -> None:
    """Raises ConfigError if nothing declares when an episode is solved but `what` needs it."""
    for part in content.by_env.values():
        env = part.make_env()
        if env.solved_rule() is None:
            name = type(env).__name__
            raise ConfigError(f"{what} has to know when an episode of {name} is solved: {NOT_DECLARED}")


async def require_teachers(teachers: Iterable[TeacherConfig]) -> None:
    """Raises InfraError if nothing accepts connections at the URL of a teacher."""
    for teacher in teachers:
        if teacher.url and (why := await unreachable(teacher.url)):
            raise InfraError(
                f"{teacher.place}.url {teacher.address}: nothing accepts connections there ({why}); start the "
                "server, or correct the address"
            )


async def require_endpoints(
    content: Content, reward_model: RewardModelConfig | None = None, teachers: Iterable[TeacherConfig] = ()
) -> None:
    """Raises InfraError if nothing accepts connections at a URL that an env or one of the models needs."""
    await require_teachers(teachers)
    if reward_model is not None and reward_model.url and (why := await unreachable(reward_model.url)):
        raise JudgeError(
            f"reward_model.url {reward_model.address}: nothing accepts connections there ({why}); start the "
            "server, or correct the address"
        )
    for part in content.by_env.values():
        env = part.make_env()
        for url, why in (await unreachable_of(env.endpoints())).items():
            raise InfraError(
                f"{type(env).__name__} needs {without_credentials(url)}, but nothing accepts connections there "
                f"({why}): start the service, or correct the address"
            )


def repeated_ids(content: Content) -> list[str]:
    """Notes about tasks of one split that share an id; tasks made on demand are not checked.

    This is harmless, because episodes are identified by position, but readers cannot tell them apart.
    """
    said = [note for part in content.parts.values() for note in repeated_ids(part)]
    for split, tasks in (("train", content.train_tasks), ("held_out", content.held_out_tasks)):
        first: dict[str, int] = {}
        for place, task in enumerate(tasks if isinstance(tasks, list | tuple) else ()):
            if first.setdefault(task.id, place) != place:
                said.append(
                    f"two {split} tasks have the id {task.id!r} (number {first[task.id]} and number {place}, "
                    "counted from 0): `show` cannot tell them apart; give each a unique id"
                )
                break
    return said


def fewer_tasks(config: RunConfig, content: Content) -> list[str]:
    """Notes about evaluations that have fewer tasks than the user asked for."""
    said = []
    for env, part in content.by_env.items():
        view = config.by_env[env]
        held_out = {"": part.held_out_tasks, **part.eval_sets}
        for name, settings in view.eval.by_set.items():
            own = view.eval.sets[name].written if name else view.eval.written
            key = ".".join(["eval", *(["sets", name] if name else []), "tasks"])
            there = len(held_out[name])
            if "tasks" in own and 0 < there < settings.tasks:
                where = f"envs.{env}: " if env else ""
                said.append(f"{where}{key} is {settings.tasks:,}, and there are {there:,}: all of them are played")
    return said


def corpus(content: Content, num: int = 2000) -> Iterable[str]:
    """Text of the env for a tokenizer: tools, opening messages of training tasks, demonstrations."""
    for part in content.by_env.values():
        schemas = json.dumps(task_tools_now(part.make_env, part.train_tasks))
        yield from [schemas] * 20
        for messages in part.demonstrations[:num]:
            for message in messages:
                yield message.content if isinstance(message.content, str) else ""
                for call in message.tool_calls:
                    yield json.dumps({"name": call.name, "arguments": dict(call.arguments)})
    yield from ["system", "user", "assistant", "tool", "# Tools", "Error: ", "To call one:"] * 20


def env_factory(env_class: type[Env], config: RunConfig) -> Callable[[], Env]:
    """A factory of envs with the run's options and settings; creates one immediately as a check."""
    options, settings, weights = config.sole_env.options, config.sole_env.settings, config.sole_env.reward_weights
    at = config.sole_env.solved_at

    given = {} if scheme_of(config.sole_env.use) else options  # the class of a scheme has them

    def make() -> Env:
        env = env_class(**given)
        env.configure(settings, weights, at)
        return env

    try:
        make()
    except (TypeError, ValueError, OSError) as e:
        raise ConfigError(
            f"env.options {dict(options)} do not fit {config.sole_env.shown}: {e}; they are the arguments of "
            "its __init__"
        ) from e
    except AgentRLError:
        raise
    except Exception as e:
        raise ConfigError(f"{config.sole_env.shown} cannot be made: {said_by(e)}") from e
    return make


def _tasks(
    env_class: type[Env], config: RunConfig, split: str, files: str | Sequence[str] | None
) -> Sequence[Task]:
    if files is not None:
        return load_rows(files, env_class, seed=config.seed, columns=config.data.columns, split=split)
    if config.data.train is not None and split == "held_out":
        return ()
    generator = author_method(env_class, "tasks")
    if generator is None:
        raise ConfigError(
            f"{config.sole_env.shown} has no `tasks` classmethod: name a JSON-lines file under data.{split}, or "
            "add `@classmethod def tasks(cls, split, seed, **options)` that returns a sequence of Task"
        )
    where = f"{config.sole_env.shown}.tasks({split!r}, ...)"
    try:
        tasks: Any = generator(split, config.seed if split == "train" else 0, **config.data.options)
        first = tasks[0] if hasattr(tasks, "__getitem__") else None
    except AgentRLError:
        raise
    except Exception as e:
        said = "it gives no task" if isinstance(e, IndexError) else said_by(e)
        raise ConfigError(f"{where} with data.options {dict(config.data.options)}: {said}") from e
    if not isinstance(first, Task):
        got = f"a {type(tasks).__name__}" + ("" if first is None else f" of {type(first).__name__}")
        raise ConfigError(
            f"{where}: a sequence of Task is wanted (a list, or agentrl.env.tasks.generated), got {got}"
        )
    if problem := env_class.row_problem(first.row):
        raise ConfigError(f"{where}: task {first.id!r}: {problem}")
    found: Sequence[Task] = tasks
    return found


def _demonstrations(
    env_class: type[Env], config: RunConfig, make_env: Callable[[], Env], tasks: Sequence[Task]
) -> Sequence[Demonstration]:
    warmup = config.warmup
    if warmup is None:
        return ()
    if warmup.demonstrations is not None:
        path = Path(warmup.demonstrations)
        read = [_demonstration(row, f"{path}:{line}") for line, row in read_jsonl(path)]
        if not read:
            raise ConfigError(f"warmup.demonstrations {path}: there is no demonstration in it")
        return read
    generator = None if warmup.use == "oracle" else author_method(env_class, "demonstrations")
    if generator is None and warmup.use == "demonstrations":
        raise ConfigError(
            f"warmup.use: {config.sole_env.shown} has no `demonstrations` classmethod; add one, or write "
            "`warmup: oracle`"
        )
    if generator is None:
        return oracle_demonstrations(env_class, config, make_env, tasks)
    where = f"{config.sole_env.shown}.demonstrations with warmup.options {dict(warmup.options)}"
    try:
        found: Sequence[Sequence[Message]] = generator(config.seed, warmup.num, **warmup.options)
        given = [Demonstration(messages) for messages in found]
    except AgentRLError:
        raise
    except Exception as e:
        raise ConfigError(f"{where}: {said_by(e)}") from e
    if not given:
        raise ConfigError(f"{where}: it gives no demonstration")
    return given


def _demonstration(row: Mapping[str, Any], where: str) -> Demonstration:
    """A row of a file: its messages, and its tools if it names any."""
    tools = row.get("tools")
    if tools is not None and not (
        isinstance(tools, list)
        and all(isinstance(t, dict) and isinstance(t.get("function"), dict) for t in tools)
        and all(isinstance(t["function"].get("name"), str) for t in tools)
    ):
        form = '{"type": "function", "function": {"name": ...}}'
        raise ConfigError(f'{where}: "tools" must be a list of {form}')
    given = _messages(row, where)
    messages = [message_of(m, where) for m in given]
    for number, message in enumerate(given):
        _refuse_unread(message, f"{where}: messages[{number}]")
    if not any(message.role == "assistant" for message in messages):
        raise ConfigError(f"{where}: a demonstration needs a message of the assistant")
    return Demonstration(messages, tools)


def _refuse_unread(message: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError for a key whose value would be lost, such as `thinking`, `function_call` or `weight`."""
    for key, value in message.items():
        if key in _FIELDS or value is None or value in ("", [], {}) or (key, value) == ("weight", 1):
            continue
        raise ConfigError(
            f"{where}.{key} has no effect: a message has {', '.join(_FIELDS)}; put it there, or remove the key"
        )


def _messages(row: Mapping[str, Any], where: str) -> Sequence[Mapping[str, Any]]:
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f'{where}: a demonstration is an object with a list under "messages"')
    return messages


def message_of(data: object, where: str) -> Message:
    """Read a message of a demonstration from OpenAI-style JSON.

    Raises:
        ConfigError: role, content or a tool call is not valid.
    """
    try:
        return read_well_formed(data)
    except MessageFormatError as e:
        raise ConfigError(f"{where}: {e}") from None
