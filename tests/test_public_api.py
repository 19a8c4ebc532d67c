"""What `import agentrl` offers, and what it costs."""

from __future__ import annotations

import ast
import importlib
import json
import signal
import subprocess
import sys
import typing
import zipfile
from pathlib import Path

import pytest

import agentrl

NAMES = {
    *("AgentRLError", "Completion", "ConfigError", "Env", "Episode", "Group", "Image", "InfraError", "Message"),
    *(
        "RunConfig",
        "Sampling",
        "StepInfo",
        "Stop",
        "StopReason",
        "Task",
        "TextEnv",
        "ToolCall",
        "ToolEnv",
        "ToolResult",
    ),
    *("Turn", "load_config", "read_episodes", "read_groups", "read_metrics", "reward", "start_run", "tool"),
    *("Sample", "configure", "rollouts", "train", "train_blocking", "training_rows"),
    *("Comparison", "EvaluationResult", "Rollouts", "Summary", "compare", "evaluate"),
}
HEAVY = {
    "torch",
    "transformers",
    "ray",
    "sglang",
    "tokenizers",
    "numpy",
    "matplotlib",
    "gymnasium",
    "openai",
    "mcp",
}


def test_the_public_names_are_these():
    assert set(agentrl.__all__) == NAMES
    assert set(dir(agentrl)) >= NAMES
    for name in NAMES:
        value = getattr(agentrl, name)
        assert getattr(importlib.import_module(value.__module__), name) is value


def test_type_checkers_see_the_same_names():
    with open(agentrl.__file__, encoding="utf-8") as file:
        text = file.read()
    declared = {line.split(" as ")[1] for line in text.splitlines() if line.startswith("    from agentrl.")}
    assert declared == NAMES


def test_type_checkers_report_a_name_that_is_not_there():
    tree = ast.parse(Path(agentrl.__file__).read_text(encoding="utf-8"))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert "__getattr__" not in functions, "under it, every name exists for them; hide it from TYPE_CHECKING"


def test_an_archive_on_the_path_is_refused(tmp_path: Path):
    archive = tmp_path / "agentrl.whl"
    with zipfile.ZipFile(archive, "w") as file:
        file.write(agentrl.__file__, "agentrl/__init__.py")
    command = [sys.executable, "-P", "-c", "import sys; sys.path.insert(0, sys.argv[1]); import agentrl", archive]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={})
    assert "agentrl cannot be imported from an archive" in result.stderr.splitlines()[-1]


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'agentrl' has no attribute 'Envv'"):
        typing.cast(typing.Any, agentrl).Envv  # noqa: B018
    with pytest.raises(ImportError):
        exec("from agentrl import nothing_like_it")


def test_the_version_is_that_of_the_distribution():
    major, *_ = agentrl.__version__.split(".")
    assert major.isdigit()


PROBE = """
import json, sys, time

def steps():
    total = 0
    for i in range(3_000_000):
        total += i * i

def spent(work):
    began = time.process_time()
    work()
    return time.process_time() - began

yard = spent(steps)
code = sys.stdin.read()
took = spent(lambda: exec(code, {}))
yard = min(yard, spent(steps))
print(json.dumps([took / yard, sorted({m.split(".")[0] for m in sys.modules})]))
"""
QUICK = 4.5
"""0.9 s where three million small steps of Python take 0.2 s: seconds alone would measure the machine.

The slowest of them took 2.9 to 4.6 times the loop, depending on machine and load.
"""


def probe(code: str) -> tuple[float, set[str]]:
    """Processor time of `code` in a fresh interpreter, in times of the loop, and the modules that it loads."""
    result = subprocess.run([sys.executable, "-c", PROBE], input=code, capture_output=True, text=True, check=True)
    ratio, modules = json.loads(result.stdout.splitlines()[-1])
    return ratio, set(modules)


@pytest.mark.parametrize(
    "code",
    [
        "import agentrl",
        "from agentrl import load_config, Episode, ConfigError",
        "import agentrl.cli",
        "from agentrl.run_folder.store import RunStore; from agentrl.reporting.display import make_display",
    ],
)
def test_imports_are_quick_and_light(code: str):
    ratio, modules = probe(code)
    assert not modules & HEAVY
    for _ in range(5):  # other work on the machine is not ours
        if ratio < QUICK:
            break
        ratio, _ = probe(code)
    assert ratio < QUICK


def test_the_package_alone_takes_less_than_half_a_second():
    code = "import time; t = time.perf_counter(); import agentrl; print(time.perf_counter() - t)"
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)
    ]
    assert min(float(run.stdout) for run in runs) < 0.5


def test_an_env_can_be_written_without_torch():
    _, modules = probe("from agentrl import ToolEnv, tool, reward, Stop, Env, Task")
    assert not modules & {"torch", "transformers", "ray", "sglang"}


def test_help_is_quick():
    code = (
        "from agentrl.cli import main\n"
        "import contextlib, io\n"
        "with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):\n"
        "    main(['--help'])\n"
        "assert 'Train language models' in out.getvalue()"
    )
    runs = [probe(code) for _ in range(3)]
    assert min(ratio for ratio, _ in runs) < QUICK
    assert not runs[0][1] & HEAVY


INTERRUPTED_IMPORT = """
import os, signal, sys

class Interrupt:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "{module}":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt)
signal.signal(signal.SIGINT, signal.default_int_handler)
import agentrl.cli
"""
INTERRUPTED_EXIT = """
import atexit, os, signal
from agentrl.cli import main
from agentrl.garbage import collect_rarely

signal.signal(signal.SIGINT, signal.default_int_handler)
collect_rarely()
atexit.register(os.kill, os.getpid(), signal.SIGINT)  # as the import of an engine does
main(["--version"])
"""
INTERRUPTED_WAIT = """
import os, signal, threading
from agentrl.cli import main

def interrupt():
    threading.main_thread().join()
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(10)

signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Thread(target=interrupt).start()  # as one that loads a model
main(["--version"])
"""


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (INTERRUPTED_IMPORT.format(module="typing"), 130),
        (INTERRUPTED_IMPORT.format(module="agentrl.cli.options"), 130),
        (INTERRUPTED_EXIT, -signal.SIGINT),
        (INTERRUPTED_WAIT, -signal.SIGINT),
    ],
)
def test_an_interrupt_before_or_after_a_command_shows_no_traceback(code: str, status: int):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (status, "")


WITHOUT_TRAIN = """
import importlib.machinery, inspect, os, pydoc, sys

MISSING = {"torch", "transformers", "tokenizers", "safetensors", "matplotlib", "huggingface_hub"}

class NotThere(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in MISSING else super().find_spec(name, path, target)

sys.meta_path[:] = [NotThere if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]

from agentrl import *
import agentrl

pydoc.render_doc(agentrl)
inspect.getmembers(agentrl)
config = {"env": "agentrl.envs.calculator:Calculator", "model": {"tiny": {}}}
for call in (
    lambda: agentrl.train_blocking(config),
    lambda: agentrl.start_run(agentrl.configure(config)),
    lambda: agentrl.rollouts(config, 2),
    lambda: agentrl.training_rows([], config),
    lambda: agentrl.evaluate(env=config | {"model": {"path": "."}}),
):
    try:
        call()
    except ConfigError as e:
        print(e)
assert not os.path.exists("runs")
"""


def test_without_the_train_extra_every_name_is_there_and_a_call_names_the_extra(tmp_path: Path):
    command = [sys.executable, "-c", WITHOUT_TRAIN]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    needs = "needs torch, which is not installed: pip install 'agentrl-train[train]'"
    calls = ["training", "training", "agentrl.rollouts", "agentrl.training_rows", "agentrl.evaluate"]
    assert result.stdout.splitlines() == [f"{call} {needs}" for call in calls]
