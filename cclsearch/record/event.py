"""The events of the ledger: one closed model per event, distinguished by `event`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter

from cclsearch.core.values import Config, Failure, Model
from cclsearch.launch.base import Handle
from cclsearch.propose.base import ExpectedOutcome
from cclsearch.score.outcome import Outcome

LEDGER_VERSION = 1


class Purpose(StrEnum):
    """Purpose of a trial."""

    SEARCH = "search"
    CONFIRMATION = "confirmation"
    """A new run of a finalist; does not cost budget."""


class SearchStarted(Model):
    """The first line of every ledger."""

    event: Literal["search_started"] = "search_started"
    time_s: float
    """Seconds since the epoch."""
    run_id: str
    ledger_version: int = LEDGER_VERSION
    engine_version: str
    spec_sha256: str
    """Hash of `search.yaml`, to detect changed inputs."""


class SearchResumed(Model):
    """The search continues in another process."""

    event: Literal["search_resumed"] = "search_resumed"
    time_s: float
    engine_version: str
    budget: int
    """Total number of trials, as raised by `resume --budget`."""
    confirm: int = 0
    """Number of finalists to run again, as raised by `resume --confirm`."""


def _read_expected(data: object) -> object:
    """Ledgers of 0.2.0 and earlier name the expected metrics `step_time_s` and `peak_memory_gib` beside `fits`."""
    if not isinstance(data, dict) or "metrics" in data:
        return data
    metrics = {name: value for name, value in data.items() if name != "fits" and value is not None}
    return {"metrics": metrics, "fits": data.get("fits")}


class TrialProposed(Model):
    """A trial was proposed; it exists from this event on."""

    event: Literal["trial_proposed"] = "trial_proposed"
    time_s: float
    trial: int
    config: Config
    proposer: str
    rationale: str = ""
    expects: Annotated[ExpectedOutcome, BeforeValidator(_read_expected)] = ExpectedOutcome()
    turn: int | None = None
    purpose: Purpose = Purpose.SEARCH


class TrialSubmitting(Model):
    """Written before the job is submitted: after a kill, the job of this attempt is searched for by name."""

    event: Literal["trial_submitting"] = "trial_submitting"
    time_s: float
    trial: int
    attempt: int


class TrialSubmitted(Model):
    """The launcher accepted the job; `handle` identifies it."""

    event: Literal["trial_submitted"] = "trial_submitted"
    time_s: float
    trial: int
    attempt: int
    handle: Handle


class TrialRetried(Model):
    """An attempt failed or was disturbed without a fault of the configuration; the retry costs no budget."""

    event: Literal["trial_repeated"] = "trial_repeated"
    time_s: float
    trial: int
    attempt: int
    reason: str
    failure: Failure | None = None
    """None if the run was valid but disturbed by other processes."""


class TrialFinished(Model):
    """The trial finished and was evaluated; its outcome is final."""

    event: Literal["trial_finished"] = "trial_finished"
    time_s: float
    trial: int
    attempt: int
    outcome: Outcome
    result_sha256: str | None = None
    """Hash of the evaluated `result.json`, to detect later edits."""


class Note(Model):
    """Information for `status` and the report: arbiter moves, LLM turns, configurations held back."""

    event: Literal["note"] = "note"
    time_s: float
    topic: str
    text: str
    data: dict[str, str | int | float | bool | None] = {}


class SearchStopped(Model):
    """The search stopped early (Ctrl-C, a deadline); `resume` continues it."""

    event: Literal["search_stopped"] = "search_stopped"
    time_s: float
    reason: str


class SearchEnded(Model):
    """The search is complete."""

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
    | TrialRetried
    | TrialFinished
    | Note
    | SearchStopped
    | SearchEnded,
    Field(discriminator="event"),
]

EVENT: TypeAdapter[Event] = TypeAdapter(Event, config=ConfigDict(cache_strings="keys"))
