"""Turns on disk: `turns/0007.json` keeps what a turn was shown and what the provider answered, for a replay."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from cclsearch.card.model import Card
from cclsearch.core.atomic_file import write_atomically
from cclsearch.core.errors import UserError
from cclsearch.core.metrics import PEAK_MEMORY, Direction
from cclsearch.core.values import Config, Failure, Model, Value
from cclsearch.propose.agent.evidence import TrialEvidence
from cclsearch.propose.agent.history import MOVE_TOPIC, TURN_TOPIC, past_turns, total_cost
from cclsearch.propose.agent.prompt import Prompt, PromptInput
from cclsearch.propose.agent.providers.cost import Cost, LlmLimits, Price
from cclsearch.propose.agent.providers.types import Answer, ErrorKind
from cclsearch.propose.agent.quoting import redact_strings
from cclsearch.propose.agent.surrogate_table import SurrogateTable
from cclsearch.propose.agent.tool_handlers import Decision, ToolHandlers
from cclsearch.propose.agent.turn import Exchange, TurnResult
from cclsearch.propose.base import Observation, ProposerEvent, SearchView
from cclsearch.score.objective import Objective, Term
from cclsearch.space.table import Knob, Space

TURNS_FOLDER = "turns"
CONTEXT_FILE = "context.json"
VERSION = 1
PACKED_FIELDS = {"codes", "look"}
"""Fields of packed numbers: they hold no secret, but by chance their text may look like one."""

T = TypeVar("T", bound=Model)


class KnobRecord(Model):
    """A knob of the search space."""

    name: str
    choices: tuple[Value, ...]
    description: str = ""


class ObservationRecord(Model):
    """A finished trial as the agent saw it."""

    trial: int
    config: Config
    loss: float | None
    step_time_s: float | None = None
    peak_memory_gib: float | None = None
    """These two only in turns of 0.2.0 and earlier; now they are in `metrics`."""
    failure: Failure | None = None
    spread: float | None = None
    metrics: dict[str, float] = {}
    is_confirmation: bool = False
    violation: float = 0.0


class EventRecord(Model):
    """A proposer event of the ledger that the turn could read."""

    topic: str
    text: str
    data: dict[str, str | int | float | bool | None] = {}


class ContextRecord(Model):
    """The part that does not change during a search: `turns/context.json`."""

    schema_version: int = VERSION
    model: str
    """`anthropic:MODEL`, ...: no key, no address."""
    mode: str
    anonymous: bool
    card: Card
    knobs: tuple[KnobRecord, ...]
    codes: str
    """The configurations of the search space: int16 codes, row by row, deflated, base 64."""
    num_raw: int
    rules: tuple[str, ...]
    objective: Objective | str
    """Turns of version 0.2.0 and earlier have only the name."""
    goal: str = ""
    """The formula of its loss, as the prompt shows it."""
    seed: int
    prior: tuple[ObservationRecord, ...] = ()

    def target(self) -> Objective | None:
        """The objective; one of which only the name is known stands for an unknown loss."""
        if not isinstance(self.objective, str):
            return self.objective
        if self.objective == "step_time":
            return None
        unknown = Term(metric="step_time_s", direction=Direction.MINIMIZE, unit="s", weight=1.0, reference=1.0)
        return Objective(name=self.objective, description="", terms=(unknown,))

    def space(self) -> Space:
        """The search space; raises UserError if the record is damaged."""
        flat = _unpack(self.codes, np.int16)
        if len(flat) % max(len(self.knobs), 1):
            raise UserError(f"the search space in {CONTEXT_FILE!r} cannot be read: its last row is incomplete")
        codes = flat.reshape(-1, len(self.knobs))
        knobs = tuple(Knob(knob.name, knob.choices, knob.description) for knob in self.knobs)
        return Space(knobs, codes, self.num_raw, self.rules)


class SurrogateTableRecord(Model):
    """The surrogate's table at the time of the turn; computed later, or on another machine, it may differ."""

    times: str
    lows: str
    memories: str
    fits: str
    """One float64 per row of the space, deflated, base 64; `order` the same of int32."""
    order: str
    nothing_left: bool
    why: str
    record: tuple[str, ...] = ()

    def table(self) -> SurrogateTable:
        """The table; raises UserError if the record is damaged."""
        return SurrogateTable(
            time_N=_unpack(self.times, np.float64),
            low_N=_unpack(self.lows, np.float64),
            memory_gib_N=_unpack(self.memories, np.float64),
            fits_N=_unpack(self.fits, np.float64),
            order=tuple(int(row) for row in _unpack(self.order, np.int32)),
            nothing_left=self.nothing_left,
            why=self.why,
            record=self.record,
        )


class ExchangeRecord(Model):
    """One request to the provider: its answer, or the error in its place."""

    answer: Answer | None = None
    trouble: ErrorKind | None = None
    message: str = ""
    request_bytes: int = 0
    at_s: float = 0.0


class SubmittedRecord(Model):
    """One configuration that the turn submitted, with the measurements that the LLM expected."""

    config: Config
    expected_step_time_s: float | None = None
    expected_memory_gib: float | None = None
    rationale: str = ""
    is_overrule: bool = False


class TurnRecord(Model):
    """One turn: its view, the provider's answers and the decision."""

    schema_version: int = VERSION
    turn: int
    observations: tuple[ObservationRecord, ...]
    pending: tuple[int, ...]
    held_back: tuple[int, ...] = ()
    budget_left: int
    next_trial: int
    remarks: tuple[EventRecord, ...]
    slots: int
    max_submitted: int
    overrules_left: int
    look: SurrogateTableRecord | None = None
    """The surrogate's table; None in records of older versions, for which a replay computes it."""
    evidence: dict[int, TrialEvidence] = {}
    program: str | None = None
    program_note: str = ""
    explanations: dict[str, tuple[str, ...]] = {}
    """Configuration's digest -> the rules that it violates."""
    limits: LlmLimits = LlmLimits()
    price: Price | None = None
    """Price of the model, if it was known; the price list may have changed since."""
    max_seconds: float = 600.0
    """Time limit of the turn."""
    spent: Cost = Cost()
    """Cost of earlier turns."""
    system: str
    user: str
    exchanges: tuple[ExchangeRecord, ...]
    decision: str
    """`submit`, `finish` or `none`."""
    submitted: tuple[SubmittedRecord, ...] = ()
    finish: str | None = None
    insight: str = ""
    beliefs: dict[str, str] = {}
    submitted_program: str | None = None
    stall: str = ""
    stall_cause: str = ""
    faults: tuple[str, ...] = ()
    cost: Cost = Field(default_factory=Cost)

    def view(self, context: ContextRecord, space: Space) -> SearchView:
        """The view that this turn had."""
        return SearchView(
            card=context.card,
            space=space,
            observations=tuple(read_observation(record, space) for record in self.observations),
            pending=frozenset(self.pending),
            held_back=frozenset(self.held_back),
            budget_left=self.budget_left,
            seed=context.seed,
            target=context.target(),
            prior=tuple(read_observation(record, space) for record in context.prior),
            events=tuple(ProposerEvent(r.topic, r.text, r.data) for r in self.remarks),
            next_trial=self.next_trial,
        )


def make_record(
    prompt_input: PromptInput, handlers: ToolHandlers, prompt: Prompt, result: TurnResult, number: int
) -> TurnRecord:
    """The record of one turn, without its limits, price and time limit."""
    view = prompt_input.view
    decision = result.decision or Decision()
    return TurnRecord(
        turn=number,
        observations=tuple(record_observation(o) for o in view.observations),
        pending=tuple(sorted(view.pending)),
        held_back=tuple(sorted(view.held_back)),
        budget_left=view.budget_left,
        next_trial=view.next_trial,
        remarks=tuple(
            EventRecord(topic=r.topic, text=r.text, data=dict(r.data))
            for r in view.events
            if r.topic in {TURN_TOPIC, MOVE_TOPIC}
        ),
        slots=prompt_input.slots,
        max_submitted=handlers.max_submitted,
        overrules_left=handlers.overrules_left,
        look=record_surrogate_table(handlers.table),
        evidence=handlers.looked_up,
        program=prompt_input.program,
        program_note=prompt_input.program_note,
        explanations=dict(handlers.explanations),
        spent=total_cost(past_turns(view.events)),
        system=prompt.system,
        user=prompt.user,
        exchanges=tuple(_record_exchange(exchange) for exchange in result.exchanges),
        decision=decision_kind(result.decision),
        submitted=tuple(
            SubmittedRecord(**{name: getattr(item, name) for name in SubmittedRecord.model_fields})
            for item in decision.submitted
        ),
        finish=decision.finish,
        insight=decision.insight,
        beliefs=dict(decision.beliefs),
        submitted_program=decision.program,
        stall=result.stall.text if result.stall else "",
        stall_cause=result.stall.cause if result.stall else "",
        faults=tuple(result.faults),
        cost=result.cost,
    )


def decision_kind(decision: Decision | None) -> str:
    """`submit`, `finish` or `none`."""
    if decision is None:
        return "none"
    return "finish" if decision.finish is not None else "submit"


def _record_exchange(e: Exchange) -> ExchangeRecord:
    return ExchangeRecord(
        answer=e.answer, trouble=e.error, message=e.message, request_bytes=e.request_bytes, at_s=e.at_s
    )


def record_context(view: SearchView, *, model: str, mode: str, anonymous: bool) -> ContextRecord:
    """The context record of a search."""
    return ContextRecord(
        model=model,
        mode=mode,
        anonymous=anonymous,
        card=view.card,
        knobs=tuple(KnobRecord(name=k.name, choices=k.choices, description=k.description) for k in view.space.knobs),
        codes=_pack(view.space.codes_NK, np.int16),
        num_raw=view.space.num_raw,
        rules=view.space.rules,
        objective=view.objective,
        seed=view.seed,
        prior=tuple(record_observation(o) for o in view.prior),
    )


def record_surrogate_table(table: SurrogateTable) -> SurrogateTableRecord:
    """The surrogate's table as a record."""
    return SurrogateTableRecord(
        times=_pack(table.time_N, np.float64),
        lows=_pack(table.low_N, np.float64),
        memories=_pack(table.memory_gib_N, np.float64),
        fits=_pack(table.fits_N, np.float64),
        order=_pack(np.array(table.order, dtype=np.int32), np.int32),
        nothing_left=table.nothing_left,
        why=table.why,
        record=table.record,
    )


def _pack(array: NDArray[Any], kind: type[np.generic]) -> str:
    return base64.b64encode(zlib.compress(np.ascontiguousarray(array, dtype=kind).tobytes())).decode()


def _unpack(packed: str, kind: type[np.generic]) -> NDArray[Any]:
    try:
        return np.frombuffer(zlib.decompress(base64.b64decode(packed)), dtype=kind)
    except (ValueError, zlib.error) as error:
        raise UserError(f"the numbers of a turn record cannot be read: {error}") from None


def record_observation(o: Observation) -> ObservationRecord:
    """An observation as a record."""
    fields = {name: getattr(o, name) for name in ObservationRecord.model_fields if hasattr(o, name)}
    return ObservationRecord(**{**fields, "metrics": dict(o.metrics)})


def read_observation(record: ObservationRecord, space: Space) -> Observation:
    """The observation of a record."""
    fields = {name: value for name, value in dict(record).items() if name not in {"step_time_s", PEAK_MEMORY}}
    earlier = {"step_time_s": record.step_time_s, PEAK_MEMORY: record.peak_memory_gib}
    metrics = {name: value for name, value in earlier.items() if value is not None} | record.metrics
    return Observation(row=space.row(record.config), **{**fields, "metrics": metrics})


def write_record(path: Path, record: Model) -> None:
    """Write one record atomically, with secrets masked in each string."""
    whole = record.model_dump(mode="json")
    packed = {name: whole.pop(name) for name in PACKED_FIELDS & set(whole)}
    data = {**redact_strings(whole), **packed}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(data, indent=1, ensure_ascii=True) + "\n")


def read_context(folder: Path) -> ContextRecord:
    """The context record of a run folder; raises UserError if it is missing or cannot be read."""
    return _read(folder / TURNS_FOLDER / CONTEXT_FILE, ContextRecord)


def read_turns(folder: Path) -> list[TurnRecord]:
    """All turn records of a run folder, oldest first; raises UserError if one cannot be read."""
    paths = sorted((folder / TURNS_FOLDER).glob("[0-9]*.json"))
    return [_read(path, TurnRecord) for path in paths]


def turn_path(folder: Path, turn: int) -> Path:
    """`turns/0007.json`."""
    return folder / TURNS_FOLDER / f"{turn:04d}.json"


def _read(path: Path, model: type[T]) -> T:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        version = data.get("schema_version") if isinstance(data, dict) else None
        if isinstance(version, int) and version > VERSION:
            raise UserError(f"{str(path)!r} was written by a newer version of ccl-search; upgrade to read it")
        return model.model_validate(data)
    except FileNotFoundError:
        raise UserError(f"run {path.parent.parent.name!r} used no LLM, so there is nothing to replay") from None
    except (OSError, ValueError, ValidationError) as error:
        raise UserError(f"{str(path)!r} cannot be read: {str(error).splitlines()[0]}") from None
