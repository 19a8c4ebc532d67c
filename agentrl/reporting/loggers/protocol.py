"""The protocol of loggers, and the data that they receive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The run, as a logger sees it when it starts.

    Args:
        name: the run's name.
        folder: a folder in the run folder for this logger's files; it survives a resume.
        config: the configuration as nested mappings, without secrets.
        first_step: the first step that will be logged. 0 for a new run; a resumed one continues at its checkpoint,
            so a logger may have seen this step and later ones before.
        resumed: whether the run was started before.
    """

    name: str
    folder: Path
    config: Mapping[str, object]
    first_step: int = 0
    resumed: bool = False

    def recall(self, key: str) -> str | None:
        """What `remember` saved in an earlier process of this run."""
        file = self.folder / key
        return file.read_text(encoding="utf-8").strip() if file.is_file() else None

    def remember(self, key: str, value: str) -> None:
        """Save a text, such as the id that a server gave to the run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        temp = self.folder / f".{key}.tmp"
        temp.write_text(value, encoding="utf-8")
        temp.replace(self.folder / key)


@dataclass(frozen=True, slots=True)
class SampleEpisode:
    """One row of the table of sample episodes."""

    episode: str
    task: str
    reward: float | None
    solved: bool | None
    stop_reason: str
    turns: int
    text: str
    """The conversation, cut to a few thousand characters."""


LOGGER_METHODS = ("start", "metrics", "episodes", "finish")


@runtime_checkable
class Logger(Protocol):
    """Receives the measurements of a run. All calls come from one thread, in order; `start` is the first.

    A logger may be slow, raise or hang: the run does not wait for it. After an exception it gets no more calls.
    """

    def start(self, run: RunInfo) -> None:
        """The run starts or resumes."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Finite values of a step by name; held-out evaluations are among them."""

    def episodes(self, step: int, rows: Sequence[SampleEpisode]) -> None:
        """Some episodes of a step."""

    def finish(self, summary: Mapping[str, object]) -> None:
        """The run ended; empty if it was interrupted. Everything must be written when this returns."""


@runtime_checkable
class Abandonable(Protocol):
    """A logger whose library would hold up the end of the process."""

    def abandon(self) -> None:
        """The run ends without waiting for it any longer; called from another thread."""
