"""Rows that are equal in everything that closed forms of serving use: each is computed once."""

from __future__ import annotations

import numpy as np

from cclsearch.stats.closed_form import Rows
from cclsearch.tasks.serving.closed_form.disaggregation import Deployment

UNUSED = ("block_size", "is_chunked", "is_alone", "restarts", "cache_gib", "memory_share")
"""Columns that the closed forms of a load do not use; the simulation does."""
# A small space's rows cost less than finding the equal ones for each calibration.
MIN_ROWS = 4096
"""Size below which a space is computed whole."""


def find_first_equal(at: Deployment) -> Rows:
    """(N,) the first row that equals each row in everything that closed forms use."""
    size = len(at.accelerators)
    if size < MIN_ROWS:
        return np.arange(size)
    roles = [role for role in (at.whole, at.prefill, at.decode) if role is not None]
    columns = [getattr(role, n) for role in roles for n in role.__dataclass_fields__ if n not in UNUSED]
    columns += [] if at.is_apart is None else [at.is_apart]
    values = np.column_stack([column.astype(np.float64) for column in columns])
    _, first, inverse = np.unique(values, axis=0, return_index=True, return_inverse=True)
    return np.asarray(first[inverse.ravel()])
