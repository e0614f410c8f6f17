"""Configurations that are equal in everything that closed forms of serving use: each is computed once."""

from __future__ import annotations

import numpy as np

from cclsearch.stats.closed_form import Rows
from cclsearch.tasks.serving.disaggregation import Deployment

UNUSED = ("block_size", "is_chunked", "is_alone", "restarts", "cache_gib", "memory_share")
"""Columns that the closed forms of a load do not use; the simulation does."""
MIN_ROWS = 4096
"""A smaller space is computed whole."""


def find_alike(at: Deployment) -> Rows:
    """(N,) for each row, the first one that is equal in everything that closed forms use."""
    size = len(at.accelerators)
    if size < MIN_ROWS:
        return np.arange(size)
    roles = [role for role in (at.whole, at.prefill, at.decode) if role is not None]
    columns = [getattr(role, n) for role in roles for n in role.__dataclass_fields__ if n not in UNUSED]
    columns += [] if at.is_apart is None else [at.is_apart]
    columns = [column for column in columns if (column != column[0]).any()]
    weights = np.random.default_rng(0).uniform(0.5, 1.5, len(columns))
    key = np.zeros(size)
    for weight, column in zip(weights, columns, strict=True):
        key += weight * column
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    alike = first[inverse]
    if any((column != column[alike]).any() for column in columns):  # two different rows had equal sums
        return np.arange(size)
    return alike
