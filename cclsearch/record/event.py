"""What the ledger holds: one closed model an event, told apart by `event`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from cclsearch.core.values import Config, Failure, Model
from cclsearch.launch.base import Handle
from cclsearch.propose.base import ExpectedOutcome
from cclsearch.score.outcome import Outcome

LEDGER_VERSION = 1


class Purpose(StrEnum):
    """Why a trial runs."""

    SEARCH = "search"
    CONFIRMATION = "confirmation"
    """A new run of a finalist; counted apart from the budget."""


class SearchStarted(Model):
    """The first line of every ledger."""

    event: Literal["search_started"] = "search_started"
    time_s: float
    """Seconds since the epoch."""
    run_id: str
    ledger_version: int = LEDGER_VERSION
    engine_version: str
    spec_sha256: str
    """Of `search.yaml`, so that a changed input is seen."""


class SearchResumed(Model):
    """The search goes on in another process."""

    event: Literal["search_resumed"] = "search_resumed"
    time_s: float
    engine_version: str
    budget: int
    """Trials in all, as raised by `resume --budget`."""
    confirm: int = 0
    """Finalists to run again, as raised by `resume --confirm`."""


class TrialProposed(Model):
    """A trial was decided on; from here on it exists."""

    event: Literal["trial_proposed"] = "trial_proposed"
    time_s: float
    trial: int
    config: Config
    proposer: str
    rationale: str = ""
    expects: ExpectedOutcome = ExpectedOutcome()
    turn: int | None = None
    purpose: Purpose = Purpose.SEARCH


class TrialSubmitting(Model):
    """Written before the launcher is asked: after a kill, this attempt is looked for by name."""

    event: Literal["trial_submitting"] = "trial_submitting"
    time_s: float
    trial: int
    attempt: int


class TrialSubmitted(Model):
    """The launcher took the job; `handle` finds it again."""

    event: Literal["trial_submitted"] = "trial_submitted"
    time_s: float
    trial: int
    attempt: int
    handle: Handle


class TrialRepeated(Model):
    """An attempt that says nothing of the configuration; the trial goes again and costs no budget."""

    event: Literal["trial_repeated"] = "trial_repeated"
    time_s: float
    trial: int
    attempt: int
    reason: str
    failure: Failure | None = None
    """None where the run itself was sound but disturbed."""


class TrialFinished(Model):
    """The trial's end, judged: nothing changes it any more."""

    event: Literal["trial_finished"] = "trial_finished"
    time_s: float
    trial: int
    attempt: int
    outcome: Outcome
    result_sha256: str | None = None
    """Of `result.json` as judged, so that a later edit is seen."""


class Note(Model):
    """Something that people, `status` and the report should know: arbiter moves, LLM turns, what was held back."""

    event: Literal["note"] = "note"
    time_s: float
    topic: str
    text: str
    data: dict[str, str | int | float | bool | None] = {}


class SearchStopped(Model):
    """Stopped before its end (Ctrl-C, a deadline): `resume` goes on."""

    event: Literal["search_stopped"] = "search_stopped"
    time_s: float
    reason: str


class SearchEnded(Model):
    """The search came to its end."""

    event: Literal["search_ended"] = "search_ended"
    time_s: float
    reason: str
    best_trial: int | None


Event = Annotated[
    SearchStarted
    | SearchResumed
    | TrialProposed
    | TrialSubmitting
    | TrialSubmitted
    | TrialRepeated
    | TrialFinished
    | Note
    | SearchStopped
    | SearchEnded,
    Field(discriminator="event"),
]

EVENT: TypeAdapter[Event] = TypeAdapter(Event, config=ConfigDict(cache_strings="keys"))
