"""How much the times of a rank's compute kernels vary."""

from __future__ import annotations

from typing import Any

from cclsearch.trace.metric import NotAvailable, metric


@metric("kernel_jitter", unit="fraction", combine="max", better="lower")
def measure_kernel_jitter(rank: Any) -> float:
    """Standard deviation of the time of a compute kernel over its mean, on the rank where it is greatest."""
    kernels = rank.compute_kernels
    if not len(kernels):
        raise NotAvailable("no_gpu_events")
    times_ns = rank.table.dur_ns[kernels]
    return float(times_ns.std() / times_ns.mean())
