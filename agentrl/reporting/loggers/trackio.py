"""trackio: a local dashboard by Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple

from agentrl.reporting.loggers.protocol import RunInfo, SampleEpisode
from agentrl.reporting.loggers.sample_table import COLUMNS


class Trackio:
    """Logs into trackio's local store."""

    def __init__(self, project: str) -> None:
        self._project = project

    def start(self, run: RunInfo) -> None:
        """Start the run, or continue the one of the same name."""
        import trackio
        import trackio.run
        import trackio.utils

        for module in (trackio, trackio.run, trackio.utils):  # trackio prints and has no switch for it
            vars(module)["print"] = _nothing
        name = run.recall("name")
        if name is None:
            name = f"{run.name}-{run.folder.stat().st_ctime_ns % 10**8:08d}"
            run.remember("name", name)
        self._run = trackio.init(
            project=self._project,
            name=name,
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """One row."""
        self._run.log(dict(values), step=step)

    def episodes(self, step: int, rows: Sequence[SampleEpisode]) -> None:
        """A table."""
        import trackio

        table = trackio.Table(columns=list(COLUMNS), data=[list(astuple(row)) for row in rows])
        self._run.log({"episodes_table": table}, step=step)

    def finish(self, summary: Mapping[str, object]) -> None:
        """Write everything."""
        self._run.finish()


def _nothing(*_: object, **__: object) -> None:
    """A `print` that prints nothing."""
