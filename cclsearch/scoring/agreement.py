"""Group the trials of one search by agreement: trials of equal work must measure equal values, in any configuration.

A task reads the values from a trial's result (training: the loss of each step; serving: the answers) and measures the
deviation of two trials. Trials that agree form a group; a trial outside the right group did other work.
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
    """Deviation of two trials, and the position of the values that show it."""

    size: float = 0.0
    index: int = 0
    note: str = ""
    """Compared values and other differences, for a sentence after the trials' names."""


def find_largest(mine: Sequence[float], others: Sequence[float]) -> Deviation:
    """The largest relative deviation over the positions that both have: |a - b| / max(|a|, |b|)."""
    largest = Deviation()
    for index, (a, b) in enumerate(zip(mine, others, strict=False)):
        size = abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0
        if size > largest.size:
            largest = Deviation(size, index)
    return largest


Measure = Callable[[Sequence[float], Sequence[float]], Deviation]
"""Measures the deviation between the values of two trials."""


class Agreement(Protocol):
    """A task's comparison of the trials of one search."""

    rule: str
    """Name of the admission rule."""
    values: str
    """Name of the values in sentences: `losses`."""
    deviation: str
    """Name of a deviation's size in sentences: `relative deviation`."""
    max_deviation: float
    """Largest deviation that other numerics may cause if the card states none; 0: any."""
    tolerated: frozenset[str]
    """Rules that a compared trial may violate: they do not question what it did."""

    def read(self, payload: Any, result: Any) -> tuple[float, ...]:
        """The finite values that trials of equal work have in common, in order; empty if there are none."""

    def kind(self, payload: Any) -> str:
        """Return the kind of a trial (training: the precision); only trials of one kind are compared."""

    def count_known(self, payload: Any) -> int:
        """Return how many of the first values do not depend on the nonce of the trial's timed window."""

    def bound(self, framework: Any, kind: str) -> float | None:
        """The largest deviation between trials that did the same; None if there is none."""

    def measure(self, framework: Any, kind: str) -> Measure:
        """Return the measure of deviations."""

    def find_missing(self, framework: Any, payload: Any, num_values: int) -> str:
        """Return why a trial with so many values cannot be compared although it must be; else empty."""

    def explain(self, framework: Any, payload: Any) -> str:
        """Return why the framework declares no bound, in one phrase."""

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
        """Return its deviation from another trial."""
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
        """Return the first group whose first trial agrees with these values."""
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
        """The group that did the card's work; None if undecided.

        Without a disagreement it is the only group. Otherwise it is the group of at least `MIN_MAJORITY` trials that
        has more than half of all, if reference trials do not contradict it. Once no reference will follow (`is_last`),
        it is the group with at least two and more than half of the references.
        """
        # References are chosen without regard to speed; the strategy's own trials prefer configurations that a cheat
        # makes fast.
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
