"""The metrics of CCL-Bench's dashboard from a trial's own traces, read when a page asks and then remembered."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

from cclsearch.core.errors import UserError
from cclsearch.record.trial import Trial
from cclsearch.report.figures import format_value
from cclsearch.run.folder import Run
from cclsearch.tasks.base import task_of
from cclsearch.trace.ccl_bench import DASHBOARD, describe_name, measure_by_name
from cclsearch.trace.read import read_traces
from cclsearch.trace.view import TraceView

# A page waits for the result.
MAX_BYTES = 512 * 2**20
"""Traces that are larger are left to `ccl-search score`."""


@dataclass(frozen=True)
class TracedName:
    """One name of the dashboard, as a trial's traces answer it."""

    name: str
    value: float | None
    shown: str
    """The value with its unit; `-` if there is none."""
    status: str
    why: str
    answered_by: str
    differs: str


class TraceMetrics:
    """Reads traces of trials, one at a time, and keeps their results."""

    def __init__(self) -> None:
        self.known: dict[tuple[Path, int], dict[str, TracedName]] = {}
        """Run folder and trial -> name -> its traces' result, for the trials that were read."""
        self._lock = threading.Lock()

    def measure(self, run: Run, trial: Trial) -> list[TracedName]:
        """Every name of the dashboard; raises UserError if the trial has no traces, or too large ones."""
        folder = run.trial_folder(trial.number) / "trace"
        with self._lock:
            known = self.known.get((run.folder, trial.number))
            if known is None:
                _refuse_size(folder)
                traces = read_traces(folder)
                view = TraceView(traces, card=run.spec.card.for_trial(trial.config), config=trial.config)
                known = {name: _measure_one(run, view, name) for name in DASHBOARD}
                self.known[run.folder, trial.number] = known
        return list(known.values())


def _refuse_size(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError("this trial has no traces: nothing was profiled, or its evidence was removed")
    size = sum(os.lstat(path).st_size for path in folder.rglob("*") if path.is_file())
    if size > MAX_BYTES:
        raise UserError(f"its traces have {size / 2**30:.1f} GiB: run `ccl-search score` on the trial's folder")


def _measure_one(run: Run, view: TraceView, name: str) -> TracedName:
    (result,) = measure_by_name(view, name).values()
    known = describe_name(name)
    metric = task_of(run.spec.card).metric(name).model_copy(update={"unit": result.unit})
    return TracedName(
        name=name,
        value=result.value,
        shown="-" if result.value is None else format_value(metric, result.value),
        status=result.status.value.replace("_", " "),
        why=result.detail or (result.reason.value.replace("_", " ") if result.reason else ""),
        answered_by=known.metric,
        differs=known.differs,
    )
