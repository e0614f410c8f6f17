"""Time of a step by cause, for each rank: whole nanoseconds that always add up to the window."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from cclsearch.trace.diagnosis.gaps import DIAGNOSED, find_idle_gaps
from cclsearch.trace.events import POINT_TO_POINT
from cclsearch.trace.intervals import Int64s, clip_spans, covered_ns, merge_spans, unite_spans
from cclsearch.trace.view import RankView, TraceView


class Cause(StrEnum):
    """Cause of a part of a step's time."""

    COMPUTE = "compute"
    EXPOSED_TRANSFER = "exposed_transfer"
    """Data transfer that does not overlap with compute or copies."""
    EXPOSED_WAIT = "exposed_wait"
    """Waiting in a collective for a rank that is late for a reason other than more compute."""
    MEMORY_COPIES = "memory_copies"
    HOST_IDLE = "host_idle"
    """The device is idle until the host launches: the next event's launch began after the device ran out of work."""
    LAUNCH_IDLE = "launch_idle"
    """The device is idle for a short time before work that was already launched."""
    UNKNOWN_IDLE = "unknown_idle"
    """The device is idle before work that was already launched, or that has no launch record."""
    BUBBLE = "bubble"
    """A pipeline stage without work: idle, or in point-to-point communication with a neighbor stage."""
    IMBALANCE = "imbalance"
    """Waiting for a rank that computes longer, and the difference between this step and the slowest rank's."""


def split_windows(trace: TraceView, view: RankView, at: Int64s) -> dict[Cause, Int64s]:
    """Return the ns of these windows of a rank by cause, without `imbalance`, which needs the other ranks."""
    windows_W2 = view.windows.spans_W2[at]
    first_ns, last_ns = int(windows_W2[:, 0].min()), int(windows_W2[:, 1].max())
    compute_M2, work_M2 = (clip_spans(spans, first_ns, last_ns) for spans in (view.compute_M2, view.work_M2))
    pipelined = trace.degree("pp") > 1
    rows, transfer_ns = _comm_and_transfer(trace, view, first_ns, last_ns)
    end_ns = view.table.ts_ns[rows] + view.table.dur_ns[rows]
    paired = is_point_to_point(view, rows) if pipelined else np.zeros(len(rows), dtype=bool)
    moving = merge_spans((end_ns - transfer_ns)[~paired], end_ns[~paired])
    after_transfer = unite_spans(work_M2, moving)
    after_wait = unite_spans(after_transfer, view.merge_rows(rows[~paired]))
    covered = [covered_ns(spans, windows_W2) for spans in (compute_M2, work_M2, after_transfer, after_wait)]
    idle = view.parts.idle_ns_W[at]
    in_pairs = view.parts.window_ns_W[at] - idle - covered[3]
    host, launching = _split_idle(view, at, pipelined=pipelined)
    rest = idle - host - launching
    return {
        Cause.COMPUTE: covered[0],
        Cause.EXPOSED_TRANSFER: covered[2] - covered[1],
        Cause.EXPOSED_WAIT: covered[3] - covered[2],
        Cause.MEMORY_COPIES: covered[1] - covered[0],
        Cause.HOST_IDLE: host,
        Cause.LAUNCH_IDLE: launching,
        Cause.UNKNOWN_IDLE: np.zeros_like(rest) if pipelined else rest,
        Cause.BUBBLE: in_pairs + rest if pipelined else in_pairs,
    }


def _split_idle(view: RankView, at: Int64s, *, pipelined: bool) -> tuple[Int64s, Int64s]:
    """Return the idle ns of each of these windows due to the host, and due to launching.

    On CPUs the host is the device, so all idle time is the host's. In a pipeline the host may wait for a neighbor
    stage, so a gap after a synchronization is not the host's.
    """
    idle_ns_W = view.parts.idle_ns_W[at]
    if view.table.accelerator == "cpu" and not pipelined:
        return idle_ns_W, np.zeros_like(idle_ns_W)
    gaps = find_idle_gaps(view, view.windows.spans_W2[at])
    late = ("host_bound", "input") if pipelined else DIAGNOSED["host"]
    return gaps.sum_by_window(len(idle_ns_W), *late), gaps.sum_by_window(len(idle_ns_W), *DIAGNOSED["launch"])


def _comm_and_transfer(trace: TraceView, view: RankView, first_ns: int, last_ns: int) -> tuple[Int64s, Int64s]:
    """Return the communication rows in that time, and the transfer part of each: all of it if it is not matched."""
    rows = view.comm_rows
    start_ns = view.table.ts_ns[rows]
    rows = rows[(start_ns < last_ns) & (start_ns + view.table.dur_ns[rows] > first_ns)]
    own = view.table.dur_ns[rows]
    transfer = trace.matching.transfer_ns_of(view.rank, rows)
    return rows, np.where(transfer >= 0, np.minimum(transfer, own), own)


def is_point_to_point(view: RankView, rows: Int64s) -> npt.NDArray[np.bool_]:
    """Return, for each communication row, whether it is between two ranks only."""
    by_call = np.array([call.kind in POINT_TO_POINT for call in view.table.collectives] or [False])
    return np.asarray(by_call[view.table.coll_id[rows]])


def median_windows(window_ns_W: Int64s) -> Int64s:
    """Return the index of the median window; two indices for an even number of windows."""
    order = np.argsort(window_ns_W, kind="stable")
    middle = len(order) // 2
    return order[middle : middle + 1] if len(order) % 2 else order[middle - 1 : middle + 1]


def median_window(view: RankView) -> tuple[int, int]:
    """Return start and end of a rank's median window (of two, the shorter), by its own clock."""
    start, end = view.windows.spans_W2[median_windows(view.parts.window_ns_W)[0]].tolist()
    return start, end


def median_causes(trace: TraceView) -> dict[int, dict[Cause, float]]:
    """Return rank -> seconds by cause in its median step; they add up to the rank's median period."""
    found: dict[int, dict[Cause, float]] = {}
    for rank, view in trace.ranks.items():
        if not len(view.windows.spans_W2):
            continue
        at = median_windows(view.parts.window_ns_W)
        found[rank] = {cause: float(ns.mean()) / 1e9 for cause, ns in split_windows(trace, view, at).items()}
    return _split_imbalance(trace, found)


def _split_imbalance(trace: TraceView, causes: Mapping[int, dict[Cause, float]]) -> dict[int, dict[Cause, float]]:
    """Move the waiting that the longer compute of the stage's busiest rank explains to `imbalance`."""
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


def combine_causes(trace: TraceView, by_rank: Mapping[int, Mapping[Cause, float]]) -> dict[Cause, float]:
    """Return seconds by cause that add up to the longest step of a rank.

    Of steps with a period: the mean over ranks, plus the slowest rank's excess over the mean as `imbalance`. Lengths of
    single steps and of files differ for reasons of the recording: there, the causes of the rank with the longest.
    """
    if not by_rank:
        return {}
    lengths = {rank: sum(seconds.values()) for rank, seconds in by_rank.items()}
    longest = max(lengths, key=lambda rank: lengths[rank])
    if not have_periods(trace):
        return {cause: by_rank[longest][cause] for cause in Cause}
    mean = {cause: sum(seconds[cause] for seconds in by_rank.values()) / len(by_rank) for cause in Cause}
    mean[Cause.IMBALANCE] += max(lengths[longest] - sum(mean.values()), 0.0)
    return mean


def have_periods(trace: TraceView) -> bool:
    """Whether the windows of all ranks are steps with a period, which can be compared between ranks."""
    return all(view.windows.are_steps and view.windows.reason is None for view in trace.ranks.values())
