"""FLOP of operators from recorded shapes, and of XLA operations from XLA's cost."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cclsearch.trace.events import Kind, OpShape
from cclsearch.trace.intervals import Int64s, outermost
from cclsearch.trace.names.kernels import ComputeClass
from cclsearch.trace.names.kinds import bytes_per_element
from cclsearch.trace.rules import read_table
from cclsearch.trace.view import RankView

Dims = Sequence[Sequence[int]]
_CLASSES_WITH_FORMULA = (ComputeClass.GEMM, ComputeClass.ATTENTION, ComputeClass.CONVOLUTION)

_PRECISIONS = {name: precision for precision, names in read_table("precisions.yaml")["types"].items() for name in names}

_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "_scaled_mm"})
_CONVOLUTIONS = {
    **dict.fromkeys(("convolution", "_convolution", "conv1d", "conv2d", "conv3d"), (3, 4, 5)),
    **dict.fromkeys(("miopen_convolution", "mkldnn_convolution"), (4, 3, 5)),
    "cudnn_convolution": (3, 2, 4),
}
"""Forward convolutions -> positions of stride, padding and dilation in the arguments."""
_CONVOLUTION_GRADIENTS = frozenset({"convolution_backward", "cudnn_convolution_backward_input"})


def count_op_flops(name: str, shape: OpShape) -> float | None:
    """Return the FLOP of one call of an operator (2 per multiply-add), or None if its shapes do not determine them.

    Follows torch.utils.flop_counter: a matrix product is 2 m n k, attention is its two products, its backward 2.5
    times the forward (five products), a convolution 2 x outputs x kernel volume x channels per group.
    """
    base = name.split("::")[-1]
    dims = shape.dims
    try:
        if base in _PRODUCTS:
            return _product_flops(base, dims)
        if "attention" in base:
            return _attention_flops(base, dims)
        if base in _CONVOLUTIONS:
            return _convolution_flops(shape, _CONVOLUTIONS[base])
        if base in _CONVOLUTION_GRADIENTS:
            return _convolution_backward_flops(base, dims)
    except (IndexError, ValueError, TypeError, ArithmeticError):
        return None
    return None


def _has_formula(name: str) -> bool:
    """Whether it is an operator of PyTorch whose FLOP follow from shapes."""
    library, _, base = name.rpartition("::")
    known = base in _PRODUCTS or base in _CONVOLUTIONS or base in _CONVOLUTION_GRADIENTS or "attention" in base
    return library == "aten" and known


def count_op_bytes(name: str, shape: OpShape) -> float | None:
    """Return the bytes of device memory that one call of an operator must move: its operands once, its result once.

    None if shapes or data types do not determine them. The same count as TraceLens' `bytes`.
    """
    size = next((size for dtype in shape.dtypes if (size := bytes_per_element(dtype))), None)
    flops = count_op_flops(name, shape)
    if size is None or not flops:
        return None
    base = name.split("::")[-1]
    dims = [d for d in shape.dims if d]
    try:
        if "attention" in base:
            query, key, value = [d for d in dims if len(d) == 4][:3]
            results = float(math.prod(query[:-1]) * value[-1])
            if "backward" in base:
                results = math.prod(query) + math.prod(key) + math.prod(value)
        elif "convolution" in base or base.startswith("conv"):
            weight = next(d for d in shape.dims[1:] if len(d) >= 3)
            results = flops / 2.0 / math.prod(weight[1:])
        else:
            inner = (shape.dims[1] if base in {"addmm", "baddbmm"} else shape.dims[0])[-1]
            results = flops / 2.0 / inner
    except (IndexError, ValueError, StopIteration, ArithmeticError):
        return None
    return float(size) * (sum(math.prod(d) for d in dims) + results)


def precision_of(shape: OpShape) -> str | None:
    """Return the key of `peak_flops` for an operator's data type (`bf16`, `fp32`, ...); None if it is unknown."""
    dtype = next((dtype for dtype in shape.dtypes if bytes_per_element(dtype)), "")
    name = dtype.rsplit("::", 1)[-1].replace("_", "").lower()
    return "fp8" if name.startswith(("float8", "f8e")) else _PRECISIONS.get(name)


def _product_flops(base: str, dims: Dims) -> float | None:
    a, b = (dims[1], dims[2]) if base in {"addmm", "baddbmm"} else (dims[0], dims[1])
    if not a or not b or len(b) < 2:
        return None
    columns = b[0] if base == "linear" else b[-1]
    return 2.0 * math.prod(a) * columns


def _attention_flops(base: str, dims: Dims) -> float | None:
    backward = "backward" in base
    shapes = [d for d in dims if len(d) == 4]
    query, key, value = shapes[1:4] if backward else shapes[:3]
    forward = 2.0 * math.prod(query[:2]) * query[2] * key[2] * (query[3] + value[3])
    if "flash_attention" in base and "scaled_dot_product" not in base:  # (batch, sequence, heads, width)
        forward = 2.0 * query[0] * query[2] * query[1] * key[1] * (query[3] + value[3])
    return forward * (2.5 if backward else 1.0)


def _convolution_flops(shape: OpShape, at: tuple[int, int, int]) -> float | None:
    given, weight = shape.dims[0], shape.dims[1]
    if len(weight) < 3 or len(given) != len(weight) or "True" in shape.scalars[6:7]:
        return None
    strides, paddings, dilations = (_numbers(shape.scalars, i, len(given) - 2) for i in at)
    out = [
        (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
        for size, kernel, stride, pad, dilation in zip(given[2:], weight[2:], strides, paddings, dilations, strict=True)
    ]
    return 2.0 * given[0] * weight[0] * math.prod(out) * math.prod(weight[1:])


def _convolution_backward_flops(base: str, dims: Dims) -> float | None:
    """Return the FLOP of the gradients of input and weight: each has as many multiply-adds as the forward."""
    gradient, weight = (dims[0], dims[2]) if base == "convolution_backward" else (dims[1], dims[2])
    if len(weight) < 3 or len(gradient) != len(weight):
        return None
    return (4.0 if base == "convolution_backward" else 2.0) * math.prod(gradient) * math.prod(weight[1:])


def _numbers(scalars: Sequence[str], at: int, count: int) -> list[int]:
    found = [int(part) for part in scalars[at].strip("[]() ").split(",")]
    return found * count if len(found) == 1 else found


def find_flops(view: RankView) -> tuple[float, Int64s] | None:
    """Return the FLOP in the rank's windows and the rows that did them; None without shapes or costs.

    On GPUs an operator counts once, however many kernels it launched; on CPU the operator is the row itself.
    """
    if view.table.op_costs:
        return _cost_flops(view)
    ops, flops = count_ops(view)
    if view.table.accelerator == "cpu":
        return (float(flops.sum()), ops) if len(ops) else None
    kernels = view.in_windows(view.compute_kernels)
    rows = kernels[np.isin(view.table.op[kernels], ops)]
    return (float(flops.sum()), rows) if len(rows) else None


def count_ops(view: RankView) -> tuple[Int64s, npt.NDArray[np.float64]]:
    """Return the operators in the rank's windows whose shapes determine their FLOP, and the FLOP of each."""
    table = view.table
    on_host = table.accelerator == "cpu" or not table.is_timed
    if on_host:
        ops = view.in_windows(np.flatnonzero((table.shape_id >= 0) & (table.kind == Kind.CPU_OP)))
    else:
        launched_by = table.op[view.in_windows(view.compute_kernels)]
        ops = np.unique(launched_by[launched_by >= 0])
    flops = _flops_of_rows(view, ops)
    ops, flops = ops[flops > 0], flops[flops > 0]
    if on_host:
        top = _outermost_of_threads(view, ops)
        ops, flops = ops[top], flops[top]
    return ops, flops


def count_undetermined(view: RankView, ops: Int64s) -> int:
    """Count the work with FLOP of a known formula outside `ops`, the operators whose FLOP is known.

    On a GPU, kernels in the windows of matrix products, attention and convolutions that no such operator launched; on
    the host, operators of these kinds that neither contain one of `ops` nor are inside one.
    """
    table = view.table
    if table.accelerator != "cpu" and table.is_timed:
        kernels = view.in_windows(view.compute_kernels)
        kernels = kernels[np.isin(table.name_class[table.name_id[kernels]], _CLASSES_WITH_FORMULA)]
        return int((~np.isin(table.op[kernels], ops)).sum())
    has_formula = np.array([_has_formula(name) for name in table.names] or [False])
    rows = view.in_windows(view.rows(Kind.CPU_OP))
    rows = rows[has_formula[table.name_id[rows]]]
    count = 0
    for thread in np.unique(table.stream[rows]):
        here, known = rows[table.stream[rows] == thread], ops[table.stream[ops] == thread]
        known = known[np.argsort(table.ts_ns[known], kind="stable")]
        at = np.searchsorted(table.ts_ns[known], table.end_ns[here], side="left") - 1
        overlaps = (
            (at >= 0) & (table.end_ns[known][at] > table.ts_ns[here]) if len(known) else np.zeros(len(here), bool)
        )
        free = here[~overlaps]
        count += int(outermost(table.ts_ns[free], table.end_ns[free]).sum()) if len(free) else 0
    return count


def _flops_of_rows(view: RankView, ops: Int64s) -> npt.NDArray[np.float64]:
    """Return the FLOP of each of these operators; 0 if unknown."""
    table = view.table
    pairs = np.stack([table.name_id[ops], table.shape_id[ops]], axis=1)
    distinct, which = np.unique(pairs, axis=0, return_inverse=True)
    per_pair = [
        (count_op_flops(table.names[name_id], table.shapes[shape_id]) or 0.0) if shape_id >= 0 else 0.0
        for name_id, shape_id in distinct.tolist()
    ]
    return np.array(per_pair, dtype=float)[which.ravel()] if len(ops) else np.zeros(0)


def _outermost_of_threads(view: RankView, ops: Int64s) -> npt.NDArray[np.bool_]:
    """Return the mask of operators that no other operator encloses, so that nested calls do not count twice."""
    table = view.table
    top = np.ones(len(ops), dtype=bool)
    for thread in np.unique(table.stream[ops]):
        here = table.stream[ops] == thread
        start_ns = table.ts_ns[ops[here]]
        top[here] = outermost(start_ns, start_ns + table.dur_ns[ops[here]])
    return top


def _cost_flops(view: RankView) -> tuple[float, Int64s] | None:
    table = view.table
    per_name = np.zeros(len(table.names))
    for name_id, cost in table.op_costs.items():
        if cost.flops and cost.flops > 0:
            per_name[name_id] = cost.flops
    rows = view.in_windows(view.compute_kernels)
    rows = rows[per_name[table.name_id[rows]] > 0]
    total = float(per_name[table.name_id[rows]].sum())
    return (total, rows) if total else None
