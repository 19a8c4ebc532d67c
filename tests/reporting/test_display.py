"""Progress on a terminal and elsewhere, the summary, the curve."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.util
import io
import os
import pty
import re
import struct
import sys
import termios
import threading
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.reporting.display import (
    LiveDisplay,
    PlainDisplay,
    Progress,
    duration,
    make_display,
    percent,
    sparkline,
    summary_text,
)
from agentrl.reporting.report import Summary
from agentrl.reporting.safe_console import RunConsole
from agentrl.run_folder.curve import _reward_names, smooth, write_curve
from agentrl.run_folder.files import write_atomic
from tests.reporting.screen import Screen

METRICS = {"solved": 0.625, "reward": 0.6, "reward/correct": 0.625, "reward/cost": -0.025, "tokens_per_s": 3210.7}


class Clock:
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"
"""How the cursor is hidden and shown."""


def console(*, terminal: bool, width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, _environ={"TERM": "xterm"})


def written(to: Console) -> str:
    assert isinstance(to.file, io.StringIO)
    return to.file.getvalue()


def test_plain_lines_have_everything_and_no_escapes():
    out, clock = console(terminal=False, width=40), Clock()
    display = PlainDisplay(out, again="agentrl train t.yaml", clock=clock)
    display.phase("train", total=120)
    for _ in range(2):
        clock.now += 3.0
        display.step(METRICS)
    display.step({})
    display.note("[bold]checkpoint[/bold] saved")
    assert written(out).splitlines() == [
        "train: begins, 120 to do",
        "train 1/120  solved 62.5 %  reward 0.600  correct 0.625  cost -0.025  3,211 tokens/s  5:57 left",
        "train 2/120  solved 62.5 %  reward 0.600  correct 0.625  cost -0.025  3,211 tokens/s  5:54 left",
        "note: [bold]checkpoint[/bold] saved",
    ]


def test_units_of_a_warm_up_share_a_line():
    out, clock = console(terminal=False, width=80), Clock()
    display = PlainDisplay(out, again="", clock=clock)
    display.phase("warm-up", total=20)
    for _ in range(20):
        clock.now += 1.0
        display.step({"loss": 0.5})
    said = [line.split()[1] for line in written(out).splitlines()[1:]]
    assert said == ["5/20", "10/20", "15/20", "20/20"]


def test_a_reward_that_is_the_only_one_is_said_once():
    out = console(terminal=False)
    display = PlainDisplay(out, again="", clock=Clock())
    display.phase("train")
    display.step({"reward": 0.5, "reward/correct": 0.5})
    display.step({"reward": 0.5, "reward/correct": 0.5, "reward/cost": 0.0})
    assert written(out).splitlines()[1:] == [
        "train 1  reward 0.500",
        "train 2  reward 0.500  correct 0.500  cost 0.000",
    ]


def test_a_resumed_phase_estimates_from_its_own_steps():
    clock = Clock()
    progress = Progress(clock)
    progress.begin("train", 100, done=90)
    assert progress.seconds_left() is None
    clock.now += 2.0
    progress.advance({})
    assert progress.seconds_left() == pytest.approx(18.0)
    clock.now += 1.0  # time passes within the next step
    assert progress.seconds_left() == pytest.approx(17.0)
    assert progress.count() == "91/100"


def test_the_live_screen_shows_the_step_the_rewards_and_the_time():
    out, clock = console(terminal=True), Clock()
    display = LiveDisplay("calculator", out, again="", clock=clock)
    with display:
        display.phase("train", total=10)
        clock.now += 5.0
        display.step(METRICS | {"held_out": 0.5})
        display.note("a note")
        shown = Console(file=io.StringIO(), width=100)
        shown.print(display.screen(100))
        text = written(shown)
        display.phase("evaluate", total=200)
    for part in (
        "calculator",
        "train 1/10",
        "62.5 %",
        "50.0 %",
        "correct",
        "-0.025",
        "3,211",
        "0:45 left",
        "0:05 so far",
    ):
        assert part in text
    assert "a note" in written(out)
    assert "train: 1/10 in 0:05, solved 62.5 %" in written(out)
    assert re.findall(r"\x1b\[\?25[lh]", written(out)) == [HIDDEN, SHOWN, SHOWN]  # the cursor is back


def test_an_error_gives_the_terminal_back():
    out = console(terminal=True)
    with pytest.raises(ZeroDivisionError), make_display("r", again="", console=out):
        assert 1 / 0
    assert re.findall(r"\x1b\[\?25[lh]", written(out)) == [HIDDEN, SHOWN, SHOWN]


def test_the_cursor_is_there_while_it_draws():
    out = console(terminal=True)
    with make_display("r", again="", console=out) as display:
        display.phase("train", 2)
        assert re.findall(r"\x1b\[\?25[lh]", written(out))[-1] == SHOWN


def test_the_terminal_decides_which_display():
    assert isinstance(make_display("r", again="", console=console(terminal=True)), LiveDisplay)
    assert isinstance(make_display("r", again="", console=console(terminal=False)), PlainDisplay)
    dumb = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    assert isinstance(make_display("r", again="", console=dumb), PlainDisplay)


def test_the_summary_names_every_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    summary = Summary(
        run=str(tmp_path / "runs/calculator"), steps=120, held_out_before=0.485, held_out_after=0.97,
        warmup_seconds=31, train_seconds=113, wall_seconds=170, episodes=2000, sampled_tokens=184320,
        malformed=41, limits=3, infra_failures=1,
    )  # fmt: skip
    lines = [line.split("  ") for line in summary_text(summary, again="x").plain.splitlines()]
    found = {line[1].strip(): " ".join(line[2:]).split() for line in lines if len(line) > 2}
    assert found["solved before"][:2] == ["48.5", "%"]
    assert found["solved after"] == ["97.0", "%"]
    assert found["wall time"] == ["2:50", "cold", "start", "0:31,", "training", "1:53"]
    assert found["malformed"][:3] == ["41", "(2.1", "%)"]
    assert found["limits"][:3] == ["3", "(0.1", "%)"]
    assert found["infra failures"][:3] == ["1", "(0.1", "%)"]
    assert found["run folder"] == ["runs/calculator"]
    assert "agentrl eval runs/calculator" in summary_text(summary, again="x").plain
    cut = Summary(run="/elsewhere/r", steps=7, finished=False)
    text = summary_text(cut, again="agentrl train t.yaml").plain
    assert "stopped by request after 7 steps" in text
    assert "next:  agentrl train t.yaml" in text
    assert "solved before   –" in text
    one = summary_text(Summary(run="/elsewhere/r", steps=1, finished=False), again="x").plain
    assert "stopped by request after 1 step; everything is saved" in one
    none = summary_text(Summary(run="/elsewhere/r", steps=0, finished=False), again="agentrl train t.yaml").plain
    assert "stopped by request before the first step" in none
    assert none.endswith("next:  agentrl train t.yaml  starts it again")
    spaced = summary_text(Summary(run="/elsewhere/my run", steps=7, held_out_after=0.5), again="x").plain
    assert "agentrl eval '/elsewhere/my run'" in spaced
    assert "agentrl show '/elsewhere/my run' --worst" in spaced
    without = summary_text(Summary(run="r", steps=7), again="x").plain  # no held-out tasks, nothing to eval
    assert "next:  agentrl show r --worst" in without
    assert "agentrl eval" not in without


def test_shares_in_the_summary_are_of_the_episodes_that_were_looked_at():
    counts = {"malformed": 8, "limits": 20, "infra_failures": 5, "faults": {"good": 20, "size": 20}}
    text = summary_text(Summary(run="r", steps=2, episodes=50, scored=20, **counts), again="x").plain
    found = {
        line[:16].strip(): line[16:].split("  ")[1].strip() for line in text.splitlines() if line[16:].strip()
    }
    assert found["malformed"] == "8 (40.0 %)"
    assert found["limits"] == "20 (100.0 %)"
    assert found["infra failures"] == "5 (10.0 %)"
    assert found["faults"] == "40"  # two in each episode: as a share it would be 200 %
    earlier = summary_text(Summary(run="r", steps=2, episodes=50, malformed=8), again="x").plain
    assert "8 (16.0 %)" in earlier  # what is recorded does not say how many were scored


def test_the_summary_says_why_episodes_were_lost_and_what_the_doctor_is_sure_of():
    summary = Summary(
        run="runs/shop", steps=9, held_out_after=0.5, episodes=640, infra_failures=3, redrawn={"InfraError": 3},
        redrawn_examples={"InfraError": "the stock service is down"},
        redrawn_tasks={"t-1": {"InfraError": 3, "played": 13}}, problems=["all answers are the same error"],
    )  # fmt: skip
    text = summary_text(summary, again="x", columns=80).plain
    assert max(map(len, text.splitlines())) < 80
    assert "3 InfraError (the stock service is down); most on" in " ".join(text.split())
    assert "error: all answers are the same error" in text
    assert "next:  agentrl doctor runs/shop" in text


def test_small_words():
    shares = (None, 0.0, 0.0002, 0.0005, 0.5, 0.9994, 0.9996, 1 - 1e-12, 1.0)
    wanted = "–|0.0 %|< 0.1 %|0.1 %|50.0 %|99.9 %|> 99.9 %|100.0 %|100.0 %"
    assert "|".join(map(percent, shares)) == wanted
    assert [duration(s) for s in (0, 7.4, 754, 11109)] == ["0:00", "0:07", "12:34", "3:05:09"]
    assert sparkline([0.0, 0.5, 1.0], 10) == "▁▅█"
    assert sparkline([0.0, 1.0] * 48, 4) == "▅▅▅▅"
    assert sparkline([], 5) == ""
    assert smooth([0, 1, 2, 3], span=2) == [0, 0.5, 1.5, 2.5]


def test_the_curve_is_a_picture_of_both_panels(tmp_path: Path):
    assert write_curve(tmp_path) is None
    write_atomic(
        tmp_path / "metrics.jsonl", b'{"step": 0, "held_out": 0.5}\n{"step": 1, "solved": 0.5, "x": null}\n'
    )
    path = write_curve(tmp_path)
    assert path == tmp_path / "reward_curve.png"
    one = struct.unpack(">II", path.read_bytes()[16:24])
    lines = b'{"step": 2, "solved": 0.75, "reward": 0.7, "reward/cost": -0.05}\n{"step": 3, "reward": null}\n'
    write_atomic(tmp_path / "metrics.jsonl", (tmp_path / "metrics.jsonl").read_bytes() + lines)
    assert write_curve(tmp_path) == path
    assert path.read_bytes().startswith(b"\x89PNG")
    two = struct.unpack(">II", path.read_bytes()[16:24])
    assert two[1] > one[1] > 300  # rewards add a panel


def test_a_curve_is_drawn_once():
    same = [{"step": 1, "solved": 0.5, "reward": 0.5, "reward/solved": 0.5}]
    assert _reward_names(same) == []
    assert _reward_names([{"step": 1, "reward": 0.5, "reward/speed": 0.5}]) == ["reward/speed"]
    several = [{"step": 1, "solved": 1.0, "reward": 0.9, "reward/cost": -0.1, "reward/solved": 1.0}]
    assert _reward_names(several) == ["reward", "reward/cost"]


def test_a_repeated_note_is_one_line_with_its_count():
    out = console(terminal=False)
    with PlainDisplay(out, again="", clock=Clock()) as display:
        display.phase("train", total=40)
        for step in range(1, 41):
            display.note(f"step {step}: nothing to learn from")
        display.note("another note")
    assert written(out).splitlines()[1:] == [
        "note: step 1: nothing to learn from",
        "note: another note",
        "note: step 40: nothing to learn from (40 times)",
    ]
    screen = console(terminal=True)
    with LiveDisplay("r", screen, again="", clock=Clock()) as live:
        for step in range(1, 41):
            live.note(f"step {step}: nothing to learn from")
        shown = console(terminal=False)
        shown.print(live.screen(100))
    assert "step 40: nothing to learn from (40 times)" in written(shown)
    assert written(screen).count("step 7: nothing") == 0


def test_every_late_result_is_shown():
    out = console(terminal=False)
    with PlainDisplay(out, again="", clock=Clock()) as display:
        display.late(2, {"held_out": 0.25, "held_out_reward": 0.5})
        display.late(4, {"held_out": 0.75, "held_out_reward": 0.5})
    assert written(out).splitlines() == [
        "evaluation after step 2: held_out 0.250, held_out_reward 0.500",
        "evaluation after step 4: held_out 0.750, held_out_reward 0.500",
    ]
    with LiveDisplay("r", console(terminal=True), again="", clock=Clock()) as live:
        live.phase("train", 5)
        live.step({"solved": 0.5, "held_out": 0.125})
        live.late(4, {"held_out": 0.75})
        shown = console(terminal=False)
        shown.print(live.screen(100))
    assert "75.0 %" in written(shown)


def test_a_long_wait_says_what_is_being_done():
    out, clock = console(terminal=False), Clock()
    display = PlainDisplay(out, again="", clock=clock)
    display.phase("start")
    display.phase("start")  # each part of the start says so
    display.within("starting 2 sglang servers")
    clock.now += 29.0
    display.remind()
    clock.now += 31.0
    display.remind()
    display.phase("train", total=9)
    display.within("episodes", 12, 64)
    clock.now += 40.0
    display.remind()
    assert written(out).splitlines() == [
        "start: begins",
        "start: starting 2 sglang servers",
        "start: starting 2 sglang servers, 1:00 so far",
        "train: begins, 9 to do",
        "train 0/9: episodes 12/64, 0:40 so far",
    ]


def test_the_live_screen_shows_the_update_and_what_is_done_within_a_step():
    out = console(terminal=True, width=80)
    with LiveDisplay("r", out, again="", clock=Clock()) as display:
        display.phase("start")
        display.within("importing torch")
        shown = console(terminal=False, width=80)
        shown.print(display.screen(80))
        display.phase("train", total=10)
        display.step(METRICS | {"loss": 0.0123, "kl": 0.004, "lr": 3e-4})
        display.within("episodes", 12, 64)
        shown.print(display.screen(80))
    lines = [" ".join(line.split()) for line in written(shown).splitlines()]
    assert lines[0].startswith("r start ")
    for line in ("now importing torch", "now episodes 12/64", "loss 0.0123", "kl 0.004", "lr 0.0003"):
        assert line in lines


PTY = """
import asyncio, logging, os, subprocess, sys, time
logging.getLogger("ray").addHandler(logging.StreamHandler())  # as Ray's, it keeps the stream of before
from agentrl.env.mcp import McpServer, list_tools
from agentrl.reporting.display import LiveDisplay, make_display

with make_display("calc", again="") as display:
    assert isinstance(display, LiveDisplay)
    display.phase("start")
    for done in range(3):
        display.within("held-out tasks", done, 2)
    display.phase("train", total=3)
    subprocess.run(["sh", "-c", "echo child one >&2; echo child two"])
    os.write(1, b"a library" + bytes([10]))
    print("python")
    logging.getLogger("ray").warning("a warning of ray")
    os.write(2, b"half a line ")
    time.sleep(0.6)
    os.write(2, b"and its end" + bytes([10]))
    os.write(2, b"w" * 100 + bytes([10]))
    if sys.argv[1]:
        assert list_tools(McpServer(command=(sys.executable, sys.argv[1])))
    display.step({"reward": 0.5})
    display.note("a note")
    late = subprocess.Popen(["sh", "-c", "read line; echo late"], stdin=subprocess.PIPE)
    time.sleep(0.6)
    os.write(1, b"unfinished")
print("after", flush=True)
late.communicate(b"now" + bytes([10]))
os.write(2, b"and stderr" + bytes([10]))
"""

NOISY_SERVER = """
import sys
from mcp.server import MCPServer
print("a server of tools starts", file=sys.stderr, flush=True)
server = MCPServer("noisy")


@server.tool()
def look() -> str:
    print("it looks", file=sys.stderr)
    return "x"


server.run()
"""


def played(program: str, *arguments: str, width: int = 80) -> str:
    """What a program writes to a terminal of its own."""
    pid, terminal = pty.fork()
    if pid == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 30, width, 0, 0))
        os.environ["TERM"] = "xterm"
        os.execv(sys.executable, [sys.executable, "-c", program, *arguments])
    data = b""
    with contextlib.suppress(OSError):  # how Linux ends a terminal that nobody has open
        while chunk := os.read(terminal, 4096):
            data += chunk
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0, data.decode()
    return data.decode()


@pytest.mark.slow
def test_what_others_print_does_not_tear_the_screen(tmp_path: Path):
    """Lines of child processes, loggers and MCP servers stand above the live lines, whole, each once."""
    server = tmp_path / "server.py"
    server.write_text(NOISY_SERVER)
    found = importlib.util.find_spec("mcp") is not None
    screen = Screen(80)
    data = played(PTY, str(server) if found else "")
    screen.feed(data)
    expected = [
        *("child one", "child two", "a library", "python", "a warning of ray", "half a line and its end"),
        *("w" * 80, "w" * 20, *(["a server of tools starts"] if found else []), "note: a note", "unfinished"),
        *("after", "and stderr"),
    ]
    assert sorted(screen.lines()) == sorted(expected), data
    assert [line for line in screen.lines() if line in expected[-2:]] == expected[-2:]
    for line in ("child one", "a library"):
        at = data.index(line)
        assert data.rindex("\x1b[2K", 0, at) > data.rfind("calc", 0, at)  # the live lines were erased before


@pytest.mark.parametrize("text", ["from a child", "a note"])
def test_a_line_of_another_thread_at_the_end_does_not_tear_the_screen(text: str, monkeypatch: pytest.MonkeyPatch):
    """It comes after rich has given up its place on the screen and before the screen's lines are erased."""
    to = console(terminal=True, width=80)
    display = LiveDisplay("calc", to, again="", clock=Clock())
    say = display.note if text == "a note" else display._from_others
    others: list[threading.Thread] = []

    def pop_render_hook() -> None:
        Console.pop_render_hook(to)
        others.append(threading.Thread(target=say, args=(text,)))
        others[0].start()
        others[0].join(0.3)

    with display:
        display.phase("train", total=3)
        display.step({"reward": 0.5})
        to.print("before")
        monkeypatch.setattr(to, "pop_render_hook", pop_render_hook)
    others[0].join()
    screen = Screen(80)
    screen.feed(written(to).replace("\n", "\r\n"))  # as a terminal does
    assert screen.lines() == ["before", "note: a note" if text == "a note" else text]


RAY = """
import os
from agentrl.ray_cluster import connect, import_ray
from agentrl.reporting.display import make_display

with make_display("calc", again="") as display:
    display.phase("train", total=3)
    ray = import_ray("ray")
    connect(ray, None, cpus=2)
    dying = ray.remote(lambda: os.kill(os.getpid(), 9)).options(max_retries=0).remote()
    try:
        ray.get(dying)
    except ray.exceptions.WorkerCrashedError:
        display.note("a worker died")
    display.step({"reward": 0.5})
    ray.shutdown()
    os.write(2, b"the last line" + bytes([10]))
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_what_ray_prints_does_not_tear_the_screen():
    """Whatever Ray says of its start and of a worker that died, no part of the live lines stays on the screen."""
    pytest.importorskip("ray")
    screen = Screen(80)
    data = played(RAY)
    screen.feed(data)
    lines = screen.lines()
    assert lines.count("note: a worker died") == lines.count("the last line") == 1, data
    assert not [line for line in lines if "calc" in line or "so far" in line or line.startswith("reward")], data
    assert "so far" in data


def test_held_out_tasks_are_one_line_of_the_screen():
    with LiveDisplay("r", console(terminal=True, width=80), again="", clock=Clock()) as display:
        display.phase("start")
        display.within("held-out tasks")
        for done in range(3):
            display.within("held-out tasks", done, 2)
            shown = console(terminal=False, width=80)
            shown.print(display.screen(80))
            lines = [" ".join(line.split()) for line in written(shown).splitlines()]
            assert [line for line in lines if "held-out" in line] == [f"now held-out tasks {done}/2"]
        display.step({"held_out": 0.5})
        shown = console(terminal=False, width=80)
        shown.print(display.screen(80))
    assert "held-out tasks" not in written(shown)


def test_output_that_a_full_disk_refuses_is_not_kept():
    """A run on a full disk would keep all of it, and write it again with each line."""

    class Disk(io.StringIO):
        full = True

        def write(self, text: str) -> int:
            if self.full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(text)

    disk = Disk()
    console = RunConsole(file=disk)
    for step in range(3):
        console.print(f"step {step}")
    disk.full = False
    console.print("step 3")
    assert disk.getvalue() == "step 3\n"
