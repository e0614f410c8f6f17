"""Returns the excess of each value over a constraint of the objective."""

from __future__ import annotations

import numpy as np

from cclsearch.scoring.objective import Constraint
from cclsearch.stats.kernel import Array

# A value that is known exactly must satisfy a bound that it equals.
TOLERANCE = 1e-6
"""Relative tolerance of a bound."""


def find_bounds(constraint: Constraint) -> tuple[float, float]:
    """Return the least and the largest value that satisfy it."""
    low = -np.inf if constraint.at_least is None else constraint.at_least - TOLERANCE * abs(constraint.at_least)
    return low, np.inf if constraint.at_most is None else constraint.at_most + TOLERANCE * abs(constraint.at_most)


def log_excess(constraint: Constraint, values: Array) -> Array:
    """Return the log of 1 + `Constraint.excess` of each value."""
    low, high = find_bounds(constraint)
    over = (values - high) / (abs(constraint.at_most or 0.0) or 1.0)
    under = (low - values) / (abs(constraint.at_least or 0.0) or 1.0)
    return np.asarray(np.log1p(np.maximum(np.maximum(over, under), 0.0)))
