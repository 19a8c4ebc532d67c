"""Values of trained tokens find their rows again, in whatever order groups are packed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from agentrl.learner.micro_batch import annotated, packed_rows, recorded
from agentrl.learner.pack import Packed
from tests.learner.train_models import make_sample

A = make_sample([1, 2, 3], {1, 2}, episode="a", group=0)
B = make_sample([4, 5, 6], {2}, episode="b", group=1)
C = make_sample([1, 2, 7, 8], {1, 2, 3}, episode="c", group=0)
CPU = torch.device("cpu")


def test_columns_are_those_of_each_row_in_the_order_of_packing():
    def evaluate(packed: Packed) -> Mapping[str, Tensor]:
        return {"id": packed.ids_N, "place": torch.arange(len(packed.ids_N))}

    found = annotated([(A, B, C), (B,)], CPU, torch.float32, evaluate)  # the group of A and C comes first
    assert found == [
        {"id": (2, 3), "place": (0, 1)},
        {"id": (2, 7, 8), "place": (2, 3, 4)},
        {"id": (6,), "place": (5,)},
        {"id": (6,), "place": (0,)},
    ]


def test_what_parts_of_a_micro_batch_record_is_put_together():
    parts = [
        ((B, A), {"ratio": torch.tensor([10.0, 20.0, 21.0])}),
        ((C,), {"ratio": torch.tensor([30.0, 31.0, 32.0])}),
    ]
    found = recorded([(A, B, C)], parts)
    assert [values["ratio"].tolist() for values in found] == [[20, 21], [30, 31, 32], [10]]
    found = recorded([(A, B, C)], [((A, B, C), {"ratio": torch.arange(6.0)})])
    assert [values["ratio"].tolist() for values in found] == [[0, 1], [2, 3, 4], [5]]


def test_a_rank_without_rows_has_the_columns_of_the_others():
    packed = packed_rows((), ("selected", "values"), CPU, torch.float64)
    assert {name: values.tolist() for name, values in packed.columns.items()} == {"selected": [], "values": []}
    assert (len(packed.ids_N), len(packed.ids_T)) == (0, 2)
