"""Check that ranks which split rows compute what one rank does: attention must be all that mixes tokens."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.config.run import RunConfig
from agentrl.errors import ConfigError
from agentrl.learner.apart import rows_apart
from agentrl.learner.pack import pack
from agentrl.learner.sequence import SequenceRanks
from agentrl.learner.shard import settle
from agentrl.models.model_config import any_config, state_layers, unsplittable
from agentrl.models.trial import ALONE, ENDS, SHARED, relative_gap, tolerance, unusual_layers
from agentrl.types import Sample


def refuse_unsplittable(config: RunConfig) -> None:
    """Check, from the configs of the models alone, that `learner.sequence_ranks` can split their rows.

    Raises:
        ConfigError: a model has layers that carry a state along the row, or fewer attention heads than ranks.
    """
    ranks = config.learner.sequence_ranks
    if ranks == 1:
        return
    own = None if config.critic is None else config.critic.path
    for where, path in (("model.path", config.model.path), ("critic.path", own)):
        if path is not None:
            read = any_config(Path(path), f"{where} {path}").get_text_config()
            if kinds := state_layers(read):
                raise ConfigError(f"{where} {path}: {unsplittable(read.model_type, kinds, ranks)}")
            _refuse_heads(ranks, int(read.num_attention_heads), f"{where} {path}")
    if config.model.tiny is not None:
        _refuse_heads(ranks, config.model.tiny.heads, "model.tiny")


def _refuse_heads(ranks: int, heads: int, where: str) -> None:
    if ranks > heads:
        raise ConfigError(
            f"{where}: the model has {heads} attention heads, and learner.sequence_ranks is {ranks}, each of "
            f"which needs one: set learner.sequence_ranks to {heads} or less"
        )


def check_sequence(model: PreTrainedModel, ranks: SequenceRanks | None, where: str) -> None:
    """Check a model on short rows, split over the ranks and whole; every rank must ask at the same time.

    Raises:
        ConfigError: the results differ, on all ranks alike.
    """
    if ranks is None:
        return
    if rows_apart(model):
        raise ConfigError(
            f"{where}: {model.config.model_type} models compute each row apart, as a whole, so "
            "learner.sequence_ranks cannot split their rows: remove it, or use a decoder whose tokens meet in "
            "plain attention only (Qwen3, Llama, Mistral and the like)"
        )
    with torch.no_grad():
        wanted = _hidden(model, None)
        own = ranks.own(torch.arange(1, len(wanted) + 1, device=wanted.device)).nonzero().squeeze(1)  # no padding
        found, wanted = _hidden(model, ranks)[own], ranks.own(wanted)[own]
    settle(model)
    gap = torch.zeros((), device=found.device)
    if len(own):
        gap.fill_(relative_gap(found, wanted)).nan_to_num_(torch.inf)
    dist.all_reduce(gap, dist.ReduceOp.MAX)
    if not float(gap) < (tolerance(model) if found.dtype == torch.float32 else 0.1):
        kinds = unusual_layers(model.config)
        why = f" (layers of kind {', '.join(kinds)})" if kinds else ""
        raise ConfigError(
            f"{where}: {model.config.model_type} models mix tokens outside attention{why}, so "
            f"learner.sequence_ranks would change what they compute (relative difference {float(gap):.1e}): "
            "remove it, or use a decoder whose tokens meet in attention only (Qwen, Llama, Mistral and the like)"
        )


def _hidden(model: PreTrainedModel, ranks: SequenceRanks | None) -> Tensor:
    """[t, D] what the body gives for this rank's tokens of the test rows."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    rows = [_row(ids, vocabulary) for ids in ((*SHARED, *ENDS[0]), (*SHARED, *ENDS[1]), ALONE)]
    part = pack(rows, next(model.parameters()).device, together=ranks).part()
    seen: list[Tensor] = []
    hook = model.base_model.register_forward_hook(lambda _, __, out: seen.append(out[0][0]))
    try:
        model(input_ids=part.ids_T[None], position_ids=part.positions_T[None], use_cache=False, spans=part.spans)
    finally:
        hook.remove()
    return seen[0]


def _row(ids: tuple[int, ...], vocabulary: int) -> Sample:
    tokens = tuple(token % vocabulary for token in ids)
    nothing = (0.0,) * len(tokens)
    return Sample(tokens, (False,) * len(tokens), nothing, nothing, (0,) * len(tokens), episode_id="")
