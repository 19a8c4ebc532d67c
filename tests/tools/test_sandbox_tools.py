"""The shipped tools, played through an environment on a real sandbox."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from agentrl.env.compose import ComposedEnv
from agentrl.sandbox import ExecResult, close_pools
from agentrl.tools.observation import observation, shorten
from agentrl.types import Message, Task, ToolCall


@pytest.fixture
async def env() -> AsyncIterator[ComposedEnv]:
    names = ("python:Python", "shell:Shell", "files:Files", "sql:Sql")
    env = ComposedEnv(tools=[f"agentrl.tools.{name}" for name in names])
    await env.reset(Task("t", {"prompt": "go"}))
    yield env
    await env.close()
    await close_pools()


async def ask(env: ComposedEnv, name: str, **arguments: object) -> str:
    message = Message("assistant", tool_calls=(ToolCall("1", name, arguments),))
    observed, _, _, _, _ = await env.step(message)
    assert isinstance(observed[0].content, str)
    return observed[0].content


async def test_python_keeps_its_names(env: ComposedEnv) -> None:
    assert await ask(env, "python", code="x = 6\nprint('set')") == "set"
    assert await ask(env, "python", code="x * 7") == "42"
    text = await ask(env, "python", code="x / 0")
    assert text.endswith("ZeroDivisionError: division by zero\n[exit code 1]")
    text = await ask(env, "python", code="x = = 6\nx")
    assert text.startswith('  File "<cell 4>", line 1\n    x = = 6\n')
    assert text.endswith("SyntaxError: invalid syntax\n[exit code 1]")
    assert await ask(env, "python", code="y = 1") == "[no output]"
    assert "SIGSEGV; the session was lost" in await ask(env, "python", code="import os; os.kill(os.getpid(), 11)")
    assert "NameError" in await ask(env, "python", code="x")


async def test_shell_keeps_its_directory(env: ComposedEnv) -> None:
    assert await ask(env, "shell", command="mkdir a && cd a && echo hi > f") == "[no output]"
    assert await ask(env, "shell", command="cat f; pwd") == "hi\n/workspace/a"
    assert await ask(env, "shell", command="ls nothing") == (
        "ls: cannot access 'nothing': No such file or directory\n[exit code 2]"
    )
    text = await ask(env, "shell", command="seq 10000")
    assert text.startswith("1\n2\n")
    assert text.endswith("\n10000")
    assert len(text) < 8200


async def test_files_are_seen_changed_and_searched(env: ComposedEnv) -> None:
    assert await ask(env, "create", path="src/m.py", text="def f():\n    return 1\n") == "wrote src/m.py: 2 lines"
    assert await ask(env, "view", path="src/m.py") == "1  def f():\n2      return 1"
    assert await ask(env, "view", path="src/m.py", first=2) == "2      return 1"
    assert await ask(env, "view", path="src") == "m.py  22 bytes"
    assert await ask(env, "replace", path="src/m.py", old="return 1", new="return 2") == (
        "replaced 1 line at line 2 of src/m.py by 1 line"
    )
    assert "occurs 0 times" in await ask(env, "replace", path="src/m.py", old="return 1", new="x")
    await ask(env, "create", path="twice.txt", text="a\na\n")
    assert "occurs 2 times in twice.txt, it must be once (it begins on lines 1, 2)" in await ask(
        env, "replace", path="twice.txt", old="a", new="b"
    )
    assert await ask(env, "search", pattern="ret.rn [0-9]") == "./src/m.py:2:    return 2"
    assert await ask(env, "search", pattern="ret.rn", path="src/m.py") == "src/m.py:2:    return 2"
    assert await ask(env, "search", pattern="nowhere") == "[no match]"
    assert "No such file" in await ask(env, "view", path="absent")
    assert "has 2 lines, none from line 9 on" in await ask(env, "view", path="src/m.py", first=9)
    assert "line 1 comes before line 2" in await ask(env, "view", path="src/m.py", first=2, last=1)


async def test_lines_have_the_same_numbers_in_all_file_tools(env: ComposedEnv) -> None:
    text = "one\n\x0ctwo\r\n\n'\u2028' + '\x1c'\nfour = 4\n"
    await ask(env, "create", path="m.py", text=text)
    shown = await ask(env, "view", path="m.py")
    assert shown == "1  one\n2  \x0ctwo\n3  \n4  '\u2028' + '\x1c'\n5  four = 4"
    assert await ask(env, "search", pattern="four") == "./m.py:5:four = 4"
    assert await ask(env, "view", path="m.py", first=5) == "5  four = 4"
    assert "at line 5 of m.py" in await ask(env, "replace", path="m.py", old="= 4", new="= 5")
    await ask(env, "create", path="m.py", text=text + "four = 4")
    said = await ask(env, "replace", path="m.py", old="four = 4", new="x")
    assert "it begins on lines 5, 6" in said


async def test_a_long_directory_says_that_there_is_more(env: ComposedEnv) -> None:
    env.configure({"observation_tokens": 10_000}, {})
    await ask(env, "shell", command="mkdir d && touch $(seq -f d/%04g 500)")
    shown = (await ask(env, "view", path="d")).splitlines()
    assert (len(shown), shown[-1]) == (500, "0500  0 bytes")
    await ask(env, "shell", command="touch d/0501")
    assert (await ask(env, "view", path="d")).endswith(
        "0500  0 bytes\n[more than 500 entries: the first 500 are shown]"
    )


async def test_sql_answers_with_rows(env: ComposedEnv) -> None:
    assert await ask(env, "sql", query="create table t (a, b)") == "[ok, 0 rows changed]"
    assert await ask(env, "sql", query="insert into t values (1, 'x'), (2, null)") == "[ok, 2 rows changed]"
    assert await ask(env, "sql", query="select * from t") == "a | b\n1 | x\n2 | NULL\n[2 rows]"
    assert "no such table" in await ask(env, "sql", query="select * from u")
    many = "with recursive n(i) as (select 1 union all select i + 1 from n limit 80) select i from n"
    assert (await ask(env, "sql", query=many)).endswith("\n50\n[more than 50 rows: the first 50 are shown]")


async def test_sql_of_several_statements_keeps_the_transaction_and_shows_the_last_rows(env: ComposedEnv) -> None:
    assert await ask(env, "sql", query="create table t (a); begin") == "[ok, 0 rows changed]"
    two = "insert into t values (1), (2); /* a; b */ update t set a = a + 1 where a = 2;"
    assert await ask(env, "sql", query=two) == "[ok, 3 rows changed]"
    assert await ask(env, "sql", query="select 'x;'; select a from t") == "a\n1\n3\n[2 rows]"
    assert await ask(env, "sql", query="rollback") == "[ok, 0 rows changed]"
    assert await ask(env, "sql", query="select count(*) as n from t; -- none; left") == "n\n0\n[1 rows]"
    trigger = "create trigger r after insert on t begin delete from t where a = 1; delete from t where a = 2; end;"
    query = f"{trigger} insert into t values (1), (2), (3); select * from t; ;"
    assert await ask(env, "sql", query=query) == "a\n3\n[1 rows]"
    assert "near" in await ask(env, "sql", query="delete from t; selec 1; insert into t values (4)")
    assert await ask(env, "sql", query="select * from t -- all") == "a\n[0 rows]"
    assert await ask(env, "sql", query="-- nothing; at all") == "[ok, 0 rows changed]"


def test_long_text_keeps_both_ends() -> None:
    text = "\n".join(f"line {i}" for i in range(5000))
    short = shorten(text, 900)
    assert short.startswith("line 0\n")
    assert short.endswith("line 4999")
    head, _, rest = short.partition("\n[... ")
    missing = int(rest.split()[0])
    assert head.count("\n") + 1 + missing + rest.partition("...]\n")[2].count("\n") + 1 == 5000
    assert shorten("x" * 1000, 90).count("x") == 90
    assert "910 characters left out" in shorten("x" * 1000, 90)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (
            {"outcome": "timeout", "exit_code": None, "signal": None},
            "part\n[stopped after 1.5 s: it took too long]",
        ),
        ({"outcome": "oom", "exit_code": 0, "signal": None}, "part\n[stopped: out of memory]"),
        ({"outcome": "output_limit", "exit_code": None, "signal": None}, "part\n[stopped: it printed too much]"),
        ({"outcome": "signal", "exit_code": None, "signal": 11}, "part\n[ended by SIGSEGV]"),
        ({"outcome": "exit", "exit_code": 3, "signal": None}, "part\n[exit code 3]"),
        ({"outcome": "exit", "exit_code": 0, "signal": None}, "part"),
    ],
)
def test_every_ending_has_words(result: dict[str, object], words: str) -> None:
    rest = {"stdout": b"part\n", "stderr": b"", "stdout_total": 5, "stderr_total": 0, "wall_s": 1.5, "cpu_s": 0.0}
    assert observation(ExecResult(**result, **rest)) == words  # type: ignore[arg-type]
