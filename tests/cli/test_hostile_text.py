"""Text of a sandbox in what the command line prints: warnings, tracebacks, notes and tables."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from agentrl.cli import main
from agentrl.engine.servers import server_engine
from agentrl.reporting.safe_console import SafeConsole

HOSTILE = "\x1b]0;title\x07\x1b[2J\u202edrowssap\u200b\x9b1m\U000e0041\u3164"


def obeyed(text: str) -> list[str]:
    return [c for c in text if c not in "\n\t" and (ord(c) < 32 or c in "\x7f\x9b\u202e\u200b\u3164\U000e0041")]


def test_warnings_and_tracebacks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    with pytest.raises(SystemExit):
        main(["--version"])
    capsys.readouterr()
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        sys.excepthook(ValueError, error, error.__traceback__)
    noted = warnings.formatwarning(HOSTILE, UserWarning, server_engine.__file__, 1)
    for said in (capsys.readouterr().err, warnings.formatwarning(HOSTILE, UserWarning, "file.py", 1), noted):
        assert "drowssap" in said
        assert obeyed(said) == []
    assert noted.startswith("note: ")
    assert ".py" not in noted


def test_keys_of_configurations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, key = "env: agentrl.envs.calculator:Calculator\nmodel: {tiny: {}}\n", json.dumps(HOSTILE)
    (tmp_path / "a.yaml").write_text(base)
    (tmp_path / "b.yaml").write_text(f"{base}data: {{options: {{{key}: 1}}}}\n")
    (tmp_path / "verl.yaml").write_text(f"data: {{{key}: 1}}\n")
    for command in (["config", "diff", "a.yaml", "b.yaml"], ["import-verl", "verl.yaml"]):
        with pytest.raises(SystemExit) as left:
            main([str(tmp_path / word) if word.endswith(".yaml") else word for word in command])
        assert not left.value.code
        said = "".join(capsys.readouterr())
        assert "drowssap" in said
        assert obeyed(said) == []


def test_a_console_keeps_its_styles_and_nothing_of_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    console, plain = SafeConsole(force_terminal=True, color_system="standard"), "\x1b[31mred\x1b[0m"
    console.print(Text("red", "red"))
    assert capsys.readouterr().out == plain + "\n"
    table = Table("a")
    table.add_row(HOSTILE)
    for shown in (HOSTILE, Text(HOSTILE), table):
        console.print(shown, soft_wrap=True, highlight=False, markup=False)
    said = capsys.readouterr().out
    assert "title" in said
    assert "\x1b]" not in said
    assert "\x1b[2J" not in said
    assert [c for c in obeyed(said) if c != "\x1b"] == []
