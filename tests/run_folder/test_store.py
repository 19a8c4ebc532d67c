"""The run folder: whole after any crash, resumable, held by one process."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors import SafetensorError

from agentrl.config import RunConfig, load_config
from agentrl.config.facts import OnResume, facts
from agentrl.config.run import LearnerConfig
from agentrl.config.schema import fields
from agentrl.errors import CheckpointError, ConfigError
from agentrl.reporting.report import Summary
from agentrl.run_folder import checkpoints
from agentrl.run_folder.files import file_error, write_atomic
from agentrl.run_folder.fork import parse_source
from agentrl.run_folder.history import add_history, read_history
from agentrl.run_folder.records import EpisodeRecord, read_episodes, read_records, recorded_steps
from agentrl.run_folder.redraws import Redraws
from agentrl.run_folder.store import RunStore, find_checkpoint
from agentrl.types import (
    CallRecord,
    Episode,
    Image,
    Message,
    Segment,
    StopReason,
    Task,
    ToolCall,
    Turn,
)


def config(**changes: object) -> RunConfig:
    return RunConfig.model_validate({"name": "r", "env": "m:E", "model": {"tiny": {}}} | changes)


def episode(number: int = 0) -> Episode:
    call = ToolCall("c1", "calculator", {"expression": "1 / 3", "deep": {"list": [1, 2.5, None, "é"]}})
    asked = Message("assistant", "let me", (call,), reasoning="hm", parse_errors=("half a call",))
    answer = Message("tool", "0.333", tool_call_id="c1", name="calculator")
    return Episode(
        id=f"g0/e{number}",
        task=Task("t", {"question": "1/3?"}, seed=3),
        messages=(Message("user", ("look", Image(b"\xff\x00"))), asked, answer),
        turns=(Turn(asked, (answer,), 0.5, "stop", 2, 0.1, 0.2, (CallRecord(call, "0.333", "ok", 0.1),)),),
        segments=(
            Segment((1, 2, 3), "prompt", -1, 0),
            Segment((4, 5), "sampled", 0, 1, (-0.1, -1e-9), (7, 8)),
            Segment((6,), "observation", 1, 2),
        ),
        stop_reason=StopReason.MAX_TURNS,
        reward=0.1 + 0.2,
        rewards={"solved": 0.25, "cost": 0.05},
        metrics={"parse_error": 1.0},
        seconds=1.5,
        tools=({"type": "function", "function": {"name": "calculator"}},),
    )


def test_episodes_come_back_exactly(tmp_path: Path):
    failed = dataclasses.replace(episode(1), reward=None, error="SandboxError: gone", stop_reason=StopReason.INFRA)
    records = [EpisodeRecord.of(12, 0, episode(), -1.25), EpisodeRecord.of(12, 0, failed, None)]
    with RunStore.open(config(), tmp_path / "r") as store:
        store.write_episodes(12, records)
    assert (tmp_path / "r/episodes/step-000012.jsonl.zst").is_file()
    assert read_records(tmp_path / "r", 12) == records
    assert read_episodes(tmp_path / "r", 12) == [episode(), failed]
    assert records[0].advantages == (-1.25,)
    assert records[1].advantages == ()


def test_numbers_json_does_not_know_and_odd_rows_survive(tmp_path: Path):
    import numpy as np

    odd = dataclasses.replace(
        episode(),
        task=Task("t", {"n": np.int64(3), "path": Path("a/b")}),
        segments=(Segment((1,), "sampled", -1, 0, (float("-inf"),), (0,)),),
    )
    with RunStore.open(config(), tmp_path / "r") as store:
        store.write_episodes(1, [EpisodeRecord.of(1, 0, odd, float("inf"))])
    [record] = read_records(tmp_path / "r", 1)
    assert record.episode.task.row == {"n": 3, "path": "a/b"}
    assert record.episode.segments[0].logprobs == (float("-inf"),)
    assert record.advantages == (float("inf"),)


def test_a_cut_episodes_file_says_so(tmp_path: Path):
    with RunStore.open(config(), tmp_path / "r") as store:
        store.write_episodes(1, [EpisodeRecord.of(1, 0, episode(i), 0.0) for i in range(50)])
    path = tmp_path / "r/episodes/step-000001.jsonl.zst"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CheckpointError, match=r"step-000001\.jsonl\.zst:1: damaged after"):
        read_episodes(tmp_path / "r", 1)
    with pytest.raises(CheckpointError, match="no episodes of step 9; it has steps 1 to 1"):
        read_episodes(tmp_path / "r", 9)


def test_a_torn_line_is_dropped_and_resuming_doubles_no_step(tmp_path: Path):
    with RunStore.open(config(), tmp_path / "r") as store:
        assert not store.resumed
        for step in range(1, 6):
            store.log_metrics(step, {"solved": step / 10, "bad": float("nan")})
            store.write_episodes(step, [EpisodeRecord.of(step, 0, episode(), 0.0)])
    path = tmp_path / "r/metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 6, "sol')

    with RunStore.open(config(), tmp_path / "r") as store:
        assert store.resumed
        assert [line["step"] for line in store.metrics()] == [1, 2, 3, 4, 5]
        store.rewind(3)
        store.log_metrics(4, {"solved": 1.0})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1] == {"step": 4, "solved": 1.0}
    assert lines[0] == {"step": 1, "solved": 0.1, "bad": None}
    assert recorded_steps(tmp_path / "r") == [1, 2, 3]


def test_another_configuration_is_refused_with_the_difference(tmp_path: Path):
    with RunStore.open(config(), tmp_path / "r") as store:
        store.log_metrics(1, {"solved": 0.5})
    with pytest.raises(ConfigError) as refused:
        RunStore.open(config(seed=16, rollout={"group_size": 16}), tmp_path / "r")
    text = str(refused.value)
    assert "seed: 0 -> 16" in text
    assert "--fresh" in text
    assert "group_size" not in text, "that may change"
    with RunStore.open(config(), tmp_path / "r") as store:  # the refusal has let the lock go
        assert store.resumed


def test_keys_of_another_version_are_one_error_that_says_what_to_do(tmp_path: Path):
    with RunStore.open(config(), tmp_path / "r") as store:
        store.log_metrics(1, {"solved": 0.5})
    file = tmp_path / "r" / "config.yaml"
    with pytest.raises(ConfigError, match=r"--set stepz=1: .*did you mean"):
        load_config(file, ["stepz=1"], check_paths=False)
    file.write_text(file.read_text() + "gone: null\nlost: 3\n")
    before = file.read_bytes()
    with pytest.raises(ConfigError) as refused:
        RunStore.open(config(), tmp_path / "r")
    text = str(refused.value)
    assert "does not know (gone, lost): another version wrote it" in text
    assert f"path: {tmp_path / 'r' / 'checkpoints' / 'step-N'}" in text
    assert "\n" not in text
    assert file.read_bytes() == before


def test_a_folder_without_a_step_blocks_no_other_configuration(tmp_path: Path):
    """A run that was refused, or killed, before its first step: the corrected file runs under the same name."""
    with RunStore.open(config(), tmp_path / "r") as store:
        store.log_metrics(0, {"held_out": 0.0})
        (store.path / "start").mkdir()
    with RunStore.open(config(seed=1), tmp_path / "r") as store:
        assert (store.resumed, store.set_aside) == (False, None)
        assert store.metrics() == []
        assert not (store.path / "start").exists()
    assert load_config(tmp_path / "r/config.yaml") == config(seed=1)
    assert list(tmp_path.iterdir()) == [tmp_path / "r"]


def test_a_cold_start_without_a_step_is_kept_beside_the_other_configuration(tmp_path: Path):
    with RunStore.open(config(warmup={}), tmp_path / "r") as store:
        (store.path / "start").mkdir()
        store.discard()
    with RunStore.open(config(warmup={}, seed=1), tmp_path / "r") as store:
        assert store.set_aside is not None
        assert (store.set_aside / "start").is_dir()


def test_a_refused_run_leaves_nothing_and_gives_an_earlier_one_its_name_back(tmp_path: Path):
    with RunStore.open(config(), tmp_path / "r") as store:
        store.discard()
        store.event("too late")
    assert list(tmp_path.iterdir()) == []
    with RunStore.open(config(), tmp_path / "r") as store:
        store.log_metrics(1, {"solved": 0.5})
        store.discard()  # it has a step
    with RunStore.open(config(seed=1), tmp_path / "r", fresh=True) as store:
        store.discard()
    assert list(tmp_path.iterdir()) == [tmp_path / "r"]
    assert load_config(tmp_path / "r/config.yaml") == config()
    with RunStore.open(config(), tmp_path / "r") as store:
        assert store.metrics()[0]["solved"] == 0.5


def test_files_of_others_in_the_folder_of_a_refused_run_stay(tmp_path: Path):
    with RunStore.open(config(), tmp_path / "r") as store:
        (store.path / "notes.txt").write_text("mine")
        store.discard()
    assert (tmp_path / "r/notes.txt").read_text() == "mine"


def test_fresh_starts_over_and_keeps_the_old_folder(tmp_path: Path):
    with RunStore.open(config(), tmp_path / "r") as store:
        store.log_metrics(1, {"solved": 0.5})
    with RunStore.open(config(seed=1), tmp_path / "r", fresh=True) as store:
        assert not store.resumed
        assert store.metrics() == []
    [kept] = tmp_path.glob("r.before-*")
    assert '"solved": 0.5' in (kept / "metrics.jsonl").read_text()
    assert load_config(tmp_path / "r/config.yaml") == config(seed=1)


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match=r"is not a run folder \(it holds thesis.tex\)"):
        RunStore.open(config(), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith(".")) == ["thesis.tex"]


def test_a_process_that_a_dead_run_forked_does_not_hold_its_folder(tmp_path: Path):
    """As the workers of a `multiprocessing` pool of an env do after `kill -9` of the run."""
    code = (
        "import os, sys; from pathlib import Path; from agentrl.config import RunConfig\n"
        "from agentrl.run_folder.store import RunStore\n"
        "store = RunStore.open(RunConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2]))\n"
        "if os.fork() == 0:\n"
        "    print('forked', flush=True); sys.stdin.read(); os._exit(0)\n"
        "os._exit(0)"
    )
    command = [sys.executable, "-c", code, config().model_dump_json(), str(tmp_path / "r")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "forked\n"
        assert run.wait() == 0
        RunStore.open(config(), tmp_path / "r").close()


def test_a_run_that_forks_a_process_keeps_its_folder(tmp_path: Path):
    with RunStore.open(config(), tmp_path / "r"):
        subprocess.run([sys.executable, "-c", "pass"], preexec_fn=lambda: None, check=True)
        with pytest.raises(ConfigError, match=f"held by process {os.getpid()} on"):
            RunStore.open(config(), tmp_path / "r")


def test_two_processes_cannot_hold_one_folder(tmp_path: Path):
    code = (
        "import sys; from pathlib import Path; from agentrl.config import RunConfig\n"
        "from agentrl.run_folder.store import RunStore\n"
        "store = RunStore.open(RunConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2]))\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, config().model_dump_json(), str(tmp_path / "r")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"held by process {other.pid} on"):
            RunStore.open(config(), tmp_path / "r")
        with pytest.raises(ConfigError, match="held by"):
            RunStore.open(config(), tmp_path / "r", fresh=True)
        other.kill()  # a killed process does not keep it
        other.wait()
    with RunStore.open(config(), tmp_path / "r") as store:
        assert store.resumed


def save(store: RunStore, step: int, keep: int = 2, text: str = "w") -> Path:
    with store.checkpoint(step, keep) as folder:
        (folder / "optimizer").mkdir()
        (folder / "model.safetensors").write_text(text * 1000)
        (folder / "optimizer/state.pt").write_text(text)
    return store.path / "checkpoints" / f"step-{step}"


def test_checkpoints_are_sealed_and_only_the_newest_stay(tmp_path: Path):
    with RunStore.open(config(), tmp_path / "r") as store:
        for step in (5, 10, 100):
            path = save(store, step)
        assert checkpoints.steps_saved(store.path / "checkpoints") == [10, 100]
        manifest = json.loads((path / "manifest.json").read_text())
        assert set(manifest["files"]) == {"config.yaml", "model.safetensors", "optimizer/state.pt"}
        latest = store.latest_checkpoint()
        assert latest is not None
        assert (latest.step, latest.path) == (100, path)
    assert find_checkpoint(tmp_path / "r").step == 100
    assert find_checkpoint(path).path == path


def test_the_best_stays_too_and_has_a_name(tmp_path: Path):
    with RunStore.open(config(), tmp_path / "r") as store:
        folder = store.path / "checkpoints"
        for step, score in enumerate((0.5, 0.9, 0.9, None, 0.2, 0.3), start=1):
            store.log_metrics(step, {} if score is None else {"held_out": score})
            with store.checkpoint(step, keep=1, best=True) as temp:
                (temp / "weights").write_text(str(step))
        assert checkpoints.steps_saved(folder) == [3, 6]
        assert (folder / "best" / "weights").read_text() == "3"
        assert find_checkpoint(folder / "best").step == 3
        latest = store.latest_checkpoint()
        assert latest is not None
        assert latest.step == 6


def test_a_checkpoint_stays_while_its_evaluation_runs(tmp_path: Path):
    with RunStore.open(config(), tmp_path / "r") as store:
        folder = store.path / "checkpoints"
        for step in range(1, 5):
            if step == 2:
                store.await_metrics(2)
            store.log_metrics(step, {"held_out": 0.5} if step == 1 else {})
            with store.checkpoint(step, keep=1, best=True) as temp:
                (temp / "weights").write_text("w")
        assert checkpoints.steps_saved(folder) == [1, 2, 4]
        store.add_metrics(2, {"held_out": 0.9})
        store.tidy_checkpoints(1, best=True)
        assert checkpoints.steps_saved(folder) == [2, 4]
        assert find_checkpoint(folder / "best").step == 2
        store.await_metrics(4)
        with store.checkpoint(5, keep=1) as temp:
            (temp / "weights").write_text("w")
        assert checkpoints.steps_saved(folder) == [5], "the best is not kept"


def test_a_process_that_loads_a_checkpoint_often_holds_it_once(tmp_path: Path):
    with RunStore.open(config(), tmp_path / "r") as store:
        save(store, 1, keep=1)
    find_checkpoint(tmp_path / "r", hold=True)
    before = len(os.listdir("/dev/fd"))
    for _ in range(20):
        find_checkpoint(tmp_path / "r", hold=True)
    assert len(os.listdir("/dev/fd")) < before + 20


def test_a_checkpoint_that_another_process_holds_stays(tmp_path: Path):
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from agentrl.run_folder.store import find_checkpoint\n"
        "print(find_checkpoint(Path(sys.argv[1]), hold=True).step, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with RunStore.open(config(), tmp_path / "r") as store:
        folder = store.path / "checkpoints"
        save(store, 1, keep=1)
        command = [sys.executable, "-c", code, str(store.path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"1\n"
            save(store, 2, keep=1)
            assert checkpoints.steps_saved(folder) == [1, 2]
            reader.communicate()
        save(store, 3, keep=1)
        assert checkpoints.steps_saved(folder) == [3]


def test_a_run_whose_folder_was_moved_says_so(tmp_path: Path):
    store = RunStore.open(config(), tmp_path / "r")
    store.path.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="r: the run folder was moved or deleted"), store:
        store.write_episodes(1, [])
    with pytest.raises(FileNotFoundError, match="gone"), RunStore.open(config(), tmp_path / "r"):
        (tmp_path / "gone").read_bytes()


def test_a_torn_line_of_the_history_spoils_no_other(tmp_path: Path):
    add_history(tmp_path, 1, {"optim.lr": [1, 2]})
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"time": "2026-')
    add_history(tmp_path, 2, {"optim.lr": [2, 3]})
    assert [entry["step"] for entry in read_history(tmp_path)] == [1, 2]


def test_without_best_nothing_points_at_a_checkpoint_that_is_gone(tmp_path: Path):
    with RunStore.open(config(), tmp_path / "r") as store:
        for step in (1, 2):
            store.log_metrics(step, {"held_out": 1.0 / step})
            with store.checkpoint(step, keep=1, best=step == 1) as temp:
                (temp / "weights").write_text("w")
    assert sorted(path.name for path in (tmp_path / "r/checkpoints").iterdir()) == ["step-2"]


def test_a_copy_without_links_still_marks_its_best_checkpoint(tmp_path: Path):
    def scored(folder: Path, step: int, score: float) -> None:
        with RunStore.open(config(), folder) as store:
            store.log_metrics(step, {"held_out": score})
            with store.checkpoint(step, 2, best=True) as making:
                (making / "weights").write_text("w")

    scored(tmp_path / "r", 1, 0.5)
    scored(tmp_path / "r", 2, 0.4)
    shutil.copytree(tmp_path / "r", tmp_path / "copy")  # follows the link `best`
    assert not (tmp_path / "copy/checkpoints/best").is_symlink()
    assert parse_source(f"{tmp_path}/copy@best") == parse_source(f"{tmp_path}/copy@1"), "not the newest"
    scored(tmp_path / "copy", 3, 0.9)
    assert (tmp_path / "copy/checkpoints/best").readlink() == Path("step-3")


def test_a_checkpoint_with_a_file_that_is_still_open_on_nfs_stops_no_run(tmp_path: Path, monkeypatch):
    rmdir = os.rmdir

    def refuse(path: str | Path, **where: int) -> None:
        if ".writing-step-1" in str(path):
            raise OSError(errno.ENOTEMPTY, "Directory not empty")  # because of .nfs000...
        rmdir(path, **where)

    with monkeypatch.context() as nfs, RunStore.open(config(), tmp_path / "r") as store:
        nfs.setattr(os, "rmdir", refuse)
        for step in (1, 2):
            with store.checkpoint(step, 1) as making:
                (making / "weights").write_text("w")
        latest = store.latest_checkpoint()
        assert latest is not None
        assert latest.step == 2
    with RunStore.open(config(), tmp_path / "r"):
        pass
    assert [path.name for path in (tmp_path / "r/checkpoints").iterdir()] == ["step-2"]


def test_a_file_system_without_links_still_marks_its_best_checkpoint(tmp_path: Path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "symlink", refuse)
    with RunStore.open(config(), tmp_path / "r") as store:
        for step, score in enumerate((0.1, 0.5, 0.2), 1):
            store.log_metrics(step, {"held_out": score})
            with store.checkpoint(step, 1, best=True) as making:
                (making / "weights").write_text("w")
        assert parse_source(f"{tmp_path}/r@best")[1] == 2
        store.tidy_checkpoints(1, best=False)
    assert [path.name for path in (tmp_path / "r/checkpoints").iterdir()] == ["step-3"]


def test_a_run_may_go_on_in_another_place(tmp_path: Path):
    """How many ranks compute is not what is computed; what is computed stays."""
    with RunStore.open(config(), tmp_path / "r") as store:
        save(store, 1)
    moved = config().model_copy(update={"learner": LearnerConfig(ranks=4, checkpoint_activations=True)})
    with RunStore.open(moved, tmp_path / "r") as store:
        assert store.resumed
        assert "ranks: 1" in (tmp_path / "r" / "config.yaml").read_text(), "the run may still be refused"
        store.adopt()
    assert "ranks: 4" in (tmp_path / "r" / "config.yaml").read_text()
    other = moved.model_copy(update={"learner": LearnerConfig(ranks=4, precision="bfloat16")})
    with RunStore.open(other, tmp_path / "r") as store:
        assert [str(change) for change in store.changes] == ["learner.precision: 'float32' -> 'bfloat16'"]
        store.adopt()
    with pytest.raises(ConfigError, match="precision"):
        RunStore.open(moved, tmp_path / "r", exact=True)


def test_a_checkpoint_that_fails_half_way_leaves_nothing(tmp_path: Path):
    with RunStore.open(config(), tmp_path / "r") as store:
        save(store, 1)
        with pytest.raises(ZeroDivisionError), store.checkpoint(2, keep=1) as folder:
            (folder / "half").write_text(f"{1 / 0}")
        assert [p.name for p in (store.path / "checkpoints").iterdir()] == ["step-1"]


@pytest.mark.parametrize("damage", ["cut", "changed", "missing", "manifest"])
def test_a_damaged_checkpoint_is_put_aside_with_a_warning(tmp_path: Path, damage: str):
    with RunStore.open(config(), tmp_path / "r") as store:
        save(store, 1)
        weights = save(store, 2) / "model.safetensors"
        if damage == "cut":
            weights.write_text("w")
        elif damage == "changed":
            weights.write_text("x" + "w" * 999)
        elif damage == "missing":
            weights.unlink()
        else:
            (weights.parent / "manifest.json").unlink()
        if damage != "manifest":
            with pytest.raises(CheckpointError, match=r"model\.safetensors"):
                find_checkpoint(weights.parent)
        assert find_checkpoint(store.path).step == 1
        with pytest.warns(UserWarning, match="falling back to the checkpoint before it"):
            latest = store.latest_checkpoint()
        assert latest is not None
        assert latest.step == 1
        assert (store.path / "checkpoints/step-2.damaged").is_dir()
        save(store, 2)  # the resumed run saves its own
        again = store.latest_checkpoint()
        assert again is not None
        assert again.step == 2


CRASH = """
import os, signal, sys
from pathlib import Path
from agentrl.config import RunConfig
from agentrl.run_folder.store import RunStore

def save(folder, moment):
    calls = 0
    def killer(real):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        return call
    store = RunStore.open(RunConfig.model_validate_json(sys.argv[1]), folder)
    for name in ("fsync", "rename", "replace", "unlink", "rmdir"):
        setattr(os, name, killer(getattr(os, name)))
    for step in (1, 2, 2):
        with store.checkpoint(step, keep=1) as checkpoint:
            (checkpoint / "weights").write_text(f"weights of {step}")
        store.log_metrics(step, {})

moment, status = 0, signal.SIGKILL
while status == signal.SIGKILL:
    moment += 1
    child = os.fork()
    if not child:
        save(Path(sys.argv[2]) / f"r{moment}", moment)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
print(moment, status)
"""


@pytest.mark.slow
def test_kill_9_at_any_moment_of_saving_leaves_a_good_checkpoint(tmp_path: Path):
    """Kill a process before each system call that changes the folder, then reopen it."""
    command = [sys.executable, "-c", CRASH, config().model_dump_json(), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    moments, status = map(int, done.stdout.split())
    assert status == 0, "the last process was not killed, and saved"
    assert moments > 15
    seen = set()
    for moment in range(1, moments):
        folder = tmp_path / f"r{moment}"
        with RunStore.open(config(), folder) as store:
            steps = [line["step"] for line in store.metrics()]
            latest = store.latest_checkpoint()
            if steps:
                assert latest is not None
                assert latest.step >= steps[-1]
            if latest is not None:
                seen.add(latest.step)
                assert (latest.path / "weights").read_text() == f"weights of {latest.step}"
            leftovers = [p.name for p in (folder / "checkpoints").iterdir() if p.name.startswith(".")]
            assert leftovers == []
    assert seen == {1, 2}


def test_the_summary_round_trips(tmp_path: Path):
    with RunStore.open(config(), tmp_path / "r") as store:
        assert store.read_summary() is None
        summary = Summary(run=str(store.path), steps=3, held_out_before=0.5, held_out_after=0.96, malformed=4)
        store.write_summary(summary)
        assert store.read_summary() == summary
        data = json.loads((store.path / "summary.json").read_text())
    wanted = {"held_out_before", "held_out_after", "train_seconds", "wall_seconds", "malformed", "limits"}
    assert wanted | {"infra_failures", "steps", "run"} <= data.keys()
    assert os.listdir(tmp_path) == ["r"]


def test_the_docs_say_what_is_free_and_what_is_fixed():
    page = (Path(__file__).parents[2] / "docs/runs.md").read_text()
    sections = [(loc, field) for loc, field in fields() if len(loc) == 1]
    for kind in ("free", "fixed"):
        (row,) = (line for line in page.splitlines() if line.startswith(f"| {kind} |"))
        marked = [loc[0] for loc, field in sections if any(fact.kind == kind for fact in facts(field, OnResume))]
        assert [name for name in marked if f"`{name}`" not in row] == ([] if kind == "fixed" else ["name", "ray"])


def test_two_threads_may_write_one_file_at_once(tmp_path: Path):
    # Each stops between its pieces until the other has begun.
    both, path = threading.Barrier(2, timeout=20), tmp_path / "curve.png"

    def pieces(name: bytes) -> Iterator[bytes]:
        yield name
        both.wait()
        yield name

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: write_atomic(path, pieces(name)), [b"one", b"two"]))
    assert path.read_bytes() in (b"oneone", b"twotwo")
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_an_error_with_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The operating system says none where a write fails."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("agentrl.run_folder.files.os.fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_atomic(tmp_path / "episodes.jsonl", b"{}")
    assert caught.value.filename == str(tmp_path / "episodes.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_made_is_named_itself_not_its_temporary_file(tmp_path: Path):
    path = tmp_path / "missing" / "config.yaml"
    with pytest.raises(FileNotFoundError) as caught:
        write_atomic(path, b"{}")
    assert caught.value.filename == str(path)


def test_a_path_that_is_not_utf8_is_refused_before_anything_is_made(tmp_path: Path):
    with pytest.raises(ConfigError, match="must be UTF-8"):
        RunStore.open(config(), tmp_path / os.fsdecode(b"lat-\xfc") / "r")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_line_that_does_not_fit_is_an_error_with_a_place(tmp_path: Path):
    with RunStore.open(config(), tmp_path / "r") as store:
        for name in ("events.log", "redrawn.jsonl"):
            (store.path / name).unlink(missing_ok=True)
            (store.path / name).symlink_to("/dev/full")
        with pytest.raises(OSError, match=r"No space left on device: .*events\.log"):
            store.event("something")
        with pytest.raises(OSError, match=r"No space left on device: .*redrawn\.jsonl"):
            store.log_redraws(1, Redraws())


def test_metrics_that_do_not_fit_are_one_error_and_free_the_folder(tmp_path: Path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill() -> None:
        with RunStore.open(config(), tmp_path / "r") as store:
            store.log_metrics(0, {"reward": 1.0})
            resource.setrlimit(resource.RLIMIT_FSIZE, (40, before[1]))
            store.log_metrics(1, {"reward": 1.0})

    try:
        with pytest.raises(OSError, match="File too large") as caught:
            fill()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.filename == str(tmp_path / "r" / "metrics.jsonl")
    with RunStore.open(config(), tmp_path / "r") as store:  # nobody holds it
        assert [line["step"] for line in store.metrics()] == [0]


def test_a_folder_that_cannot_be_opened_is_free_again(tmp_path: Path):
    with RunStore.open(config(), tmp_path / "r"):
        pass
    folder = tmp_path / "r/checkpoints"
    folder.rmdir()
    folder.touch()
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"checkpoints: is a file; a run needs a folder of this name"):
            RunStore.open(config(), tmp_path / "r")
    folder.unlink()
    with RunStore.open(config(), tmp_path / "r") as store:
        assert store.resumed


def test_safetensors_and_tokenizers_say_the_error_of_the_file_system_as_text(tmp_path: Path):
    text = "Error while serializing: I/O error: No space left on device (os error 28)"
    for said in (SafetensorError(text), Exception("No space left on device (os error 28)")):
        found = file_error(said, tmp_path)
        assert isinstance(found, OSError)
        assert (found.errno, found.filename) == (errno.ENOSPC, str(tmp_path))
    for other in (
        SafetensorError("invalid header"),
        ValueError("(os error 28)"),
        OSError(errno.ENOSPC, "full", "a"),
    ):
        assert file_error(other, tmp_path) is other
    nameless = file_error(OSError(errno.ENOSPC, "full"), tmp_path)
    assert isinstance(nameless, OSError)
    assert nameless.filename == str(tmp_path)
