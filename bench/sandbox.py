"""How long a sandbox keeps a policy waiting, and what it costs.

    python -m bench.sandbox [--quick] [--seconds 2] [--concurrency 1,2,16] [--rows namespace,docker] [--out FOLDER]

Rows: `subprocess` (what most tool code does), `namespace` (the default back-end), `docker` (the same supervisor in
a hardened container), `docker exec` and `docker run` (how it is usually done). Docker rows need an engine: see
scripts/ci-docker. CPU is that of the client, the keeper, the sandboxes, and the engine with its shims. The last
line is JSON: a fresh Python call of the default back-end against a subprocess, one at a time, and the other goals.
That call comes 10 ms after the one before, so that its child has been forked by then: an agent's calls are further
apart than that. Calls back to back are the row `python`, whose calls/s are the sustained rate. A session is judged
back to back, which finds both its sides awake, and told 10 ms apart as well. The docker worker is judged by calls
10 ms apart.
`--quick` takes half a second a figure, one and sixteen at once, no containers, and writes no files.

    python -m bench.sandbox chaos [--leases 10000] [--cancellations 1000]

hands out leases while 5 % of the sandboxes are killed at random, cancels calls, and counts what is left behind;
with `--quick` 60 leases and 10 cancellations. The last line is JSON here, too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from agentrl.sandbox import Box, Sandbox, SandboxPool
from agentrl.testing.sandbox_suite.endurance import chaos

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.shared.verdict import finish

FRESH_GOAL_MS, SUSTAINED_GOAL = 2.0, 200
APART, SESSION_APART = "python, 10 ms apart", "session, 10 ms apart"
PAUSE_S = 0.01
Call = Callable[[], Awaitable[object]]


@dataclass(frozen=True)
class Figure:
    """One cell: what was called, how often at once, how long it took."""

    row: str
    what: str
    concurrency: int
    calls: int
    p50_ms: float
    p99_ms: float
    cpu_ms: float
    calls_per_s: float


class Meter:
    """CPU seconds of everything that works for the benchmark."""

    def __init__(self) -> None:
        self._group = Path("/sys/fs/cgroup/cpuacct") / f"agentrl-bench-{os.getpid()}"
        self._own = False
        with contextlib.suppress(OSError):
            self._group.mkdir()
            for pid in [os.getpid(), *self._engine()]:
                (self._group / "cgroup.procs").write_text(str(pid))
            self._own = True

    def read(self) -> float:
        """Seconds so far."""
        if not self._own:
            t = os.times()
            return t.user + t.system + t.children_user + t.children_system
        total = int((self._group / "cpuacct.usage").read_text()) / 1e9
        with contextlib.suppress(OSError):
            total += int(Path("/sys/fs/cgroup/cpuacct/docker/cpuacct.usage").read_text()) / 1e9
        return total

    def _engine(self) -> list[int]:
        """The processes of a Docker engine on this machine; what they start counts as well."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if (entry / "comm").read_text().strip() in ("dockerd", "containerd", "containerd-shim"):
                        found.append(int(entry.name))
        return found

    def close(self) -> None:
        """Leave the group."""
        if self._own:
            for pid in (self._group / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    Path("/sys/fs/cgroup/cpuacct/cgroup.procs").write_text(pid)
            with contextlib.suppress(OSError):
                self._group.rmdir()


def _rank(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def measure(
    row: str, what: str, calls: list[Call], seconds: float, meter: Meter, pause_s: float = 0.0
) -> Figure:
    """Each of `calls` again and again for `seconds`, all of them at once, with a pause between two calls."""
    for call in calls:
        await call()
    times: list[float] = []
    end = time.monotonic() + seconds

    async def work(call: Call) -> None:
        while True:
            began = time.perf_counter()
            await call()
            times.append(time.perf_counter() - began)
            if time.monotonic() >= end:
                return
            if pause_s:
                await asyncio.sleep(pause_s)

    cpu, began = meter.read(), time.monotonic()
    await asyncio.gather(*(work(call) for call in calls))
    spent, cpu = time.monotonic() - began, meter.read() - cpu
    return Figure(
        row, what, len(calls), len(times), _rank(times, 0.5) * 1e3, _rank(times, 0.99) * 1e3,
        cpu / len(times) * 1e3, len(times) / spent,
    )  # fmt: skip


async def plain(command: list[str]) -> None:
    """A subprocess as tool code starts one."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{command} ended with {process.returncode}")


async def row_subprocess(concurrency: int, seconds: float, meter: Meter) -> AsyncIterator[Figure]:
    """Fresh interpreters of this machine."""
    python = [getattr(sys, "_base_executable", sys.executable), "-c", "print(1)"]
    yield await measure("subprocess", "python", [lambda: plain(python)] * concurrency, seconds, meter)
    yield await measure("subprocess", "true", [lambda: plain(["true"])] * concurrency, seconds, meter)


async def row_backend(backend: str, concurrency: int, seconds: float, meter: Meter) -> AsyncIterator[Figure]:
    """A back-end of ours: create, lease, fresh call, session call, `true`."""
    async with SandboxPool(Sandbox(backend=backend), min_idle=0, create_concurrency=concurrency) as pool:

        async def create() -> None:
            async with pool.lease() as box:
                await box.usage()

        yield await measure(backend, "create", [create] * concurrency, seconds, meter)
    async with SandboxPool(Sandbox(backend=backend), min_idle=concurrency) as pool:
        yield await _leases(backend, pool, concurrency, meter)
        async with contextlib.AsyncExitStack() as stack:
            boxes = [await stack.enter_async_context(pool.lease()) for _ in range(concurrency)]
            pool.min_idle = 0
            sessions = [await box.session("python") for box in boxes]
            runs = [_session(session.run) for session in sessions]
            yield await measure(backend, "session", runs, seconds, meter)
            yield await measure(backend, SESSION_APART, runs, seconds, meter, pause_s=PAUSE_S)
            for session in sessions:
                await session.close()
            yield await measure(backend, "python", [_python(box) for box in boxes], seconds, meter)
            paused = [_python(box) for box in boxes]
            yield await measure(backend, APART, paused, seconds, meter, pause_s=PAUSE_S)
            yield await measure(backend, "true", [_true(box) for box in boxes], seconds, meter)


def _python(box: Box) -> Call:
    return lambda: box.python("print(1)")


def _true(box: Box) -> Call:
    return lambda: box.run(["true"])


def _session(run: Callable[[str], Awaitable[object]]) -> Call:
    return lambda: run("1 + 1")


async def _leases(backend: str, pool: SandboxPool, concurrency: int, meter: Meter) -> Figure:
    """How long a lease takes when as many sandboxes are ready as are wanted."""
    times: list[float] = []

    async def lease() -> Box:
        began = time.perf_counter()
        box = await pool.acquire()
        times.append(time.perf_counter() - began)
        return box

    cpu, spent = 0.0, 0.0
    for _ in range(3):
        for _ in range(10_000):
            if pool.metrics()["idle"] >= concurrency:
                break
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        before, began = meter.read(), time.monotonic()
        boxes = await asyncio.gather(*(lease() for _ in range(concurrency)))
        spent, cpu = spent + time.monotonic() - began, cpu + meter.read() - before
        await asyncio.gather(*(pool.release(box) for box in boxes))
    return Figure(
        backend, "lease", concurrency, len(times), _rank(times, 0.5) * 1e3, _rank(times, 0.99) * 1e3,
        cpu / len(times) * 1e3, len(times) / spent,
    )  # fmt: skip


async def row_docker_exec(concurrency: int, seconds: float, meter: Meter) -> AsyncIterator[Figure]:
    """`docker exec` in warm containers, through the SDK."""
    import docker

    client = docker.APIClient(version="auto", max_pool_size=concurrency, **docker.utils.kwargs_from_env())
    config = client.create_host_config(network_mode="none", auto_remove=True)
    threads = ThreadPoolExecutor(concurrency)
    boxes = []
    try:
        for _ in range(concurrency):
            made = client.create_container(
                "agentrl/sandbox:latest", ["sleep", "1000"], entrypoint=[], host_config=config
            )
            boxes.append(made["Id"])
            client.start(made["Id"])

        def run(box: str, command: list[str]) -> None:
            execution = client.exec_create(box, command)["Id"]
            client.exec_start(execution)
            if client.exec_inspect(execution)["ExitCode"]:
                raise RuntimeError(f"{command} failed in {box}")

        def call(box: str, command: list[str]) -> Call:
            return lambda: asyncio.get_running_loop().run_in_executor(threads, run, box, command)

        for what, command in (("python", ["python3", "-c", "print(1)"]), ("true", ["true"])):
            yield await measure("docker exec", what, [call(box, command) for box in boxes], seconds, meter)
    finally:
        for box in boxes:
            client.remove_container(box, force=True)
        threads.shutdown()
        client.close()


async def row_docker_run(concurrency: int, seconds: float, meter: Meter) -> AsyncIterator[Figure]:
    """A container for each call: create, start, wait, remove."""
    import docker

    client = docker.APIClient(version="auto", max_pool_size=concurrency, **docker.utils.kwargs_from_env())
    threads = ThreadPoolExecutor(concurrency)
    config = client.create_host_config(network_mode="none", log_config={"Type": "none", "Config": {}})

    def run(command: list[str]) -> None:
        made = client.create_container("agentrl/sandbox:latest", command, entrypoint=[], host_config=config)["Id"]
        try:
            client.start(made)
            if client.wait(made)["StatusCode"]:
                raise RuntimeError(f"{command} failed")
        finally:
            client.remove_container(made, force=True)

    def call(command: list[str]) -> Call:
        return lambda: asyncio.get_running_loop().run_in_executor(threads, run, command)

    try:
        for what, command in (("python", ["python3", "-c", "print(1)"]), ("true", ["true"])):
            yield await measure("docker run", what, [call(command)] * concurrency, seconds, meter)
    finally:
        threads.shutdown()
        client.close()


def table(figures: list[Figure]) -> str:
    """The figures as Markdown."""
    lines = [
        "| row | call | at once | p50 ms | p99 ms | CPU ms a call | calls/s |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for f in figures:
        lines.append(
            f"| {f.row} | {f.what} | {f.concurrency} | {f.p50_ms:.2f} | {f.p99_ms:.2f} | {f.cpu_ms:.2f} "
            f"| {f.calls_per_s:.0f} |"
        )
    return "\n".join(lines)


def summary(figures: list[Figure]) -> dict[str, object]:
    """The goals for the default back-end, and how it stands to them; only what was measured."""
    found = {(f.row, f.what, f.concurrency): f for f in figures}
    fresh, plain_call = found.get(("namespace", APART, 1)), found.get(("subprocess", "python", 1))
    if fresh is None or plain_call is None:
        why = "the rows that the goal is about were not measured"
        return {"bench": "sandbox", "ours": None, "unit": "ms", "goal": FRESH_GOAL_MS, "met": None, "why": why}
    session, lease = found["namespace", "session", 1], found["namespace", "lease", 1]
    alone = found["namespace", SESSION_APART, 1]
    sustained = min(f.calls_per_s for f in figures if (f.row, f.what) == ("namespace", "python"))
    others = {"session_ms": (session.p50_ms, 0.2), "lease_ms": (lease.p50_ms, 5.0)}
    beside = {"session_apart_ms": round(alone.p50_ms, 2)}
    if ("docker", APART, 1) in found:
        others["docker_to_namespace"] = (found["docker", APART, 1].p50_ms / fresh.p50_ms, 1.5)
        ratio = found["docker", "python", 1].p50_ms / found["namespace", "python", 1].p50_ms
        beside["docker_to_namespace_back_to_back"] = round(ratio, 2)
    met = fresh.p50_ms <= FRESH_GOAL_MS and sustained >= SUSTAINED_GOAL
    return {
        "bench": "sandbox",
        "ours": round(fresh.p50_ms, 2),
        "baseline": round(plain_call.p50_ms, 2),
        "ratio": round(plain_call.p50_ms / fresh.p50_ms, 1),
        "unit": "ms for a fresh Python call, p50, one at a time, 10 ms apart",
        "goal": FRESH_GOAL_MS,
        "met": met and all(value <= goal for value, goal in others.values()),
        "back_to_back_ms": round(found["namespace", "python", 1].p50_ms, 2),
        "calls_per_s": round(sustained),
        "calls_per_s_goal": SUSTAINED_GOAL,
        **{name: round(value, 2) for name, (value, _) in others.items()},
        **{f"{name}_goal": goal for name, (_, goal) in others.items()},
        **beside,
        "load_average": round(os.getloadavg()[0], 1),
    }


async def latency(arguments: argparse.Namespace) -> None:
    """The table."""
    meter = Meter()
    figures: list[Figure] = []
    try:
        for row in arguments.rows.split(","):
            for concurrency in (int(n) for n in arguments.concurrency.split(",")):
                rows = {
                    "subprocess": row_subprocess,
                    "docker exec": row_docker_exec,
                    "docker run": row_docker_run,
                }
                found = (
                    rows[row](concurrency, arguments.seconds, meter)
                    if row in rows
                    else row_backend(row, concurrency, arguments.seconds, meter)
                )
                async for figure in found:
                    figures.append(figure)
                    print(table([figure]).splitlines()[-1], flush=True)
    finally:
        meter.close()
    if not arguments.quick:
        _write(figures, Path(arguments.out))
    finish(summary(figures), timed=True)


def _write(figures: list[Figure], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release().split('-')[0]}"
    body = f"# Sandbox latency\n\n{machine}, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}\n\n"
    (folder / "sandbox.md").write_text(body + table(figures) + "\n")
    (folder / "sandbox.json").write_text(json.dumps([asdict(f) for f in figures], indent=1) + "\n")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Latency, cost and endurance of the sandboxes")
    parser.add_argument("what", nargs="?", default="latency", choices=["latency", "chaos"])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--concurrency", default="1,2,16,64")
    parser.add_argument("--rows", default="subprocess,namespace,docker,docker exec,docker run")
    parser.add_argument("--out", default="bench/results")
    parser.add_argument("--backend", default="namespace")
    parser.add_argument("--leases", type=int, default=10_000)
    parser.add_argument("--cancellations", type=int, default=1_000)
    parser.add_argument("--quick", action="store_true", help="under a minute, without containers or files")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seconds, arguments.concurrency, arguments.rows = 0.5, "1,16", "subprocess,namespace"
        arguments.leases, arguments.cancellations = 60, 10
    if arguments.what == "latency":
        asyncio.run(latency(arguments))
    else:
        spec = Sandbox(backend=arguments.backend)
        seen = asyncio.run(chaos(spec, leases=arguments.leases, cancellations=arguments.cancellations))
        finish(
            {
                "bench": "sandbox",
                "ours": seen.left + seen.untyped,
                "unit": "things left behind, and errors that are no SandboxError",
                "goal": 0,
                "met": seen.left + seen.untyped == 0,
                **asdict(seen),
            }
        )


if __name__ == "__main__":
    main()
