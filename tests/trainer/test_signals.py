"""The first signal asks, the second aborts."""

from __future__ import annotations

import asyncio
import io
import os
import pty
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from agentrl.trainer.signals import stop_requested


@pytest.fixture(autouse=True)
def no_signal_is_ignored() -> Iterator[None]:
    """As they are under nohup, and in a background job of a script."""
    before = {
        signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_asks_second_aborts(number: signal.Signals):
    before = signal.getsignal(number)
    told: list[str] = []
    with stop_requested(told.append) as stop:
        assert not stop
        os.kill(os.getpid(), number)
        assert stop
        assert stop.by == number.name
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert len(told) == 1
    assert "saving after this step" in told[0]
    assert signal.getsignal(number) is before


def test_a_closed_terminal_asks_and_never_aborts():
    before = signal.getsignal(signal.SIGHUP)
    told: list[str] = []
    with stop_requested(told.append) as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)  # of the shell, and of the kernel
        assert stop.by == "SIGHUP"
        os.kill(os.getpid(), signal.SIGTERM)  # of a service manager, with the same wish
        assert stop.by == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert len(told) == 1
    assert "once more" not in told[0]
    assert signal.getsignal(signal.SIGHUP) is before


def test_a_closed_terminal_is_nothing_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_requested() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_what_is_shown_on_a_closed_terminal_is_no_error(term: str, tmp_path: Path):
    """The run takes its last step, and leaves through its display."""
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from agentrl.reporting.display import make_display\n"
        "from agentrl.trainer.signals import stop_requested\n"
        "folder = Path(sys.argv[1])\n"
        "with make_display('run', again='again') as display, stop_requested(display.note) as stop:\n"
        "    display.phase('train', 10)\n"
        "    (folder / 'begun').touch()\n"
        "    while not stop: time.sleep(0.01)\n"
        "    for step in range(1, 4): display.step({'step': step, 'reward': 0.5})\n"
        "    display.note('a last word')\n"
        "(folder / 'saved').write_text(stop.by)\n"
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env=os.environ | {"TERM": term},
        text=True,
        start_new_session=True,
    )
    os.close(theirs)
    while not (tmp_path / "begun").exists() and process.poll() is None:
        if select.select([ours], [], [], 0.05)[0]:
            os.read(ours, 1 << 16)
    os.close(ours)
    process.send_signal(signal.SIGHUP)
    _, said = process.communicate()
    assert (tmp_path / "saved").read_text() == "SIGHUP", said


def lost_output(where: str) -> IO[str]:
    """A file to which nothing can be written."""
    if where == "a full disk":
        if not Path("/dev/full").exists():
            pytest.skip("this system has no /dev/full")
        return Path("/dev/full").open("w")
    ours, theirs = os.pipe()
    os.close(ours)
    return os.fdopen(theirs, "w")


@pytest.mark.parametrize("where", ["a pipe that nobody reads", "a full disk"])
def test_output_that_is_lost_does_not_end_a_run(where: str, tmp_path: Path):
    """As after `| tee log` whose terminal was closed, or `> log` on a full disk."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from agentrl.reporting.display import make_display\n"
        "with make_display('run', again='again') as display:\n"
        "    display.phase('train', 3)\n"
        "    for step in range(1, 4): display.step({'step': step, 'reward': 0.5})\n"
        "    display.note('a last word')\n"
        "Path(sys.argv[1]).touch()\n"
    )
    with lost_output(where) as output:
        command = [sys.executable, "-c", code, str(tmp_path / "ended")]
        result = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True)
    assert (tmp_path / "ended").exists(), result.stderr


class SignalsOnce(io.RawIOBase):
    """Gets a SIGINT during its first write."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        self.written.append(bytes(data))
        if len(self.written) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return len(self.written[-1])


def test_a_signal_during_a_write_is_answered_on_the_same_stream():
    raw = SignalsOnce()
    stream = io.BufferedWriter(raw)

    def tell(text: str) -> None:
        stream.write(text.encode())
        stream.flush()

    with stop_requested(tell) as stop:
        tell("step 1")
        assert stop
    assert raw.written == [b"step 1", b"SIGINT: saving after this step, then leaving; once more to abort now"]


def test_an_asyncio_loop_sees_the_request_at_its_next_step():
    """asyncio.run installs its own SIGINT handler only where the default one stands."""
    code = (
        "import asyncio, os, signal\n"
        "from agentrl.trainer.signals import stop_requested\n"
        "async def loop():\n"
        "    with stop_requested() as stop:\n"
        "        for step in range(1000):\n"
        "            if stop: return print('left after', step, 'by', stop.by)\n"
        "            if step == 3: os.kill(os.getpid(), signal.SIGINT)\n"
        "            await asyncio.sleep(0)\n"
        "asyncio.run(loop())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "left after 4 by SIGINT\n"
    assert result.returncode == 0


FORKS = """
import asyncio, multiprocessing, os, signal
from agentrl.sigterm import set_at_end
from agentrl.trainer.signals import stop_requested

def forked_and_terminated():
    ready = multiprocessing.get_context("fork").Event()
    process = multiprocessing.get_context("fork").Process(target=lambda: (ready.set(), signal.pause()))
    process.start()
    ready.wait()
    process.terminate()
    process.join(10)
    code = process.exitcode
    process.kill()
    process.join()
    return code

async def main():
    with stop_requested() as stop:
        assert await asyncio.to_thread(forked_and_terminated) == -signal.SIGTERM
        assert not stop
    ended = asyncio.Event()
    set_at_end(ended)  # of `agentrl serve` and `agentrl env serve`
    assert await asyncio.to_thread(forked_and_terminated) == -signal.SIGTERM
    await asyncio.sleep(0)
    assert not ended.is_set()
    os.kill(os.getpid(), signal.SIGTERM)
    await ended.wait()

asyncio.run(main())
"""
"""A reward forks a process, gives up on it and terminates it. This needs a separate process: after other tests
have used a process group of PyTorch, a fork can hang before it runs any Python."""


def test_what_an_env_forks_ends_on_sigterm_and_nothing_else_does():
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60)
    assert (done.stderr, done.returncode) == ("", 0)


ENDS_SLOWLY = """
import asyncio
from agentrl.sigterm import set_at_end

async def main():
    ended = asyncio.Event()
    set_at_end(ended)
    print("ready", flush=True)
    await ended.wait()
    print("ending", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_server_that_ends_slowly_ends_at_once_on_another_ctrl_c(first: signal.Signals):
    with subprocess.Popen(
        [sys.executable, "-c", ENDS_SLOWLY],
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            for said, number in (("ready\n", first), ("ending\n", signal.SIGINT)):
                assert server.stdout.readline() == said
                server.send_signal(number)
            assert server.wait(30) == -signal.SIGINT
        finally:
            server.kill()


def test_elsewhere_than_in_the_main_thread_signals_stay_as_they_are():
    before, seen = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with stop_requested() as stop:
            seen.append((bool(stop), signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, before)]


async def test_it_works_around_awaits():
    with stop_requested() as stop:
        await asyncio.sleep(0)
        assert not stop
