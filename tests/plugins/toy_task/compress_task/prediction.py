"""Throughput and latency in closed form; trials calibrate the multiplier of each part."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cclsearch.card.model import Card
from cclsearch.core.metrics import MetricInfo
from cclsearch.space.table import Space
from cclsearch.stats.calibration import Prior
from cclsearch.stats.closed_form import ClosedForm, Predictor
from cclsearch.stats.kernel import Array, KernelShape, read_features

S_PER_MB = 0.006
"""Seconds in which one core compresses a megabyte at level 1."""
DISPATCH_S = 3e-5
"""Seconds in which a chunk is handed to a worker and back."""
SWITCH_S = 5e-3
"""Seconds for which the interpreter runs one thread before it switches to another."""


def predict(card: Card, space: Space, throughput: MetricInfo, latency: MetricInfo) -> Predictor:
    """Seconds per MB, which is the reciprocal of the throughput, and seconds per chunk."""
    workers, chunk_kib, level = (space.column(knob).astype(float) for knob in ("workers", "chunk_kib", "level"))
    cores = np.minimum(workers, card.hardware.host_cores or 1)
    effort = S_PER_MB * level
    chunks_per_mb = 1e6 / 1024 / chunk_kib
    forms = (
        add_parts(throughput, {"compress": effort / cores, "dispatch": DISPATCH_S * chunks_per_mb}),
        add_parts(latency, {"chunk": effort / chunks_per_mb, "turns": SWITCH_S * (workers / cores - 1)}),
    )
    return Predictor(read_features(space), {form.metric.name: form for form in forms})


def add_parts(metric: MetricInfo, parts: Mapping[str, Array]) -> ClosedForm:
    """The closed form `sum of multiplier x part`: (N,) parts of the metric, or of its reciprocal if greater is better.

    A multiplier is 1, give or take a factor of 2, until trials calibrate it. The kernel describes what the parts miss.
    """
    parts_PN = np.stack(list(parts.values()))
    kernel = KernelShape(amplitude=0.3, length_scale_log2=1.5, slope=0.1, category_sd=0.2)
    return ClosedForm(
        metric,
        tuple(parts),
        Prior(np.zeros(len(parts)), np.full(len(parts), 0.7), kernel, noise=0.05, dof=4.0),
        log_cost=lambda rows: lambda theta: np.log(np.exp(theta) @ parts_PN[:, rows]),
        split=lambda theta_P: dict(zip(parts, np.exp(theta_P)[:, None] * parts_PN, strict=True)),
    )
