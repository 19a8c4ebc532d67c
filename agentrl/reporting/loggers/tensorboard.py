"""TensorBoard: event files in the run folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from agentrl.reporting.loggers.protocol import RunInfo, SampleEpisode
from agentrl.reporting.loggers.sample_table import markdown_table


class TensorBoard:
    """Writes event files; TensorBoard drops the steps after the checkpoint that a resumed run continues from."""

    def start(self, run: RunInfo) -> None:
        """Open a new event file."""
        from torch.utils.tensorboard import SummaryWriter

        # Also at the first start: without its data server, TensorBoard takes the first mark for a new run.
        self._writer = SummaryWriter(str(run.folder), purge_step=run.first_step)
        text = json.dumps(run.config, indent=2, ensure_ascii=False, default=str)
        self._writer.add_text("config", "    " + text.replace("\n", "\n    "), run.first_step)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """One scalar per name."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def episodes(self, step: int, rows: Sequence[SampleEpisode]) -> None:
        """A table of text."""
        self._writer.add_text("episodes", markdown_table(rows), step)

    def finish(self, summary: Mapping[str, object]) -> None:
        """Close the file."""
        if summary:
            text = json.dumps(summary, indent=2, ensure_ascii=False, default=str)
            self._writer.add_text("summary", "    " + text.replace("\n", "\n    "))
        self._writer.close()
