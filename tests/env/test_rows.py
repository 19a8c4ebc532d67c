"""Rows of files of every kind, alone and together."""

import errno
import json
import os

import pytest

from agentrl.config import load_config
from agentrl.config.datafiles import data_files, is_dataset_name
from agentrl.env import ToolEnv
from agentrl.env.rows import count_rows, load_rows, read_rows
from agentrl.errors import ConfigError


class Echo(ToolEnv):
    """Echo."""

    def setup(self, text: str) -> str:
        return text


def rows(*texts):
    return [{"text": text} for text in texts]


def write_parquet(path, texts):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": texts}), path)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, rows("a", "b"))) + "\n\n")
    (tmp_path / "array.json").write_text("\ufeff" + json.dumps(rows("c", "d"), indent=2), encoding="utf-8")
    (tmp_path / "more").mkdir()
    write_parquet(tmp_path / "more" / "x.parquet", ["e"])
    return tmp_path


def texts_of(tasks):
    return [task.row["text"] for task in tasks]


def test_lists_and_patterns_mix_all_kinds(folder):
    spec = [str(folder / "lines.jsonl"), str(folder / "array.json"), str(folder / "more/*.parquet")]
    tasks = load_rows(spec, Echo, seed=5)
    assert texts_of(tasks) == ["a", "b", "c", "d", "e"]
    assert [task.id for task in tasks] == ["lines-1", "lines-2", "array-1", "array-2", "x-1"]
    assert len({task.seed for task in tasks}) == 5
    assert sorted(texts_of(load_rows(str(folder / "**/*.*"), Echo))) == ["a", "b", "c", "d", "e"]
    assert [count_rows(path) for path in data_files(spec)] == [2, 2, 1]


def test_blank_lines_do_not_shift_the_seeds_of_later_files(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n\n{"text": "b"}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "c"}\n{"text": "d"}\n')
    tasks = load_rows([str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")], Echo, seed=5)
    assert [(task.id, task.seed) for task in tasks] == [("a-1", 6), ("a-4", 7), ("b-1", 8), ("b-2", 9)]


def test_a_file_is_read_once_and_equal_names_are_told_apart(folder):
    (folder / "more" / "lines.jsonl").write_text('{"text": "z"}')
    found = data_files([str(folder / "lines.jsonl"), str(folder / "**/lines.jsonl")])
    assert found == [folder / "lines.jsonl", folder / "more" / "lines.jsonl"]
    ids = [task.id for task in load_rows([str(path) for path in found], Echo)]
    assert len(set(ids)) == 3


def test_a_column_that_no_method_can_take_is_renamed(tmp_path):
    class Open(ToolEnv):
        def setup(self, text: str, **rest: object) -> str:
            return f"{text} {rest}"

    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a", "self": 1}')
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: .*Open\.setup cannot take a column named 'self'"):
        load_rows(file, Open)
    (task,) = load_rows(file, Open, columns={"other": "self"})
    assert task.row == {"text": "a", "other": 1}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", '[{"text": "a"}, 3]', "a.json: row 2: a row must be a JSON object, got int"),
        ("a.jsonl", '{"text": "a"}\n{"text": {\n', "in double quotes (column 11)"),
        ("a.json", '[\n{"text": "a"},\n{"text": }\n]', "a.json:3: not JSON"),
        ("a.json", '[{"text": "a"}, {"text": 1}]', "a.json:2: "),
        ("a.json", "[]", "a.json: no rows"),
        ("a.json", '{\n"rows": []\n}', "a.json:1: not JSON"),
        ("a.jsonl", '{"text": "a"}\n{"other": 1}', "a.jsonl:2: "),
        ("a.csv", "text\na", "a.csv: not a .jsonl, .json (lines or an array) or .parquet file"),
        ("a.json", "[" * 100_000, "a.json"),
        ("a.jsonl", "{}", "a.jsonl:1: argument 'text'"),
    ],
)
def test_a_bad_row_names_its_file_and_place(tmp_path, name, content, said):
    good = tmp_path / "good.jsonl"
    good.write_text('{"text": "fine"}')
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_rows([str(good), str(tmp_path / name)], Echo)
    assert said in str(caught.value)


def test_columns_are_renamed_and_a_missing_one_is_named(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "a", "text": "not this"}')
    assert [dict(t.row) for t in load_rows(path, Echo, columns={"text": "question"})] == [{"text": "a"}]
    with pytest.raises(ConfigError, match=r"q\.jsonl:1: no column 'frage' .* the row has question, text"):
        load_rows(path, Echo, columns={"text": "frage"})


def test_a_folder_is_read_by_split(tmp_path):
    for name in ("train-00000-of-2.jsonl", "train-00001-of-2.jsonl", "test.jsonl", "README.json"):
        (tmp_path / name).write_text(json.dumps({"text": name}))
    assert texts_of(load_rows(str(tmp_path), Echo)) == ["train-00000-of-2.jsonl", "train-00001-of-2.jsonl"]
    assert texts_of(load_rows(str(tmp_path), Echo, split="held_out")) == ["test.jsonl"]
    (tmp_path / "test.jsonl").unlink()
    with pytest.raises(ConfigError, match="of the split held_out in"):
        data_files(str(tmp_path), "held_out")


def test_what_is_no_file_or_cannot_be_listed_is_said(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ConfigError, match=r"pipe\.jsonl is neither a file nor a folder"):
        data_files(str(tmp_path / "pipe.jsonl"))
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        data_files("x" * 5000)


def test_only_a_folder_that_hides_the_rows_must_be_listed(tmp_path, monkeypatch):
    """The root of a volume has a lost+found that only root may list."""
    lost = tmp_path / "lost+found"
    lost.mkdir()
    listed = os.scandir

    def scandir(path):
        if os.fspath(path) == os.fspath(lost):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(lost))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(ConfigError, match=r"cannot be read: .*lost\+found: Permission denied"):
        data_files(str(tmp_path))
    (tmp_path / "train.jsonl").write_text("{}")
    assert data_files(str(tmp_path)) == [tmp_path / "train.jsonl"]


def test_a_folder_of_many_datasets_is_refused_in_one_line(tmp_path):
    for number in range(40):
        (tmp_path / f"part-{number:02}").mkdir()
        (tmp_path / f"part-{number:02}" / "train.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match=r"in 40 folders \(part-00, .*, part-05, \.\.\.\): name the files"):
        data_files(str(tmp_path))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A Hugging Face cache that holds one dataset with two configurations."""
    constants = pytest.importorskip("huggingface_hub.constants")
    place = tmp_path / "hub" / "datasets--owner--name"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("0" * 40)
    for part in ("main", "other"):
        inside = place / "snapshots" / ("0" * 40) / part
        inside.mkdir(parents=True)
        (inside / "train-0.jsonl").write_text(json.dumps({"text": part}))
        (inside / "test-0.jsonl").write_text(json.dumps({"text": f"{part} test"}))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def test_a_dataset_of_the_cache_is_read_by_name(cache, monkeypatch):
    monkeypatch.chdir(cache)
    assert texts_of(load_rows("owner/name:main/train-*", Echo)) == ["main"]
    with pytest.raises(ConfigError, match=r"are in 2 folders \(main, other\): name the files"):
        load_rows("owner/name", Echo)
    with pytest.raises(ConfigError, match="to download it: hf download owner/none --repo-type dataset"):
        load_rows("owner/none", Echo)
    (cache / "tools.yaml").write_text(
        "env: agentrl.envs.calculator:Calculator\nmodel: {tiny: {}}\n"
        "data: {train: 'owner/name:main/train-*', held_out: owner/none}\n"
    )
    with pytest.raises(
        ConfigError, match=r"tools\.yaml:3:\d+: data\.held_out: .*hf download owner/none"
    ) as caught:
        load_config(cache / "tools.yaml")
    assert "data.train" not in str(caught.value)


def test_what_is_here_is_no_dataset_name(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train").mkdir()
    assert not is_dataset_name("data/train", tmp_path)
    assert is_dataset_name("data/test", tmp_path)
    assert not any(is_dataset_name(t, tmp_path) for t in ("data/x.jsonl", "x", "a/b/c", "data/*", "../a/b", "./a"))


def test_a_configuration_takes_lists_and_patterns_relative_to_its_file(folder, tmp_path, monkeypatch):
    path = folder / "tools.yaml"
    path.write_text(
        "env: agentrl.envs.calculator:Calculator\nmodel: {tiny: {}}\n"
        "data: {train: [lines.jsonl, more/*.parquet], held_out: array.json}\n"
    )
    monkeypatch.chdir("/")
    config = load_config(path)
    assert config.data.train == [str(folder / "lines.jsonl"), str(folder / "more/*.parquet")]
    assert config.data.held_out == str(folder / "array.json")
    path.write_text(path.read_text().replace("more/*", "nowhere/*").replace("array", "arrray"))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert "no file matches" in str(caught.value)
    assert "did you mean" in str(caught.value)


def test_a_parquet_file_that_is_none_is_named(tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "x.parquet"
    path.write_text("nothing")
    with pytest.raises(ConfigError, match=r"x\.parquet: not a parquet file"):
        list(read_rows(path))
    with pytest.raises(ConfigError, match=r"x\.parquet: not a parquet file"):
        count_rows(path)


def test_keys_that_other_rows_have_are_missing_in_columns_as_in_lines(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    class Shop(ToolEnv):
        def setup(self, stock: dict[str, int], steps: list, hint: str = "none") -> str:
            return hint

    class Needs(ToolEnv):
        def setup(self, stock: dict, steps: list, hint: str | None) -> str:
            return str(hint)

    given = [
        {"stock": {"apple": 1}, "steps": [{"do": "look"}, {"do": "buy", "what": "apple"}]},
        {"stock": {"pear": 2}, "steps": [], "hint": "look"},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, given)))
    table = pyarrow.Table.from_pylist([{"hint": None, **row} for row in given])
    parquet.write_table(table, tmp_path / "rows.parquet")
    assert "'pear': None" in str(next(read_rows(tmp_path / "rows.parquet"))), "as it is stored"
    found = [load_rows(tmp_path / name, Shop) for name in ("rows.jsonl", "rows.parquet")]
    assert [[task.row for task in tasks] for tasks in found] == [given, given]
    assert [task.row["hint"] for task in load_rows(tmp_path / "rows.parquet", Needs)] == [None, "look"]


def test_a_null_that_one_argument_needs_keeps_no_other(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    class Exam(ToolEnv):
        def setup(self, question: str, answer: int | None, stock: dict, hint: str = "none") -> str:
            return question

    given = [
        {"question": "a", "answer": 1, "stock": {"pear": 2}, "hint": "look"},
        {"question": "b", "answer": None, "stock": {"apple": 1}},
    ]
    parquet.write_table(
        pyarrow.Table.from_pylist([{"hint": None, **row} for row in given]), tmp_path / "rows.parquet"
    )
    assert [task.row for task in load_rows(tmp_path / "rows.parquet", Exam)] == given
