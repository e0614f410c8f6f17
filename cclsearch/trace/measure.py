"""Runs a metric over a trace and fills in the result contract."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from cclsearch.core.text import one_line
from cclsearch.trace.events import Reason, TraceSet
from cclsearch.trace.metric import Draft, Metric, MetricResult, NotAvailable, Status
from cclsearch.trace.view import TraceView

_COMBINE: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "max": max,
    "min": min,
    "sum": math.fsum,
    "median": statistics.median,
}
_TRACE_FAULTS = (Reason.TRACE_TRUNCATED, Reason.RANKS_MISSING)
"""What is wrong with a trace as a whole that makes every value of it partial."""


def measure_metric(metric: Metric, trace: TraceView) -> MetricResult:
    """The metric's result over the trace; whatever it raises becomes `not_available` with a reason."""
    if not trace.ranks:
        return _refuse(metric, trace, trace.trace_set.reason or Reason.NO_TRACE_FILES, trace.trace_set.message)
    uses = {rank: view.window_uses for rank, view in trace.ranks.items()}
    try:
        draft = metric.function(trace) if metric.over == "trace" else _measure_ranks(metric, trace)
        windowed = [view.windows.reason for rank, view in trace.ranks.items() if view.window_uses > uses[rank]]
        return _finish(metric, trace, draft, next(filter(None, windowed), None))
    except NotAvailable as answer:
        return _refuse(metric, trace, answer.reason, answer.detail)
    except Exception as error:  # a metric may be foreign code, and every trace is foreign data
        return _refuse(
            metric, trace, Reason.FORMAT_UNSUPPORTED, one_line(f"the metric raised {type(error).__name__}: {error}")
        )


def _measure_ranks(metric: Metric, trace: TraceView) -> Draft:
    values: dict[int, float | None] = {}
    refusals: list[NotAvailable] = []
    for rank, view in trace.ranks.items():
        try:
            values[rank] = float(metric.function(view))
        except NotAvailable as answer:
            values[rank] = None
            refusals.append(answer)
    found = [value for value in values.values() if value is not None]
    if not found:
        raise refusals[0]
    steps = [trace.ranks[rank].windows for rank, value in values.items() if value is not None]
    return Draft(
        value=_COMBINE[metric.combine](found),
        per_rank=values,
        n_steps=min((w.num_steps for w in steps), default=0),
        reason=refusals[0].reason if refusals else None,
        detail=refusals[0].detail if refusals else "",
    )


_WINDOW_DETAILS = {
    Reason.NO_STEP_MARKERS: "no step markers: over the whole file",
    Reason.TOO_FEW_STEPS: "one step only",
}


def _finish(metric: Metric, trace: TraceView, draft: Draft, windows: Reason | None) -> MetricResult:
    """The result; `windows` is what is wrong with the windows that the metric looked at."""
    if not isinstance(draft, Draft):
        raise TypeError(f"the metric {metric.name!r} over a trace must return a Draft, not {type(draft).__name__}")
    value = float(draft.value)
    if not math.isfinite(value):
        raise NotAvailable(Reason.FORMAT_UNSUPPORTED, f"the metric came out as {value}")
    reason, detail = draft.reason, draft.detail
    if reason is None and windows is not None and draft.needs_steps:
        reason, detail = windows, "; ".join(filter(None, (detail, _WINDOW_DETAILS.get(windows, ""))))
    if reason is None and (fault := find_trace_fault(trace.trace_set)):
        reason, detail = fault, detail or trace.trace_set.message
    if reason is None and trace.silent_ranks:
        silent = ", ".join(map(str, trace.silent_ranks))
        reason, detail = Reason.RANKS_MISSING, detail or f"no device event of rank {silent}"
    per_rank = {
        int(rank): None if v is None or not math.isfinite(float(v)) else float(v) for rank, v in draft.per_rank.items()
    }
    counted = sum(v is not None for v in per_rank.values()) or len(trace.ranks)
    return MetricResult(
        name=metric.name,
        value=value,
        unit=metric.unit,
        per_rank=per_rank,
        per_step=tuple(float(v) for v in draft.per_step),
        n_ranks=counted if draft.n_ranks is None else draft.n_ranks,
        world_size=trace.world_size,
        n_steps=draft.n_steps,
        status=Status.PARTIAL if reason else Status.OK,
        reason=reason,
        detail=detail,
        inputs=draft.inputs,
    )


def find_trace_fault(trace_set: TraceSet) -> Reason | None:
    """What is wrong with the trace as a whole, where it makes every value of it partial."""
    reasons = [*trace_set.reasons, *(r for table in trace_set.tables.values() for r in table.reasons)]
    return next((reason for reason in _TRACE_FAULTS if reason in reasons), None)


def _refuse(metric: Metric, trace: TraceView, reason: Reason, detail: str) -> MetricResult:
    return MetricResult(
        name=metric.name,
        value=None,
        unit=metric.unit,
        n_ranks=0,
        world_size=trace.world_size,
        status=Status.NOT_AVAILABLE,
        reason=reason,
        detail=one_line(detail, 300),
    )
