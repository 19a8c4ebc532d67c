"""Routing replay: the policy's routers take the experts that the sampler's routers chose.

Sampler and learner round differently, so a router whose scores are close chooses other experts, and the token's
log-probability jumps. With the sampler's experts in both, only the rounding is left; gradients reach the router by
the weights that it gives to them. Source: Ma et al. 2025, arXiv:2510.11370 (Rollout Routing Replay).
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from agentrl.algo.metrics import Metric, Metrics
from agentrl.config.run import RunConfig
from agentrl.errors import ConfigError
from agentrl.learner.logprobs import forward
from agentrl.learner.pack import Packed, pack
from agentrl.learner.sequence import SequenceRanks
from agentrl.learner.shard import settle
from agentrl.models.model_config import any_config
from agentrl.models.routers import RouteReplay
from agentrl.types import Sample


def refuse_replay(config: RunConfig) -> None:
    """Check, before anything is loaded, that `learner.replay_routes` can have an effect.

    Raises:
        ConfigError: the engine does not return routes, or the model has no experts.
    """
    if not config.learner.replay_routes:
        return
    if config.engine.kind == "vllm":
        raise ConfigError(
            "learner.replay_routes works with the local engine and with SGLang, and engine.kind is vllm, which "
            "agentrl does not ask for the experts of its tokens: remove it, or set engine.kind to sglang"
        )
    if config.model.path is None:
        raise ConfigError("learner.replay_routes needs a model with experts, and model.tiny has none: remove it")
    where = f"model.path {config.model.path}"
    text = any_config(Path(config.model.path), where).get_text_config()
    if not any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ConfigError(
            f"learner.replay_routes needs a model with experts, and {where} ({text.model_type}) has none: "
            "remove it"
        )


def check_replay(model: PreTrainedModel, replay: RouteReplay | None, ranks: SequenceRanks | None) -> None:
    """Check on a few tokens that the routers take other experts than their own; all ranks must ask at once.

    Raises:
        ConfigError: they do not, on all ranks alike.
    """
    if replay is None:
        return
    ids = (0,) * (2 if ranks is None else 2 * ranks.size)
    nothing = (0.0,) * len(ids)
    row = Sample(ids, (False, *(True,) * (len(ids) - 1)), nothing, nothing, (0,) * len(ids), episode_id="")
    device = next(model.parameters()).device
    with torch.no_grad(), replay.trying():
        forward(model, pack([row], device, together=ranks).part())
    settle(model)


def route_metrics(replay: RouteReplay | None, packed: Packed) -> Metrics:
    """What was replayed in the forward pass of a batch, of which this rank may have computed a piece."""
    counts = None if replay is None else replay.counts()
    if replay is None or counts is None:
        return {}
    found_3 = torch.stack(counts).double()
    if packed.spans.sequence is not None:
        dist.all_reduce(found_3, group=packed.spans.sequence.group)
    tokens, tokens_differ, experts_differ = found_3
    return {
        "routes/replayed": Metric("mean", tokens, tokens.new_tensor(len(packed.ids_T))),
        "routes/tokens_differ": Metric("mean", tokens_differ, tokens),
        "routes/experts_differ": Metric("mean", experts_differ, tokens * replay.shape.layers * replay.top_k),
    }
