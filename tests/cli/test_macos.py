"""The commands without what Python has only on Linux: an emulation of macOS, which no test machine is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MACOS = '''
import builtins, ctypes, io, multiprocessing, os, platform, resource, runpy, select, selectors, signal, socket, sys
import sysconfig, tempfile

sysconfig.get_config_vars()  # it and these packages ask for the platform when they are first used
if sys.argv[1] == "agentrl":
    import psutil, torch, transformers

LACKING = {  # the names that typeshed has for Linux only
    os: """O_PATH O_TMPFILE P_PIDFD copy_file_range eventfd fdatasync getrandom getresgid getresuid getxattr
        listxattr memfd_create pidfd_open pipe2 posix_fadvise posix_fallocate removexattr sched_getaffinity
        sched_getparam
        sched_getscheduler sched_setaffinity sched_setparam sched_setscheduler setresgid setresuid setxattr splice
        waitid""",
    signal: "pidfd_send_signal sigtimedwait sigwaitinfo SIGRTMIN SIGRTMAX",
    select: "epoll EPOLLIN",
    selectors: "EpollSelector",
    socket: "SOCK_CLOEXEC SOCK_NONBLOCK SO_PEERCRED SO_PASSCRED",
    resource: "prlimit RLIMIT_SIGPENDING RLIMIT_MSGQUEUE",
}
for module, names in LACKING.items():
    for name in names.split():
        vars(module).pop(name, None)
selectors.DefaultSelector = selectors.PollSelector
tempfile._O_TMPFILE_WORKS = False
multiprocessing.set_start_method("spawn")


def without_proc(function):
    def opened(path, *args, **options):
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(("/proc", "/sys/", "/dev/shm")):
            raise FileNotFoundError(2, "No such file or directory", path)
        return function(path, *args, **options)

    return opened


for name in ("open", "stat", "lstat", "listdir", "scandir", "readlink"):
    setattr(os, name, without_proc(getattr(os, name)))
builtins.open = io.open = without_proc(open)


class CDLL(ctypes.CDLL):
    def __getattr__(self, name):
        if name in ("prctl", "unshare", "mount", "mallopt", "syscall"):
            raise AttributeError(name)
        return super().__getattr__(name)


ctypes.CDLL = CDLL
platform.system = lambda: "Darwin"
sys.platform = "darwin"
sys.argv = sys.argv[1:]
if sys.argv[0] == "agentrl":
    from agentrl.cli import main

    main(sys.argv[1:])
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
'''
NEEDS_LINUX = "needs Linux, and this is macOS: use backend='docker', or 'remote' with `agentrl sandbox serve`"


def on_macos(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run `agentrl ...`, or a module, there; returns its exit code and what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", MACOS, *arguments],
        cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "DOCKER_HOST": "unix:///nowhere.sock"},
    )  # fmt: skip
    return done.returncode, done.stdout


def write_config(folder: Path, more: str = "", env: str = "calculator:Calculator") -> None:
    (folder / "tools.yaml").write_text(
        f"env: agentrl.envs.{env}\nmodel: {{tiny: {{hidden: 32, layers: 1, vocab: 400, max_context: 2048}}}}\n"
        f"steps: 1\nrollout: {{groups_per_step: 1, group_size: 2, max_turns: 2, max_tokens: 8}}\n"
        f"eval: {{tasks: 1}}\n{more}"
    )


def test_the_doctor_describes_the_machine(tmp_path: Path) -> None:
    code, out = on_macos(tmp_path, "agentrl", "doctor")
    assert code == 0, out
    assert " on Darwin " in out
    assert "GiB free in this folder" in out
    for backend in ("namespace", "landlock", "process"):
        assert f"{backend}: not usable here: sandbox backend '{backend}' {NEEDS_LINUX}" in out
    assert "docker: not usable here: no Docker engine answers at unix:///nowhere.sock" in out
    assert "set DOCKER_HOST" in out


@pytest.mark.slow
def test_a_run_trains_and_its_folder_can_be_read(tmp_path: Path) -> None:
    write_config(tmp_path)
    code, out = on_macos(tmp_path, "agentrl", "train", "tools.yaml", "--set", "name=a")
    assert code == 0, out
    code, out = on_macos(tmp_path, "agentrl", "show", "runs/a")
    assert code == 0, out


@pytest.mark.parametrize(
    ("env", "more"),
    [("python_code:PythonCode", ""), ("calculator:Calculator", "agent: {command: [python, a.py], sandbox: {}}\n")],
)
def test_a_sandbox_that_needs_linux_is_refused_before_anything_is_trained(
    env: str, more: str, tmp_path: Path
) -> None:
    write_config(tmp_path, f"warmup: {{num: 2}}\n{more}", env)
    code, out = on_macos(tmp_path, "agentrl", "train", "tools.yaml")
    assert code == 2
    assert "warm-up" not in out
    assert f"sandbox backend 'namespace' {NEEDS_LINUX}" in out.splitlines()[-1]


def test_the_image_is_not_packed_from_programs_of_another_system(tmp_path: Path) -> None:
    code, out = on_macos(tmp_path, "agentrl.sandboxes.docker.image")
    assert code == 2
    assert "docker build -t agentrl/sandbox:latest " in out
    assert Path(out.split()[-1], "Dockerfile").is_file()


def test_names_of_dead_owners_are_recognized_without_proc(tmp_path: Path) -> None:
    (tmp_path / "owners.py").write_text(
        "import subprocess, sys\nfrom agentrl.sandbox.inside.leftovers import is_stale, run_name\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        "pid, began = run_name().split('-')\nother = f'{child.pid}-{began}'\n"
        "print(is_stale(run_name()), is_stale(other))\nchild.kill()\nchild.wait()\nprint(is_stale(other))\n"
    )
    assert on_macos(tmp_path, "owners") == (0, "False False\nTrue\n")


def test_windows_is_told_to_use_wsl() -> None:
    program = "import sys; sys.platform = 'win32'; import agentrl"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: agentrl needs Linux or macOS; on Windows")
