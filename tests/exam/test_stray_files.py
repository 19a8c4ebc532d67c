"""Files that episodes leave behind are found in a process that has not used its temporary folder yet."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from agentrl.exam.stray_files import watching_files


def test_a_file_is_found_before_the_first_use_of_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with watching_files() as files:
        (tmp_path / "notes.txt").write_text("kept")
        monkeypatch.setattr(tempfile, "tempdir", None)  # looking for it writes a file
        assert files.left() == [str(tmp_path / "notes.txt")]
