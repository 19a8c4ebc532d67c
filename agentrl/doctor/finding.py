"""What the doctor finds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Severity = Literal["hint", "warning", "error"]
"""How sure and how bad: a hint may be harmless, a warning deserves a look, an error spoils the training."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with a run.

    Attributes:
        name: short and stable, such as `no-tool-called`.
        text: what is wrong, with the numbers that show it.
        setting: what to change next; the first of several is the one to try first.
        step: where to look.
        episode: the id of an episode to read; empty if the evidence is a series.
        series: names of the metrics that show it.
        why: how sure, and what else it could be.
    """

    name: str
    severity: Severity
    text: str
    setting: str
    step: int = 0
    episode: str = ""
    series: tuple[str, ...] = ()
    why: str = ""

    def data(self) -> dict[str, object]:
        """As JSON data."""
        return {**asdict(self), "series": list(self.series)}

    def line(self) -> str:
        """As one line for a terminal or a note."""
        where = f" (step {self.step}{f', {self.episode}' if self.episode else ''})" if self.step else ""
        return f"{self.severity}: {self.text}{where}. Next: {self.setting}"
