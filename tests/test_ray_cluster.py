"""A Ray that does not come up leaves nothing behind, and ends in one error."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrl.errors import ConfigError, WorkerLost
from agentrl.ray_cluster import JOB_CONFIG, STARTS, connect


class SlowRay:
    """Starts a part of itself and then gives up, as Ray does on a machine that is too busy."""

    def __init__(self, home: Path) -> None:
        self.__file__ = str(home / "__init__.py")
        self.home, self.parts = home, []

    def is_initialized(self) -> bool:
        return False

    def init(self, **options: object) -> None:
        wait = "import time; time.sleep(600)"
        self.parts.append(subprocess.Popen([sys.executable, "-c", wait, str(self.home / "gcs_server")]))
        while not Path(f"/proc/{self.parts[-1].pid}/cmdline").read_bytes():
            time.sleep(0.01)
        raise Exception("The current node timed out during startup")

    def shutdown(self) -> None:
        """It does not know of its parts."""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_parts_of_a_ray_that_did_not_start_are_ended(tmp_path: Path):
    ray, other = SlowRay(tmp_path), subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        with pytest.raises(WorkerLost, match=r"Ray did not start on this machine: The current node timed out"):
            connect(ray, None, cpus=2)
        assert len(ray.parts) == STARTS
        assert [part.wait(timeout=30) for part in ray.parts] == [-9] * STARTS
        assert other.poll() is None, "what is not Ray's goes on"
    finally:
        for process in (other, *ray.parts):
            process.kill()
            process.wait()


class Guarded(SlowRay):
    """A cluster with token authentication, as Ray tells of it: an address alone does not send the token."""

    def init(self, **options: object) -> None:
        raise ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379")


def test_a_cluster_that_asks_for_a_token_is_not_said_to_be_missing(tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        connect(Guarded(tmp_path), "auto", cpus=1)
    assert str(caught.value).startswith(
        "ray 'auto': Failed to connect to Ray cluster at 10.0.0.1:6379. If it asks"
    )
    assert "needs that file and RAY_AUTH_MODE=token in its environment" in str(caught.value)


class Submitted(SlowRay):
    """Records whether a cluster gets the files of the job that the process is the entrypoint of."""

    def init(self, **options: object) -> None:
        self.parts.append(os.environ.get(JOB_CONFIG))


def test_only_the_cluster_of_a_submitted_job_gets_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(JOB_CONFIG, '{"runtime_env": {"working_dir": "gcs://_ray_pkg_1.zip"}}')
    ray = Submitted(tmp_path)
    for address in ("auto", None, "auto"):
        connect(ray, address, cpus=1)
    files = '{"runtime_env": {"working_dir": "gcs://_ray_pkg_1.zip"}}'
    assert ray.parts == [files, None, files]


SIGNALED = """
import os, signal, sys
from concurrent.futures import ThreadPoolExecutor
from agentrl.ray_cluster import connect, disconnect, import_ray

received = []
signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
ray, other = import_ray("ray"), ThreadPoolExecutor(1)


def call(function, *arguments, **options):
    if sys.argv[1] == "main":
        function(*arguments, **options)
    else:
        other.submit(function, *arguments, **options).result()
    os.kill(os.getpid(), signal.SIGTERM)


call(connect, ray, None, cpus=1)
call(disconnect, ray)
print(len(received))
"""


@pytest.mark.slow
@pytest.mark.parametrize("thread", ["main", "other"])
def test_ray_does_not_take_sigterm_from_the_run(thread: str):
    """Where Ray handles it, the process is aborted three seconds later; once Ray has ended, at once."""
    pytest.importorskip("ray", reason="Ray is not installed (extra: ray)")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", SIGNALED, thread], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "2"
    assert "SIGTERM received" not in done.stderr
