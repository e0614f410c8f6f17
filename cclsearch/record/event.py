"""The events of the ledger: one closed model per event, distinguished by `event`.

A line of the ledger is an event as JSON, with a checksum as its last field.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from cclsearch.core.text import count_of, one_line
from cclsearch.core.values import BootMoment, Config, Failure, Value
from cclsearch.launch.base import Handle
from cclsearch.launch.contract import TimedWindow
from cclsearch.propose.events import (
    ArbiterMove,
    ExpectedOutcome,
    LedgerEvent,
    LlmLimitsSet,
    LlmReport,
    LlmTurn,
    Note,
    ReportedEvent,
)
from cclsearch.scoring.outcome import Outcome
from cclsearch.space.variables import FLAG, VARIABLE, refuse_name, refuse_shape

LEDGER_VERSION = 2

MAX_TRIAL = 10**7
TrialNumber = Annotated[int, Field(ge=1, lt=MAX_TRIAL)]


class Purpose(StrEnum):
    """Purpose of a trial."""

    SEARCH = "search"
    CONFIRMATION = "confirmation"
    """A new run of a finalist; does not cost budget."""
    CONTROL = "control"
    """Repeats the best configuration in another window of the cluster, to compare figures; does not cost budget."""
    BASELINE = "baseline"
    """The configuration that the user compares with (`--baseline`); it runs first and does not cost budget."""
    REPEAT = "repeat"
    """A new run of a measured configuration that the surrogate wants to be sure of; costs budget."""
    REFERENCE = "reference"
    """Decides which of two groups of trials did the card's work; costs no budget."""


PAID = frozenset({Purpose.SEARCH, Purpose.REPEAT})
"""Purposes whose trials cost budget."""


class RetryKind(StrEnum):
    """Reason why an attempt is retried."""

    FAILURE = "failure"
    """The infrastructure failed."""
    DISTURBED = "disturbed"
    """The run was valid, but other processes used its CPUs."""
    CANCELLED = "cancelled"
    """The search was stopped."""
    ALLOCATION_ENDED = "allocation_ended"
    """The trial waits for the next allocation."""

    @property
    def counts_as_attempt(self) -> bool:
        """Whether it uses up one of the trial's attempts."""
        return self in (RetryKind.FAILURE, RetryKind.DISTURBED)


class EndKind(StrEnum):
    """Reason why a search ended or stopped."""

    BUDGET_USED = "budget_used"
    SPACE_EXHAUSTED = "space_exhausted"
    NO_PROPOSAL = "no_proposal"
    PROPOSER_ENDED = "proposer_ended"
    SIGNAL = "signal"
    TIME_LIMIT = "time_limit"
    ALLOCATION_ENDED = "allocation_ended"
    INFRASTRUCTURE_FAILURES = "infrastructure_failures"
    JUDGING_ERRORS = "judging_errors"
    """Several trials in a row could not be judged: an error of ccl-search."""
    SHARED_CAUSE = "shared_cause"
    """Several configurations in a row ended for the same reason, and no trial was admitted."""
    REFUSED = "refused"
    """Something that the user has to fix first, such as a launcher that refuses every job."""
    NODE_HOURS = "node_hours"
    """The next trial would exceed the limit in node-hours, or it is reached."""
    OUTPUT_CLOSED = "output_closed"
    SHARE_USED = "share_used"
    """Its part of a night's limit is used up."""
    OTHER = "other"


class SearchStarted(LedgerEvent):
    """The first line of every ledger."""

    event: Literal["search_started"] = "search_started"
    run_id: str
    ledger_version: int = LEDGER_VERSION
    engine_version: str
    spec_sha256: str
    """Hash of `search.yaml`, to detect changed inputs."""


class SearchResumed(LedgerEvent):
    """The search continues in another process."""

    event: Literal["search_resumed"] = "search_resumed"
    engine_version: str
    budget: int
    """Total number of trials, as raised by `resume --budget`."""
    confirm: int = 0
    """Number of finalists to run again, as raised by `resume --confirm`."""
    keep_going: bool = False
    """Whether trials that end for the same reason no longer end the search (`resume --keep-going`)."""
    stop_early: bool = False
    """Whether the search ends once nothing is likely to win (`resume --stop-early`)."""
    max_node_hours: float | None = None
    """Limit of the search in node-hours (`resume --max-node-hours`); None leaves it as it was."""
    left_trials: tuple[TrialNumber, ...] = ()
    """Trial folders that the ledger does not know and that the search continues without."""


class TrialProposed(LedgerEvent):
    """A trial was proposed; it exists from this event on."""

    event: Literal["trial_proposed"] = "trial_proposed"
    trial: TrialNumber
    config: Config
    proposer: str
    rationale: str = ""
    expects: ExpectedOutcome = ExpectedOutcome()
    turn: int | None = None
    purpose: Purpose = Purpose.SEARCH
    recomputes: TrialNumber | None = None
    """Trial whose timed window a reference computes again, with its nonce."""


class AttemptEvent(LedgerEvent):
    """Base of the events of one attempt at a trial."""

    trial: TrialNumber
    attempt: int


class TrialSubmitting(AttemptEvent):
    """Written before the job is submitted: after a kill, the job of this attempt is searched for by name."""

    event: Literal["trial_submitting"] = "trial_submitting"
    nonce: str = ""
    """The attempt's random text, which its traces must contain; empty if nothing is measured."""
    moment: BootMoment | None = None
    """The same moment by the boot clock, which no clock change affects."""
    stop_above: float | None = None
    """`TrialInput.stop_above` of this attempt."""
    opens_window: bool = False
    """`TrialInput.opens_window` of this attempt."""


class TrialWindow(AttemptEvent):
    """The attempt opened its next timed window and got its nonce."""

    event: Literal["trial_window"] = "trial_window"
    window: TimedWindow


class TrialSubmitted(AttemptEvent):
    """The launcher accepted the job; `handle` identifies it."""

    event: Literal["trial_submitted"] = "trial_submitted"
    handle: Handle


class TrialRetried(AttemptEvent):
    """An attempt failed or was disturbed without a fault of the configuration; the retry costs no budget."""

    event: Literal["trial_retried"] = "trial_retried"
    kind: RetryKind
    reason: str
    failure: Failure | None = None
    """None if the attempt was disturbed or cancelled."""


class TrialFinished(AttemptEvent):
    """The trial finished and was evaluated."""

    event: Literal["trial_finished"] = "trial_finished"
    outcome: Outcome
    result_sha256: str | None = None
    """Hash of the evaluated `result.json`, to detect later edits."""


class TrialRevised(ReportedEvent):
    """A finished trial was evaluated again with another verdict; from here on, it is ranked by this outcome."""

    event: Literal["trial_revised"] = "trial_revised"
    trial: TrialNumber
    outcome: Outcome


class ConfigsHeldBack(ReportedEvent):
    """Configurations that are never launched, because they almost certainly do not fit into memory."""

    event: Literal["held_back"] = "held_back"
    num_configs: int


class ProposalRefused(ReportedEvent):
    """A proposal that was not launched."""

    event: Literal["refused"] = "refused"
    proposer: str
    config: Config


class SpaceGrown(ReportedEvent):
    """Choices were added to the search space."""

    event: Literal["space_grown"] = "space_grown"
    choices: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,79}$")], tuple[Value, ...]]
    """Each knob that has grown since the search began -> all of its choices."""
    neutral: dict[str, Value] = {}
    """Each knob that was added since then -> the value that trials without it had."""
    bases: tuple[Config, ...] = ()
    """Configurations near which the framework's levers vary."""
    space_sha256: str
    """Hash of the grown space."""
    space_size: int
    """Its number of configurations."""

    @field_validator("choices")
    @classmethod
    def _check_choices(cls, choices: dict[str, tuple[Value, ...]]) -> dict[str, tuple[Value, ...]]:
        for name, values in choices.items():
            opened = name.startswith((VARIABLE, FLAG))
            why = refuse_name(name.removeprefix(VARIABLE).removeprefix(FLAG)) if opened else ""
            why = why or next((text for value in values if (text := refuse_shape(value))), "")
            if why:
                raise ValueError(f"knob {name!r} may not be added: {why}")
        return choices


class SearchStopped(LedgerEvent):
    """The search stopped early (Ctrl-C, a deadline); `resume` continues it."""

    event: Literal["search_stopped"] = "search_stopped"
    kind: EndKind
    reason: str


class SearchEnded(LedgerEvent):
    """The search is complete."""

    event: Literal["search_ended"] = "search_ended"
    kind: EndKind
    reason: str
    best_trial: int | None = None


Event = Annotated[
    SearchStarted
    | SearchResumed
    | TrialProposed
    | TrialSubmitting
    | TrialWindow
    | TrialSubmitted
    | TrialRetried
    | TrialFinished
    | TrialRevised
    | Note
    | LlmTurn
    | LlmLimitsSet
    | LlmReport
    | ArbiterMove
    | ConfigsHeldBack
    | ProposalRefused
    | SpaceGrown
    | SearchStopped
    | SearchEnded,
    Field(discriminator="event"),
]

EVENT: TypeAdapter[Event] = TypeAdapter(Event, config=ConfigDict(cache_strings="keys"))

_BOM = b"\xef\xbb\xbf"
_END = b',"crc":"%08x"}\n'
_NUM_BYTES = len(_END % 0)
SHOWN_BAD_LINES = 3
"""Lines that a message describes; it counts the others."""
_EVENT = re.compile(rb'"event" ?: ?"([a-z_]{1,40})"')
_TRIAL = re.compile(rb'"trial" ?: ?(\d{1,7})[,}]')


@dataclass(frozen=True)
class BadLine:
    """A line of a ledger that is not used, and its probable meaning."""

    number: int
    """1 for the first line."""
    problem: str
    event: str = ""
    """Its kind of event; empty if it cannot be seen."""
    trial: int | None = None

    def describe(self) -> str:
        """`line 7 (trial_finished of trial 3): its checksum does not match, ...`."""
        trial = f" of trial {self.trial}" if self.trial is not None else ""
        return f"line {self.number}{f' ({self.event}{trial})' if self.event else ''}: {self.problem}"


def describe_bad_line(number: int, line: bytes, error: Exception) -> BadLine:
    """The line as one that is not used, because of this error."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"][1:]))
        problem = f"{place}: {first['msg']}" if place else first["msg"]
    else:
        problem = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
    event, trial = _EVENT.search(line), _TRIAL.search(line)
    return BadLine(number, one_line(problem, 200), event[1].decode() if event else "", int(trial[1]) if trial else None)


def explain_bad_lines(path: Path, bad: Sequence[BadLine]) -> str:
    """One line about the lines of a ledger that are not used."""
    shown = "; ".join(line.describe() for line in bad[:SHOWN_BAD_LINES])
    more = f"; and {len(bad) - SHOWN_BAD_LINES} more" if len(bad) > SHOWN_BAD_LINES else ""
    verb = "is" if len(bad) == 1 else "are"
    return f"{str(path)!r}: {count_of(len(bad), 'line')} {verb} not used, all others are: {shown}{more}"


def encode_line(event: Event) -> bytes:
    """The event's line, with its end; `crc` is the CRC-32 of the bytes before that field, as eight hex digits.

    Raises ValueError if the line would not be read as the same event: it must never reach a ledger.
    """
    data = EVENT.dump_json(event)
    try:
        is_same = EVENT.validate_json(data) == event
    except ValidationError:  # JSON writes a number that is not finite as null
        is_same = False
    if not is_same:
        raise ValueError(f"the event {event.event!r} would not be read as it is: {one_line(data.decode(), 500)}")
    return data[:-1] + _END % zlib.crc32(data[:-1])


def has_checksum(line: bytes) -> bool:
    """Return whether the line has a checksum; raises ValueError if it has a wrong one."""
    line = _undo_editor(line)
    data, end = line[:-_NUM_BYTES], line[-_NUM_BYTES:]
    if end == _END % zlib.crc32(data):
        return True
    if end.startswith(_END[: _END.index(b"%")]):
        raise ValueError("its checksum does not match, so it was changed after it was written")
    return False


def decode_line(line: bytes) -> Event:
    """Return the event of a line; raises ValueError if it is not one, or was changed after it was written."""
    if not has_checksum(line):
        raise ValueError("it has no checksum")
    return EVENT.validate_json(_undo_editor(line)[:-_NUM_BYTES] + b"}")


def _undo_editor(line: bytes) -> bytes:
    """Remove an editor's additions on Windows from the line: a byte order mark, a carriage return at its end."""
    line = line.removeprefix(_BOM)
    return line[:-2] + b"\n" if line.endswith(b"\r\n") else line
