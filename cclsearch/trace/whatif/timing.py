"""Time a step whose events have other durations: its events are tasks that wait for each other (`network/engine.py`).

A collective of several ranks begins with the arrival of each rank, and its data moves once all have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cclsearch.network.engine import Wait, Work, simulate
from cclsearch.trace.events import Kind
from cclsearch.trace.matching import Matching
from cclsearch.trace.whatif.graph import RankGraph

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
