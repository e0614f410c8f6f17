"""What the ledger says now: a fold over its events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from cclsearch.launch.base import Handle
from cclsearch.propose.base import Expectation
from cclsearch.record.event import (
    Event,
    Note,
    Purpose,
    SearchEnded,
    SearchResumed,
    SearchStarted,
    SearchStopped,
    TrialFinished,
    TrialProposed,
    TrialRepeated,
    TrialSubmitted,
    TrialSubmitting,
)
from cclsearch.score.outcome import Outcome
from cclsearch.values import Config


@dataclass(frozen=True)
class Trial:
    """One trial as the ledger knows it."""

    number: int
    config: Config
    proposer: str
    rationale: str
    expects: Expectation
    purpose: Purpose
    turn: int | None
    proposed_s: float
    attempt: int = 0
    """Attempts that were begun."""
    handle: Handle | None = None
    """Of the attempt that runs now; None before the launcher answered and after the end."""
    repeats: tuple[str, ...] = ()
    """Why earlier attempts did not count."""
    outcome: Outcome | None = None
    finished_s: float | None = None
    result_sha256: str | None = None

    @property
    def is_finished(self) -> bool:
        return self.outcome is not None

    @property
    def costs_budget(self) -> bool:
        """Whether it counts against the budget: searched, and no fault of the infrastructure."""
        if self.purpose is not Purpose.SEARCH:
            return False
        failure = self.outcome.failure if self.outcome else None
        return not (failure and failure.kind.is_infrastructure)

    @property
    def loss(self) -> float | None:
        """The loss by which it ranks; None where it does not."""
        return self.outcome.loss if self.outcome and self.outcome.is_ranked else None


@dataclass
class RunState:
    """A search, folded from its events; changed by `apply` alone. What is asked often is kept, not searched for."""

    run_id: str = ""
    spec_sha256: str = ""
    started_s: float = 0.0
    budget_raised_to: int = 0
    confirm_raised_to: int = 0
    trials: dict[int, Trial] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    stopped: SearchStopped | None = None
    ended: SearchEnded | None = None
    last_s: float = 0.0
    num_spent: int = 0
    """Trials that count against the budget, running ones included."""
    num_lost_in_a_row: int = 0
    """Trials that the infrastructure failed, since one ended otherwise."""
    _open: dict[int, None] = field(default_factory=dict)
    _runs_of: dict[Config, list[int]] = field(default_factory=dict)

    def apply(self, event: Event) -> None:
        """Take one more event in."""
        self.last_s = max(self.last_s, event.time_s)
        match event:
            case SearchStarted():
                self.run_id, self.spec_sha256, self.started_s = event.run_id, event.spec_sha256, event.time_s
            case SearchResumed():
                self.stopped = self.ended = None
                self.budget_raised_to = event.budget
                self.confirm_raised_to = event.confirm
                self.num_lost_in_a_row = 0
            case TrialProposed():
                self._propose(event)
            case TrialSubmitting():
                self._change(event.trial, attempt=event.attempt, handle=None)
            case TrialSubmitted():
                self._change(event.trial, attempt=event.attempt, handle=event.handle)
            case TrialRepeated():
                repeats = (*self.trials[event.trial].repeats, event.reason)
                self._change(event.trial, handle=None, repeats=repeats)
            case TrialFinished():
                self._finish(event)
            case Note():
                self.notes.append(event)
            case SearchStopped():
                self.stopped = event
            case SearchEnded():
                self.ended = event

    @property
    def unfinished(self) -> list[Trial]:
        """Trials that were proposed and have no outcome, oldest first."""
        return [self.trials[number] for number in self._open]

    @property
    def best(self) -> Trial | None:
        """The first ranked trial of the configuration whose runs have the lowest mean loss; None where none ranks."""
        winner = min(self._runs_of.values(), key=self._mean_loss, default=None)
        return self.trials[winner[0]] if winner else None

    def runs_of(self, config: Config) -> list[Trial]:
        """Ranked runs of one configuration, confirmations included, in the order in which they finished."""
        return [self.trials[number] for number in self._runs_of.get(config, ())]

    def _mean_loss(self, numbers: list[int]) -> float:
        losses = [self.trials[number].loss or 0.0 for number in numbers]
        return sum(losses) / len(losses)

    def _propose(self, event: TrialProposed) -> None:
        trial = _open_trial(event)
        self.trials[trial.number] = trial
        self._open[trial.number] = None
        self.num_spent += trial.costs_budget

    def _finish(self, event: TrialFinished) -> None:
        was_counted = self.trials[event.trial].costs_budget
        self._change(
            event.trial,
            attempt=event.attempt,
            handle=None,
            outcome=event.outcome,
            finished_s=event.time_s,
            result_sha256=event.result_sha256,
        )
        trial = self.trials[event.trial]
        self._open.pop(event.trial, None)
        self.num_spent += trial.costs_budget - was_counted
        lost = bool(event.outcome.failure and event.outcome.failure.kind.is_infrastructure)
        self.num_lost_in_a_row = self.num_lost_in_a_row + 1 if lost else 0
        if trial.loss is not None:
            self._runs_of.setdefault(trial.config, []).append(trial.number)

    def _change(self, number: int, **fields: object) -> None:
        self.trials[number] = replace(self.trials[number], **fields)  # type: ignore[arg-type]


def _open_trial(event: TrialProposed) -> Trial:
    return Trial(
        number=event.trial,
        config=event.config,
        proposer=event.proposer,
        rationale=event.rationale,
        expects=event.expects,
        purpose=event.purpose,
        turn=event.turn,
        proposed_s=event.time_s,
    )


def fold_events(events: Iterable[Event]) -> RunState:
    """The state after these events."""
    state = RunState()
    for event in events:
        state.apply(event)
    return state


def collect_losses(state: RunState) -> dict[Config, list[float]]:
    """Configuration -> losses of its ranked runs."""
    losses: dict[Config, list[float]] = {}
    for trial in state.trials.values():
        if trial.loss is not None:
            losses.setdefault(trial.config, []).append(trial.loss)
    return losses
