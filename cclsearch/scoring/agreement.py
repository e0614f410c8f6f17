"""Which trials of one search agree: trials of equal work must measure equal values, whatever their configuration.

A task reads the values from a trial's result (training: the loss of each step; serving: the answers) and says how far
two trials deviate. Trials that agree form a group; a trial outside the group that is taken for right did other work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

MIN_MAJORITY = 3
"""Trials that agree before others are refused because of them."""
MAX_REFERENCES = 3
"""Reference trials that decide between groups; if these do not decide, nothing does."""


@dataclass(frozen=True)
class Deviation:
    """How far two trials deviate, and the position of the values that show it."""

    size: float = 0.0
    index: int = 0
    note: str = ""
    """What was compared and what else differs, after the trials' names in a sentence."""


def find_largest(mine: Sequence[float], others: Sequence[float]) -> Deviation:
    """The largest relative deviation over the positions that both have: |a - b| / max(|a|, |b|)."""
    largest = Deviation()
    for index, (a, b) in enumerate(zip(mine, others, strict=False)):
        size = abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0
        if size > largest.size:
            largest = Deviation(size, index)
    return largest


Measure = Callable[[Sequence[float], Sequence[float]], Deviation]
"""How far the values of two trials deviate."""


class Agreement(Protocol):
    """What a task compares between the trials of one search."""

    rule: str
    """Name of the admission rule."""
    values: str
    """What the values are, for sentences: `losses`."""
    deviation: str
    """What the size of a deviation is, for sentences: `relative deviation`."""
    tolerated: frozenset[str]
    """Rules whose violation does not question what the trial did: it is compared nevertheless."""

    def read(self, payload: Any, result: Any) -> tuple[float, ...]:
        """The finite values that trials of equal work have in common, in order; empty if there are none."""

    def kind(self, payload: Any) -> str:
        """Trials are compared only with those of the same kind (training: the precision)."""

    def bound(self, framework: Any, kind: str) -> float | None:
        """The largest deviation between trials that did the same; None if there is none."""

    def measure(self, framework: Any, kind: str) -> Measure:
        """How deviations are measured."""

    def find_missing(self, framework: Any, payload: Any, num_values: int) -> str:
        """Why a trial with so many values cannot be compared although it must be; empty if it can or need not."""

    def explain(self, framework: Any, payload: Any) -> str:
        """Why the framework declares no bound, in one phrase."""

    def describe_value(self, payload: Any, index: int, value: float) -> str:
        """One value with its place in words: `6.9801 at step 3`."""


@dataclass(frozen=True)
class Vote:
    """The values of one trial."""

    trial: int
    values: tuple[float, ...]
    is_reference: bool = False
    measure: Measure = find_largest

    def deviate(self, other: Vote) -> Deviation:
        """How far it deviates from another trial."""
        return self.measure(self.values, other.values)


@dataclass
class Group:
    """Trials that agree with the first of them."""

    votes: list[Vote]

    @property
    def first(self) -> Vote:
        return self.votes[0]

    @property
    def trials(self) -> list[int]:
        return [vote.trial for vote in self.votes]

    @property
    def num_references(self) -> int:
        return sum(vote.is_reference for vote in self.votes)


@dataclass
class Ballot:
    """The groups of one kind of trials, in the order in which their first members finished."""

    bound: float
    groups: list[Group] = field(default_factory=list)

    @staticmethod
    def of(votes: Sequence[Vote], bound: float) -> Ballot:
        """Return the groups of these trials."""
        ballot = Ballot(bound)
        for vote in votes:
            ballot.add(vote)
        return ballot

    def add(self, vote: Vote) -> None:
        """Add a trial to the first group that it agrees with, or as a group of its own."""
        group = self.find(vote)
        if group is None:
            self.groups.append(Group([vote]))
        else:
            group.votes.append(vote)

    def find(self, vote: Vote) -> Group | None:
        """The first group with whose first trial these values agree."""
        return next((group for group in self.groups if vote.deviate(group.first).size <= self.bound), None)

    def __contains__(self, trial: int) -> bool:
        return trial in self.trials

    @property
    def trials(self) -> list[int]:
        """Numbers of all its trials, group by group."""
        return [number for group in self.groups for number in group.trials]

    def with_vote(self, vote: Vote) -> Ballot:
        """Return a copy with one more trial."""
        ballot = Ballot(self.bound, [Group(list(group.votes)) for group in self.groups])
        ballot.add(vote)
        return ballot

    @property
    def largest(self) -> Group | None:
        """The group that has more trials than each other group; None if the largest groups are equal."""
        sizes = sorted((len(group.votes) for group in self.groups), reverse=True)
        if not sizes or sizes[1:2] == sizes[:1]:
            return None
        return next(group for group in self.groups if len(group.votes) == sizes[0])

    @property
    def num_references(self) -> int:
        return sum(group.num_references for group in self.groups)

    def find_right(self, *, is_last: bool = False) -> Group | None:
        """The group that is taken for right; None if that is not decided.

        Without a disagreement it is the only group. Otherwise it is the group of at least `MIN_MAJORITY` trials that
        has more than half of all, if reference trials do not contradict it: the strategy that proposed the trials
        prefers what a cheat makes fast, while references are chosen without regard to speed. Once no reference will
        follow (`is_last`), it is the group with at least two and more than half of the references.
        """
        if len(self.groups) == 1:
            return self.groups[0]
        major, total = self.largest, sum(len(group.votes) for group in self.groups)
        most = max((group.num_references for group in self.groups), default=0)
        is_major = major is not None and len(major.votes) >= MIN_MAJORITY and 2 * len(major.votes) > total
        if major is not None and is_major and major.num_references == most and (most > 0 or is_last):
            return major
        if not is_last:
            return None
        return next(
            (g for g in self.groups if g.num_references >= 2 and 2 * g.num_references > self.num_references), None
        )

    def needs_reference(self) -> bool:
        """Whether trials disagree, and a reference trial may decide."""
        return len(self.groups) > 1 and self.num_references < MAX_REFERENCES and self.find_right() is None
