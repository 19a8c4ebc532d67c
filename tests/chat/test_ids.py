"""Views of growing ids: they never change, behave like tuples, and numpy reads them without a copy."""

from __future__ import annotations

import numpy as np
import pytest

from agentrl.chat.ids import GrowingIds


def test_a_view_stays_as_it_was_while_more_is_appended():
    ids = GrowingIds()
    views, expected = [], []
    for n in range(60):
        ids.extend(range(n))
        expected.append(tuple(i for m in range(n + 1) for i in range(m)))
        views.append(ids.view())
    assert [tuple(view) for view in views] == expected
    assert len(ids) == len(expected[-1])


def test_a_view_reads_like_a_tuple():
    ids = GrowingIds()
    ids.extend((5, 6, 7))
    view = ids.view()
    assert view == (5, 6, 7)
    plain = (5, 6, 7)
    assert plain == view
    assert view == ids.view()
    assert view != (5, 6)
    assert view != [5, 6, 7]
    assert hash(view) == hash((5, 6, 7))
    assert view[1:] == (6, 7)
    assert view[-1] == 7
    assert type(view[0]) is int
    assert {type(i) for i in view} == {int}
    assert repr(view) == "Ids(5, 6, 7)"


def test_numpy_reads_the_same_memory_and_cannot_write_to_it():
    ids = GrowingIds()
    ids.extend((1, 2, 3))
    view = ids.view()
    array = np.asarray(view, dtype=np.int64)
    assert np.shares_memory(array, np.asarray(ids.view()))
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 9
    assert np.array(view, dtype=np.int32, copy=True).tolist() == [1, 2, 3]
