"""`agentrl replay`: recompute updates from the files of a run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from agentrl.clean import visible
from agentrl.extras import require


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)],
    step: Annotated[
        int | None, typer.Option(help="The last step to replay. [default: the last one]", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    overrides: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override how a teacher is reached, e.g. `--set teacher.url=http://...`. Repeatable.",
            show_default=False,
        ),
    ] = [],  # noqa: B006
) -> None:
    """Recompute the updates up to a step from recorded episodes, and compare weights and metrics.

    Starts from the newest checkpoint before the step. Exits with 1 if something differs.
    """
    from agentrl.cli.options import require_run
    from agentrl.reporting.display import quiet_transformers
    from agentrl.run_folder.records import recorded_steps

    require("train", "agentrl replay")
    require_run(run)
    quiet_transformers()
    from agentrl.trainer.replay import replay as replayed

    steps = recorded_steps(run)
    found = replayed(run, max(steps, default=0) if step is None else step, overrides)
    if as_json:
        body = dataclasses.asdict(found) | {"equal": found.equal, "first_in": found.first_in}
        typer.echo(json.dumps(body, indent=1))
    else:

        def say(text: str) -> None:
            typer.echo(visible(text))

        say(f"replayed steps {found.from_step + 1} to {found.step} of {run}")
        say(f"weights {found.digest[:16]}, saved {(found.saved_digest or 'not kept')[:16]}")
        for number, metrics in found.metrics.items():
            for name, (logged, computed) in metrics.items():
                say(f"step {number}: {name} {logged!r} in the run, {computed!r} replayed")
        if found.tensor:
            gap = found.max_difference
            how = "which only one of them has in this shape" if gap is None else f"by up to {gap:.3g}"
            say(f"first tensor that differs: {found.tensor}, {how}")
        say("equal" if found.equal else f"differs, first in the {found.first_in}")
    if not found.equal:
        raise typer.Exit(1)
