"""The interface between the search and a proposer: its context, its view, and its proposals."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, ClassVar, Protocol, Self, cast

import numpy as np
from numpy.typing import NDArray

from cclsearch.card.model import Card
from cclsearch.card.task import TASKS
from cclsearch.core.errors import TrialError
from cclsearch.core.metrics import Direction, MetricInfo
from cclsearch.core.registry import Registry
from cclsearch.core.values import Config, Value
from cclsearch.propose.agent.providers.types import Provider
from cclsearch.propose.events import Correction
from cclsearch.propose.events import ExpectedOutcome as ExpectedOutcome
from cclsearch.propose.events import Note as Note
from cclsearch.propose.events import ProposerEvent as ProposerEvent
from cclsearch.propose.events import ReportedEvent as ReportedEvent
from cclsearch.propose.observations import Observation as Observation
from cclsearch.propose.observations import closed_rows
from cclsearch.propose.warm_start.apply import apply_earlier
from cclsearch.propose.warm_start.knowledge import EarlierKnowledge
from cclsearch.scoring.objective import Objective, single_metric
from cclsearch.space.table import Space, mask_rows
from cclsearch.stats.closed_form import Predictor, predictor_of


class DescribedTask(Protocol):
    """The part of `cclsearch.tasks.base.Task` that describes a workload to an LLM; see there."""

    tuned: str
    agent_metrics: tuple[str, ...]
    agent_names: Mapping[str, str]
    unit_of_work: str

    def describe_primary(self) -> str: ...
    def describe_for_agent(self, card: Card) -> list[str]: ...
    def agent_columns(self, card: Card, space: Space) -> Mapping[str, Sequence[float]]: ...
    def policy_inputs(self, card: Card) -> dict[str, Value]: ...
    def seed_policy(self, card: Card) -> str | None: ...


@dataclass(frozen=True)
class SearchView:
    """Everything a proposer may know when it proposes: an immutable value, built anew for each call."""

    card: Card
    space: Space
    observations: Sequence[Observation]
    """Finished trials, sorted by trial number."""
    pending: frozenset[int]
    """Rows of the unfinished trials: proposed, queued or running."""
    budget_left: int
    """Trials that may still be started, this batch included."""
    seed: int
    target: Objective | None = None
    """Goal of the search; None: the primary metric of the card's task."""
    prior: tuple[Observation, ...] = ()
    """Observations of earlier runs on the same cluster and framework (`--learn-from`)."""
    events: tuple[ReportedEvent, ...] = ()
    """LLM turns, moves, notes so far, from the ledger: proposers rebuild their state from these after a kill."""
    pending_trials: tuple[tuple[int, int], ...] = ()
    """Number and row of each pending trial, by number; empty if the caller does not number trials."""
    next_trial: int = 0
    """Number of the next trial; 0 if the caller does not number trials."""
    held_back: Set[int] = frozenset()
    """Rows that must not be launched: they cannot fit, or failed for infrastructure reasons in this session."""
    earlier: EarlierKnowledge | None = None
    """Knowledge of earlier searches on the same cluster with the same framework, also of other models."""
    can_repeat: bool = False
    """Whether a measured configuration may be proposed again (`Proposal.is_repeat`); False without noise between runs.
    """
    ends_without_chance: bool = False
    """Whether the surrogate ends the search once no untried configuration is likely to win (`--stop-early`)."""
    llm_rows: frozenset[int] = frozenset()
    """Rows that an LLM chose: observed, but not counted in the failure penalty of the surrogate."""

    supposed: tuple[Correction, ...] = ()
    """Corrections of the prediction that are taken as certain, for the question what would follow from them."""

    @cached_property
    def objective(self) -> Objective:
        """Return the goal of the search."""
        return self.target or single_metric(self.primary)

    @property
    def task(self) -> DescribedTask:
        """The card's task."""
        return cast(DescribedTask, TASKS.get(self.card.task))

    @cached_property
    def primary(self) -> MetricInfo:
        """The primary metric of the card's task."""
        return TASKS.get(self.card.task).primary_metric

    @property
    def predictor(self) -> Predictor:
        """Return the task's prediction of the card over the space, with the priors of earlier searches."""
        return apply_earlier(predictor_of(self.card, self.space), self.space, self.earlier)

    @cached_property
    def is_primary(self) -> bool:
        """Whether the loss is the primary metric itself."""
        term = self.objective.terms[0]
        is_plain = len(self.objective.terms) == 1 and term.weight is None and term.scale == 1.0
        return is_plain and term.metric == self.primary.name and term.direction is Direction.MINIMIZE

    def find_loss(self, observation: Observation) -> float | None:
        """Return the loss, also of a trial that violates a constraint; None if it has none, or none yet."""
        if observation.loss is not None or not observation.is_valid:
            return observation.loss
        try:
            return self.objective.loss(observation.metrics)
        except (TrialError, ValueError):  # a metric is missing, or a reference is the baseline trial's
            return None

    def is_closed(self, row: int | None) -> bool:
        """Whether a row is running or held back."""
        return row in self.pending or row in self.held_back

    @cached_property
    def taken_N(self) -> NDArray[np.bool_]:
        """(N,) whether the proposer must not propose the row: observed, running or held back. Read-only."""
        taken_N = np.zeros(len(self.space), dtype=bool)
        taken_N[closed_rows(self.observations)] = True
        taken_N[list(self.pending)] = True
        taken_N |= mask_rows(self.held_back, len(self.space))
        taken_N.setflags(write=False)
        return taken_N


@dataclass(frozen=True)
class Proposal:
    """A configuration that should run next."""

    config: Config
    proposer: str
    """`default`, `random`, `llm`, `policy`, `seed`, ..."""
    rationale: str = ""
    expects: ExpectedOutcome = field(default_factory=ExpectedOutcome)
    turn: int | None = None
    """Number of the LLM turn that proposed it."""
    is_repeat: bool = False
    """Whether it measures a configuration with a result once more, on purpose; only if `SearchView.can_repeat`."""


class ProposerRole(StrEnum):
    """Way in which a user chooses a registered proposer."""

    SAMPLER = "sampler"
    """By `--sampler`: it proposes alone, and replaces an LLM that does not decide."""
    STRATEGY = "strategy"
    """By `--strategy`, in a search with `--llm`: it decides when the LLM proposes and when the sampler does."""
    PART = "part"
    """Not at all: the engine chooses it."""


@dataclass(frozen=True)
class LlmContext:
    """The LLM of a search with `--llm`."""

    missing_key: str | None
    """The environment variable of the key if that is not set: the LLM cannot be asked, and the sampler proposes."""
    make_provider: Callable[[], Provider]
    """Makes the provider alone, for prompts of your own; UserError if the key is missing."""
    make_agent: Callable[[], Any]
    """Makes the engine's agent, a `cclsearch.propose.agent.agent.Agent`, which has tools, prompts and limits."""


def _make_no_sampler() -> Proposer:
    raise ValueError("this context has no sampler: it was made outside a search")


@dataclass(frozen=True)
class ProposerContext:
    """Input of the factory of a search's proposer; samplers seldom need any of it."""

    make_sampler: Callable[[], Proposer] = _make_no_sampler
    """Makes the proposer that `--sampler` names."""
    parallel: int = 1
    """Trials that run at a time."""
    is_stopped: Callable[[], bool] = lambda: False
    """Whether the user asked to stop: long work ends soon after."""
    llm: LlmContext | None = None
    """None in a search without `--llm`."""


class Proposer(ABC):
    """Proposes configurations to measure. A package adds one by subclassing this and registering the class:

        @PROPOSERS.register("mine")
        class MyProposer(Proposer):
            name = "mine"

            def propose(self, view, count):
                rows = (~view.taken_N).nonzero()[0][:count]
                return [Proposal(view.space.config(int(row)), self.name) for row in rows]

    Its life, in one session of a search; a search that is resumed begins again with step 1 and the same ledger:

    1. `from_context` makes it, once, before anything runs.
    2. `propose` is called whenever trials may start, with a view of everything so far, until the budget is spent.
       Proposals of the view's taken rows, or outside the space, are refused and recorded.
    3. `take_events` is called after each `propose`; the ledger gets the events, and later views contain them.
    4. `ending` is called only if `propose` returned nothing: its text ends the search.
    5. `close` is called at the end of the session, also after Ctrl-C but not after a kill; then `take_events` again.

    A proposer keeps no state that a kill could lose: all that matters is in the view (`observations`, `events`). The
    same view (which includes the seed) must give the same proposals.
    """

    name: str
    """Name of the proposer in the ledger and in tables."""
    role: ClassVar[ProposerRole] = ProposerRole.SAMPLER

    @classmethod
    def from_context(cls, context: ProposerContext) -> Self:
        """Return the proposer of a search; UserError if something that it needs is missing."""
        return cls()

    @abstractmethod
    def propose(self, view: SearchView, count: int) -> Sequence[Proposal]:
        """Return up to `count` configurations that are not taken; fewer, or none, if there are no more to propose."""

    def take_events(self) -> Sequence[ProposerEvent]:
        """Return the events since the last call, oldest first; the search writes them to the ledger."""
        return ()

    def ending(self) -> str | None:
        """Return why to end the search with budget left, or None."""
        return None

    def close(self) -> None:
        """End work in the background within a few seconds, and keep its last events for `take_events`."""
        return


class ProposerFactory(Protocol):
    """A value of `PROPOSERS`: a subclass of `Proposer`, or an object that makes one."""

    @property
    def role(self) -> ProposerRole:
        """Return how a user chooses it."""

    def from_context(self, context: ProposerContext) -> Proposer:
        """Return the proposer of a search; UserError if something that it needs is missing."""


PROPOSERS: Registry[ProposerFactory] = Registry(
    "proposer",
    {
        "default": "cclsearch.propose.bayes.proposer",
        "surrogate": "cclsearch.propose.study.proposer",
        "pareto": "cclsearch.propose.bayes.pareto_proposer",
        **dict.fromkeys(("grid", "heuristic", "random"), "cclsearch.propose.baselines.simple"),
        **dict.fromkeys(("hybrid", "llm"), "cclsearch.propose.agent.arbiter.factory"),
        **dict.fromkeys(
            ("cmaes", "gp", "nsgaii", "nsgaiii", "qmc", "tpe", "tpe-multivariate", "tpe-penalised"),
            "cclsearch.propose.study.choose",
        ),
    },
    needs=("from_context", "role"),
)
"""name -> subclass of `Proposer`, or another factory: samplers and strategies with an LLM."""
