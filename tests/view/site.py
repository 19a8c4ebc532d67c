"""Made-up runs behind the API of the page, so that every state of every page can be shown on purpose.

`Site` answers paths as the server does; `serve` puts it on loopback with the server's content security policy.
"""

from __future__ import annotations

import json
import math
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from agentrl.view.bundle import served
from agentrl.view.words import EPISODE, RUNS, STEP, TASKS

POLICY = "default-src 'self'; img-src 'self' data:; frame-src 'self'"
FRAME_POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; frame-ancestors 'self'"
)
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d4944415478da63fccff0bf1e000686028"
    "0b5a8d5c40000000049454e44ae426082"
)
SERIES = [
    ("reward", "rewards"),
    ("reward/solved", "rewards"),
    ("reward/cost", "rewards"),
    ("held_out", "held out"),
    ("entropy", "policy"),
    ("kl", "policy"),
    ("drift", "policy"),
    ("staleness", "policy"),
    ("tokens", "lengths"),
    ("turns", "lengths"),
    ("tool_errors", "tools"),
    ("seconds/generate", "time"),
    ("seconds/update", "time"),
]
EXTRA = [f"extra/{i}" for i in range(30)]
STEPS = 300
HOSTILE = (
    '<img src=x onerror="window.pwned=1"></script><script>window.pwned=1</script>'
    "\x1b[31mred\x00\u202eevil\u200b\x9b \ud800 <!-- ]]>\n${window.pwned=1}{{1}}"
)
BOARD = (
    "<body><pre id=board></pre><script>addEventListener('message', ({ data }) => {"
    "let reach = 'alone'; try { parent.document.title; reach = 'within the page'; } catch { /* refused */ }"
    "document.getElementById('board').textContent = "
    "`board of ${data.episode.id}, message ${data.message}, ${reach}`; });</script>"
)
COLUMNS = (
    "ids", "pieces", "origin", "segment", "logprob", "learner_logprob", "ref_logprob", "entropy", "ratio",
    "advantage", "weight", "flags", "version",
)  # fmt: skip
FORK = {"run": "calc-seed0", "name": "calc-seed0", "step": 200, "weights_only": True}
TEXT = "First the calculator adds both numbers , then it checks that the sum holds and answers ."
WORDS = TEXT.split()


def _run(name: str, status: str, seed: int, **other: Any) -> dict[str, Any]:
    run = {
        "id": name,
        "name": name,
        "path": f"runs/{name}",
        "status": status,
        "tags": ["calculator"],
        "forked_from": None,
        "step": STEPS,
        "steps": STEPS,
        "started": 1.7e9,
        "updated": 1.7e9,
        "wall_seconds": 5400.0,
        "held_out_before": 0.12,
        "held_out_after": 0.62 - 0.1 * seed,
        "model": "qwen3-0.6b",
        "env": "agentrl.envs.calculator:Calculator",
        "estimator": "grpo",
        "loss": "ppo",
    }
    return {**run, **other}


@dataclass
class Site:
    """The runs, and what a test changes while a page looks."""

    groups: int = 6
    group_size: int = 8
    long_tokens: int = 20_000
    long_message: str = "x"
    events: list[dict[str, Any]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    runs: list[dict[str, Any]] = field(
        default_factory=lambda: [
            _run("calc-seed0", "finished", 0),
            _run("calc-seed1", "finished", 1, forked_from=FORK),
            _run("sqlite", "running", 2, tags=["sql", "wip"], step=120, env="agentrl.envs.sqlite:Sqlite"),
            _run("stuck", "stopped", 3, tags=[], step=3, held_out_before=None, held_out_after=None),
        ]
    )

    def tell(self, event: dict[str, Any]) -> None:
        """Let waiting pages know."""
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def answer(self, path: str) -> Any:
        """What the API answers; None where there is nothing."""
        url = urlsplit(path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        parts = [unquote(part) for part in url.path.split("/")[2:]]
        if len(parts) > 1 and parts[0] == "runs" and parts[1] not in [run["id"] for run in self.runs]:
            return None
        match parts:
            case ["runs"]:
                return {"runs": self.runs, "words": dict(RUNS)}
            case ["runs", run]:
                return self._about(run)
            case ["runs", run, "series"]:
                names = parse_qs(url.query).get("names") or [n for n, _ in SERIES] + EXTRA
                return self._series(run, names)
            case ["runs", run, "steps"]:
                return {
                    "steps": [
                        {"step": n, "episodes": 48, "reward_mean": 0.5}
                        for n in range(1, self._head(run)["step"] + 1)
                    ]
                }
            case ["runs", _, "steps", step]:
                return self.step(int(step))
            case ["runs", run, "episodes", *rest]:
                return self.episode(run, int(query["step"]), "/".join(rest))
            case ["runs", _, "tokens", *rest]:
                start = int(query.get("from", 0))
                return self.tokens("/".join(rest), start, int(query.get("count", 10**9)))
            case ["runs", _, "tools"]:
                return TOOLS
            case ["search"]:
                return self._search(query)
            case ["compare"]:
                return self._compare(query["runs"].split(","))
        return None

    def _head(self, run: str) -> dict[str, Any]:
        return next(r for r in self.runs if r["id"] == run)

    def _about(self, run: str) -> Any:
        marks = [
            (0, "event", "info"),
            (50, "checkpoint", "info"),
            (75, "note", "warning"),
            (100, "evaluation", "info"),
        ]
        finding = {
            "step": 75,
            "kind": "finding",
            "severity": "warning",
            "setting": "rollout.group_size",
            "text": "Most groups carry no signal.",
            "episode": {"step": 5, "id": "step5/g1/e1"},
        }
        listed = [
            {"name": n, "description": f"{n} of a step", "unit": "", "group": g, "curated": True}
            for n, g in SERIES
        ]
        listed += [{"name": n, "description": "", "unit": "", "group": "other", "curated": False} for n in EXTRA]
        return {
            **self._head(run),
            "config": {"model": {"path": "qwen3"}, "seed": 1, "algorithm": {"clip_eps": 0.2}},
            "notes": [
                {"step": s, "time": 0, "kind": k, "text": f"{k} at {s}", "severity": v} for s, k, v in marks
            ],
            "evaluations": [],
            "findings": [finding],
            "series": listed,
            "tokenizer": True,
        }

    def _series(self, run: str, names: list[str]) -> Any:
        steps = list(range(1, self._head(run)["step"] + 1))
        values = {}
        for name in names:
            rng = random.Random(run + name)
            base = rng.random()
            values[name] = [
                None
                if name == "held_out" and s % 25
                else round(base + 0.6 * (1 - math.exp(-s / 90)) + rng.gauss(0, 0.05), 4)
                for s in steps
            ]
        return {"steps": steps, "values": values}

    def step(self, number: int) -> Any:
        """A step with every kind of episode in it."""
        rng = random.Random(number)
        groups, spans = [], []
        for g in range(self.groups):
            episodes = []
            for e in range(self.group_size):
                reward = None if (g, e) == (0, 3) else 1.0 if g == 2 else rng.choice([0.0, 0.5, 1.0])
                name = f"step{number}/g{g}/e{e}"
                episodes.append(
                    {
                        "id": name,
                        "reward": reward,
                        "parts": {"solved": reward},
                        "solved": reward == 1.0,
                        "stop_reason": "infra"
                        if reward is None
                        else "max_turns"
                        if (g, e) == (1, 2)
                        else "answered",
                        "turns": 3,
                        "tokens": 120,
                        "seconds": rng.random() * 9,
                        "advantage": None if reward is None else [reward - 0.5] * 2,
                        "trained": reward is not None and g != 2,
                        "no_signal": g == 2,
                        "cut": (g, e) == (1, 2),
                        "failed": reward is None,
                        "set_aside": g == 3,
                        "baseline": False,
                        "stale": (g, e) == (4, 4),
                        "versions": [number - 1, number],
                        "mistakes": 0,
                    }
                )
                at = 0.0
                for kind in ("engine", "tool", "engine", "env"):
                    until = at + rng.random() + (9 if (g, e, kind) == (4, 1, "tool") else 0)
                    spans.append({"episode": name, "kind": kind, "start_s": at, "end_s": until})
                    at = until
            groups.append({"group": g, "task": f"task-{g}", "set_aside": g == 3, "episodes": episodes})
        end = max(s["end_s"] for s in spans)
        phases = [
            ("generate", 0.0, end),
            ("annotate", end, end + 1),
            ("update", end + 1, end + 3),
            ("publish", end + 3, end + 3.2),
        ]
        timings = {"phases": [{"name": n, "start_s": a, "end_s": b} for n, a, b in phases], "episodes": spans}
        timings["parts"] = [
            {"name": f"rank {n}", "kind": "rank", "start_s": end + 1, "end_s": end + 1.5 + n, "tokens": 900}
            | {"token_seconds": (0.5 + n) / 900}
            for n in range(2)
        ]
        return {
            "step": number,
            "groups": groups,
            "metrics": {"step": number, "reward": 0.5, "kl": 0.01},
            "timings": timings,
            "words": {**STEP, "kl": "Mean KL estimate."},
        }

    def _layout(self, name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]], int]:
        """Segments and messages: three turns with a tool, and a branch after the second."""
        if name == "hostile":
            messages = [
                {"role": "user", "content": HOSTILE},
                {"role": "tool", "content": self.long_message, "name": HOSTILE},
            ]
            return [], messages, 0
        sampled = self.long_tokens // 3 if name == "long" else 60
        messages = [
            {"role": "system", "content": "Use the tool."},
            {"role": "user", "content": ["Sum?", {"image": 0, "mime_type": "image/png", "bytes": len(PNG)}]},
        ]
        plan: list[tuple[str, int, int | None, int]] = [
            ("prompt", 20, 0, -1),
            ("prompt", 30, 1, 0),
            ("glue", 4, None, 1),
        ]
        for turn in range(3):
            call = {"id": f"c{turn}", "name": "calculator", "arguments": {"expression": "1+2"}}
            m = len(messages)
            messages.append(
                {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}
                if turn < 2
                else {"role": "assistant", "content": "3"}
            )
            plan.append(("sampled", sampled, m, len(plan) - 1))
            if turn < 2:
                messages.append({"role": "tool", "content": "3", "tool_call_id": f"c{turn}", "name": "calculator"})
                plan += [
                    ("glue", 2, None, len(plan) - 1),
                    ("observation", 15, m + 1, len(plan)),
                    ("glue", 3, None, len(plan) + 1),
                ]
            if turn == 1:
                messages.append({"role": "user", "content": "Go on."})
                plan.append(("observation", 6, len(messages) - 1, len(plan) - 1))
        messages.append({"role": "assistant", "content": "Another try."})
        plan.append(("sampled", 12, len(messages) - 1, 2))
        segments, start = [], 0
        for index, (origin, count, message, parent) in enumerate(plan):
            version = 7 + (message or 0) // 5 if origin == "sampled" else None
            segments.append(
                {
                    "index": index,
                    "origin": origin,
                    "start": start,
                    "count": count,
                    "message": message,
                    "parent": parent,
                    "version": version,
                    "turn": None,
                }
            )
            start += count
        return segments, messages, start

    def episode(self, run: str, step: int, name: str) -> Any:
        """One episode."""
        segments, messages, _ = self._layout(name)
        turns = [
            {
                "message": m,
                "observation": [m + 1],
                "reward": 0.0,
                "finish": "stop",
                "tokens": 60,
                "engine_seconds": 1.2,
                "env_seconds": 0.1,
            }
            for m, message in enumerate(messages[:-1])
            if message["role"] == "assistant"
        ]
        calls = [
            {
                "id": f"c{t}",
                "turn": t,
                "message": turns[t]["message"] + 1,
                "name": "calculator",
                "arguments": {"expression": "1+2"},
                "result": "division by zero" if t == 0 else "3",
                "outcome": "tool_error" if t == 0 else "ok",
                "seconds": 0.012,
                "truncated": False,
            }
            for t in range(min(2, len(turns)))
        ]
        parts = [("solved", None, 1.0, 1.0), ("cost", 0, 3.0, -0.01), ("cost", 1, 7.0, -0.01)]
        fork = {
            "segment": len(segments) - 1,
            "parent": 2,
            "kind": "fork",
            "reason": "the template rewrote message 2",
            "tokens": 12,
            "message": len(messages) - 1,
        }
        return {
            "id": name,
            "run": run,
            "step": step,
            "group": 1,
            "task": "task-1",
            "row": {"question": "1+2"},
            "messages": messages,
            "turns": turns,
            "calls": calls,
            "rewards": {
                "total": 0.9,
                "parts": [dict(zip(("name", "turn", "value", "weight"), p, strict=True)) for p in parts],
            },
            "segments": segments,
            "branches": [
                {"segment": 0, "parent": -1, "kind": "root", "reason": None, "tokens": 200, "message": 0},
                fork,
            ]
            if segments
            else [],
            "siblings": [],
            "stop_reason": "answered",
            "faults": {"bonus": HOSTILE} if name == "hostile" else {},
            "error": None,
            "words": dict(EPISODE),
            "renderer": "/api/renderer/calc" if name.endswith("e1") else None,
        }

    def tokens(self, name: str, start: int, count: int) -> Any:
        """Its tokens; siblings differ from token 90 on, and every tenth sampled token does not train."""
        segments, _, total = self._layout(name)
        out: dict[str, Any] = {column: [] for column in COLUMNS}
        origins = ["prompt", "sampled", "observation", "glue"]
        for s in segments:
            for k in range(max(start, s["start"]), min(start + count, s["start"] + s["count"])):
                word = (k * 5 + (len(name) + ord(name[-1]) if k >= 90 else 0)) % len(WORDS)
                sampled, trains = s["origin"] == "sampled", k % 10 != 0
                values = {
                    "ids": word,
                    "pieces": WORDS[word] + ("\n" if k % 12 == 11 else " "),
                    "origin": origins.index(s["origin"]),
                    "segment": s["index"],
                    "logprob": -(k % 5) / 2,
                    "learner_logprob": -(k % 5) / 2 - 0.125,
                    "ref_logprob": -(k % 5) / 2 - 0.25,
                    "entropy": (k % 7) / 4,
                    "ratio": 0.8825,
                    "advantage": (0.5 - s["index"] / 10) if trains else None,
                    "weight": 1.0,
                    "flags": (1 | 2 * (k % 31 == 0)) if trains else 4,
                    "version": s["version"],
                }
                for column, value in values.items():
                    always = column in ("ids", "pieces", "origin", "segment")
                    out[column].append(value if sampled or always else None)
        return {"total": total, "from": start, **out}

    def text(self, name: str) -> str:
        """All pieces of an episode."""
        return "".join(self.tokens(name, 0, 10**9)["pieces"])

    def _search(self, query: dict[str, str]) -> Any:
        limit, offset = int(query.get("limit", 50)), int(query.get("offset", 0))
        tool = query.get("tool")
        total = 0 if tool not in (None, "calculator") else 120
        hits = [
            {
                "run": "calc-seed0",
                "step": 5,
                "episode": f"step5/g{i % 6}/e{i % 8}",
                "group": i % 6,
                "task": f"task-{i % 6}",
                "reward": (i % 3) / 2,
                "stop_reason": query.get("stop", "answered"),
                "snippet": f"… the <b>{query.get('q', '')}</b> in its place …",
            }
            for i in range(offset, min(total, offset + limit))
        ]
        return {"total": total, "took_ms": 12, "hits": hits}

    def _compare(self, ids: list[str]) -> Any:
        runs = [self._head(run) for run in ids]
        diff = [{"key": "seed", "values": {r["id"]: n for n, r in enumerate(runs)}}]
        diff.append({"key": "env.name", "values": {r["id"]: r["env"] for r in runs}})
        tasks = [
            {"task": f"task-{i}", "before": 0.5, "after": 0.5 + (i - 2) / 10, "delta": (i - 2) / 10}
            for i in range(10)
        ]
        return {
            "runs": runs,
            "config_diff": diff,
            "tasks": tasks,
            "regressions": tasks[:2],
            "series_common": [n for n, _ in SERIES] + EXTRA,
            "words": {**RUNS, **TASKS},
        }


TOOLS = {
    "tools": [
        {
            "name": "calculator",
            "calls": 912,
            "outcomes": {"ok": 800, "tool_error": 112},
            "p50_ms": 1.2,
            "p99_ms": 40,
            "truncated": 3,
            "never_called": False,
            "failing": [
                {
                    "arguments": {"expression": "1/0"},
                    "count": 88,
                    "outcome": "tool_error",
                    "example": {"step": 5, "episode": "step5/g1/e1"},
                }
            ],
        },
        {
            "name": "web",
            "calls": 0,
            "outcomes": {},
            "p50_ms": None,
            "p99_ms": None,
            "truncated": 0,
            "never_called": True,
            "failing": [],
        },
    ],
    "by_step": [],
}

KINDS = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    site: Site

    def log_message(self, *args: object) -> None:
        pass

    def send(self, body: bytes, kind: str, status: int = 200, policy: str = POLICY) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": policy,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def handle(self) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the page went elsewhere
            super().handle()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path.startswith("/api/events"):
            self._events(parse_qs(urlsplit(self.path).query))
        elif path.startswith("/api/image/"):
            self.send(PNG, "image/png")
        elif path.startswith("/api/renderer/"):
            self.send(BOARD.encode(), KINDS["html"], policy=FRAME_POLICY)
        elif path.startswith("/api/"):
            self.site.asked.append(self.path)
            found = self.site.answer(self.path)
            missing = {"error": {"message": f"nothing at {path}", "what_to_do": "Look at the list of runs."}}
            self.send(
                json.dumps(missing if found is None else found).encode(),
                "application/json",
                404 if found is None else 200,
            )
        elif path in served():
            kind = KINDS[path.rpartition(".")[2] if "." in path else "html"]
            self.send(served()[path].encode(), kind)
        else:
            file = files("agentrl.view").joinpath("static", *(path.strip("/") or "index.html").split("/"))
            if file.is_file():
                self.send(file.read_bytes(), KINDS[path.rpartition(".")[2] if "." in path else "html"])
            else:
                self.send(b"", "text/plain", 404)

    def _events(self, query: dict[str, list[str]]) -> None:
        site = self.site
        with site.changed:
            after = int(query["after"][0]) if "after" in query else len(site.events)
            if "after" in query and query.get("wait") != ["0"]:
                site.changed.wait_for(lambda: len(site.events) > after, timeout=5)
            body = {"next": len(site.events), "events": site.events[after:]}
        self.send(json.dumps(body).encode(), "application/json")


@contextmanager
def serve(site: Site) -> Iterator[str]:
    """The site's address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"site": site}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        site.tell({})
        server.shutdown()
        thread.join()
        server.server_close()
