"""Causes of a rank's time in a step, whole nanoseconds that add up to the window, and of its device's idle gaps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from cclsearch.trace.events import POINT_TO_POINT, EventTable, Kind, Reason
from cclsearch.trace.intervals import Int64s, clip_spans, covered_ns, gaps_in_windows, merge_spans, unite_spans
from cclsearch.trace.metric import NotAvailable
from cclsearch.trace.view import RankView, TraceView, require_windows

LAUNCH_GAP_NS = 30_000
"""Gap before an already launched kernel below which it is launch overhead, not waiting."""
MIN_MATCHED = 0.9
"""Minimum share of device events with a launch record for finding causes."""
CAUSES = ("host_bound", "input", "launch_overhead", "sync", "comm_dependency", "unknown")
# Only launches that came after a gap began are the host's fault.
DIAGNOSED = {
    "host": ("host_bound", "input", "sync"),
    "launch": ("launch_overhead",),
    "unknown": ("comm_dependency", "unknown"),
}
"""Sentence of the diagnosis on each cause."""


def launch_matched_share(view: RankView) -> float:
    """Return the share of device events in the windows with a launch record; backlog of an earlier step has none."""
    rows = view.in_windows(view.device_rows)
    return float((view.table.launch[rows] >= 0).mean()) if len(rows) else 0.0


@dataclass(frozen=True)
class IdleGaps:
    """The gaps in which a device is idle inside its windows."""

    start_ns_G: Int64s
    length_ns_G: Int64s
    window_G: Int64s
    """Index of the window of each gap."""
    cause_G: Int64s
    """Index into `CAUSES`."""

    def sum_by_window(self, num_windows: int, *causes: str) -> Int64s:
        """Return the ns of idle time by these causes in each window."""
        wanted = np.isin(self.cause_G, [CAUSES.index(cause) for cause in causes])
        found = np.zeros(num_windows, dtype=np.int64)
        np.add.at(found, self.window_G[wanted], self.length_ns_G[wanted])
        return found


def split_idle_ns(view: RankView) -> dict[str, int]:
    """Return the idle ns inside the windows by cause (`find_idle_gaps`).

    Raises NotAvailable if the launches of too many device events are not recorded.
    """
    require_windows(view)
    if launch_matched_share(view) < MIN_MATCHED:
        raise NotAvailable(Reason.NO_LAUNCH_RECORDS, f"under {MIN_MATCHED:.0%} of device events have a launch record")
    gaps = find_idle_gaps(view)
    return {cause: int(gaps.length_ns_G[gaps.cause_G == i].sum()) for i, cause in enumerate(CAUSES)}


def find_idle_gaps(view: RankView, windows_W2: Int64s | None = None) -> IdleGaps:
    """Return the idle gaps inside these windows (default: those of the rank), each with its cause.

    The device event that ends a gap decides its cause. `host_bound`: launched only after the gap began
    (`input` if that event copies from the host). `launch_overhead`: launched before, gap under 30 us. `sync`: the
    host waited for the device as the gap began. `comm_dependency`: launched before, communication ended at that moment.
    `unknown`: launched before, or without a launch record.
    """
    windows_W2 = view.windows.spans_W2 if windows_W2 is None else windows_W2
    gaps_G2, window_G = gaps_in_windows(view.busy_M2, windows_W2)
    table, rows = view.table, view.device_rows
    at = np.searchsorted(table.ts_ns[rows], gaps_G2[:, 1], side="left")
    found = at < len(rows)
    row_G = rows[np.minimum(at, len(rows) - 1)]
    launch_G = _launches_of(table, row_G)
    start_G, length_G = gaps_G2[:, 0], gaps_G2[:, 1] - gaps_G2[:, 0]
    has_launch = found & (launch_G >= 0)
    is_late = has_launch & (table.ts_ns[launch_G] >= start_G)
    is_short = length_G < LAUNCH_GAP_NS
    cause_G = np.full(len(start_G), CAUSES.index("unknown"), np.int64)
    cause_G[is_late] = CAUSES.index("host_bound")
    cause_G[has_launch & ~is_late & is_short] = CAUSES.index("launch_overhead")
    late, early = np.flatnonzero(is_late), np.flatnonzero(has_launch & ~is_late & ~is_short)
    cause_G[late[_covers(view.sync_M2, start_G[late])]] = CAUSES.index("sync")
    copies_in = np.array(["HtoD" in name or "Host-to-Device" in name for name in table.names] or [False])
    copies = late[table.kind[row_G[late]] == Kind.MEMCPY]
    cause_G[copies[copies_in[table.name_id[row_G[copies]]]]] = CAUSES.index("input")
    cause_G[early[np.isin(start_G[early], view.comm_M2[:, 1])]] = CAUSES.index("comm_dependency")
    return IdleGaps(start_G, length_G, window_G, cause_G)


def _launches_of(table: EventTable, rows: Int64s) -> npt.NDArray[np.int32]:
    """Return `table.launch` of these few rows, without its dense form."""
    on_device, launch = table.sparse.get("launch", (rows[:0], rows[:0]))
    if not len(on_device) or (on_device[1:] <= on_device[:-1]).any():
        return np.asarray(table.launch[rows])
    at = np.searchsorted(on_device, rows).clip(0, len(on_device) - 1)
    return np.where(on_device[at] == rows, launch[at], -1)


def _covers(spans_M2: Int64s, time_ns: Int64s) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return, for each time, whether it is inside the merged spans, ends included."""
    if not len(spans_M2):
        return np.zeros(len(time_ns), dtype=bool)
    at = np.searchsorted(spans_M2[:, 0], time_ns, side="right") - 1
    return np.asarray((at >= 0) & (time_ns <= spans_M2[np.maximum(at, 0), 1]))


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


UNEVEN = 0.1
"""Relative difference of mean and median step from which one step does not describe the others."""
SLOW = 1.5
"""A slow step takes more than this many times the median."""


@dataclass(frozen=True)
class StepLengths:
    """Lengths of the inner steps of the rank whose mean is the longest."""

    mean_s: float
    median_s: float
    num_steps: int
    num_slow: int
    slow_share: float
    """Share of the time of all steps in slow ones."""


def are_uneven(mean_s: float, median_s: float) -> bool:
    """Whether the mean step does not describe the steps."""
    return abs(mean_s - median_s) > UNEVEN * median_s


def measure_lengths(trace: TraceView) -> StepLengths:
    """Return the lengths of the steps (or of the file); of a trace with device events."""
    lengths = [view.parts.window_ns_W for view in trace.ranks.values() if len(view.windows.spans_W2)]
    longest = max(lengths, key=lambda ns_W: float(ns_W.mean()))
    slow = longest[slow_windows(longest)]
    median_s = float(np.median(longest)) / 1e9
    return StepLengths(longest.mean() / 1e9, median_s, len(longest), len(slow), float(slow.sum() / longest.sum()))


def all_windows(window_ns_W: Int64s) -> Int64s:
    """Return the index of every window."""
    return np.arange(len(window_ns_W))


def slow_windows(window_ns_W: Int64s) -> Int64s:
    """Return the indices of the slow windows."""
    return np.flatnonzero(window_ns_W > SLOW * np.median(window_ns_W))


def causes_in(trace: TraceView, choose: Callable[[Int64s], Int64s]) -> dict[int, dict[Cause, float]]:
    """Return rank -> mean seconds by cause in the windows that `choose` picks by length; they add up to it."""
    found: dict[int, dict[Cause, float]] = {}
    for rank, view in trace.ranks.items():
        if len(view.windows.spans_W2) and len(at := choose(view.parts.window_ns_W)):
            found[rank] = {cause: float(ns.mean()) / 1e9 for cause, ns in split_windows(trace, view, at).items()}
    return _split_imbalance(trace, found)


def median_causes(trace: TraceView) -> dict[int, dict[Cause, float]]:
    """Return rank -> seconds by cause in its median step; they add up to the rank's median period."""
    return causes_in(trace, median_windows)


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
