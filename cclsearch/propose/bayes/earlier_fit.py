"""Calibrates the closed forms on all earlier searches of a cluster and framework together (`stats/transfer.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cclsearch.card.model import Card
from cclsearch.core.metrics import PEAK_MEMORY
from cclsearch.core.values import Config
from cclsearch.plugins import TASKS
from cclsearch.propose.bayes.ensemble import downweight_far
from cclsearch.propose.bayes.feasibility import memory_evidence
from cclsearch.propose.earlier import LearnedPrior
from cclsearch.propose.observations import Observation
from cclsearch.space.table import Knob, Space, space_from_rows
from cclsearch.stats.calibration import CalibrationData, Prior, RowModel
from cclsearch.stats.closed_form import ClosedForm, Loads, Predictor
from cclsearch.stats.transfer import EarlierFit, find_odds, transfer_prior

DIGITS = 4
"""Of a log multiplier in `search.yaml`."""
SAME_MODEL, OTHER = 0.15, 2.0
"""Variance of a multiplier that belongs to an earlier search alone, relative to the prior's, if its trials have several
loads: of a search of the same model, and of another. Prediction errors of servers differ more between models (about
0.14 in log units) than between accelerators (0.08), on the tables of `benchmarks/newdevice_serving.py`."""
Trials = Sequence[tuple[Card, Sequence[Observation]]]
"""Card and finished trials of each earlier search."""
Predicted = Sequence[tuple[Predictor, Sequence[Observation], float]]
"""Of each earlier search: predictor over the trials' configurations, the trials, and the variance that it has alone."""


def learn_priors(
    predictor: Predictor,
    searches: Trials,
    predict: Callable[[Card, Space], Predictor | None] | None = None,
    family: str | None = None,
) -> dict[str, dict[str, LearnedPrior]]:
    """Return metric -> multiplier -> its prior after these searches; `predictor` is that of the next search.

    `predict` returns the predictor of an earlier search's card over its trials: by default that of the card's task.
    `family` is the next search's model: loads of the same model say more than those of another.
    """
    known = _predict_all(searches, predict, family)
    found = {m: _learn(form, _list_fits(m, known), _find_prior(predictor, m)) for m, form in predictor.forms.items()}
    if predictor.memory and predictor.memory.is_measured:
        fits = [_fit_memory(earlier, trials) for earlier, trials, _ in known if _has_peak(trials)]
        found[PEAK_MEMORY] = _learn(predictor.memory.form, fits, predictor.memory.form.prior)
    return {metric: priors for metric, priors in found.items() if priors}


def learn_odds(
    predictor: Predictor,
    searches: Trials,
    predict: Callable[[Card, Space], Predictor | None] | None = None,
    family: str | None = None,
) -> dict[str, float]:
    """Return metric with a closed form -> log odds that the priors of `learn_priors` hold for the next search."""
    known = _predict_all(searches, predict, family)
    fits = {metric: _list_fits(metric, known) for metric in predictor.forms}
    return {m: round(find_odds(_find_prior(predictor, m), found), DIGITS) for m, found in fits.items() if found}


def _find_prior(predictor: Predictor, metric: str) -> Prior:
    """Return the prior of a metric's multipliers: where trials have several loads, that of other work's loads."""
    transfer = {} if predictor.loads is None else predictor.loads.transfer
    return transfer.get(metric, predictor.forms[metric].prior)


def _predict_all(
    searches: Trials, predict: Callable[[Card, Space], Predictor | None] | None, family: str | None
) -> Predicted:
    found = []
    for card, trials in searches:
        earlier = _predict_trials(card, trials, predict or _predict_task)
        if earlier is not None:
            found.append((earlier, trials, SAME_MODEL if card.family == family else OTHER))
    return found


def _list_fits(metric: str, known: Predicted) -> list[EarlierFit]:
    """Return what each search measured of the metric, of those that measured it."""
    forms = [(earlier.forms.get(metric), earlier, trials, share) for earlier, trials, share in known]
    return [fit for own, earlier, trials, share in forms if own and (fit := _fit_measured(own, earlier, trials, share))]


def _predict_task(card: Card, space: Space) -> Predictor | None:
    found: Predictor | None = TASKS.get(card.task).predictor(card, space)
    return found


def _predict_trials(
    card: Card, trials: Sequence[Observation], predict: Callable[[Card, Space], Predictor | None]
) -> Predictor | None:
    """Return the predictor over the trials' configurations, one row each in their order; None if there is none."""
    shared: set[str] = set.intersection(*(set(o.config) for o in trials)) if trials else set()
    return predict(card, _trials_space(trials, shared)) if shared else None


def _trials_space(trials: Sequence[Observation], shared: set[str]) -> Space:
    names = [name for name in trials[0].config if name in shared]
    configs = [Config({name: o.config[name] for name in names}) for o in trials]
    knobs = [
        Knob(name, tuple({(isinstance(c[name], bool), c[name]): c[name] for c in configs}.values())) for name in names
    ]
    return space_from_rows(knobs, configs)


def _fit_measured(
    form: ClosedForm, predictor: Predictor, trials: Sequence[Observation], share: float
) -> EarlierFit | None:
    """Return what the trials measured of a metric; None if none did."""
    name = form.metric.name
    if (
        predictor.loads is not None
        and name in predictor.loads.transfer
        and (fit := _fit_loads(form, predictor.loads, trials, share))
    ):
        return fit
    rows = np.array([n for n, o in enumerate(trials) if (o.value(name) or 0.0) > 0], dtype=np.int64)
    if not len(rows):
        return None
    values = form.metric.sign * np.log(np.array([trials[n].value(name) for n in rows], dtype=np.float64))
    noise = downweight_far(values, np.full(len(rows), form.prior.noise))
    evidence = CalibrationData.measured(np.arange(len(rows)), values, one_sided=True, noise_n=noise)
    return EarlierFit(lambda at: form.log_cost(rows[at]), predictor.features.take(rows), evidence)


def _fit_loads(form: ClosedForm, loads: Loads, trials: Sequence[Observation], share: float) -> EarlierFit | None:
    """Return what each load of the trials measured of a metric; None if no trial measured several loads."""
    name = form.metric.name
    found = [
        (n, load[loads.metric], load[name])
        for n, trial in enumerate(trials)
        if trial.is_valid
        for load in trial.loads
        if load.get(loads.metric, 0.0) > 0 and load.get(name, 0.0) > 0
    ]
    if not found:
        return None
    rows, at, values = (np.array(column) for column in zip(*found, strict=True))
    cells = loads.build(rows.astype(np.int64), at)

    def combine(own: NDArray[np.int64]) -> RowModel:
        models = {metric: model(own) for metric, model in cells.models.items()}
        return lambda theta: cells.combine({metric: model(theta) for metric, model in models.items()}, own)

    evidence = CalibrationData.measured(
        np.arange(len(rows)), form.metric.sign * np.log(values), noise_n=np.full(len(rows), loads.transfer[name].noise)
    )
    return EarlierFit(cells.models.get(name, combine), cells.features, evidence, share)


def _has_peak(trials: Sequence[Observation]) -> bool:
    """Whether a trial measured its peak: what only fitted or did not says too little about any part of the memory."""
    return any(o.failure is None and o.metrics.get(PEAK_MEMORY) for o in trials)


def _fit_memory(predictor: Predictor, trials: Sequence[Observation]) -> EarlierFit:
    """Return the measured peaks, and of the other trials whether they fitted."""
    memory = predictor.memory
    assert memory is not None
    evidence = memory_evidence([replace(o, row=n) for n, o in enumerate(trials)], memory)
    return EarlierFit(memory.form.log_cost, predictor.features, evidence)


def _learn(form: ClosedForm, fits: Sequence[EarlierFit], before: Prior) -> dict[str, LearnedPrior]:
    """Return the priors that the fits leave of one before them."""
    if not fits:
        return {}
    prior: Prior = transfer_prior(before, fits)
    if not (np.isfinite(prior.mean_P).all() and np.isfinite(prior.sd_P).all()):
        return {}
    pairs = zip(form.multipliers, prior.mean_P.tolist(), prior.sd_P.tolist(), strict=True)
    return {name: LearnedPrior(mean=round(mean, DIGITS), sd=round(sd, DIGITS)) for name, mean, sd in pairs}
