"""The dependencies between the events of one step that a trace shows, and the step's time with other durations.

An event may depend on: the event before on the same stream or thread; an event of another stream that ended as this one
began; the host's launch, which moves with the event that the host had waited for; the running event that issued it; the
other ranks of a matched collective. In `network/engine.py` the events are tasks that wait for each other; a collective
of several ranks begins with the arrival of each rank, and its data moves once all have arrived.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cclsearch.network.engine import Wait, Work, simulate
from cclsearch.trace.events import Kind
from cclsearch.trace.intervals import Int64s
from cclsearch.trace.matching import Matching
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


Floats = npt.NDArray[np.float64]
NO_LINKS = np.zeros(0)
Event = tuple[int, int]
"""Number of a graph, and of an event in it."""


@dataclass(frozen=True)
class Moving:
    """The data of a collective, or of one rank's part of it, which moves once all `awaited` members have arrived."""

    awaited: Sequence[Event]
    ending: Sequence[Event]
    """Members that end when it has moved."""
    arrived_ns: int
    """Measured arrival of the last member."""


class StepTimer:
    """The events of a step as tasks, to be timed with any durations."""

    def __init__(self, graphs: Sequence[RankGraph], matching: Matching, *, apart: bool, best: bool = True) -> None:
        """`apart`: each rank has a part of a collective, which ends by itself; else all of its ranks end together.

        If not `best`, events also wait for what they may depend on.
        """
        self._graphs = graphs
        self._offsets: list[int] = np.cumsum([0, *(len(graph.rows) for graph in graphs)]).tolist()
        self._end_task = np.arange(self._offsets[-1])
        self.moving = _find_moving(graphs, matching, apart=apart)
        self._awaited = [tuple(Wait(self._number(each)) for each in data.awaited) for data in self.moving]
        for task, data in enumerate(self.moving, self._offsets[-1]):
            self._end_task[[self._number(each) for each in data.ending]] = task
        self._first_ns = min((int(graph.start_ns.min()) for graph in graphs if len(graph.rows)), default=0)
        self._waits: list[tuple[Wait, ...]] = []
        self._earliest_s: list[float] = []
        for graph, offset in zip(graphs, self._offsets, strict=False):
            for i in range(len(graph.rows)):
                found, release_ns = _dependencies(graph, i, best=best)
                tasks = (offset + j if starts else int(self._end_task[offset + j]) for j, _, starts in found)
                waits = (Wait(task, delay_s, starts) for task, (_, delay_s, starts) in zip(tasks, found, strict=True))
                self._waits.append(tuple(waits))
                self._earliest_s.append(0.0 if release_ns is None else (release_ns - self._first_ns) / 1e9)

    def _number(self, event: Event) -> int:
        return self._offsets[event[0]] + event[1]

    def time(self, seconds: Sequence[Floats], moves: Sequence[Work], capacity_L: Floats = NO_LINKS) -> float:
        """Return the seconds of the step, the longest over ranks, if every event begins as early as it can.

        `seconds` are the lengths of the events, not used for collectives; `moves` are the tasks of `moving`.
        """
        length_E = np.concatenate([*seconds, np.zeros(0)])
        length_E[self._end_task >= len(length_E)] = 0.0
        events = zip(length_E.tolist(), self._waits, self._earliest_s, strict=True)
        tasks = [Work(length, waits=waits, earliest_s=earliest_s) for length, waits, earliest_s in events]
        tasks += [replace(task, waits=waits) for task, waits in zip(moves, self._awaited, strict=True)]
        end_s = simulate(tasks, capacity_L).end_s[self._end_task]
        lengths = [0.0]
        for graph, start, stop in zip(self._graphs, self._offsets, self._offsets[1:], strict=False):
            changed_s = 0.0
            if stop > start:
                changed_s = float(end_s[start:stop].max()) - (int(graph.end_ns.max()) - self._first_ns) / 1e9
            lengths.append(graph.window_ns / 1e9 + changed_s)
        return max(lengths)


def _dependencies(graph: RankGraph, i: int, *, best: bool) -> tuple[list[tuple[int, float, bool]], int | None]:
    """Return (event, delay, after its start) for each predecessor of an event, and its earliest possible start."""
    measured, end_ns = int(graph.start_ns[i]), graph.end_ns
    found: list[tuple[int, float, bool]] = []
    before, waited, issuer = int(graph.before[i]), int(graph.waited[i]), int(graph.issuer[i])
    producer, launched, after = int(graph.producer[i]), int(graph.launch_ns[i]), int(graph.host_after[i])
    release: int | None = None
    if before >= 0:
        gap = measured - int(end_ns[before]) if graph.keeps_gap[i] and issuer < 0 else 0
        found.append((before, gap / 1e9, False))
    if waited >= 0:
        found.append((waited, (measured - int(end_ns[waited])) / 1e9, False))
    if 0 <= issuer < i:  # of two that begin at the same time, each may seem to have issued the other
        found.append((issuer, (measured - int(graph.start_ns[issuer])) / 1e9, True))
    if producer >= 0 and (launched >= 0 or not best):
        found.append((producer, 0.0, False))
    if launched >= 0:
        begins = measured if graph.is_host_bound[i] else launched
        if after >= 0 and end_ns[after] <= measured:
            found.append((after, max(begins - int(end_ns[after]), 0) / 1e9, False))
        else:
            release = begins
    elif graph.is_host_bound[i]:
        if best and before >= 0:
            found.append((before, (measured - int(end_ns[before])) / 1e9, False))
        else:
            release = measured
    return found, release if found or release is not None else measured


def _find_moving(graphs: Sequence[RankGraph], matching: Matching, *, apart: bool) -> list[Moving]:
    """Return the collectives of these graphs, whole if all of their members are known."""
    # A send that ended before its receiver arrived does not wait.
    index = {(graph.rank, row): (g, i) for g, graph in enumerate(graphs) for i, row in enumerate(graph.rows.tolist())}
    alone = {(g, int(i)) for g, graph in enumerate(graphs) for i in np.flatnonzero(graph.kind == Kind.COMM)}
    found = []
    for group in (*matching.groups, *matching.pairs) if len(graphs) > 1 else ():
        for rows_R in group.rows_RK.T.tolist():
            members = [index.get((rank, row)) for rank, row in zip(group.ranks, rows_R, strict=True)]
            known = [each for each in members if each is not None and graphs[each[0]].is_matched[each[1]]]
            if len(known) == len(members):
                arrived_ns = max(int(graphs[g].start_ns[i]) for g, i in known)
                ending = [(g, i) for g, i in known if graphs[g].end_ns[i] >= arrived_ns]
                found += [
                    Moving(known, each, arrived_ns) for each in (([one] for one in ending) if apart else [ending])
                ]
                alone.difference_update(ending)
    return found + [Moving([(g, i)], [(g, i)], int(graphs[g].start_ns[i])) for g, i in sorted(alone)]
