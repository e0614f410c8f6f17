"""Which configurations deserve another run at the end of a search."""

from __future__ import annotations

import numpy as np

from cclsearch.record.state import RunState
from cclsearch.record.trial import Trial
from cclsearch.scoring.objective import Objective
from cclsearch.stats.noise import estimate_noise, pick_finalists
from cclsearch.stats.pareto import find_pareto_front


def choose_finalists(state: RunState, count: int, objective: Objective) -> list[Trial]:
    """Return first runs of up to `count` configurations, the most promising first.

    With one metric these are the best and those within the noise of it; with several, those of the Pareto front, spread
    along it.
    """
    if objective.is_multi:
        return _choose_on_front(state, count, objective)
    runs = state.losses_by_config()
    noise = estimate_noise(list(runs.values())).widened(state.window_errors)
    return [state.runs_of(config)[0] for config in pick_finalists(runs, noise, count)]


def _choose_on_front(state: RunState, count: int, objective: Objective) -> list[Trial]:
    trials = [state.trials[number] for number in state.losses_by_trial()]
    values_NM = np.array([objective.values(trial.outcome.metrics) for trial in trials if trial.outcome])
    if not len(values_NM):
        return []
    on_front = np.flatnonzero(find_pareto_front(values_NM))
    ordered = on_front[np.argsort(values_NM[on_front, 0], kind="stable")]
    chosen = ordered[np.unique(np.linspace(0, len(ordered) - 1, min(count, len(ordered))).round().astype(int))]
    return [trials[n] for n in chosen]
