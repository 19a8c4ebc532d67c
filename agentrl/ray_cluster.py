"""Ray, where a run wants it: an existing cluster, or one started on this machine for the run."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, WorkerLost

RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
}
"""Set before Ray is imported, unless the user has: no reports home, GPUs left visible, workers not at nice 15."""
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Set by `ray job submit`: files on the cluster of the job, which one that is started here cannot fetch."""
SIGACTION_BYTES = 1024
"""More than a `struct sigaction` has anywhere."""
STARTS = 4
"""Ray gives its own processes half a minute to come up, which a busy machine may not keep."""


def import_ray(key: str) -> Any:
    """The module `ray`. Raises ConfigError, naming the setting `key` that asks for it, if there is none."""
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return import_module("ray")
    except ImportError:
        raise ConfigError(f"{key} needs Ray: pip install 'agentrl-train[ray]', or leave it out") from None


def connect(ray: Any, address: str | None, *, cpus: int) -> bool:
    """Connect to Ray unless this process is already; True where the caller has to disconnect it.

    On Linux, the processes of a Ray that is started here are killed when the calling thread ends.

    Args:
        ray: the module.
        address: of the cluster, or `auto`; None starts one on this machine.
        cpus: that a cluster started here offers at least, whatever the machine has.

    Raises:
        ConfigError: there is no cluster at the address.
        WorkerLost: Ray did not start here.
    """
    if ray.is_initialized():
        return False
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    with _signals_kept():
        if address is not None:
            try:
                _knock(address)
                ray.init(address=address, **options)
            except (OSError, ValueError, RuntimeError) as e:
                raise ConfigError(f"ray {address!r}: {_refused(e)}") from e
            return True
        cpus = max(os.cpu_count() or 1, cpus)
        for attempt in range(STARTS):
            before = _children()
            try:
                with _without_job():
                    ray.init(address="local", num_cpus=cpus, include_dashboard=False, **options)
                break
            except Exception as e:  # Ray raises a bare Exception where its processes do not come up
                ray.shutdown()
                _end_parts(ray, _children() - before)
                if attempt == STARTS - 1:
                    raise WorkerLost(f"Ray did not start on this machine: {' '.join(str(e).split())[:400]}") from e
    return True


def disconnect(ray: Any) -> None:
    """Leave the cluster, and end it if it was started here. For whoever `connect` said has to."""
    with _handlers_kept():
        ray.shutdown()


def node_lives(ray: Any) -> bool:
    """Whether Ray's own process on this machine is up: without it, this process gets no new actors."""
    own = ray.get_runtime_context().get_node_id()
    return any(node["Alive"] for node in ray.nodes() if node["NodeID"] == own)


def _children() -> set[int]:
    """The processes that this one has started; none if there is no /proc."""
    found: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread has ended
            found |= {int(pid) for pid in file.read_text().split()}
    return found


def _end_parts(ray: Any, started: set[int]) -> None:
    """End what is left of a Ray that did not come up: it keeps running and slows the next try."""
    home = str(Path(ray.__file__).parent).encode()
    for pid in started:
        try:
            if home in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        except OSError:  # it has already ended
            continue


def _knock(address: str) -> None:
    """See at once whether anything listens: Ray itself would try for a minute. Raises OSError if not."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def _refused(error: Exception) -> str:
    """Why this process is not connected. Ray names an address that it found and could not connect to, not why."""
    if not str(error).startswith("Failed to connect to Ray cluster"):
        return f"no Ray cluster answers there: {error}"
    return (
        f"{error}. If it asks for a token (~/.ray/auth_token on its nodes), this machine needs that file and "
        "RAY_AUTH_MODE=token in its environment"
    )


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself, or warns that it cannot; the run has its own way of leaving. A closed terminal
    does not end the processes that Ray starts, either."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        with _handlers_kept():
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@contextmanager
def _without_job() -> Iterator[None]:
    """A later run of this process may use the cluster of the submitted job."""
    job = os.environ.pop(JOB_CONFIG, None)
    try:
        yield
    finally:
        if job is not None:
            os.environ[JOB_CONFIG] = job


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """In any thread, Ray's C++ part takes SIGTERM when it starts: it prints a stack, calls the earlier handler and
    aborts the process three seconds later. When it ends, SIGTERM kills."""
    if threading.current_thread() is not threading.main_thread():
        logger = logging.getLogger("ray._private.worker")
        logger.addFilter(_not_about_sigterm)
        sigaction, kept = ctypes.CDLL(None).sigaction, ctypes.create_string_buffer(SIGACTION_BYTES)
        sigaction(signal.SIGTERM, None, kept)
        try:
            yield
        finally:
            sigaction(signal.SIGTERM, kept, None)  # which `signal.signal` does in the main thread only
            logger.removeFilter(_not_about_sigterm)
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _not_about_sigterm(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("SIGTERM handler is not set")
