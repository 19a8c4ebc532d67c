"""Rows packed end to end with shared beginnings are the rows one by one, in value and in gradient."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.learner.logprobs import forward as forward_logits
from agentrl.learner.pack import as_taught, micro_batches, pack
from agentrl.learner.policy_model import load_policy
from agentrl.types import HintedOpening, Routes, Sample
from tests.learner.train_models import (
    VOCABULARY,
    double,
    gradients,
    make_batch,
    make_sample,
    plain_model,
    relative,
)

PROMPT = [5, 17, 3, 88, 41]


def one_by_one(model: torch.nn.Module, samples: list[Sample]) -> Tensor:
    """[N, V] logits that predict the trained tokens, each row on its own."""
    found = []
    for sample in samples:
        logits_LV = model(input_ids=torch.tensor([sample.ids]), use_cache=False).logits[0]
        found += [logits_LV[t - 1] for t, on in enumerate(sample.loss_mask) if on]
    return torch.stack(found)


def ragged() -> list[Sample]:
    return make_batch(1)


def single_rows() -> list[Sample]:
    return [make_sample([4, 9, 2 + g, 7][: 2 + g], {1}, episode=f"e{g}", group=g) for g in range(3)]


def prompt_shared_whole() -> list[Sample]:
    """The first token of every completion is predicted by the last of the shared beginning."""
    return [make_sample([*PROMPT, t, 50 + t], {5, 6}, episode=f"e{t}") for t in range(4)]


def equal_rows() -> list[Sample]:
    return [make_sample([*PROMPT, 1, 2], {5, 6}, episode=f"e{t}", advantage=float(t)) for t in range(3)]


def one_row_is_the_beginning_of_another() -> list[Sample]:
    return [make_sample(PROMPT, {4}, episode="a"), make_sample([*PROMPT, 6, 7], {6}, episode="b")]


def nothing_shared() -> list[Sample]:
    return [make_sample([t, *PROMPT], {2, 5}, episode=f"e{t}") for t in range(3)]


def forks() -> list[Sample]:
    """Two episodes of four turns whose thinking is dropped from the history: each turn is a row."""
    rng = random.Random(5)
    found = []
    for episode in "ab":
        history = list(PROMPT)
        for turn in range(4):
            thought, said = ([rng.randrange(VOCABULARY) for _ in range(n)] for n in (6, 3))
            row = [*history, *thought, *said]
            found.append(
                make_sample(row, set(range(len(history), len(row))), episode=episode, advantage=turn - 1.5)
            )
            history += [*said, *(rng.randrange(VOCABULARY) for _ in range(4))]
    return found


def random_trees() -> list[Sample]:
    """Few different tokens, so that rows branch everywhere, end inside others, and are equal."""
    rng = random.Random(8)
    rows = [[rng.randrange(2) for _ in range(rng.randrange(2, 14))] for _ in range(24)]
    return [
        make_sample(row, set(range(rng.randrange(1, len(row)), len(row))), episode=f"e{n // 2}", group=n // 8)
        for n, row in enumerate(rows)
    ]


def very_different_lengths() -> list[Sample]:
    rng = random.Random(3)
    lengths = (1, 2, 40, 170)
    rows = [[*PROMPT, *(rng.randrange(VOCABULARY) for _ in range(n))] for n in lengths]
    return [make_sample(row, {5, len(row) - 1}, episode=str(len(row))) for row in rows]


BATCHES = [
    ragged,
    single_rows,
    prompt_shared_whole,
    equal_rows,
    one_row_is_the_beginning_of_another,
    nothing_shared,
    very_different_lengths,
    forks,
    random_trees,
]


@pytest.mark.parametrize("make", BATCHES)
@pytest.mark.parametrize(("cast", "bound"), [(torch.nn.Module.float, 1e-5), (double, 1e-10)])
def test_packed_is_one_by_one(policy_dir: Path, make, cast, bound: float):
    samples = sorted(make(), key=lambda s: s.group)  # the order in which groups are packed
    packed_model = cast(load_policy(policy_dir, torch.device("cpu")))
    plain = cast(plain_model(policy_dir))
    packed = pack(samples)
    found_NV, wanted_NV = forward_logits(packed_model, packed), one_by_one(plain, samples)
    assert found_NV.shape == wanted_NV.shape
    assert relative(found_NV, wanted_NV) < bound

    torch.manual_seed(0)
    weights_NV = torch.randn_like(wanted_NV)
    (found_NV * weights_NV).sum().backward()
    (wanted_NV * weights_NV).sum().backward()
    assert relative(gradients(packed_model), gradients(plain)) < bound


def test_what_rows_share_is_laid_down_once():
    samples = prompt_shared_whole()
    packed = pack(samples)
    assert packed.ids_T.tolist() == [*PROMPT, 0, 50, 1, 51, 2, 52, 3, 53]
    assert packed.positions_T.tolist() == [0, 1, 2, 3, 4, *[5, 6] * 4]
    assert packed.source_N.tolist() == [4, 5, 4, 7, 4, 9, 4, 11]
    assert packed.ids_N.tolist() == [0, 50, 1, 51, 2, 52, 3, 53]
    assert packed.sequence_N.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert packed.sampler_logprobs_N.tolist() == pytest.approx([-1.05, -1.06] * 4)


def test_groups_share_what_they_have_in_common():
    samples = [make_sample([*PROMPT, t], {5}, episode=f"e{t}", group=t // 2) for t in range(4)]
    assert pack(samples).ids_T.tolist() == [*PROMPT, 0, 1, 2, 3]


def test_a_token_that_two_rows_train_is_there_once_and_has_two_losses():
    samples = [make_sample([*PROMPT, 9, t], {5, 6}, episode=f"e{t}") for t in range(2)]
    packed = pack(samples)
    assert packed.ids_T.tolist() == [*PROMPT, 9, 0, 1]
    assert packed.source_N.tolist() == [4, 5, 4, 5]
    assert packed.ids_N.tolist() == [9, 0, 9, 1]


def test_a_shared_token_has_the_route_of_the_first_row_that_knows_it():
    rows = equal_rows()
    length = len(rows[0].ids)
    experts = [b"\xff" * length, b"\0\1" + b"\xff" * (length - 2), b"\2" * length]
    rows = [
        replace(row, routes=Routes(data, layers=1, top_k=1, width=1))
        for row, data in zip(rows, experts, strict=True)
    ]
    assert pack(rows).routes_TLk.flatten().tolist() == [0, 1] + [2] * (length - 2)


def test_each_place_behind_a_shared_beginning_has_its_own_route():
    rows = [make_sample([*PROMPT, t, 50 + t], {5, 6}, episode=f"e{t}") for t in range(2)]
    experts = [bytes([0, 1, 2, 3, 4, 5, 6]), bytes([9, 9, 9, 9, 9, 7, 8])]
    rows = [
        replace(row, routes=Routes(data, layers=1, top_k=1, width=1))
        for row, data in zip(rows, experts, strict=True)
    ]
    assert pack(rows).routes_TLk.flatten().tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    hinted = replace(rows[1], hinted=HintedOpening(2, (60, 61, 62)))
    taught = as_taught(hinted)
    assert taught.ids == (60, 61, 62, *PROMPT[2:], 1, 51)
    assert taught.loss_mask == (False,) * 6 + (True, True)
    assert pack([taught]).routes_TLk is None, "the teacher's experts are its own"


def test_each_token_has_its_own_advantage():
    row = replace(make_sample([1, 2, 3, 4], {1, 3}), advantages=(9.0, 0.5, 9.0, -2.0))
    assert pack([row]).advantages_N.tolist() == [0.5, -2.0]


def test_rows_of_one_episode_have_one_number():
    samples = [make_sample([1, 2], {1}, episode=e) for e in ("a", "b", "a")]
    assert pack(samples).sequence_N.tolist() == [0, 1, 0]


def test_a_first_token_cannot_be_trained():
    with pytest.raises(ValueError, match="episode g0/e1: the first token of a row cannot be trained"):
        pack([make_sample([1, 2, 3], {0, 2}, episode="g0/e1")])


@pytest.mark.parametrize("seed", range(5))
def test_micro_batches_hold_every_row_once_and_episodes_together(seed: int):
    samples = make_batch(seed)
    parts = micro_batches(samples, 90)
    assert len(parts) > 2
    assert sorted(map(id, (s for part in parts for s in part))) == sorted(map(id, samples))
    for part in parts:
        assert pack(part).ids_T.numel() <= 90
    homes = {(s.episode_id, number) for number, part in enumerate(parts) for s in part}
    assert len(homes) == len({s.episode_id for s in samples})


def test_a_group_stays_together_and_counts_its_prompt_once():
    rows = [make_sample([*PROMPT, 10 + n], {len(PROMPT)}, episode=f"e{n}", group=n % 2) for n in range(8)]
    size = len(PROMPT) + 4
    for room in (size, size + 3):
        parts = micro_batches(rows, room)
        assert [{row.group for row in part} for part in parts] == [{0}, {1}]
        assert [pack(part).ids_T.numel() for part in parts] == [size, size]
    assert len(micro_batches(rows, 2 * size)) == 1
    assert len(micro_batches(rows, size - 1)) == 4


def test_groups_go_in_by_size_each_into_the_first_micro_batch_with_room():
    rows = [
        make_sample(range(10 * g, 10 * g + n), {1}, episode=f"e{g}", group=g)
        for g, n in enumerate((2, 4, 5, 3, 4))
    ]
    found = [[row.group for row in part] for part in micro_batches(rows, 9)]
    assert found == [[2, 1], [4, 3, 0]]  # 5 + 4 and 4 + 3 + 2 tokens


@pytest.mark.parametrize("apart", [False, True])
def test_the_hint_of_a_teacher_takes_room(apart: bool):
    row = replace(make_sample([1, 2, 3, 4], {2}), hinted=HintedOpening(1, (60, 61, 62, 63, 64, 65)))
    assert micro_batches([row], 9, apart=apart) == [[row]]
    with pytest.raises(ConfigError, match="has 9 tokens, and a micro-batch takes 8"):
        micro_batches([row], 8, apart=apart)


def test_an_episode_that_fits_nowhere_is_named_with_what_to_do():
    samples = [make_sample(range(60), {1}, episode="g3/e0"), make_sample(range(9, 59), {1}, episode="g3/e0")]
    with pytest.raises(ConfigError) as caught:
        micro_batches(samples, 100)
    assert str(caught.value) == (
        "episode g3/e0 has 110 tokens, and a micro-batch takes 100 (learner.tokens_per_micro_batch x "
        "learner.sequence_ranks): raise one of the two, or lower rollout.token_budget"
    )
