import json
import sys
from itertools import pairwise

import pytest

from agentrl.env import ToolEnv, reward, tool
from agentrl.env.curriculum import MOST_SHUFFLED, TaskSampler, has_signal
from agentrl.env.load import drop_overlong
from agentrl.env.permutation import Permutation
from agentrl.env.rows import load_rows
from agentrl.env.tasks import generated
from agentrl.errors import ConfigError
from agentrl.types import Task
from tests.env.solved_groups import solved

TASKS = [Task(f"t{i}") for i in range(10)]


class Echo(ToolEnv):
    def setup(self, text: str, times: int = 1) -> str:
        return text * times


def test_parquet_rows_are_checked_like_jsonl_rows(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": ["a", "b"], "times": [1, 2]}), path)
    assert [dict(t.row) for t in load_rows(path, Echo)] == [{"text": "a", "times": 1}, {"text": "b", "times": 2}]
    parquet.write_table(pyarrow.table({"times": [1, 2]}), path)
    with pytest.raises(ConfigError, match=r"rows\.parquet:1: argument 'text' of Echo\.setup is missing"):
        load_rows(path, Echo)
    path.write_text("nothing")
    with pytest.raises(ConfigError, match="not a parquet file"):
        load_rows(path, Echo)
    (tmp_path / "rows.csv").write_text("a,b\n")
    with pytest.raises(ConfigError, match=r"rows\.csv: not a \.jsonl, \.json \(lines or an array\) or \.parquet"):
        load_rows(tmp_path / "rows.csv", Echo)


def test_a_saved_dataset_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(tmp_path / "set")
    assert [dict(t.row) for t in load_rows(tmp_path / "set", Echo)] == [{"text": "a"}]
    (file,) = (tmp_path / "set").glob("*.arrow")
    file.write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="not a saved dataset: "):
        load_rows(tmp_path / "set", Echo)


def test_a_saved_dataset_dict_is_read_by_split(tmp_path):
    datasets = pytest.importorskip("datasets")
    parts = {split: datasets.Dataset.from_list([{"text": split}]) for split in ("train", "validation")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "set")
    assert [dict(t.row) for t in load_rows(tmp_path / "set", Echo)] == [{"text": "train"}]
    assert [dict(t.row) for t in load_rows(tmp_path / "set", Echo, split="held_out")] == [{"text": "validation"}]


def test_a_saved_dataset_without_its_library_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "dataset_info.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"needs datasets: pip install 'agentrl-train\[hf\]'"):
        load_rows(tmp_path / "set", Echo)


def test_generated_tasks_cost_the_same_everywhere():
    tasks = generated("name", "train", 1, 10**9, lambda rng: {"n": rng.randint(0, 10**9)})
    assert tasks[10**9 - 1] == tasks[-1]
    assert tasks[5:7] == [tasks[5], tasks[6]]
    with pytest.raises(IndexError):
        tasks[10**9]
    assert len({t.row["n"] for t in tasks[:100]}) == 100


@pytest.mark.parametrize("order", ["sequential", "shuffled", "weighted"])
def test_a_sampler_goes_on_where_it_was(order):
    def results(sampler):
        for position, _ in sampler.take(4):
            sampler.report(position, solved(position))

    one, other = TaskSampler(TASKS, 3, order), TaskSampler(TASKS, 3, order)
    for _ in range(5):
        results(one)
        results(other)
    resumed = TaskSampler(TASKS, 3, order)
    resumed.restore(json.loads(json.dumps(other.state())))
    assert one.take(20) == resumed.take(20)


def test_each_round_of_a_shuffle_has_every_task_once():
    sampler = TaskSampler(TASKS, 1, "shuffled")
    first, second = ([p for p, _ in sampler.take(10)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 1000, 4097])
def test_a_permutation_has_every_number_once(size):
    orders = [[Permutation(size, key)[n] for n in range(size)] for key in ("a", "b", "a")]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(size))
    assert orders[0] == orders[2]
    assert size < 5 or orders[0] != orders[1]
    with pytest.raises(IndexError, match=f"index {size} of {size}"):
        Permutation(size, "a")[size]


def test_a_permutation_spreads_its_numbers():
    order = Permutation(1_000_003, "a")
    found = [order[n] for n in range(4_000)]
    assert max(found) > 990_000
    tenths = [sum(n // 100_001 == tenth for n in found) for tenth in range(10)]
    assert all(320 < count < 480 for count in tenths), "four standard errors"
    steps = {b - a for a, b in pairwise(found)}
    assert len(steps) > 3_900, "neighbours are not moved alike"


def test_a_shuffle_of_very_many_tasks_needs_no_table():
    size = 3 * MOST_SHUFFLED
    sampler = TaskSampler(range(size), 1, "shuffled")
    first = [p for p, _ in sampler.take(1000)]
    assert len(set(first)) == 1000
    assert first != sorted(first)
    sampler.restore({"drawn": size, "results": {}})
    assert [p for p, _ in sampler.take(1000)] != first, "each pass has its own order"


def test_tasks_of_middling_difficulty_come_more_often():
    sampler = TaskSampler(TASKS, 0, "weighted", floor=0.1)
    for position in range(10):
        for _ in range(8):
            sampler.report(position, solved(5 if position == 4 else 10 if position < 4 else 0))
    assert [round(sampler.weight(p), 2) for p in (0, 4, 9)] == [0.1, 1.0, 0.1]
    drawn = [p for p, _ in sampler.take(2000)]
    share = drawn.count(4) / 2000
    assert abs(share - 1 / 1.9) < 0.05


def test_a_group_teaches_only_where_its_rewards_differ():
    assert has_signal([0, 1])
    assert not has_signal([1, 1, 1])
    assert not has_signal([1])


def test_long_prompts_are_dropped_or_refused_and_never_cut():
    kept, dropped = drop_overlong(TASKS, lambda t: int(t.id[1:]), 7)
    assert [t.id for t in kept] == [f"t{i}" for i in range(8)]
    assert dropped == [("t8", 8), ("t9", 9)]
    with pytest.raises(ConfigError, match="task 't8': its prompt has 8 tokens, more than 7"):
        drop_overlong(TASKS, lambda t: int(t.id[1:]), 7, "refuse")
    with pytest.raises(ConfigError, match="no task has a prompt of at most 3 tokens"):
        drop_overlong(TASKS, lambda t: 9, 3)


@pytest.mark.parametrize("size", ["many", 0, -1, 2.5, True])
def test_a_number_of_tasks_that_is_none_is_refused(size):
    with pytest.raises(ValueError, match=f"size must be a whole number of at least 1, got {size!r}"):
        generated("t", "train", 0, size, lambda rng: {})


@pytest.mark.parametrize("make", [tool, reward])
@pytest.mark.parametrize("name", [3, "", b"x"])
def test_a_name_that_is_no_text_is_refused(make, name):
    with pytest.raises(TypeError, match=rf"@{make.__name__}\(name={name!r}\): the name must be text"):
        make(name=name)


def test_results_are_not_taken_for_those_of_other_tasks():
    """A resumed run may leave out other overlong prompts than before."""
    before = TaskSampler([Task(f"{n}", {}) for n in range(9)], order="weighted")
    before.report(7, solved(10))
    for size, weight in ((9, before.floor), (12, 1.0)):
        resumed = TaskSampler([Task(f"{n}", {}) for n in range(size)], order="weighted")
        resumed.restore(before.state())
        assert resumed.weight(7) == weight
