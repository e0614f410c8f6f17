"""Turns as files: `turns/0007.json` holds what a turn saw and what came back, so that it can be replayed."""

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
from cclsearch.core.values import Config, Failure, Model, Value
from cclsearch.propose.agent.evidence import TrialEvidence
from cclsearch.propose.agent.providers.cost import Cost, LlmLimits, Price
from cclsearch.propose.agent.providers.types import Answer, ErrorKind
from cclsearch.propose.agent.quoting import redact_strings
from cclsearch.propose.agent.surrogate_table import SurrogateTable
from cclsearch.propose.base import Observation, ProposerEvent, SearchView
from cclsearch.space.table import Knob, Space

TURNS_FOLDER = "turns"
CONTEXT_FILE = "context.json"
VERSION = 1

T = TypeVar("T", bound=Model)


class KnobRecord(Model):
    """A knob of the space, as a turn's file keeps it."""

    name: str
    choices: tuple[Value, ...]
    description: str = ""


class ObservationRecord(Model):
    """What the agent knew of one finished trial."""

    trial: int
    config: Config
    loss: float | None
    step_time_s: float | None = None
    peak_memory_gib: float | None = None
    failure: Failure | None = None
    spread: float | None = None
    metrics: dict[str, float] = {}
    is_confirmation: bool = False


class RemarkRecord(Model):
    """A remark of the ledger that the turn could read."""

    topic: str
    text: str
    data: dict[str, str | int | float | bool | None] = {}


class ContextRecord(Model):
    """What does not change during a search: `turns/context.json`."""

    schema_version: int = VERSION
    model: str
    """`anthropic:MODEL`, ...: no key, no address."""
    mode: str
    anonymous: bool
    card: Card
    knobs: tuple[KnobRecord, ...]
    codes: str
    """The legal set: int16 codes, row by row, deflated, base 64."""
    num_raw: int
    rules: tuple[str, ...]
    objective: str
    goal: str = ""
    """How its loss is made, as the prompt says it."""
    seed: int
    prior: tuple[ObservationRecord, ...] = ()

    def space(self) -> Space:
        """The space again; raises UserError where the record is damaged."""
        flat = _unpack(self.codes, np.int16)
        if len(flat) % max(len(self.knobs), 1):
            raise UserError(f"the legal set in {CONTEXT_FILE!r} cannot be read: a row of it is cut off")
        codes = flat.reshape(-1, len(self.knobs))
        knobs = tuple(Knob(knob.name, knob.choices, knob.description) for knob in self.knobs)
        return Space(knobs, codes, self.num_raw, self.rules)


class LookRecord(Model):
    """What the surrogate thought when the turn was made: what it thinks later, or elsewhere, may be another thing."""

    times: str
    lows: str
    memories: str
    fits: str
    """One float64 a row of the space, deflated, base 64; `order` the same of int32."""
    order: str
    nothing_left: bool
    why: str
    record: tuple[str, ...] = ()

    def look(self) -> SurrogateTable:
        """The look again; raises UserError where the record is damaged."""
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
    """One question to the provider: its answer, or what came instead."""

    answer: Answer | None = None
    trouble: ErrorKind | None = None
    message: str = ""
    request_bytes: int = 0
    at_s: float = 0.0


class SubmittedRecord(Model):
    """One configuration that the turn submitted, with what the agent expected of it."""

    config: Config
    expected_step_time_s: float | None = None
    expected_memory_gib: float | None = None
    rationale: str = ""
    is_overrule: bool = False


class TurnRecord(Model):
    """One turn."""

    schema_version: int = VERSION
    turn: int
    observations: tuple[ObservationRecord, ...]
    pending: tuple[int, ...]
    held_back: tuple[int, ...] = ()
    budget_left: int
    next_trial: int
    remarks: tuple[RemarkRecord, ...]
    slots: int
    max_submitted: int
    overrules_left: int
    look: LookRecord | None = None
    """None in records of older versions: the surrogate is asked again."""
    evidence: dict[int, TrialEvidence] = {}
    program: str | None = None
    program_note: str = ""
    explanations: dict[str, tuple[str, ...]] = {}
    """Configuration's digest -> what the constraints said of it."""
    limits: LlmLimits = LlmLimits()
    price: Price | None = None
    """Of the model, where it was known; what the price list says now may be another."""
    max_seconds: float = 600.0
    """That the turn was given."""
    spent: Cost = Cost()
    """By earlier turns."""
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
            objective=context.objective,
            prior=tuple(read_observation(record, space) for record in context.prior),
            remarks=tuple(ProposerEvent(r.topic, r.text, r.data) for r in self.remarks),
            next_trial=self.next_trial,
        )


def record_context(view: SearchView, *, model: str, mode: str, anonymous: bool) -> ContextRecord:
    """The context of a search, for its folder."""
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


def record_look(look: SurrogateTable) -> LookRecord:
    """A look for a turn's file."""
    return LookRecord(
        times=_pack(look.time_N, np.float64),
        lows=_pack(look.low_N, np.float64),
        memories=_pack(look.memory_gib_N, np.float64),
        fits=_pack(look.fits_N, np.float64),
        order=_pack(np.array(look.order, dtype=np.int32), np.int32),
        nothing_left=look.nothing_left,
        why=look.why,
        record=look.record,
    )


def _pack(array: NDArray[Any], kind: type[np.generic]) -> str:
    return base64.b64encode(zlib.compress(np.ascontiguousarray(array, dtype=kind).tobytes())).decode()


def _unpack(packed: str, kind: type[np.generic]) -> NDArray[Any]:
    try:
        return np.frombuffer(zlib.decompress(base64.b64decode(packed)), dtype=kind)
    except (ValueError, zlib.error) as error:
        raise UserError(f"numbers of a turn's record cannot be read: {error}") from None


def record_observation(o: Observation) -> ObservationRecord:
    """An observation for a file."""
    return ObservationRecord(
        trial=o.trial,
        config=o.config,
        loss=o.loss,
        step_time_s=o.step_time_s,
        peak_memory_gib=o.peak_memory_gib,
        failure=o.failure,
        spread=o.spread,
        metrics=dict(o.metrics),
        is_confirmation=o.is_confirmation,
    )


def read_observation(record: ObservationRecord, space: Space) -> Observation:
    """An observation from a file."""
    return Observation(row=space.row(record.config), **dict(record))


_PACKED = {"codes", "look"}
"""Numbers, which hold no secret: packed, they may look like one by chance."""


def write_record(path: Path, record: Model) -> None:
    """Write one record, redacted string by string, in one atomic step."""
    whole = record.model_dump(mode="json")
    packed = {name: whole.pop(name) for name in _PACKED & set(whole)}
    data = {**redact_strings(whole), **packed}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(data, indent=1, ensure_ascii=True) + "\n")


def read_context(folder: Path) -> ContextRecord:
    """The context of a run folder; raises UserError where there is none, or it cannot be read."""
    return _read(folder / TURNS_FOLDER / CONTEXT_FILE, ContextRecord)


def read_turns(folder: Path) -> list[TurnRecord]:
    """All turns of a run folder, oldest first; raises UserError where one cannot be read."""
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
            raise UserError(f"{str(path)!r} was written by a newer version; upgrade ccl-search to read it")
        return model.model_validate(data)
    except FileNotFoundError:
        raise UserError(f"there is no {str(path)!r}: this run has no LLM turns to replay") from None
    except (OSError, ValueError, ValidationError) as error:
        raise UserError(f"{str(path)!r} cannot be read: {str(error).splitlines()[0]}") from None
