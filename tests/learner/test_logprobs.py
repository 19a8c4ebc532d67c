"""Chunks of logits give what the whole matrix gives, and the whole matrix never exists."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from agentrl.learner.logprobs import TokenStats, forward, know_head, token_stats
from agentrl.learner.pack import pack
from agentrl.learner.policy_model import load_policy
from tests.learner.train_models import VOCABULARY, gradients, make_batch

EVERYTHING = frozenset({"entropy", "sum_pi_squared"})


@pytest.fixture
def model(policy_dir: Path):
    return load_policy(policy_dir, torch.device("cpu")).double()


def backward(stats: TokenStats, model: nn.Module) -> Tensor:
    model.zero_grad()
    (stats.logprobs_N.sum() + 0.3 * stats.entropy_N.square().sum()).backward()
    return gradients(model)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_values_and_gradients_are_those_of_the_whole_matrix(model, chunk: int):
    packed = pack(make_batch(1), dtype=torch.float64)
    given = {"temperature": 0.7, "wanted": EVERYTHING, "entropy_gradient": True}
    whole = token_stats(model, packed, chunk=0, **given)
    wanted = backward(whole, model)
    chunked = token_stats(model, packed, chunk=chunk, **given)
    for ours, theirs in zip(chunked[:3], whole[:3], strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
    assert torch.allclose(backward(chunked, model), wanted, rtol=0, atol=1e-10)
    logits_NV = forward(model, packed).detach() / 0.7
    probs_NV = torch.softmax(logits_NV, dim=-1)
    assert torch.allclose(whole.entropy_N, torch.distributions.Categorical(probs_NV).entropy())
    assert torch.allclose(whole.sum_pi_squared_N, probs_NV.square().sum(-1))


@pytest.mark.parametrize("chunk", [0, 1, 7])
def test_other_ids_and_the_likeliest_in_the_place_of_each_token(model, chunk: int):
    packed = pack(make_batch(1), dtype=torch.float64)
    table_NV = torch.log_softmax(forward(model, packed).detach() / 0.7, dim=-1)
    best = token_stats(model, packed, temperature=0.7, chunk=chunk, likeliest=5, vocabulary=100).likeliest
    assert best is not None
    wanted = table_NV[:, :100].topk(5, dim=-1)
    assert torch.equal(best.ids_Nk, wanted.indices)
    assert torch.allclose(best.logprobs_Nk, wanted.values, rtol=0, atol=1e-12)
    given = {"temperature": 0.7, "chunk": chunk, "wanted": EVERYTHING, "entropy_gradient": True}
    stats, plain = (token_stats(model, packed, at_Nk=at, **given) for at in (best.ids_Nk, None))
    assert torch.allclose(stats.at_Nk, wanted.values, rtol=0, atol=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(stats[:3], plain[:3], strict=True)), "the rest is as without them"
    model.zero_grad()
    stats.at_Nk.square().sum().backward()
    found = gradients(model)
    model.zero_grad()
    logits_NV = forward(model, packed) / 0.7
    torch.log_softmax(logits_NV, dim=-1).gather(1, best.ids_Nk).square().sum().backward()
    assert torch.allclose(found, gradients(model), rtol=0, atol=1e-9)


@pytest.mark.parametrize("chunk", [0, 512])
def test_the_gradient_is_the_same_each_time(policy_dir: Path, chunk: int):
    """Threads that add up the gradients of shared tokens as they arrive would give other last bits."""
    model = load_policy(policy_dir, torch.device("cpu"))
    packed, found = pack(make_batch(1, groups=40, size=16), dtype=torch.float32), set()
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for _ in range(6):
            model.zero_grad()
            token_stats(model, packed, chunk=chunk).logprobs_N.sum().backward()
            found.add(gradients(model).numpy().tobytes())
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1


def test_no_more_logits_exist_than_one_chunk_has(model):
    packed, seen = pack(make_batch(1)), []
    head = model.get_output_embeddings()
    plain = type(head).forward

    class Watched(type(head)):
        def forward(self, hidden: Tensor) -> Tensor:
            logits = plain(self, hidden)
            seen.append(logits.numel())
            return logits

    head.__class__ = Watched
    token_stats(model, packed, chunk=16).logprobs_N.sum().backward()
    assert max(seen) == 16 * VOCABULARY
    positions = packed.source_N.unique().numel()
    assert positions < packed.ids_N.numel(), "some predict several tokens"
    assert sum(seen) == 2 * positions * VOCABULARY, "made once forward and once backward"
    assert "forward" not in head.__dict__, "the model is left as it was"


def test_a_model_that_changes_its_logits_behind_the_head_is_found_out(model):
    """Some families scale or bound them there; for these all logits are made."""
    packed = pack(make_batch(2), dtype=torch.float64)

    class Bounded(type(model)):
        def forward(self, *args: object, **given: object):
            out = super().forward(*args, **given)
            out.logits = 3.0 * torch.tanh(out.logits / 3.0)
            return out

    model.__class__ = Bounded
    wanted = token_stats(model, packed, chunk=0).logprobs_N
    assert torch.equal(token_stats(model, packed, chunk=8).logprobs_N, wanted)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    token_stats(model, packed, chunk=8)
    assert len(calls) == 1, "known from now on"


def test_what_the_head_is_can_be_known_beforehand(model):
    know_head(model, torch.device("cpu"), torch.float64)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    token_stats(model, pack(make_batch(1), dtype=torch.float64), chunk=8)
    assert len(calls) == 1
