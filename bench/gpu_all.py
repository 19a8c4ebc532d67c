"""All figures that need a GPU, in one run of less than eight minutes without a network.

    python bench/gpu_all.py [--parts learner,decode,...] [--out bench/results/gpu]
    python bench/gpu_all.py --smoke [--out DIR]          every part with tiny shapes on the CPU

| part    | what |
|---------|------|
| learner | model FLOPs utilization and peak memory of updates, whole models and adapters (`gpu_learner.py`) |
| decode  | share of the memory bandwidth at 1, 64 and 256 sequences (`gpu_rollout.py`) |
| pause   | from an update to the engine's next token, both on this device (`shared/gpu_parts.py`) |
| delta   | updates by changed weights against full ones (`shared/gpu_parts.py`) |
| grpo    | a GRPO step end to end against TRL (`shared/gpu_grpo.py`) |
| trees   | flash, flex and sdpa on rows that share prefixes (`shared/gpu_parts.py`) |
| drift   | log-probabilities of sampler and learner in bfloat16 (`shared/gpu_parts.py`) |

Each part runs in a process with a time limit, so that one which fails or takes too long leaves the others. DIR
holds what it wrote in PART.log, and in PART.json its measurements as far as it came. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import runpy
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parents[1]))  # it is missing with `python -m` or when loaded by a path
from bench.shared.names import names_of
from bench.shared.verdict import finish, no_gpu

ROOT = Path(__file__).resolve().parents[1]
OUT = Path(__file__).parent / "results" / "gpu"
GOALS = {"learner": 0.5, "decode": 0.7, "pause": 0.3}
SMOKE_LIMIT_S = 600
"""For machines that are busy with other work."""
WARM = ["agentrl.engine.local.process", "agentrl.learner.policy_rank"]
"""What parts have in common, and import for seconds."""

Found = Sequence[Mapping[str, Any]]
"""The lines of JSON that a part printed."""


def mfu(found: Found) -> float | None:
    """Best of the largest shape at its shortest length, as gpu_learner's goal is."""
    return max(
        (x["mfu"] for x in found if x.get("shape") == "8B" and x.get("length") == 8192 and x.get("mfu")),
        default=None,
    )


def share(found: Found) -> float | None:
    return min((x["share"] for x in found if "share" in x), default=None)


def pause_s(found: Found) -> float | None:
    """With sequences in flight; the first update warms up."""
    of_8b = [x for x in found if x.get("shape") == "8B" and x.get("train") == "full"]
    seconds = [x["in_flight_s"] for x in of_8b if x.get("update", 1) > 1]
    return statistics.median(seconds) if seconds else None


def fewer_bytes(found: Found) -> float | None:
    """A full update's bytes over those of the changes."""
    size = {x["sync"]: x["bytes"] for x in found if "sync" in x}
    return round(size["tensor"] / size["delta"], 1) if len(size) == 2 else None


def times_trl(found: Found) -> float | None:
    return next((x["ratio"] for x in found if "ratio" in x), None)


def fastest(found: Found) -> str | None:
    """The attention with the shortest step where rows share prefixes."""
    steps = [(x["step_s"], x["attention"]) for x in found if x.get("packed") == "tree" and "step_s" in x]
    return f"{min(steps)[1]}, {min(steps)[0]} s" if steps else None


def difference(found: Found) -> float | None:
    """The largest mean of both models and times, where the sampler has the learner's weights."""
    return max((x["mean_abs"] for x in found if x.get("when") in ("before", "after")), default=None)


@dataclass(frozen=True)
class Part:
    """A process, its options on a GPU, its time limit in seconds, and what of its measurements comes first."""

    command: tuple[str, ...]
    options: tuple[str, ...]
    limit_s: int
    figure: Callable[[Found], float | str | None]
    unit: str


LEARNER = ("--shapes", "8B,1.7B,0.6B", "--steps", "2", "--micro-batches", "1")
DECODE = ("--shapes", "0.6B,1.7B,8B", "--context", "256", "--tokens", "128", "--graphs-only")
PARTS = {
    "learner": Part(("bench/gpu_learner.py",), LEARNER, 145, mfu, "MFU, 8B at 8192 tokens"),
    "decode": Part(("bench/gpu_rollout.py",), DECODE, 90, share, "share of memory bandwidth, smallest"),
    "pause": Part(("-m", "bench.shared.gpu_parts", "pause"), (), 45, pause_s, "s, 8B, sequences in flight"),
    "delta": Part(("-m", "bench.shared.gpu_parts", "delta"), (), 30, fewer_bytes, "times fewer bytes"),
    "grpo": Part(("-m", "bench.shared.gpu_grpo"), (), 80, times_trl, "times TRL's episodes/s"),
    "trees": Part(("-m", "bench.shared.gpu_parts", "trees"), (), 50, fastest, "fastest with shared prefixes"),
    "drift": Part(("-m", "bench.shared.gpu_parts", "drift"), (), 30, difference, "mean |log-ratio|, largest"),
}


def run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one part, and write its files."""
    part, log, file = PARTS[name], args.out / f"{name}.log", args.out / f"{name}.json"
    own = ("--smoke",) if args.smoke else part.options
    if not args.smoke and part.command[0].endswith(".py"):
        own = (*own, "--out", str(args.out / f"{name}-table.json"))
    log.write_text("")
    started, limit = time.monotonic(), SMOKE_LIMIT_S if args.smoke else part.limit_s
    process = _starts(args.smoke).Process(target=_play, args=([*part.command, *own], log))
    process.start()
    assert process.pid is not None
    try:
        process.join(limit)
        code = process.exitcode
        ended = f"stopped after {limit} s" if code is None else "ok" if code == 0 else f"exit code {code}"
    finally:
        with contextlib.suppress(ProcessLookupError):  # with whatever it started
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # in case it had not started its session yet
        process.join()
    lines = log.read_text(errors="replace").splitlines()
    found = [parsed for line in lines if (parsed := _parsed(line))]
    failed, skipped = (next((line[key] for line in found if key in line), None) for key in ("failed", "skipped"))
    last = next((line for line in reversed(lines) if line.strip()), None)
    result = {
        "part": name,
        "ended": ended,
        "seconds": round(time.monotonic() - started, 1),
        "figure": part.figure(found),
        "unit": part.unit,
        "why": failed or (skipped if ended == "ok" else last),
        "found": found,
    }
    file.write_text(json.dumps(result, indent=1) + "\n")
    return result


def _starts(smoke: bool) -> SpawnContext | ForkServerContext:
    """How parts start: in a new Python each, which CUDA requires; on a CPU, forked from one with warm imports."""
    if not smoke:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(WARM)
    return context


def _play(command: Sequence[str], log: Path) -> None:
    """Do what `python COMMAND` does, in a new session and with the output in a file."""
    os.setsid()
    with log.open("w") as output:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
    for stream in (sys.stdout, sys.stderr):  # what was printed before a part is killed counts
        cast(TextIOWrapper, stream).reconfigure(line_buffering=True)
    os.chdir(ROOT)
    if command[0] == "-m":
        sys.argv = list(command[1:])
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [str(ROOT / command[0]), *command[1:]]
        runpy.run_path(sys.argv[0], run_name="__main__")


def _path() -> str:
    before = os.environ.get("PYTHONPATH")
    return str(ROOT) if not before else f"{ROOT}{os.pathsep}{before}"


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line) if line.startswith("{") else None
    except ValueError:  # cut off
        return None
    return value if isinstance(value, dict) else None


def reached(name: str, figure: float | str | None) -> bool | None:
    """Whether the part's goal is reached; None if it has none."""
    goal = GOALS.get(name)
    if goal is None:
        return None
    if not isinstance(figure, float | int):
        return False
    return figure <= goal if name == "pause" else figure >= goal


def summary(result: Mapping[str, Any]) -> str:
    """One line about a part."""
    why = f" ({result['why']})" if result["why"] and (result["figure"] is None or result["ended"] != "ok") else ""
    figure = f"{'-' if result['figure'] is None else result['figure']} {result['unit']}"
    return f"{result['part']:<8} {result['seconds']:6.1f} s  {result['ended']:<18} {figure}{why}"


def device(smoke: bool) -> str | None:
    """The name of the GPU; None if there is none."""
    import torch

    if smoke:
        return "cpu"
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", type=names_of(PARTS), default=",".join(PARTS), help="which, by comma (default: all)"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the raw files")
    parser.add_argument("--quick", action="store_true", help="pause and drift only")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU")
    args = parser.parse_args()
    names = ["pause", "drift"] if args.quick else args.parts.split(",")
    os.environ |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": _path()}
    where = device(args.smoke)
    if where is None:
        goal = {name: GOALS[name] for name in names if name in GOALS}
        return no_gpu("gpu_all", unit=f"goals met, of {len(goal)}", goal=goal)
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {}
    for name in names:
        results[name] = result = run(name, args)
        print(summary(result), flush=True)
    met = {name: reached(name, result["figure"]) for name, result in results.items()}
    judged = [value for value in met.values() if value is not None]
    failed = [name for name, result in results.items() if result["ended"] != "ok"]
    finish(
        {
            "bench": "gpu_all",
            "ours": sum(judged),
            "unit": f"goals met, of {len(judged)}",
            "goal": {name: GOALS[name] for name in names if name in GOALS},
            "met": None if args.smoke or not judged else all(judged) and not failed,
            "figures": {name: result["figure"] for name, result in results.items()},
            "failed": failed,
            "device": where,
        },
        timed=True,
    )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
