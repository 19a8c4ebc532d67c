"""`agentrl train` and `agentrl eval` with a real, tiny, untrained model."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentrl.cli import main
from agentrl.cli.serve import _find as serve_find
from agentrl.engine.chat_client import Endpoint
from agentrl.errors import CheckpointError, ConfigError
from agentrl.eval.target import find
from agentrl.run_folder.checkpoints import steps_saved
from agentrl.run_folder.records import read_episodes, read_metrics
from agentrl.run_folder.store import find_checkpoint

YAML = """\
env: agentrl.envs.calculator:Calculator
model: {tiny: {hidden: 32, layers: 1, heads: 2, intermediate: 64, vocab: 400}}
steps: 2
rollout: {groups_per_step: 2, group_size: 2, max_turns: 2, max_tokens: 8, token_budget: 400}
eval: {tasks: 3}
"""


@dataclass
class Done:
    """A command that has ended."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def agentrl(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Run a command in this process, which has imported PyTorch already."""

    def run(*words: str | Path, cwd: Path) -> Done:
        monkeypatch.chdir(cwd)
        monkeypatch.setattr("sys.argv", ["agentrl", *map(str, words)])
        capsys.readouterr()
        code = 0
        try:
            main(list(map(str, words)))
        except SystemExit as left:
            code = int(left.code or 0)
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tools.yaml and its finished run of two steps."""
    folder = tmp_path_factory.mktemp("calc")
    (folder / "tools.yaml").write_text(YAML)
    command = [sys.executable, "-W", "error", "-m", "agentrl", "train", "tools.yaml"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (folder / "out.txt").write_text(result.stdout + "\n---\n" + result.stderr)
    return folder


def test_training_says_its_steps_and_leaves_its_folder(trained: Path):
    out, err = (trained / "out.txt").read_text().split("\n---\n")
    assert err == ""
    assert sum(line.startswith("train ") for line in out.splitlines()) == 2
    run = next((trained / "runs").iterdir())
    assert run.name == trained.name
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["episodes"] == 8
    assert summary["limits"] + summary["malformed"] > 0
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "events.log",
        "reward_curve.png",
        "checkpoints/step-2/manifest.json",
    ):
        assert (run / name).is_file()
    assert len(read_episodes(run, 2)) == 4
    assert f"agentrl eval runs/{run.name}" in out


def test_whoever_may_read_the_configuration_of_a_run_may_read_its_weights(trained: Path):
    weights = list(trained.rglob("*.safetensors"))
    assert {file.parent.name for file in weights} >= {"start", "step-2"}
    (configuration,) = trained.glob("runs/*/config.yaml")
    assert {file.stat().st_mode for file in weights} == {configuration.stat().st_mode}


def test_the_same_command_goes_on_and_another_configuration_is_refused(
    agentrl: Callable[..., Done], trained: Path
):
    again = agentrl("train", "tools.yaml", cwd=trained)
    assert again.returncode == 0, again.stderr
    assert "note: resumes the run in" in again.stdout
    assert not any(line.startswith("train 1/") for line in again.stdout.splitlines())
    other = agentrl("train", "tools.yaml", "--set", "seed=5", cwd=trained)
    assert other.returncode == 2
    assert other.stdout == ""
    assert "seed: 0 -> 5" in other.stderr
    assert "--fresh" in other.stderr


def test_prompts_without_room_are_refused_before_the_first_step_and_leave_no_folder(
    agentrl: Callable[..., Done], tmp_path: Path
):
    (tmp_path / "tools.yaml").write_text(YAML)
    refused = agentrl("train", "tools.yaml", "--set", "rollout.token_budget=20", cwd=tmp_path)
    assert refused.returncode == 2
    assert re.search(r"the prompt of task '.+' has \d+ tokens and rollout.token_budget is 20", refused.stderr)
    assert "data.overlong_prompts: drop" in refused.stderr
    assert list((tmp_path / "runs").iterdir()) == []


WITHOUT_TRAIN = """\
import sys
for name in ("torch", "transformers", "tokenizers", "safetensors", "matplotlib"):
    sys.modules[name] = None  # as if it were not installed
from agentrl.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    "words",
    [
        ["check", "tools.yaml"],
        ["train", "tools.yaml"],
        ["eval", "model", "--env", "agentrl.envs.calculator:Calculator"],
        ["serve", "model"],
    ],
)
def test_without_its_packages_a_command_names_the_extra_in_one_line(tmp_path: Path, words: list[str]):
    (tmp_path / "tools.yaml").write_text(YAML)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    command = [sys.executable, "-c", WITHOUT_TRAIN, *words]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    [line] = result.stderr.splitlines()
    assert line.endswith("not installed: pip install 'agentrl-train[train]'")
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_run_goes_on_where_it_stopped(
    agentrl: Callable[..., Done], tmp_path: Path, number: signal.Signals
):
    """Ctrl-C and SIGTERM save and leave; after kill -9 the last checkpoint counts. No step is written twice."""
    (tmp_path / "tools.yaml").write_text(YAML.replace("steps: 2", "steps: 400") + "checkpoint: {every: 2}\n")
    command = [sys.executable, "-m", "agentrl", "train", "tools.yaml"]
    run = tmp_path / "runs" / tmp_path.name
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None
        seen = next(line for line in training.stdout if line.startswith("train 3/"))
        assert "left" in seen
        while number == signal.SIGKILL and not steps_saved(run / "checkpoints"):
            next(training.stdout)  # checkpoints are written beside the training: the first may take some steps
        training.send_signal(number)
        rest = training.stdout.read()
    if number == signal.SIGKILL:
        assert training.returncode == -signal.SIGKILL
    else:
        assert training.returncode == 130
        assert f"note: {number.name}: saving after this step, then leaving" in rest
        assert "stopped by request after" in rest
        assert "agentrl train tools.yaml" in rest
        assert json.loads((run / "summary.json").read_text())["finished"] is False

    saved = find_checkpoint(run).step
    assert 2 <= saved < 400
    recorded = read_metrics(run)[-1]["step"]
    steps = saved + 3
    again = agentrl("train", "tools.yaml", "--set", f"steps={steps}", cwd=tmp_path)
    first = next(line for line in again.stdout.splitlines() if line.startswith("train "))
    assert ("done again: no checkpoint has them (checkpoint.every is 2)" in again.stdout) == (recorded > saved)
    assert first.startswith((f"train: resumes after {saved}/{steps}", f"train {saved + 1}/{steps}"))
    assert [line["step"] for line in read_metrics(run)] == list(range(steps + 1))  # 0: before training


def test_a_run_stopped_while_it_imports_torch_says_how_to_start_it_again(tmp_path: Path):
    (tmp_path / "tools.yaml").write_text(YAML)
    # SIGINT is ignored in background jobs of a script.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from agentrl.cli import main; main()"
    command = [sys.executable, "-c", code, "train", "tools.yaml"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None
        said = []
        for line in training.stdout:
            said.append(line)
            # Python drops an exception where it can raise none, so that it may come only the next time.
            if "start: importing torch\n" in said and line.startswith("start:"):
                training.send_signal(signal.SIGINT)
    assert "note: aborted; agentrl train tools.yaml starts it again\n" in said
    assert training.returncode == 130


def test_eval_plays_a_run_a_checkpoint_and_a_bare_model(agentrl: Callable[..., Done], trained: Path):
    run = next((trained / "runs").iterdir())
    result = agentrl("eval", run, "--split", "train", "--out", "e", cwd=trained)
    assert result.returncode == 0, result.stderr
    assert "% of 3 train tasks" in result.stdout
    assert "with 95 % confidence" in result.stdout
    again = agentrl("eval", run, "--split", "train", "--out", "e", "--min", "solved=1.0", cwd=trained)
    assert again.returncode == 1
    assert "complete in e; --fresh plays it again" in again.stderr
    assert "--min: solved is 0, below 1" in again.stderr
    bare = ("eval", run / "start", "--tasks", "2", "--env", "agentrl.envs.calculator:Calculator", "-k", "2")
    result = agentrl(*bare, "--set", "engine.max_slots=2", "--out", "f", cwd=trained)
    assert result.returncode == 0, result.stderr
    assert "max_slots: 2\n" in (trained / "f" / "config.yaml").read_text()
    assert "of 2 held-out tasks, 2 attempts each" in result.stdout
    assert "pass^2" in result.stdout
    compared = agentrl("eval", "--compare", "e", "f", cwd=trained)
    assert compared.returncode == 2
    assert "have no task in common" in compared.stderr
    shown = agentrl("show", "f", cwd=trained)
    assert "eval/g0/e0" in shown.stdout
    step = agentrl("eval", f"{run}@2", "--tasks", "1", "--out", "at-step", cwd=trained)
    assert step.returncode == 0, step.stderr
    assert "step-2" in step.stdout
    missing = agentrl("eval", f"{run}@7", cwd=trained)
    assert missing.returncode == 1
    assert "there is no checkpoint of step 7" in missing.stderr


def test_a_config_in_a_model_folder_is_not_read(trained: Path, tmp_path: Path):
    """It names code: a model folder could bring its own."""
    run, model = next((trained / "runs").iterdir()), tmp_path / "model"
    shutil.copytree(run / "checkpoints" / "step-2", model)
    shutil.copytree(run / "checkpoints", model / "checkpoints", symlinks=True)
    (model / "planted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    config = (run / "config.yaml").read_text()
    assert config.count("parser: auto") == 1
    (model / "config.yaml").write_text(config.replace("parser: auto", "parser: planted.py:P"))
    assert serve_find(model, []).directory == model
    assert find(model, "a:B", [])[0].checkpoint == model
    with pytest.raises(ConfigError, match="is a model outside of a run; name what it plays: --env"):
        find(model, None, [])
    assert not (tmp_path / "ran").exists()
    (model / "renderer.json").write_text('{"hash": "of another template"}')
    with pytest.raises(CheckpointError, match="was trained with another tokenizer, chat template"):
        serve_find(model, [])


def test_a_link_to_a_checkpoint_is_one(trained: Path, tmp_path: Path):
    run, link = next((trained / "runs").iterdir()), tmp_path / "best"
    link.symlink_to(run / "checkpoints" / "step-2")
    subject, config, kept = find(link, None, [])
    assert (subject.step, config.name, kept) == (2, run.name, run / "eval")
    assert serve_find(link, []).name == run.name


def test_prompts_that_leave_no_room_are_left_out_as_in_training(agentrl: Callable[..., Done], trained: Path):
    run = next((trained / "runs").iterdir())
    tight = ("--set", "data.overlong_prompts=drop", "--set", "rollout.token_budget=185")
    result = agentrl("eval", run, "--tasks", "12", "--out", "g", *tight, cwd=trained)
    assert result.returncode == 0, result.stderr
    assert "held-out tasks are left out: their prompts have more than" in result.stderr
    kept = int(result.stdout.split(" held-out tasks")[0].split()[-1])
    assert 0 < kept < 12


def test_what_eval_plays(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = next((trained / "runs").iterdir())
    subject, config, base = find(run, None, [])
    assert (subject.checkpoint, subject.step) == (run / "checkpoints/step-2", 2)
    assert base == run / "eval"
    assert config.env.use == "agentrl.envs.calculator:Calculator"
    monkeypatch.chdir(run / "checkpoints")
    (tmp_path / "mine.py").write_text("")
    subject, config, base = find(Path("step-2"), f"{tmp_path}/mine.py:Mine", ["rollout.max_turns=3"])
    assert subject.checkpoint == Path("step-2")
    assert base == run / "eval", "the run deletes old checkpoints, with all that is in them"
    assert config.env.use == f"{tmp_path}/mine.py:Mine"
    assert config.rollout.max_turns == 3
    with pytest.raises(ConfigError, match="is a model outside of a run; name what it plays: --env"):
        find(run / "start", None, [])
    changes = ["seed=1", "rollout.max_turns=3", "engine.max_slots=7", "engine.device=cpu"]
    subject, config, base = find(run / "start", "a:B", changes)
    assert (subject.checkpoint, config.env.use) == (run / "start", "a:B")
    assert (config.seed, config.rollout.max_turns) == (1, 3)
    assert (config.engine.max_slots, config.engine.device) == (7, "cpu")
    assert find(run / "start", "a:B", ["engine.kind=sglang"])[1].engine.kind == "sglang"
    with pytest.raises(ConfigError, match=r"engine\.max_slots must be greater than 0, got 0"):
        find(run / "start", "a:B", ["engine.max_slots=0"])
    for target in (run, run / "start"):
        with pytest.raises(ConfigError, match=r"--set optim\.lr=1: `optim` has no effect on an evaluation"):
            find(target, "a:B", ["optim.lr=1"])
        with pytest.raises(ConfigError, match="has no effect on an evaluation, which updates no weights"):
            find(target, "a:B", ["engine.sync_tolerance=1"])
    endpoint = Endpoint("http://127.0.0.1:1/v1", "m")
    subject, config, base = find(run, None, [], endpoint)
    assert (subject.endpoint, base) == (endpoint, run / "eval")
    subject, config, base = find(None, "a:B", [], endpoint)
    assert (config.env.use, base) == ("a:B", Path("runs/eval"))
    assert find(None, "a:B", ["rollout.max_turns=3"], endpoint)[1].rollout.max_turns == 3
    with pytest.raises(
        ConfigError, match=r"--set engine\.max_slots=7: `engine` has no effect with --base-url http://127"
    ):
        find(run, None, ["engine.max_slots=7"], endpoint)
    with pytest.raises(ConfigError, match="name an environment: --env module:Class"):
        find(None, None, [], endpoint)
    with pytest.raises(ConfigError, match="makes its model in training; train it first"):
        find(trained / "tools.yaml", None, [])
    with pytest.raises(CheckpointError, match="no such folder"):
        find(tmp_path / "nowhere", None, [])
    with pytest.raises(CheckpointError, match="holds no finished checkpoint"):
        find(tmp_path, None, [])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["r", "--model", "m"], "--model has no effect without --base-url"),
        (["r", "--price-prompt", "1"], "prices have no effect without --base-url"),
        (
            ["--base-url", "http://x/v1", "--model", "m", "--price-prompt", "inf", "--price-completion", "1"],
            "--price-prompt, --price-completion and --price-cached must be finite numbers",
        ),
        (["--base-url", "http://x/v1"], "name the model there: --model NAME"),
        *(
            (["--env", "a:B", "--base-url", url, "--model", "m"], f"--base-url {url}: {text}")
            for url, text in (
                ("not-a-url", "not an http or https URL with a host; give an address such as http://"),
                ("127.0.0.1:8000/v1", "not a"),
                ("ftp://x/v1", "not an http or https URL"),
                ("http:///v1", "not an http or https URL"),
                ("http://x:port/v1", "not a URL: Invalid port"),
                ("http://x:99999/v1", "invalid port 99999"),
            )
        ),
        (["--base-url", "http://x/v1", "--model", "m", "--api-key-env", "NOT_SET"], "NOT_SET: this environment"),
        (["r", "--min", "pass@4=0.5"], "with --attempts 1 there is no pass@4"),
        (["r", "-k", "4", "--min", "pass@3=0.5"], "with --attempts 4 there is no pass@3; K is one of 2, 4"),
        (["r", "--min", "solved=.nan"], "the bound must be a finite number"),
        (["r", "--min", "solved=0.9", "--min", "solved=0.1"], "--min solved=0.1: solved is given twice"),
        (
            ["--base-url", "http://x/v1", "--model", "m", "--request", "a=1", "--request", "a=2"],
            "--request a=2: a is given twice",
        ),
        (["r", "--min", "loss=0.5"], "the names are solved, reward, reward/NAME, pass@K and pass^K"),
        (["r", "--compare", "a", "b"], "plays nothing: drop the rest (r)"),
        (["--compare", "a", "b", "--min", "solved=0.5"], "plays nothing: drop the rest (--min)"),
        (["--compare", "a", "b", "-k", "1"], "plays nothing: drop the rest (--attempts)"),
        *(
            ([".", "--env", "a:B", "--set", f"{key}={value}"], f"--set {key}={value}: `{unused}` has no {text}")
            for key, value, unused, text in (
                ("eval.temperature", "0.7", "eval.temperature", "effect on an evaluation; use --temperature"),
                ("eval", "{every: 2}", "eval.every", "effect on an evaluation; leave it out"),
                ("rollout", "{max_turns: 2, group_size: 4}", "rollout.group_size", "effect on an evaluation"),
                ("rollout.max_staleness", "1", "rollout.max_staleness", "effect on an evaluation"),
                ("data.sampler.order", "weighted", "data.sampler", "effect on an evaluation"),
                ("envs.a.share", "2", "envs.a.share", "effect on an evaluation"),
                ("model.path", "x", "model.path", "effect on an evaluation of ., which has the weights"),
            )
        ),
        ([".", "--set", "rollout.temperature=0.7"], "no effect on this evaluation; use --temperature"),
        ([], "name a policy: a run folder, a checkpoint, or --base-url and --model"),
        (["http://127.0.0.1:9/v1"], "http://127.0.0.1:9/v1: is a URL, not a folder; give it with --base-url"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_is_played(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as left:
        main(["eval", *words])
    assert left.value.code == 2
    assert text in capsys.readouterr().err
