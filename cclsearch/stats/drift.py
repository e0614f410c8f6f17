"""Estimate how much one window of a cluster is slower or faster than another, from configurations that ran in both.

Model: log loss = configuration + window + noise of one run, with noise of known relative size and a normal prior around
0 for each window (a two-way analysis of variance with a random effect: Gelman et al., Bayesian Data Analysis, chapter
15). A window that shares no configuration with the first one, directly or through others, has no estimate.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from cclsearch.stats.noise import estimate_noise

# They differ by some to tens of percent.
PRIOR_LOG_RATIO = 0.2
"""Standard deviation of the log ratio of two windows before any pair."""
Z_95 = 1.96
"""Standard deviations on each side of a normal's mean that contain 95 %."""
NARROW = 0.1
"""Relative half width of a ratio's interval up to which "no difference" is an answer."""


@dataclass(frozen=True)
class WindowRatio:
    """Ratio of the losses of one window to the first's."""

    log_ratio: float = 0.0
    """Natural logarithm of the ratio: above 0 if the window is slower."""
    error: float = 0.0
    """Standard deviation of the logarithm."""
    num_pairs: int = 0
    """Configurations of this window that also ran in another; 0 for the first window and one without estimate."""

    @property
    def ratio(self) -> float:
        return math.exp(self.log_ratio)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the ratio."""
        return math.exp(self.log_ratio - Z_95 * self.error), math.exp(self.log_ratio + Z_95 * self.error)

    @property
    def is_difference(self) -> bool:
        """Whether the interval does not contain 1."""
        low, high = self.interval
        return not low <= 1.0 <= high

    @property
    def is_no_difference(self) -> bool:
        """Whether the interval contains 1 and is narrow."""
        return not self.is_difference and Z_95 * self.error <= NARROW


def estimate_drift(
    runs: Sequence[tuple[Hashable, int, float]],
) -> dict[int, WindowRatio]:
    """Return window -> its ratio to window 0, from (configuration, window, loss above 0) of each run.

    Windows that are not connected with window 0 are left out.
    """
    cells: dict[Hashable, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for config, window, loss in runs:
        cells[config][window].append(loss)
    pairs = [windows for windows in cells.values() if len(windows) > 1]
    connected = _find_connected(pairs)
    pairs = [windows for windows in pairs if connected & set(windows)]
    ratios = {0: WindowRatio()}
    others = sorted(connected - {0})
    if not others:
        return ratios
    noise = estimate_noise([losses for windows in cells.values() for losses in windows.values()]).relative
    rows, values, weights = [], [], []
    for n, windows in enumerate(pairs):
        for window, losses in windows.items():
            row = np.zeros(len(others) + len(pairs))
            if window:
                row[others.index(window)] = 1.0
            row[len(others) + n] = 1.0
            rows.append(row)
            values.append(float(np.mean(np.log(losses))))
            weights.append(len(losses) / noise**2)
    design, weight = np.array(rows), np.array(weights)
    precision = design.T @ (design * weight[:, None])
    precision[range(len(others)), range(len(others))] += 1.0 / PRIOR_LOG_RATIO**2
    from scipy.linalg import cho_solve, cholesky, solve_triangular  # takes as long to load as all that reads a run

    factor = cholesky(precision, lower=True)
    found = cho_solve((factor, True), design.T @ (weight * np.array(values)))
    inverse_root = solve_triangular(factor, np.eye(len(precision)), lower=True)
    for n, window in enumerate(others):
        num_pairs = sum(window in windows for windows in pairs)
        ratios[window] = WindowRatio(float(found[n]), float(np.linalg.norm(inverse_root[:, n])), num_pairs)
    return ratios


def _find_connected(pairs: Sequence[dict[int, list[float]]]) -> set[int]:
    """Return the windows that share configurations with window 0, directly or through others."""
    connected = {0}
    while True:
        more = {window for windows in pairs if connected & set(windows) for window in windows} - connected
        if not more:
            return connected
        connected |= more
