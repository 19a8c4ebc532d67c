"""The summary of a run folder."""

from __future__ import annotations

from collections.abc import Collection

from agentrl.config.run import RunConfig
from agentrl.doctor.examine import findings
from agentrl.reporting.report import Summary
from agentrl.run_folder.checkpoints import steps_saved
from agentrl.run_folder.history import read_lineage
from agentrl.run_folder.store import RunStore


def summarize(store: RunStore, config: RunConfig, wall_seconds: float) -> Summary:
    """Sum up the metrics lines of a run folder."""
    lines = store.metrics()
    redraws = store.redraws()
    biased = list(redraws.findings().values())
    first = next((line for line in lines if line["step"] == 0), {})
    steps = [line for line in lines if line["step"] > 0]
    forked_after = _forked_after(store)
    # Metrics lines may be lost; a checkpoint proves that its step was done.
    done = int(max((*(line["step"] for line in steps), *steps_saved(store.path / "checkpoints")), default=0))

    def total(name: str) -> int:
        return int(sum(line.get(name) or 0 for line in steps))

    return Summary(
        run=str(store.path),
        steps=done,
        held_out_before=first.get("held_out"),
        held_out_after=next((line["held_out"] for line in reversed(steps) if "held_out" in line), None),
        held_out_reward_before=first.get("held_out_reward"),
        held_out_reward_after=next(
            (r["held_out_reward"] for r in reversed(steps) if "held_out_reward" in r), None
        ),
        warmup_seconds=0.0 if forked_after else first.get("warmup_seconds", 0.0),
        train_seconds=sum(line.get("seconds") or 0.0 for line in steps if line["step"] > forked_after),
        wall_seconds=wall_seconds,
        episodes=total("episodes"),
        scored=sum(total(name) for name in {name for line in steps for name in line if name.startswith("stop/")}),
        sampled_tokens=total("sampled_tokens"),
        malformed=total("malformed"),
        limits=total("limits"),
        infra_failures=total("infra_failures"),
        env=config.env_names,
        redrawn=dict(redraws.reasons.most_common()),
        redrawn_examples=redraws.examples,
        redrawn_tasks=redraws.worst_tasks(20),
        biased=biased,
        problems=_problems(store, biased) if steps else [],
        sandbox_broken=redraws.broken.total(),
        sandbox_broken_tasks=dict(redraws.broken.most_common(20)),
        faults={
            name.removeprefix("faults/"): total(name)
            for name in sorted({name for line in steps for name in line if name.startswith("faults/")})
        },
        finished=done >= config.steps,
    )


def earlier_seconds(store: RunStore, ended: Summary | None) -> float:
    """The wall time of a run up to now: until it last `ended`, and of the steps since then if it was killed.

    Call it before the lines of steps without a checkpoint are removed.
    """
    lines = store.metrics()
    done = _forked_after(store) if ended is None else ended.steps
    cold_start = next((line.get("warmup_seconds") or 0.0 for line in lines if line["step"] == 0 and not done), 0.0)
    before = cold_start if ended is None else ended.wall_seconds
    return before + sum(line.get("seconds") or 0.0 for line in lines if line["step"] > done)


def _forked_after(store: RunStore) -> int:
    """The steps of a fork whose lines are copies of the other run's: their time is not its own."""
    lineage = read_lineage(store.path)
    return lineage.step if lineage is not None and not lineage.weights_only else 0


def _problems(store: RunStore, said: Collection[str]) -> list[str]:
    """What the doctor is sure of at the end of a run, without what has been `said` already."""
    try:
        return [f.text for f in findings(store.path) if f.severity == "error" and f.text not in said]
    except Exception as e:  # a fault of the doctor must not lose the summary
        store.event(f"the run could not be examined: {type(e).__name__}: {e}")
        return []
