"""What passes between the search and whoever proposes: the view, the proposal, and the protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from cclsearch.card.model import Card
from cclsearch.core.values import Config
from cclsearch.propose.observations import Observation as Observation
from cclsearch.propose.observations import observed_rows
from cclsearch.space.table import Space


@dataclass(frozen=True)
class ProposerEvent:
    """Something a proposer did that the ledger should keep: an arbiter's move, an LLM turn, rows held back."""

    topic: str
    text: str
    data: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)


@dataclass(frozen=True)
class SearchView:
    """Everything a proposer may know when asked. A new value each time; it holds no state of its own."""

    card: Card
    space: Space
    observations: Sequence[Observation]
    """Finished trials, in order of their numbers."""
    pending: frozenset[int]
    """Rows that run now."""
    budget_left: int
    """Trials that may still be started, this batch included."""
    seed: int
    objective: str = "step_time"
    prior: tuple[Observation, ...] = ()
    """Observations of earlier runs on the same cluster and framework (`--learn-from`)."""
    remarks: tuple[ProposerEvent, ...] = ()
    """What proposers remarked so far in this search, from the ledger: state is rebuilt from it after a kill."""
    next_trial: int = 0
    """Number that the next trial will get; 0 where nobody counts."""
    held_back: frozenset[int] = frozenset()
    """Rows that are not launched: they cannot fit, or the infrastructure failed them in this session."""
    overruled: frozenset[int] = frozenset()
    """Rows that an LLM chose against the surrogate's advice: how they end is evidence, but not the surrogate's risk."""

    @property
    def closed(self) -> frozenset[int]:
        """Rows that may not be proposed, beside those that were observed."""
        return self.pending | self.held_back

    @cached_property
    def taken_N(self) -> NDArray[np.bool_]:
        """(N,) whether each row of the space was observed, runs, or is held back: not to be proposed. Read-only."""
        taken_N = np.zeros(len(self.space), dtype=bool)
        taken_N[observed_rows(self.observations)] = True
        taken_N[list(self.closed)] = True
        taken_N.setflags(write=False)
        return taken_N


@dataclass(frozen=True)
class ExpectedOutcome:
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
    expects: ExpectedOutcome = ExpectedOutcome()
    turn: int | None = None
    """LLM turn that it came from."""


class Proposer(Protocol):
    """Proposes up to `count` new members of the space; fewer, or none, where it has no more to say.

    It must not propose a row that was observed, is pending or held back. The same view and seed give the same ones.
    """

    name: str

    def propose(self, view: SearchView, count: int) -> Sequence[Proposal]: ...


@runtime_checkable
class EventSource(Protocol):
    """What a proposer with a story adds (the arbiter does): remarks for the ledger, and a wish to end early."""

    def take_events(self) -> Sequence[ProposerEvent]:
        """Remarks since the last call, oldest first; the search writes them to the ledger."""
        ...

    def ending(self) -> str | None:
        """Why the search should end with budget left; None to go on. Asked after a `propose` that gave nothing."""
        ...


@runtime_checkable
class Closable(Protocol):
    """A proposer that has work under way in the background (the arbiter may)."""

    def close(self) -> None:
        """The search's session ends: leave the last remarks to `take_events`, and wait a few seconds at most."""
        ...
