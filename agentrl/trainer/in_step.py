"""Progress of the current step, for the display."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from agentrl.config.run import RunConfig
from agentrl.plural import plural
from agentrl.reporting.report import Reporter
from agentrl.rollout.admission import Batch
from agentrl.types import Episode


@dataclass
class InStep:
    """Counts the episodes that have ended for the next batch.

    Args:
        reporter: shows the count.
        total: episodes of a batch; more end where failed ones are refilled or later steps begin early.
    """

    reporter: Reporter
    total: int
    num_ended: int = 0
    _paused: bool = field(default=True)

    def ended(self, episode: Episode) -> None:
        """One more episode has ended."""
        self.num_ended += 1
        if not self._paused:
            self._show()

    def pause(self, doing: str) -> None:
        """Switch to another activity."""
        self._paused = True
        self.reporter.within(doing)

    def resume(self) -> None:
        """Switch back to waiting for episodes."""
        self._paused = False
        self._show()

    def taken(self, batch: Batch) -> None:
        """A batch was trained: subtract its episodes."""
        groups = (*batch.groups, *batch.aside)
        self.num_ended -= sum(len(g.episodes) + len(g.failed) + (g.greedy is not None) for g in groups)
        self.resume()

    def _show(self) -> None:
        self.reporter.within("episodes", min(max(self.num_ended, 0), self.total), self.total)


def counting(reporter: Reporter, doing: str, total: int) -> Callable[[Episode], None]:
    """Shows how many episodes of a fixed number have ended."""
    done = 0

    def ended(episode: Episode) -> None:
        nonlocal done
        done = min(done + 1, total)
        reporter.within(doing, done, total)

    reporter.within(doing, 0, total)
    return ended


def starting_engine(config: RunConfig) -> str:
    """The status while the engine starts."""
    engine, server = config.engine, config.engine.server
    if not engine.on_servers:
        return "loading the engine"
    if server.urls:
        return f"connecting to {', '.join(server.addresses)}"
    return f"starting {plural(server.replicas, f'{engine.kind} server')}"
