"""What the checks look at: configuration, series, and the episodes of some steps."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from agentrl.errors import CheckpointError
from agentrl.run_folder.records import decode, episode_lines
from agentrl.run_folder.redraws import Redraws, read_redraws
from agentrl.run_folder.run_reader import Json, RunReader
from agentrl.run_folder.token_records import TokenColumns, read_tokens

MOST_STEPS = 10
"""Steps whose episodes are read, spread over the run."""
MOST_EPISODES = 512
"""Episodes read of each."""
MOST_TOKENS = 200_000
"""Tokens after which no more episodes of a step are read: long ones take time and memory, and fewer suffice."""
FEWEST = 64
"""Episodes of a step that are read however long they are."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call."""

    tool: str
    arguments: str
    result: str
    outcome: str
    seconds: float


@dataclass(frozen=True)
class Played:
    """One scored or failed episode, as its record says."""

    step: int
    group: int
    advantages: Sequence[float]
    raw: Json

    @property
    def id(self) -> str:
        """The id of the episode."""
        return str(self.raw["id"])

    @property
    def reward(self) -> float | None:
        """The reward; None if the episode failed, nan if it is not a number."""
        found = self.raw.get("reward")
        return None if found is None else _number(found)

    @property
    def parts(self) -> dict[str, float]:
        """The reward by name."""
        return {name: _number(value) for name, value in (self.raw.get("rewards") or {}).items()}

    @cached_property
    def calls(self) -> list[Call]:
        """All tool calls."""
        return [
            Call(
                call["call"]["name"],
                json.dumps(call["call"]["arguments"], sort_keys=True),
                call["result"],
                call["outcome"],
                call["seconds"],
            )
            for turn in self.raw.get("turns", ())
            for call in turn.get("calls", ())
        ]

    @property
    def tools(self) -> list[str]:
        """Names of the tools offered."""
        functions = [tool.get("function") for tool in self.raw.get("tools", ())]
        return [str(function.get("name")) for function in functions if isinstance(function, dict)]

    @property
    def env(self) -> str:
        """The name of its env in a run of several."""
        return str(self.raw["task"].get("env") or "")

    @cached_property
    def first_call(self) -> tuple[str, str] | None:
        """Tool and arguments of the first call that was read, of failed episodes as well."""
        for message in self.raw.get("messages", ()):
            for call in message.get("tool_calls") or ():
                return str(call["name"]), json.dumps(call["arguments"], sort_keys=True)
        return None

    def text(self, *roles: str) -> str:
        """The text of all messages of some roles."""
        contents = [m.get("content") for m in self.raw.get("messages", ()) if m.get("role") in roles]
        parts = [part for content in contents for part in (content if isinstance(content, list) else [content])]
        return "\n".join(part for part in parts if isinstance(part, str))

    @property
    def unread(self) -> str:
        """What the policy wrote outside of the calls that were read, and the reasons why others were not."""
        said = [m for m in self.raw.get("messages", ()) if m.get("role") == "assistant"]
        return self.text("assistant") + "\n".join(str(e) for m in said for e in m.get("parse_errors") or ())

    @property
    def prompt(self) -> str:
        """The first message of the user."""
        said = [m.get("content") for m in self.raw.get("messages", ()) if m.get("role") == "user"]
        return json.dumps(said[:1])

    @cached_property
    def transcript(self) -> str:
        """All that was said, without the ids of calls, and how it ended."""
        said = [
            (m.get("role"), m.get("content"), [(c["name"], c["arguments"]) for c in m.get("tool_calls") or ()])
            for m in self.raw.get("messages", ())
        ]
        return json.dumps([said, self.raw.get("stop_reason")], sort_keys=True)

    @property
    def opening(self) -> str:
        """All messages before the first one of the policy."""
        said = self.raw.get("messages", ())
        first = next((n for n, m in enumerate(said) if m.get("role") == "assistant"), len(said))
        return json.dumps([(m.get("role"), m.get("content")) for m in said[:first]])

    @property
    def answer(self) -> str:
        """The last message of the policy."""
        said = [m for m in self.raw.get("messages", ()) if m.get("role") == "assistant"]
        content = said[-1].get("content") if said else ""
        return content.strip() if isinstance(content, str) else ""

    @cached_property
    def sampled(self) -> list[Json]:
        """The sampled segments."""
        return [segment for segment in self.raw.get("segments", ()) if segment["origin"] == "sampled"]

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        return sum(len(s["ids"]) for s in self.sampled) or sum(
            t.get("tokens", 0) for t in self.raw.get("turns", ())
        )

    @property
    def seconds_outside_engine(self) -> float:
        """Mean time per turn that was not the engine's."""
        turns = self.raw.get("turns", ())
        engine = sum(_number(turn.get("engine_seconds")) for turn in turns)
        return (_number(self.raw.get("seconds")) - engine) / max(1, len(turns))

    @cached_property
    def logprobs(self) -> Floats:
        """Of the sampler, for all sampled tokens."""
        return np.asarray([_number(v) for s in self.sampled for v in s["logprobs"]], dtype=np.float64)

    @cached_property
    def versions(self) -> NDArray[np.int64]:
        """Of the weights that sampled each token."""
        return np.asarray([v for s in self.sampled for v in s["versions"]], dtype=np.int64)

    @property
    def oldest_version(self) -> int | None:
        """The oldest weights that sampled a token."""
        return min((v for s in self.sampled for v in s["versions"]), default=None)


@dataclass
class Evidence:
    """A run, read once.

    Args:
        reader: of the run folder.
        upto: the last step to look at; None for all.
        env: the env whose episodes these are, in a run of several; empty for all.
    """

    reader: RunReader
    upto: int | None = None
    env: str = ""
    damaged: dict[int, str] = field(default_factory=dict)
    """Why the episodes of a step could not be read to their end; filled when `episodes` is read."""
    _tokens: dict[int, dict[str, TokenColumns]] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Path, upto: int | None = None) -> Evidence:
        """The evidence of a run folder."""
        return cls(RunReader(run), upto)

    def setting(self, key: str, otherwise: Any = None) -> Any:
        """A value of the configuration by its dotted key."""
        found: Any = self.reader.config
        for part in key.split("."):
            if not isinstance(found, dict) or part not in found:
                return otherwise
            found = found[part]
        return found

    def number(self, key: str, otherwise: float) -> float:
        """A value of the configuration; `otherwise` where it is not a number, or 0."""
        found = self.setting(key)
        known = isinstance(found, int | float) and abs(found) < 1e300
        return float(found or otherwise) if known else float(otherwise)

    def series(self, name: str) -> tuple[Floats, Floats]:
        """The steps and values of a metric, without gaps and without step 0."""
        metrics = self.reader.metrics
        column = metrics.values.get(name, [])
        pairs = [(s, v) for s, v in zip(metrics.steps, column, strict=False) if v is not None and s > 0]
        pairs = [(s, v) for s, v in pairs if self.upto is None or s <= self.upto]
        return np.asarray([s for s, _ in pairs], dtype=float), np.asarray([v for _, v in pairs], dtype=float)

    def with_start(self, name: str) -> tuple[Floats, Floats]:
        """As `series`, with step 0."""
        metrics = self.reader.metrics
        pairs = [
            (s, v) for s, v in zip(metrics.steps, metrics.values.get(name, []), strict=False) if v is not None
        ]
        return np.asarray([s for s, _ in pairs], dtype=float), np.asarray([v for _, v in pairs], dtype=float)

    @property
    def first_step(self) -> int:
        """The first step that was logged."""
        return next((step for step in self.reader.metrics.steps if step > 0), 0)

    @cached_property
    def steps(self) -> list[int]:
        """The steps whose episodes are read: spread over the run, the first and the last among them."""
        known = [step for step in self.reader.steps if step > 0 and (self.upto is None or step <= self.upto)]
        if len(known) <= MOST_STEPS:
            return known
        return [known[round(n * (len(known) - 1) / (MOST_STEPS - 1))] for n in range(MOST_STEPS)]

    @cached_property
    def episodes(self) -> list[Played]:
        """The episodes of these steps that were not set aside, failed ones included."""
        return [played for step in self.steps for played in self._of(step)]

    def by_env(self) -> list[Evidence]:
        """The same with the episodes of one env each; only this one if the run has a single env."""
        names = sorted({played.env for played in self.episodes})
        if len(names) < 2:
            return [self]
        views = [Evidence(self.reader, self.upto, name, self.damaged, self._tokens) for name in names]
        for view in views:
            view.episodes = [played for played in self.episodes if played.env == view.env]
        return views

    @property
    def env_key(self) -> str:
        """The key of this env in the configuration."""
        name = self.env or next((played.env for played in self.episodes), "")
        return f"envs.{name}" if name else "env"

    @cached_property
    def scored(self) -> list[Played]:
        """Those with a reward."""
        return [played for played in self.episodes if played.reward is not None]

    def of_steps(self, steps: Sequence[int]) -> list[Played]:
        """The scored episodes of some of the steps."""
        return [played for played in self.scored if played.step in steps]

    def groups(self, chosen: Sequence[Played] | None = None) -> Iterator[list[Played]]:
        """Scored episodes by group."""
        found: dict[tuple[int, int], list[Played]] = {}
        for played in self.scored if chosen is None else chosen:
            found.setdefault((played.step, played.group), []).append(played)
        yield from found.values()

    def tokens(self, step: int) -> dict[str, TokenColumns]:
        """What the learner saw in a step, by episode; empty if it was not recorded."""
        if step not in self._tokens:
            try:
                self._tokens[step] = dict(read_tokens(self.reader.path, step))
            except CheckpointError:
                self._tokens[step] = {}
        return self._tokens[step]

    @cached_property
    def redraws(self) -> Redraws:
        """What was lost to failures."""
        return Redraws.together(read_redraws(self.reader.path).values())

    @cached_property
    def tasks(self) -> Json:
        """Digests of the training and held-out tasks, if the run recorded them."""
        from agentrl.run_folder.files import read_bounded

        try:
            found = json.loads(read_bounded(self.reader.path / "tasks.json"))
        except (OSError, ValueError, CheckpointError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _of(self, step: int) -> Iterator[Played]:
        try:
            tokens = 0
            for number, line in enumerate(episode_lines(self.reader.path, step)):
                if number >= MOST_EPISODES or (tokens > MOST_TOKENS and number >= FEWEST):
                    return
                decode(line)  # what no run wrote ends the step
                record = from_json(line)
                tokens += sum(len(segment["ids"]) for segment in record["episode"].get("segments", ()))
                if not record.get("set_aside") and not record.get("baseline"):
                    yield Played(step, int(record["group"]), record.get("advantages") or (), record["episode"])
        except (CheckpointError, ValueError) as e:
            self.damaged[step] = (str(e).splitlines() or [type(e).__name__])[0][:300]


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
