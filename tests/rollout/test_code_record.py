"""Which code a run records, and by which names."""

from __future__ import annotations

import json
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import call

import pytest

from agentrl.config.run import RunConfig
from agentrl.importing import name_object
from agentrl.rollout.code_record import (
    CodeRecord,
    _all_definitions,
    _all_values,
    code_changes,
    code_of,
    row_changes,
)
from agentrl.rollout.content import load_content
from agentrl.run_folder.task_digests import MOST, MOST_GENERATED
from tests.trainer.test_changed_runs import ENV
from tests.trainer.test_mixture import TINY

FILES = {
    "letters.py": "from scoring.points import points\nimport beside\n"
    + ENV
    + """
    @property
    def pace(self):
        return 1

    @pace.setter
    def pace(self, value):
        self._pace = value

    def later(self):
        import inside
""",
    "scoring/points.py": "from .deep import K\n\n\ndef points(text):\n    return K * len(text)\n",
    "scoring/deep.py": "K = 0.1\n",
    "beside.py": "SIZE = 1\n",
    "inside.py": "SIZE = 2\n",
    "unrelated.py": "SIZE = 3\n",
    "rewards.py": "def short(episode) -> float:\n    return 1.0\n",
    "tools.py": 'def look(key: str) -> str:\n    """Look up a key."""\n    return key\n',
}


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "project"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    yield folder
    forget(tmp_path)


def forget(folder: Path) -> None:
    """Unload the modules of a folder, as another process would not have them."""
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        places = [getattr(spec, "origin", None), *(getattr(spec, "submodule_search_locations", None) or ())]
        if any(str(place or "").startswith(str(folder)) for place in places):
            del sys.modules[name]


def record(env: Mapping[str, Any], **more: Any) -> CodeRecord:
    config = RunConfig.model_validate({"env": env, "model": TINY, **more})
    return code_of(config, load_content(config))


def of_letters(folder: Path) -> CodeRecord:
    forget(folder.parent)
    return record({"use": f"{folder}/letters.py:Letters"})


def edited(name: str, old: str, new: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return edit


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (edited("scoring/deep.py", "0.1", "0.2"), ["scoring/deep.py: (module) changed"]),
        (edited("scoring/points.py", "len(text)", "1"), ["scoring/points.py: points changed"]),
        (edited("beside.py", "1", "9"), ["beside.py: (module) changed"]),
        (edited("inside.py", "2", "9"), ["inside.py: (module) changed"]),
        (edited("letters.py", "return 1", "return 2"), ["letters.py: Letters.pace changed"]),
        (edited("letters.py", "self._pace = value", "pass"), ["letters.py: Letters.pace changed"]),
        (edited("letters.py", '"""Say a letter."""', '"""Say two."""'), ["letters.py: Letters changed"]),
        (edited("letters.py", "(TextEnv)", "(TextEnv, metaclass=type(TextEnv))"), ["letters.py: Letters changed"]),
        (edited("letters.py", "# a comment", "# another\n\n"), []),
        (edited("unrelated.py", "3", "9"), []),
    ],
)
def test_a_change_anywhere_in_what_an_env_imports_is_named(
    project: Path, edit: Callable[[Path], None], said: list[str]
):
    before = of_letters(project)
    edit(project)
    assert code_changes(before, of_letters(project)) == said


def cell(text: str) -> CodeRecord:
    """The code of a class that a notebook cell defines, whose text only Python's line cache has."""
    main = sys.modules["__main__"]
    linecache.cache["<cell>"] = (len(text), None, text.splitlines(True), "<cell>")
    exec(compile(text, "<cell>", "exec"), namespace := {"__name__": "__main__"})
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(main, "__file__", raising=False)
        return record({"use": name_object(namespace["Letters"])})


def test_the_methods_of_a_class_in_a_notebook_are_named():
    before = cell(ENV)
    assert code_changes(before, cell(ENV.replace("# a comment", "# another"))) == []
    assert code_changes(before, cell(ENV.replace("10.0", "5.0"))) == ["<Letters>: reward Letters.vowels changed"]


def test_a_folder_that_moved_has_the_same_code(project: Path):
    before = of_letters(project)
    assert sorted(before.files) == ["beside.py", "inside.py", "letters.py", "scoring/deep.py", "scoring/points.py"]
    assert code_changes(before, of_letters(project.rename(project.with_name("moved")))) == []


def test_what_else_this_process_imported_from_the_folder_does_not_count(project: Path):
    before = of_letters(project)
    record({"use": f"{project}/letters.py:Letters"}, algorithm={"advantage": f"{project}/unrelated.py:SIZE"})
    assert code_changes(before, record({"use": f"{project}/letters.py:Letters"})) == []


def test_tools_and_rewards_of_a_composed_env_count(project: Path):
    composed = {
        "use": "agentrl.env.compose:ComposedEnv",
        "options": {"tools": [f"{project}/tools.py:look"], "reward": f"{project}/rewards.py:short"},
    }
    (project / "rows.jsonl").write_text('{"prompt": "Hello"}\n')
    data = {"train": str(project / "rows.jsonl")}
    before = record(composed, data=data, eval={"every": 0, "before_training": False})
    edited("rewards.py", "1.0", "2.0")(project)
    edited("tools.py", "return key", "return 'no'")(project)
    after = record(composed, data=data, eval={"every": 0, "before_training": False})
    assert code_changes(before, after) == ["rewards.py: short changed", "tools.py: look changed"]


WITH_STRINGS = """
def shown(x, w):
    return f"{x!r:>{w}} of {x['a']}" + f"{x:{w}}" + f'{"x"} "{w}"' + f"{w:.3f}"
"""


def test_digests_are_the_same_under_every_version_of_python(project: Path, tmp_path: Path):
    (project / "inside.py").write_text(WITH_STRINGS)
    now = of_letters(project)
    # Of Python 3.11.7, 3.12.1 and 3.13.0 alike; the other one is of 3.12.1, by an earlier version of the record.
    assert now.files["inside.py"] == {"shown": "d0120a0405bd92fd"}
    before = {**_all_definitions(now.texts, portable=False), "inside.py": {"shown": "d0665f1bdb213bb8"}}
    (tmp_path / "code.json").write_text(json.dumps({"files": before}))
    old = CodeRecord.read(tmp_path / "code.json")
    assert old is not None
    assert code_changes(old, now) == ([] if sys.version_info >= (3, 12) else ["inside.py: shown changed"])
    (tmp_path / "code.json").write_bytes(now.to_json())
    assert CodeRecord.read(tmp_path / "code.json") == CodeRecord(now.files)


def test_records_of_earlier_versions_have_no_values_of_functions():
    new = CodeRecord({"<values of make.<locals>.Made>": {"said": "1"}})
    assert code_changes(CodeRecord({}), new) == []
    assert code_changes(new, CodeRecord({})) == ["<values of make.<locals>.Made>: no longer used"]


def test_values_of_functions_are_of_all_that_they_made_when_it_was_first_seen():
    def made(price: int, address: str = "http://127.0.0.1:8000") -> Any:
        class Made:
            sold = 0
            any_name = call  # answers to `__func__` and `__wrapped__`

            def buy(self) -> object:
                return price, address

        return Made

    one, two = made(1), made(2)
    before = _all_values([one, two])
    assert [list(values) for values in before.values()] == [["sold", "price"]]
    one.sold += 1
    assert _all_values([two, one]) == before, "in any order, and an env may count"
    assert _all_values([made(1, "/tmp/shop"), two]) == before, "paths and addresses may differ"
    assert _all_values([made(3), two]) != before != _all_values([one, made(3)])


def test_a_record_of_more_generated_tasks_says_nothing_about_their_number():
    tasks = [str(n) for n in range(MOST)]
    earlier, fewer = {"train": tasks}, {"train": tasks[:MOST_GENERATED]}
    assert row_changes(earlier, fewer) == []
    assert row_changes(earlier, {"train": tasks[: MOST_GENERATED - 1]}) == ["train tasks: 20000 -> 3999"]
    assert row_changes(fewer, {"train": ["x", *tasks[1:MOST_GENERATED]]}) == [
        "train tasks: 1 differ (numbers 0, counted from 0)"
    ]
