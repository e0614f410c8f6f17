"""Where the time of a step goes, as data and as sentences made from the same data."""

from __future__ import annotations

import numpy as np

from cclsearch.core.text import one_line
from cclsearch.core.values import Model
from cclsearch.trace.collectives import group_label
from cclsearch.trace.diagnosis.causes import Cause, combine_causes, median_causes
from cclsearch.trace.events import Reason
from cclsearch.trace.intervals import covered_ns
from cclsearch.trace.metric import NotAvailable
from cclsearch.trace.metrics.breakdown import find_least_waiting_rank
from cclsearch.trace.metrics.communication import measure_last_arriver
from cclsearch.trace.metrics.kernels import mean_family_seconds
from cclsearch.trace.view import RankView, TraceView

NUM_TOP = 3
EVIDENCE = {
    Cause.COMPUTE: "compute_frac",
    Cause.EXPOSED_TRANSFER: "exposed_comm_frac",
    Cause.EXPOSED_WAIT: "comm_wait_frac",
    Cause.MEMORY_COPIES: "exposed_mem_frac",
    Cause.HOST_IDLE: "idle_frac",
    Cause.BUBBLE: "pipeline_bubble",
    Cause.IMBALANCE: "compute_imbalance",
}
"""Cause -> the metric that measures it."""
_CAUSE_NAMES = {
    Cause.COMPUTE: "compute",
    Cause.EXPOSED_TRANSFER: "exposed data transfer",
    Cause.EXPOSED_WAIT: "waiting for late ranks in collectives",
    Cause.MEMORY_COPIES: "exposed memory copies",
    Cause.HOST_IDLE: "device idle time (waiting for the host)",
    Cause.BUBBLE: "pipeline bubble",
    Cause.IMBALANCE: "imbalance between ranks",
}


class NamedSeconds(Model):
    """A kernel family or a collective, and its seconds per step (mean over ranks)."""

    name: str
    seconds: float
    count: float = 0.0
    """Calls per step; 0 if not counted."""


class Diagnosis(Model):
    """Where the time of a step goes. The values of `seconds_by_cause` add up to `window_s`."""

    window_s: float
    """`trace_step_time` if `is_step`, else the span of all device work in the file."""
    is_step: bool
    bottleneck: Cause
    """The cause with the most seconds."""
    evidence_metric: str
    seconds_by_cause: dict[Cause, float]
    seconds_by_rank: dict[int, dict[Cause, float]]
    """Rank -> its own seconds by cause, which add up to its own step time."""
    worst_rank: int | None = None
    """The rank that the others wait for; else the one with the longest step; None for a single rank."""
    top_kernels: tuple[NamedSeconds, ...] = ()
    top_collectives: tuple[NamedSeconds, ...] = ()
    sentences: tuple[str, ...] = ()
    reason: Reason | None = None
    """Why the diagnosis is only partial; None if it is complete."""


def diagnose_trace(trace: TraceView) -> Diagnosis:
    """Return seconds by cause over all ranks, the worst rank, the top kernels and collectives, and sentences.

    Raises NotAvailable if no rank has device events.
    """
    by_rank = median_causes(trace)
    if not by_rank:
        raise NotAvailable(Reason.NO_GPU_EVENTS, "no device events")
    causes = combine_causes(by_rank)
    bottleneck = max(causes, key=lambda cause: causes[cause])
    is_step = all(trace.ranks[rank].windows.are_steps for rank in by_rank)
    worst = _find_worst_rank(trace, {rank: sum(seconds.values()) for rank, seconds in by_rank.items()})
    kernels = tuple(
        NamedSeconds(name=name, seconds=seconds) for name, seconds in list(mean_family_seconds(trace).items())[:NUM_TOP]
    )
    draft = Diagnosis(
        window_s=sum(causes.values()),
        is_step=is_step,
        bottleneck=bottleneck,
        evidence_metric=EVIDENCE[bottleneck],
        seconds_by_cause=causes,
        seconds_by_rank=by_rank,
        worst_rank=worst,
        top_kernels=kernels,
        top_collectives=find_top_collectives(trace),
        reason=_find_reason(trace),
    )
    return draft.model_copy(update={"sentences": tuple(_write_sentences(draft, trace))})


def _find_worst_rank(trace: TraceView, step_s: dict[int, float]) -> int | None:
    if len(step_s) < 2:
        return None
    waits_least = find_least_waiting_rank(trace)
    return waits_least if waits_least is not None else max(step_s, key=lambda rank: step_s[rank])


def _find_reason(trace: TraceView) -> Reason | None:
    if trace.window_reason:
        return trace.window_reason
    communicates = any(len(view.comm_rows) for view in trace.ranks.values())
    if communicates and trace.matching.is_empty:
        return trace.unmatched_reason
    return trace.trace_set.reason


def find_top_collectives(trace: TraceView, count: int = NUM_TOP) -> tuple[NamedSeconds, ...]:
    """Return the collectives, by kind and group, that cover the most seconds per step (mean over ranks)."""
    totals: dict[str, float] = {}
    calls: dict[str, float] = {}
    for view in trace.ranks.values():
        for name, (seconds, number) in _collective_seconds(view).items():
            totals[name] = totals.get(name, 0.0) + seconds / len(trace.ranks)
            calls[name] = calls.get(name, 0.0) + number / len(trace.ranks)
    top = sorted(totals, key=lambda name: -totals[name])[:count]
    return tuple(NamedSeconds(name=name, seconds=totals[name], count=calls[name]) for name in top)


def _collective_seconds(view: RankView) -> dict[str, tuple[float, float]]:
    table = view.table
    names = [one_line(f"{call.kind} ({group_label(call)})", 80) for call in table.collectives]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    found = {}
    windows = max(len(view.windows.spans_W2), 1)
    number_of_call = np.array([numbers[name] for name in names], dtype=np.int64)
    number_of_row = number_of_call[table.coll_id[view.comm_rows]] if names else view.comm_rows[:0]
    for name, number in numbers.items():
        rows = view.comm_rows[number_of_row == number]
        seconds = float(covered_ns(view.merge_rows(rows), view.windows.spans_W2).sum()) / 1e9 / windows
        if seconds:
            found[name] = (seconds, len(view.in_windows(rows)) / windows)
    return found


def _write_sentences(diagnosis: Diagnosis, trace: TraceView) -> list[str]:
    shares = sorted(diagnosis.seconds_by_cause.items(), key=lambda item: -item[1])
    subject = "A traced step" if diagnosis.is_step else "The recorded window (no step markers)"
    shown = [(cause, s) for cause, s in shares if s > 0.005 * diagnosis.window_s]
    parts = [f"{_CAUSE_NAMES[cause]} {_duration(s)} ({s / diagnosis.window_s:.0%})" for cause, s in shown]
    sentences = [f"{subject} takes {_duration(diagnosis.window_s)}: {', '.join(parts) or 'nothing was recorded'}."]
    if diagnosis.top_kernels:
        top = "; ".join(f"{k.name} {_duration(k.seconds)}" for k in diagnosis.top_kernels)
        sentences.append(f"Kernels with the most compute time: {top}.")
    if diagnosis.top_collectives:
        top = "; ".join(f"{c.name} {_duration(c.seconds)}, {_calls(c.count)}" for c in diagnosis.top_collectives)
        sentences.append(f"Collectives with the most time: {top}.")
    sentences += _describe_straggler(diagnosis, trace)
    if any(len(view.comm_rows) for view in trace.ranks.values()) and trace.matching.is_empty:
        sentences.append("Exposed data transfer includes waiting: this trace does not allow separating the two.")
    return sentences


def _describe_straggler(diagnosis: Diagnosis, trace: TraceView) -> list[str]:
    waiting = diagnosis.seconds_by_cause[Cause.EXPOSED_WAIT] + diagnosis.seconds_by_cause[Cause.IMBALANCE]
    if diagnosis.worst_rank is None or waiting < 0.02 * diagnosis.window_s:
        return []
    late = diagnosis.seconds_by_rank[diagnosis.worst_rank]
    others = [seconds for rank, seconds in diagnosis.seconds_by_rank.items() if rank != diagnosis.worst_rank]
    more = {
        cause: late[cause] - sum(seconds[cause] for seconds in others) / len(others)
        for cause in Cause
        if cause not in (Cause.EXPOSED_WAIT, Cause.IMBALANCE)
    }
    main = max(more, key=lambda cause: more[cause])
    sentence = f"The other ranks wait for rank {diagnosis.worst_rank}"
    try:
        arrivals = measure_last_arriver(trace)
        times = arrivals.per_rank.get(diagnosis.worst_rank) or 0
        sentence += f", the last to arrive in {times:.0f} of {arrivals.inputs['num_collectives']} collectives"
    except NotAvailable:
        pass
    if more[main] > 0:
        sentence += f"; it has {_duration(more[main])} more {_CAUSE_NAMES[main]} than their mean"
    return [sentence + "."]


def _calls(count: float) -> str:
    return "1 call" if count == 1 else f"{count:.3g} calls"


def _duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns" if seconds else "0 s"
