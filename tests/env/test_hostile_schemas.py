"""Schemas, results and answers of servers that are not ours: MCP servers, judges, reward servers."""

from __future__ import annotations

import base64
import contextlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.env.judge import Judge, RewardApi
from agentrl.env.mcp import McpServer, _content, list_tools
from agentrl.env.toolenv.json_schema import InvalidArguments
from agentrl.env.toolenv.jsonschema import check_arguments
from agentrl.env.toolenv.observe import ToolError
from agentrl.errors import ConfigError, JudgeAnswerError
from agentrl.types import Image


def text(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "string", **keywords}}}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("pattern", ["^(a+)+$", "^(a|aa)+$", r"^(\w+\s?)*$", "(a?){60}a{60}c"])
def test_a_pattern_that_takes_exponential_time_holds_nobody_up(pattern: str):
    with contextlib.suppress(InvalidArguments):
        check_arguments(text(pattern=pattern), {"a": "a" * 60 + "!"})


def test_a_pattern_of_ecmascript_is_checked():
    check_arguments(text(pattern=r"^\p{L}+$"), {"a": "Zoë"})
    with pytest.raises(InvalidArguments, match="must match"):
        check_arguments(text(pattern=r"^\p{L}+$"), {"a": "42"})


@pytest.mark.parametrize(
    "more",
    [
        {"allOf": [{"properties": {"b": {"type": "integer"}}}]},
        {"anyOf": [{"properties": {"b": {"type": "integer"}}, "required": ["b"]}, {"required": ["c"]}]},
        {"$ref": "#/$defs/more", "$defs": {"more": {"properties": {"b": {"type": "integer"}}}}},
        {"patternProperties": {"^[bc]$": {"type": "integer"}}},
        {"patternProperties": {"^b": {"type": "integer"}}, "additionalProperties": False},
    ],
)
def test_an_argument_that_a_schema_names_elsewhere_is_known(more: dict[str, Any]):
    assert check_arguments(text() | more, {"a": "x", "b": 1}) == {"a": "x", "b": 1}
    with pytest.raises(InvalidArguments, match=r"^args\.b: expected integer, got 'x'"):
        check_arguments(text() | more, {"a": "x", "b": "x"})


def test_an_argument_that_a_schema_names_nowhere_is_unknown():
    for more in ({}, {"patternProperties": {"^c": {}}}, {"additionalProperties": False, "allOf": [{}]}):
        with pytest.raises(InvalidArguments, match=r"args\.b: unknown argument \(known: a\)$"):
            check_arguments(text() | more, {"a": "x", "b": 1})


@pytest.mark.parametrize(
    "schema",
    [
        text(pattern="("),
        text(enum=5),
        text(minLength="x"),
        {"type": "object", "properties": {"a": {"anyOf": 5}}},
        {"type": "object", "properties": 5},
        {"type": "object", "properties": {"a": {}}, "patternProperties": 5},
        {"type": "object", "required": 5, "properties": {"a": {}}},
        {"type": 5, "properties": {"a": {}}},
    ],
)
def test_a_malformed_schema_leaves_it_to_the_server(schema: dict[str, Any]):
    assert check_arguments(schema, {"a": "x"}) == {"a": "x"}


def test_what_a_tool_of_another_server_returns_is_read():
    def resource(**fields: Any) -> Any:
        return SimpleNamespace(type="resource", resource=SimpleNamespace(**fields))

    assert _content([resource(uri="file:///a", text="the text")]) == "the text"
    assert _content([resource(uri="file:///a", blob="AA==")]) == "[resource: file:///a]"
    assert _content([SimpleNamespace(type="resource_link", uri="file:///b")]) == "[resource_link: file:///b]"
    picture = base64.b64encode(b"png").decode()
    found = _content([SimpleNamespace(type="image", data=picture, mime_type="image/png")])
    assert found == (Image(b"png", "image/png"),)
    with pytest.raises(ToolError, match="an image that cannot be read"):
        _content([SimpleNamespace(type="image", data="AAA", mime_type="image/png")])


SERVER = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    if asked["method"] == "initialize":
        version = asked["params"]["protocolVersion"]
        found = {"result": {"protocolVersion": version, "capabilities": {"tools": {}},
                            "serverInfo": {"name": "odd", "version": "1"}}}
    else:
        found = ANSWER
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **found}), flush=True)
"""


@pytest.mark.parametrize(
    "answer",
    [
        {"error": {"code": -1, "message": "no"}},
        {"result": {"tools": 5}},
        {"result": {"tools": []}},
        {"result": {"tools": [{"name": "a"}]}},
        {"result": {"tools": [{"name": "", "inputSchema": {"type": "object"}}]}},
    ],
)
def test_tools_that_cannot_be_listed_are_one_error(tmp_path: Path, answer: dict[str, Any]):
    (tmp_path / "odd.py").write_text(SERVER.replace("ANSWER", repr(answer)))
    with pytest.raises(ConfigError, match=r"^mcp: .*odd\.py") as error:
        list_tools(McpServer(command=(sys.executable, str(tmp_path / "odd.py"))))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("score", [10**400, float("inf")])
def test_a_score_that_is_too_large_is_an_unusable_answer(score: float):
    with pytest.raises(JudgeAnswerError, match="not finite"):
        RewardApi("http://127.0.0.1:1/score")._read({"scores": [score]}, 1)


def test_a_cache_that_was_cut_is_read_up_to_there(tmp_path: Path):
    whole = json.dumps({"key": "k", "answer": "yes"})
    (tmp_path / "cache.jsonl").write_text(f'{whole}\n\n5\n{{"key": "x", "ans')
    assert Judge("http://127.0.0.1:1", "m", cache=tmp_path / "cache.jsonl")._answers == {"k": "yes"}
