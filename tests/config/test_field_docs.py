"""The tables of dataclass fields in docs/ name every field with its type, default and meaning."""

from __future__ import annotations

import dataclasses
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentrl.env import ToolSettings
from agentrl.sandbox import Sandbox

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts/field-docs"))


@dataclass
class Inner:
    """A dataclass."""

    size: int = 20_000
    """How large,
    in bytes."""


@dataclass
class Outer(Inner):
    """One that inherits."""

    name: str | None = None
    """A | B."""


@dataclass
class Silent:
    """One whose field says nothing."""

    size: int = 1


@pytest.mark.parametrize(("page", "cls"), [("sandbox.md", Sandbox), ("environments.md", ToolSettings)])
def test_every_field_has_a_row_with_its_type_its_default_and_a_meaning(page: str, cls: type) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    table = text.partition(f"<!-- fields: {cls.__name__} -->\n")[2].partition("<!-- end of fields -->")[0]
    rows = [re.split(r" (?<!\\)\| ", line.strip("| ")) for line in table.splitlines()[2:]]
    assert [row[0] for row in rows] == [f"`{field.name}`" for field in dataclasses.fields(cls)]
    for (_, kind, default, meaning), field in zip(rows, dataclasses.fields(cls), strict=True):
        assert kind.strip("`")
        assert len(meaning) > 15
        made = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        assert eval(default.strip("`")) == made


def test_inherited_fields_come_first_and_bars_do_not_break_the_table() -> None:
    text = SCRIPT["with_table"]("before\n<!-- fields: Outer -->\nold\n<!-- end of fields -->\nafter\n", Outer)
    assert text == (
        "before\n<!-- fields: Outer -->\n| field | type | default | meaning |\n|---|---|---|---|\n"
        "| `size` | `int` | `20_000` | How large, in bytes. |\n"
        "| `name` | `str \\| None` | `None` | A \\| B. |\n<!-- end of fields -->\nafter\n"
    )
    with pytest.raises(SystemExit, match="the page needs one line '<!-- fields: Outer -->'"):
        SCRIPT["with_table"]("no markers", Outer)
    with pytest.raises(SystemExit, match=r"Silent\.size has no docstring under it"):
        SCRIPT["table"](Silent)


@pytest.mark.slow
def test_the_script_says_what_is_old_and_changes_the_table_alone(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "docs").mkdir()
    script = Path(shutil.copy(ROOT / "scripts/field-docs", tmp_path / "scripts"))
    for name in ("sandbox.md", "environments.md"):
        shutil.copy(ROOT / "docs" / name, tmp_path / "docs")

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, script, *args], capture_output=True, text=True)

    page = tmp_path / "docs/sandbox.md"
    right = page.read_text(encoding="utf-8")
    assert run("--check").returncode == 0
    page.write_text(right.replace("| `ttl_s` |", "| `ttl` |") + "more\n", encoding="utf-8")
    done = run("--check")
    assert (done.returncode, done.stdout.splitlines()) == (
        1,
        ["the fields in environments.md are current", "the fields in sandbox.md are old: run scripts/field-docs"],
    )
    assert run().returncode == 0
    assert page.read_text(encoding="utf-8") == right + "more\n"
