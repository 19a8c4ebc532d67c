"""A plan as text."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.plural import plural
from agentrl.preflight.estimate import Arithmetic, Phase, Plan, size
from agentrl.preflight.machines import Machine
from agentrl.preflight.predict import DECODE_SHARE, FILLED, HOST, LINK_SHARE, MFU, SMALL_MFU, Prediction


def lines(plan: Plan) -> Sequence[str]:
    """The plan as text."""
    batch, shape = plan.batch, plan.model
    rows = f", {batch.tasks * batch.steps / batch.rows:.1f} passes over {batch.rows:,} rows" if batch.rows else ""
    out = [
        f"model       {shape.kind}, {shape.parameters:,} parameters, {shape.layers} blocks, "
        f"context {shape.max_context:,}",
        f"step        {_episodes(batch)}, in {plural(batch.updates, 'update')} of {batch.episodes_per_update:g}",
        f"tokens      at most {batch.tokens:,} per step, {batch.sampled_tokens:,} of them sampled; "
        f"{batch.micro_batches_per_rank:,} micro-batch{'es' * (batch.micro_batches_per_rank > 1)} "
        "per update and rank",
        f"run         {plural(batch.steps, 'step')}, {plural(batch.episodes_in_all, 'episode')}{rows}",
        *[f"{'placement' if n == 0 else '':<11} {line}" for n, line in enumerate(plan.placement)],
    ]
    out.append(f"attention   {plan.attention}")
    for phase in plan.phases:
        parts = ", ".join(f"{name} {size(number)}" for name, number in _summed(phase).items())
        out.append(f"{phase.name:<11} {size(phase.total)} in {phase.where}: {parts}")
    if plan.memory_bytes is not None:
        out.append(f"memory      {size(plan.memory_bytes)} per device")
    out.append(
        f"KV cache    {plan.kv_bytes_per_token:,} bytes per token, {size(plan.kv_bytes)} with every slot full"
    )
    out.append(
        f"checkpoint  {size(plan.checkpoint_bytes)} each, {size(plan.checkpoints_bytes)} with all that are kept"
    )
    if plan.machine is not None and plan.prediction is not None:
        out += _predicted(plan.machine, plan.prediction)
        out.append(f"            saves most: {_saves_most(plan, plan.prediction)}")
    return out


def _episodes(batch: Arithmetic) -> str:
    """The episodes of a step."""
    tasks = plural(batch.tasks, "task")
    episodes = plural(batch.episodes, "episode")
    if batch.greedy:
        episodes += f" and {plural(batch.greedy, 'greedy one')}"
    if batch.averaged:
        return f"{tasks}, {episodes} on average"
    return f"{tasks} x {batch.episodes // batch.tasks} = {episodes}"


def _saves_most(plan: Plan, found: Prediction) -> str:
    change = plan.saves_most
    if change is None or change.seconds is None:
        return "more or faster GPUs; no setting that was tried does on these"
    return f"{change}: {_seconds(change.seconds)} instead of {_seconds(found.together)}"


def _seconds(number: float) -> str:
    return f"{number:.0f} s" if number >= 10 else f"{number:.2g} s"


def _dollars(number: float) -> str:
    return f"${number:,.2f}" if number >= 0.01 else f"${number:.2g}"


def _predicted(machine: Machine, found: Prediction) -> list[str]:
    return [
        f"machine     {machine}, {_dollars(machine.price)} per hour",
        f"predicted   {_seconds(found.together)} per step: rollout {_seconds(found.rollout)}, "
        f"update {_seconds(found.update)}, weights {_seconds(found.publish)}; {_dollars(found.dollars)} per step",
        f"            assumes decoding at {DECODE_SHARE:.0%} of the memory bandwidth, an MFU of {MFU:.0%} "
        f"({SMALL_MFU:.0%} below 2 B parameters), episodes that fill {FILLED:.0%} of their limits, "
        f"{HOST / 1e9:.0f} GB/s through host memory, {LINK_SHARE:.0%} of the links between ranks, and no time in "
        "tools",
    ]


def _summed(phase: Phase) -> dict[str, int]:
    """The parts of a phase; those of another phase ("update: gradients") as one sum."""
    found: dict[str, int] = {}
    for name, number in phase.parts.items():
        group = name.partition(": ")[0]
        found[group] = found.get(group, 0) + number
    return found
