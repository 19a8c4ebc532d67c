"""`agentrl sandbox serve` (the server itself: tests/sandbox/test_serve.py)."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.cli import main


def test_a_missing_token_file_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        main(["sandbox", "serve", str(tmp_path / "none")])
    assert stop.value.code == 2
    assert "sandbox token file" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["-1", "65536"])
def test_a_port_that_cannot_be_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str], port: str):
    (tmp_path / "token").write_text("a" * 40)
    with pytest.raises(SystemExit) as stop:
        main(["sandbox", "serve", str(tmp_path / "token"), "--port", port])
    assert stop.value.code == 2
    assert "--port" in capsys.readouterr().err


def _hear_ctrl_c() -> None:
    """A shell's background job inherits SIGINT ignored; the server must not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
def test_it_says_where_it_listens_and_ends_on_ctrl_c(tmp_path: Path):
    token = tmp_path / "token"
    token.write_text("a" * 40)
    token.chmod(0o600)
    command = [sys.executable, "-m", "agentrl", "sandbox", "serve", str(token), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=_hear_ctrl_c) as server:
        try:
            assert server.stderr is not None
            line = server.stderr.readline()
            server.send_signal(signal.SIGINT)
            server.communicate(timeout=30)
        finally:
            server.kill()
    assert "http://127.0.0.1:" in line
    assert server.returncode == 130
