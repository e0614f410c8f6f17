"""Metrics and the diagnosis of the traces of one run."""

from __future__ import annotations

from collections.abc import Iterable

from cclsearch.core.metrics import METRICS
from cclsearch.core.values import Model
from cclsearch.trace.diagnosis.diagnose import Diagnosis, diagnose_trace
from cclsearch.trace.events import Reason
from cclsearch.trace.metric import MetricResult, NotAvailable, Status
from cclsearch.trace.view import TraceView, call_both


class TraceScore(Model):
    """The metrics, the diagnosis and the status of the traces of one run."""

    metrics: dict[str, MetricResult]
    """Metric name -> result; has every requested metric, available or not."""
    diagnosis: Diagnosis | None = None
    """None if no rank has device events."""
    status: Status
    """Status of the trace as a whole: `partial` if a rank is missing or truncated."""
    reason: Reason | None = None
    message: str = ""
    """One line on the problem of the trace; empty if it has none."""
    ranks: tuple[int, ...] = ()
    world_size: int | None = None

    def value(self, name: str) -> float | None:
        """Return the value of an `ok` metric; None for others: an objective must not use a partial value."""
        result = self.metrics.get(name)
        return result.value if result is not None and result.status is Status.OK else None


def score_view(trace: TraceView, names: Iterable[str] | None = None) -> TraceScore:
    """Return the results of the named metrics (default: all) and the diagnosis; raises UserError for an unknown name.

    No content of a trace raises: a metric that cannot be computed is `not_available` with its reason.
    """
    wanted = list(METRICS.names() if names is None else names)
    found = [METRICS.get(name) for name in wanted]
    trace_set = trace.trace_set
    metrics, diagnosis = call_both(
        trace.threads,
        lambda: {name: metric(trace) for name, metric in zip(wanted, found, strict=True)},
        lambda: try_diagnose(trace),
    )
    return TraceScore(
        metrics=metrics,
        diagnosis=diagnosis,
        status=Status(trace_set.status),
        reason=trace_set.reason,
        message=trace_set.message,
        ranks=trace_set.ranks,
        world_size=trace_set.world_size,
    )


def try_diagnose(trace: TraceView) -> Diagnosis | None:
    """Return the diagnosis; None if there are no device events."""
    try:
        return diagnose_trace(trace)
    except NotAvailable:
        return None
