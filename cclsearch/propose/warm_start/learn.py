"""Calibrates the closed forms on all earlier searches of a cluster and framework together (`transfer.py`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp, softmax

from cclsearch.card.model import Card
from cclsearch.core.metrics import PEAK_MEMORY
from cclsearch.core.values import Config
from cclsearch.propose.bayes.ensemble import downweight_far
from cclsearch.propose.bayes.feasibility import memory_evidence, weigh_combinations
from cclsearch.propose.observations import Observation
from cclsearch.propose.warm_start.knowledge import EarlierKnowledge, LearnedPrior, LearnedResidual, LearnedWays
from cclsearch.propose.warm_start.transfer import OWN_SHARE, EarlierFit, find_odds, transfer_prior
from cclsearch.space.table import Knob, Space, space_from_rows
from cclsearch.stats.calibration import CalibrationData, ParametricModel, Prior, RowModel
from cclsearch.stats.closed_form import ClosedForm, Loads, MemoryHypothesis, Predictor, ask_predictor
from cclsearch.stats.kernel import Features, read_features
from cclsearch.stats.one_thread import on_one_thread

DIGITS = 4
"""Digits of a log multiplier in `search.yaml`."""
# A proposal takes longer with more.
MAX_RESIDUALS = 100
"""Number of earlier trials whose residuals a search keeps, the most similar jobs first."""
# Prediction errors of servers differ more between models (about 0.14 in log units) than between accelerators (0.08), on
# the tables of benchmarks/newdevice.md.
SAME_MODEL, OTHER = 0.15, 2.0
"""Variance of a search's own multiplier, relative to the prior's, at several loads: of the same model, another one."""
Trials = Sequence[tuple[Card, Sequence[Observation]]]
"""Card and finished trials of each earlier search."""
Predict = Callable[[Card, Space], Predictor | None]


@dataclass(frozen=True, eq=False)
class _Known:
    """One earlier search."""

    index: int
    """Its position among the searches."""
    predictor: Predictor
    """Over the trials' configurations, one row each in their order."""
    trials: Sequence[Observation]
    configs: Sequence[Config]
    """Configurations of the trials, in the knobs that all searches have in common."""
    features: Features
    """Features of the trials, in coordinates that all searches have in common."""
    num_accelerators: int
    is_same_model: bool

    def fit(self, model: ParametricModel, features: Features, evidence: CalibrationData, **more: Any) -> EarlierFit:
        """Return the measurements of its trials of a metric."""
        return EarlierFit(model, features, evidence, num_accelerators=self.num_accelerators, index=self.index, **more)


@on_one_thread
def learn_knowledge(
    card: Card, predictor: Predictor, searches: Trials, predict: Predict | None = None, *, with_odds: bool = True
) -> EarlierKnowledge:
    """Return the knowledge of these searches for the next, of this card; `predictor` is the next search's.

    `predict` returns the predictor of an earlier search's card over its trials: by default the card's task's.
    """
    # Loads of the same model say more than another model's.
    known, size = _predict_all(searches, predict or ask_predictor, card.family), card.hardware.num_accelerators
    memory = predictor.memory
    each = [(form, _find_prior(predictor, m), _list_fits(m, known)) for m, form in predictor.forms.items()]
    if memory and memory.is_measured:
        each += [(memory.form, memory.form.prior, [_fit_memory(one) for one in known if _has_peak(one.trials)])]
    learned = {form.metric.name: _learn(form, fits, before, size) for form, before, fits in each}
    priors = {metric: priors for metric, (priors, _) in learned.items() if priors}
    odds = {
        form.metric.name: round(find_odds(before, fits), DIGITS)
        for form, before, fits in each
        if with_odds and form.metric.name in priors
    }
    return EarlierKnowledge(
        priors=priors,
        residuals={metric: residuals for metric, (_, residuals) in learned.items() if residuals},
        ways=() if PEAK_MEMORY in priors else _weigh_combinations(predictor, known),
        odds=odds,
    )


def _find_prior(predictor: Predictor, metric: str) -> Prior:
    """Return the prior of a metric's multipliers: if trials have several loads, the prior for other work's loads."""
    transfer = {} if predictor.loads is None else predictor.loads.transfer
    return transfer.get(metric, predictor.forms[metric].prior)


def _predict_all(searches: Trials, predict: Predict, family: str) -> Sequence[_Known]:
    found = []
    for index, (card, trials) in enumerate(searches):
        names = _shared_knobs(trials)
        own = predict(card, _trials_space(trials, names)) if names else None
        if own is not None:
            found.append((index, card, trials, own))
    everything = [trial for _, _, trials, _ in found for trial in trials]
    names = _shared_knobs(everything)
    features = read_features(_trials_space(everything, names)) if everything else None
    known, start = [], 0
    for index, card, trials, own in found:
        assert features is not None
        here = features.take(np.arange(start, start + len(trials)))
        configs = [Config({name: trial.config[name] for name in names}) for trial in trials]
        known.append(_Known(index, own, trials, configs, here, card.hardware.num_accelerators, card.family == family))
        start += len(trials)
    return known


def _list_fits(metric: str, known: Sequence[_Known]) -> list[EarlierFit]:
    """Return each search's measurements of the metric; searches without any are left out."""
    forms = [(one.predictor.forms.get(metric), one) for one in known]
    return [fit for own, one in forms if own and (fit := _fit_measured(own, one))]


def _shared_knobs(trials: Sequence[Observation]) -> list[str]:
    """Return the knobs that all of these trials have."""
    shared: set[str] = set.intersection(*(set(o.config) for o in trials)) if trials else set()
    return [name for name in trials[0].config if name in shared] if trials else []


def _trials_space(trials: Sequence[Observation], names: Sequence[str]) -> Space:
    configs = [Config({name: o.config[name] for name in names}) for o in trials]
    knobs = [
        Knob(name, tuple({(isinstance(c[name], bool), c[name]): c[name] for c in configs}.values())) for name in names
    ]
    return space_from_rows(knobs, configs)


def _fit_measured(form: ClosedForm, one: _Known) -> EarlierFit | None:
    """Return the trials' measurements of a metric; None if there are none."""
    name, loads, trials = form.metric.name, one.predictor.loads, one.trials
    if loads is not None and name in loads.transfer and (of_loads := _fit_loads(form, loads, one)):
        return of_loads
    rows = np.array([n for n, o in enumerate(trials) if (o.value(name) or 0.0) > 0], dtype=np.int64)
    if not len(rows):
        return None
    values = form.metric.sign * np.log(np.array([trials[n].value(name) for n in rows], dtype=np.float64))
    noise = downweight_far(values, np.full(len(rows), form.prior.noise))
    evidence = CalibrationData.measured(np.arange(len(rows)), values, one_sided=True, noise_n=noise)
    configs = [one.configs[n] for n in rows]
    return one.fit(lambda at: form.log_cost(rows[at]), one.features.take(rows), evidence, configs=configs)


def _fit_loads(form: ClosedForm, loads: Loads, one: _Known) -> EarlierFit | None:
    """Return the measurements of each load of the trials; None if no trial measured several loads."""
    name = form.metric.name
    found = [
        (n, load[loads.metric], load[name])
        for n, trial in enumerate(one.trials)
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
    features = one.features.take(rows).with_number(cells.features.numbers_ND[:, -1])
    # a category names the search: its level may be off by as much as a category
    categories_NC = np.column_stack([features.categories_NC, np.full(len(rows), one.index)]).astype(np.int16)
    features = replace(features, categories_NC=categories_NC)
    share = SAME_MODEL if one.is_same_model else OTHER
    return one.fit(cells.models.get(name, combine), features, evidence, own_share=share)


def _has_peak(trials: Sequence[Observation]) -> bool:
    """Whether a trial measured its peak: whether others fitted shows too little about any part of the memory."""
    return any(o.failure is None and o.metrics.get(PEAK_MEMORY) for o in trials)


def _fit_memory(one: _Known) -> EarlierFit:
    """Return the measured peaks, and of the other trials whether they fitted."""
    memory = one.predictor.memory
    assert memory is not None
    evidence = memory_evidence([replace(o, row=n) for n, o in enumerate(one.trials)], memory)
    return one.fit(memory.form.log_cost, one.features, evidence, configs=one.configs)


def _weigh_combinations(predictor: Predictor, known: Sequence[_Known]) -> tuple[LearnedWays, ...]:
    """Return the probability of each combination of undeclared ways after these searches, which show what fits."""
    # It is a property of the framework, but an option of a run may change it: the share `OWN_SHARE` of the probability
    # stays as before.
    if predictor.memory is None or len(predictor.memory.undeclared) == 0:
        return ()
    prior = {ways: log_prior for ways, (log_prior, _) in weigh_combinations(predictor, ()).items()}
    score = dict(prior)
    for one in known:
        if one.predictor.memory is not None:
            seen = weigh_combinations(one.predictor, [replace(o, row=n) for n, o in enumerate(one.trials)])
            for ways in score:
                alike = [each for other, each in seen.items() if _agree(ways, other)]
                score[ways] += float(logsumexp(np.sum(alike, axis=1)) - logsumexp([before for before, _ in alike]))
    before, after = (softmax(list(each.values())) for each in (prior, score))
    mixed = OWN_SHARE * before + (1 - OWN_SHARE) * after
    return tuple(
        LearnedWays(log_multipliers=dict(sorted(ways)), probability=round(float(probability), DIGITS))
        for ways, probability in zip(prior, mixed, strict=True)
    )


def _agree(ways: MemoryHypothesis, others: MemoryHypothesis) -> bool:
    """Whether no multiplier that both name has different values."""
    known = dict(others)
    return all(known.get(name, value) == value for name, value in ways)


def _learn(
    form: ClosedForm, fits: Sequence[EarlierFit], before: Prior, num_accelerators: int
) -> tuple[dict[str, LearnedPrior], tuple[LearnedResidual, ...]]:
    """Return the priors that the fits leave of an earlier prior, and the residuals that they show."""
    if not fits:
        return {}, ()
    prior: Prior = transfer_prior(before, fits, num_accelerators, form.multipliers)
    if not (np.isfinite(prior.mean_P).all() and np.isfinite(prior.sd_P).all()):
        return {}, ()
    pairs = zip(form.multipliers, prior.mean_P.tolist(), prior.sd_P.tolist(), strict=True)
    priors = {name: LearnedPrior(mean=round(mean, DIGITS), sd=round(sd, DIGITS)) for name, mean, sd in pairs}
    rows = [(one, config) for one in fits for config in one.configs]
    known = prior.known
    if known is None or len(rows) != len(known.value_m):
        return priors, ()
    found = zip(rows, known.value_m.tolist(), np.sqrt(known.variance_m).tolist(), strict=True)
    residuals = [
        LearnedResidual(
            search=one.index,
            share=one.share,
            doublings=round(one.count_doublings(num_accelerators), DIGITS),
            config=config,
            mean=round(mean, DIGITS),
            sd=round(sd, DIGITS),
        )
        for (one, config), mean, sd in found
        if math.isfinite(mean) and math.isfinite(sd)
    ]
    return priors, tuple(
        sorted(residuals, key=lambda each: each.share + OWN_SHARE * abs(each.doublings))[:MAX_RESIDUALS]
    )
