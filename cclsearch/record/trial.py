"""One trial, folded from its events in the ledger."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cclsearch.core.text import count_of
from cclsearch.core.values import BootMoment, Config, FailureKind
from cclsearch.launch.base import Handle
from cclsearch.launch.contract import TimedWindow
from cclsearch.propose.events import ExpectedOutcome
from cclsearch.record.event import (
    PAID,
    Event,
    Purpose,
    TrialFinished,
    TrialProposed,
    TrialRetried,
    TrialRevised,
    TrialSubmitted,
    TrialSubmitting,
    TrialWindow,
)
from cclsearch.scoring.outcome import Outcome


@dataclass(frozen=True)
class Trial:
    """One trial of a search."""

    number: int
    config: Config
    proposer: str
    rationale: str
    expects: ExpectedOutcome
    purpose: Purpose
    turn: int | None
    proposed_s: float
    attempt: int = 0
    """Number of started attempts."""
    nonce: str = ""
    """Random text of the last attempt that was started; empty if nothing is measured."""
    stop_above: float | None = None
    """Primary metric's value above which the last attempt may end early; None if it may not."""
    opens_window: bool = False
    """Whether the search answers the last attempt when it opens its timed window."""
    timed: tuple[TimedWindow, ...] = ()
    """The windows that the last attempt opened."""
    recomputes: int | None = None
    """Trial whose timed window it computes again, with its nonce."""
    submitting: BootMoment | None = None
    """Moment of the last attempt's submission; None before the first."""
    handle: Handle | None = None
    """Handle of the running attempt; None before the launcher accepted it and after its end."""
    attempt_s: float | None = None
    """Submission of the running attempt, in seconds since the epoch; None if none runs."""
    spans: tuple[tuple[float, float], ...] = ()
    """Submission and end of each ended attempt, in seconds since the epoch."""
    retries: tuple[TrialRetried, ...] = ()
    """Earlier attempts that were retried."""
    outcome: Outcome | None = None
    finished_s: float | None = None
    result_sha256: str | None = None
    revisions: tuple[TrialRevised, ...] = ()
    """Later evaluations with another verdict; the last one has the present `outcome`."""

    @property
    def is_finished(self) -> bool:
        return self.outcome is not None

    @property
    def costs_budget(self) -> bool:
        """Whether it costs budget: the search proposed it, and it is not an infrastructure failure."""
        if self.purpose not in PAID:
            return False
        failure = self.outcome.failure if self.outcome else None
        return not failure or failure.kind.counts

    @property
    def num_counted_retries(self) -> int:
        """Retries that count as attempts: not those after a stop of the search or the end of an allocation."""
        return sum(retry.kind.counts_as_attempt for retry in self.retries)

    @property
    def reason(self) -> str:
        """Return why it failed or was not admitted; empty if it is ranked or has no outcome."""
        if self.outcome is None or self.loss is not None:
            return ""
        if self.outcome.failure is not None:
            return self.outcome.failure.message
        return "; ".join(self.outcome.admission.reasons) if self.outcome.admission else ""

    @property
    def remarks(self) -> tuple[str, ...]:
        """Return the reasons of retries and revisions, one line each."""
        return (*(retry.reason for retry in self.retries), *(f"revised: {event.text}" for event in self.revisions))

    @property
    def loss(self) -> float | None:
        """The loss used for ranking; None if it is not ranked."""
        return self.outcome.loss if self.outcome and self.outcome.is_ranked else None


def fold_trial(events: Iterable[Event]) -> Trial:
    """Fold the events of a trial, which begin with its proposal; other kinds of events are ignored."""
    trial: Trial | None = None
    for event in events:
        trial = fold_event(trial, event)
    if trial is None:
        raise ValueError("a trial's events begin with its proposal")
    return trial


def fold_event(trial: Trial | None, event: Event) -> Trial | None:
    """Return the trial after its next event; None before its proposal."""
    if not isinstance(event, TrialProposed):
        return None if trial is None else _apply(trial, event)
    return Trial(
        number=event.trial,
        config=event.config,
        proposer=event.proposer,
        rationale=event.rationale,
        expects=event.expects,
        purpose=event.purpose,
        turn=event.turn,
        proposed_s=event.time_s,
        recomputes=event.recomputes,
    )


def _apply(trial: Trial, event: Event) -> Trial:
    match event:
        case TrialSubmitting():
            return _change(
                trial,
                attempt=event.attempt,
                nonce=event.nonce,
                stop_above=event.stop_above,
                opens_window=event.opens_window,
                timed=(),
                submitting=event.moment,
                attempt_s=event.time_s,
                handle=None,
            )
        case TrialWindow():
            return _change(trial, timed=(*trial.timed, event.window))
        case TrialSubmitted():
            return _change(trial, attempt=event.attempt, handle=event.handle)
        case TrialRetried():
            return _change(_end_attempt(trial, event.time_s), handle=None, retries=(*trial.retries, event))
        case TrialFinished():
            return _change(
                _end_attempt(trial, event.time_s),
                attempt=event.attempt,
                handle=None,
                outcome=event.outcome,
                finished_s=event.time_s,
                result_sha256=event.result_sha256,
            )
        case TrialRevised():
            finished_s = event.time_s if trial.finished_s is None else trial.finished_s
            revisions = (*trial.revisions, event)
            return _change(trial, handle=None, outcome=event.outcome, finished_s=finished_s, revisions=revisions)
        case _:
            return trial


def _change(trial: Trial, **changes: Any) -> Trial:
    """As `dataclasses.replace`, in a fifth of the time: a ledger has as many changes as lines."""
    changed = object.__new__(Trial)
    changed.__dict__.update(trial.__dict__, **changes)
    return changed


def _end_attempt(trial: Trial, end_s: float) -> Trial:
    if trial.attempt_s is None:
        return trial
    return _change(trial, attempt_s=None, spans=(*trial.spans, (trial.attempt_s, max(end_s, trial.attempt_s))))


class TrialState(StrEnum):
    """State of a trial: it still runs, or it ended in one of these ways. A trial of any purpose has exactly one."""

    ADMITTED = "admitted"
    FAILED = "failed"
    """It failed for another reason."""
    REFUSED = "not admitted"
    """It ran, and an admission rule or a constraint refused it, perhaps later."""
    PRUNED = "ended early"
    """Its first measurements showed that it is slower than the best one beyond doubt."""
    LOST = "lost to infrastructure"
    UNJUDGED = "could not be judged"
    UNFINISHED = "unfinished"
    """It runs, or runs again when the search is continued."""


def find_state(outcome: Outcome | None) -> TrialState:
    """The state of a trial by its latest evaluation; None has no outcome."""
    if outcome is None:
        return TrialState.UNFINISHED
    if outcome.failure is None and outcome.is_pruned:
        return TrialState.PRUNED
    if outcome.failure is None:
        return TrialState.ADMITTED if outcome.is_ranked else TrialState.REFUSED
    if outcome.failure.kind is FailureKind.JUDGING_ERROR:
        return TrialState.UNJUDGED
    return TrialState.FAILED if outcome.failure.kind.counts else TrialState.LOST


def describe_counts(counts: Mapping[TrialState, int]) -> str:
    """The counts in words: `8 of 12 trials admitted (2 failed, 1 not admitted, 1 unfinished)`."""
    total, num_admitted = sum(counts.values()), counts.get(TrialState.ADMITTED, 0)
    others = [f"{counts[s]} {s}" for s in TrialState if s is not TrialState.ADMITTED and counts.get(s)]
    admitted = f"{num_admitted} of {count_of(total, 'trial')} admitted"
    return f"{admitted} ({', '.join(others)})" if others else admitted
