"""Multipliers of a closed form's parts, by name."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cclsearch.tasks.training.layout import Array

Multipliers = dict[str, Array]
"""Name -> multiplier: a scalar, or (S, 1) for S sets of them at once."""


def name_multipliers(names: Sequence[str], log_multipliers: NDArray[np.float64]) -> Multipliers:
    """The multipliers of one set (P,), or of S sets (S, P) as columns that broadcast against (N,) parts."""
    values = np.exp(log_multipliers)
    columns = values if values.ndim == 1 else values.T[:, :, None]
    return dict(zip(names, columns, strict=True))
