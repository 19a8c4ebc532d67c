"""A task longer than the context window: solved where summaries train, and not where they are masked.

    python bench/compaction.py [--seeds 5] [--steps 60] [--runs runs/compaction]
    python bench/compaction.py --quick     two steps of one seed, hardly warmed up: shows that both arms run

Three pages show a digit each; at the end the policy must say the three digits. The window
(`rollout.compact.context`, 188 tokens) does not hold the whole conversation (239): it is compacted before the
third page and before the question, so two digits reach the end only through the summaries that the policy
writes. The start policy has seen demonstrations: it turns pages, says digits that it reads in pages or in a
summary, and when asked for a summary writes digits of which each is right in three of ten cases, and random
otherwise. Both arms begin with its weights and differ in one setting, `rollout.compact.train`. Seeds differ in
tasks and samples.

Recorded per seed: the share of solved episodes at each step (64 episodes, sampled), and of 40 held-out tasks
before and after, also sampled. Solved means: 0.9 of the last ten steps' episodes on average, in every seed; not
solved: less than 0.3. Writes bench/results/compaction.json, and the curve next to it; the last line is JSON. A
seed takes about two minutes of one core per arm, and the demonstrations three, once.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from agentrl import Message, Task, TextEnv, reward
from agentrl.rollout.compaction import INTRODUCTION

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.shared.short_run import TOO_SHORT
from bench.shared.verdict import finish

HERE = Path(__file__).parent
RESULT = HERE / "results" / "compaction.json"
PAGES, NAMES, DIGITS, CONTEXT = 3, "abc", "012345", 188
OPENING, NEXT, ASK, SUM_UP = "Read the pages.", "next", "Say the digits.", "Sum up."
KNOWN, HELD_OUT = 0.3, 40
SOLVED, UNSOLVED = 0.9, 0.3
ARMS = {"trained": True, "masked": False}
TINY = {"hidden": 64, "layers": 2, "heads": 4, "intermediate": 192, "vocab": 320}
Config = dict[str, Any]


class Curve(NamedTuple):
    """What an arm of a seed came to: solved episodes of each step, and held-out tasks before and after."""

    solved: list[float]
    before: float
    after: float


def page(number: int, digit: str) -> str:
    """A page, most of which says nothing."""
    return f"{NAMES[number]}{digit} " + "and so on " * 10


def named(digits: str) -> str:
    """The digits as they are said: a3b1c5."""
    return "".join(name + digit for name, digit in zip(NAMES, digits, strict=False))


class Pages(TextEnv):
    """Read pages, then say the digit of each."""

    @classmethod
    def tasks(cls, split: str, seed: int) -> list[Task]:
        """All digits there are, in an order of the seed: the first 40 are held out, whatever the seed."""
        every = ["".join(digits) for digits in product(DIGITS, repeat=PAGES)]
        random.Random(0).shuffle(every)
        chosen = every[HELD_OUT:] if split == "train" else every[:HELD_OUT]
        random.Random(seed).shuffle(chosen)
        return [Task(f"{split}-{digits}", {"digits": digits}) for digits in chosen]

    @classmethod
    def demonstrations(cls, seed: int, num: int) -> Iterator[list[Message]]:
        rng = random.Random(f"demonstrations/{seed}")
        return (demonstration(rng) for _ in range(num))

    def setup(self, digits: str) -> str:
        self.digits, self.turned = digits, 0
        return OPENING

    def reply(self, text: str) -> str | None:
        if self.turned > PAGES:
            return None
        self.turned += 1
        return page(self.turned - 1, self.digits[self.turned - 1]) if self.turned <= PAGES else ASK

    @reward(solved=1.0)
    def right(self, episode: Any) -> float:
        """The share of digits at their places."""
        said = str(episode.messages[-1].content)
        return sum(name + digit in said for name, digit in zip(NAMES, self.digits, strict=True)) / PAGES


def digits_of(rng: random.Random, number: int = PAGES) -> str:
    return "".join(rng.choice(DIGITS) for _ in range(number))


def half_known(rng: random.Random, digits: str) -> str:
    """The digits of a poor summary: each is right in three of ten cases, and random in the others."""
    return "".join(digit if rng.random() < KNOWN else rng.choice(DIGITS) for digit in digits)


def demonstration(rng: random.Random) -> list[Message]:
    """From the start or behind a summary, to the answer or to a summary, which is random."""
    digits = digits_of(rng)
    known = rng.randrange(PAGES)
    opening = OPENING if known == 0 else f"{OPENING}{INTRODUCTION}{named(digits[:known])}"
    messages = [Message("user", opening)]
    summed = rng.random() < 0.4
    last = rng.randint(known + 1, PAGES) if summed else PAGES
    for number in range(known, last):
        messages += [Message("assistant", NEXT), Message("user", page(number, digits[number]))]
    if summed:
        return [*messages, Message("user", SUM_UP), Message("assistant", named(half_known(rng, digits[:last])))]
    return [*messages, Message("assistant", NEXT), Message("user", ASK), Message("assistant", named(digits))]


def settings(
    seed: int, steps: int, *, train: bool = True, start: Path | None = None, tasks: int = HELD_OUT
) -> Config:
    """The run of an arm; without a start the run that makes one from demonstrations."""
    config: Config = {
        "name": "compaction",
        "seed": seed,
        "steps": steps,
        "env": f"{Path(__file__).absolute()}:Pages",
        "model": {"path": str(start)} if start else {"tiny": TINY},
        "rollout": {
            "groups_per_step": 8, "group_size": 8, "max_turns": PAGES + 2, "max_tokens": 8, "token_budget": 1000,
            "compact": {"at": 0.8, "context": CONTEXT, "keep_turns": 1, "prompt": SUM_UP, "train": train},
        },
        "algorithm": {"kl": {"coef": 0.0}},
        "optim": {"lr": 5e-4, "warmup_steps": min(8, steps)},
        "checkpoint": {"every": 0},
        "eval": {"tasks": tasks, "every": 0, "temperature": 1.0},
    }  # fmt: skip
    return config


def warm(config: Config, num: int) -> Config:
    """With the demonstrations before it."""
    never = {"until_pass": 1.0, "at_least": 0.0, "probe_every": 10_000, "probe_tasks": 1, "probe_samples": 1}
    return config | {"warmup": {"num": num, "max_epochs": 5, "anneal_epochs": 1, "lr": 2e-3, **never}}


def train(config: Config, folder: Path) -> list[dict[str, Any]]:
    """Train, unless it is trained; the lines of its metrics."""
    if not (folder / "summary.json").is_file():
        file = folder.parent / f"{folder.name}.yaml"
        file.write_text(json.dumps(config, indent=1))  # JSON is YAML
        command = [sys.executable, "-m", "agentrl", "train", str(file), "--run-dir", str(folder)]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def measure(runs: Path, seeds: int, steps: int, *, num: int, tasks: int) -> dict[str, list[Curve]]:
    """The curves of both arms, a seed after the other."""
    runs.mkdir(parents=True, exist_ok=True)
    train(warm(settings(0, 1, tasks=1), num), runs / "cold")
    start = (runs / "cold" / "start").absolute()
    found: dict[str, list[Curve]] = {arm: [] for arm in ARMS}
    for seed in range(1, seeds + 1):
        for arm, on in ARMS.items():
            lines = train(settings(seed, steps, train=on, start=start, tasks=tasks), runs / f"{arm}-{seed}")
            solved = [round(line["solved"], 4) for line in lines if line["step"] > 0]
            held_out = [line["held_out"] for line in lines if "held_out" in line]
            found[arm].append(Curve(solved, held_out[0], held_out[-1]))
            print(f"seed {seed}, {arm}: {held_out[0]:.2f} to {held_out[-1]:.2f}", flush=True)
    return found


def curve(found: dict[str, list[Curve]]) -> str:
    """A picture: the share of solved episodes by step, each seed a line."""
    width, height, pad = 640, 300, 40
    colors = {"trained": "#1a7f37", "masked": "#b35900"}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="{width}" height="{height}" fill="white"/>'
    ]
    for share in (0.0, 0.5, 1.0):
        y = height - pad - share * (height - 2 * pad)
        parts.append(f'<line x1="{pad}" x2="{width - pad}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{pad - 6}" y="{y + 4}" text-anchor="end">{share:.0%}</text>')
    for place, (arm, curves) in enumerate(found.items()):
        parts.append(f'<text x="{pad + 8}" y="{20 + 14 * place}" fill="{colors[arm]}">summaries {arm}</text>')
        for one in curves:
            last = max(1, len(one.solved) - 1)
            points = " ".join(
                f"{pad + n * (width - 2 * pad) / last:.1f},{height - pad - share * (height - 2 * pad):.1f}"
                for n, share in enumerate(one.solved)
            )
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colors[arm]}" stroke-width="1.5"/>')
    parts.append(
        f'<text x="{width / 2}" y="{height - 10}" text-anchor="middle">step (64 episodes each)</text></svg>'
    )
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--runs", type=Path, default=Path("runs/compaction"), help="folder of the run folders")
    parser.add_argument("--quick", action="store_true", help="two steps of one seed; writes nothing")
    args = parser.parse_args()
    if args.quick:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(Path(folder), 1, 2, num=64, tasks=4)
    else:
        found = measure(args.runs, args.seeds, args.steps, num=2400, tasks=HELD_OUT)
    ends = {arm: [round(statistics.mean(one.solved[-10:]), 3) for one in curves] for arm, curves in found.items()}
    good = sum(a >= SOLVED and b < UNSOLVED for a, b in zip(*ends.values(), strict=True))
    asked = len(ends["trained"])
    line: dict[str, Any] = {
        "bench": "compaction",
        "ours": min(ends["trained"]),
        "baseline": max(ends["masked"]),
        "unit": "solved episodes of the last ten steps: worst seed with trained summaries, best with masked ones",
        "goal": f"{SOLVED} and more, less than {UNSOLVED}",
        "met": None if args.quick else good == asked,
        "seeds": asked,
        "ends": ends,
        "held_out": {arm: [[one.before, one.after] for one in curves] for arm, curves in found.items()},
        "quick": args.quick,
    }
    if not args.quick:
        curves = {arm: [one.solved for one in each] for arm, each in found.items()}
        RESULT.write_text(json.dumps(line | {"curves": curves}) + "\n")
        RESULT.with_suffix(".svg").write_text(curve(found))
    finish(line | {"why": TOO_SHORT} if args.quick else line)


if __name__ == "__main__":
    main()
