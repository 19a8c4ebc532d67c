"""The page everybody reads: play groups, score them against their siblings, step, hand the weights over."""

from __future__ import annotations

from agentrl.train.run import Run
from agentrl.train.samples import to_records, to_samples


async def train(run: Run) -> None:
    """Train until the last step, or until somebody asks the run to stop."""
    config = run.config
    async with run.scheduler:
        async for batch in run.scheduler.batches():  # admission keeps staleness <= rollout.max_staleness
            samples, scores = to_samples(batch.groups, overlong=config.rollout.overlong)
            update = await run.update(samples, scores)  # advantages, packing, loss, optimizer
            await run.publish(version=batch.step)

            await run.finish(batch, to_records(batch.groups, update.advantages, step=batch.step), update)
            if run.stop:
                return
