"""Inputs of a trial's evaluation besides its folder: its attempt's times, and the other trials of the search."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from cclsearch.core.values import Provenance
from cclsearch.record.state import RunState
from cclsearch.record.trial import Trial
from cclsearch.scoring.evidence import OtherTrial
from cclsearch.scoring.outcome import AttemptWindow


def list_others(state: RunState, trial: Trial) -> tuple[OtherTrial, ...]:
    """Return the parts of the other finished, measured trials that the rules compare with."""
    if trial.submitting is None:
        return ()
    before = math.inf if trial.finished_s is None else trial.finished_s
    return tuple(
        OtherTrial(
            number=other.number,
            is_earlier=(other.finished_s or 0.0, other.number) < (before, trial.number),
            is_ranked=other.outcome.is_ranked,
            metrics=other.outcome.metrics,
            trace_digests=other.outcome.trace_digests,
        )
        for other in state.trials.values()
        if other.outcome is not None and other.number != trial.number
        if other.outcome.provenance is Provenance.MEASURED
    )


def find_baseline(state: RunState) -> Mapping[str, float] | None:
    """Return the metrics of the baseline, which is the first ranked trial; None before there is one."""
    trial = state.baseline
    return trial.outcome.metrics if trial and trial.outcome else None


def close_window(trial: Trial) -> AttemptWindow | None:
    """Return when the attempt ran that ended just now; None if its start is not in the ledger."""
    start = trial.submitting
    if start is None:
        return None
    return AttemptWindow(started_s=start.wall_s, ended_s=time.time(), elapsed_s=start.elapsed_s(), timed=trial.timed)
