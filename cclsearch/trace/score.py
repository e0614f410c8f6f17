"""Metrics and the diagnosis of the traces of one run: a step's time by cause, as data and as sentences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from cclsearch.core.metrics import METRICS
from cclsearch.core.text import one_line
from cclsearch.core.values import Model
from cclsearch.trace.collectives import covered_by_label, explain_no_communication, group_label
from cclsearch.trace.diagnosis.causes import (
    SLOW,
    Cause,
    all_windows,
    are_uneven,
    causes_in,
    combine_causes,
    have_periods,
    measure_lengths,
    median_windows,
    slow_windows,
)
from cclsearch.trace.events import CollectiveKind, EventTable, Reason
from cclsearch.trace.metric import MetricResult, NotAvailable, Status
from cclsearch.trace.metrics.kernels import mean_family_seconds
from cclsearch.trace.metrics.ranks import measure_last_arriver
from cclsearch.trace.metrics.steps import find_least_waiting_rank
from cclsearch.trace.names.kernels import kernel_family
from cclsearch.trace.view import TraceView, call_both

NUM_TOP = 3
_CAUSES = {
    Cause.COMPUTE: ("compute", "compute_frac"),
    Cause.EXPOSED_TRANSFER: ("exposed data transfer", "exposed_comm_frac"),
    Cause.EXPOSED_WAIT: ("waiting for late ranks in collectives", "comm_wait_frac"),
    Cause.MEMORY_COPIES: ("exposed memory copies", "exposed_mem_frac"),
    Cause.HOST_IDLE: ("device idle time (waiting for the host)", "idle_cause"),
    Cause.LAUNCH_IDLE: ("device idle time (launch overhead)", "idle_cause"),
    Cause.UNKNOWN_IDLE: ("device idle time (cause unknown)", "idle_frac"),
    Cause.BUBBLE: ("pipeline bubble", "pipeline_bubble"),
    Cause.IMBALANCE: ("imbalance between ranks", "compute_imbalance"),
}
"""Cause -> its name in sentences, and the metric that measures it."""


class NamedSeconds(Model):
    """A kernel family or a collective, and its seconds per step (mean over ranks)."""

    name: str
    seconds: float
    count: float = 0.0
    """Calls per step; 0 if not counted."""


class SlowSteps(Model):
    """The steps that take more than 1.5 times the median."""

    num_steps: int
    time_share: float
    """Their share of the time of all inner steps."""
    seconds_by_cause: dict[Cause, float]
    """Mean of a slow step."""


class Diagnosis(Model):
    """A step's time by cause. The values of `seconds_by_cause` add up to `window_s`."""

    window_s: float
    """The mean step, the median step if the two differ by more than 10 %, or the span of all device work in the file.
    """
    num_steps: int = 0
    """Number of inner steps; 0 without steps."""
    mean_step_s: float | None = None
    median_step_s: float | None = None
    slow_steps: SlowSteps | None = None
    """Set if mean and median differ by more than 10 % and steps are slow."""
    is_step: bool
    bottleneck: Cause
    """The cause with the most seconds."""
    evidence_metric: str
    seconds_by_cause: dict[Cause, float]
    seconds_by_rank: dict[int, dict[Cause, float]]
    """Rank -> its own seconds by cause, which add up to its own step time."""
    shown_rank: int | None = None
    """The rank of `seconds_by_cause`, the one with the longest window, if lengths of windows cannot be compared; None:
    the mean over ranks."""
    worst_rank: int | None = None
    """The rank that the others wait for; else, of ranks with steps, the one with the longest. None for one rank, and if
    neither steps nor matched collectives relate the ranks."""
    top_kernels: tuple[NamedSeconds, ...] = ()
    """Mean over all inner steps, as the collectives."""
    top_collectives: tuple[NamedSeconds, ...] = ()
    sentences: tuple[str, ...] = ()
    reason: Reason | None = None
    """Reason for a partial diagnosis; None if it is complete."""

    @property
    def is_uneven(self) -> bool:
        """Whether mean and median step differ by more than 10 %."""
        return self.mean_step_s is not None and are_uneven(self.mean_step_s, self.median_step_s or 0.0)


MAX_NAME_CHARS = 70
"""Longer names are cut in sentences; `top_kernels` has them whole."""


def diagnose_trace(trace: TraceView) -> Diagnosis:
    """Return seconds by cause over all ranks, the worst rank, the top kernels and collectives, and sentences.

    Raises NotAvailable if no rank has device events.
    """
    if not any(len(view.windows.spans_W2) for view in trace.ranks.values()):
        raise NotAvailable(Reason.NO_GPU_EVENTS, "no device events")
    steps = measure_lengths(trace)
    is_uneven = are_uneven(steps.mean_s, steps.median_s)
    by_rank = causes_in(trace, median_windows if is_uneven else all_windows)
    causes = combine_causes(trace, by_rank)
    slow = combine_causes(trace, causes_in(trace, slow_windows)) if is_uneven else {}
    bottleneck = max(causes, key=lambda cause: causes[cause])
    is_step = all(trace.ranks[rank].windows.are_steps for rank in by_rank)
    lengths = {rank: sum(seconds.values()) for rank, seconds in by_rank.items()}
    kernels = tuple(
        NamedSeconds(name=name, seconds=seconds) for name, seconds in list(mean_family_seconds(trace).items())[:NUM_TOP]
    )
    draft = Diagnosis(
        window_s=sum(causes.values()),
        num_steps=steps.num_steps if is_step else 0,
        mean_step_s=steps.mean_s if is_step else None,
        median_step_s=steps.median_s if is_step else None,
        slow_steps=SlowSteps(num_steps=steps.num_slow, time_share=steps.slow_share, seconds_by_cause=slow)
        if slow
        else None,
        is_step=is_step,
        bottleneck=bottleneck,
        evidence_metric=_CAUSES[bottleneck][1],
        seconds_by_cause=causes,
        seconds_by_rank=by_rank,
        shown_rank=None if have_periods(trace) or len(by_rank) < 2 else max(lengths, key=lambda rank: lengths[rank]),
        worst_rank=_find_worst_rank(trace, lengths),
        top_kernels=kernels,
        top_collectives=find_top_collectives(trace),
        reason=_find_reason(trace),
    )
    return draft.model_copy(update={"sentences": tuple(_write_sentences(draft, trace))})


def _find_worst_rank(trace: TraceView, step_s: dict[int, float]) -> int | None:
    if len(step_s) < 2:
        return None
    waits_least = find_least_waiting_rank(trace)
    if waits_least is None and have_periods(trace):
        return max(step_s, key=lambda rank: step_s[rank])
    return waits_least


def _find_reason(trace: TraceView) -> Reason | None:
    if trace.window_reason:
        return trace.window_reason
    communicates = any(len(view.comm_rows) for view in trace.ranks.values())
    if communicates and trace.matching.is_empty:
        return trace.unmatched_reason
    return trace.trace_set.reason


def find_top_collectives(trace: TraceView) -> tuple[NamedSeconds, ...]:
    """Return the collectives, by kind and group, that cover the most seconds per step (mean over ranks)."""
    totals: dict[str, float] = defaultdict(float)
    calls: dict[str, float] = defaultdict(float)
    for view in trace.ranks.values():
        labels = [one_line(_describe_call(view.table, at), 80) for at in range(len(view.table.collectives))]
        for name, (seconds, rows) in covered_by_label(view, labels).items():
            if seconds > 0:
                totals[name] += seconds / len(trace.ranks)
                calls[name] += len(view.in_windows(rows)) / len(view.windows.spans_W2) / len(trace.ranks)
    top = sorted(totals, key=lambda name: -totals[name])[:NUM_TOP]
    return tuple(NamedSeconds(name=name, seconds=totals[name], count=calls[name]) for name in top)


def _describe_call(table: EventTable, number: int) -> str:
    """Return operation and group of a collective; for an unrecorded operation the kernel's name."""
    call = table.collectives[number]
    if call.kind is CollectiveKind.UNKNOWN:
        row = int((table.coll_id == number).argmax())
        return f"operation not recorded ({kernel_family(table.names[table.name_id[row]])})"
    return f"{call.kind} ({group_label(call)})"


def _is_on_cpus(trace: TraceView) -> bool:
    return all(view.table.accelerator == "cpu" for view in trace.ranks.values())


def _name_cause(cause: Cause, trace: TraceView) -> str:
    """Return the cause in words; on CPUs no device waits for a host."""
    return "idle time" if cause is Cause.HOST_IDLE and _is_on_cpus(trace) else _CAUSES[cause][0]


def _list_causes(causes: dict[Cause, float], trace: TraceView) -> str:
    """Return the whole time, and the causes by their share of it."""
    total = sum(causes.values())
    shown = [(cause, s) for cause, s in sorted(causes.items(), key=lambda item: -item[1]) if s > 0.005 * total]
    parts = [f"{_name_cause(cause, trace)} {_duration(s)} ({s / total:.0%})" for cause, s in shown]
    return f"{_duration(total)}: {', '.join(parts) or 'nothing was recorded'}"


def _describe_slow_steps(diagnosis: Diagnosis, trace: TraceView) -> str:
    mean, slow = _duration(diagnosis.mean_step_s or 0.0), diagnosis.slow_steps
    uneven = f"The steps are uneven: their mean is {mean}"
    if slow is None:
        return f"{uneven}, and none takes more than {SLOW} times the median."
    many = f"{slow.num_steps} of {diagnosis.num_steps} take more than {SLOW} times the median"
    causes = _list_causes(slow.seconds_by_cause, trace)
    return f"{uneven}. {many}, and {slow.time_share:.0%} of the time; such a slow step takes {causes}."


def _write_sentences(diagnosis: Diagnosis, trace: TraceView) -> list[str]:
    subject = "A traced step" if diagnosis.is_step else f"The recorded window ({trace.unmarked})"
    if diagnosis.is_uneven:
        subject = "The median traced step"
    if diagnosis.shown_rank is not None:
        subject += f" of rank {diagnosis.shown_rank}, the longest of {len(diagnosis.seconds_by_rank)} ranks,"
    sentences = [f"{subject} takes {_list_causes(diagnosis.seconds_by_cause, trace)}."]
    if diagnosis.is_uneven:
        sentences.append(_describe_slow_steps(diagnosis, trace))
    mean = " (mean of all steps)" if diagnosis.is_uneven else ""
    if diagnosis.top_kernels:
        top = "; ".join(f"{one_line(k.name, MAX_NAME_CHARS)} {_duration(k.seconds)}" for k in diagnosis.top_kernels)
        sentences.append(f"{'Operators' if _is_on_cpus(trace) else 'Kernels'} with the most compute time{mean}: {top}.")
    if diagnosis.top_collectives:
        top = "; ".join(f"{c.name} {_duration(c.seconds)}, {_calls(c.count)}" for c in diagnosis.top_collectives)
        sentences.append(f"Collectives with the most time{mean}: {top}.")
    sentences += _describe_straggler(diagnosis, trace)
    communicates = any(len(view.comm_rows) for view in trace.ranks.values())
    if communicates and (absent := explain_no_communication(trace)):
        sentences.append(f"{absent[0].upper()}{absent[1:]}.")
    elif communicates and trace.matching.is_empty:
        why = f" ({trace.matching.mismatched[0]})" if trace.matching.mismatched else ""
        sentences.append(f"Exposed data transfer includes waiting: this trace does not allow separating the two{why}.")
    return sentences


def _describe_straggler(diagnosis: Diagnosis, trace: TraceView) -> list[str]:
    """Return the sentence about the rank that the others wait for; nothing if no collective of two ranks matches."""
    waiting = [s[Cause.EXPOSED_WAIT] + s[Cause.IMBALANCE] for s in diagnosis.seconds_by_rank.values()]
    mean = sum(waiting) / len(waiting)
    if have_periods(trace):
        mean = diagnosis.seconds_by_cause[Cause.EXPOSED_WAIT] + diagnosis.seconds_by_cause[Cause.IMBALANCE]
    if diagnosis.worst_rank is None or trace.matching.is_empty or mean < 0.02 * diagnosis.window_s:
        return []
    sentence = f"The other ranks wait for rank {diagnosis.worst_rank}" + _describe_arrivals(diagnosis.worst_rank, trace)
    if have_periods(trace):
        sentence += _describe_excess(diagnosis, diagnosis.worst_rank, trace)
    return [sentence + "."]


def _describe_arrivals(rank: int, trace: TraceView) -> str:
    """Return how often the rank arrives last, and which rank does so more often; "" without a common clock."""
    try:
        arrivals = measure_last_arriver(trace)
    except NotAvailable:
        return ""
    times, most = arrivals.per_rank.get(rank) or 0, arrivals.per_rank.get(int(arrivals.value)) or 0
    total = arrivals.inputs["num_collectives"]
    if times >= most:
        return f", the last to arrive in {times:.0f} of {total} collectives"
    return (
        f", the last to arrive in {times:.0f} of {total} collectives (rank {arrivals.value:.0f}: {most:.0f}, with"
        " shorter waits)"
    )


def _describe_excess(diagnosis: Diagnosis, rank: int, trace: TraceView) -> str:
    """Return the cause with more time in this rank than in the mean of the others, with the difference; else ""."""
    late = diagnosis.seconds_by_rank[rank]
    others = [seconds for other, seconds in diagnosis.seconds_by_rank.items() if other != rank]
    more = {
        cause: late[cause] - sum(seconds[cause] for seconds in others) / len(others)
        for cause in Cause
        if cause not in (Cause.EXPOSED_WAIT, Cause.IMBALANCE)
    }
    main = max(more, key=lambda cause: more[cause])
    return f"; it has {_duration(more[main])} more {_name_cause(main, trace)} than their mean" if more[main] > 0 else ""


def _calls(count: float) -> str:
    return "1 call" if count == 1 else f"{round(count, 2):.12g} calls"


def _duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns" if seconds else "0 s"


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
