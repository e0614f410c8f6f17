"""`--log-to mlflow[:PLACE]`: a run per search with a child run per trial, in a folder or on a tracking server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cclsearch.core.errors import UserError
from cclsearch.core.offline import is_local_url, refuse_outside
from cclsearch.tracking.base import TRACKERS, TrackedSearch, TrackedTrial, Tracker, require_package

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

DEFAULT_FOLDER = "mlruns"
SEARCH, TRIAL = "ccl_search.run_id", "ccl_search.trial"
"""Tags by which a search and its trials are found again."""
DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
"""Environment of the package unless the user sets it: it sends nothing elsewhere, and soon notices a lost server."""
MAX_PER_REQUEST = 100
"""Parameters and tags that MLflow takes in one request."""


@TRACKERS.register("mlflow")
class MlflowTracker(Tracker):
    """Writes into an MLflow experiment of the name `ccl-search/WORKLOAD`."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._runs: dict[int, str] = {}
        """Trial -> MLflow's id of its run."""
        self._search: TrackedSearch
        self._client: MlflowClient
        self._experiment = self._parent = ""

    @classmethod
    def from_place(cls, place: str) -> MlflowTracker:
        """Return a tracker for a folder or the URL of a server; by default the one in MLFLOW_TRACKING_URI, or `mlruns`.

        Raises UserError for a URL with a password, for one that `--offline` refuses, and for a file.
        """
        require_package("mlflow", "mlflow")
        place = place or os.environ.get("MLFLOW_TRACKING_URI", "") or DEFAULT_FOLDER
        parts = urlsplit(place)
        if parts.scheme in ("http", "https"):
            if parts.password or parts.username:
                raise UserError("the URL has a user name: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD")
            if not is_local_url(place):
                refuse_outside("the MLflow server", "give a folder instead")
            return cls(place)
        if parts.scheme == "sqlite":
            return cls(place)
        if parts.scheme and parts.scheme != "file":
            raise UserError(
                f"{parts.scheme}:// cannot be a place of MLflow: give a folder, sqlite:///FILE or http(s)://HOST"
            )
        folder = Path(parts.path if parts.scheme else place).expanduser().absolute()
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{str(folder)!r} is not a folder")
        return cls(folder.as_uri())

    def begin(self, search: TrackedSearch) -> bool:
        """Find the run of the search, or create it."""
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
        from mlflow.tracking import MlflowClient

        self._client, self._search = MlflowClient(tracking_uri=self._uri), search
        name = f"ccl-search/{search.workload}"
        found = self._client.get_experiment_by_name(name)
        self._experiment = found.experiment_id if found else self._client.create_experiment(name)
        runs = self._find_runs(f"tags.`{SEARCH}` = '{search.run_id}'")
        for run in runs:
            number = run.data.tags.get(TRIAL)
            if number is None:
                self._parent = run.info.run_id
            elif number.isdecimal():
                self._runs[int(number)] = run.info.run_id
        if self._parent:
            self._client.update_run(self._parent, status="RUNNING")
            return True
        tags = {**search.tags, SEARCH: search.run_id}
        self._parent = self._client.create_run(self._experiment, run_name=search.run_id, tags=tags).info.run_id
        return False

    def log_trial(self, trial: TrackedTrial) -> None:
        """Write the trial as a child run, and the curve of the best on the search's run."""
        from mlflow.entities import Metric, Param, RunTag

        tags = {**trial.tags, SEARCH: self._search.run_id, TRIAL: str(trial.number), "mlflow.parentRunId": self._parent}
        start_ms, end_ms = int(trial.started_s * 1000), int(trial.finished_s * 1000)
        if trial.number not in self._runs:
            run = self._client.create_run(
                self._experiment, start_time=start_ms, run_name=f"trial {trial.number}", tags=tags
            )
            self._runs[trial.number] = run.info.run_id
            params = [Param(name, str(value)) for name, value in trial.params.items()]
            for first in range(0, len(params), MAX_PER_REQUEST):
                self._client.log_batch(run.info.run_id, params=params[first : first + MAX_PER_REQUEST])
        run_id = self._runs[trial.number]
        metrics = [Metric(name, value, end_ms, 0) for name, value in trial.metrics.items()]
        self._client.log_batch(run_id, metrics=metrics, tags=[RunTag(name, value) for name, value in tags.items()])
        failed = trial.value is None and trial.tags["state"] == "failed"
        self._client.set_terminated(run_id, status="FAILED" if failed else "FINISHED", end_time=end_ms)
        if trial.best is not None:
            name = f"best_{self._search.metric.replace(' ', '_')}"
            best = Metric(name, trial.best, end_ms, trial.number)
            self._client.log_batch(self._parent, metrics=[best])

    def end(self, *, is_finished: bool, summary: str) -> None:
        """End the run of the search: `KILLED` if the search can be resumed."""
        self._client.set_tag(self._parent, "summary", summary)
        self._client.set_terminated(self._parent, status="FINISHED" if is_finished else "KILLED")

    def _find_runs(self, wanted: str) -> list[Any]:
        found: list[Any] = []
        token = None
        while True:
            page = self._client.search_runs([self._experiment], wanted, max_results=1000, page_token=token)
            found += page
            token = page.token
            if not token:
                return found
