import json
import pickle
import sys

import pytest

from agentrl.env import ToolEnv
from agentrl.env.load import load_env
from agentrl.env.rows import load_rows
from agentrl.envs.calculator import Calculator
from agentrl.errors import ConfigError
from agentrl.importing import load_object

GOOD = '''
from agentrl.env import ToolEnv, tool
import helper_next_door

class Echo(ToolEnv):
    """Echo."""
    def setup(self, text: str, times: int = 1) -> str:
        return text * times
    @tool
    def say(self, text: str) -> str:
        return helper_next_door.shout(text)

class Untyped(ToolEnv):
    @tool
    def say(self, text): return text

NOT_AN_ENV = 3
'''


@pytest.fixture
def file(tmp_path):
    (tmp_path / "helper_next_door.py").write_text("def shout(text): return text.upper()\n")
    path = tmp_path / "mine.py"
    path.write_text(GOOD)
    yield path
    sys.modules.pop("helper_next_door", None)


def test_an_env_is_found_by_module_and_by_file(file, tmp_path):
    assert load_env("agentrl.envs.calculator:Calculator") is Calculator
    echo = load_env(f"{file}:Echo")
    assert echo is load_env("mine.py:Echo", base=tmp_path)
    assert issubclass(echo, ToolEnv)
    assert [s.name for s in echo.spec().tools] == ["say"]
    pickle.loads(pickle.dumps(echo))


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("Calculator", "write `module:Name` or `path/to/file.py:Name`"),
        ("textarna:2048-v0", "did you mean 'textarena:2048-v0'"),
        ("reasoning-gym:sudoku", "did you mean 'reasoning_gym:sudoku'"),
        ("gym:FrozenLake-v1", "did you mean 'gymnasium:FrozenLake-v1'"),
        ("nemogym:http://127.0.0.1:1", "did you mean 'nemo_gym:http://127.0.0.1:1'"),
        ("bfcl", "did you mean 'bfcl:CATEGORY'"),
        ("agentrl.envs.calculater:Calculator", "no module 'agentrl.envs.calculater'"),
        ("agentrl.envs.calculator:Calculater", "has no 'Calculater'; did you mean 'Calculator'?"),
        ("missing.py:Echo", "no file "),
        ("mine.py:NOT_AN_ENV", "is not a subclass of agentrl.Env or agentrl.ToolEnv"),
        ("agentrl.env:Env", "does not implement reset, step"),
        ("mine.py:Untyped", "Untyped.say: argument 'text' has no type hint"),
        ("broken.py:Echo", "broken.py:2: ZeroDivisionError: division by zero"),
        ("syntax.py:Echo", "syntax.py:1: SyntaxError"),
        ("needs.py:Echo", "ModuleNotFoundError: No module named 'not_installed_anywhere'"),
    ],
)
def test_what_cannot_be_loaded_is_named_once(file, tmp_path, spec, text):
    (tmp_path / "broken.py").write_text("x = 1\ny = x / 0\n")
    (tmp_path / "syntax.py").write_text("class Echo(:\n")
    (tmp_path / "needs.py").write_text("import not_installed_anywhere\n")
    with pytest.raises(ConfigError) as caught:
        load_env(spec, base=tmp_path)
    assert text in str(caught.value)


def test_a_changed_file_is_read_again(file):
    first = load_object(f"{file}:NOT_AN_ENV")
    file.write_text(GOOD.replace("= 3", "= 4"))
    assert (first, load_object(f"{file}:NOT_AN_ENV")) == (3, 4)


def test_rows_become_tasks_and_a_bad_row_is_named(file, tmp_path):
    echo = load_env(f"{file}:Echo")
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"text": "a"}) + "\n\n" + json.dumps({"text": "b", "times": 2}) + "\n")
    tasks = load_rows(data, echo)
    assert [(t.id, t.row) for t in tasks] == [("rows-1", {"text": "a"}), ("rows-3", {"text": "b", "times": 2})]
    for line, text in [
        ('{"times": 2}', "rows.jsonl:4: argument 'text' of Echo.setup is missing"),
        ('{"text": "a", "size": 2}', "rows.jsonl:4: 'size' is not an argument of Echo.setup (text, times)"),
        ('{"text": "a", "times": "many"}', "rows.jsonl:4: argument 'times': "),
        ('{"text": "a"', "rows.jsonl:4: not JSON"),
        ("[1]", "rows.jsonl:4: a row must be a JSON object, got list"),
    ]:
        data.write_text('{"text": "a"}\n{"text": "a"}\n\n' + line + "\n")
        with pytest.raises(ConfigError) as caught:
            load_rows(data, echo)
        assert text in str(caught.value)
    data.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\r\n')  # as Windows' programs write it
    assert [t.row["text"] for t in load_rows(data, echo)] == ["a", "b"]
    data.write_bytes('{"text": "a"}\n{"text": "\u00e9"}\n'.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2: not UTF-8 text \(byte 10: "):
        load_rows(data, echo)
    data.write_text("")
    with pytest.raises(ConfigError, match="no rows"):
        load_rows(data, echo)
