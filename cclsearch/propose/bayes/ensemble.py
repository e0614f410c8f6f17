"""An ensemble of models of one metric's cost that are plausible after the trials so far, with weights.

Hypotheses differ in how far the closed form may be off and in how noisy the cluster is; their evidence weights them
(Rasmussen and Williams 2006, section 5.2). From each posterior, multipliers are drawn; each draw is a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from cclsearch.propose.bayes.mixture import Variant, mix_forms
from cclsearch.propose.observations import Observation
from cclsearch.stats.calibration import CalibrationData, Posterior, Prior, calibrate
from cclsearch.stats.closed_form import ClosedForm
from cclsearch.stats.kernel import Array, Features

NOISE_OF_EXCESS = 0.3
"""Noise in log units for each log unit by which a cost exceeds the trusted span."""
NOISE_PENALTY = 0.2
"""Loss of a hypothesis in log evidence for each log unit of noise above the prior's."""
NUM_MODELS = 128
RESIDUAL_FACTORS = (0.5, 1.0, 2.0)
"""Scale of the residual of the closed form in each hypothesis, relative to the prior's."""
NOISE_FACTORS = (1.0, 3.0, 10.0)
"""Run-to-run noise in each hypothesis, relative to the prior's."""
SCALE = "scale"
"""Multiplier of the whole cost, if the closed form has one."""
SCALES = ((0.0, float(np.log(10.0)), float(np.log(100.0))), (float(np.log(6.0)), 0.9, float(np.log(20.0))))
"""Shift and standard deviation of the log of `SCALE` in separate hypotheses, and the loss of each in log evidence."""
# First, hardware or a framework unlike all that the prior was fitted to, off by up to a factor of ten either way: one
# machine in a hundred. With less, one wrong time of six moved the predictions of all other configurations. Then, a slow
# or host-bound cluster: 25 public training rows of A100 took 3 to 18 times the closed form, on one cluster in twenty.
MIN_WEIGHT = 0.05
"""Hypotheses with a lower weight are dropped."""
TRUSTED_SPAN = float(np.log(2.0))
"""Log costs up to this far above the lowest (a factor of 2) keep their full weight."""
# It was measured on another day and other nodes.
OTHER_RUN_NOISE = 0.1
"""Relative noise of a value from an earlier run."""
# A factor of 2.7 either way: the value teaches almost nothing.
DOUBTED_NOISE = 1.0
"""Noise of the log of a value that the LLM doubts."""


@dataclass(frozen=True, eq=False)
class Ensemble:
    """The posterior of each hypothesis about the log cost, with weights."""

    form: ClosedForm
    hypotheses: tuple[Posterior, ...]
    weight_h: Array
    doubted: Set[int] = frozenset()
    """Trials whose values count as almost unknown."""
    shares: tuple[tuple[Variant | None, float], ...] = ((None, 1.0),)
    """Weights of the closed form without corrections, and with those of the LLM."""

    @property
    def most_likely(self) -> Posterior:
        """The posterior with the largest weight."""
        return self.hypotheses[int(np.argmax(self.weight_h))]

    def draw(self, rows: NDArray[np.int64], rng: np.random.Generator) -> tuple[Array, Array, Array]:
        """Draw k models: (k, m) means, (k, m) standard deviations of a measurement, (k,) weights at these rows."""
        means, sds, weights = [], [], []
        for hypothesis, weight in zip(self.hypotheses, self.weight_h, strict=True):
            count = max(4, round(NUM_MODELS * weight))
            mean, variance = hypothesis.ensemble(rows, rng.standard_normal((count, len(hypothesis.theta_P))))
            means.append(mean)
            sds.append(np.broadcast_to(np.sqrt(variance + hypothesis.prior.noise**2), mean.shape))
            weights.append(np.full(count, weight / count))
        return np.concatenate(means), np.concatenate(sds), np.concatenate(weights)

    def mean(self, rows: NDArray[np.int64]) -> Array:
        """(m,) expected log cost, averaged over the hypotheses."""
        return np.asarray(self.weight_h @ np.array([hypothesis.marginals(rows)[0] for hypothesis in self.hypotheses]))

    @property
    def spread(self) -> float:
        """The true errors over the predicted standard deviations (`Posterior.spread`), averaged over the hypotheses."""
        return float(self.weight_h @ np.array([hypothesis.spread for hypothesis in self.hypotheses]))

    def leave_one_out_error(self) -> Array:
        """(n,) leave-one-out error of the most likely hypothesis at each observation, in log units."""
        return self.most_likely.leave_one_out_error()


def fit_ensemble(
    form: ClosedForm,
    features: Features,
    observations: Sequence[Observation],
    earlier: Sequence[Observation],
    doubted: Set[int] = frozenset(),
    variants: Sequence[Variant] = (),
) -> Ensemble:
    """Return the weighted hypotheses, fitted to the form's metric in this search and in earlier runs.

    Hypotheses with less noise and residual tell two priors apart more clearly. So if the first one of a prior has less
    than `MIN_WEIGHT` beside the first one of all, the others of that prior are not fitted.
    """

    def fit(form: ClosedForm, seen: Sequence[Observation]) -> tuple[list[Posterior], list[float]]:
        hypotheses: list[Posterior] = []
        scores: list[float] = []
        for base, penalty in _list_priors(form):
            for n, (noise, residual) in enumerate(product(NOISE_FACTORS, RESIDUAL_FACTORS)):
                if n == 1 and scores[-1] < scores[0] + np.log(MIN_WEIGHT):
                    break
                prior = replace(base, shape=base.shape.scaled(residual), noise=base.noise * noise)
                data = _collect_data(form, seen, earlier, prior, doubted)
                hypothesis = calibrate(form.log_cost, features, prior, data)
                hypotheses.append(hypothesis)
                doubt = 0.5 * np.log(residual) ** 2 + NOISE_PENALTY * np.log(noise)
                scores.append(float(hypothesis.log_evidence - doubt - penalty))
        return hypotheses, scores

    mixed = mix_forms(fit, form, variants, observations, MIN_WEIGHT)
    return Ensemble(form, mixed.hypotheses, mixed.weight_h, doubted, mixed.shares)


def _list_priors(form: ClosedForm) -> Iterator[tuple[Prior, float]]:
    """Yield each prior of the multipliers, and the loss of its hypotheses in log evidence."""
    yield form.prior, 0.0
    if form.unlearned:
        yield form.unlearned, form.odds
    prior, odds = (form.unlearned, form.odds) if form.unlearned else (form.prior, 0.0)
    yield from ((wide, odds + loss) for wide, loss in widen_scale(prior, form.multipliers))


def widen_scale(prior: Prior, multipliers: Sequence[str]) -> Iterator[tuple[Prior, float]]:
    """Yield the prior with each of `SCALES` that is wider than its own, and the loss in log evidence."""
    is_scale = np.array([name == SCALE for name in multipliers], dtype=bool)
    for shift, sd, loss in SCALES:
        if is_scale.any() and prior.sd_P[is_scale][0] < sd:
            sd_P = np.where(is_scale, sd, prior.sd_P)
            yield replace(prior, mean_P=prior.mean_P + shift * is_scale, sd_P=sd_P), loss


def predict_without(
    row: int, ensemble: Ensemble, observations: Sequence[Observation], earlier: Sequence[Observation]
) -> tuple[float, float]:
    """Return the expected log cost of a run at a row, and its standard deviation, by a fit without the row's runs."""
    # The leave-one-out error keeps the weights and the noise that an outlier gave to the other trials; this does not.
    others = [[o for o in seen if o.row != row] for seen in (observations, earlier)]
    features = ensemble.most_likely.features
    variants = [variant for variant, _ in ensemble.shares if variant]
    fit = fit_ensemble(ensemble.form, features, others[0], others[1], ensemble.doubted, variants).most_likely
    mean, variance = fit.marginals(np.array([row]))
    return float(mean[0]), float(np.sqrt(variance[0] + fit.prior.noise**2))


def _collect_data(
    form: ClosedForm,
    observations: Sequence[Observation],
    earlier: Sequence[Observation],
    prior: Prior,
    doubted: Set[int],
) -> CalibrationData:
    """Return every measured value of this search and of earlier runs, as log cost by row of the space."""
    metric = form.metric.name
    # Costs are logarithms: a value that is not above 0, which only an edited ledger has, says nothing.
    own = [o for o in observations if o.row is not None and (o.value(metric) or 0.0) > 0]
    other = [o for o in earlier if o.row is not None and (o.value(metric) or 0.0) > 0]
    values = form.metric.sign * np.log(np.array([o.value(metric) for o in (*own, *other)], dtype=np.float64))
    base = np.array(
        [np.hypot(prior.noise, DOUBTED_NOISE * (o.trial in doubted)) for o in own]
        + [np.hypot(prior.noise, OTHER_RUN_NOISE)] * len(other)
    )
    rows = np.array([o.row for o in (*own, *other)], dtype=np.int64)
    return CalibrationData.measured(rows, values, noise_n=downweight_far(values, base))


def downweight_far(log_cost_n: Array, noise_n: Array) -> Array:
    """(n,) noise of each measured cost, raised for costs far above the lowest.

    Such runs say little about good ones: beyond a factor of two, causes matter that the closed form does not model
    (allocator retries, stalled transports). So the noise grows with the distance.
    """
    if not len(log_cost_n):
        return np.zeros(0)
    excess_n = np.maximum(log_cost_n - log_cost_n.min() - TRUSTED_SPAN, 0.0)
    return np.asarray(np.hypot(noise_n, NOISE_OF_EXCESS * excess_n))
