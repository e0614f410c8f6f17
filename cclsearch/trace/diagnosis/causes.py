"""Seconds of a step by cause, for each rank: integers of nanoseconds that add up to the window, whatever the trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from enum import StrEnum

import numpy as np

from cclsearch.trace.diagnosis.gaps import split_idle_ns
from cclsearch.trace.events import Collective, CollectiveKind
from cclsearch.trace.intervals import Int64s, clip_spans, covered_ns, merge_spans, unite_spans
from cclsearch.trace.metric import NotAvailable
from cclsearch.trace.view import RankView, TraceView

_POINT_TO_POINT = frozenset({CollectiveKind.SEND, CollectiveKind.RECV, CollectiveKind.SEND_RECV})


class Cause(StrEnum):
    """What a step's time goes into."""

    COMPUTE = "compute"
    EXPOSED_TRANSFER = "exposed_transfer"
    """Data moves and nothing hides it."""
    EXPOSED_WAIT = "exposed_wait"
    """In a collective, waiting for another rank that is late for another reason than more compute."""
    MEMORY_COPIES = "memory_copies"
    HOST_IDLE = "host_idle"
    """The device does nothing: the host did not feed it."""
    BUBBLE = "bubble"
    """A pipeline stage without work: idle, or in point-to-point with a neighbour stage."""
    IMBALANCE = "imbalance"
    """Waiting for a rank that computes longer, and the lead of ranks whose step is shorter than the slowest's."""


def split_windows(trace: TraceView, view: RankView, at: Int64s) -> dict[Cause, Int64s]:
    """Nanoseconds of these windows of a rank by cause, without `imbalance`, which needs the other ranks."""
    windows_W2 = view.windows.spans_W2[at]
    first_ns, last_ns = int(windows_W2[:, 0].min()), int(windows_W2[:, 1].max())
    compute_M2, work_M2 = (clip_spans(spans, first_ns, last_ns) for spans in (view.compute_M2, view.work_M2))
    pipelined = trace.degree("pp") > 1
    rows, transfer_ns = _comm_with_transfer(trace, view, first_ns, last_ns)
    end_ns = view.table.ts_ns[rows] + view.table.dur_ns[rows]
    paired = _is_pair(view)[view.table.coll_id[rows]] if pipelined else np.zeros(len(rows), dtype=bool)
    moving = merge_spans((end_ns - transfer_ns)[~paired], end_ns[~paired])
    after_transfer = unite_spans(work_M2, moving)
    after_wait = unite_spans(after_transfer, view.merge_rows(rows[~paired]))
    covered = [covered_ns(spans, windows_W2) for spans in (compute_M2, work_M2, after_transfer, after_wait)]
    idle = view.parts.idle_ns_W[at]
    in_pairs = view.parts.window_ns_W[at] - idle - covered[3]
    host = _host_part(view, idle) if pipelined else idle
    return {
        Cause.COMPUTE: covered[0],
        Cause.EXPOSED_TRANSFER: covered[2] - covered[1],
        Cause.EXPOSED_WAIT: covered[3] - covered[2],
        Cause.MEMORY_COPIES: covered[1] - covered[0],
        Cause.HOST_IDLE: host,
        Cause.BUBBLE: in_pairs + idle - host,
    }


def _comm_with_transfer(trace: TraceView, view: RankView, first_ns: int, last_ns: int) -> tuple[Int64s, Int64s]:
    """Communication rows in that time and the part of each duration that moves data: all of it where no peer tells."""
    rows = view.comm_rows
    start_ns = view.table.ts_ns[rows]
    rows = rows[(start_ns < last_ns) & (start_ns + view.table.dur_ns[rows] > first_ns)]
    transfer = trace.matching.transfer_ns.get(view.rank)
    own = view.table.dur_ns[rows]
    if transfer is None:
        return rows, own
    return rows, np.where(transfer[rows] >= 0, np.minimum(transfer[rows], own), own)


def _is_pair(view: RankView) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    def pair(call: Collective) -> bool:
        return call.kind in _POINT_TO_POINT

    return np.array([pair(call) for call in view.table.collectives] or [False])


def _host_part(view: RankView, idle_ns_W: Int64s) -> Int64s:
    """The part of a pipeline stage's idle time for which its own host is to blame; none where launches are unknown."""
    try:
        causes = split_idle_ns(view)
    except NotAvailable:
        return np.zeros_like(idle_ns_W)
    whole = sum(causes.values())
    share = (causes["host_bound"] + causes["input"]) / whole if whole else 0.0
    return (idle_ns_W * share).astype(np.int64)


def median_windows(window_ns_W: Int64s) -> Int64s:
    """Which window, or which two, the median is made of."""
    order = np.argsort(window_ns_W, kind="stable")
    middle = len(order) // 2
    return order[middle : middle + 1] if len(order) % 2 else order[middle - 1 : middle + 1]


def median_causes(trace: TraceView) -> dict[int, dict[Cause, float]]:
    """Rank -> seconds by cause in its median step; they add up to the rank's median period."""
    found: dict[int, dict[Cause, float]] = {}
    for rank, view in trace.ranks.items():
        if not len(view.windows.spans_W2):
            continue
        at = median_windows(view.parts.window_ns_W)
        found[rank] = {cause: float(ns.mean()) / 1e9 for cause, ns in split_windows(trace, view, at).items()}
    return _move_imbalance(trace, found)


def _move_imbalance(trace: TraceView, causes: Mapping[int, dict[Cause, float]]) -> dict[int, dict[Cause, float]]:
    """Take out of each rank's waiting what the longer compute of the busiest rank of its stage explains."""
    busiest: dict[int, float] = defaultdict(float)
    for rank, seconds in causes.items():
        stage = trace.stage_of(rank)
        busiest[stage] = max(busiest[stage], seconds[Cause.COMPUTE])
    moved = {}
    for rank, seconds in causes.items():
        behind = busiest[trace.stage_of(rank)] - seconds[Cause.COMPUTE]
        part = min(max(behind, 0.0), seconds[Cause.EXPOSED_WAIT])
        rest = seconds[Cause.EXPOSED_WAIT] - part
        moved[rank] = {**seconds, Cause.EXPOSED_WAIT: rest, Cause.IMBALANCE: part}
    return moved


def combine_causes(by_rank: Mapping[int, Mapping[Cause, float]]) -> dict[Cause, float]:
    """Mean over ranks by cause; what the slowest rank takes beyond the mean rank goes to `imbalance`.

    The result adds up to the longest step of a rank.
    """
    if not by_rank:
        return {}
    mean = {cause: sum(seconds[cause] for seconds in by_rank.values()) / len(by_rank) for cause in Cause}
    longest = max(sum(seconds.values()) for seconds in by_rank.values())
    mean[Cause.IMBALANCE] += max(longest - sum(mean.values()), 0.0)
    return mean
