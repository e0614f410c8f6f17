"""Builds the graph of the dependencies between events of one step that a trace shows.

An event may depend on: the event before on the same stream or thread; an event of another stream that ended as this one
began; the host's launch, which moves with the event that the host had waited for; the running event that issued it; the
other ranks of a matched collective.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cclsearch.trace.events import Kind
from cclsearch.trace.intervals import Int64s
from cclsearch.trace.view import RankView, TraceView

Bools = npt.NDArray[np.bool_]

_SYNCHRONIZES = re.compile("Synchronize")
GPU_SLACK_NS = 20_000
# CPU threads wake slowly.
CPU_SLACK_NS = 1_000_000
"""Time after another lane's event ended within which an event counts as having waited for it."""


@dataclass(frozen=True)
class RankGraph:
    """Events of one rank in its window, sorted by start, on the common clock; index columns have -1 for none."""

    rank: int
    rows: Int64s
    start_ns: Int64s
    end_ns: Int64s
    kind: Int64s
    before: Int64s
    """The event before on the same lane."""
    keeps_gap: Bools
    """Whether the gap to that event is a fixed cost (launching, interpreting), which scenarios do not change."""
    waited: Int64s
    """The event of another lane that this one waited for."""
    issuer: Int64s
    """The event of another lane during which this one was issued."""
    producer: Int64s
    """For a collective: the event whose result it sends, by launch order; without launch records, a guess: the last
    event of another lane that had ended."""
    launch_ns: Int64s
    """Time of the host's launch; -1 if unknown."""
    host_after: Int64s
    """The event that the host last waited for before that launch."""
    is_host_bound: Bools
    """Whether only the host delayed its start, not the device."""
    transfer_ns: Int64s
    """Transfer part of a collective; its whole duration if it is not matched; 0 for other events."""
    is_matched: Bools
    window_ns: int


def build_graph(trace: TraceView, view: RankView, window: tuple[int, int], offset_ns: int) -> RankGraph:
    """Return the graph of one rank over a window of its own clock."""
    table = view.table
    rows = view.device_rows
    start = table.ts_ns[rows]
    rows = rows[(start >= window[0]) & (start < window[1])]
    rows = rows[np.argsort(table.ts_ns[rows], kind="stable")]
    move = table.base_ns + offset_ns
    start, end = table.ts_ns[rows] + move, table.ts_ns[rows] + table.dur_ns[rows] + move
    on_cpu = table.accelerator == "cpu"
    lane = table.stream[rows].astype(np.int64) + (table.device[rows].astype(np.int64) << 32)
    before = _event_before(lane, start, end)
    waited, issuer = _find_waits(lane, start, end, before, on_cpu=on_cpu)
    launch = table.launch[rows]
    launch_ns = np.where(launch >= 0, table.ts_ns[launch] + move, -1)
    free_ns = np.maximum(
        np.where(before >= 0, end[before], np.iinfo(np.int64).min),
        np.where(waited >= 0, end[waited], np.iinfo(np.int64).min),
    )
    queued = (launch_ns >= 0) & (launch_ns <= free_ns)
    released = (before >= 0) & (waited < 0)
    transfer, matched = _transfers(trace, view, rows)
    return RankGraph(
        rank=view.rank,
        rows=rows,
        start_ns=start,
        end_ns=end,
        kind=table.kind[rows].astype(np.int64),
        before=before,
        keeps_gap=released & (on_cpu | queued),
        waited=waited,
        issuer=issuer if on_cpu else np.full(len(rows), -1, dtype=np.int64),
        producer=_find_producers(lane, start, end, launch_ns, table.kind[rows] == Kind.COMM),
        launch_ns=launch_ns,
        host_after=_host_waits(view, launch_ns, end, move),
        is_host_bound=~queued & (waited < 0) & (not on_cpu),
        transfer_ns=transfer,
        is_matched=matched,
        window_ns=window[1] - window[0],
    )


def _latest(events: Int64s, time_ns: Int64s, until_ns: Int64s) -> Int64s:
    """Return, for each limit, the event among these whose time is the last one up to it; -1 if there is none."""
    order = events[np.argsort(time_ns[events], kind="stable")]
    found = np.searchsorted(time_ns[order], until_ns, side="right") - 1
    return np.where(found >= 0, order[np.maximum(found, 0)], -1) if len(order) else found


def _event_before(lane: Int64s, start: Int64s, end: Int64s) -> Int64s:
    """Return, for each event, the last event on the same lane that ended before it began.

    Events of duration 0 end as they begin: of events with equal ends, an earlier one comes first.
    """
    before = np.full(len(lane), -1, dtype=np.int64)
    for one in np.unique(lane):
        at = np.flatnonzero(lane == one)
        order = at[np.argsort(end[at], kind="stable")]
        place = np.searchsorted(end[order], start[order], side="right")
        place = np.minimum(place, np.arange(len(order))) - 1
        before[order] = np.where(place >= 0, order[np.maximum(place, 0)], -1)
    return before


def _find_waits(lane: Int64s, start: Int64s, end: Int64s, before: Int64s, *, on_cpu: bool) -> tuple[Int64s, Int64s]:
    """Return, for each event, one of another lane that ended just before it began; else one running as it began.

    Threads interpret a program between their operators, so on CPUs an event that ended in the later half of a thread's
    gap counts too (the backward pass on its own thread, then the optimizer).
    """
    n, slack_ns = len(lane), CPU_SLACK_NS if on_cpu else GPU_SLACK_NS
    waited, issuer = np.full(n, -1, dtype=np.int64), np.full(n, -1, dtype=np.int64)
    free = np.where(before >= 0, end[before], int(start.min()) - 1 if n else 0)
    reach = np.maximum(slack_ns, (start - free) // 2) if on_cpu else np.full(n, slack_ns)
    for one in np.unique(lane):
        here = lane == one
        others = np.flatnonzero(~here)
        if not len(others):
            continue
        at = np.flatnonzero(here)
        peer = _latest(others, end, start[at])
        ended = (peer >= 0) & (peer < at) & (end[peer] > free[at]) & (start[at] - end[peer] <= reach[at])
        waited[at[ended]] = peer[ended]
        peer = _latest(others, start, start[at])
        running = (peer >= 0) & (end[peer] > start[at]) & ~ended & (start[at] - free[at] > slack_ns)
        issuer[at[running]] = peer[running]
    return waited, issuer


def _find_producers(lane: Int64s, start: Int64s, end: Int64s, launch_ns: Int64s, is_comm: Bools) -> Int64s:
    """Return, for each collective, the last work that the host launched before it on another stream.

    Communication libraries make their stream wait for the work on the caller's stream at the time of the call.
    """
    producer = np.full(len(lane), -1, dtype=np.int64)
    work, comm = np.flatnonzero(~is_comm), np.flatnonzero(is_comm)
    launched, ended = _latest(work, launch_ns, launch_ns[comm]), _latest(work, end, start[comm])
    found = np.where(launch_ns[comm] >= 0, launched, ended)
    waits = (found >= 0) & (found < comm) & (end[found] <= start[comm]) & (lane[found] != lane[comm])
    producer[comm[waits]] = found[waits]
    return producer


def _host_waits(view: RankView, launch_ns: Int64s, end: Int64s, move: int) -> Int64s:
    """Return the device event that the host's last synchronization before each launch waited for."""
    table = view.table
    syncs = np.concatenate([table.rows_named(_SYNCHRONIZES, Kind.RUNTIME), view.rows(Kind.SYNC)])
    if not len(syncs) or not len(end):
        return np.full(len(launch_ns), -1, dtype=np.int64)
    sync_end = np.sort(table.ts_ns[syncs] + table.dur_ns[syncs] + move)
    last = np.searchsorted(sync_end, launch_ns, side="right") - 1
    seen = _latest(np.arange(len(end)), end, sync_end[np.maximum(last, 0)])
    return np.where((last >= 0) & (launch_ns >= 0), seen, -1)


def _transfers(trace: TraceView, view: RankView, rows: Int64s) -> tuple[Int64s, Bools]:
    table = view.table
    is_comm = table.kind[rows] == Kind.COMM
    transfer = trace.matching.transfer_ns_of(view.rank, rows)
    matched = is_comm & (transfer >= 0)
    duration = np.where(is_comm, table.dur_ns[rows], 0)
    return np.where(matched, np.minimum(transfer, duration), duration), matched
