"""BFCL v4 multi-turn: `bfcl:multi_turn_base`. The verdict is BFCL's own; no text is evaluated as code.

The policy's calls, and those of the ground truth, are parsed and dispatched to BFCL's simulated APIs. BFCL's
checker evaluates them as Python text instead, so only its comparisons of states and results are used here.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agentrl.env.adapter import Adapter
from agentrl.env.play import ScriptedPolicy, calls, say
from agentrl.env.tasks import Split
from agentrl.env.toolenv.declare import Content, reward
from agentrl.env.toolenv.dispatch import BoundTool, call_function
from agentrl.env.toolenv.env import Step, ToolEnv
from agentrl.env.toolenv.json_schema import InvalidArguments
from agentrl.env.toolenv.jsonschema import check_arguments
from agentrl.env.toolenv.observe import plain_text
from agentrl.env.toolenv.settings import ToolSettings
from agentrl.errors import ConfigError
from agentrl.suggest import did_you_mean
from agentrl.syntax import parse_expression
from agentrl.types import Message, Task, ToolSchema

CATEGORIES = ("multi_turn_base", "multi_turn_long_context", "multi_turn_miss_func", "multi_turn_miss_param")
MAX_STEPS = 20
"""Answers with calls in one turn of the user; BFCL ends the episode after one more."""
MAX_DIGITS, MAX_BITS = 10_000, 1 << 20
"""Maximum precision of a calculation, and size of a power. Python computes larger ones in a single step, which no
timeout ends and during which nothing else in the process runs."""
MORE_TOOLS = "I have updated some more functions you can choose from. What about now?"
PYTHON = """You call functions to help the user. To call some, answer only with a list of calls in Python's
syntax: [name(argument='value'), other(count=2)]. You get their results. When you are done with a request, answer
in plain text.
The functions, as JSON:
"""
Call = tuple[str, dict[str, Any]]
Entry = tuple[dict[str, Any], list[list[str]]]
"""An entry of BFCL, and the calls of the ground truth in each turn of the user."""


@dataclass(frozen=True)
class BfclOptions:
    """Options of `bfcl:CATEGORY`."""

    format: Literal["tools", "python"] = "tools"
    """`tools` offers the functions as tools; `python` lists them in the prompt and reads calls from text."""
    strict: bool = True
    """Refuse calls whose arguments do not fit the schema; BFCL runs them."""
    held_out: Literal["fifth", "all"] = "fifth"
    """Held-out tasks: every fifth entry, which is then not trained on, or all entries in both splits."""


class Bfcl(ToolEnv, Adapter):
    """A conversation of BFCL's multi-turn categories."""

    Options = BfclOptions
    options: BfclOptions
    settings = ToolSettings(max_calls_per_turn=64, observation_tokens=8192)

    def system(self) -> str:
        """Nothing for tools, as in BFCL; the functions for Python text."""
        if self.options.format == "tools":
            return ""
        return PYTHON + json.dumps([self.docs[name] for name in self.offered])

    def setup(self, index: int) -> list[Message]:
        """Load the simulated APIs, for the policy and for the ground truth, and ask the first question."""
        self.entry, self.truth = self.entry_at(index)
        self.apis, self.true_apis = self.load_apis(), self.load_apis()
        self.turn, self.results, self.failure = 0, list[str](), ""
        self.steps = list[list[str]]()
        return self.question()

    def question(self) -> list[Message]:
        """The user's messages of this turn."""
        messages = [Message(m["role"], m["content"]) for m in self.entry["question"][self.turn]]
        late = [self.docs[name] for name in self.entry.get("missed_function", {}).get(str(self.turn), ())]
        return [*messages, Message("user", f"{json.dumps(late)}\n{MORE_TOOLS}")] if late else messages

    # Tools.

    @property
    def docs(self) -> Mapping[str, Mapping[str, Any]]:
        """The documents of all functions of the task's APIs by name."""
        found: dict[str, Mapping[str, Any]] = {}
        for name in self.entry_at(self.task.row["index"])[0]["involved_classes"]:
            found |= function_docs(name)
        return found

    @property
    def offered(self) -> Sequence[str]:
        """The functions that the policy knows from the start."""
        missed = self.entry_at(self.task.row["index"])[0].get("missed_function", {})
        late = {name for names in missed.values() for name in names}
        return [name for name in self.docs if name not in late]

    @property
    def tools(self) -> Sequence[ToolSchema]:
        """The offered functions; functions that come in a later turn can be called too."""
        if self.options.format == "python" or "task" not in self.__dict__:
            return ()
        bound, offered = self._bound(), self.offered
        return [bound[name].schema for name in offered]

    def more_tools(self) -> Sequence[BoundTool]:
        """The functions of the task's APIs."""
        return [ApiTool(self, name, doc) for name, doc in self.docs.items()]

    def load_apis(self) -> dict[str, Any]:
        """New instances of the simulated APIs by class name."""
        made: dict[str, Any] = {}
        backend: Any = importlib.import_module("bfcl_eval.constants.executable_backend_config")
        for name in self.entry["involved_classes"]:
            made[name] = getattr(importlib.import_module(backend.CLASS_FILE_PATH_MAPPING[name]), name)()
            if name not in backend.STATELESS_CLASSES:
                config = copy.deepcopy(self.entry["initial_config"].get(name, {}))
                made[name]._load_scenario(config, long_context="long_context" in self.rest)
        return made

    def run(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Run a call of the policy and keep its result."""
        result = run_call(self.apis, name, arguments)
        self.results.append(result)
        self.steps[-1].append(name)
        return result

    # Turns.

    async def step(self, message: Message) -> Step:
        """Run the calls of a message; a message without one ends the user's turn."""
        self.steps.append([])
        return await super().step(message)

    def respond(self, message: Message) -> Any:
        """The results of calls in Python text, or the user's next turn."""
        if self.options.format == "python" and (found := read_calls(plain_text(message.content))):
            if self.too_many():
                return None
            return json.dumps([self.checked(*call) for call in found])
        self.end_turn()
        self.turn += 1
        if self.turn >= len(self.truth):
            return None
        return "\n".join(plain_text(m.content) for m in self.question())

    def checked(self, name: str, arguments: dict[str, Any]) -> str:
        """Run a call given as text if it fits the schema."""
        tool = self._bound().get(name)
        if tool is None:
            return f"Error during execution: name '{name}' is not defined"
        try:
            return self.run(name, tool.validate(arguments))
        except InvalidArguments as e:
            return f"Error during execution: {e}"

    def too_many(self) -> bool:
        """Whether BFCL would end the episode: too many answers with calls in this turn."""
        if len([step for step in self.steps if step]) > MAX_STEPS:
            self.failure = self.failure or f"turn {self.turn}: more than {MAX_STEPS} steps"
        return bool(self.failure.endswith("steps"))

    def end_turn(self) -> None:
        """Compare states and results with those of the ground truth, as BFCL does after each turn."""
        steps, self.steps = [step for step in self.steps if step], []
        if len(steps) > MAX_STEPS:
            self.failure = self.failure or f"turn {self.turn}: more than {MAX_STEPS} steps"
        wanted = [true_call(text, self.true_apis) for text in self.truth[self.turn]]
        true_results = [run_call(self.true_apis, name, arguments) for name, arguments in wanted]
        if self.failure or not wanted:
            return
        checker: Any = importlib.import_module("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker")
        if checker.is_empty_execute_response(steps):
            self.failure = f"turn {self.turn}: no call"
            return
        verdict: Mapping[str, Any] = checker.state_checker(self.apis, self.true_apis)
        if verdict["valid"]:
            verdict = checker.response_checker(self.results, true_results, self.turn)
        if not verdict["valid"]:
            self.failure = f"turn {self.turn}: {verdict['error_message']}"

    @reward(solved=True)
    def valid(self) -> bool:
        """BFCL's verdict: every turn was played, and each ended like the ground truth."""
        return not self.failure and self.turn == len(self.truth)

    # Tasks.

    @classmethod
    def check_name(cls) -> None:
        """Raises ConfigError if there is no such category."""
        if cls.rest not in CATEGORIES:
            hint = did_you_mean(cls.rest, CATEGORIES, otherwise=f"the categories are: {', '.join(CATEGORIES)}")
            raise ConfigError(f"env bfcl:{cls.rest}: no such category; {hint}")
        entries(cls.rest)

    @classmethod
    def entry_at(cls, index: int) -> Entry:
        """The entry of a task, and the ground truth of each turn; override both for entries in BFCL's format."""
        return entries(cls.rest)[index]

    @classmethod
    def tasks(cls, split: Split = "train", seed: int = 0) -> Sequence[Task]:
        """The entries of the category, under BFCL's ids."""
        found = [Task(entry["id"], {"index": i}, i) for i, (entry, _) in enumerate(entries(cls.rest))]
        if cls.options.held_out == "all":
            return found
        return [task for i, task in enumerate(found) if (i % 5 == 4) == (split == "held_out")]

    @classmethod
    def oracle(cls, task: Task) -> ScriptedPolicy:
        """The calls of the ground truth, one message for each turn."""
        entry, truth = cls.entry_at(task.row["index"])
        env = cls()
        env.entry = entry
        apis, script = env.load_apis(), list[Message]()
        for turn in truth:
            wanted = [true_call(text, apis) for text in turn]
            if wanted:
                text = ", ".join(f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in wanted)
                script.append(say(f"[{text}]") if cls.options.format == "python" else calls(*wanted))
            script.append(say("done"))
        return ScriptedPolicy(script)


class ApiTool:
    """A function of a simulated API."""

    parallel = False
    timeout_s: float | None = None

    def __init__(self, env: Bfcl, name: str, doc: Mapping[str, Any]) -> None:
        self.env, self.name = env, name
        parameters = json_schema(doc["parameters"])
        function = {"name": name, "description": doc["description"], "parameters": parameters}
        self.schema: ToolSchema = {"type": "function", "function": function}

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Validate the arguments if the env is strict. Raises InvalidArguments."""
        if self.env.options.strict:
            return check_arguments(self.schema["function"]["parameters"], arguments)
        if not isinstance(arguments, Mapping):
            raise InvalidArguments("args: expected object")
        return dict(arguments)

    async def call(self, arguments: dict[str, Any], timeout_s: float | None) -> Content:
        """Run the function on the episode's thread."""
        result: str = await call_function(
            self.env.run, {"name": self.name, "arguments": arguments}, timeout_s, inline=False
        )
        return result


def run_call(apis: Mapping[str, Any], name: str, arguments: Mapping[str, Any]) -> str:
    """The result of a call as BFCL writes it, errors included."""
    try:
        method = api_method(apis, name)
        if method is None:
            raise NameError(f"name '{name}' is not defined")
        _check_effort(arguments)
        value = method(**arguments)
        if isinstance(value, dict):
            with contextlib.suppress(TypeError, ValueError):
                return json.dumps(value)
        return str(value)  # raises for a number of more digits than Python converts
    except Exception as e:
        return f"Error during execution: {e}"


def _check_effort(arguments: Mapping[str, Any]) -> None:
    """Raises ValueError for the arguments of a calculation without end."""
    for name in ("precision", "decimal_places"):
        if isinstance(digits := arguments.get(name), int) and abs(digits) > MAX_DIGITS:
            raise ValueError(f"{name}: at most {MAX_DIGITS:,} digits")
    base, exponent = arguments.get("base"), arguments.get("exponent")
    if isinstance(base, int) and isinstance(exponent, int) and (base.bit_length() - 1) * exponent > MAX_BITS:
        raise ValueError("the result has too many digits")


def api_method(apis: Mapping[str, Any], name: str) -> Callable[..., Any] | None:
    """The public method of this name; as in BFCL, the last API that has it."""
    found = None
    for api in apis.values():
        if not name.startswith("_") and inspect.ismethod(getattr(api, name, None)):
            found = getattr(api, name)
    return found


def read_calls(text: str) -> list[Call]:
    """The calls in `[f(a=1), g()]`, with literal keyword arguments; empty if the text is anything else."""
    try:
        tree = parse_expression(text.strip())
        nodes = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
        return [_call(node) for node in nodes]
    except (SyntaxError, ValueError, TypeError, OverflowError, RecursionError, MemoryError):
        return []  # TypeError: of a set of lists; OverflowError: of a huge number plus 1j


def _call(node: ast.AST) -> Call:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
        raise ValueError("not a call with keyword arguments")
    return node.func.id, {str(k.arg): ast.literal_eval(k.value) for k in node.keywords if k.arg is not None}


def true_call(text: str, apis: Mapping[str, Any]) -> Call:
    """A call of the ground truth; positional arguments get their names."""
    node = parse_expression(text.strip())
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Name)
    method = api_method(apis, node.func.id)
    assert method is not None
    positional = [ast.literal_eval(argument) for argument in node.args]
    named = dict(zip(inspect.signature(method).parameters, positional, strict=False))
    return node.func.id, named | {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}


_TYPES = {"dict": "object", "float": "number", "tuple": "array"}


def json_schema(given: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of BFCL as JSON schema."""
    schema: dict[str, Any] = {
        key: value for key, value in given.items() if key in ("description", "default", "enum", "required")
    }
    schema["type"] = _TYPES.get(given["type"], given["type"])
    if schema["type"] == "object":
        schema["properties"] = {name: json_schema(part) for name, part in given.get("properties", {}).items()}
        if not schema["properties"]:
            del schema["properties"]
    if "items" in given:
        schema["items"] = json_schema(given["items"])
    return schema


def _lines(path: str) -> list[dict[str, Any]]:
    import bfcl_eval

    file = Path(str(bfcl_eval.__file__)).parent / "data" / path
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


@functools.cache
def entries(category: str) -> list[Entry]:
    """The entries of a category with their ground truth."""
    truth = {row["id"]: row["ground_truth"] for row in _lines(f"possible_answer/BFCL_v4_{category}.json")}
    return [(entry, truth[entry["id"]]) for entry in _lines(f"BFCL_v4_{category}.json")]


@functools.cache
def function_docs(api: str) -> Mapping[str, Mapping[str, Any]]:
    """The documents of the functions of an API by name."""
    backend: Any = importlib.import_module("bfcl_eval.constants.executable_backend_config")
    return {
        doc["name"]: doc for doc in _lines(f"multi_turn_func_doc/{backend.MULTI_TURN_FUNC_DOC_FILE_MAPPING[api]}")
    }
