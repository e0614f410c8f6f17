"""Operators of the host by count and by FLOP; a trace without times has these too."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from pydantic import JsonValue

from cclsearch.core.text import one_line
from cclsearch.trace.events import Kind, Reason
from cclsearch.trace.flops import count_ops, count_undetermined
from cclsearch.trace.intervals import Int64s
from cclsearch.trace.metric import Draft, NotAvailable, metric
from cclsearch.trace.result import mean_over_ranks
from cclsearch.trace.view import RankView, TraceView

MAX_NAMES = 100
"""Operators named in `inputs`, the most frequent first."""


def _rows_in_steps(view: RankView, rows: Int64s) -> Int64s:
    """Return the rows of the host that start inside the markers of the steps in use; all of them without steps."""
    windows = view.windows
    return rows[np.isin(view.table.step_id[rows], windows.step_index_W)] if windows.are_steps else rows


def _largest(counts: dict[str, float], per: float) -> dict[str, JsonValue]:
    largest = sorted(counts, key=lambda name: -counts[name])[:MAX_NAMES]
    return {one_line(name, 100): counts[name] / per for name in largest}


@metric("op_calls", unit="calls/step", over="trace", needs_times=False)
def measure_op_calls(trace: TraceView) -> Draft:
    """Operators that the host calls per step, those inside others included, mean over ranks. `inputs` has them by name,
    and the Triton kernels that an execution trace records."""
    calls: dict[int, float | None] = {}
    by_name: dict[str, float] = defaultdict(float)
    kernels: dict[str, float] = defaultdict(float)
    for rank, view in trace.ranks.items():
        table, steps = view.table, max(view.windows.num_steps, 1)
        rows = _rows_in_steps(view, view.rows(Kind.CPU_OP))
        calls[rank] = len(rows) / steps
        of_rank = [(by_name, rows)]
        if not table.is_timed:
            of_rank.append((kernels, _rows_in_steps(view, view.compute_kernels)))
        for counts, counted in of_rank:
            for name, count in enumerate(np.bincount(table.name_id[counted], minlength=1).tolist()):
                if count:
                    counts[table.names[name]] += count / steps
    if not by_name and not kernels:
        raise NotAvailable(Reason.NO_LAUNCH_RECORDS, "no operator of the host was recorded")
    inputs: dict[str, JsonValue] = {"by_name": _largest(by_name, len(calls)), "num_names": len(by_name)}
    if kernels:
        inputs["triton_kernels"] = _largest(kernels, len(calls))
    return mean_over_ranks(calls, inputs)


@metric("op_flops", unit="FLOP/step", over="trace", needs_times=False)
def measure_op_flops(trace: TraceView) -> Draft:
    """FLOP per step of matrix products, attention and convolutions, from their shapes, mean over ranks. An operator
    inside another counts once; `inputs` has them by operator, and the calls whose shapes do not determine them."""
    flops: dict[int, float | None] = {}
    by_name: dict[str, float] = defaultdict(float)
    unknown = known = 0
    for rank, view in trace.ranks.items():
        table, steps = view.table, max(view.windows.num_steps, 1)
        ops, of_op = count_ops(view)
        flops[rank] = float(of_op.sum()) / steps if len(ops) else None
        known += len(ops)
        unknown += count_undetermined(view, ops)
        for name, total in enumerate(np.bincount(table.name_id[ops], weights=of_op, minlength=1).tolist()):
            if total:
                by_name[table.names[name]] += total / steps
    missing = NotAvailable(Reason.NO_SHAPES, "no matrix product, attention or convolution records its shapes")
    inputs: dict[str, JsonValue] = {
        "by_operator": _largest(by_name, sum(value is not None for value in flops.values())),
        "num_calls": known,
        "num_calls_without_flops": unknown,
    }
    reason = Reason.NO_SHAPES if unknown else None
    detail = f"a lower bound: the shapes of {unknown} of {unknown + known} calls do not determine it" if unknown else ""
    return mean_over_ranks(flops, inputs, reason=reason, detail=detail, missing=missing)
