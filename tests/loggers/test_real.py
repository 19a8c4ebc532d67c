"""The real packages, in processes of their own: killed, resumed under the same id, and read back."""

from __future__ import annotations

import html
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agentrl.reporting.loggers.mlflow import Mlflow
from agentrl.reporting.loggers.protocol import RunInfo

ROOT = Path(__file__).parent.parent.parent
TRACKIO = ROOT / ".venv" / "trackio" / "bin" / "python"
FEED = Path(__file__).parent / "feeding.py"

pytestmark = pytest.mark.timeout(300)


def feed(folder: Path, logger: str, first: int, last: int, *, die: bool = False, **settings: Any) -> list[str]:
    """Log some steps in another process; its notes."""
    python, path = [sys.executable, str(FEED)], os.environ.get("PYTHONPATH", "")
    if logger == "trackio":  # its packages first, then ours
        paths = [p for p in sys.path if "site-packages" in p]
        code = (
            f"import sys, runpy; sys.path.insert(0, {str(ROOT)!r}); sys.path += {paths!r}; sys.argv = sys.argv[1:]"
        )
        python = [str(TRACKIO), "-c", f"{code}; runpy.run_path(sys.argv[0], run_name='__main__')", str(FEED)]
    done = subprocess.run(
        [*python, str(folder), logger, str(first), str(last), *(["--die"] if die else [])],
        input=json.dumps(settings),
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{path}", "TRACKIO_DIR": str(folder / "store")},
    )
    assert done.returncode == (-signal.SIGKILL if die else 0), done.stderr[-2000:]
    if die:
        return []
    lines = done.stdout.splitlines()
    assert len(lines) == 1, "the logger printed something"
    found: list[str] = json.loads(lines[0])
    return found


def killed_and_resumed(folder: Path, logger: str, **settings: Any) -> Path:
    """Steps 0 to 5, killed; then 4 to 6, as a run does whose last checkpoint was of step 3."""
    feed(folder, logger, 0, 5, die=True, **settings)
    assert feed(folder, logger, 4, 6, **settings) == []
    return folder / "loggers" / logger


def test_tensorboard_shows_one_curve(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as WithoutDataServer

    folder = str(killed_and_resumed(tmp_path, "tensorboard"))
    slow = WithoutDataServer(folder, size_guidance={"tensors": 0}, tensor_size_guidance={"text": 0, "scalars": 0})
    slow.Reload()
    for tag in ("reward", "episodes/text_summary"):
        assert [event.step for event in slow.Tensors(tag)] == list(range(7))
    events = EventAccumulator(folder, size_guidance={"tensors": 0})
    events.Reload()
    assert [(e.step, round(e.value, 6)) for e in events.Scalars("reward")] == [(s, s / 10) for s in range(7)]
    assert set(events.Tags()["scalars"]) == {"reward", "reward/größe 🎯@2", "held_out"}
    tables = [e.tensor_proto.string_val[0].decode() for e in events.Tensors("episodes/text_summary")]
    assert len(tables) >= 7
    assert tables[0].count("\n") == 1 + 4
    assert "<b>|x|</b><br>你好" in html.unescape(tables[0])
    assert "<b>" not in tables[0]
    (config, *_) = [e.tensor_proto.string_val[0].decode() for e in events.Tensors("config/text_summary")]
    assert '"path": "größe"' in config
    (summary,) = [e.tensor_proto.string_val[0].decode() for e in events.Tensors("summary/text_summary")]
    assert '"held_out_after": 0.5' in summary


def test_mlflow_goes_on_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    folder = killed_and_resumed(tmp_path, "mlflow", project="tools", series="all", samples=2)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    code = (
        "import json, sys; from mlflow.tracking import MlflowClient; c = MlflowClient(tracking_uri=sys.argv[1]);"
        "e = c.get_experiment_by_name('tools'); (r,) = c.search_runs([e.experiment_id]); i = r.info.run_id;"
        "print(json.dumps([i, r.info.status, r.data.params, r.data.metrics,"
        " [[m.step, m.value] for m in c.get_metric_history(i, 'reward')], [a.path for a in c.list_artifacts(i)],"
        " [a.path for a in c.list_artifacts(i, 'episodes')]]))"
    )
    read = [sys.executable, "-c", code, (folder / "mlruns").as_uri()]
    out = subprocess.run(read, capture_output=True, text=True, check=True, timeout=120).stdout
    id, status, params, last, history, artifacts, tables = json.loads(out)
    assert id == (folder / "run_id").read_text()
    assert status == "FINISHED"
    assert params == {"steps": "6", "model.path": "größe", "options.key": "(hidden)"}
    assert sorted(last) == ["drift.chi2", "held_out", "reward", "reward.größe __2"]
    assert sorted({step for step, _ in history}) == list(range(7))
    assert dict(history) == {step: step / 10 for step in range(7)}
    assert {"config.json", "summary.json", "episodes"} <= set(artifacts)
    assert len(tables) == 7
    (table,) = folder.glob("mlruns/*/*/artifacts/episodes/step-000006.json")
    assert [row["reward"] for row in json.loads(table.read_text())["rows"]] == [8.0, 0.0]


def test_wandb_offline_goes_on_under_the_same_id(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    folder = killed_and_resumed(tmp_path, "wandb", project="tools", mode="offline")
    id = (folder / "id").read_text()
    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert [file.name for file in files] == [f"run-{id}.wandb"] * 2
    lines = wandb_lines(folder)
    runs = [line for line in lines if "run" in line]
    assert {(line["run"], line["project"]) for line in runs} == {(id, "tools")}
    assert runs[0]["config"]["model"] == {"path": "größe"}
    rows = [line["row"] for line in lines if "row" in line]
    found = [(r["step"], r["reward"]) for r in rows if "reward" in r]
    assert found[-3:] == [(step, step / 10) for step in (4, 5, 6)]
    before = found[:-3]  # W&B's writer held the rest in memory when the process was killed
    assert before == [(step, step / 10) for step in range(len(before))]
    assert {"reward/größe 🎯@2", "held_out"} <= set(rows[0])
    assert "drift/chi2" not in rows[0]
    assert sum(any(name.startswith("episodes_table") for name in row) for row in rows) >= 3


def wandb_lines(folder: Path) -> list[dict[str, Any]]:
    """What the offline files of that folder hold."""
    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    read = [sys.executable, str(Path(__file__).parent / "wandb_file.py"), *map(str, files)]
    out = subprocess.run(read, capture_output=True, text=True, check=True, timeout=120).stdout
    return [json.loads(line) for line in out.splitlines()]


TWO_RUNS = """
import sys, wandb
from pathlib import Path
from agentrl.config.loggers import LoggerConfig
from agentrl.reporting.loggers.log_feed import LogFeed
from agentrl.reporting.loggers.make import make_loggers
from agentrl.reporting.loggers.protocol import RunInfo

notes, folder = [], Path(sys.argv[1])
before = wandb.init(project="before", mode="offline", dir=str(folder), settings=wandb.Settings(silent=True))
config = LoggerConfig(use="wandb", mode="offline")
feeds = [LogFeed(make_loggers([config]), notes.append) for _ in range(2)]
for n, feed in enumerate(feeds):
    feed.start(RunInfo(f"run-{n}", folder / str(n), {}))
    feed.metrics(1, {"reward": float(n)})
for feed in feeds:
    feed.finish({"steps": 1})
before.log({"reward": 7.0})
before.finish()
assert notes == [], notes
"""


def test_wandb_runs_of_one_process_stay_apart(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    subprocess.run([sys.executable, "-c", TWO_RUNS, str(tmp_path)], check=True, timeout=120)
    places = [tmp_path / "0" / "wandb", tmp_path / "1" / "wandb", tmp_path]
    assert [[line["row"]["reward"] for line in wandb_lines(place) if "row" in line] for place in places] == [
        [0.0],
        [1.0],
        [7.0],
    ]


def start(folder: Path, logger: str, config: dict[str, Any], *words: str, **settings: Any) -> list[Any]:
    """Start and end one logger in another process with these words on its command line.

    Returns:
        Its notes, and how long the process took to end after them.
    """
    code = (
        "import json, sys, time; from pathlib import Path;"
        "from agentrl.config.loggers import LoggerConfig; from agentrl.reporting.loggers.log_feed import LogFeed;"
        "from agentrl.reporting.loggers.make import make_loggers; import agentrl.reporting.loggers.log_feed as f;"
        "from agentrl.reporting.loggers.protocol import RunInfo;"
        "f.FLUSH_S = 5.0 if sys.argv[1] == 'down' else 60.0;"
        "given = json.loads(sys.stdin.read()); notes = [];"
        "feed = LogFeed(make_loggers([LoggerConfig(**given['logger'])]), notes.append);"
        "feed.start(RunInfo('run', Path(given['folder']), given['config'])); feed.metrics(1, {'reward': 1.0});"
        "feed.finish({'steps': 1}); print(json.dumps([*notes, time.time()]), flush=True)"
    )
    given = {"logger": {"use": logger, **settings}, "folder": str(folder), "config": config}
    done = subprocess.run(
        [sys.executable, "-c", code, *(words or ("-",))],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "a" * 40},
    )
    *notes, told = json.loads(done.stdout)
    assert done.stderr == ""
    return [*notes, time.time() - told]


def test_wandb_does_not_get_a_command_that_says_a_secret(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    for secret in (True, False):
        word = f"env.options.{'api_key' if secret else 'depth'}=hush"
        start(tmp_path / str(secret), "wandb", {}, "--set", word, mode="offline")
        (file,) = (tmp_path / str(secret)).glob("wandb/wandb/offline-run-*/run-*.wandb")
        assert (b"hush" in file.read_bytes()) is not secret


def test_a_wandb_server_that_is_down_does_not_hold_up_the_end_of_the_process(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    note, seconds = start(tmp_path, "wandb", {}, "down", mode="online")
    assert note == "logger wandb did not finish within 5 s; the run ends without it"
    assert seconds < 60, "W&B's own hook waits for minutes"


def test_mlflow_runs_that_start_at_once_share_the_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    look = MlflowClient.get_experiment_by_name
    made: list[str] = []

    def look_and_lose(client: Any, name: str) -> Any:
        found = look(client, name)
        if found is None:
            made.append(client.create_experiment(name))  # another run is faster
        return found

    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", look_and_lose)
    logger = Mlflow("tools", str(tmp_path / "store"))
    logger.start(RunInfo("run", tmp_path / "logger", {}))
    logger.metrics(1, {"reward": 1.0})
    logger.finish({"steps": 1})
    client = MlflowClient(tracking_uri=str(tmp_path / "store"))
    assert [run.data.metrics for run in client.search_runs(made)] == [{"reward": 1.0}]


def test_mlflow_takes_keys_that_have_the_same_name_there(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    notes = start(tmp_path, "mlflow", {"options": {"a b@": 1, "a b#": 2, "x/y": 3, "x.y": 4}})[:-1]
    assert notes == []
    (metric,) = tmp_path.glob("mlflow/mlruns/*/*/metrics/reward")
    assert metric.read_text().split()[1:] == ["1.0", "1"]


@pytest.mark.skipif(
    not TRACKIO.is_file(), reason="trackio has no environment of its own: make .venv/trackio/.done"
)
def test_trackio_goes_on_under_the_same_name(tmp_path: Path) -> None:
    folder = killed_and_resumed(tmp_path, "trackio", project="tools")
    code = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as S; (r,) = S.get_runs('tools');"
        "print(json.dumps([r, [[x['step'], x['reward']] for x in S.get_logs('tools', r) if 'reward' in x],"
        " S.get_run_config('tools', r)]))"
    )
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "store")}
    read = subprocess.run(
        [str(TRACKIO), "-c", code], capture_output=True, text=True, check=True, timeout=120, env=environment
    )
    name, rows, config = json.loads(read.stdout.splitlines()[-1])
    assert name == (folder / "name").read_text()
    assert dict(rows) == {step: step / 10 for step in range(7)}
    assert config["model"] == {"path": "größe"}
