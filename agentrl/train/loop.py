"""The page everybody reads: play groups, score them against their siblings, step, hand the weights over."""

from __future__ import annotations

from agentrl.train.run import Run
from agentrl.train.samples import to_samples


async def train(run: Run) -> None:
    """GRPO until the last step, or until somebody asks the run to stop."""
    config = run.config
    async with run.scheduler:
        async for batch in run.scheduler.batches():  # admission keeps staleness <= rollout.max_staleness
            samples, records = to_samples(
                batch.groups, config.algorithm, overlong=config.rollout.overlong, step=batch.step
            )
            update = await run.update(samples)
            await run.publish(version=batch.step)

            await run.finish(batch, records, update)
            if run.stop:
                return
