"""MLflow."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice

from agentrl.reporting.loggers.protocol import RunInfo, SampleEpisode

AT_ONCE = 500
"""Metrics or parameters per request; servers refuse more than 1,000 and 100 of them."""
_FORBIDDEN = re.compile(r"[^\w.\- ]")


class Mlflow:
    """Logs to an MLflow server or store. A step that is trained again after a crash has two values there."""

    def __init__(self, project: str, tracking_uri: str | None) -> None:
        self._experiment, self._uri = project, tracking_uri

    def start(self, run: RunInfo) -> None:
        """Start the run, or continue the one of the same id."""
        uri = self._uri or os.environ.get("MLFLOW_TRACKING_URI") or (run.folder / "mlruns").absolute().as_uri()
        if "://" not in uri or uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=uri)
        id = run.recall("run_id")
        if id is None:
            id = self._client.create_run(self._experiment_id(), run_name=run.name).info.run_id
            run.remember("run_id", id)
            named = {_name(key): str(value)[:500] for key, value in _flat(run.config)}  # two may have one name
            parameters = iter([Param(name, text) for name, text in named.items()])
            while some := list(islice(parameters, 100)):
                self._client.log_batch(id, params=some)
            self._client.log_dict(id, dict(run.config), "config.json")
        else:
            self._client.update_run(id, status="RUNNING")
        self._id = id

    def _experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(self._experiment)
        if found is None:
            try:
                return str(self._client.create_experiment(self._experiment))
            except MlflowException:  # runs that start together all find none, and one of them creates it
                found = self._client.get_experiment_by_name(self._experiment)
                if found is None:
                    raise
        return str(found.experiment_id)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """One request for each few hundred values."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = iter([Metric(_name(name), value, now, step) for name, value in values.items()])
        while some := list(islice(metrics, AT_ONCE)):
            self._client.log_batch(self._id, metrics=some)

    def episodes(self, step: int, rows: Sequence[SampleEpisode]) -> None:
        """One artifact per step."""
        self._client.log_dict(self._id, {"rows": [asdict(row) for row in rows]}, f"episodes/step-{step:06d}.json")

    def finish(self, summary: Mapping[str, object]) -> None:
        """Close the run."""
        if summary:
            self._client.log_dict(self._id, dict(summary), "summary.json")
        self._client.set_terminated(self._id, "FINISHED" if summary else "KILLED")


def _name(name: str) -> str:
    """The name with dots for slashes: a file store has no room for `reward` and `reward/solved` at once."""
    return _FORBIDDEN.sub("_", name.replace("/", "."))[:250]


def _flat(config: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
