"""Run-to-run noise of a loss, and the confidence that one configuration beats another.

Losses are compared on a log scale (noise is relative). If one is 0 or below, they are compared relative to the median
of their absolute values (unscaled if that is 0). The run-to-run variance has a scaled inverse chi-squared prior and is
updated by repeats, so differences are Student-t distributed (Gelman et al., Bayesian Data Analysis, sections 2.6, 3.2).
A cache hit is not a repeat: callers pass one loss per real run.

Hiccups of a cluster are heavy-tailed, so a few configurations whose runs differ by far more than those of all others
teach nothing about the noise of the others (`estimate_noise`), and a run that most runs of its configuration contradict
is not compared (`find_outliers`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Key = TypeVar("Key", bound=Hashable)

# Clusters show a few percent, and in the published reference runs two runs of one configuration differ by at most 7.5
# %.
PRIOR_RELATIVE = 0.03
"""Run-to-run standard deviation before any repeat."""
PRIOR_DOF = 2.0
"""Number of repeats that the prior counts as."""
DEFAULT_CONFIDENCE = 0.95
# In simulations a wrong choice then costs 1.05 times the least possible, and 2.4 times at 0.95 (simulated searches,
# noise of 1 to 10 %).
REPLACED_FROM = 0.6
"""Confidence from which a configuration with fewer runs replaces the best one."""
OUTLIER = 0.01
"""Probability, over all repeated configurations, that the noise alone makes one of them an outlier."""
# More of them are the noise.
OUTLIER_SHARE = 0.2
"""Largest share of the repeated configurations that may be outliers, at least one."""
MIN_MAJORITY = 3
"""Number of a configuration's runs from which most may contradict one."""
MAX_NOISE_AWAY = 12
"""Standard deviations from the lowest mean beyond which a configuration has no chance and is not drawn."""
MIN_CHANCE = 0.01
"""Smallest chance of a finalist after the first to be the best."""
DRAWS = 20_000


@dataclass(frozen=True)
class Noise:
    """Run-to-run noise of a loss."""

    relative: float
    """Standard deviation of one run, as a fraction of the loss."""
    dof: float
    """Degrees of freedom of that estimate, including the prior's."""
    num_repeats: int = 0
    """Repeats it was estimated from, not counting the first run of each configuration; 0: the prior alone."""
    num_outliers: int = 0
    """Number of left-out configurations, whose runs differ by far more than the others'."""

    @property
    def is_measured(self) -> bool:
        return self.num_repeats > 0

    def quantile(self, probability: float) -> float:
        """Return the error of one run, relative, that this share of the runs does not exceed (Student-t)."""
        from scipy.stats import t as student  # takes as long to load as all that reads a run

        return float(student.ppf(probability, self.dof)) * self.relative

    def widened(self, errors: Sequence[float]) -> Noise:
        """The same with further relative errors of the runs, by their root mean square; unchanged without errors."""
        if not errors:
            return self
        further = math.sqrt(sum(error**2 for error in errors) / len(errors))
        return replace(self, relative=math.hypot(self.relative, further))


@dataclass(frozen=True)
class ConfidenceInterval:
    """Confidence interval of a configuration's true loss."""

    low: float
    high: float
    confidence: float
    num_runs: int


def estimate_noise(
    runs: Sequence[Sequence[float]], spreads: Sequence[float] = (), *, own: Sequence[Sequence[float]] = ()
) -> Noise:
    """Return the run-to-run noise, from the losses of each configuration's runs and the spreads inside runs.

    Half the median spread of the steps inside a run is a lower bound of the prior, but does not count as evidence: runs
    differ more than steps do. Losses must be finite. Configurations that the noise of the others does not explain are
    left out (generalized extreme studentized deviates, Rosner 1983, with the variance ratio of each configuration),
    except the configuration of `own`, which the caller asks about: its runs count beside `runs`.
    """
    inside = float(np.median(spreads)) if len(spreads) else 0.0
    prior = max(PRIOR_RELATIVE, inside / 2)
    others, kept = ([_find_scatter(losses) for losses in groups if len(losses) > 1] for groups in (runs, own))
    others.sort(key=lambda scatter: scatter.squares / scatter.dof)
    num_out = next((n for n in range(_most_outliers(len(others)), 0, -1) if _is_outlier(others, kept, prior, n)), 0)
    noise = _pool([*others[: len(others) - num_out], *kept], prior)
    return replace(noise, num_outliers=num_out)


def find_outliers(runs: Mapping[Key, Sequence[float]]) -> dict[Key, set[int]]:
    """Return the positions of the runs that most runs of their configuration contradict (3 runs or more)."""
    found: dict[Key, set[int]] = {}
    for key, losses in runs.items():
        if len(losses) >= MIN_MAJORITY:
            limit = find_largest_gap(estimate_noise([other for name, other in runs.items() if name != key]))
            scaled = _scale(np.asarray(losses, dtype=float))
            apart = np.flatnonzero(np.abs(scaled - np.median(scaled)) > limit)
            if 0 < len(apart) < len(losses) / 2:
                found[key] = set(map(int, apart))
    return found


def find_largest_gap(noise: Noise) -> float:
    """Return the largest difference of two runs that the noise explains: by chance it is larger in `OUTLIER` of pairs.

    On the scale of `_scale`: of positive losses it is the log of their ratio.
    """
    return noise.quantile(1 - OUTLIER / 2) * math.sqrt(2)


def measure_gap(one: float, other: float) -> float:
    """Return the difference of two runs on the scale of `find_largest_gap`."""
    return float(np.ptp(_scale(np.array([one, other], dtype=float))))


class _Scatter(NamedTuple):
    """Distances of the runs of one configuration from their mean."""

    squares: float
    """Sum of the squared distances."""
    dof: int


def _find_scatter(losses: Sequence[float]) -> _Scatter:
    scaled = _scale(np.asarray(losses, dtype=float))
    return _Scatter(float(np.sum((scaled - scaled.mean()) ** 2)), len(losses) - 1)


def _pool(groups: Sequence[_Scatter], prior: float) -> Noise:
    dof = sum(scatter.dof for scatter in groups)
    squares = sum(scatter.squares for scatter in groups)
    total = PRIOR_DOF + dof
    return Noise(math.sqrt((PRIOR_DOF * prior**2 + squares) / total), total, dof)


def _most_outliers(num_repeated: int) -> int:
    return min(num_repeated, max(1, int(OUTLIER_SHARE * num_repeated)))


def _is_outlier(others: Sequence[_Scatter], kept: Sequence[_Scatter], prior: float, n: int) -> bool:
    """Return whether the `n`-th worst configuration is one to the noise without the `n` worst; ascending scatters."""
    from scipy.stats import f as fisher

    worst, noise = others[len(others) - n], _pool([*others[: len(others) - n], *kept], prior)
    ratio = worst.squares / worst.dof / noise.relative**2
    return float(fisher.sf(ratio, worst.dof, noise.dof)) < OUTLIER / len(others)


def confidence_better(new: Sequence[float], old: Sequence[float], noise: Noise) -> float:
    """Return the probability (0 to 1) that the configuration with losses `new` is truly better than the one with `old`.

    Both need at least one run. Equal means give 0.5.
    """
    from scipy.stats import t as student

    scaled = _scale(np.array([*new, *old], dtype=float))
    gap = float(scaled[len(new) :].mean() - scaled[: len(new)].mean())
    error = noise.relative * math.sqrt(1 / len(new) + 1 / len(old))
    return float(student.cdf(gap / error, noise.dof))


def is_better(
    new: Sequence[float], old: Sequence[float], noise: Noise, *, confidence: float = DEFAULT_CONFIDENCE
) -> bool:
    """Return whether `new` is better than `old` with at least this confidence."""
    return confidence_better(new, old, noise) >= confidence


def confidence_interval(
    losses: Sequence[float], noise: Noise, *, confidence: float = DEFAULT_CONFIDENCE
) -> ConfidenceInterval:
    """Return the interval of the configuration's true loss at this confidence; `losses` needs at least one run."""
    values = np.asarray(losses, dtype=float)
    half = noise.quantile(0.5 + confidence / 2) / math.sqrt(len(values))
    if np.all(values > 0):
        middle = float(np.log(values).mean())
        return ConfidenceInterval(math.exp(middle - half), math.exp(middle + half), confidence, len(values))
    middle, size = float(values.mean()), float(np.median(np.abs(values)))
    return ConfidenceInterval(middle - half * size, middle + half * size, confidence, len(values))


def chances_to_be_best(runs: Mapping[Key, Sequence[float]], noise: Noise, *, seed: int = 0) -> dict[Key, float]:
    """Return configuration -> probability that it is truly the best; they add up to 1. Each needs at least one run.

    A configuration 12 standard deviations behind the best gets 0 without being drawn.
    """
    if not runs:
        return {}
    keys = list(runs)
    scaled = _scale(np.concatenate([np.asarray(runs[key], dtype=float) for key in keys]))
    sizes_C = np.array([len(runs[key]) for key in keys])
    starts = np.concatenate([[0], np.cumsum(sizes_C)[:-1]])
    means_C = np.add.reduceat(scaled, starts) / sizes_C
    close = np.flatnonzero(means_C - means_C.min() < MAX_NOISE_AWAY * noise.relative)
    draws = np.random.default_rng(seed)
    sigma_D1 = noise.relative * np.sqrt(noise.dof / draws.chisquare(noise.dof, size=(DRAWS, 1)))
    truth_DC = draws.normal(means_C[close], sigma_D1 / np.sqrt(sizes_C[close]))
    chances_C = np.zeros(len(keys))
    chances_C[close] = np.bincount(truth_DC.argmin(axis=1), minlength=len(close)) / DRAWS
    return {key: float(chances_C[c]) for c, key in enumerate(keys)}


def pick_finalists(runs: Mapping[Key, Sequence[float]], noise: Noise, count: int) -> list[Key]:
    """Return up to `count` configurations worth another run, by falling probability of being the best.

    These are the most probable one and every other with a probability of at least 1 %.
    """
    chances = chances_to_be_best(runs, noise)
    order = sorted(runs, key=lambda key: (-chances[key], float(np.mean(runs[key]))))
    return [key for n, key in enumerate(order) if n == 0 or chances[key] >= MIN_CHANCE][:count]


def _scale(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the losses on a scale on which relative noise is additive."""
    if np.all(losses > 0):
        return np.asarray(np.log(losses))
    return losses / (float(np.median(np.abs(losses))) or 1.0)
