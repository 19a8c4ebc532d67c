"""Build the JSON schema of a typed Python function, and validate arguments against it.

The schema is pydantic's, with local definitions inlined and automatic titles left out; everything else is kept, so
nested items, properties, defaults and bounds reach the model. Arguments are checked strictly (`"3"` is not an
integer) in JSON terms (an array may become a tuple, a string an enum member).
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar, TypeVarTuple, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ErrorDetails, PydanticSerializationError, to_jsonable_python
from pydantic_core.core_schema import DecimalSchema, DictSchema
from typing_extensions import TypedDict

from agentrl.env.toolenv.listed_values import mistaken
from agentrl.env.toolenv.typed_dicts import readable, with_parts
from agentrl.errors import ConfigError, InfraError

_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_-]{0,63}")
_OF_ARGUMENTS = ("Args", "Arguments", "Parameters", "Keyword Args", "Keyword Arguments")
_SECTION = re.compile(rf"({'|'.join(_OF_ARGUMENTS)}|Returns|Raises|Yields|Examples?):\s*")
_PARAMETER = re.compile(r"(\*{0,2}\w+)\s*(?:\([^)]*\))?:\s*(.*)")
INTEGER = r"^-?[0-9]+$"
"""The pattern of names that are integers, of an argument such as `dict[int, str]`."""
_OF_INTEGERS = ("int_type", "int_from_float", "literal_error", "enum")
"""The errors of pydantic about a value that is not the integer, or none of the integers, that was expected."""
_EXPECTED = {
    "int_type": "integer",
    "int_from_float": "integer",
    "string_type": "string",
    "float_type": "number",
    "bool_type": "boolean",
    "list_type": "array",
    "tuple_type": "array",
    "set_type": "array",
    "frozen_set_type": "array",
    "dict_type": "object",
    "model_type": "object",
    "dataclass_type": "object",
    "typed_dict_type": "object",
    "none_required": "null",
}


class InvalidArguments(Exception):
    """The policy's arguments do not fit the schema; the message is shown to the policy."""


class _ToolSchema(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: object) -> bool:
        return False

    def field_is_present(self, field: Any) -> bool:
        """Leaves out fields that are computed, of dataclasses: `field(init=False)`."""
        return field.get("init", True) is not False and super().field_is_present(field)

    def dict_schema(self, schema: DictSchema) -> dict[str, Any]:
        """An object. pydantic does not say that names must be integers."""
        found = super().dict_schema(schema)
        if schema.get("keys_schema", {}).get("type") == "int":
            found["propertyNames"] = {"pattern": INTEGER}
        return found

    def decimal_schema(self, schema: DecimalSchema) -> dict[str, Any]:
        """A number. pydantic adds text of any kind, most of which it then refuses."""
        found = super().decimal_schema(schema)
        return next((kind for kind in found.get("anyOf", ()) if kind["type"] == "number"), found)


@dataclass(frozen=True, slots=True)
class Signature:
    """The parameters of a callable: their JSON schema (an object) and a validator."""

    schema: Mapping[str, object]
    description: str
    adapter: TypeAdapter[dict[str, object]]
    names: tuple[str, ...]
    required: tuple[str, ...]

    def validate(self, arguments: object) -> dict[str, object]:
        """Check `arguments` (parsed JSON) and convert them to the annotated types.

        Raises:
            InvalidArguments: each problem with its path, e.g. `args.items[2].qty: expected integer, got 'two'`.
        """
        if not isinstance(arguments, Mapping):
            raise InvalidArguments(f"args: expected object, got {shorten(arguments)}")
        try:
            text = json.dumps(dict(arguments))
        except (ValueError, TypeError, RecursionError) as e:
            raise InvalidArguments(f"args: not valid JSON data ({type(e).__name__})") from None
        try:
            converted = self._converted(arguments, text)
        except ValidationError as e:
            raise InvalidArguments(describe_errors(e, arguments, self.names)) from None
        except InfraError:
            raise
        except (Exception, SystemExit) as e:  # code of a type, like __post_init__, which met this value
            raise InvalidArguments(f"args: refused by their type: {type(e).__name__}: {e}") from None
        data = json.loads(text, parse_constant=_refuse_constant)  # some types take NaN: object, models of pydantic
        if wrong := list(mistaken(self.schema, data, self.schema)):
            raise InvalidArguments("; ".join(f"{path}: expected {one}, got {got!r}" for path, one, got in wrong))
        return converted

    def _converted(self, arguments: Mapping[str, object], text: str) -> dict[str, object]:
        """The arguments in their types; where 3.0 does not fit, 3 may, an integer as JSON Schema counts."""
        try:
            return self.adapter.validate_json(text, strict=True)
        except ValidationError as e:
            wholes = [d["loc"] for d in e.errors() if d["type"] in _OF_INTEGERS and _is_whole(d["input"])]
            if not wholes:
                raise
            data = json.loads(text)
            for location in wholes:
                _write_integer(data, location)
            return self.adapter.validate_json(json.dumps(data), strict=True)


def _refuse_constant(name: str) -> None:
    raise InvalidArguments(f"args: each number must be a finite number, got {name}")


def _is_whole(value: object) -> bool:
    return isinstance(value, float) and value.is_integer()


def _write_integer(data: Any, location: Sequence[int | str]) -> None:
    """Write 3.0 at a location of pydantic as 3; names of union branches are no part of the data."""
    inside, at = None, None
    for part in location:
        here = data if inside is None else inside[at]
        if part in here if isinstance(here, dict) else isinstance(here, list) and isinstance(part, int):
            inside, at = here, part
    if inside is not None and _is_whole(inside[at]):
        inside[at] = int(inside[at])


def describe_callable(
    function: Callable[..., object], *, where: str, method: bool, owners: Sequence[type] = ()
) -> Signature:
    """Read the parameters of `function`; with `method` the first one (self) is left out.

    `owners` are the classes that a method is inherited through; see `resolved_hints`.

    Raises:
        ConfigError: a parameter has no type hint, or its type has no JSON schema, or the function is an async
            generator; `where` names the function.
    """
    if inspect.isasyncgenfunction(function):
        raise ConfigError(f"{where}: an async generator cannot be a tool; return a list of what it yields")
    parameters = list(inspect.signature(function).parameters.values())[1 if method else 0 :]
    hints = resolved_hints(function, where, owners)
    description, texts = _read_docstring(function, [p.name for p in parameters])
    fields: dict[str, object] = {}
    defaults: dict[str, object] = {}
    for parameter in parameters:
        _refuse_unusable(parameter, hints, where)
        fields[parameter.name] = hints[parameter.name] = readable(hints[parameter.name])
        if parameter.default is not inspect.Parameter.empty:
            defaults[parameter.name] = parameter.default
    # Not NotRequired[hint] or Annotated[hint, ...]: typing caches by equality, and `int | str == str | int`; the
    # order of a union would depend on earlier type hints in the process.
    texts = _annotated_texts(hints) | texts
    texts = {name: text for name, text in texts.items() if not _has_description(hints.get(name))}
    make_typed_dict: Any = TypedDict
    arguments: Any = make_typed_dict("arguments", fields, total=False)
    arguments.__required_keys__ = frozenset(fields) - frozenset(defaults)
    arguments.__optional_keys__ = frozenset(defaults)
    arguments.__pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)
    try:
        adapter: TypeAdapter[dict[str, object]] = TypeAdapter(arguments)
        raw = adapter.json_schema(schema_generator=_ToolSchema)
        alone: dict[str, TypeAdapter[object]] = {name: TypeAdapter(hints[name]) for name in fields}
    except Exception as e:  # pydantic's own errors, and any other from the code of types and their bounds
        first = str(e).split("\n", 1)[0]
        raise ConfigError(f"{where}: type hint without a JSON schema: {first}; use JSON types") from e
    if read_lazily(adapter):
        raise ConfigError(f"{where}: arguments of an Iterable are checked only while it is read; write list[...]")
    for name, default in defaults.items():
        _refuse_default(name, default, alone[name], where)
    schema = _finish(raw, defaults, texts)
    for name in fields:
        _refuse_unacceptable(name, schema, alone[name], where)
    names = tuple(p.name for p in parameters)
    return Signature(schema, description, adapter, names, tuple(n for n in names if n not in defaults))


def resolved_hints(function: Any, where: str, owners: Sequence[type]) -> dict[str, Any]:
    """The type hints of a function, with the types that subclasses put for type variables.

    Of `class Numbers(Stack[int])` and a method of `Stack[T]`, `int` for `T`.

    Args:
        owners: the classes that a method is inherited through, of which the last one defines it.

    Raises:
        ConfigError: one cannot be resolved.
    """
    try:
        hints = get_type_hints(function, include_extras=True)
        types = _type_arguments(owners)
        return {name: _with_types(hint, types) for name, hint in hints.items()}
    except NameError as e:
        raise ConfigError(f"{where}: type hint cannot be resolved: {e}; import the name at module level") from e
    except Exception as e:
        first = str(e).split("\n", 1)[0]
        raise ConfigError(f"{where}: type hint cannot be resolved: {type(e).__name__}: {first}") from e


def owners_of(cls: type, attribute: str) -> Sequence[type]:
    """The class and its bases up to the one that defines an attribute."""
    at = next((i for i, base in enumerate(cls.__mro__) if attribute in vars(base)), -1)
    return cls.__mro__[: at + 1]


def _type_arguments(owners: Sequence[type]) -> Mapping[TypeVar, object]:
    """What the other classes put for the type variables of the last one."""
    names = getattr(owners[-1], "__parameters__", ()) if owners else ()
    if any(isinstance(name, TypeVarTuple) for name in names):
        return {}  # one name for several types
    for number, base in enumerate(owners):
        for generic in vars(base).get("__orig_bases__", ()):
            if names and get_origin(generic) is owners[-1]:
                # Types may be written as text: Stack["Order"].
                hint = SimpleNamespace(__annotations__={"base": generic})
                here = getattr(sys.modules.get(base.__module__), "__dict__", {})
                given = get_args(get_type_hints(hint, here, include_extras=True)["base"])
                types = _type_arguments(owners[: number + 1])
                return dict(zip(names, (_with_types(part, types) for part in given), strict=False))
    return {}


def _with_types(hint: Any, types: Mapping[TypeVar, object]) -> Any:
    if isinstance(hint, TypeVar):
        return types.get(hint, hint)
    if isinstance(hint, type):  # `Box[T]` of a pydantic model is a class, and `Box` itself if it has that T
        names = getattr(hint, "__pydantic_generic_metadata__", {}).get("parameters", ())
    else:
        names = getattr(hint, "__parameters__", ())
    if names and types:
        hint = hint[tuple(types.get(name, name) for name in names)]
    return with_parts(hint, lambda part: _with_types(part, types)) if types else hint


def read_lazily(adapter: TypeAdapter[Any]) -> bool:
    """Whether the type has an `Iterable`, whose items pydantic checks only when they are read."""
    return '"type": "generator"' in json.dumps(adapter.core_schema, default=lambda value: None, skipkeys=True)


def check_name(name: str, where: str) -> str:
    """Tool names are 1 to 64 letters, digits, `_` or `-`, as required by chat APIs."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: tool name {name!r} must match {_NAME.pattern}")
    return name


def function_schema(name: str, signature: Signature) -> dict[str, object]:
    """The OpenAI tool format; `description` is omitted if the docstring is empty."""
    function: dict[str, object] = {"name": name}
    if signature.description:
        function["description"] = signature.description
    function["parameters"] = signature.schema
    return {"type": "function", "function": function}


def shorten(value: object, limit: int = 60) -> str:
    """repr of a value from the policy, truncated."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def describe_errors(error: ValidationError, data: object, names: Sequence[str]) -> str:
    """All problems of a validation, one line each; alternatives of a union share a line."""
    lines: dict[str, tuple[list[str], str]] = {}
    for detail in error.errors(include_url=False, include_context=True):
        path = _path(detail, data)
        expectation, got = _expectation(detail, names)
        expectations, _ = lines.setdefault(path, ([], got))
        if expectation not in expectations:
            expectations.append(expectation)
    return "; ".join(f"{path}: {_join(wanted)}{got}" for path, (wanted, got) in lines.items())


def _join(expectations: list[str]) -> str:
    wants = [e.removeprefix("expected ") for e in expectations if e.startswith("expected ")]
    rest = [e for e in expectations if not e.startswith("expected ")]
    return "; ".join([f"expected {' or '.join(wants)}", *rest] if wants else rest)


def _path(detail: ErrorDetails, data: object) -> str:
    """`args.items[2].qty`. pydantic's location includes names of union branches, which are not part of the data
    and are dropped."""
    path, here = "args", data
    for position, part in enumerate(detail["loc"]):
        last = position == len(detail["loc"]) - 1
        if isinstance(part, int):
            path += f"[{part}]"
            here = here[part] if isinstance(here, list | tuple) and part < len(here) else None
        elif isinstance(here, Mapping) and part in here:
            path += f".{part}"
            here = here[part]
        elif last and detail["type"] == "missing":
            path += f".{part}"
    return path


def _expectation(detail: ErrorDetails, names: Sequence[str]) -> tuple[str, str]:
    kind, context = detail["type"], detail.get("ctx", {})
    got = f", got {shorten(detail['input'])}"
    if kind == "missing":
        return "required", ""
    if kind == "extra_forbidden":
        known = f" (known: {', '.join(names)})" if len(detail["loc"]) == 1 else ""
        return f"unknown argument{known}", ""
    if kind in ("literal_error", "enum"):
        return f"expected {context.get('expected', '')}", got
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}", got
    message = detail["msg"]
    if message[1:2].islower():  # not of JSON
        message = message[:1].lower() + message[1:]
    return message, got if kind != "json_invalid" else ""


def _refuse_unusable(parameter: inspect.Parameter, hints: Mapping[str, object], where: str) -> None:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        raise ConfigError(f"{where}: parameter {parameter} cannot be a tool argument; name each argument")
    if parameter.name not in hints:
        raise ConfigError(
            f"{where}: argument {parameter.name!r} has no type hint; write `{parameter.name}: str` "
            "(or int, Literal[...], list[...], ...)"
        )
    if isinstance(parameter.default, FieldInfo):
        raise ConfigError(f"{where}: argument {parameter.name!r}: write `Annotated[type, Field(...)] = default`")


def _refuse_default(name: str, default: object, adapter: TypeAdapter[object], where: str) -> None:
    """A default shown to the model must be a value of its type, in Python or JSON form."""
    try:
        plain = to_jsonable_python(default)
    except (PydanticSerializationError, ValueError):
        return  # not JSON: omitted from the schema
    try:
        text = json.dumps(plain, allow_nan=False)
    except ValueError:
        raise ConfigError(
            f"{where}: argument {name!r} has the default {shorten(default)}, which JSON cannot write; use None"
        ) from None
    try:
        adapter.validate_python(default, strict=True)
    except ValidationError:
        try:
            adapter.validate_json(text, strict=True)
        except ValidationError as e:
            said = describe_errors(e, default, ()).replace("args", name, 1).removeprefix(f"{name}: ")
            hint_of_none = f"; write `{name}: ... | None = None`" if default is None else ""
            raise ConfigError(
                f"{where}: argument {name!r} has the default {shorten(default)}, which its type hint refuses "
                f"({said}); change one of them{hint_of_none}"
            ) from None


def _refuse_unacceptable(name: str, schema: Mapping[str, Any], adapter: TypeAdapter[object], where: str) -> None:
    """Each value that the schema lists must be one that the type takes: a model knows no other."""
    whole = schema["properties"].get(name, {})
    listed = [part for part in (whole, *whole.get("anyOf", ())) if isinstance(part, dict)]
    values = [value for part in listed for value in part.get("enum", ())]
    values += [part["const"] for part in listed if "const" in part]
    for value in values:
        try:
            adapter.validate_json(json.dumps(value), strict=True)
        except Exception:
            raise ConfigError(
                f"{where}: argument {name!r}: its schema lists {shorten(value)}, which its type hint does not "
                "take from JSON; use a Literal of text and numbers, or an Enum with such values"
            ) from None


def _annotated_texts(hints: Mapping[str, object]) -> dict[str, str]:
    """`Annotated[int, "how many"]` describes the argument, as in other libraries."""
    marks = ((name, mark) for name, hint in hints.items() for mark in getattr(hint, "__metadata__", ()))
    return {name: mark for name, mark in marks if isinstance(mark, str)}


def _has_description(hint: object) -> bool:
    return any(getattr(m, "description", None) for m in getattr(hint, "__metadata__", ()))


def _read_docstring(function: Callable[..., object], names: Sequence[str]) -> tuple[str, dict[str, str]]:
    """The text outside of sections, and the entries of `Args:` (Google style)."""
    prose: list[str] = []
    texts: dict[str, str] = {}
    section, current, level, after_blank = "", None, 0, False
    for line in (inspect.getdoc(function) or "").splitlines():
        indent = len(line) - len(line.lstrip())
        entry = _PARAMETER.fullmatch(line.strip())
        if match := _SECTION.fullmatch(line):
            section, current, level, after_blank = match[1], None, 0, False
            continue
        if line.strip() and not indent and (level or after_blank) and not (entry and entry[1] in names):
            section = ""  # text after the sections
        after_blank = not line.strip()
        if not section:
            prose.append(line)
        elif not after_blank:
            level = level if current else indent
            if section in _OF_ARGUMENTS and entry and indent <= level:
                current = entry[1].lstrip("*")
                texts[current] = entry[2]
            elif current:
                texts[current] = f"{texts[current]} {line.strip()}".strip()
    return "\n".join(prose).strip(), texts


def _finish(raw: dict[str, Any], defaults: Mapping[str, object], texts: Mapping[str, str]) -> dict[str, object]:
    definitions = raw.pop("$defs", {})
    for name, definition in definitions.items():
        if definition.get("title") == name:
            del definition["title"]
    schema: dict[str, Any] = _inline(raw, definitions, ())
    if '"$ref"' in json.dumps(schema):
        schema["$defs"] = definitions  # a recursive type, which requires a definition
    for key in ("title", "additionalProperties"):
        schema.pop(key, None)  # of the argument object: unknown arguments are rejected anyway
    for name, text in texts.items():
        if name in schema.get("properties", {}):
            schema["properties"][name]["description"] = text
    for name, default in defaults.items():
        try:
            schema["properties"][name]["default"] = to_jsonable_python(default)
        except (PydanticSerializationError, ValueError):
            schema["properties"][name].pop("default", None)
    return {"type": "object", "properties": {}} | schema


def _inline(node: object, definitions: Mapping[str, object], inside: tuple[str, ...]) -> Any:
    if isinstance(node, list):
        return [_inline(item, definitions, inside) for item in node]
    if not isinstance(node, dict):
        return node
    target = node.get("$ref")
    if isinstance(target, str) and target.startswith("#/$defs/"):
        name = target.removeprefix("#/$defs/")
        if name in inside:
            return dict(node)
        rest = {key: value for key, value in node.items() if key != "$ref"}
        return _inline(definitions[name], definitions, (*inside, name)) | rest
    if isinstance(node.get("discriminator"), dict):
        node = node | {"discriminator": {k: v for k, v in node["discriminator"].items() if k != "mapping"}}
    return {key: _inline(value, definitions, inside) for key, value in node.items()}
