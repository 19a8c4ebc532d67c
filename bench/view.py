"""What a person waits for with `agentrl view`: its page in a real Chromium, its search, and its memory.

    python bench/view.py [--quick] [--json FILE]

Starts the command over run folders of its own. Opens an episode of 128,000 tokens, a step of 1,000 episodes and
a run of 300 steps, each in a fresh browser, and takes the time from the navigation until the content is
painted; then scrolls the long episode from top to bottom and takes the time of each frame. Indexes a folder
with 100,000 episodes (20,000 with `--quick`) and searches it by words, parts of words, regular expression and
filters. Of the pages and searches the fastest of several tries counts, because whatever else the machine does
only adds time; indexing counts the processor time of the server. Needs Debian's `chromium` and the package
`playwright`. The last line is the result as JSON; `ratio` is the largest share of its budget that a part takes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from agentrl.view.view_server import COOKIE
from bench.shared.verdict import finish
from bench.shared.view_runs import write_folder, write_run

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page, Playwright

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage"
)
TOKENS, STEPS = 128_000, 300
RUN = "#/run/long"
PAGES = {
    "128k-token episode": (f"{RUN}/step/5/episode/long", ".tokens i.o1", 1.0),
    "step of 1,000 episodes": (f"{RUN}/step/5", ".matrix .cell", 0.5),
    "run of 300 steps": (RUN, "figure.chart canvas", 1.0),
}
"""Address, what has to be there, and how many seconds it may take."""
SEARCHES = {
    "a word": "q=running",
    "two words": "q=sum+files",
    "a part of a word": "q=rch-2",
    "a regular expression": "q=HTTP+5%5B0-9%5D%2B&regex=1",
    "a tool's failures": "tool=search&outcome=tool_exception",
    "rewards of some steps": "reward_min=0.2&reward_max=0.3&step_min=3&step_max=6",
}
SEARCH_S, INDEX_PER_S, MEMORY_MB = 0.3, 5_000, 300
"""Budgets of a search, of indexing and of the server."""
FRAME = 0.05
"""Seconds that a frame of a smooth scroll may take: 19 of 20 frames must."""

# Paint follows the frame in which the content is found; two frames later it has happened.
PAINTED = """([selector, many]) => new Promise((resolve) => {
  const look = () => {
    if (document.querySelectorAll(selector).length < many) return requestAnimationFrame(look);
    requestAnimationFrame(() => requestAnimationFrame(() => resolve(performance.now() / 1000)));
  };
  look();
})"""
SCROLL = """() => new Promise((resolve) => {
  const frames = [], root = document.scrollingElement;
  let last = performance.now();
  const tick = (now) => {
    frames.push((now - last) / 1000);
    last = now;
    root.scrollTop += 240;
    if (root.scrollTop + innerHeight >= root.scrollHeight - 2 || frames.length > 1500) resolve(frames.slice(1));
    else requestAnimationFrame(tick);
  };
  requestAnimationFrame(tick);
})"""


@dataclass
class Server:
    """`agentrl view` in a process of its own."""

    url: str
    token: str
    pid: int

    def get(self, path: str) -> bytes:
        """An answer of its API."""
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {self.token}"})
        with urllib.request.urlopen(request, timeout=3600) as answer:
            return bytes(answer.read())

    @property
    def memory_mb(self) -> float:
        """The largest resident memory so far."""
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        assert found is not None
        return int(found[1]) / 1000

    @property
    def cpu_s(self) -> float:
        """Its processor time so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(runs: Path, home: Path) -> Iterator[Server]:
    """The command over a folder of runs; its index and preferences are in `home`."""
    env = {**os.environ, "XDG_CACHE_HOME": str(home / "cache"), "XDG_CONFIG_HOME": str(home / "config")}
    command = [sys.executable, "-m", "agentrl", "view", str(runs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        found = re.search(r"(http://127\.0\.0\.1:\d+)/\?token=(\S+)", process.stdout.readline())
        assert found is not None
        try:
            yield Server(found[1], found[2], process.pid)
        finally:
            process.terminate()


@contextmanager
def fresh(playwright: Playwright) -> Iterator[BrowserContext]:
    """A browser that has seen nothing."""
    with tempfile.TemporaryDirectory() as profile:
        context = playwright.chromium.launch_persistent_context(
            profile,
            executable_path=shutil.which("chromium"),
            args=FLAGS.split(),
            viewport={"width": 1400, "height": 900},
        )
        try:
            yield context
        finally:
            context.close()


def opened(page: Page, server: Server, name: str) -> float:
    """Seconds from the navigation to the painted content."""
    address, selector, _ = PAGES[name]
    cookie = f"{COOKIE}_{urlsplit(server.url).port}"
    page.context.add_cookies([{"name": cookie, "value": server.token, "url": server.url}])
    answer = page.goto(f"{server.url}/{address}", wait_until="commit")
    assert answer is not None
    assert answer.ok, answer.status  # else the content would be waited for without end
    many = 1000 if "1,000" in name else 13 if "run" in name else 50
    return float(page.evaluate(PAINTED, [selector, many]))


def late(frames: list[float]) -> float:
    """The time of the 95th of 100 frames, the fastest first."""
    return sorted(frames)[int(0.95 * len(frames))]


UNSEEN = {
    "bench": "view",
    "ours": None,
    "unit": "share of its budget",
    "goal": 1.0,
    "met": None,
    "why": "Playwright finds no browser (python -m playwright install chromium)",
}
Parts = dict[str, dict[str, float]]


def of_pages(rounds: int) -> Parts:
    """The best time of each page, with its budget, and the memory of the server that showed them."""
    from playwright.sync_api import sync_playwright

    seconds: dict[str, list[float]] = {name: [] for name in PAGES}
    frames: list[float] = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        write_run(Path(folder) / "runs" / "long", steps=STEPS, tokens=TOKENS)
        with serving(Path(folder) / "runs", Path(folder)) as server:
            for turn in range(rounds):
                for name in PAGES:
                    with fresh(playwright) as context:
                        page = context.new_page()
                        seconds[name].append(opened(page, server, name))
                        print(f"{name}: {seconds[name][-1]:.2f} s", flush=True)
                        if "token" in name and turn >= rounds - 3:
                            page.get_by_text("still loading").wait_for(state="hidden", timeout=120_000)
                            frames = min(page.evaluate(SCROLL), frames or [60.0], key=late)
            memory = server.memory_mb
    found = {name: _part(min(all_), PAGES[name][2], "s") for name, all_ in seconds.items()}
    found["scrolling, 95th of 100 frames"] = _part(late(frames), FRAME, "s")
    print(f"scrolled {len(frames)} frames, slowest {max(frames):.3f} s")
    return found | {"memory while pages are shown": _part(memory, MEMORY_MB, "MB")}


def of_search(episodes: int, rounds: int) -> Parts:
    """The rate of indexing, the best time of each search, and the memory of the server that did both."""
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder) / "runs", episodes)
        with serving(Path(folder) / "runs", Path(folder)) as server:
            began, used = time.monotonic(), server.cpu_s
            server.get("/api/search?limit=1")  # waits for the index
            used, waited = server.cpu_s - used, time.monotonic() - began
            print(
                f"{episodes:,} episodes indexed in {waited:.1f} s, {used:.1f} s of them on the processor",
                flush=True,
            )
            found: Parts = {}
            for name, query in SEARCHES.items():
                answers = [json.loads(server.get(f"/api/search?{query}")) for _ in range(rounds)]
                assert 0 < answers[0]["total"] < episodes, (quote(query), answers[0]["total"])
                best = min(answer["took_ms"] for answer in answers) / 1000
                print(f"search by {name}: {answers[0]['total']:,} episodes in {best:.3f} s", flush=True)
                found[f"search by {name}"] = _part(best, SEARCH_S, "s")
            found["indexing"] = _part(used, episodes / INDEX_PER_S, "s")
            return found | {"memory while searching": _part(server.memory_mb, MEMORY_MB, "MB")}


def _part(value: float, budget: float, unit: str) -> dict[str, float]:
    return {unit: round(value, 4), f"budget_{unit}": budget, "share": round(value / budget, 3)}


def main() -> None:
    """Print what was measured, and one line of JSON."""
    from playwright.sync_api import Error

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    episodes = 20_000 if args.quick else 100_000
    rounds = 3 if args.quick else 10
    try:
        parts = of_pages(rounds + 1) | of_search(episodes, rounds)
    except Error as error:
        if "Executable doesn't exist" not in str(error):
            raise
        finish(UNSEEN)
        return
    for name, part in parts.items():
        print(f"{name}: {', '.join(f'{key} {value:g}' for key, value in part.items())}")
    worst = max(parts, key=lambda name: parts[name]["share"])
    result = {
        "bench": "view",
        "ours": parts[worst]["share"],
        "baseline": 1.0,
        "ratio": parts[worst]["share"],
        "unit": f"share of its budget ({worst})",
        "goal": 1.0,
        "met": parts[worst]["share"] <= 1.0,
        "episodes": episodes,
        "parts": parts,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    finish(result, timed=True)


if __name__ == "__main__":
    main()
