"""Metrics: how to register one, and how it is run over a trace.

A metric is a function, registered by name. One that looks at a single rank gets a `RankView` and returns a number:

    from cclsearch.trace.metric import NotAvailable, metric

    @metric("longest_kernel", unit="s", summary="longest compute kernel", combine="max")
    def measure_longest_kernel(rank):
        kernels = rank.compute_kernels
        if not len(kernels):
            raise NotAvailable("no_gpu_events")
        return rank.table.dur_ns[kernels].max() / 1e9

One that needs all ranks (`over="trace"`) gets a `TraceView` and returns a `Draft`. A package adds its metrics by
naming the module under the entry-point group `cclsearch`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from cclsearch.core.metrics import METRICS
from cclsearch.core.text import one_line
from cclsearch.trace.events import Reason
from cclsearch.trace.result import Draft, MetricResult, NotAvailable, Status
from cclsearch.trace.view import NO_TIMES, TraceView
from cclsearch.trace.windows import NO_STEPS, Windows, first_reason

__all__ = ["Better", "Combine", "Draft", "Metric", "MetricResult", "NotAvailable", "Status", "metric"]

Combine = Literal["mean", "max", "min", "sum", "median"]
Better = Literal["lower", "higher"]

_COMBINE: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "max": max,
    "min": min,
    "sum": math.fsum,
    "median": statistics.median,
}
_TRACE_PROBLEMS = (
    *(Reason.IMPOSSIBLE_TIMES, Reason.MISSING_KERNELS, Reason.NO_GPU_EVENTS),
    *(Reason.TRACE_TRUNCATED, Reason.RANKS_MISSING),
)
"""Problems of a trace as a whole: each makes every value partial."""
_FROM_STARTS = ("trace_step_time", "tokens_per_s", "tokens_per_s_per_device", "mfu", "mfu_causal", "peak_memory")
"""Metrics that rest on no duration of a kernel."""
_WINDOW_DETAILS = {
    **{reason: f"{words}: over the whole file" for reason, words in NO_STEPS.items()},
    Reason.TOO_FEW_STEPS: "one step only",
}


@dataclass(frozen=True)
class Metric:
    """One registered metric."""

    name: str
    unit: str
    summary: str
    """One line for `ccl-search score --list`: as given, else the first sentence of the function's docstring."""
    over: Literal["rank", "trace"]
    combine: Combine
    function: Callable[[Any], Any]
    better: Better | None = None
    """Better direction; None if that depends on the goal, or if the metric describes only the trace."""
    needs_times: bool = True
    """False: the metric counts, so that it also covers execution traces, which have no times."""

    def __call__(self, trace: TraceView) -> MetricResult:
        """Return the result over a trace; an exception of the metric becomes `not_available` with a reason."""
        if not trace.ranks:
            return _not_available(self, trace, trace.trace_set.reason or Reason.NO_TRACE_FILES, trace.trace_set.message)
        if self.needs_times and not trace.is_timed:
            return _not_available(self, trace, Reason.NO_TIMES, NO_TIMES)
        uses = {rank: view.window_uses for rank, view in trace.ranks.items()}
        try:
            draft = self.function(trace) if self.over == "trace" else _measure_ranks(self, trace)
            windows = [view.windows for rank, view in trace.ranks.items() if view.window_uses > uses[rank]]
            return _complete(self, trace, draft, windows)
        except NotAvailable as answer:
            return _not_available(self, trace, answer.reason, answer.detail)
        except Exception as error:  # a metric may come from a plugin, and a trace from any profiler
            message = one_line(f"the metric raised {type(error).__name__}: {error}")
            return _not_available(self, trace, Reason.FORMAT_UNSUPPORTED, message)


F = TypeVar("F", bound=Callable[..., Any])


def metric(
    name: str,
    *,
    unit: str,
    summary: str = "",
    over: Literal["rank", "trace"] = "rank",
    combine: Combine = "mean",
    better: Better | None = None,
    needs_times: bool = True,
) -> Callable[[F], F]:
    """Return a decorator that registers a function as the metric `name`; the function itself stays callable."""

    def register(function: F) -> F:
        METRICS.register(name)(
            Metric(name, unit, summary or _first_sentence(function), over, combine, function, better, needs_times)
        )
        return function

    return register


def _first_sentence(function: Callable[..., Any]) -> str:
    """Return the docstring's first sentence without its capital letter (unless an acronym has it) and full stop."""
    text = " ".join((function.__doc__ or "").split()).split(". ")[0].removesuffix(".")
    return text if text[:2].isupper() else text[:1].lower() + text[1:]


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
        detail="; ".join(dict.fromkeys(answer.detail for answer in refusals if answer.detail)),
    )


def _complete(metric: Metric, trace: TraceView, draft: Draft, windows: Sequence[Windows]) -> MetricResult:
    """Return the result; `windows`: those that the metric used."""
    if not isinstance(draft, Draft):
        raise TypeError(f"the metric {metric.name!r} over a trace must return a Draft, not {type(draft).__name__}")
    value = float(draft.value)
    if not math.isfinite(value):
        raise NotAvailable(Reason.FORMAT_UNSUPPORTED, f"the metric returned {value}")
    windows = windows if draft.needs_steps else ()
    problems = list(_find_problems(trace, draft, first_reason(windows), metric.name))
    reason = next((problem for problem, _ in problems), None)
    detail = "; ".join(dict.fromkeys(text for text in (draft.detail, *(text for _, text in problems)) if text))
    per_rank = {
        int(rank): None if v is None or not math.isfinite(float(v)) else float(v) for rank, v in draft.per_rank.items()
    }
    has_steps = any(view.windows.are_steps for view in trace.ranks.values())
    counted = sum(v is not None for v in per_rank.values()) or len(trace.ranks)
    return MetricResult(
        name=metric.name,
        value=value,
        unit=metric.unit if has_steps else metric.unit.removesuffix("/step"),
        per_rank=per_rank,
        per_step=tuple(float(v) for v in draft.per_step),
        n_ranks=counted if draft.n_ranks is None else draft.n_ranks,
        world_size=trace.world_size,
        n_steps=(trace.num_steps if windows else 0) if draft.n_steps is None else draft.n_steps,
        status=Status.PARTIAL if reason else Status.OK,
        reason=reason,
        detail=detail,
        inputs=dict(draft.inputs),
    )


def _find_problems(trace: TraceView, draft: Draft, windows: Reason | None, name: str) -> Iterator[tuple[Reason, str]]:
    """Yield every reason for which a value is partial, with its sentence; the first is the result's reason."""
    for reason in dict.fromkeys(filter(None, (draft.reason, windows))):
        is_of_steps = reason is not Reason.NO_LAUNCH_RECORDS or reason is windows
        said = _WINDOW_DETAILS.get(reason, "") if is_of_steps else ""
        is_said = (bool(said) and said.split(":")[0] in draft.detail) or "over the whole file" in draft.detail
        yield reason, "" if is_said else said
    of_trace = {*trace.trace_set.reasons, *(r for table in trace.trace_set.tables.values() for r in table.reasons)}
    of_trace -= {Reason.IMPOSSIBLE_TIMES} if name in _FROM_STARTS else set()
    if problem := next((reason for reason in _TRACE_PROBLEMS if reason in of_trace), None):
        yield problem, trace.trace_set.message
    if trace.excluded_ranks:
        yield Reason.RANKS_MISSING, f"no device event of rank {', '.join(map(str, trace.excluded_ranks))}"


def _not_available(metric: Metric, trace: TraceView, reason: Reason, detail: str) -> MetricResult:
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
