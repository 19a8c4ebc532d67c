"""From the learner's rows back to the tokens of episodes: branches, rejected tokens, idle episodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agentrl.algo.metrics import Metric
from agentrl.errors import CheckpointError
from agentrl.run_folder.token_records import (
    MASKED,
    REJECTED,
    SKIPPED,
    TRAINED,
    VETOED,
    TokenColumns,
    encode_tokens,
    read_tokens,
    tokens_file,
)
from agentrl.trainer.samples import TrainingRows, episode_samples
from agentrl.trainer.token_log import token_columns
from agentrl.types import Group, Segment, Task
from tests.trainer.test_samples import ANSWER, PROMPT, episode

FORK = Segment((4, 5), "sampled", 0, 1, (-0.5, -0.6), (4, 4))


def values(*numbers: float) -> dict[str, np.ndarray]:
    return {"learner_logprobs": np.asarray(numbers, dtype=np.float32)}


def test_rows_of_branches_fill_the_segments_they_train():
    forked = episode("e0", 1.0, segments=(PROMPT, ANSWER, FORK))
    rows = episode_samples(forked)
    assert len(rows) == 2
    given = [values(*(row.logprobs[n] * 2 for n, kept in enumerate(row.loss_mask) if kept)) for row in rows]
    step = TrainingRows(rows, by_segment={"e0": {1: 0.5, 2: -0.5}})
    found = token_columns([Group(Task("t"), (forked,))], step, given)["e0"]
    np.testing.assert_allclose(found.learner_logprobs, [-0.2, -0.4, -0.6, -1.0, -1.2], rtol=1e-6)
    np.testing.assert_allclose(found.advantages, [0.5, 0.5, 0.5, -0.5, -0.5])
    assert found.flags.tolist() == [TRAINED] * 5
    assert found.entropy is None


def test_what_does_not_train_says_why():
    idle, masked, rejected, vetoed = (episode(f"e{n}", 1.0) for n in range(4))
    rows = [*episode_samples(idle), *episode_samples(rejected), *episode_samples(vetoed)]
    mask = rows[1].loss_mask
    first = mask.index(True)
    rows[1] = replace(rows[1], loss_mask=tuple(kept and n != first for n, kept in enumerate(mask)))
    given = [{}, values(-1.0, -2.0), values(-1.0, -1.0, -1.0) | {"kept": np.asarray([1, 0, 1], dtype=np.float32)}]
    step = TrainingRows(rows, idle=frozenset({"e0"}))
    found = token_columns([Group(Task("t"), (idle, masked, rejected, vetoed))], step, given)
    assert found["e0"].flags.tolist() == [SKIPPED] * 3
    assert found["e1"].flags.tolist() == [MASKED] * 3
    assert found["e2"].flags.tolist() == [REJECTED, TRAINED, TRAINED]
    assert found["e2"].learner_logprobs.tolist()[1:] == [-1.0, -2.0]
    assert np.isnan(found["e2"].learner_logprobs[0])
    assert found["e3"].flags.tolist() == [TRAINED, VETOED, TRAINED]


def test_an_episode_that_lost_all_its_rows_says_why():
    group = Group(Task("t"), tuple(episode(f"e{n}", 1.0) for n in range(3)))  # masked, with an advantage, with 0
    step = TrainingRows([], by_segment={"e1": {1: 0.5}, "e2": {1: 0.0}})

    def flags(step: TrainingRows) -> list[set[int]]:
        return [set(one.flags.tolist()) for one in token_columns([group], step, []).values()]

    assert flags(step) == [{MASKED}, {REJECTED}, {REJECTED}]
    dropping = replace(step, metrics={"dropped_groups": Metric("sum", 1.0)})
    assert flags(dropping) == [{MASKED}, {REJECTED}, {SKIPPED}]
    assert token_columns([group], step, [])["e1"].advantages.tolist() == [0.5] * 3


@pytest.mark.parametrize("lost", [0, 1])
def test_a_row_that_was_rejected_leaves_the_other_rows_of_its_episode(lost: int):
    forked = episode("e0", 1.0, segments=(PROMPT, ANSWER, FORK))
    rows = episode_samples(forked)
    kept = [row for number, row in enumerate(rows) if number != lost]
    given = [values(*(-1.0 for on in row.loss_mask if on)) for row in kept]
    step = TrainingRows(kept, by_segment={"e0": {1: 0.5, 2: -0.5}})
    found = token_columns([Group(Task("t"), (forked,))], step, given)["e0"]
    flags = [[TRAINED] * 3, [TRAINED] * 2]
    flags[lost] = [REJECTED] * len(flags[lost])
    assert found.flags.tolist() == [flag for row in flags for flag in row]
    assert np.isnan(found.learner_logprobs).tolist() == [flag == REJECTED for row in flags for flag in row]


def test_a_file_reads_back_rounded_and_a_damaged_one_is_an_error(tmp_path: Path):
    columns = TokenColumns(
        learner_logprobs=np.asarray([-1.23456789, np.nan]), flags=np.asarray([TRAINED, REJECTED], dtype=np.int64)
    )
    path = tokens_file(tmp_path, 3)
    path.parent.mkdir()
    path.write_bytes(encode_tokens({"s3/g0/e0": columns}))
    found = read_tokens(tmp_path, 3)["s3/g0/e0"]
    np.testing.assert_allclose(found.learner_logprobs[0], -1.23456789, rtol=1e-5)
    assert np.isnan(found.learner_logprobs[1])
    assert found.flags.tolist() == [TRAINED, REJECTED]
    assert found.ratio is None
    assert read_tokens(tmp_path, 4) == {}
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match="damaged"):
        read_tokens(tmp_path, 3)
