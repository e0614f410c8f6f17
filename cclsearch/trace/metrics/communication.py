"""Waiting and stragglers: metrics that compare the same collective on several ranks."""

from __future__ import annotations

from collections import Counter

import numpy as np

from cclsearch.trace.events import Reason
from cclsearch.trace.intervals import Int64s
from cclsearch.trace.matching import WORLD, Matching
from cclsearch.trace.metric import Draft, NotAvailable, metric
from cclsearch.trace.result import mean_over_ranks
from cclsearch.trace.view import TraceView


def require_matching(trace: TraceView) -> Matching:
    """Return the matched collectives; raises NotAvailable with the reason if there are none."""
    if not any(len(view.comm_rows) for view in trace.ranks.values()):
        raise NotAvailable(Reason.NO_COMM_EVENTS, "no communication was recorded")
    if len(trace.ranks) < 2:
        raise NotAvailable(trace.unmatched_reason, "a trace of one rank cannot separate waiting from data transfer")
    matching = trace.matching
    if matching.groups:
        return matching
    if matching.mismatched:
        raise NotAvailable(Reason.SEQUENCE_MISMATCH, matching.mismatched[0])
    if matching.misaligned:
        raise NotAvailable(Reason.NO_CLOCK_ALIGNMENT, matching.misaligned)
    if matching.pairs:
        raise NotAvailable(Reason.NO_COMM_EVENTS, "no collectives, only point-to-point messages")
    raise NotAvailable(Reason.NO_COLLECTIVE_ARGS, "no collective records its group of ranks")


def find_caveat(trace: TraceView) -> tuple[Reason | None, str]:
    """Return why a figure over matched collectives is only partial; (None, "") if it is complete."""
    if trace.matching.mismatched:
        return Reason.SEQUENCE_MISMATCH, f"not included: {'; '.join(trace.matching.mismatched)}"
    if trace.matching.misaligned:
        return Reason.NO_CLOCK_ALIGNMENT, f"not included: {trace.matching.misaligned}"
    if trace.matching.ranks_missing:
        return Reason.RANKS_MISSING, "some groups have ranks without a trace: waiting for those ranks is not included"
    if trace.device_count_caveat and any(group.key[0] == WORLD for group in trace.matching.groups):
        return Reason.RANKS_MISSING, trace.device_count_caveat
    return None, ""


@metric("comm_wait_frac", unit="fraction", better="lower", over="trace")
def measure_comm_wait_frac(trace: TraceView) -> Draft:
    """Share of the time in collectives that ranks spend waiting for other ranks. Sum of (duration - shortest duration
    over ranks) over the sum of durations, over the whole file."""
    matching = require_matching(trace)
    wait_ns = dict.fromkeys(trace.ranks, 0)
    spent_ns = dict.fromkeys(trace.ranks, 0)
    for group in matching.groups:
        for i, rank in enumerate(group.ranks):
            wait_ns[rank] += int((group.dur_ns_RK[i] - group.transfer_ns_K).sum())
            spent_ns[rank] += int(group.dur_ns_RK[i].sum())
    shares: dict[int, float | None] = {
        rank: wait_ns[rank] / spent if spent else None for rank, spent in spent_ns.items()
    }
    reason, detail = find_caveat(trace)
    return mean_over_ranks(
        shares,
        {
            "wait_s_by_rank": {str(rank): ns / 1e9 for rank, ns in wait_ns.items()},
            "comm_s_by_rank": {str(rank): ns / 1e9 for rank, ns in spent_ns.items()},
            "num_collectives": sum(len(group.calls_K) for group in matching.groups),
        },
        reason=reason,
        detail=detail,
    )


def _aligned_starts(trace: TraceView) -> list[tuple[tuple[int, ...], Int64s]]:
    """Return the ranks of each group and the starts of its matched collectives on one clock, shape (R, K)."""
    matching = require_matching(trace)
    if matching.offset_ns is None:
        raise NotAvailable(Reason.NO_CLOCK_ALIGNMENT, "the clocks of the ranks cannot be aligned")
    offsets = matching.offset_ns
    return [(group.ranks, group.on_one_clock(offsets)) for group in matching.groups]


@metric("start_skew", unit="s", better="lower", over="trace")
def measure_start_skew(trace: TraceView) -> Draft:
    """Latest minus earliest start of a collective over its ranks: median over collectives. `per_rank` has the mean
    lateness of each rank."""
    aligned = _aligned_starts(trace)
    skew_ns = np.concatenate([starts.max(axis=0) - starts.min(axis=0) for _, starts in aligned])
    late: dict[int, list[float]] = {rank: [] for rank in trace.ranks}
    for ranks, starts in aligned:
        for i, rank in enumerate(ranks):
            late[rank].extend((starts[i] - starts.min(axis=0)).tolist())
    reason, detail = find_caveat(trace)
    return Draft(
        value=float(np.median(skew_ns)) / 1e9,
        per_rank={rank: float(np.mean(ns)) / 1e9 if ns else None for rank, ns in late.items()},
        reason=reason,
        detail=detail,
        inputs={
            "p95_s": float(np.percentile(skew_ns, 95)) / 1e9,
            "max_s": float(skew_ns.max()) / 1e9,
            "clock_error_s": None if trace.matching.clock_error_ns is None else trace.matching.clock_error_ns / 1e9,
        },
    )


@metric("last_arriver", unit="rank", over="trace")
def measure_last_arriver(trace: TraceView) -> Draft:
    """The straggler: the rank that most often enters collectives last (not the one with the most time in them). Its
    cost is the time between the second-last arrival and its own."""
    counts: Counter[int] = Counter(dict.fromkeys(trace.ranks, 0))
    cost_ns = dict.fromkeys(trace.ranks, 0)
    total = 0
    for ranks, starts in _aligned_starts(trace):
        last_K = starts.argmax(axis=0)
        behind_K = np.sort(starts, axis=0)[-1] - np.sort(starts, axis=0)[-2]
        total += starts.shape[1]
        for i, rank in enumerate(ranks):
            counts[rank] += int((last_K == i).sum())
            cost_ns[rank] += int(behind_K[last_K == i].sum())
    worst = max(counts, key=lambda rank: (counts[rank], cost_ns[rank]))
    reason, detail = find_caveat(trace)
    return Draft(
        value=float(worst),
        per_rank={rank: float(count) for rank, count in counts.items()},
        reason=reason,
        detail=detail,
        inputs={
            "num_collectives": total,
            "times_last_by_rank": {str(rank): count for rank, count in counts.items()},
            "straggler_cost_s": sum(cost_ns.values()) / 1e9,
            "cost_s_by_rank": {str(rank): ns / 1e9 for rank, ns in cost_ns.items()},
        },
    )
