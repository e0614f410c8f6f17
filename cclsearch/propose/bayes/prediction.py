"""Predictions of a whole space by the surrogate: the closed forms as all trials that are known calibrate them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import ndtr, ndtri

from cclsearch.core.metrics import PEAK_MEMORY
from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.bayes.candidates import rank_rows
from cclsearch.propose.bayes.ensemble import OTHER_RUN_NOISE
from cclsearch.propose.bayes.excess import log_excess
from cclsearch.propose.bayes.models import MetricModels
from cclsearch.propose.bayes.refine import refine_predictor
from cclsearch.propose.bayes.surrogate import CandidatePosterior, match_earlier
from cclsearch.propose.observations import observed_rows
from cclsearch.stats.calibration import Posterior
from cclsearch.stats.closed_form import EXACT_ROWS, LIKELY, Prediction, Predictor, Rows, predict_space
from cclsearch.stats.kernel import Array
from cclsearch.stats.one_thread import on_one_thread

QUANTILES = (0.5, 0.1, 0.9)
"""The predicted value, and the ends of its 80 % interval."""
# 2^-30 of the range, which is far below the noise.
_NUM_HALVINGS = 30
"""Steps of the search for a quantile."""
_FARTHEST = 4.0
"""Standard deviations from the mean of each hypothesis within which a quantile is searched."""


@on_one_thread
def predict_posterior(view: SearchView, wanted: Rows | None = None) -> tuple[Prediction, Predictor] | None:
    """Return the prediction of every configuration, given the view's trials, and the predictor before them.

    A configuration that was measured has its measurement. In a space of over `EXACT_ROWS` rows, only so many, the most
    promising of `wanted` (default: all), have intervals. None if the task has no closed form of its primary metric.
    """
    if view.primary.name not in view.predictor.forms:
        return None
    earlier = match_earlier(view)
    seen = (*earlier, *(o for o in view.observations if o.row is not None))
    predictor = refine_predictor(view, view.predictor, earlier, wanted)
    models = MetricModels(view, predictor, earlier)
    rows = np.arange(len(view.space))
    if len(rows) > EXACT_ROWS:
        ranked = rank_rows(models, view, predictor)
        first = ranked if wanted is None else ranked[np.isin(ranked, wanted)]
        rest = rows if wanted is None else wanted
        rows = np.unique(np.concatenate([observed_rows(seen), first, rest])[:EXACT_ROWS])
    found = {name: _predict_metric(models, name, rows, seen) for name in predictor.forms}
    rough = predict_space(view.card, view.space, _calibrate(predictor, models))
    assert rough is not None
    own = found.pop(view.primary.name)
    prediction = _set_memory(_set_primary(rough, rows, own), models, rows, seen)
    others = {name: _spread_out(values_3m, rows, len(view.space)) for name, values_3m in found.items()}
    measured = frozenset(int(o.row) for o in seen if o.row is not None and o.value(view.primary.name))
    prediction = replace(prediction, measured=measured, others=others, theta_P=models.primary.most_likely.theta_P)
    known = {name: values_3N[0] for name, values_3N in others.items()} | {view.primary.name: prediction.value_N}
    over = [log_excess(c, known[c.metric]) for c in view.objective.constraints if c.metric in known]
    over_N = np.nan_to_num(np.sum(over, axis=0), nan=np.inf) if over else None
    return replace(prediction, over_N=over_N), predictor


@dataclass(frozen=True)
class Limited:
    """Rows that are likely to fit, the most promising of each number of accelerators, under the view's constraints."""

    rows: Rows
    over_n: Array
    """Log of 1 + the excess over all constraints."""
    values: Mapping[str, Array]
    """Constrained metric -> its (n,) expected values."""
    interval_2n: Array
    """Ends of the 80 % interval of how fast each is, relative to what is expected: below 1, and above."""


@on_one_thread
def predict_limited(view: SearchView, most: int) -> Limited:
    """Return the constraints' metrics of up to `most` rows for each number of accelerators."""
    earlier, predictor = match_earlier(view), view.predictor
    models = MetricModels(view, predictor, earlier)
    ranked = rank_rows(models, view, predictor)
    ranked = ranked[models.feasibility.predict(ranked)[1] >= LIKELY]
    sizes = view.space.num_accelerators_N[ranked]
    rows = np.concatenate([ranked[:0], *(ranked[sizes == size][:most] for size in np.unique(sizes))])
    if predictor.refine is not None and len(rows):
        thetas = {metric: models.ensemble(metric).most_likely.theta_P for metric in predictor.forms}
        predictor = predictor.refine(predictor, thetas, rows)
        models = MetricModels(view, predictor, earlier)
    values, over, ratios = {}, np.zeros(len(rows)), np.ones((2, len(rows)))
    for constraint in view.objective.constraints:
        if (log_n := models.expect(constraint.metric, rows)) is not None:
            values[constraint.metric] = np.exp(log_n)
            over = over + log_excess(constraint, np.exp(log_n))
    for name in {view.primary.name, *values} & set(predictor.forms):
        values_3n = _predict_metric(models, name, rows, ())
        wide = np.sort([values_3n[1] / values_3n[0], values_3n[0] / values_3n[2]], axis=0)
        ratios = np.array([np.minimum(ratios[0], wide[0]), np.maximum(ratios[1], 1 / wide[0])])
    return Limited(rows, over, values, ratios)


def describe_expected(posterior: CandidatePosterior, m: int) -> str:
    """Return the expected primary metric of a candidate with its 80 % interval, in words; empty if nothing is known."""
    value, primary = posterior.expected_outcome(m).metrics.get(posterior.metric), posterior.models.view.primary
    if value is None:
        return ""
    ends = sorted(value * _find_ratios(posterior, m))
    shown = f"[{ends[0]:.3g} to {ends[1]:.3g}]"
    return " ".join(filter(None, (f"expected {primary.words} {value:.3g}", primary.unit, shown)))


def _find_ratios(posterior: CandidatePosterior, m: int) -> Array:
    """(2,) ends of the 80 % interval of a candidate's primary metric, relative to its expected value."""
    ensemble = posterior.models.primary
    noise_h = np.array([hypothesis.prior.noise for hypothesis in ensemble.hypotheses])
    log_3m = find_quantiles(ensemble.hypotheses, ensemble.weight_h, posterior.rows_m[[m]], noise_h)
    return np.asarray(np.exp(ensemble.form.metric.sign * (log_3m[1:, 0] - log_3m[0, 0])))


def _calibrate(predictor: Predictor, models: MetricModels) -> Predictor:
    """Return the predictor with the multipliers of the most likely hypotheses as the means of its priors."""
    forms = {
        name: replace(form, prior=replace(form.prior, mean_P=models.ensemble(name).most_likely.theta_P))
        for name, form in predictor.forms.items()
    }
    memory = predictor.memory
    if memory is not None:
        prior = replace(memory.form.prior, mean_P=models.feasibility.memory.theta_P)
        memory = replace(memory, form=replace(memory.form, prior=prior))
    return replace(predictor, forms=forms, memory=memory)


def _predict_metric(models: MetricModels, metric: str, rows: Rows, seen: Sequence[Observation]) -> Array:
    """(3, m) quantiles of a metric that has a closed form, in its unit; of measured rows, around the measurement."""
    ensemble = models.ensemble(metric)
    noise_h = np.array([hypothesis.prior.noise for hypothesis in ensemble.hypotheses])
    log_3m = find_quantiles(ensemble.hypotheses, ensemble.weight_h, rows, noise_h)
    values_3m = np.exp(ensemble.form.metric.sign * log_3m)
    noise = float(np.hypot(ensemble.weight_h @ noise_h, OTHER_RUN_NOISE))
    return _put_measured(np.sort(values_3m, axis=0)[[1, 0, 2]], rows, metric, seen, noise)


def find_quantiles(hypotheses: Sequence[Posterior], weight_h: Array, rows: Rows, noise_h: Array) -> Array:
    """(3, m) quantiles of a measurement's log, a mixture of normal distributions, by bisection."""
    moments = [hypothesis.marginals(rows) for hypothesis in hypotheses]
    mean_hm = np.array([mean for mean, _ in moments])
    sd_hm = np.sqrt(np.array([variance for _, variance in moments]) + noise_h[:, None] ** 2)
    found = []
    for quantile in QUANTILES:
        low_m, high_m = (mean_hm - _FARTHEST * sd_hm).min(axis=0), (mean_hm + _FARTHEST * sd_hm).max(axis=0)
        for _ in range(_NUM_HALVINGS):
            middle_m = 0.5 * (low_m + high_m)
            is_below_m = weight_h @ ndtr((middle_m - mean_hm) / sd_hm) < quantile
            low_m, high_m = np.where(is_below_m, middle_m, low_m), np.where(is_below_m, high_m, middle_m)
        found.append(0.5 * (low_m + high_m))
    return np.array(found)


def _put_measured(values_3m: Array, rows: Rows, metric: str, seen: Sequence[Observation], noise: float) -> Array:
    """Return the values with the geometric mean of each measured row in place of its prediction."""
    logs: dict[int, list[float]] = defaultdict(list)
    for observation in seen:
        if observation.row is not None and (value := observation.value(metric) or 0.0) > 0:
            logs[observation.row].append(float(np.log(value)))
    at_row = {row: m for m, row in enumerate(rows.tolist())}
    for row, own in logs.items():
        if row in at_row:
            half = -float(ndtri(QUANTILES[1])) * noise * np.sqrt(1 + 1 / len(own))
            values_3m[:, at_row[row]] = np.exp(np.mean(own) + np.array([0.0, -half, half]))
    return values_3m


def _spread_out(values_3m: Array, rows: Rows, size: int) -> Array:
    """(3, N) the values at these rows of the space, NaN at others."""
    values_3N = np.full((3, size), np.nan)
    values_3N[:, rows] = values_3m
    return values_3N


def _set_primary(rough: Prediction, rows: Rows, values_3m: Array) -> Prediction:
    """Return the prediction with these values of the primary metric; its parts add up to them."""
    values_3N = _spread_out(values_3m, rows, len(rough.value_N))
    value_N = np.where(np.isnan(values_3N[0]), rough.value_N, values_3N[0])
    factor_N = (value_N / rough.value_N) ** rough.form.metric.sign
    parts = {name: part * factor_N for name, part in rough.parts.items()}
    return replace(rough, value_N=value_N, parts=parts, interval_2N=values_3N[1:])


def _set_memory(rough: Prediction, models: MetricModels, rows: Rows, seen: Sequence[Observation]) -> Prediction:
    """Return the prediction with the posterior of the memory; its parts add up to the expected GiB."""
    feasibility, form = models.feasibility, models.predictor.memory
    if form is None:
        return rough
    hypotheses = feasibility.hypotheses
    noise_h = np.full(len(hypotheses), form.form.prior.noise)
    values_3m = np.exp(find_quantiles(hypotheses, feasibility.weight_h, rows, noise_h))
    if form.is_measured:
        values_3m = _put_measured(values_3m, rows, PEAK_MEMORY, seen, form.form.prior.noise)
    values_3N = _spread_out(values_3m, rows, len(rough.value_N))
    gib_N = np.where(np.isnan(values_3N[0]), rough.memory_gib_N, values_3N[0])
    fits_N = rough.fits_N.copy()
    fits_N[rows] = feasibility.predict(rows)[1]
    parts = {name: part * gib_N / rough.memory_gib_N for name, part in rough.memory_parts_gib.items()}
    return replace(rough, memory_gib_N=gib_N, fits_N=fits_N, memory_parts_gib=parts, memory_interval_2N=values_3N[1:])
