"""Runs that are resumed with other settings or code, and forks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.config.changes import changes_of, kind_of
from agentrl.config.load import load_config
from agentrl.config.run import RunConfig, TinyModel
from agentrl.errors import AgentRLError, CheckpointError, ConfigError
from agentrl.models.tiny import make_tiny_model
from agentrl.reporting.report import Silent, Summary
from agentrl.run_folder import checkpoints
from agentrl.run_folder.fork import fork_again, fork_run, parse_source
from agentrl.run_folder.history import read_history, read_lineage
from agentrl.run_folder.own_start import with_own_start
from agentrl.run_folder.records import read_episodes, read_metrics
from agentrl.run_folder.store import RunStore
from agentrl.trainer.replay import replay
from agentrl.trainer.run import train_run
from agentrl.trainer.signals import StopRequest
from tests.trainer.test_mixture import TINY, StopAfter

ENV = '''
from agentrl import Task, TextEnv, reward

HELP = "one letter"


class Letters(TextEnv):
    """Say a letter."""

    @classmethod
    def tasks(cls, split, seed, size=20):
        return [Task(f"{split}-{n}", {"number": n}) for n in range(size)]

    async def setup(self, number: int) -> str:
        self.number = number
        return f"Say something about {number}"

    def reply(self, text):
        return None

    @reward
    def vowels(self, episode) -> float:
        # a comment
        return sum(letter in "aeiou" for letter in str(episode.messages[-1].content)) / 10.0
'''
TIMES = ("seconds", "_s", "waited", "wait", "timing")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("letters.py").write_text(ENV)


def settings(**changes: Any) -> RunConfig:
    base: dict[str, Any] = {
        "name": "letters",
        "steps": 2,
        "env": {"use": f"{Path.cwd()}/letters.py:Letters"},
        "model": TINY,
        "rollout": {"groups_per_step": 2, "group_size": 3, "max_turns": 1, "max_tokens": 6, "token_budget": 400},
        "algorithm": {"kl": {"coef": 0.01}},
        "optim": {"lr": 1e-2, "warmup_steps": 1},
        "eval": {"tasks": 2},
        "checkpoint": {"every": 1, "keep": 10},
    }
    return RunConfig.model_validate(base | changes)


class Told(Silent):
    """Keeps its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def run(config: RunConfig, folder: str | Path, reporter: Silent | None = None, **more: Any) -> Summary:
    with RunStore.open(config, Path(folder)) as store:
        return train_run(config, store, reporter or Silent(), **more)


def weights(folder: str | Path, step: int) -> dict[str, list[float]]:
    found = load_file(next((Path(folder) / "checkpoints" / f"step-{step}").glob("model*.safetensors")))
    return {name: tensor.flatten().tolist() for name, tensor in found.items()}


def curve(folder: str | Path) -> list[dict[str, float]]:
    """The metrics of each step that are equal in equal runs: no times, and no drift.

    How the sampler rounds depends on which episodes share a batch.
    """
    lines = [{k: v for k, v in line.items() if not k.endswith(TIMES)} for line in read_metrics(Path(folder))]
    return [
        {k: v for k, v in line.items() if "second" not in k and k != "tokens_per_s" and not k.startswith("drift/")}
        for line in lines
    ]


@pytest.mark.timeout(120)
def test_a_finished_run_goes_on_as_if_it_had_been_longer_from_the_start():
    assert run(settings(), "short").finished
    assert run(settings(steps=4, checkpoint={"every": 2, "keep": 3}), "short").finished
    assert run(settings(steps=4), "long").finished
    assert weights("short", 4) == weights("long", 4)
    assert [e.id for e in read_episodes(Path("short"), 4)] == [e.id for e in read_episodes(Path("long"), 4)]
    assert read_history(Path("short")) == [], "these keys are free"
    told = Told()
    assert run(settings(steps=3), "short", told).finished
    assert any("step 4 is done and steps is 3: nothing to train" in note for note in told.notes)
    assert len(read_metrics(Path("short"))) == 5, "nothing is lost"


@pytest.mark.timeout(120)
def test_a_changed_setting_takes_effect_and_enters_the_history():
    run(settings(), "r")
    changed = settings(
        steps=3,
        optim={"lr": 1e-4, "warmup_steps": 1},
        rollout=settings().rollout.model_dump() | {"group_size": 4, "groups_per_step": 3},
    )
    assert run(changed, "r").finished
    (entry,) = read_history(Path("r"))
    assert entry["step"] == 2
    assert entry["changes"] == {
        "rollout.groups_per_step": ["2", "3"],
        "rollout.group_size": ["3", "4"],
        "optim.lr": ["0.01", "0.0001"],
    }
    last = read_metrics(Path("r"))[-1]
    assert last["lr"] == pytest.approx(1e-4)
    assert last["episodes"] == 12
    ids = [e.id for step in (1, 2, 3) for e in read_episodes(Path("r"), step)]
    assert len(set(ids)) == len(ids), "no name is used twice"
    assert "changed: optim.lr: 0.01 -> 0.0001" in Path("r/events.log").read_text()
    assert load_config("r/config.yaml").optim.lr == 1e-4
    shown = CliRunner().invoke(app, ["show", "r", "-n", "0"])
    assert "changed after step 2: optim.lr: 0.01 -> 0.0001" in shown.output


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 5}, "seed: 0 -> 5"),
        ({"model": {"tiny": {**TINY["tiny"], "layers": 2}}}, "model.tiny.layers: 1 -> 2"),
        ({"learner": {"lora": {"rank": 4}}}, "learner.lora"),
        ({"algorithm": {"advantage": "gae", "kl": {"coef": 0.01}}}, "critic"),
    ],
)
def test_what_a_run_is_cannot_change(change: Mapping[str, Any], said: str):
    run(settings(), "r")
    before = Path("r/config.yaml").read_text()
    with pytest.raises(ConfigError, match=said):
        run(settings(**change), "r")
    assert Path("r/config.yaml").read_text() == before
    assert read_history(Path("r")) == []


def test_every_key_has_a_kind():
    kinds = {
        key: kind_of(key.split(".")) for key in ("steps", "optim.lr", "model.tiny.layers", "eval.sets.x.every")
    }
    assert kinds == {
        "steps": "free",
        "optim.lr": "recorded",
        "model.tiny.layers": "fixed",
        "eval.sets.x.every": "free",
    }
    assert kind_of(["engine", "server", "replicas"]) == "free"
    assert kind_of(["envs", "a", "rollout", "group_size"]) == "recorded"
    assert [str(change) for change in changes_of(settings(), settings(steps=9))] == ["steps: 2 -> 9"]


@pytest.mark.timeout(60)
def test_a_model_that_has_moved_is_the_same_model():
    make_tiny_model(Path("model"), ["Say something about 1"] * 20, TinyModel(**TINY["tiny"]), seed=0)
    there = Path.cwd() / "model"
    run(settings(model={"path": str(there)}), "runs/letters")
    moved = there.rename(Path.cwd() / "moved")
    shutil.copytree(moved, "other")
    with Path("other/model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    with pytest.raises(ConfigError, match=r"model.path: '.*/model' -> '.*/other' \(its content differs\)"):
        run(settings(steps=3, model={"path": f"{Path.cwd()}/other"}), "runs/letters")
    assert run(settings(steps=3, model={"path": str(moved)}), "runs/letters").finished
    assert read_history(Path("runs/letters")) == []
    assert load_config("runs/letters/config.yaml").model.path == str(moved)
    kept = Path("moved/model.safetensors").read_bytes()
    Path("moved/model.safetensors").write_bytes(kept[:-1] + b"x")
    with pytest.raises(ConfigError, match=r"model.path: '.*/moved' -> '.*/moved' \(its content differs\)"):
        run(settings(steps=4, model={"path": str(moved)}), "runs/letters")
    Path("moved/model.safetensors").write_bytes(kept)
    assert replay(Path("runs/letters"), 1).equal, "with the model where it is now"
    there.symlink_to(moved)
    fork = fork_run(settings(name="fork", model={"path": str(there)}), "runs/letters@1")
    assert [list(entry["changes"]) for entry in read_history(fork)] == [["forked from"]]
    Path("runs/letters/inputs.json").write_text("{}")  # as of an older version
    there.unlink()
    moved.rename("gone")
    with pytest.raises(ConfigError, match="the old one is gone and its content unknown"):
        run(settings(steps=5, model={"path": f"{Path.cwd()}/gone"}), "runs/letters")
    with pytest.raises(CheckpointError, match=r"started with is gone from .*/moved; put it back"):
        replay(Path("runs/letters"), 1)


@pytest.mark.timeout(120)
def test_changed_code_is_named_and_must_be_confirmed():
    run(settings(), "r")
    Path("letters.py").write_text(ENV.replace("# a comment", "# another one"))
    assert run(settings(steps=3), "r").finished, "comments do not count"
    changed = ENV.replace("/ 10.0", "/ 5.0").replace("one letter", "two").replace("size=20", "size=19")
    Path("letters.py").write_text(changed + "\n    @reward\n    def other(self) -> float:\n        return 0.0\n")
    with pytest.raises(ConfigError) as refused:
        run(settings(steps=4), "r")
    said = str(refused.value)
    for part in (
        "letters.py: ",
        "reward Letters.vowels changed",
        "reward Letters.other added",
        "Letters.tasks changed",
        "(module) changed",
        "train tasks: 20 -> 19",
        "--accept-code",
    ):
        assert part in said
    assert run(settings(steps=4), "r", accept_code=True).finished
    assert "reward Letters.vowels changed" in json.dumps(read_history(Path("r")))
    assert Path("r/code/step-0/letters.py").read_text() == ENV
    assert "/ 5.0" in Path("r/code/step-3/letters.py").read_text()
    history = read_history(Path("r"))
    shutil.rmtree("r/checkpoints/step-4")  # as if it had been killed before it saved
    assert run(settings(steps=5), "r").finished, "asked once"
    assert read_history(Path("r")) == history


@pytest.mark.timeout(60)
def test_a_change_that_is_refused_leaves_no_trace():
    run(settings(), "r")
    before = {path: path.read_bytes() for path in Path("r").glob("*.*") if path.name != "events.log"}
    Path("letters.py").write_text(ENV.replace("/ 10.0", "/ 5.0"))
    with pytest.raises(ConfigError, match="vowels changed"):
        run(settings(steps=3, optim={"lr": 1e-4, "warmup_steps": 1}, data={"options": {"size": 15}}), "r")
    Path("letters.py").write_text(ENV)
    small = settings().rollout.model_dump() | {"token_budget": 7}
    other = settings(steps=3, rollout=small, data={"options": {"size": 15}, "overlong_prompts": "refuse"})
    with pytest.raises(ConfigError, match="its prompt has"):  # found only when the engine is there
        run(other, "r")
    assert {path: path.read_bytes() for path in Path("r").glob("*.*") if path.name != "events.log"} == before
    assert run(settings(steps=3), "r").finished, "the tasks are those of the run"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"train": ["0', "damaged: Invalid JSON: EOF while parsing a string"),
        ('{"train": 5}', "damaged: train: Input should be a valid array"),
        (None, "cannot be read: No such file"),
    ],
)
def test_digests_of_tasks_that_cannot_be_read_are_named(content: str | None, said: str):
    run(settings(), "r")
    digests = Path("r/tasks.json")
    before = digests.read_bytes()
    digests.unlink()
    if content is not None:
        digests.write_text(content)
    with pytest.raises(
        CheckpointError, match=rf"r/tasks\.json: {said}.*replace it with .*step-2/tasks\.json"
    ) as e:
        run(settings(steps=3), "r")
    assert "train tasks" not in str(e.value)
    run(settings(steps=3), "r", accept_code=True)
    assert digests.read_bytes() == before
    assert f"tasks.json: {said}" in str(read_history(Path("r"))[-1]["changes"])


def test_tasks_that_changed_with_their_settings_need_no_confirmation():
    run(settings(), "r")
    assert run(settings(steps=3, data={"options": {"size": 15}}), "r").finished
    assert "train tasks: 20 -> 15" in json.dumps(read_history(Path("r")))


@pytest.mark.timeout(60)
def test_tasks_that_are_again_those_of_the_checkpoint_need_no_confirmation():
    run(settings(), "r")
    assert run(settings(data={"options": {"size": 15}}), "r").finished, "nothing is left to train"
    assert run(settings(steps=3), "r").finished


@pytest.mark.timeout(60)
def test_digests_of_a_checkpoint_that_cannot_be_read_say_nothing_about_the_tasks():
    run(settings(), "r")
    run(settings(data={"options": {"size": 15}}), "r")
    Path("r/checkpoints/step-2/tasks.json").write_text("{")
    with pytest.raises(
        ConfigError, match=r"(?s)tasks changed since step 2:.*train tasks: 15 -> 20.*--accept-code"
    ):
        run(settings(steps=3), "r")


@pytest.mark.timeout(60)
def test_another_evaluation_set_leaves_no_trace():
    run(settings(steps=1), "r")
    Path("rows.jsonl").write_text('{"number": 77}\n')
    extra = {"tasks": 2, "sets": {"extra": {"data": f"{Path.cwd()}/rows.jsonl"}}}
    assert run(settings(eval=extra), "r").finished
    assert read_history(Path("r")) == []
    assert any("extra" in name for name in read_metrics(Path("r"))[-1]), "it is played"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ended", [0, 1])
def test_wall_time_includes_the_steps_of_a_process_that_was_killed(ended: int):
    """It left no summary, or one of an earlier process that had ended after a step."""
    run(settings(steps=2), "r")
    lines = [dict(line) for line in read_metrics(Path("r"))]
    for line in lines[1:]:
        line["seconds"] = 1000.0
    Path("r/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = Path("r/summary.json")
    if ended:
        file.write_text(json.dumps(json.loads(file.read_text()) | {"steps": 1, "wall_seconds": 5000.0}))
    else:
        file.unlink()
    summary = run(settings(steps=3), "r")
    assert 6000 * ended + 2000 * (1 - ended) < summary.wall_seconds < 7000
    assert 2000 < summary.train_seconds < summary.wall_seconds


@pytest.mark.timeout(120)
def test_a_fork_reaches_the_weights_of_the_run_it_comes_from():
    run(settings(steps=4), "runs/letters")
    folder = fork_run(settings(steps=4), "runs/letters@2")
    assert folder.name == "letters-from-2"
    assert not (folder / "checkpoints/step-4").exists()
    summary = run(settings(steps=4), folder)
    assert summary.finished
    assert summary.train_seconds <= summary.wall_seconds, "without the steps that were copied"
    assert summary.train_seconds == sum(line["seconds"] for line in read_metrics(folder) if line["step"] > 2)
    assert weights(folder, 4) == weights("runs/letters", 4)
    assert curve(folder) == curve("runs/letters")
    assert [e.id for e in read_episodes(folder, 1)] == [e.id for e in read_episodes(Path("runs/letters"), 1)]
    lineage = read_lineage(folder)
    assert lineage is not None
    assert (Path(lineage.run).name, lineage.step) == ("letters", 2)
    assert fork_run(settings(steps=4), "runs/letters@2") == folder, "the same command finds it again"
    shown = CliRunner().invoke(app, ["show", str(folder), "-n", "0"])
    assert "forked from" in shown.output
    again = fork_run(settings(name="third", optim={"lr": 1e-3, "warmup_steps": 1}), f"{folder}@4")
    assert "optim.lr" in json.dumps(read_history(again))


@pytest.mark.timeout(120)
def test_a_fork_before_a_change_has_the_settings_of_its_own_steps():
    slower = {"lr": 1e-4, "warmup_steps": 1}
    run(settings(steps=2), "runs/letters")
    run(settings(steps=3, optim=slower), "runs/letters")
    changed = fork_run(settings(name="slower", optim=slower), "runs/letters@1")
    assert [entry["changes"] for entry in read_history(changed)] == [
        {"forked from": f"{Path.cwd()}/runs/letters@1", "optim.lr": ["0.01", "0.0001"]}
    ]
    same = fork_run(settings(name="same"), "runs/letters@1")
    assert [list(entry["changes"]) for entry in read_history(same)] == [["forked from"]]
    assert run(settings(steps=2, name="same"), same).finished
    assert weights(same, 2) == weights("runs/letters", 2)
    assert replay(same, 1).equal
    assert replay(same, 2).equal


@pytest.mark.timeout(60)
def test_a_fork_compares_with_the_tasks_of_its_step():
    run(settings(steps=1), "runs/letters")
    Path("letters.py").write_text(ENV.replace('{"number": n}', '{"number": n + 1}'))
    run(settings(steps=2), "runs/letters", accept_code=True)
    fork = fork_run(settings(name="later"), "runs/letters@1")
    with pytest.raises(ConfigError, match="train tasks: 20 differ"):
        run(settings(name="later"), fork)
    Path("letters.py").write_text(ENV)
    assert run(settings(name="later"), fork).finished
    smaller = settings(name="smaller", data={"options": {"size": 15}})
    assert run(smaller, fork_run(smaller, "runs/letters@1")).finished, "expected with other settings"
    assert "train tasks: 20 -> 15" in json.dumps(read_history(Path("runs/smaller")))


@pytest.mark.timeout(60)
def test_weights_alone_start_a_run_from_step_one():
    run(settings(), "runs/letters")
    config = settings(name="new", steps=1, model={"tiny": {}}, checkpoint={"every": 1, "keep": 10})
    folder = fork_run(
        config,
        "runs/letters@best" if Path("runs/letters/checkpoints/best").exists() else "runs/letters",
        weights_only=True,
    )
    ready = with_own_start(config, folder)
    assert ready.model.path == str(folder / "from")
    assert run(ready, folder).finished
    assert [line["step"] for line in read_metrics(folder)] == [0, 1]
    assert with_own_start(config, folder) == ready


@pytest.mark.timeout(120)
def test_a_run_of_foreign_weights_can_be_moved_and_forked():
    run(settings(), "runs/letters")
    config = settings(name="new", checkpoint={"every": 1, "keep": 10})
    folder = fork_run(config, "runs/letters@1", weights_only=True)
    run(with_own_start(config, folder), folder)
    moved = folder.rename("runs/moved")
    assert run(with_own_start(settings(steps=3), moved), moved).finished
    again = fork_run(settings(name="again", steps=3), "runs/moved@2")
    assert run(with_own_start(settings(steps=3), again), again).finished
    assert weights(again, 3) == weights(moved, 3)
    assert replay(moved, 2).equal
    assert replay(again, 3).equal


@pytest.mark.timeout(120)
def test_a_run_that_starts_at_a_checkpoint_saves_and_resumes_its_own():
    run(settings(), "first")
    source = Path("first/checkpoints/step-2")
    model = {"path": str(source.absolute())}
    assert run(settings(model=model, checkpoint={"every": 1, "keep": 10}), "second").finished
    saved = Path("second/checkpoints/step-2")
    assert checkpoints.verify(saved) == 2
    assert "manifest.json" not in json.loads((saved / "manifest.json").read_bytes())["files"]
    told = Told()
    assert run(settings(model=model, steps=3), "second", told).finished
    assert not any("damaged" in note for note in told.notes)
    assert [line["step"] for line in read_metrics(Path("second"))] == [0, 1, 2, 3]
    assert not Path("second/checkpoints/step-2.damaged").exists()


@pytest.mark.timeout(60)
def test_the_same_command_finds_a_fork_of_a_run_that_went_on():
    run(settings(), "runs/letters")
    newest, best = settings(name="newest"), settings(name="best")
    made = fork_run(newest, "runs/letters"), fork_run(best, "runs/letters@best")
    run(settings(steps=3), "runs/letters")
    assert (fork_run(newest, "runs/letters"), fork_run(best, "runs/letters@best")) == made
    assert fork_again("runs/letters", made[0]) == "runs/letters@2", "what a stopped fork says to run"
    with pytest.raises(ConfigError, match="holds another run"):
        fork_run(newest, "runs/letters@3")
    with pytest.raises(ConfigError, match="holds another run"):
        fork_run(newest, "runs/letters", weights_only=True)


def test_a_checkpoint_that_goes_while_it_is_forked_gives_way_to_the_newer_one(monkeypatch: pytest.MonkeyPatch):
    run(settings(checkpoint={"every": 1, "keep": 1}, eval={"before_training": False}), "runs/letters")
    checkpoint = Path("runs/letters/checkpoints/step-2")
    verify = checkpoints.verify

    def overtaken(folder: Path) -> int:
        if folder.name == "step-2" and folder.exists():  # the run saves another one, and removes this
            shutil.copytree(checkpoint, checkpoint.with_name("step-3"))
            shutil.rmtree(checkpoint)
        return verify(folder)

    monkeypatch.setattr(checkpoints, "verify", overtaken)
    shutil.copytree("runs/letters", "runs/other", symlinks=True)
    assert (fork_run(settings(name="new"), "runs/letters") / "checkpoints/step-3").is_dir()
    checkpoint = Path("runs/other/checkpoints/step-2")
    with pytest.raises(CheckpointError, match="the run removed its checkpoint of step 2 meanwhile; try again"):
        fork_run(settings(name="newer"), "runs/other@2")


def test_forks_that_make_no_sense_are_refused():
    run(settings(), "runs/letters")
    with pytest.raises(CheckpointError, match="no checkpoint of step ² in"):
        parse_source("runs/letters@²")
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7 in runs/letters \(kept: 1, 2"):
        parse_source("runs/letters@7")
    with pytest.raises(CheckpointError, match="is not a run folder"):
        parse_source("nowhere@2")
    with pytest.raises(CheckpointError, match=r"is a checkpoint; give its run and step: .*runs/letters@2"):
        parse_source("runs/letters/checkpoints/step-2")
    with pytest.raises(
        ConfigError, match=r"a fork cannot change fixed keys(.|\n)*seed: 0 -> 9(.|\n)*--weights-only"
    ):
        fork_run(settings(seed=9, name="other"), "runs/letters@1")
    assert not Path("runs/other").exists()
    Path("runs/taken").mkdir()
    Path("runs/taken/notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds another run"):
        fork_run(settings(name="taken"), "runs/letters@1")
    Path("linked").symlink_to("runs/letters")
    for inside in (Path("runs/letters/forks/new"), Path("linked/new"), Path("runs/letters")):
        for weights_only in (False, True):
            with pytest.raises(ConfigError, match=r"is inside the folder of the run being forked, runs/letters"):
                fork_run(settings(), "runs/letters@1", run_dir=inside, weights_only=weights_only)
    assert not Path("runs/letters/forks").exists()
    assert fork_run(settings(), "runs/letters@1", run_dir=Path("runs/letters-2")).is_dir()
    result = CliRunner().invoke(app, ["train", "x.yaml", "--weights-only"])
    assert result.exit_code != 0


@pytest.mark.timeout(60)
def test_a_stopped_run_resumes_with_a_change_at_the_step_it_reached():
    assert not run(settings(steps=6), "r", StopAfter(2)).finished
    assert run(settings(steps=6, algorithm={"kl": {"coef": 0.5}}), "r").finished
    (entry,) = read_history(Path("r"))
    assert entry["changes"] == {"algorithm.kl.coef": ["0.01", "0.5"]}


@pytest.mark.timeout(60)
def test_the_view_of_an_env_is_kept_with_the_run():
    viewed = ENV.replace('    """Say a letter."""\n', '    """Say a letter."""\n\n    view = "board.js"\n')
    Path("letters.py").write_text(viewed)
    with pytest.raises(ConfigError, match=r"Letters.view is 'board.js': there is no file .*board.js"):
        run(settings(), "r")
    Path("board.js").write_text("function render() {}")
    run(settings(name="other"), "other")
    assert Path("other/views/env.js").read_text() == "function render() {}"


def test_a_fork_deletes_no_file_of_the_user(tmp_path: Path):
    run(settings(steps=2), "runs/letters")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / ".env").write_text("precious")
    with pytest.raises(ConfigError, match=r"mine: holds .* other files \(\.env\)"):
        fork_run(settings(steps=3), "runs/letters@2", run_dir=tmp_path / "mine")
    assert (tmp_path / "mine" / ".env").read_text() == "precious"
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".lock").touch()
    (tmp_path / "link").symlink_to("empty")
    folder = fork_run(settings(steps=3), "runs/letters@2", run_dir=tmp_path / "link")
    assert folder == (tmp_path / "empty").resolve()
    assert run(settings(steps=3), folder).finished


def test_a_run_is_finished_although_lines_and_its_summary_were_lost(tmp_path: Path):
    run(settings(steps=3), "runs/letters")
    lines = Path("runs/letters/metrics.jsonl").read_text().splitlines(keepends=True)
    odd = '{"step": 3, "solved": "abc", "reward": [1]}\n'
    Path("runs/letters/metrics.jsonl").write_text("".join(lines[:2]) + odd)
    Path("runs/letters/summary.json").write_text("not json")
    told = Told()
    summary = run(settings(steps=3), "runs/letters", told)
    assert (summary.steps, summary.finished) == (3, True)
    assert any("metrics.jsonl lacks 2 of the 3 steps" in note for note in told.notes)
    assert any("summary.json cannot be read" in note for note in told.notes)


def test_a_run_without_its_first_lines_does_not_evaluate_later_weights_as_those_before_training():
    run(settings(), "runs/letters")
    lines = Path("runs/letters/metrics.jsonl").read_text().splitlines(keepends=True)
    Path("runs/letters/metrics.jsonl").write_text("".join(lines[1:]))
    summary = run(settings(steps=3), "runs/letters")
    assert [line["step"] for line in read_metrics(Path("runs/letters"))] == [1, 2, 3]
    assert (summary.held_out_reward_before, summary.finished) == (None, True)


PAYS = """
from pathlib import Path

from agentrl import Task, TextEnv


class Pays(TextEnv):
    \"\"\"Say a letter.\"\"\"

    @classmethod
    def tasks(cls, split, seed, size=20):
        return [Task(f"{split}-{n}", {"number": n}) for n in range(size)]

    def setup(self, number: int) -> str:
        return f"Say something about {number}"

    def reply(self, text):
        return None

    async def score(self, episode):
        return {"paid": 1.0} if Path("pays").exists() else {}
"""


def test_a_run_that_had_rewards_is_resumed_although_the_next_steps_have_none():
    Path("pays.py").write_text(PAYS)
    Path("pays").touch()
    env = {"use": f"{Path.cwd()}/pays.py:Pays"}
    run(settings(steps=1, env=env), "runs/pays")
    Path("pays").unlink()
    assert run(settings(steps=5, env=env), "runs/pays").finished
    assert [line["reward"] for line in read_metrics(Path("runs/pays"))[1:]] == [1, 0, 0, 0, 0]


class Late(Silent):
    """Asks the run to stop once its first step is complete, when the display waits for episodes again."""

    def __init__(self) -> None:
        self.stop, self.done = StopRequest(), False

    def step(self, metrics: Mapping[str, float]) -> None:
        self.done = True

    def within(self, doing: str, done: int | None = None, total: int | None = None) -> None:
        if self.done and doing == "episodes" and not self.stop:
            self.stop.ask("the user")


def test_a_run_that_is_asked_to_stop_at_the_end_of_a_step_saves_it():
    late = Late()
    summary = run(settings(steps=3, checkpoint={"every": 3}), "runs/letters", late, stop=late.stop)
    assert (summary.steps, summary.finished) == (1, False)
    assert checkpoints.steps_saved(Path("runs/letters/checkpoints")) == [1]


def test_what_ended_a_run_is_in_its_folder():
    with pytest.raises(AgentRLError):
        run(settings(steps=3, optim={"lr": 1e308}), "runs/letters")
    said = Path("runs/letters/events.log").read_text().splitlines()[-1]
    assert "ended by AgentRLError: step" in said
