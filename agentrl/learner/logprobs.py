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

from agentrl.learner.apart import padded_rows, rows_apart
from agentrl.learner.pack import Packed, PackedPart, pack
from agentrl.learner.picked import picked
from agentrl.types import Sample

Wanted = frozenset[str]
"""Of "entropy" and "sum_pi_squared": what to compute in addition to the log-probabilities."""


class Likeliest(NamedTuple):
    """The k most likely tokens in the place of each trained token, the first of them the likeliest."""

    ids_Nk: Tensor
    logprobs_Nk: Tensor


class TokenStats(NamedTuple):
    """Of the N trained tokens of a micro-batch, in float32 or better; None if not requested."""

    logprobs_N: Tensor
    entropy_N: Tensor | None = None
    sum_pi_squared_N: Tensor | None = None
    at_Nk: Tensor | None = None
    likeliest: Likeliest | None = None

    def first(self, count: int) -> TokenStats:
        """Of the first tokens only."""
        values = (self.logprobs_N, self.entropy_N, self.sum_pi_squared_N, self.at_Nk)
        return TokenStats(*(None if value is None else value[:count] for value in values))  # type: ignore[arg-type]


def token_stats(
    model: PreTrainedModel,
    packed: Packed,
    *,
    temperature: float = 1.0,
    chunk: int = 0,
    wanted: Wanted = frozenset(),
    entropy_gradient: bool = False,
    at_Nk: Tensor | None = None,
    likeliest: int = 0,
    vocabulary: int | None = None,
) -> TokenStats:
    """Statistics of the trained tokens under the model.

    Args:
        temperature: logits are divided by it.
        chunk: tokens whose logits exist at once; 0 makes all of them at once.
        wanted: what to compute in addition to the log-probabilities.
        entropy_gradient: whether gradients flow through the entropy.
        at_Nk: k more ids in the place of each trained token whose log-probabilities are wanted.
        likeliest: how many of the likeliest tokens in each place are wanted, at most all.
        vocabulary: the likeliest are among the ids below this.
    """

    def read(logits_CV: Tensor, ids_NK: Tensor, row_N: Tensor | None) -> Tensor:
        columns_NC = token_columns(logits_CV, ids_NK, temperature, wanted, entropy_gradient, row_N)
        if not likeliest:
            return columns_NC
        best_NK = _likeliest(logits_CV, likeliest, temperature, vocabulary, row_N)
        return torch.cat([columns_NC, best_NK], dim=-1)

    part = packed.part()
    predicting = _predicting(part)
    ids_NK = part.ids_N if at_Nk is None else torch.cat([part.ids_N[:, None], part.own(at_Nk)], dim=-1)
    many = chunk and predicting.source_U.numel() > chunk
    found_NC = _chunked(model, part, predicting, ids_NK, chunk, read) if many else None
    if found_NC is None:
        found_NC = read(_logits(model, part, predicting.source_U), ids_NK, predicting.row_N)
    return _stats(part.whole(found_NC), wanted, 0 if at_Nk is None else at_Nk.shape[1])


def know_head(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
    """Find out on two tokens whether the model's logits are what its output layer gives.

    `token_stats` would find out on its own, at the price of a second forward pass; ranks must agree on when.
    """
    two = Sample((0, 0), (False, True), (0.0, 0.0), (0.0, 0.0), (0, 0), episode_id="")
    with torch.no_grad():
        part = pack([two], device, dtype).part()
        _chunked(
            model,
            part,
            _predicting(part),
            part.ids_N,
            1,
            lambda l_CV, ids_N, row_N: token_columns(l_CV, ids_N, 1.0, frozenset(), False, row_N),
        )


def forward(model: PreTrainedModel, part: PackedPart) -> Tensor:
    """[N, V] logits at the positions that predict the trained tokens; no others are computed."""
    return _logits(model, part, part.source_N)


class _Predicting(NamedTuple):
    """The U positions that predict the trained tokens, and which of them predicts each token; None: U is N, and
    each its own."""

    source_U: Tensor
    row_N: Tensor | None


def _predicting(part: PackedPart) -> _Predicting:
    """On a CPU, a position that predicts several tokens, such as the end of a shared prompt, is computed once."""
    if part.source_N.device.type != "cpu":
        return _Predicting(part.source_N, None)
    source_U, row_N = torch.unique(part.source_N, return_inverse=True)
    distinct = source_U.numel() == part.source_N.numel()
    return _Predicting(part.source_N, None) if distinct else _Predicting(source_U, row_N)


def _logits(model: PreTrainedModel, part: PackedPart, keep: Tensor) -> Tensor:
    if rows_apart(model):
        return _logits_apart(model, part, keep)
    out = model(
        input_ids=part.ids_T[None],
        position_ids=part.positions_T[None],
        logits_to_keep=keep,
        use_cache=False,
        spans=part.spans,
    )
    logits: Tensor = out.logits[0]
    return logits


def _logits_apart(model: PreTrainedModel, part: PackedPart, keep_U: Tensor) -> Tensor:
    """[U, V] logits at these flat positions, from rows that are each a line of a padded batch."""
    rows = part.spans.plan(padded_rows, None)
    place_U = rows.place_T[keep_U]
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    picked_already: list[bool] = []

    def instead(hidden_BLD: Tensor) -> Tensor:
        picked_already.append(True)
        return plain(picked(hidden_BLD.flatten(0, 1), place_U)[None])

    if head is None:
        out = model(input_ids=part.ids_T[rows.flat_BL], use_cache=False)
    else:
        plain = _forward_of(head)
        with _forward_is(head, instead):
            out = model(input_ids=part.ids_T[rows.flat_BL], use_cache=False)
    logits: Tensor = out.logits[0] if picked_already else picked(out.logits.flatten(0, 1), place_U)
    return logits


def token_columns(
    logits_CV: Tensor,
    ids_N: Tensor,
    temperature: float,
    wanted: Wanted,
    entropy_gradient: bool,
    row_N: Tensor | None = None,
) -> Tensor:
    """[N, 1 to 3] log-probability of each id, entropy in nats, sum of squared probabilities, as far as wanted.

    Args:
        ids_N: [N], or [N, K] for the log-probabilities of several ids in each place: K columns instead of 1.
        row_N: the row of the logits that predicts each id; None: C is N, and each has its own.
    """
    table_CV = _log_softmax(logits_CV, temperature)
    ids_NK = ids_N if ids_N.dim() == 2 else ids_N[:, None]
    if row_N is None:
        columns = [table_CV.gather(1, ids_NK)]
    else:
        columns = [picked(table_CV.flatten(), row_N[:, None] * table_CV.shape[1] + ids_NK)]
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        if wanted:
            probs_CV = table_CV.exp()
        if "entropy" in wanted:
            # 0 * -inf would be nan; the masked value keeps the gradient finite as well.
            entropy_C = -(probs_CV * table_CV.masked_fill(probs_CV == 0, 0.0)).sum(-1)
            columns.append((entropy_C if row_N is None else picked(entropy_C, row_N))[:, None])
        if "sum_pi_squared" in wanted:
            squares_C = probs_CV.square().sum(-1)
            columns.append((squares_C if row_N is None else picked(squares_C, row_N))[:, None])
    return torch.cat(columns, dim=-1)


def _log_softmax(logits_CV: Tensor, temperature: float) -> Tensor:
    logits_CV = logits_CV.to(torch.promote_types(torch.float32, logits_CV.dtype))
    return torch.log_softmax(logits_CV if temperature == 1.0 else logits_CV / temperature, dim=-1)


def _likeliest(
    logits_CV: Tensor, count: int, temperature: float, vocabulary: int | None, row_N: Tensor | None
) -> Tensor:
    """[N, 2k] log-probabilities of the likeliest ids, and these ids, which a float32 holds exactly."""
    table_CV = _log_softmax(logits_CV, temperature)[:, :vocabulary]
    best = table_CV.topk(min(count, table_CV.shape[1]), dim=-1)
    found_CK = torch.cat([best.values, best.indices.to(best.values.dtype)], dim=-1)
    return found_CK if row_N is None else picked(found_CK, row_N)


def _stats(found_NC: Tensor, wanted: Wanted, at: int) -> TokenStats:
    names = [name for name in ("entropy", "sum_pi_squared") if name in wanted]
    first, rest = 1 + at, 1 + at + len(names)
    also = {name: found_NC[:, first + number] for number, name in enumerate(names)}
    stats = TokenStats(found_NC[:, 0], also.get("entropy"), also.get("sum_pi_squared"))
    if at:
        stats = stats._replace(at_Nk=found_NC[:, 1:first])
    if count := (found_NC.shape[1] - rest) // 2:
        ids_Nk = found_NC[:, rest + count :].long()
        stats = stats._replace(likeliest=Likeliest(ids_Nk, found_NC[:, rest : rest + count]))
    return stats


def _chunked(
    model: PreTrainedModel,
    part: PackedPart,
    predicting: _Predicting,
    ids_N: Tensor,
    chunk: int,
    read: Callable[[Tensor, Tensor, Tensor | None], Tensor],
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

    def piece(hidden_CD: Tensor, ids_N: Tensor, row_N: Tensor | None) -> Tensor:
        return read(plain(hidden_CD), ids_N, row_N)

    def instead(hidden_1UD: Tensor) -> Tensor:
        tokens, order_N = _in_chunks(ids_N, predicting, chunk)
        pieces = [
            checkpoint(piece, hidden_CD, ids_N, row_N, use_reentrant=False, preserve_rng_state=False)
            for hidden_CD, (ids_N, row_N) in zip(torch.split(hidden_1UD[0], chunk), tokens, strict=True)
        ]
        found_NC = torch.cat(pieces)
        found_NC = found_NC if order_N is None else picked(found_NC, order_N)
        given.append(torch.stack([found_NC]))  # no view: FSDP hooks into what it is given
        return given[0]

    with _forward_is(head, instead):
        found_NC = _logits(model, part, predicting.source_U)
    if fits is None:  # the first time that this model is asked
        given_NC = given[0][0]
        fits = found_NC.shape == given_NC.shape and torch.allclose(found_NC, given_NC, 0.0, 0.0, equal_nan=True)
        setattr(model, _FITS, fits)
    return found_NC if fits else None


def _in_chunks(
    ids_N: Tensor, predicting: _Predicting, chunk: int
) -> tuple[list[tuple[Tensor, Tensor | None]], Tensor | None]:
    """The tokens that each chunk of the positions predicts, with the rows of these in it, and where each token of
    the batch is among them; None: they have its order."""
    if predicting.row_N is None:
        return [(part, None) for part in torch.split(ids_N, chunk)], None
    order_N = torch.argsort(predicting.row_N, stable=True)
    row_N = predicting.row_N[order_N]
    ends = torch.searchsorted(row_N, torch.arange(chunk, predicting.source_U.numel(), chunk)).tolist()
    parts = zip(ids_N[order_N].tensor_split(ends), row_N.tensor_split(ends), strict=True)
    return [(ids, row - chunk * number) for number, (ids, row) in enumerate(parts)], torch.argsort(order_N)


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
