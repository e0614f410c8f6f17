"""Find the primary metric's value above which a trial may end early: it is slower than the best one beyond doubt."""

from __future__ import annotations

import math

import numpy as np

from cclsearch.core.metrics import Direction
from cclsearch.core.values import Provenance
from cclsearch.record.event import Purpose
from cclsearch.record.state import RunState
from cclsearch.record.trial import Trial
from cclsearch.run.spec import RunSpec
from cclsearch.space.table import Space
from cclsearch.stats.closed_form import predictor_of
from cclsearch.stats.noise import Noise, estimate_noise
from cclsearch.tasks.base import task_of

# A trial that ends early is not compared with others: without this limit, a first trial that did less than the work
# would end each honest one.
MIN_RANKED = 2
"""Number of configurations that must have run to their end."""
DOUBT = 0.005
"""Probability that a configuration at the limit is as fast as the best one."""


def find_stop_above(spec: RunSpec, space: Space, state: RunState, trial: Trial) -> float | None:
    """Return the value of the primary metric above which the trial cannot win; None if it must run to its end.

    Only trials of the search may end early, not repeats, and only if the objective is the primary metric or one that
    follows from it (`Predictor.derived`). The limit is the slowest run of the best configuration so far, plus a
    difference that two runs exceed with probability `DOUBT`, by the current estimate of the noise between runs.
    """
    is_allowed = spec.limits.early_stop and task_of(spec.card).ends_early and spec.provenance is Provenance.MEASURED
    if not is_allowed or trial.purpose is not Purpose.SEARCH:
        return None
    best, row = state.best, space.row(trial.config)  # ranks all trials, so only where it is needed
    if best is None or row is None:
        return None
    metric = spec.objective.terms[0].metric
    outliers = state.list_outliers()
    runs = [run for run in state.runs_of(best.config) if run.number not in outliers]
    values = [value for run in runs if run.outcome and (value := run.outcome.metrics.get(metric)) is not None]
    limits = [_to_primary(spec, space, row, value) for value in values]
    known = [limit for limit in limits if limit is not None]
    if not known:
        return None
    losses = list(state.losses_by_trial().values())
    if len(losses) < MIN_RANKED:
        return None
    spreads = [run.outcome.spread for run in runs if run.outcome and run.outcome.spread]
    noise = estimate_noise(losses, spreads).widened(state.window_errors)
    return max(known) * find_margin(noise)


def find_margin(noise: Noise) -> float:
    """Return the ratio of two runs of one configuration that only a share `DOUBT` of such pairs exceeds."""
    return math.exp(noise.quantile(1 - DOUBT) * math.sqrt(2))


def _to_primary(spec: RunSpec, space: Space, row: int, value: float) -> float | None:
    """Return the primary metric at which the row has that value of the objective's metric.

    None unless the objective is one metric that gets worse in proportion to the primary one.
    """
    task, (term, *others) = task_of(spec.card), spec.objective.terms
    if others or term.weight is not None:
        return None
    is_lower_better = term.direction is Direction.MINIMIZE
    if term.metric == task.primary:
        return value if is_lower_better else None
    derived = predictor_of(spec.card, space).derived.get(term.metric)
    if derived is None or derived.base != task.primary:
        return None
    one, two = (float(derived.value(np.array([base]), np.array([row]))[0]) for base in (1.0, 2.0))
    if is_lower_better != (two > one):
        return None
    return value / one if is_lower_better else one / value
