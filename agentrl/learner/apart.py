"""Models that cannot compute rows end to end: each row is a line of a padded batch.

Convolutions, recurrent states and indexed attention mix the tokens of a packed batch, and some attention (sinks,
bounded scores, chunks) is not what `packed_attention` computes. Such a model runs as transformers has it, on whole
rows, padded on the right, where no token sees the padding. The batch stays a prefix tree for everything else: the
output at a shared token is read from one of its rows, so losses and gradients are the same. Only the time differs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl.errors import ConfigError
from agentrl.learner.attention.packed import Spans, check_attention
from agentrl.learner.prefix_tree import path_positions
from agentrl.models.trial import ALONE, ENDS, SHARED, probe, use_own_attention, with_eager_attention

_APART = "_agentrl_rows_apart"
"""Set on a model that computes rows apart."""


class PaddedRows(NamedTuple):
    """The rows of a prefix tree of T tokens, one for each leaf: B rows of at most L tokens.

    `flat_BL` is the flat position of each token (in the padding, of the row's last token); `place_T` is the place
    of each flat position in the flattened B x L, in the first row that has it.
    """

    flat_BL: Tensor
    place_T: Tensor


def padded_rows(spans: Spans, _window: int | None = None) -> PaddedRows:
    """Unfold a prefix tree into rows; a row that is the beginning of another is part of that one."""
    inner = {span.parent for span in spans.rows}
    paths = [path_positions(spans.rows, number) for number in range(len(spans.rows)) if number not in inner]
    longest = max(map(len, paths))
    place_T = np.zeros(spans.tokens, np.int64)
    for number, path in reversed(list(enumerate(paths))):
        place_T[path] = number * longest + np.arange(len(path))
    flat_BL = np.stack([np.pad(path, (0, longest - len(path)), mode="edge") for path in paths])
    return PaddedRows(torch.from_numpy(flat_BL).to(spans.device), torch.from_numpy(place_T).to(spans.device))


def rows_apart(model: nn.Module) -> bool:
    """Whether the model computes each row apart."""
    return bool(getattr(model, _APART, False))


def models_apart(models: Iterable[nn.Module]) -> tuple[str, ...]:
    """The classes of these models that compute each row apart."""
    return tuple(dict.fromkeys(type(model).__name__.removeprefix("FSDP") for model in models if rows_apart(model)))


def compute_apart(model: nn.Module) -> None:
    """Have the model compute each row apart, with the attention that transformers gives it."""
    setattr(model, _APART, True)
    if isinstance(model, PreTrainedModel):
        use_own_attention(model)


def settle_rows(model: PreTrainedModel, where: str) -> None:
    """Find out how the model computes several rows exactly: packed if it can, else each apart.

    Raises:
        ConfigError: neither gives what it computes for each row alone.
    """
    try:
        check_attention(model, where)
    except ConfigError:
        compute_apart(model)
        _check_apart(model, where)


def _check_apart(model: PreTrainedModel, where: str) -> None:
    """Check that the model's outputs for padded rows equal those for each row alone. Raises ConfigError."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    wanted = [(*SHARED, *ENDS[0]), (*SHARED, *ENDS[1]), ALONE]
    device = next(model.parameters()).device
    rows = [torch.tensor([token % vocabulary for token in row], device=device) for row in wanted]

    def hidden(tried: PreTrainedModel, ids_BL: Tensor) -> Tensor:
        found: Tensor = tried.base_model(input_ids=ids_BL, use_cache=False)[0]
        return found

    def padded(tried: PreTrainedModel) -> Tensor:
        found = hidden(tried, nn.utils.rnn.pad_sequence(rows, batch_first=True))
        return torch.cat([found[number, : len(row)] for number, row in enumerate(rows)])

    def alone(tried: PreTrainedModel) -> list[Tensor]:
        plain = with_eager_attention(tried)
        return [hidden(plain, row[None])[0] for row in rows]

    probe(model, padded, alone, where=where, advice=_ADVICE, together="in a padded batch")


_ADVICE = (
    "so the learner's log-probabilities would differ from the sampler's; use a decoder whose tokens depend on "
    "nothing but the tokens before them, such as Qwen, Llama or Mistral"
)
