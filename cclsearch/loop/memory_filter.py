"""Configurations that the memory model rules out before anything was measured: they are never launched."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import numpy as np

from cclsearch.run.spec import RunSpec
from cclsearch.space.table import RowSet, Space

MIN_FIT_PROBABILITY = 0.005
"""Below this probability to fit into memory, a configuration is not launched."""


@dataclass(frozen=True)
class HeldBack:
    """Rows of the search space that are not launched, and why."""

    rows: Set[int] = frozenset()
    reason: str = ""


def hold_back(spec: RunSpec, space: Space) -> HeldBack:
    """Return the rows that almost certainly do not fit into memory.

    Rows of a recording are never held back, since reading them costs nothing. If no row can fit, none is held back.
    """
    if spec.recording is not None:
        return HeldBack()
    from cclsearch.stats.closed_form import predict_space

    prediction = predict_space(spec.card, space)
    if prediction is None:
        return HeldBack()
    oversized_N = prediction.fits_N < MIN_FIT_PROBABILITY
    if oversized_N.all() or not oversized_N.any():
        return HeldBack()
    rows, memory_gib_N = RowSet(oversized_N), prediction.memory_gib_N
    least = int(np.argmin(np.where(oversized_N, memory_gib_N, np.inf)))
    most = int(np.argmax(np.where(oversized_N, memory_gib_N, -np.inf)))
    reason = (
        f"{len(rows)} of {len(space)} configurations are held back: the memory model gives each less than"
        f" {MIN_FIT_PROBABILITY:.1%} probability to fit into {spec.card.hardware.memory_gib:g} GiB; predicted need:"
        f" {memory_gib_N[least]:.3g} GiB ({space.config(least)}) to {memory_gib_N[most]:.3g} GiB ({space.config(most)})"
    )
    return HeldBack(rows, reason)
