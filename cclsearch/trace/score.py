"""Every metric over the traces of one run, and the diagnosis made from them."""

from __future__ import annotations

from collections.abc import Iterable

from cclsearch.card.model import Card
from cclsearch.core.values import Config, Model
from cclsearch.plugins import METRICS
from cclsearch.trace.diagnosis.diagnose import Diagnosis, diagnose_trace
from cclsearch.trace.events import Reason, TraceSet
from cclsearch.trace.metric import MetricResult, NotAvailable, Status
from cclsearch.trace.view import TraceView


class TraceScore(Model):
    """What the traces of one run say."""

    metrics: dict[str, MetricResult]
    """Metric name -> result; every metric asked for is there, available or not."""
    diagnosis: Diagnosis | None = None
    """None where no rank has any device event."""
    status: Status
    """Of the trace as a whole: `partial` where a rank is missing or cut."""
    reason: Reason | None = None
    message: str = ""
    """One line on what is wrong with the trace; empty where nothing is."""
    ranks: tuple[int, ...] = ()
    world_size: int | None = None

    def value(self, name: str) -> float | None:
        """The value of a metric that is whole; None where it is partial or not available: a score must not use it."""
        result = self.metrics.get(name)
        return result.value if result is not None and result.status is Status.OK else None


def score_traces(
    trace_set: TraceSet,
    *,
    card: Card | None = None,
    config: Config | None = None,
    names: Iterable[str] | None = None,
    baseline: TraceSet | None = None,
    baseline_card: Card | None = None,
) -> TraceScore:
    """Results of the metrics of these names (all of them by default) and the diagnosis of the trace.

    Never raises for what a trace holds: what cannot be told is `not_available` with its reason. Raises UserError for a
    name that no metric has. `baseline` is a second run that `scaling_efficiency` starts from; its card is `card` unless
    `baseline_card` says that it had another batch (weak scaling).
    """
    base = TraceView(baseline, card=baseline_card or card) if baseline is not None else None
    return score_view(TraceView(trace_set, card=card, config=config, baseline=base), names)


def score_view(trace: TraceView, names: Iterable[str] | None = None) -> TraceScore:
    """The same of traces that somebody looks at already: what was worked out once is not worked out again."""
    wanted = list(METRICS.names() if names is None else names)
    found = [METRICS.get(name) for name in wanted]
    trace_set = trace.trace_set
    return TraceScore(
        metrics={name: metric(trace) for name, metric in zip(wanted, found, strict=True)},
        diagnosis=try_diagnose(trace),
        status=Status(trace_set.status),
        reason=trace_set.reason,
        message=trace_set.message,
        ranks=trace_set.ranks,
        world_size=trace_set.world_size,
    )


def try_diagnose(trace: TraceView) -> Diagnosis | None:
    """The diagnosis, or None where there is no device event to make one from."""
    try:
        return diagnose_trace(trace)
    except NotAvailable:
        return None
