"""The critical path of one step, from its last device event back over the event that each event waited for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cclsearch.trace.diagnosis.causes import LAUNCH_GAP_NS, MIN_MATCHED, launch_matched_share, median_window
from cclsearch.trace.events import Kind, Reason
from cclsearch.trace.intervals import Int64s
from cclsearch.trace.metric import NotAvailable
from cclsearch.trace.view import RankView, TraceView

PATH_PARTS = ("host", "launch", "idle", "compute", "transfer", "wait", "memcpy")
"""Parts of a path's time. `host`: until the host launched the next event. `launch`: up to 30 us before launched work.
`idle`: longer, or without a launch record.
"""
# Clocks of host and device agree to about this, and kernels of a stream may overlap by less.
CLOCK_SLACK_NS = 5_000
"""Gap after another event within which an event waited for it, even if its launch seems to be later."""
_BLOCKING = re.compile("Synchronize|^(cudaMemcpy|hipMemcpy|cudaMemcpyFromSymbol|hipMemcpyWithStream)$")
"""Runtime calls that wait for the device."""


@dataclass(frozen=True)
class _Lane:
    """Device events of one rank sorted by end, on the common clock."""

    rows: Int64s
    start_ns: Int64s
    end_ns: Int64s
    launch_ns: Int64s
    """Start of the launch call; -1 if unknown."""
    kind: Int64s
    transfer_ns: Int64s
    """Transfer part of a matched collective, else -1."""
    sync_ends_ns: Int64s
    """Ends of the host's synchronizations, sorted."""


@dataclass(frozen=True, slots=True)
class PathSegment:
    """One part of the path, on one rank."""

    rank: int
    part: str
    """One of `PATH_PARTS`."""
    start_ns: int
    """Time on the common clock."""
    end_ns: int


def require_launches(trace: TraceView) -> None:
    """Raise NotAvailable if too few launches are known to find each event's predecessor."""
    unmatched = [rank for rank, view in trace.ranks.items() if launch_matched_share(view) < MIN_MATCHED]
    if unmatched:
        said = f"too few device events of rank {unmatched[0]} have a launch record"
        raise NotAvailable(Reason.NO_LAUNCH_RECORDS, said)


def walk_critical_path(trace: TraceView) -> dict[str, int]:
    """Return the ns of the path by activity, over the median step of the rank with the longest one."""
    spent = dict.fromkeys(PATH_PARTS, 0)
    for segment in find_critical_path(trace):
        spent[segment.part] += segment.end_ns - segment.start_ns
    return spent


def find_critical_path(trace: TraceView) -> list[PathSegment]:
    """Return the path over the median step of the rank with the longest one, the last segment first.

    Going back from an event: if another device event of the rank ended just before it started and its launch was
    already issued, it waited for that event (stream order, or an event between streams); else the host was late, and
    the path follows the host to the last synchronization, which waited for the device. In a matched collective the
    transfer is the shortest duration over ranks; the rest is waiting, and the path continues at the last arriver.
    Raises NotAvailable if the path does not account for the whole step.
    """
    offsets = trace.matching.offset_ns or {}
    rank, low, high = _pick_window(trace, offsets)
    lanes = {r: _make_lane(trace, view, offsets.get(r, 0), (low, high)) for r, view in trace.ranks.items()}
    arrivers = _last_arrivers(trace) if trace.matching.offset_ns is not None else {}
    walk = _Walk(lanes, arrivers, low, rank, high, _launch_after(trace.ranks[rank], offsets.get(rank, 0), high))
    while walk.step():
        pass
    if walk.now > low or sum(part.end_ns - part.start_ns for part in walk.segments) != high - low:
        raise NotAvailable(Reason.PATH_INCOMPLETE, "the path does not reach the start of the step")
    return walk.segments


class _Walk:
    """The walk back along the path: each step moves to an earlier event of a rank, so it ends."""

    def __init__(
        self,
        lanes: Mapping[int, _Lane],
        arrivers: Mapping[tuple[int, int], tuple[int, int, int]],
        low: int,
        rank: int,
        high: int,
        next_launch_ns: int,
    ) -> None:
        self.segments: list[PathSegment] = []
        self.now = high
        self._lanes, self._arrivers, self._low = lanes, arrivers, low
        self._unused = {rank: len(lane.rows) for rank, lane in lanes.items()}
        """Rank -> number of its first events that the path has not passed yet."""
        last = _last_before(lanes[rank], high)  # also if the host is late with the next step: it may have waited for it
        self._go(rank, last, _predecessor(lanes[rank], high, next_launch_ns, len(lanes[rank].rows))[1])

    def _go(self, rank: int, at: int, gap: str) -> None:
        """Continue at the event, or at an earlier one if the path has already passed it; `gap`: cause of the gap."""
        self._rank, self._at, self._gap = rank, min(at, self._unused[rank] - 1), gap

    def step(self) -> bool:
        """Account for the event that the path has reached and for the gap after it; False at the end of the path."""
        lane, at = self._lanes[self._rank], self._at
        end = max(int(lane.end_ns[at]), self._low) if at >= 0 else self._low
        self._spend(self._gap, end)
        if at < 0 or self.now <= self._low:
            return False
        self._unused[self._rank] = at
        peer = self._arrivers.get((self._rank, int(lane.rows[at])))
        if peer is not None and peer[0] != self._rank:
            entered = max(min(peer[1], self.now), self._low)
            self._spend_event(lane, at, entered)
            lane = self._lanes[peer[0]]
            self._go(peer[0], *_predecessor(lane, entered, _launch_of(lane, peer[2]), len(lane.rows)))
        else:
            start = min(max(int(lane.start_ns[at]), self._low), self.now)
            self._spend_event(lane, at, start)
            self._go(self._rank, *_predecessor(lane, start, int(lane.launch_ns[at]), at))
        return self.now > self._low

    def _spend(self, part: str, start_ns: int) -> None:
        """Account for the time back to `start_ns`; nothing if the path is already there."""
        if start_ns < self.now:
            self.segments.append(PathSegment(self._rank, part, start_ns, self.now))
            self.now = start_ns

    def _spend_event(self, lane: _Lane, at: int, start_ns: int) -> None:
        """Account for an event; a collective ends with its transfer, before which it waits."""
        kind, transfer = int(lane.kind[at]), int(lane.transfer_ns[at])
        if kind != Kind.COMM:
            self._spend("compute" if kind == Kind.COMPUTE else "memcpy", start_ns)
            return
        self._spend("transfer", start_ns if transfer < 0 else max(start_ns, self.now - transfer))
        self._spend("wait", start_ns)


def _pick_window(trace: TraceView, offsets: Mapping[int, int]) -> tuple[int, int, int]:
    """Return the rank with the longest median step, and the start and end of that step on the common clock."""

    def median_ns(rank: int) -> float:
        lengths = trace.ranks[rank].parts.window_ns_W
        return float(np.median(lengths)) if len(lengths) else 0.0

    rank = max(trace.ranks, key=median_ns)
    if not len(trace.ranks[rank].parts.window_ns_W):
        raise NotAvailable(Reason.NO_GPU_EVENTS, "no device event that takes time")
    view = trace.ranks[rank]
    start, end = median_window(view)
    move = view.table.base_ns + offsets.get(rank, 0)
    return rank, start + move, end + move


def _make_lane(trace: TraceView, view: RankView, offset_ns: int, window: tuple[int, int]) -> _Lane:
    """Return the rank's device events that overlap a window of the common clock."""
    table, rows = view.table, view.device_rows
    start_ns = table.ts_ns[rows] + (table.base_ns + offset_ns)
    rows = rows[(start_ns < window[1]) & (start_ns + table.dur_ns[rows] > window[0])]
    rows = rows[np.argsort(table.ts_ns[rows] + table.dur_ns[rows], kind="stable")]
    move = table.base_ns + offset_ns
    launch = table.launch[rows]
    syncs = np.concatenate([table.rows_named(_BLOCKING, Kind.RUNTIME), view.rows(Kind.SYNC)])
    return _Lane(
        rows=rows,
        start_ns=table.ts_ns[rows] + move,
        end_ns=table.ts_ns[rows] + table.dur_ns[rows] + move,
        launch_ns=np.where(launch >= 0, table.ts_ns[launch] + move, -1),
        kind=table.kind[rows].astype(np.int64),
        transfer_ns=trace.matching.transfer_ns_of(view.rank, rows),
        sync_ends_ns=np.sort(table.ts_ns[syncs] + table.dur_ns[syncs] + move),
    )


def _last_before(lane: _Lane, time_ns: int) -> int:
    """Return the index of the device event with the latest end up to that time; -1 if there is none."""
    return int(np.searchsorted(lane.end_ns, time_ns, side="right")) - 1


def _predecessor(lane: _Lane, start_ns: int, launch_ns: int, limit: int) -> tuple[int, str]:
    """Return the device event before `limit` that an event starting at `start_ns` had to wait for, and the part
    (`PATH_PARTS`) of the time between them.
    """
    before = min(_last_before(lane, start_ns + CLOCK_SLACK_NS), limit - 1)  # an event of duration 0 ends as it starts
    ended_ns = int(lane.end_ns[before]) if before >= 0 else None
    if launch_ns < 0:
        return before, "idle"
    if ended_ns is not None and (launch_ns <= ended_ns or start_ns - ended_ns <= CLOCK_SLACK_NS):
        return before, "launch" if start_ns - ended_ns < LAUNCH_GAP_NS else "idle"
    synced = int(np.searchsorted(lane.sync_ends_ns, launch_ns, side="right")) - 1
    return (min(_last_before(lane, int(lane.sync_ends_ns[synced])), before) if synced >= 0 else -1), "host"


def _launch_after(view: RankView, offset_ns: int, time_ns: int) -> int:
    """Return the start of the launch of the first device event from that time on; -1 without one or its record."""
    table, move = view.table, view.table.base_ns + offset_ns
    at = int(np.searchsorted(table.ts_ns[view.device_rows], time_ns - move, side="left"))
    launch = int(table.launch[view.device_rows[at]]) if at < len(view.device_rows) else -1
    return int(table.ts_ns[launch]) + move if launch >= 0 else -1


def _launch_of(lane: _Lane, row: int) -> int:
    found = np.flatnonzero(lane.rows == row)
    return int(lane.launch_ns[found[0]]) if len(found) else -1


def _last_arrivers(trace: TraceView) -> dict[tuple[int, int], tuple[int, int, int]]:
    """Return (rank, row of a collective) -> (last arriver, its start on the common clock, its row)."""
    offsets = trace.matching.offset_ns or {}
    found: dict[tuple[int, int], tuple[int, int, int]] = {}
    for group in trace.matching.groups:
        starts = group.on_one_clock(offsets)
        last_K = starts.argmax(axis=0)
        for k, last in enumerate(last_K.tolist()):
            arrival = (group.ranks[last], int(starts[last, k]), int(group.rows_RK[last, k]))
            for i, rank in enumerate(group.ranks):
                found[rank, int(group.rows_RK[i, k])] = arrival
    return found
