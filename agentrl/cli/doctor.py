"""`agentrl doctor`: what this machine can do, or what is wrong with a run."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.clean import visible
from agentrl.errors import ConfigError
from agentrl.extras import DISTRIBUTION

if TYPE_CHECKING:
    from agentrl.doctor.finding import Finding

PACKAGES = {
    "pydantic": "reads configurations and tool arguments",
    "openai": "talks to endpoints",
    "gymnasium": "plays and lends environments",
    "torch": "trains and samples (extra: train)",
    "transformers": "reads models (extra: train)",
    "tokenizers": "turns text into tokens (extra: train)",
    "safetensors": "reads and writes weights (extra: train)",
    "matplotlib": "draws reward curves (extra: train)",
    "peft": "trains adapters (extra: lora)",
    "sglang": "samples fast on GPUs (install it into a separate environment)",
    "vllm": "samples fast on GPUs (install it into a separate environment)",
    "flash-attn": "attention on GPUs (no extra)",
    "ray": "trains on several GPUs or machines (extra: ray)",
    "mcp": "calls tools of MCP servers (extra: mcp)",
    "starlette": "serves policies (extra: serve)",
    "datasets": "reads datasets by name (extra: hf)",
    "pyarrow": "reads and writes parquet (extra: parquet)",
    "docker": "runs sandboxes in containers (extra: docker)",
}
"""Packages whose versions matter, and why."""


def doctor(
    what: Annotated[
        str,
        typer.Argument(
            help="`sandbox`: only what sandboxes isolate here. A run folder: look for faults in the run."
        ),
    ] = "all",
    strict: Annotated[
        bool, typer.Option("--strict", help="With a run: exit with 1 if there is a warning or an error.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With a run: print the findings as JSON.")] = False,
) -> None:
    """Show what this machine has (Python, packages, GPUs, disk space, working sandboxes), or what is wrong with a
    run, with the evidence and the setting to change next."""
    if what not in ("all", "sandbox"):
        _run(Path(what), strict=strict, as_json=as_json)
        return
    if strict or as_json:
        raise ConfigError("--strict and --json: have an effect for a run folder only")
    if what == "all":
        _machine()
        print()
    sys.stdout.flush()

    from agentrl.sandbox.survey import doctor as sandboxes

    print(sandboxes(), end="")


def _run(run: Path, *, strict: bool, as_json: bool) -> None:
    """What is wrong with a run."""
    from agentrl.cli.options import require_run
    from agentrl.doctor.examine import findings

    if not run.exists():
        raise ConfigError(f"doctor {run}: write `all`, `sandbox`, or the path of a run folder")
    require_run(run)
    if (run / "eval.json").is_file():
        raise ConfigError(
            f"doctor {run}: is the folder of an evaluation, and doctor looks at training runs; see its "
            f"episodes with `agentrl show {run}`"
        )
    found = findings(run)
    if as_json:
        print(json.dumps({"run": str(run), "findings": [finding.data() for finding in found]}, indent=2))
    else:
        _lost(run)
        _show(found)
    if strict and any(finding.severity != "hint" for finding in found):
        raise typer.Exit(1)


def _show(found: Sequence[Finding]) -> None:
    if not found:
        print("findings        none")
    for finding in found:
        where = f"step {finding.step}{f', episode {finding.episode}' if finding.episode else ''}"
        print(f"\n{finding.severity}: {visible(finding.text)}  [{finding.name}]")
        print(f"  change next   {visible(finding.setting)}")
        if finding.step:
            print(f"  look at       {visible(where)}")
        if finding.series:
            print(f"  series        {visible(', '.join(finding.series))}")
        if finding.why:
            print(f"  why           {visible(finding.why)}")


def _lost(run: Path) -> None:
    """Which episodes of a run were lost to infrastructure failures."""
    from agentrl.run_folder.redraws import Redraws, read_redraws

    found = Redraws.together(read_redraws(run).values())
    print(
        f"episodes        {found.episodes:,} played, {found.redrawn:,} lost to the infrastructure and played again"
    )
    for reason, count in found.reasons.most_common():
        print(f"{'':<15} {count:,} {visible(': '.join(filter(None, (reason, found.examples.get(reason)))))}")
    for task, counts in found.worst_tasks(10).items():
        print(f"task {visible(task)}: {sum(counts.values()) - counts['played']:,} of {counts['played']:,} lost")
    if found.broken:
        print(f"{'':<15} {found.broken.total():,} ended because the policy broke its sandbox; they are scored")
    for task, count in found.broken.most_common(10):
        print(f"task {visible(task)}: {count:,} broke the sandbox")


def _machine() -> None:
    print(f"agentrl         {_version(DISTRIBUTION)}")
    print(f"python          {platform.python_version()} on {platform.system()} {platform.machine()}")
    print(f"kernel          {platform.release()}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(f"processors      {cores} usable{'' if cores == os.cpu_count() else f' of {os.cpu_count()}'}")
    print(f"memory          {_memory()}")
    print(f"disk            {shutil.disk_usage(Path.cwd()).free / 2**30:.1f} GiB free in this folder")
    for name, purpose in PACKAGES.items():
        print(f"{name:<15} {_version(name):<12} {purpose}")
    print(f"docker engine   {_docker_engine()}")
    print(f"gpus            {_gpus()}")
    print(f"cuda            {_cuda()}")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "-"


def _docker_engine() -> str:
    """The version of the engine that answers at DOCKER_HOST, or at the usual socket."""
    import http.client
    import socket

    address = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    scheme, _, place = address.partition("://")
    client = http.client.HTTPConnection("docker" if scheme == "unix" else place, timeout=3.0)
    try:
        if scheme == "unix":
            client.sock = socket.socket(socket.AF_UNIX)
            client.sock.settimeout(3.0)
            client.sock.connect(place)
        client.request("GET", "/version")
        return f"{json.loads(client.getresponse().read())['Version']} at {address}"
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return f"- (none answers at {address})"
    finally:
        client.close()


def _cuda() -> str:
    """The driver of the machine, and the CUDA that torch was built for."""
    driver = Path("/proc/driver/nvidia/version")
    found = "no driver"
    if driver.is_file():
        words = driver.read_text(encoding="utf-8").split()
        found = "driver " + next((word for word in words if word[:1].isdigit() and "." in word), "unknown")
    if importlib.util.find_spec("torch") is None:
        return found
    import torch

    return f"{found}, torch is built for {torch.version.cuda or 'the CPU alone'}"


def _memory() -> str:
    file = Path("/proc/meminfo")
    if not file.is_file():  # not Linux
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    sizes: dict[str, int] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        key, _, rest = line.partition(":")
        sizes[key] = int(rest.split()[0])  # KiB
    return f"{sizes['MemAvailable'] / 2**20:.1f} GiB free of {sizes['MemTotal'] / 2**20:.1f} GiB"


def _gpus() -> str:
    if importlib.util.find_spec("torch") is None:
        return "unknown (torch is not installed)"
    import torch

    if torch.backends.mps.is_available():
        return "that of this Mac, which agentrl does not use: it computes on the CPU"
    if not torch.cuda.is_available():
        return "none that torch can use"
    names = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return ", ".join(f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)" for gpu in names)
