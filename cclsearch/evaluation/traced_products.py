"""The matrix products of a step in a trial's traces: their FLOPs, their precision, and the invisible part."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from cclsearch.card.hardware import PRECISION_BITS
from cclsearch.scoring.evidence import TracedProducts
from cclsearch.trace.events import EventTable, Kind, OpShape
from cclsearch.trace.flops import count_ops, find_flops
from cclsearch.trace.intervals import Int64s, subtract_spans, total_ns
from cclsearch.trace.metrics.efficiency import find_peak
from cclsearch.trace.names.kernels import ComputeClass
from cclsearch.trace.names.kinds import classify_precision
from cclsearch.trace.result import NotAvailable
from cclsearch.trace.view import RankView, TraceView

MAY_MULTIPLY = (
    ComputeClass.OTHER,
    ComputeClass.GEMM,
    ComputeClass.ATTENTION,
    ComputeClass.MOE,
    ComputeClass.CONVOLUTION,
)
"""Classes of kernels that may compute matrix products; elementwise, norm, reduction, optimizer and embedding do not."""
GENEROUS_RATE = 2.0
"""Largest ratio of the rate of kernels without shapes to those with shapes, if the device's peak is unknown."""
PRECISION_OF_DTYPE = {
    "double": "fp64", "float": "fp32", "float32": "fp32", "c10::half": "fp16", "half": "fp16",
    "c10::bfloat16": "bf16", "bfloat16": "bf16", "c10::float8_e4m3fn": "fp8", "c10::float8_e5m2": "fp8",
    "c10::float8_e4m3fnuz": "fp8", "c10::float8_e5m2fnuz": "fp8", "signed char": "int8", "char": "int8",
}  # fmt: skip
"""Data types as Kineto writes them, in lower case -> precision as cards name it."""

_VISIBLE = re.compile(r"^(aten|autograd|torch|c10d|_c10d_functional(_autograd)?|prim|profiler|comm|gloo|mpi|nccl)::")
_HIDING_ATEN = re.compile(r"^aten::(_?grouped_mm|_?mkldnn.*(linear|rnn)|quantized|_sparse_mm|_int_mm|_weight_int)")
_COMPILED = re.compile(r"^(Torch-Compiled Region|CompiledF|## Call CompiledFxGraph)")
_PRODUCTS = re.compile(r"^aten::(mm|addmm|bmm|baddbmm|_scaled_mm|_?scaled_dot_product)")
_TORCH_ATTENTION = re.compile(r"^aten::_?scaled_dot_product")
_BATCHED = re.compile(r"attention|^aten::(_?bmm|baddbmm)|flash_attn")


def read_products(trace: TraceView, precision: str) -> TracedProducts | None:
    """Return the matrix products of one step over all ranks; None if the trace has no whole steps.

    `precision` is the card's: at its peak, the kernels without shapes could have computed at most.
    """
    views = list(trace.ranks.values())
    if not views or not all(view.windows.are_steps and len(view.busy_M2) for view in views):
        return None
    ranks = [_read_rank(view) for view in views]

    def total(name: str) -> float:
        return float(sum(getattr(rank, name) or 0.0 for rank in ranks))

    seconds: Counter[str] = Counter()
    for rank in ranks:
        seconds.update(rank.seconds_by_precision)
    rate = _find_rate(trace, precision) or GENEROUS_RATE * total("flops") / (total("seen_s") or 1.0)
    return TracedProducts(
        **{name: total(name) for name in ("flops", "batched_flops", "seen_s", "hidden_s", "compute_s")},
        by_shapes=all(rank.by_shapes for rank in ranks),
        attention_batches=tuple(sorted({batch for rank in ranks for batch in rank.attention_batches})),
        attended_rows=total("attended_rows") or None,
        hidden_flops=total("hidden_s") * rate if rate else None,
        seconds_by_precision=dict(seconds),
    )


def _find_rate(trace: TraceView, precision: str) -> float | None:
    try:
        return find_peak(trace, precision).flops
    except NotAvailable:
        return None


def _read_rank(view: RankView) -> TracedProducts:
    """Return the products of one rank, per step."""
    table, steps = view.table, view.windows.num_steps
    compute = view.in_windows(view.compute_kernels)
    flops, rows = find_flops(view) or (0.0, compute[:0])
    ops, flops_of_op = count_ops(view)
    seen_M2 = view.merge_rows(rows)
    hidden_M2 = subtract_spans(view.merge_rows(_find_hidden(view, compute, rows)), seen_M2)
    batched = _named(table, ops, _BATCHED)
    return TracedProducts(
        flops=flops / steps,
        by_shapes=not table.op_costs,
        batched_flops=float(flops_of_op[batched].sum()) / steps,
        attended_rows=_count_attended(table, ops[batched]) / steps,
        attention_batches=_list_batches(table, ops[batched]),
        seen_s=total_ns(seen_M2) / 1e9 / steps,
        hidden_s=total_ns(hidden_M2) / 1e9 / steps,
        compute_s=total_ns(view.merge_rows(compute)) / 1e9 / steps,
        seconds_by_precision={name: s / steps for name, s in _find_precisions(view, rows, compute).items()},
    )


def _find_hidden(view: RankView, compute: Int64s, seen: Int64s) -> Int64s:
    """Return the rows that may compute matrix products of unknown shape.

    On a CPU every operator of PyTorch's dispatcher is a row of its own, so only operators of other libraries and
    compiled regions hide any. On accelerators the class of the kernel decides.
    """
    table = view.table
    if table.accelerator == "cpu" and table.format == "kineto":
        ops = view.in_windows(np.flatnonzero(table.kind == Kind.CPU_OP))
        hides = np.array([_may_hide(name) for name in table.names], bool)[table.name_id[ops]]
        return np.asarray(ops[hides | (_named(table, ops, _PRODUCTS) & (table.shape_id[ops] < 0))])
    may = np.isin(table.name_class[table.name_id[compute]], MAY_MULTIPLY)
    return np.setdiff1d(compute[may], seen)


def _may_hide(name: str) -> bool:
    if _COMPILED.search(name) or _HIDING_ATEN.search(name):
        return True
    return "::" in name and not _VISIBLE.search(name)


def _named(table: EventTable, rows: Int64s, pattern: re.Pattern[str]) -> npt.NDArray[np.bool_]:
    """Return the mask of the rows whose name has the pattern."""
    matches = np.array([bool(pattern.search(name)) for name in table.names], bool)
    return np.asarray(matches[table.name_id[rows]])


def _count_attended(table: EventTable, ops: Int64s) -> float:
    """Return sequences x heads x positions of the queries of the backward attention operators among these."""
    total = 0
    for op in ops.tolist():
        if "backward" in table.names[table.name_id[op]]:
            four = [dims for dims in table.shapes[table.shape_id[op]].dims if len(dims) == 4]
            total += int(np.prod(four[1][:3])) if len(four) > 1 else 0
    return float(total)


def _list_batches(table: EventTable, ops: Int64s) -> tuple[int, ...]:
    """Return the different batch sizes of PyTorch's attention among these, whose operands are (B, heads, S, width)."""
    rows = ops[_named(table, ops, _TORCH_ATTENTION)]
    dims = (table.shapes[number].dims[0] for number in np.unique(table.shape_id[rows]).tolist())
    return tuple(sorted({shape[0] for shape in dims if len(shape) == 4}))


def _find_precisions(view: RankView, seen: Int64s, compute: Int64s) -> Counter[str]:
    """Return precision -> seconds of matrix products, by the operands' types and by the kernels' names."""
    table = view.table
    if table.accelerator == "cpu":
        rows = seen if len(table.shapes) or table.op_costs else seen[:0]
        shapes = table.shape_id[rows]
    else:
        classes = table.name_class[table.name_id[compute]]
        rows = np.union1d(seen, compute[np.isin(classes, (ComputeClass.GEMM, ComputeClass.ATTENTION))])
        ops = table.op[rows]
        shapes = np.where(ops >= 0, table.shape_id[np.maximum(ops, 0)], -1)
    kinds, which = np.unique(np.stack([table.name_id[rows], shapes], axis=1), axis=0, return_inverse=True)
    seconds = np.bincount(which.ravel(), weights=table.dur_ns[rows] / 1e9, minlength=len(kinds))
    found: Counter[str] = Counter()
    for (name_id, shape_id), duration_s in zip(kinds.tolist(), seconds.tolist(), strict=True):
        shape = table.shapes[shape_id] if shape_id >= 0 else None
        if table.accelerator == "cpu":  # which computes in the type of the operands; other devices have TF32
            cost = table.op_costs.get(name_id)
            found[_find_precision("", shape) or (cost and cost.precision) or ""] += duration_s
        else:
            found[_find_precision(table.names[name_id], shape)] += duration_s
    found.pop("", None)
    return found


def _find_precision(kernel: str, shape: OpShape | None) -> str:
    """Return the narrower precision of a kernel's name and its operator's operands; "" if neither shows one."""
    stated = (_precision_of_name(kernel), _operand_precision(shape) if shape is not None else "")
    return min(filter(None, stated), key=lambda name: PRECISION_BITS.get(name, 99), default="")


@cache
def _precision_of_name(kernel: str) -> str:
    return classify_precision(kernel)


def _operand_precision(shape: OpShape) -> str:
    """Return the narrowest precision of the operands that are matrices."""
    matrices: Sequence[str] = [
        PRECISION_OF_DTYPE.get(dtype.lower(), "")
        for dims, dtype in zip(shape.dims, shape.dtypes, strict=False)
        if len(dims) >= 2
    ]
    return min(filter(None, matrices), key=lambda name: PRECISION_BITS[name], default="")
