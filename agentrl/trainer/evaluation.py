"""Build the evaluation of a run: on its engine while training waits, or on a second engine in the background."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from agentrl.agents.players import MakePlayer, players
from agentrl.chat.template import Renderer
from agentrl.config.run import RunConfig
from agentrl.errors import ConfigError
from agentrl.reporting.report import Reporter
from agentrl.rollout.build import make_engine
from agentrl.rollout.content import Content
from agentrl.trainer.held_out import EvalSet, Evaluation, HeldOut, InBackground
from agentrl.trainer.in_step import InStep
from agentrl.trainer.signals import unless_stopped
from agentrl.types import Filters


@dataclass(frozen=True)
class EvaluationParts:
    """What an evaluation is made of.

    Args:
        base: the folder that engines load.
        weights: what engines receive.
        began: is called with the step when an evaluation in the background begins.
        late: is called with the metrics of an evaluation that ran in the background.
        stopping: whether the run was asked to stop.
    """

    config: RunConfig
    content: Content
    base: Path
    renderer: Renderer
    weights: Callable[[], Awaitable[dict[str, Tensor]]]
    reporter: Reporter
    in_step: InStep
    began: Callable[[int], None]
    late: Callable[[int, Mapping[str, float]], None]
    stopping: Callable[[], bool]


async def make_evaluation(parts: EvaluationParts, make: MakePlayer, stack: AsyncExitStack) -> Evaluation:
    """The evaluation of a run; `stack` closes what it starts.

    Args:
        parts: what it is made of.
        make: makes players on the engine of the run.

    Raises:
        ConfigError: see `make_engine`; also if the run has no second engine for an evaluation in the background.
    """
    config = parts.config
    if not config.eval.background or not any(
        len(tasks) for c in parts.content.by_env.values() for tasks in c.held_out_sets
    ):
        return HeldOut(_sets(parts, make), parts.reporter, parts.in_step)
    parts.reporter.within("starting the engine for evaluations")
    server = config.engine.server.model_copy(update={"replicas": 1})
    own = config.model_copy(update={"engine": config.engine.model_copy(update={"server": server})})
    engine = await unless_stopped(parts.stopping, make_engine(own, parts.base, trains=True))
    stack.push_async_callback(engine.close)
    make_envs = {name: part.make_env for name, part in parts.content.by_env.items()}
    make = await stack.enter_async_context(players(own, None, engine, parts.renderer, make_envs))
    held_out = HeldOut(_sets(parts, make), parts.reporter, parts.in_step, shown=False)
    found = InBackground(held_out, engine, parts.weights, parts.began, parts.late, parts.stopping)
    stack.push_async_callback(found.cancel)
    return found


def check_background(config: RunConfig) -> None:
    """Raises ConfigError if no second engine can be started."""
    if config.eval.background and config.engine.server.urls:
        raise ConfigError(
            "eval.background needs a second engine, and with engine.server.urls the run starts none: remove it or "
            "let the run start its servers"
        )


def _sets(parts: EvaluationParts, make: MakePlayer) -> list[EvalSet]:
    found = []
    for env, config in parts.config.by_env.items():
        content = parts.content.by_env[env]
        tasks = {"": content.held_out_tasks, **content.eval_sets}
        for name, settings in config.eval.by_set.items():
            filters = Filters(settings.top_p, settings.top_k, settings.min_p)
            player = make(env=env, temperature=settings.temperature, filters=filters)
            found.append(EvalSet(env, name, config, settings, tasks[name][: settings.tasks], player))
    return [each for each in found if each.tasks]
