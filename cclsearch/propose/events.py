"""Events of the ledger that proposers write and read: LLM turns, moves of the arbiter, limits, notes of plugins."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Self

from pydantic import ConfigDict, Field

from cclsearch.core.values import Config, Model, Value
from cclsearch.propose.agent.providers.cost import Cost, LlmLimits


class LedgerEvent(Model):
    """Base of every event: `event` distinguishes them. JSON has no number that is not finite, so no event has one."""

    model_config = ConfigDict(allow_inf_nan=False)

    event: str
    time_s: float = Field(default=0.0, ge=0, lt=253402300800)
    """Seconds since the epoch, before the year 10000; 0 before the event is recorded."""

    def at(self, time_s: float) -> Self:
        """Return the event with the time of its recording."""
        return self.model_copy(update={"time_s": time_s})


class ReportedEvent(LedgerEvent):
    """An event with a text for people; proposers can read it too, and rebuild their state from such events."""

    text: str = ""

    @property
    def label(self) -> str:
        """Return the subject of the text in one word."""
        return self.event


class Note(ReportedEvent):
    """Information for people; a plugin's proposer may add `data` for itself."""

    event: Literal["note"] = "note"
    topic: str
    data: dict[str, str | int | float | bool | None] = {}

    @property
    def label(self) -> str:
        """The topic."""
        return self.topic


BUSY_MACHINE = "busy machine"
"""The topic of the note at the start of a search, and of each resume, on a machine that other processes use."""


NOTHING_LEFT = "nothing left"
"""The topic of the note that no untried configuration is likely to win."""
NOT_ADDED = "not added"
"""Topic of the note on a refused addition to the space."""


def leave_out_outdated(events: Sequence[ReportedEvent]) -> tuple[ReportedEvent, ...]:
    """The events without the notes on a busy machine that a later one replaces."""
    last = next((event for event in reversed(events) if event.label == BUSY_MACHINE), None)
    return tuple(event for event in events if event.label != BUSY_MACHINE or event is last)


class LlmMode(StrEnum):
    """Kind of the LLM's output."""

    CONFIGS = "configs"
    POLICY = "policy"
    """A program that chooses the configuration."""


class DecisionKind(StrEnum):
    """Kind of a turn's end."""

    SUBMIT = "submit"
    FINISH = "finish"
    EXTEND = "extend"
    """It asks for knobs or values that the search space does not have; the next turn decides over the larger space."""
    REVISE = "revise"
    """It corrects the prediction or withdraws an insight, without a trial; the next turn sees the effect."""
    NONE = "none"


@dataclass(frozen=True)
class ExpectedOutcome:
    """A proposer's expectation of a trial's measurement; reports compare the two."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metric -> expected value, in the metric's unit."""
    fits: float | None = None
    """Probability that it fits into memory, 0 to 1."""

    def __post_init__(self) -> None:
        """Leave out values that are not finite."""
        # A closed form or an LLM may compute them, and no measurement compares with them.
        finite = {name: value for name, value in self.metrics.items() if math.isfinite(value)}
        object.__setattr__(self, "metrics", finite)
        if self.fits is not None and not math.isfinite(self.fits):
            object.__setattr__(self, "fits", None)


@dataclass(frozen=True)
class SubmittedConfig:
    """One configuration that a turn submitted."""

    config: Config
    expects: ExpectedOutcome = ExpectedOutcome()
    is_overrule: bool = False
    """The surrogate objected to it, or it was not among the surrogate's most promising configurations."""
    rationale: str = ""
    is_own_idea: bool = True
    """Not among the surrogate's first choices, so the fallback would not have run it."""
    is_repeat: bool = False
    """The configuration has a result that the model doubts, and runs once more."""
    refuted_at: float | None = None
    """Value of the primary metric from which on, on its worse side, the rationale is refuted; the model stated it."""
    predicted: ExpectedOutcome = ExpectedOutcome()
    """The surrogate's prediction at the time of submission."""


class Correction(Model):
    """A change of the closed form that the LLM proposes: a factor, or a program; see `bayes/corrections.py`."""

    part: str = ""
    """Part of the cost, or KNOB=VALUE, or one of these of the memory (`memory:KNOB=VALUE`); empty with a program."""
    factor: float = 1.0
    program: str = ""
    """Source of `correct(config, parts, card) -> parts`."""

    def describe(self) -> str:
        """`memory:activations x1.2`, or `a program`."""
        return "a program" if self.program else f"{self.part} x{self.factor:.4g}"


class LlmTurn(ReportedEvent):
    """One turn of the LLM: its decision, its lessons, and its cost."""

    event: Literal["llm_turn"] = "llm_turn"
    turn: int
    decision: DecisionKind = DecisionKind.NONE
    submitted: tuple[SubmittedConfig, ...] = ()
    refused: tuple[str, ...] = ()
    """Reasons why further configurations, corrections or doubts of the turn are left out."""
    bet: str = ""
    """Reason to end the search, unless the submitted configuration, the strongest rival, beats the best."""
    adds: dict[str, tuple[Value, ...]] = {}
    """Knob, variable or flag -> values that the turn asks to add to the search space."""
    why: str = ""
    """Reason for its additions to the space."""
    insight: str = ""
    withdraws: tuple[int, ...] = ()
    """Earlier turns whose insight and corrections the model withdraws."""
    corrections: tuple[Correction, ...] = ()
    beliefs: dict[str, str] = {}
    """Hints of searches before there were corrections; they change nothing now."""
    doubts: tuple[int, ...] = ()
    """Numbers of finished trials whose measurement the model doubts."""
    memory_crashes: tuple[int, ...] = ()
    """Numbers of crashed trials that the model thinks were out of memory."""
    num_seen: int = 0
    """Finished trials that the turn could see."""
    last_seen: int = 0
    """The largest number of these."""
    policy: int | None = None
    """Version of the policy program that the turn submitted."""
    continues: int | None = None
    """Of searches in which a turn submitted several configurations, one after another."""
    cost: Cost = Cost()


def find_withdrawn(events: Iterable[ReportedEvent]) -> dict[int, int]:
    """Turn with a withdrawn insight and corrections -> the turn that withdrew them last."""
    turns = (event for event in events if isinstance(event, LlmTurn))
    return {withdrawn: turn.turn for turn in turns for withdrawn in turn.withdraws}


class LlmLimitsSet(ReportedEvent):
    """New limits on the LLM, from `resume --max-tokens --max-usd`; None keeps the earlier limit."""

    event: Literal["llm_limits"] = "llm_limits"
    limits: LlmLimits


class LlmReport(ReportedEvent):
    """An event of the LLM's server beside the turns: another form of requests, or a small request."""

    event: Literal["llm_report"] = "llm_report"
    cost: Cost = Cost()

    @property
    def label(self) -> str:
        """As people call it."""
        return "LLM"


class ArbiterPhase(StrEnum):
    """Phase of the arbiter: it names the proposer that decides; see the figure in `propose/agent/arbiter/states.py`."""

    SEEDS = "seeds"
    LLM = "llm"
    FALLBACK = "fallback"
    OFF = "off"
    FINISHED = "finished"


@dataclass(frozen=True)
class ArbiterState:
    """The arbiter's phase, since when, and why."""

    phase: ArbiterPhase
    since_trial: int
    """First trial that this phase proposes."""
    cause: str = ""
    reason: str = ""
    """Reason in words, for `status`."""
    explore: int = 0
    """Number of trials before the LLM returns, in `fallback`."""
    stalls: int = 0
    """Number of suspensions of the LLM in a row, without a success in between."""

    def describe(self) -> str:
        """`fallback since trial 7: two proposals in a row were duplicates`."""
        phase = {ArbiterPhase.OFF: "LLM off", ArbiterPhase.SEEDS: "seeds"}.get(self.phase, self.phase.value)
        return f"{phase} since trial {self.since_trial}" + (f": {self.reason}" if self.reason else "")


class ArbiterMove(ReportedEvent):
    """The arbiter moved to another phase."""

    event: Literal["arbiter"] = "arbiter"
    before: ArbiterPhase
    after: ArbiterState


ProposerEvent = Note | LlmTurn | LlmReport | LlmLimitsSet | ArbiterMove
"""Events that a proposer may report, to be written to the ledger."""
