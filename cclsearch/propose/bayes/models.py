"""Models of any metric at the candidates: in closed form, derived exactly from one, or learned from the trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from cclsearch.core.metrics import NUM_ACCELERATORS, PEAK_MEMORY
from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.bayes.corrections import find_doubted, find_memory_crashes, find_variants
from cclsearch.propose.bayes.ensemble import Ensemble, fit_ensemble
from cclsearch.propose.bayes.feasibility import fit_feasibility
from cclsearch.stats.calibration import CalibrationData, ParametricModel, Prior, RowModel, calibrate
from cclsearch.stats.closed_form import Predictor
from cclsearch.stats.kernel import Array

MIN_LOG_COST_SD = 1e-3
"""Minimum standard deviation of the primary metric's log for estimating another value's dependence on it."""
# Most losses grow with the cost; a score that rewards few accelerators may fall with it.
SLOPES = ((1.0, 0.5, 0.9), (0.0, 1.5, 0.1))
"""Prior of a value's slope over the primary metric's log cost, in units of `ValueScale`: mean, standard deviation,
probability.
"""
LINE_NOISE = 0.02
"""Relative noise of a value given the primary metric."""
RESIDUAL_FACTORS = (0.1, 1.0, 3.0)
"""Scale of the residual of a value that the primary metric does not explain, relative to the residual of the latter."""
EXACT_SD = 1e-9
"""Standard deviation in place of 0 for a value known before a trial runs."""


class Drawn(NamedTuple):
    """k weighted models of one value at m rows: means and standard deviations of a measurement."""

    mean_km: Array
    sd_km: Array
    weight_k: Array


class ValueScale(NamedTuple):
    """Standardizes a value, so that one unit equals one unit of the primary metric's log cost."""

    is_log: bool = True
    center: float = 0.0
    spread: float = 1.0

    def apply(self, values: Array) -> Array:
        """Return the values on the scale."""
        return np.asarray(((np.log(values) if self.is_log else values) - self.center) / self.spread)


def choose_scale(values: Array, primary: Sequence[float]) -> ValueScale:
    """Return the scale for these values and the primary metrics of the same trials.

    Until the trials' primary metrics differ, values are scaled by themselves: log values stay as they are, others are
    divided by the absolute value of their median.
    """
    if not len(values):
        return ValueScale()
    is_log = bool(np.all(values > 0))
    scaled = np.log(values) if is_log else values
    center = float(np.median(scaled))
    spread = float(np.std(np.log(primary))) if len(primary) == len(values) else 0.0
    if spread > MIN_LOG_COST_SD and np.std(scaled) > 0:
        return ValueScale(is_log, center, float(np.std(scaled)) / spread)
    return ValueScale(is_log, center, 1.0 if is_log else max(abs(center), 1e-6))


class MetricModels:
    """The models of each metric after the trials so far."""

    def __init__(self, view: SearchView, predictor: Predictor, earlier: Sequence[Observation]) -> None:
        self.view = view
        self.predictor = predictor
        self.earlier = earlier
        """Observations of earlier runs."""
        self.doubted = find_doubted(view)
        """Trials whose measurement the LLM doubts."""
        self.variants, self.memory_variants = find_variants(view, predictor)
        """The closed forms of the primary metric and of the memory with corrections of the LLM."""
        self._ensembles: dict[str, Ensemble] = {}
        self.primary = self.ensemble(view.primary.name)
        self.feasibility = fit_feasibility(
            predictor, (*earlier, *view.observations), self.doubted, find_memory_crashes(view), self.memory_variants
        )

    def ensemble(self, metric: str) -> Ensemble:
        """Return the ensemble of the primary metric, or of one with a closed form; fitted once."""
        if metric not in self._ensembles:
            form = self.predictor.forms.get(metric) or self.predictor.form(self.view.primary)
            variants = self.variants if metric == self.view.primary.name else ()
            self._ensembles[metric] = fit_ensemble(
                form, self.predictor.features, self.view.observations, self.earlier, self.doubted, variants
            )
        return self._ensembles[metric]

    def base_of(self, metric: str) -> str | None:
        """Return the metric whose model predicts this one exactly: itself, or one it is derived from; else None."""
        derived = self.predictor.derived.get(metric)
        base = derived.base if derived else metric
        known = {self.view.primary.name, NUM_ACCELERATORS, *self.predictor.forms}
        memory = self.predictor.memory
        is_peak = base == PEAK_MEMORY and memory is not None and memory.is_measured
        return base if base in known or is_peak else None

    def derive(self, metric: str, log_base: Array, rows: NDArray[np.int64]) -> Array:
        """Return the log of the metric at these rows, given the log of its base."""
        derived = self.predictor.derived.get(metric)
        return np.log(derived.value(np.exp(log_base), rows)) if derived else log_base

    def expect(self, metric: str, rows: NDArray[np.int64]) -> Array | None:
        """(m,) log of the metric by the calibrated closed form alone; None if there is none."""
        base = self.base_of(metric)
        if base is None:
            return None
        if base == NUM_ACCELERATORS:
            log_base = np.log(self.view.space.num_accelerators_N[rows])
        elif base == PEAK_MEMORY and self.predictor.memory:
            log_base = self.feasibility.memory.model(rows)(self.feasibility.memory.theta_P)
        else:
            ensemble = self.ensemble(base)
            log_base = ensemble.form.metric.sign * ensemble.most_likely.model(rows)(ensemble.most_likely.theta_P)
        return self.derive(metric, log_base, rows)

    def draw(self, base: str, rows: NDArray[np.int64], rng: np.random.Generator) -> Drawn:
        """Return models of the log of a metric that `base_of` names."""
        if base == NUM_ACCELERATORS:
            log_ranks = np.log(self.view.space.num_accelerators_N[rows])[None]
            return Drawn(log_ranks, np.full_like(log_ranks, EXACT_SD), np.ones(1))
        if base == PEAK_MEMORY and (memory := self.predictor.memory):
            moments = [hypothesis.marginals(rows) for hypothesis in self.feasibility.hypotheses]
            variance = np.array([variance for _, variance in moments]) + memory.form.prior.noise**2
            return Drawn(np.array([mean for mean, _ in moments]), np.sqrt(variance), self.feasibility.weight_h)
        ensemble = self.ensemble(base)
        mean, sd, weight = ensemble.draw(rows, rng)
        return Drawn(ensemble.form.metric.sign * mean, sd, weight)


class Draws:
    """Models of every metric at fixed rows; metrics of one base share its draws."""

    def __init__(self, models: MetricModels, rows: NDArray[np.int64], rng: np.random.Generator) -> None:
        self.models = models
        self.rows = rows
        self._rng = rng
        self._drawn: dict[str, Drawn] = {}

    def preset(self, base: str, drawn: Drawn) -> None:
        """Make these the models of the log of a metric that `base_of` names."""
        self._drawn[base] = drawn

    def known(self, metric: str) -> Drawn | None:
        """Return models of the log of a metric that is predicted exactly or in closed form; None for another."""
        base = self.models.base_of(metric)
        if base is None:
            return None
        if base not in self._drawn:
            self._drawn[base] = self.models.draw(base, self.rows, self._rng)
        drawn = self._drawn[base]
        return drawn._replace(mean_km=self.models.derive(metric, drawn.mean_km, self.rows))

    def find(self, metric: str) -> tuple[Drawn | None, bool]:
        """Return models of a metric, and whether they are of its log; None if nothing predicts or measured it.

        A metric that is learned from the trials has models of its log if all of its values are above 0.
        """
        if (drawn := self.known(metric)) is not None:
            return drawn, True
        view = self.models.view
        seen = [(o, value) for o in view.observations if o.row is not None and (value := o.value(metric)) is not None]
        if not seen:
            return None, True
        values = np.array([value for _, value in seen])
        scale = choose_scale(values, [v for o, _ in seen if (v := o.value(view.primary.name))])
        mean, sd, weight = self.learned(np.array([o.row for o, _ in seen]), scale.apply(values))
        return Drawn(mean * scale.spread + scale.center, sd * scale.spread, weight), scale.is_log

    def learned(self, seen_rows: NDArray[np.int64], values: Array) -> Drawn:
        """Return models of a value on its scale: a line in the primary metric's log cost plus a Gaussian process.

        Hypotheses about slope and residual are weighted by their evidence.
        """
        models, view, primary = self.models, self.models.view, self.models.primary
        name, sign = view.primary.name, primary.form.metric.sign
        measured = {
            int(o.row): sign * float(np.log(v)) for o in view.observations if o.row is not None and (v := o.value(name))
        }
        center = float(np.median(np.array(list(measured.values()) or primary.mean(self.rows))))
        line = line_in_cost(primary, measured, center)
        evidence, shape = CalibrationData.measured(seen_rows, values), primary.most_likely.prior.shape
        hypotheses, scores = [], []
        for (slope, slope_sd, probability), residual in product(SLOPES, RESIDUAL_FACTORS):
            prior = Prior(
                np.array([0.0, slope]), np.array([1.0, slope_sd]), shape.scaled(residual), LINE_NOISE, dof=4.0
            )
            hypotheses.append(calibrate(line, models.predictor.features, prior, evidence))
            scores.append(hypotheses[-1].log_evidence + float(np.log(probability)))
        weight_h = softmax(scores)
        drawn = self.known(name)
        assert drawn is not None
        mean_km, sd_km, weight_k = sign * drawn.mean_km, drawn.sd_km, drawn.weight_k
        deviation_km = mean_km - weight_k @ mean_km
        means, sds = [], []
        for hypothesis in hypotheses:
            mean_m, variance_m = hypothesis.marginals(self.rows)
            fitted_slope = float(hypothesis.theta_P[1])
            means.append(mean_m + fitted_slope * deviation_km)
            sds.append(np.sqrt(variance_m + (fitted_slope * sd_km) ** 2))
        return Drawn(np.concatenate(means), np.concatenate(sds), np.outer(weight_h, weight_k).ravel())


def line_in_cost(primary: Ensemble, measured: Mapping[int, float], center: float) -> ParametricModel:
    """Return the model (offset, slope) -> line in the log cost of each row: measured if it is, else expected."""

    def line(at: NDArray[np.int64]) -> RowModel:
        expected = zip(at.tolist(), primary.mean(at).tolist(), strict=True)
        log_cost = np.array([measured.get(row, value) for row, value in expected]) - center
        return lambda theta: np.asarray(theta[..., :1] + theta[..., 1:2] * log_cost)

    return line
