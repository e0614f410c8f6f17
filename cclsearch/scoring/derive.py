"""Metrics of a trial that every task has; metrics without a measurement are absent."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from cclsearch.card.model import Card
from cclsearch.core.metrics import NUM_ACCELERATORS, PEAK_MEMORY
from cclsearch.launch.contract import MemoryKind, TrialResult
from cclsearch.scoring.catalog import ENERGY, HEADROOM
from cclsearch.scoring.evidence import Evidence

GIB = 2**30
MAD_TO_SIGMA = 1.4826
"""Standard deviation divided by median absolute deviation, for a normal distribution."""


def derive_general(evidence: Evidence) -> dict[str, float]:
    """Metric -> finite value: the script's and the traces' own, size and memory, and the energy."""
    energy_j = evidence.result.energy_j
    metrics = read_reported(evidence) | measure_memory(evidence.result, evidence.card)
    return metrics | ({ENERGY.name: energy_j} if energy_j and 0 < energy_j < math.inf else {})


def read_reported(evidence: Evidence) -> dict[str, float]:
    """The finite metrics of script and traces, and the number of accelerators."""
    metrics: dict[str, float] = {}
    for reported in (evidence.result.metrics, evidence.trace.metrics if evidence.trace else {}):
        metrics |= {name: value for name, value in reported.items() if math.isfinite(value)}
    return {**metrics, NUM_ACCELERATORS: float(evidence.result.world_size or evidence.payload.num_ranks)}


def measure_memory(result: TrialResult, card: Card) -> dict[str, float]:
    """The peak memory, and the accelerator's headroom if it is the accelerator's memory."""
    if not result.peak_memory_bytes:
        return {}
    peak_gib = max(result.peak_memory_bytes) / GIB
    if result.memory_kind == MemoryKind.RSS:
        return {PEAK_MEMORY: peak_gib}
    return {PEAK_MEMORY: peak_gib, HEADROOM.name: 1.0 - peak_gib / card.hardware.memory_gib}


def relative_spread(values: Sequence[float]) -> float | None:
    """Median absolute deviation x 1.4826 / median; None with fewer than two values."""
    if len(values) < 2:
        return None
    median = float(np.median(values))
    return MAD_TO_SIGMA * float(np.median(np.abs(np.asarray(values) - median))) / median
