"""Loggers in real short runs; every metric that these runs write has a line in the table."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from agentrl.config.loggers import LoggerConfig
from agentrl.config.run import RunConfig
from agentrl.config.schemes import SCHEMES
from agentrl.env.adapter import missing_module
from agentrl.errors import ConfigError
from agentrl.extras import installed
from agentrl.reporting.loggers.make import make_loggers
from agentrl.reporting.metric_docs import describe
from tests.trainer.test_run import Notes, Told, buttons, run

OWN = """
import json


class Lines:
    def __init__(self, path, fail=False):
        self.path, self.fail = path, fail

    def _add(self, *what):
        with open(self.path, "a") as file:
            file.write(json.dumps(what) + "\\n")

    def start(self, run):
        self._add("start", run.first_step, run.resumed, run.config["steps"])
        if self.fail:
            raise RuntimeError("no network")

    def metrics(self, step, values):
        self._add("metrics", step, sorted(values))

    def episodes(self, step, rows):
        self._add("episodes", step, len(rows), rows[0].text[:8])

    def finish(self, summary):
        self._add("finish", summary.get("steps"))
"""

VARIANTS = {
    "grpo": {},
    "ppo": {"algorithm": {"advantage": "gae", "loss": {"name": "ppo_clip", "dual_clip": 3.0}, "epochs": 2}},
    "async": {
        "algorithm": {
            "kl": {"coef": 0.01},
            "correction": {"importance": "token", "reject": {"token_k1": (0.1, 10.0)}},
            "updates_per_step": 2,
        },
        "rollout": {"max_staleness": 1, "refill_zero_signal": 1},
        "eval": {"tasks": 2, "every": 1, "attempts": 2, "temperature": 1.0},
    },
}


def quick(folder: Path, **changes: object) -> RunConfig:
    """Two steps of the buttons, without a cold start."""
    data = buttons(folder).model_dump(exclude_unset=True)
    data |= {"steps": 2, "warmup": None}
    for name, value in changes.items():
        data[name] = data[name] | value if isinstance(value, dict) and isinstance(data.get(name), dict) else value
    return RunConfig.model_validate(data)


@pytest.mark.slow
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_every_metric_of_a_run_is_documented(tmp_path: Path, variant: str) -> None:
    _, lines = run(quick(tmp_path, **VARIANTS[variant]), tmp_path / "run")
    keys = {key for line in lines for key in line} - {"step"}
    assert len(keys) > 30
    assert sorted(key for key in keys if describe(key) is None) == []


@pytest.mark.slow
def test_a_run_feeds_its_loggers_and_goes_on_after_a_stop(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    config = quick(
        tmp_path,
        loggers=[
            {"use": f"{tmp_path}/own.py:Lines", "options": {"path": f"{tmp_path}/good"}, "samples": 3},
            {"use": f"{tmp_path}/own.py:Lines", "options": {"path": f"{tmp_path}/bad", "fail": True}},
        ],
    )
    run(config, tmp_path / "run", Notes(stop_after=1))
    told = Told()
    _, lines = run(config, tmp_path / "run", told)
    assert [line["step"] for line in lines] == [0, 1, 2]
    got = [json.loads(line) for line in (tmp_path / "good").read_text().splitlines()]
    assert [line[:2] for line in got if line[0] != "finish"] == [
        ["start", 0],
        ["metrics", 0],
        ["episodes", 1],
        ["metrics", 1],
        ["start", 2],
        ["episodes", 2],
        ["metrics", 2],
    ]
    assert [line[2] for line in got if line[0] == "start"] == [False, True]
    assert [line[2] for line in got if line[0] == "episodes"] == [3, 3]
    assert got[-1] == ["finish", 2]
    step = next(line[2] for line in got if line[:2] == ["metrics", 2])
    assert {"reward", "reward/solved", "held_out", "loss", "lr"} <= set(step)
    assert not {"drift/chi2", "stop/answered"} & set(step)
    (note,) = [note for note in told.notes if "logger" in note]
    assert note.endswith("failed and gets nothing more: RuntimeError: no network")
    assert "no network" in (tmp_path / "run" / "events.log").read_text()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("tensorbord", "did you mean 'tensorboard'?"),
        ("console", "must be one of tensorboard, wandb, mlflow, trackio, or `module:Name`"),
        ({"use": "tensorboard", "project": "x"}, "project has no effect unless use is"),
        ({"use": "wandb", "tracking_uri": "x"}, "tracking_uri has no effect unless use is"),
        ({"use": "wandb", "options": {"a": 1}}, "options has no effect while use is"),
        ({"use": "mlflow", "series": "most"}, "series"),
        ({"use": "mlflow", "sample": 2}, "sample"),
        ({"samples": 2}, "use"),
    ],
)
def test_a_wrong_setting_is_refused(given: object, said: str) -> None:
    with pytest.raises(ValueError, match="loggers") as raised:
        RunConfig.model_validate({"env": "a:B", "model": {"path": "m"}, "loggers": [given]})
    assert said in str(raised.value)


def test_a_series_that_is_no_metric_is_refused() -> None:
    make_loggers([LoggerConfig(use="tensorboard", series=["reward", "env/env", "held_out/hard", "pass@4"])])
    with pytest.raises(ConfigError, match="'groups_with_signl' is not a metric; did you mean 'groups_with_si"):
        make_loggers([LoggerConfig(use="tensorboard", series=["reward", "groups_with_signl"])])
    make_loggers([LoggerConfig(use="tensorboard", series=["surprise"])], own_metrics=True)


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.extras.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"loggers: wandb needs wandb.*agentrl-train\[wandb\]"):
        make_loggers([LoggerConfig(use="wandb")])


def test_a_folder_with_the_name_of_a_package_is_not_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hollow").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_spec("hollow") is not None
    assert not installed("hollow")
    assert missing_module(replace(SCHEMES["gem"], modules=("json", "hollow"))) == "hollow"
    assert installed("json")


class Waiting:
    """A logger that is written for another loop."""

    def start(self, run: object) -> None: ...

    async def metrics(self, step: int, values: object) -> None: ...

    def episodes(self, step: int, rows: object) -> None: ...

    def finish(self, summary: object) -> None: ...


@pytest.mark.parametrize(
    ("use", "options", "said"),
    [
        ("agentrl.errors:ConfigErr", {}, "has no 'ConfigErr'"),
        (
            "agentrl.types:Message",
            {"role": "user", "content": ""},
            "it lacks start, metrics, episodes, finish",
        ),
        ("agentrl.types:Message", {"colour": 1}, "could not be made: TypeError"),
        (f"{__name__}:Waiting", {}, "metrics is async, and nothing would await it"),
    ],
)
def test_a_logger_of_your_own_is_made_before_the_run(use: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=r"loggers|has no") as raised:
        make_loggers([LoggerConfig(use=use, options=options)])
    assert said in str(raised.value)


def test_two_loggers_of_one_place_are_refused():
    base = {"env": "agentrl.envs.calculator:Calculator", "model": {"tiny": {}}}
    both = [{"use": "wandb", "project": "a"}, {"use": "wandb", "project": "b"}, "tensorboard"]
    assert len(RunConfig.model_validate({**base, "loggers": both}).loggers) == 3
    with pytest.raises(ValueError, match="loggers: tensorboard is listed twice"):
        RunConfig.model_validate({**base, "loggers": [*both, {"use": "tensorboard", "samples": 0}]})
