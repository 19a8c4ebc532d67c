"""What all tests share."""

import gc
import os
import pwd
import ssl
from collections.abc import Generator, Iterator
from functools import cache

import pytest
import typer.main

from agentrl.garbage import RARELY

# Files that take long start first, so that no process is left alone with one at the end.
LONG = (
    "trainer/test_sglang", "trainer/test_vllm_server", "serve/test_serve_vllm", "learner/test_ranks",
    "exam/test_planted", "sandbox/test_suite", "doctor/test_planted", "cli/test_train_and_eval",
    "trainer/test_run", "trainer/test_algorithms_train", "envs/others/test_inspect", "trainer/test_changed_runs",
    "trainer/test_kill9", "learner/test_sequence_ranks", "chat/test_parsers_fuzz", "trainer/test_mixture",
    "serve/test_clients", "trainer/test_replay", "view/test_page", "view/test_served", "trainer/test_teacher_run",
    "trainer/test_observation_run", "trainer/test_hints", "trainer/test_start",
)  # fmt: skip

# Tiny matrices gain nothing from a second thread, and two spinning threads on a busy machine cost tenfold.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Each HTTP client would load the certificates of all authorities, for 45 ms of CPU time, and tests make thousands.
ssl.create_default_context = cache(ssl.create_default_context)

# Each command would build the tree of all commands, for 20 ms.
typer.main.get_command = cache(typer.main.get_command)

# `garbage_of_this_file` looks for what is left open.
gc.set_threshold(*RARELY)


@pytest.fixture(scope="module", autouse=True)
def garbage_of_this_file() -> Iterator[None]:
    """What a file leaves open is an error of its last test, not of the whole run's end, which would name nobody.

    What survives is set aside, so that the next collection looks at new objects only.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user has no home, as with `docker run --user 1234`."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Thousands of modules are imported now, and stay: no collection looks for garbage among them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files; pytest-xdist keeps this order with --no-loadscope-reorder."""
    rank = {f"tests/{name}.py": number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.nodeid.split("::")[0], len(rank)))
