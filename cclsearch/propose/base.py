"""What passes between the search and whoever proposes: the view, the proposal, and the protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from cclsearch.card.model import Card
from cclsearch.space.table import Space
from cclsearch.values import Config, Failure


@dataclass(frozen=True)
class Observation:
    """One finished run of one configuration, as a proposer sees it."""

    trial: int
    config: Config
    row: int | None
    """Row of the space; None for a run outside it (an earlier run's, a baseline)."""
    loss: float | None
    """What the objective minimises (finite, positive for `step_time`); None where it failed or was not admitted."""
    step_time_s: float | None = None
    peak_memory_gib: float | None = None
    """Largest over the ranks."""
    failure: Failure | None = None
    """None where the trial is scored. Infrastructure failures are never shown to a proposer."""
    spread: float | None = None
    """Relative spread of the step times inside the run."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further metrics by name (for an objective over several)."""
    is_confirmation: bool = False


@dataclass(frozen=True)
class Remark:
    """Something a proposer did that the ledger should keep: an arbiter's move, an LLM turn, rows held back."""

    topic: str
    text: str
    data: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)


@dataclass(frozen=True)
class SearchView:
    """Everything a proposer may know when asked. A new value each time; it holds no state of its own."""

    card: Card
    space: Space
    observations: tuple[Observation, ...]
    pending: frozenset[int]
    """Rows that run now."""
    budget_left: int
    """Trials that may still be started, this batch included."""
    seed: int
    objective: str = "step_time"
    prior: tuple[Observation, ...] = ()
    """Observations of earlier runs on the same cluster and framework (`--learn-from`)."""
    remarks: tuple[Remark, ...] = ()
    """What proposers remarked so far in this search, from the ledger: state is rebuilt from it after a kill."""
    next_trial: int = 0
    """Number that the next trial will get; 0 where nobody counts."""
    held_back: frozenset[int] = frozenset()
    """Rows that are not launched: they cannot fit, or the infrastructure failed them in this session."""

    @property
    def closed(self) -> frozenset[int]:
        """Rows that may not be proposed, beside those that were observed."""
        return self.pending | self.held_back


@dataclass(frozen=True)
class Expectation:
    """What a proposer thinks a trial will show; compared with what was measured."""

    step_time_s: float | None = None
    peak_memory_gib: float | None = None
    fits: float | None = None
    """Probability that it fits into memory, 0 to 1."""


@dataclass(frozen=True)
class Proposal:
    """A member of the space that should run next."""

    config: Config
    proposer: str
    """`default`, `random`, `llm`, `policy`, `seed`, ..."""
    rationale: str = ""
    expects: Expectation = Expectation()
    turn: int | None = None
    """LLM turn that it came from."""


class Proposer(Protocol):
    """Proposes up to `count` new members of the space; fewer, or none, where it has no more to say.

    It must not propose a row that was observed, is pending or held back. The same view and seed give the same ones.
    """

    name: str

    def propose(self, view: SearchView, count: int) -> Sequence[Proposal]: ...


@runtime_checkable
class Narrator(Protocol):
    """What a proposer with a story adds (the arbiter does): remarks for the ledger, and a wish to end early."""

    def take_remarks(self) -> Sequence[Remark]:
        """Remarks since the last call, oldest first; the search writes them to the ledger."""
        ...

    def ending(self) -> str | None:
        """Why the search should end with budget left; None to go on. Asked after a `propose` that gave nothing."""
        ...


@runtime_checkable
class Closer(Protocol):
    """A proposer that has work under way in the background (the arbiter may)."""

    def close(self) -> None:
        """The search's session ends: leave the last remarks to `take_remarks`, and wait a few seconds at most."""
        ...
