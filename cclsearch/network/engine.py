"""Times a step on a simulated network: tasks wait for each other, and collectives that overlap share links.

One rank that represents all needs one set of tasks; the stages of a pipeline, or the ranks of a trace, are several.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cclsearch.core.errors import UserError
from cclsearch.network.collectives import Schedule, Segment
from cclsearch.network.topology import Array, share_classes


@dataclass(frozen=True)
class Wait:
    """A task may begin `delay_s` after the end of another, or after its beginning."""

    task: int
    delay_s: float = 0.0
    after_start: bool = False


@dataclass(frozen=True)
class Work:
    """A task: computation of fixed length, or a collective."""

    seconds: float = 0.0
    """Seconds of computation; for a collective, the time besides its schedule."""
    schedule: Schedule | None = None
    stretch: float = 1.0
    """Factor on the schedule's seconds on links, such as measured over simulated time of the measured system."""
    waits: tuple[Wait, ...] = ()
    earliest_s: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """Start and end of each task, in the order of the tasks."""

    start_s: Array
    end_s: Array

    @property
    def seconds(self) -> float:
        """Seconds until the last task ended."""
        return float(self.end_s.max(initial=0.0))


@dataclass(eq=False)
class _Transfer:
    """A running collective: its segment, and the repetitions that are left of it."""

    task: int
    segments: tuple[Segment, ...]
    stretch: float
    at: int = 0
    left: float = 0.0
    """Repetitions left of the segment; 0 while `extra_s` runs."""
    each_s: float = math.inf
    """Seconds of a repetition at the present rates."""

    @property
    def segment(self) -> Segment:
        return self.segments[self.at]

    def repetition_s(self, slowdown: float) -> float:
        """Return seconds of a repetition; a part that does not depend on links (coding) is not stretched."""
        one = self.segment
        return one.latency_s * self.stretch + max(one.alone_s * slowdown * self.stretch, one.floor_s)


@dataclass(eq=False)
class _Sharing:
    """Computes the slowdown of segments whose links others use; each combination of patterns once."""

    capacity_L: Array
    slowdowns: dict[tuple[int, ...], list[float]] = field(default_factory=dict)
    meet: dict[tuple[int, int], bool] = field(default_factory=dict)

    def slowdowns_of(self, segments: Sequence[Segment]) -> list[float]:
        """Return the factor by which each transfer is slower than alone."""
        order = sorted(range(len(segments)), key=lambda i: segments[i].pattern)
        key = tuple(segments[i].pattern for i in order)
        if key not in self.slowdowns:
            self.slowdowns[key] = self._compute([segments[i] for i in order])
        found = dict(zip(order, self.slowdowns[key], strict=True))
        return [found[number] for number in range(len(segments))]

    def shares_links(self, a: Segment, b: Segment) -> bool:
        """Whether any link carries flows of both."""
        key = (a.pattern, b.pattern)
        if key not in self.meet:
            self.meet[key] = bool(np.intersect1d(a.links, b.links, assume_unique=True).size)
        return self.meet[key]

    def _compute(self, segments: list[Segment]) -> list[float]:
        links = np.unique(np.concatenate([segment.links for segment in segments]))
        capacity = self.capacity_L[links]
        flows = np.zeros((len(segments), len(links)))
        for row, segment in zip(flows, segments, strict=True):
            row[np.searchsorted(links, segment.links)] = segment.flows
        shared = share_classes(flows, capacity)
        alone = np.array([share_classes(flows[c : c + 1], capacity)[0] for c in range(len(segments))])
        slower = np.divide(alone, shared, out=np.ones(len(segments)), where=np.isfinite(shared))
        return [float(each) for each in slower]


def simulate(tasks: Sequence[Work], capacity_L: Array) -> Timeline:
    """Return when each task runs; UserError if tasks wait for each other in a circle."""
    return _Run(tasks, capacity_L).finish()


class _Run:
    """One simulation: an event loop over the ends of computation and of segments."""

    def __init__(self, tasks: Sequence[Work], capacity_L: Array) -> None:
        self.tasks = tasks
        self.sharing = _Sharing(capacity_L)
        count = len(tasks)
        self.start, self.end = np.full(count, np.nan), np.full(count, np.nan)
        self.ready = np.array([task.earliest_s for task in tasks], dtype=np.float64)
        self.missing = np.zeros(count, dtype=np.int64)
        self.after_end: list[list[tuple[int, float]]] = [[] for _ in tasks]
        self.after_start: list[list[tuple[int, float]]] = [[] for _ in tasks]
        for number, task in enumerate(tasks):
            self.missing[number] = len(task.waits)
            for wait in task.waits:
                followers = self.after_start if wait.after_start else self.after_end
                followers[wait.task].append((number, wait.delay_s))
        self.queue: list[tuple[float, int, int]] = []  # (time, 0: a task ends, 1: a task begins, task)
        self.transfers: list[_Transfer] = []
        self.now = 0.0
        self.open = count

    def finish(self) -> Timeline:
        for number in np.flatnonzero(self.missing == 0).tolist():
            heapq.heappush(self.queue, (float(self.ready[number]), 1, number))
        while self.queue or self.transfers:
            ahead = min((one.left * one.each_s for one in self.transfers), default=math.inf)
            at_queue = self.queue[0][0] if self.queue else math.inf
            if at_queue <= self.now + ahead:
                self._advance(at_queue)
                _, what, number = heapq.heappop(self.queue)
                self._begin(number) if what else self._complete(number)
            else:
                self._advance(self.now + ahead)
                self._end_segments()
        if self.open:
            stuck = ", ".join(map(str, np.flatnonzero(np.isnan(self.end))[:3]))
            raise UserError(f"{self.open} tasks wait for each other in a circle, among them {stuck}")
        return Timeline(self.start, self.end)

    def _advance(self, to: float) -> None:
        passed = to - self.now
        if passed > 0:
            for one in self.transfers:
                one.left -= passed / one.each_s
        self.now = max(to, self.now)

    def _release(self, followers: list[tuple[int, float]]) -> None:
        for number, delay_s in followers:
            self.ready[number] = max(self.ready[number], self.now + delay_s)
            self.missing[number] -= 1
            if self.missing[number] == 0:
                heapq.heappush(self.queue, (max(float(self.ready[number]), self.now), 1, number))

    def _begin(self, number: int) -> None:
        task = self.tasks[number]
        self.start[number] = self.now
        self._release(self.after_start[number])
        schedule = task.schedule
        segments = () if schedule is None else tuple(one for one in schedule.segments if one.seconds > 0)
        extra_s = task.seconds + (schedule.extra_s if schedule is not None else 0.0)
        if not segments:
            heapq.heappush(self.queue, (self.now + extra_s, 0, number))
            return
        one = _Transfer(number, segments, task.stretch, at=-1, left=1.0, each_s=extra_s)
        self.transfers.append(one)
        if extra_s <= 0:
            self._next_segment(one)
            self._share()

    def _next_segment(self, one: _Transfer) -> None:
        one.at += 1
        one.left = one.segment.repeats if one.at < len(one.segments) else 0.0

    def _end_segments(self) -> None:
        """Move on the transfers whose segment has ended now."""
        for one in [one for one in self.transfers if one.left * one.each_s <= 1e-12 * max(self.now, 1e-6)]:
            self._next_segment(one)
            if one.at == len(one.segments):
                self.transfers.remove(one)
                self._complete(one.task)
        self._share()

    def _share(self) -> None:
        """Compute the rates of all transfers; those that share no links do not slow each other down."""
        moving = [one for one in self.transfers if one.at >= 0]
        for group in self._connected(moving):
            slowdowns = self.sharing.slowdowns_of([one.segment for one in group])
            for one, slowdown in zip(group, slowdowns, strict=True):
                one.each_s = one.repetition_s(slowdown)

    def _complete(self, number: int) -> None:
        self.end[number] = self.now
        self.open -= 1
        self._release(self.after_end[number])

    def _connected(self, transfers: list[_Transfer]) -> list[list[_Transfer]]:
        """Return the transfers in groups that share links, directly or through others."""
        groups: list[list[_Transfer]] = []
        for one in transfers:
            meets = [any(self.sharing.shares_links(one.segment, other.segment) for other in group) for group in groups]
            joined = [one] + [member for group, met in zip(groups, meets, strict=True) if met for member in group]
            groups = [group for group, met in zip(groups, meets, strict=True) if not met] + [joined]
        return groups
