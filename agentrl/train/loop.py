"""The page everybody reads: play groups, score them against their siblings, step, hand the weights over."""

from __future__ import annotations

from agentrl.train.run import Run
from agentrl.train.samples import to_samples


async def train(run: Run) -> None:
    """GRPO until the last step, or until somebody asks the run to stop."""
    config = run.config
    for step in range(run.first_step, config.steps + 1):
        groups = await run.play(step)
        samples, records = to_samples(groups, config.algorithm, overlong=config.rollout.overlong, step=step)
        update = await run.update(samples)
        await run.engine.update_weights(run.learner.weights(), version=step)

        await run.finish(step, groups, records, update)
        if run.stop:
            return
