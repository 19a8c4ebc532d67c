"""`agentrl export`: the episodes of a run as rows for supervised fine-tuning."""

from __future__ import annotations

import itertools
import math
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.options import new_file
from agentrl.errors import ConfigError
from agentrl.plural import plural


class Format(StrEnum):
    """How the rows are written."""

    OPENAI = "openai"
    HF = "hf"
    TOKENS = "tokens"
    JSONL = "jsonl"


def export(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run or of an evaluation.", show_default=False)
    ],
    format: Annotated[
        Format,
        typer.Option(
            help="openai: chat rows as JSON lines; hf: the same as parquet; tokens: the exact tokens and their "
            "labels as parquet; jsonl: the whole records."
        ),
    ] = Format.OPENAI,
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write. [default: stdout]", show_default=False)
    ] = None,
    steps: Annotated[
        str, typer.Option(metavar="FROM:TO", help="Steps to export, e.g. 80: or 10:20 or 90.", show_default=False)
    ] = "",
    min_reward: Annotated[
        float | None, typer.Option(help="Only episodes with at least this reward.", show_default=False)
    ] = None,
    solved: Annotated[bool, typer.Option("--solved", help="Only solved episodes.")] = False,
    malformed: Annotated[
        bool, typer.Option("--malformed", help="Include episodes with malformed or invalid calls.")
    ] = False,
    baselines: Annotated[
        bool, typer.Option("--baselines", help="Include the greedy baseline episodes of advantage `remax`.")
    ] = False,
) -> None:
    """Export episodes as conversations for supervised fine-tuning, tools included."""
    from agentrl.eval.finetune_rows import Selection
    from agentrl.eval.finetune_rows import export as export_records
    from agentrl.run_folder.files import write_atomic

    if format in (Format.HF, Format.TOKENS) and out is None:
        raise ConfigError(f"--format {format.value} writes parquet: name the file with --out FILE.parquet")
    if min_reward is not None and math.isnan(min_reward):
        raise ConfigError("--min-reward nan: no reward is at least nan; give a number")
    if out is not None:
        new_file(out)
    chosen = Selection(_steps(steps), min_reward, solved, malformed, baselines)
    count = itertools.count()
    data = export_records((record for record in chosen.records(run) if next(count) >= 0), format.value)
    if out is None:
        sys.stdout.buffer.writelines(data)
    else:
        write_atomic(out, data)
    left_out = "; ".join(f"{count} {reason}" for reason, count in chosen.left_out.items())
    left_out = f"; left out: {left_out}" if left_out else ""
    print(plural(next(count), "episode") + (f" to {out}" if out else "") + left_out, file=sys.stderr)


def _steps(text: str) -> tuple[int | None, int | None]:
    first, colon, last = text.partition(":")
    try:
        low = int(first) if first else None
        return low, ((int(last) if last else None) if colon else low)
    except ValueError:
        raise ConfigError(f"--steps {text}: write FROM:TO, FROM:, :TO or one step") from None
