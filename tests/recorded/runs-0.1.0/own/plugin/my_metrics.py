"""Metrics of one's own, as docs/your-metric.md of version 0.1.0 has them."""

from cclsearch.trace.metric import Draft, NotAvailable, metric
from cclsearch.trace.metrics.communication import require_matching


@metric("longest_kernel", unit="s", summary="longest compute kernel", combine="max", better="lower")
def measure_longest_kernel(rank):
    kernels = rank.compute_kernels  # row numbers of what computes, by start
    if not len(kernels):
        raise NotAvailable("no_gpu_events")  # an answer, not a fault
    return rank.table.dur_ns[kernels].max() / 1e9


@metric("slowest_group", unit="s", over="trace", summary="transfer time of the slowest process group")
def measure_slowest_group(trace):
    groups = require_matching(trace).groups  # raises NotAvailable with the reason where nothing matches
    seconds = {" ".join(g.key): g.transfer_ns_K.sum() / 1e9 for g in groups}
    return Draft(value=max(seconds.values()), inputs=seconds)
