"""Noise: how far two runs of one configuration differ, and how sure it is that one configuration beats another.

Losses are compared on a log scale (noise is relative) unless one of them is not above 0; then relative to the median of
their sizes (as they are where that is 0). The run-to-run variance has a scaled inverse chi-squared prior, which repeats
sharpen; differences are then Student-t distributed (Gelman et al., Bayesian Data Analysis, sections 2.6 and 3.2). A
cache hit is no repeat: callers pass one loss a real run.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Key = TypeVar("Key", bound=Hashable)

PRIOR_RELATIVE = 0.03
"""Run-to-run standard deviation before any repeat: clusters show a few per cent, at most 7.5 % between two runs of one
configuration in the published reference runs."""
PRIOR_DOF = 2.0
"""How many repeats that prior is worth."""
DEFAULT_CONFIDENCE = 0.95
DRAWS = 20_000


@dataclass(frozen=True)
class Noise:
    """Run-to-run noise of a loss."""

    relative: float
    """Standard deviation of one run, as a fraction of the loss."""
    dof: float
    """Degrees of freedom behind that figure, the prior's included."""
    num_repeats: int = 0
    """Runs beyond the first of their configuration that it was measured from; 0 where it is the prior alone."""

    @property
    def is_measured(self) -> bool:
        return self.num_repeats > 0


@dataclass(frozen=True)
class Interval:
    """Where a configuration's true loss lies."""

    low: float
    high: float
    confidence: float
    num_runs: int


def estimate_noise(runs: Sequence[Sequence[float]], spreads: Sequence[float] = ()) -> Noise:
    """Run-to-run noise from the losses of each configuration's runs, and from the spreads inside runs.

    A spread of the steps inside a run is a floor of the prior, never evidence of its own: runs differ in more than
    steps do. Losses are finite.
    """
    inside = float(np.median(spreads)) if len(spreads) else 0.0
    prior = max(PRIOR_RELATIVE, inside / 2)
    repeated = [np.asarray(losses, dtype=float) for losses in runs if len(losses)]
    squares = sum(float(np.sum((_scale(losses) - _scale(losses).mean()) ** 2)) for losses in repeated)
    dof = sum(len(losses) - 1 for losses in repeated)
    total = PRIOR_DOF + dof
    return Noise(math.sqrt((PRIOR_DOF * prior**2 + squares) / total), total, dof)


def confidence_better(new: Sequence[float], old: Sequence[float], noise: Noise) -> float:
    """Probability, 0 to 1, that the configuration with the losses `new` is truly better than that with `old`.

    Both have at least one run. Equal means give 0.5.
    """
    from scipy.stats import t as student

    scaled = _scale(np.array([*new, *old], dtype=float))
    gap = float(scaled[len(new) :].mean() - scaled[: len(new)].mean())
    error = noise.relative * math.sqrt(1 / len(new) + 1 / len(old))
    return float(student.cdf(gap / error, noise.dof))


def is_better(
    new: Sequence[float], old: Sequence[float], noise: Noise, *, confidence: float = DEFAULT_CONFIDENCE
) -> bool:
    """Whether `new` beats `old` by more than the noise, with that confidence."""
    return confidence_better(new, old, noise) >= confidence


def find_interval(losses: Sequence[float], noise: Noise, *, confidence: float = DEFAULT_CONFIDENCE) -> Interval:
    """Interval that holds the configuration's true loss with that confidence; `losses` has at least one run."""
    from scipy.stats import t as student

    values = np.asarray(losses, dtype=float)
    half = float(student.ppf(0.5 + confidence / 2, noise.dof)) * noise.relative / math.sqrt(len(values))
    if np.all(values > 0):
        middle = float(np.log(values).mean())
        return Interval(math.exp(middle - half), math.exp(middle + half), confidence, len(values))
    middle, size = float(values.mean()), float(np.median(np.abs(values)))
    return Interval(middle - half * size, middle + half * size, confidence, len(values))


def chances_to_be_best(runs: Mapping[Key, Sequence[float]], noise: Noise, *, seed: int = 0) -> dict[Key, float]:
    """Configuration -> probability that it is truly the best of all; adds up to 1. Each has at least one run.

    One whose runs are 12 standard deviations behind the best of them has no chance: it is not drawn.
    """
    if not runs:
        return {}
    keys = list(runs)
    scaled = _scale(np.concatenate([np.asarray(runs[key], dtype=float) for key in keys]))
    sizes_C = np.array([len(runs[key]) for key in keys])
    starts = np.concatenate([[0], np.cumsum(sizes_C)[:-1]])
    means_C = np.add.reduceat(scaled, starts) / sizes_C
    close = np.flatnonzero(means_C - means_C.min() < 12 * noise.relative)
    draws = np.random.default_rng(seed)
    sigma_D1 = noise.relative * np.sqrt(noise.dof / draws.chisquare(noise.dof, size=(DRAWS, 1)))
    truth_DC = draws.normal(means_C[close], sigma_D1 / np.sqrt(sizes_C[close]))
    chances_C = np.zeros(len(keys))
    chances_C[close] = np.bincount(truth_DC.argmin(axis=1), minlength=len(close)) / DRAWS
    return {key: float(chances_C[c]) for c, key in enumerate(keys)}


def pick_finalists(runs: Mapping[Key, Sequence[float]], noise: Noise, count: int) -> list[Key]:
    """Up to `count` configurations worth another run, likeliest to be the best first.

    One that cannot be told from the best is worth it; where nothing is near, the best alone is.
    """
    chances = chances_to_be_best(runs, noise)
    order = sorted(runs, key=lambda key: (-chances[key], float(np.mean(runs[key]))))
    return [key for n, key in enumerate(order) if n == 0 or chances[key] >= 0.01][:count]


def _scale(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """Losses on a scale where noise is additive and relative."""
    if np.all(losses > 0):
        return np.asarray(np.log(losses))
    return losses / (float(np.median(np.abs(losses))) or 1.0)
