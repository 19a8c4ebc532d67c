"""The training loop: play groups, score episodes against their siblings, step, push the weights."""

from __future__ import annotations

from asyncio import to_thread

from agentrl.trainer.signals import until
from agentrl.trainer.training_run import Run


async def train(run: Run) -> None:
    """Train until the last step, or until the run is asked to stop."""
    algorithm, learner = run.algorithm, run.learner
    async with run.scheduler:
        # Admission keeps staleness <= rollout.max_staleness.
        async for batch in until(run.leaving, run.scheduler.batches()):
            async with run.updating():
                rows = await to_thread(algorithm.rows, batch.groups)  # sampled tokens and rewards
                rows = await learner.annotate(rows, algorithm.advantage_needs)  # values, old and ref logprobs
                rows = await to_thread(algorithm.advantages, rows)  # group baseline or critic, KL in the reward
                rows = await learner.annotate(rows, algorithm.loss_needs)  # old logprobs of the rows that train
                rows = await to_thread(algorithm.corrections, rows)  # importance weights, rejected tokens
                update = await learner.step(rows)  # pack, loss, AdamW; counts of the whole step

            await run.publish(version=batch.step)
            await run.finish(batch, rows, update)
            if run.stop:
                await run.save(batch.step)
                return
        await run.leave()
