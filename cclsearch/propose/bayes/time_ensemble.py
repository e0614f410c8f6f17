"""Plausible models of the step time: what the trials so far leave possible, as a weighted set of whole models.

Rivals differ in how far the closed form may be off and how noisy the cluster is; the evidence weighs them (Rasmussen
and Williams 2006, section 5.2). From each rival, multipliers are drawn from its posterior, and each draw is a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cclsearch.propose.base import Observation
from cclsearch.stats.calibration import CalibrationData, Posterior, Prior
from cclsearch.tasks.training.layout import Array
from cclsearch.tasks.training.prediction import CardModel, Priors

NUM_MODELS = 128
DEVIATIONS = (0.5, 1.0, 2.0)
"""How far the closed form may be off, over the prior's own figure."""
NOISES = (1.0, 3.0, 10.0)
"""How noisy the cluster may be, over the prior's own figure."""
MIN_WEIGHT = 0.05
"""Rivals less probable than this are dropped."""
TRUSTED_SPAN = float(np.log(2.0))
OTHER_RUN_NOISE = 0.1
"""Relative noise of a time from an earlier run: another day, another set of nodes."""


@dataclass(frozen=True, eq=False)
class TimeModels:
    """Rival posteriors with their weights."""

    hypotheses: tuple[Posterior, ...]
    weight_h: Array

    @property
    def likeliest(self) -> Posterior:
        """The rival with the largest weight."""
        return self.hypotheses[int(np.argmax(self.weight_h))]

    def draw(self, rows: NDArray[np.int64], rng: np.random.Generator) -> tuple[Array, Array, Array]:
        """(k, m) means, (k, m) standard deviations of a measurement, and (k,) weights of k models at these rows."""
        means, sds, weights = [], [], []
        for hypothesis, weight in zip(self.hypotheses, self.weight_h, strict=True):
            count = max(4, round(NUM_MODELS * weight))
            mean, variance = hypothesis.ensemble(rows, rng.standard_normal((count, len(hypothesis.theta_P))))
            means.append(mean)
            sds.append(np.broadcast_to(np.sqrt(variance + hypothesis.prior.noise**2), mean.shape))
            weights.append(np.full(count, weight / count))
        return np.concatenate(means), np.concatenate(sds), np.concatenate(weights)

    def mean(self, rows: NDArray[np.int64]) -> Array:
        """(m,) log seconds that are expected, over all rivals."""
        return np.asarray(self.weight_h @ np.array([hypothesis.marginals(rows)[0] for hypothesis in self.hypotheses]))

    def leave_one_out_error(self) -> Array:
        """(n,) what the likeliest rival would have got wrong about each observation, had it not seen it (log units)."""
        likeliest = self.likeliest
        return np.asarray(likeliest.alpha_n / np.maximum(np.diag(likeliest.inverse_nn), 1e-12))


def fit_time_models(
    model: CardModel, observations: Sequence[Observation], earlier: Sequence[Observation], priors: Priors
) -> TimeModels:
    """The rivals, given this search's measured step times and those of earlier runs, by row of the space."""
    hypotheses, scores = [], []
    for noise in NOISES:
        for deviation in DEVIATIONS:
            prior = replace(priors.time, shape=priors.time.shape.scaled(deviation), noise=priors.time.noise * noise)
            hypothesis = model.calibrate_time(time_evidence(observations, earlier, prior), prior)
            hypotheses.append(hypothesis)
            scores.append(hypothesis.log_evidence - 0.5 * np.log(deviation) ** 2 - 0.2 * np.log(noise))
    weights = np.exp(np.array(scores) - max(scores))
    weights /= weights.sum()
    kept = np.flatnonzero(weights >= MIN_WEIGHT)
    return TimeModels(tuple(hypotheses[r] for r in kept), weights[kept] / weights[kept].sum())


def time_evidence(observations: Sequence[Observation], earlier: Sequence[Observation], prior: Prior) -> CalibrationData:
    """Every measured step time, this search's and earlier runs'."""
    own = [o for o in observations if o.row is not None and o.step_time_s is not None]
    other = [o for o in earlier if o.row is not None and o.step_time_s is not None]
    values = np.log(np.array([o.step_time_s for o in (*own, *other)], dtype=np.float64))
    base = np.array([prior.noise] * len(own) + [np.hypot(prior.noise, OTHER_RUN_NOISE)] * len(other))
    return CalibrationData(
        rows_n=np.array([o.row for o in (*own, *other)], dtype=np.int64),
        value_n=values,
        censoring_n=np.zeros(len(values), dtype=np.int8),
        label_noise_n=np.zeros(len(values)),
        one_sided=True,
        noise_n=downweight_slow(values, base),
    )


def downweight_slow(log_time_n: Array, noise_n: Array) -> Array:
    """(n,) noise of each measured time: what is far slower than the best teaches little about what is fast.

    Beyond a factor of two, causes enter that no closed form holds (allocator retries, stalled transports), so the
    trust falls with the distance.
    """
    if not len(log_time_n):
        return np.zeros(0)
    far = np.maximum(log_time_n - log_time_n.min() - TRUSTED_SPAN, 0.0)
    return np.asarray(np.hypot(noise_n, 0.3 * far))
