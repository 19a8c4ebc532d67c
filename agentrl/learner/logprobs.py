"""Log-probabilities and entropies of the trained tokens, in chunks, so that the N x V logits never exist at once.

The model's output layer returns numbers per token instead of logits: in the forward pass it computes the logits of
`chunk` tokens, reads the requested values and discards the logits; the backward pass recomputes them. Results and
gradients equal those of the full matrix.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from agentrl.learner.pack import Packed, PackedPart, pack
from agentrl.learner.picked import picked
from agentrl.types import Sample

Wanted = frozenset[str]
"""Of "entropy" and "sum_pi_squared": what to compute in addition to the log-probabilities."""


class TokenStats(NamedTuple):
    """Of the N trained tokens of a micro-batch, in float32 or better; None if not requested."""

    logprobs_N: Tensor
    entropy_N: Tensor | None = None
    sum_pi_squared_N: Tensor | None = None


def token_stats(
    model: PreTrainedModel,
    packed: Packed,
    *,
    temperature: float = 1.0,
    chunk: int = 0,
    wanted: Wanted = frozenset(),
    entropy_gradient: bool = False,
) -> TokenStats:
    """Statistics of the trained tokens under the model.

    Args:
        temperature: logits are divided by it.
        chunk: tokens whose logits exist at once; 0 makes all of them at once.
        wanted: what to compute in addition to the log-probabilities.
        entropy_gradient: whether gradients flow through the entropy.
    """

    def read(logits_CV: Tensor, ids_C: Tensor) -> Tensor:
        return token_columns(logits_CV, ids_C, temperature, wanted, entropy_gradient)

    part = packed.part()
    found_NC = _chunked(model, part, chunk, read) if chunk and part.ids_N.numel() > chunk else None
    if found_NC is None:
        found_NC = read(forward(model, part), part.ids_N)
    return _stats(part.whole(found_NC), wanted)


def know_head(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
    """Find out on two tokens whether the model's logits are what its output layer gives.

    `token_stats` would find out on its own, at the price of a second forward pass; ranks must agree on when.
    """
    two = Sample((0, 0), (False, True), (0.0, 0.0), (0.0, 0.0), (0, 0), episode_id="")
    with torch.no_grad():
        _chunked(
            model,
            pack([two], device, dtype).part(),
            1,
            lambda l_CV, i_C: token_columns(l_CV, i_C, 1.0, frozenset(), False),
        )


def forward(model: PreTrainedModel, part: PackedPart) -> Tensor:
    """[N, V] logits at the positions that predict the trained tokens; no others are computed.

    A position that predicts several tokens, such as the end of a shared prompt, is kept once; see `picked`.
    """
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is None or part.source_N.device.type != "cpu":
        return _logits(model, part, part.source_N)
    keep_U, number_N = torch.unique(part.source_N, return_inverse=True)
    if keep_U.numel() == part.source_N.numel():
        return _logits(model, part, part.source_N)
    inner = _forward_of(head)
    with _forward_is(head, lambda hidden_1UD: inner(picked(hidden_1UD[0], number_N)[None])):
        return _logits(model, part, keep_U)


def _logits(model: PreTrainedModel, part: PackedPart, keep: Tensor) -> Tensor:
    out = model(
        input_ids=part.ids_T[None],
        position_ids=part.positions_T[None],
        logits_to_keep=keep,
        use_cache=False,
        spans=part.spans,
    )
    logits: Tensor = out.logits[0]
    return logits


def token_columns(
    logits_CV: Tensor, ids_C: Tensor, temperature: float, wanted: Wanted, entropy_gradient: bool
) -> Tensor:
    """[C, 1 to 3] log-probability of each id, entropy in nats, sum of squared probabilities; nan if not wanted."""
    logits_CV = logits_CV.to(torch.promote_types(torch.float32, logits_CV.dtype))
    if temperature != 1.0:
        logits_CV = logits_CV / temperature
    logprobs_C = -nn.functional.cross_entropy(logits_CV, ids_C, reduction="none")
    columns = [logprobs_C]
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        if wanted:
            table_CV = torch.log_softmax(logits_CV, dim=-1)
            probs_CV = table_CV.exp()
        if "entropy" in wanted:
            # 0 * -inf would be nan; the masked value keeps the gradient finite as well.
            columns.append(-(probs_CV * table_CV.masked_fill(probs_CV == 0, 0.0)).sum(-1))
        if "sum_pi_squared" in wanted:
            columns.append(probs_CV.square().sum(-1))
    return torch.stack(columns, dim=-1)


def _stats(found_NC: Tensor, wanted: Wanted) -> TokenStats:
    names = ["logprobs_N", *(f"{name}_N" for name in ("entropy", "sum_pi_squared") if name in wanted)]
    return TokenStats(**dict(zip(names, found_NC.unbind(-1), strict=True)))


def _chunked(
    model: PreTrainedModel, part: PackedPart, chunk: int, read: Callable[[Tensor, Tensor], Tensor]
) -> Tensor | None:
    """What `read` gives for all tokens, chunk by chunk; None if the model changes what its output layer says.

    Some families scale or bound their logits behind the output layer, which would act on our numbers instead.
    """
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    fits: bool | None = getattr(model, _FITS, None)
    if head is None or fits is False:
        return None
    plain = _forward_of(head)
    given: list[Tensor] = []

    def piece(hidden_CD: Tensor, ids_C: Tensor) -> Tensor:
        return read(plain(hidden_CD), ids_C)

    def instead(hidden_1ND: Tensor) -> Tensor:
        pieces = [
            checkpoint(piece, hidden_CD, ids_C, use_reentrant=False, preserve_rng_state=False)[None]
            for hidden_CD, ids_C in zip(
                torch.split(hidden_1ND[0], chunk), torch.split(part.ids_N, chunk), strict=True
            )
        ]
        given.append(torch.cat(pieces, dim=1))  # no view of it: FSDP hooks into what it is given
        return given[0]

    with _forward_is(head, instead):
        found_NC = forward(model, part)
    if fits is None:  # the first time that this model is asked
        given_NC = given[0][0]
        fits = found_NC.shape == given_NC.shape and torch.allclose(found_NC, given_NC, 0.0, 0.0, equal_nan=True)
        setattr(model, _FITS, fits)
    return found_NC if fits else None


_FITS = "_agentrl_logits_are_final"
"""Set on a model: whether what its output layer gives is what the model gives."""


Forward = Callable[[Tensor], Tensor]


class _Switch:
    """Stands for the forward function of a module while threads replace it, each for itself."""

    def __init__(self, module: nn.Module) -> None:
        self.plain, self.own, self.users = module.forward, module.__dict__.get("forward"), 0
        self.here = threading.local()

    @property
    def function(self) -> Forward:
        """What this thread computes."""
        function: Forward = getattr(self.here, "function", self.plain)
        return function

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.function(hidden)


_switching = threading.Lock()


def _forward_of(module: nn.Module) -> Forward:
    """What calling the module, without its hooks, computes in this thread."""
    with _switching:
        forward = module.forward
        return forward.function if isinstance(forward, _Switch) else forward


@contextmanager
def _forward_is(module: nn.Module, function: Forward) -> Iterator[None]:
    """Within the block, calling the module in this thread (with its hooks) calls `function`."""
    with _switching:
        forward = module.forward
        switch = forward if isinstance(forward, _Switch) else _Switch(module)
        module.__dict__["forward"] = switch
        switch.users += 1
    inner, switch.here.function = switch.function, function
    try:
        yield
    finally:
        switch.here.function = inner
        with _switching:
            switch.users -= 1
            if not switch.users:
                del module.__dict__["forward"]
                if switch.own is not None:
                    module.__dict__["forward"] = switch.own
