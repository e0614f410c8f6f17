"""The critical path of one step, followed back from its last device event along what each event waited for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cclsearch.trace.diagnosis.causes import median_window
from cclsearch.trace.events import Kind
from cclsearch.trace.intervals import Int64s
from cclsearch.trace.view import RankView, TraceView

PATH_PARTS = ("host", "compute", "transfer", "wait", "memcpy")
"""What the time of a path is spent on."""
LAUNCH_SLACK_NS = 20_000
"""A launched event that starts within this time after another one ends counts as having waited for it."""
MAX_SEGMENTS = 2_000_000
_BLOCKING = frozenset({"cudaMemcpy", "hipMemcpy", "cudaMemcpyFromSymbol", "hipMemcpyWithStream"})
"""Runtime calls that wait for the device, besides those with `Synchronize` in their names."""


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


def walk_critical_path(trace: TraceView) -> dict[str, int]:
    """Return the ns of the path by activity, over the median step of the rank with the longest one.

    Going back from an event: if another device event of the rank ended just before it started and its launch was
    already issued, it waited for that event (stream order, or an event between streams); else the host was late, and
    the path follows the host to the last synchronization, which waited for the device. In a matched collective the
    transfer is the shortest duration over ranks; the rest is waiting, and the path continues at the last arriver.
    """
    offsets = trace.matching.offset_ns or {}
    rank, low, high = _pick_window(trace, offsets)
    lanes = {r: _make_lane(trace, view, offsets.get(r, 0), (low, high)) for r, view in trace.ranks.items()}
    arrivers = _last_arrivers(trace) if trace.matching.offset_ns is not None else {}
    spent = dict.fromkeys(PATH_PARTS, 0)
    lane, at, now = lanes[rank], _last_before(lanes[rank], high), high
    for _ in range(MAX_SEGMENTS):
        if at < 0 or now <= low:
            break
        spent["host"] += max(now - max(int(lane.end_ns[at]), low), 0)
        now = min(now, int(lane.end_ns[at]))
        if now <= low:
            break
        start = max(int(lane.start_ns[at]), low)
        peer = arrivers.get((rank, int(lane.rows[at])))
        if peer is not None and peer[0] != rank:
            entered = max(min(peer[1], now), low)
            _spend(spent, lane, at, now - entered)
            rank, now = peer[0], entered
            lane = lanes[rank]
            at = _predecessor(lane, now, _launch_of(lane, peer[2]))
            continue
        _spend(spent, lane, at, now - start)
        now = start
        at = _predecessor(lane, now, int(lane.launch_ns[at]))
    else:
        return spent
    spent["host"] += max(now - low, 0) if at < 0 else 0
    return spent


def _pick_window(trace: TraceView, offsets: Mapping[int, int]) -> tuple[int, int, int]:
    """Return the rank with the longest median step, and the start and end of that step on the common clock."""

    def median_ns(rank: int) -> float:
        lengths = trace.ranks[rank].parts.window_ns_W
        return float(np.median(lengths)) if len(lengths) else 0.0

    rank = max(trace.ranks, key=median_ns)
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
    waits = np.array(["Synchronize" in name or name in _BLOCKING for name in table.names] or [False])
    runtime = view.rows(Kind.RUNTIME)
    syncs = np.concatenate([runtime[waits[table.name_id[runtime]]], view.rows(Kind.SYNC)])
    transfer = trace.matching.transfer_ns.get(view.rank)
    return _Lane(
        rows=rows,
        start_ns=table.ts_ns[rows] + move,
        end_ns=table.ts_ns[rows] + table.dur_ns[rows] + move,
        launch_ns=np.where(launch >= 0, table.ts_ns[launch] + move, -1),
        kind=table.kind[rows].astype(np.int64),
        transfer_ns=transfer[rows] if transfer is not None else np.full(len(rows), -1, dtype=np.int64),
        sync_ends_ns=np.sort(table.ts_ns[syncs] + table.dur_ns[syncs] + move),
    )


def _last_before(lane: _Lane, time_ns: int) -> int:
    """Return the index of the device event with the latest end up to that time; -1 if there is none."""
    return int(np.searchsorted(lane.end_ns, time_ns, side="right")) - 1


def _predecessor(lane: _Lane, start_ns: int, launch_ns: int) -> int:
    """Return the device event that an event starting at `start_ns` had to wait for."""
    before = _last_before(lane, start_ns)
    if before < 0 or launch_ns < 0:
        return before
    waited_for_device = launch_ns <= lane.end_ns[before] or start_ns - lane.end_ns[before] <= LAUNCH_SLACK_NS // 4
    if waited_for_device:
        return before
    synced = int(np.searchsorted(lane.sync_ends_ns, launch_ns, side="right")) - 1
    if synced < 0:
        return -1
    return _last_before(lane, int(lane.sync_ends_ns[synced]))


def _launch_of(lane: _Lane, row: int) -> int:
    found = np.flatnonzero(lane.rows == row)
    return int(lane.launch_ns[found[0]]) if len(found) else -1


def _spend(spent: dict[str, int], lane: _Lane, at: int, ns: int) -> None:
    kind = int(lane.kind[at])
    if kind == Kind.COMM:
        transfer = int(lane.transfer_ns[at])
        moved = min(ns, transfer) if transfer >= 0 else ns
        spent["transfer"] += moved
        spent["wait"] += ns - moved
    elif kind == Kind.COMPUTE:
        spent["compute"] += ns
    else:
        spent["memcpy"] += ns


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
