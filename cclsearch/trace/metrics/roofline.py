"""The roofline: the shares of compute time that memory and arithmetic bound.

An operation is bound by memory if its FLOP per byte of device memory are fewer than the ridge, peak FLOP/s over memory
bandwidth (Williams, Waterman and Patterson 2009, "Roofline"). FLOP and bytes come from recorded shapes (each operand
read once, the result written once) or from XLA's cost. Kernels without shapes of classes that touch each element a few
times (norms, elementwise, reductions, ...) are below the ridge of every accelerator: their name decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from pydantic import JsonValue

from cclsearch.core.text import one_line
from cclsearch.trace.events import Reason
from cclsearch.trace.flops import count_op_bytes, count_op_flops, precision_of
from cclsearch.trace.metric import Draft, NotAvailable, metric
from cclsearch.trace.metrics.efficiency import Peak, find_peak
from cclsearch.trace.names.kernels import ComputeClass
from cclsearch.trace.view import RankView, TraceView, require_windows

NO_COSTS = "no operator records its shapes (record_shapes=True) or its FLOP and bytes"
MIN_COVERAGE = 0.95
NUM_SHOWN = 30
# A few operations on each element that is read.
MAX_INTENSITY_OF_CLASSES = 10.0
"""FLOP per byte that no kernel of `MEMORY_CLASSES` exceeds."""
MEMORY_CLASSES = (
    *(ComputeClass.NORM, ComputeClass.ELEMENTWISE, ComputeClass.REDUCTION, ComputeClass.OPTIMIZER),
    *(ComputeClass.EMBEDDING, ComputeClass.ROPE, ComputeClass.QUANTIZATION, ComputeClass.SAMPLING),
)


@dataclass
class OperationCost:
    """One operator with one set of shapes, or one XLA operation, over all its runs."""

    name: str
    shape: str
    precision: str
    flops: float
    bytes_: float
    """FLOP and bytes of one run."""
    num_runs: int = 0
    seconds: float = 0.0


@dataclass
class Bounds:
    """Seconds of compute by their bound, summed over ranks."""

    compute_s: float = 0.0
    memory_s: float = 0.0
    by_class_s: float = 0.0
    """Part of `memory_s` that is bound according to the class of the kernel alone."""
    total_s: float = 0.0
    operations: list[OperationCost] = field(default_factory=list)
    peaks: dict[str, Peak] = field(default_factory=dict)

    @property
    def coverage(self) -> float:
        """Share of compute time whose bound is known."""
        return (self.compute_s + self.memory_s) / self.total_s if self.total_s else 0.0


def find_bounds(trace: TraceView) -> Bounds:
    """Return the bounds of all compute in the windows; raises NotAvailable if no operation's cost is known."""
    bounds = Bounds()
    why = NotAvailable(Reason.NO_SHAPES, NO_COSTS)
    for view in trace.ranks.values():
        require_windows(view)
        rows = view.in_windows(view.compute_kernels)
        seconds = view.table.dur_ns[rows] / 1e9
        bounds.total_s += float(seconds.sum())
        known = np.zeros(len(rows), bool)
        costs, of_row = _costs_of_rows(view, rows)
        for number, cost in enumerate(costs):
            mine = of_row == number
            cost.seconds = float(seconds[mine].sum())
            try:
                peak = bounds.peaks.get(cost.precision) or find_peak(trace, cost.precision)
            except NotAvailable as missing:
                why = missing
                continue
            if not peak.memory_bytes_per_s:
                continue
            bounds.peaks[cost.precision] = peak
            known |= mine
            bounds.operations.append(cost)
            if cost.flops / cost.bytes_ < peak.flops / peak.memory_bytes_per_s:
                bounds.memory_s += cost.seconds
            else:
                bounds.compute_s += cost.seconds
        by_class = np.isin(view.table.name_class[view.table.name_id[rows]], [int(c) for c in MEMORY_CLASSES]) & ~known
        bounds.by_class_s += float(seconds[by_class].sum())
    if not bounds.peaks:
        device = find_peak(trace, "bf16") if why.reason is Reason.NO_SHAPES else None
        if device is None or not device.memory_bytes_per_s or not bounds.by_class_s:
            raise why
        bounds.peaks["bf16"] = device
    ridges = [peak.flops / peak.memory_bytes_per_s for peak in bounds.peaks.values() if peak.memory_bytes_per_s]
    if min(ridges) <= MAX_INTENSITY_OF_CLASSES:
        bounds.by_class_s = 0.0  # on such a device the class of a kernel does not say what bounds it
    bounds.memory_s += bounds.by_class_s
    return bounds


def _costs_of_rows(view: RankView, rows: np.ndarray) -> tuple[list[OperationCost], np.ndarray]:  # type: ignore[type-arg]
    """Return the distinct operations of known cost, and for each row its index among them (-1: unknown)."""
    table = view.table
    ops = table.op[rows]
    named = np.where(ops >= 0, table.name_id[ops], table.name_id[rows]).astype(np.int64)
    shaped = np.where(ops >= 0, table.shape_id[ops], -1).astype(np.int64)
    distinct, which = np.unique(np.stack([named, shaped], axis=1), axis=0, return_inverse=True)
    costs: list[OperationCost] = []
    number_of = np.full(len(distinct), -1)
    for index, (name_id, shape_id) in enumerate(distinct.tolist()):
        cost = _cost_of(view, (name_id, shape_id))
        if cost is not None:
            number_of[index] = len(costs)
            costs.append(cost)
    of_row = number_of[which.ravel()] if len(rows) else np.full(0, -1)
    runs = np.unique(np.stack([of_row, np.where(ops >= 0, ops, -1 - np.arange(len(ops)))], axis=1), axis=0)
    for number, count in zip(*np.unique(runs[:, 0], return_counts=True), strict=True):
        if number >= 0:
            costs[number].num_runs = int(count)
    return costs, of_row


def _cost_of(view: RankView, key: tuple[int, int]) -> OperationCost | None:
    table, (name_id, shape_id) = view.table, key
    name = one_line(table.names[name_id], 80)
    if shape_id < 0:
        cost = table.op_costs.get(name_id)
        if cost is None or not cost.flops or not cost.bytes_accessed:
            return None
        return OperationCost(name, "", cost.precision or "bf16", cost.flops, cost.bytes_accessed)
    shape = table.shapes[shape_id]
    flops, bytes_, precision = count_op_flops(name, shape), count_op_bytes(name, shape), precision_of(shape)
    if not flops or not bytes_ or precision is None:
        return None
    described = " ".join("x".join(map(str, dims)) for dims in shape.dims if dims) or "()"
    return OperationCost(name, described, precision, flops, bytes_)


def _inputs(bounds: Bounds) -> dict[str, JsonValue]:
    merged: dict[tuple[str, str], OperationCost] = {}
    for cost in bounds.operations:
        seen = merged.setdefault((cost.name, cost.shape), cost)
        if seen is not cost:
            seen.seconds, seen.num_runs = seen.seconds + cost.seconds, seen.num_runs + cost.num_runs
    shown = sorted(merged.values(), key=lambda cost: -cost.seconds)[:NUM_SHOWN]
    ridges: dict[str, JsonValue] = {
        name: peak.flops / peak.memory_bytes_per_s for name, peak in bounds.peaks.items() if peak.memory_bytes_per_s
    }
    return {
        "coverage": bounds.coverage,
        "by_class_of_kernel": bounds.by_class_s / bounds.total_s if bounds.total_s else 0.0,
        "compute_bound_s": bounds.compute_s,
        "memory_bound_s": bounds.memory_s,
        "ridge_flop_per_byte": ridges,
        "device": next(iter(bounds.peaks.values())).device,
        "operations": [_describe_cost(cost, bounds.peaks[cost.precision]) for cost in shown],
    }


def _describe_cost(cost: OperationCost, peak: Peak) -> JsonValue:
    intensity, memory = cost.flops / cost.bytes_, peak.memory_bytes_per_s or 1.0
    rate = cost.flops * cost.num_runs / cost.seconds if cost.seconds else None
    roof = min(peak.flops, intensity * memory)
    return {
        "name": cost.name,
        "shape": cost.shape,
        "dtype": cost.precision,
        "num_runs": cost.num_runs,
        "seconds": cost.seconds,
        "flop_per_byte": intensity,
        "bound": "compute" if intensity >= peak.flops / memory else "memory",
        "tflops": None if rate is None else rate / 1e12,
        "gb_per_s": None if rate is None else rate / intensity / 1e9,
        "share_of_roof": None if rate is None else rate / roof,
    }


def _draft(trace: TraceView, bounds: Bounds, seconds: float) -> Draft:
    if not bounds.total_s:
        raise NotAvailable(Reason.NO_GPU_EVENTS, "all kernels have duration 0")
    full, by_class = bounds.coverage >= MIN_COVERAGE, bounds.by_class_s / bounds.total_s
    left_out = "" if full else f"a lower bound: {bounds.coverage:.0%} of compute time has a known bound"
    assumed = f"for {by_class:.0%} of compute time the kernel's class decides, not shapes" if by_class else ""
    return Draft(
        seconds / bounds.total_s,
        n_ranks=len(trace.ranks),
        reason=None if full else Reason.NO_SHAPES,
        detail="; ".join(filter(None, (left_out, assumed))),
        inputs=_inputs(bounds),
    )


@metric("memory_bound_frac", unit="fraction", over="trace")
def measure_memory_bound_frac(trace: TraceView) -> Draft:
    """Share of compute time in operations below the ridge of the roofline. `inputs` has the coverage, the ridge, and
    FLOP/s, GB/s and bound by operator and shape."""
    bounds = find_bounds(trace)
    return _draft(trace, bounds, bounds.memory_s)


@metric("compute_bound_frac", unit="fraction", over="trace")
def measure_compute_bound_frac(trace: TraceView) -> Draft:
    """Share of compute time in operations above the ridge of the roofline; see memory_bound_frac."""
    bounds = find_bounds(trace)
    if not bounds.operations:
        raise NotAvailable(Reason.NO_SHAPES, NO_COSTS)
    return _draft(trace, bounds, bounds.compute_s)
