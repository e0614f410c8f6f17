"""Frozen values shared by all packages: a configuration, a failure, the provenance of a measurement.

Also the types of the figures that a job reports: numbers of JSON, never a truth value or a text in place of one.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, Strict, StrictInt
from pydantic_core import CoreSchema, core_schema

from cclsearch.core.job_file import RESULT_BYTES, read_job_bytes
from cclsearch.core.numbers import MAX_AMOUNT, MAX_COUNT, MAX_TRIALS, parse_number, parse_whole
from cclsearch.core.processes import boot_clock_s, boot_id

Value = bool | int | float | str
"""Type of a knob's value."""


def same_value(left: Value, right: Value) -> bool:
    """Whether two values are the same choice (true is not 1)."""
    return isinstance(left, bool) == isinstance(right, bool) and left == right


def format_knob_value(value: object) -> str:
    """A value as tables and the command line write it: booleans are `true` and `false`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def format_config(config: Mapping[str, object]) -> str:
    """A complete or partial configuration in one line: `tp=2 dp=4 sequence_parallel=true`."""
    return " ".join(f"{knob}={format_knob_value(value)}" for knob, value in config.items())


class Model(BaseModel):
    """Base of every closed model: frozen, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The model in a JSON file, which a job may have changed; None if it is missing, incomplete or invalid."""
        try:
            return cls.model_validate_json(read_job_bytes(path, RESULT_BYTES))
        except (OSError, ValueError):
            return None


class Config(Mapping[str, Value]):
    """One configuration: knob name -> value, in the order of the space's knobs; hashable, equal by content."""

    __slots__ = ("_hash", "_values")

    def __init__(self, values: Mapping[str, Value] | None = None, /, **knobs: Value) -> None:
        self._values: dict[str, Value] = {**(values or {}), **knobs}
        self._hash: int | None = None

    def __getitem__(self, knob: str) -> Value:
        return self._values[knob]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self._values.items()))
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and self._values == dict(other)

    def __repr__(self) -> str:
        return f"Config({self})"

    def __str__(self) -> str:
        return format_config(self._values)

    def as_int(self, knob: str, default: int = 1) -> int:
        """The knob's value as a whole number; `default` if the space has no such knob."""
        return int(self._values.get(knob, default))

    @property
    def digest(self) -> str:
        """Twelve hex digits that identify this configuration, independent of the order of its knobs."""
        text = json.dumps(self._values, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        value = core_schema.union_schema(
            [
                core_schema.bool_schema(strict=True),
                core_schema.int_schema(strict=True),
                core_schema.float_schema(strict=True),
                core_schema.str_schema(strict=True),
            ]
        )
        knobs = core_schema.dict_schema(core_schema.str_schema(), value)
        return core_schema.union_schema(
            [core_schema.is_instance_schema(cls), core_schema.no_info_after_validator_function(cls, knobs)],
            serialization=core_schema.plain_serializer_function_ser_schema(lambda config: dict(config)),
        )


class FailureKind(StrEnum):
    """Reasons why a trial has no score (closed list)."""

    OUT_OF_MEMORY = "out_of_memory"
    ILLEGAL_CONFIG = "illegal_config"
    TIMEOUT = "timeout"
    COMMUNICATION = "communication"
    CRASHED = "crashed"
    PREEMPTED = "preempted"
    ALLOCATION_ENDED = "allocation_ended"
    NODE_FAILED = "node_failed"
    LAUNCHER = "launcher"
    TRACE_UNREADABLE = "trace_unreadable"
    WORK_MISMATCH = "work_mismatch"
    CANCELLED = "cancelled"
    JUDGING_ERROR = "judging_error"
    """An error of ccl-search while it judged the trial; the trial can be judged again."""

    @property
    def is_infrastructure(self) -> bool:
        """Whether the configuration is not the cause: the trial is retried, costs no budget and is not learned from."""
        return self in _INFRASTRUCTURE

    @property
    def counts(self) -> bool:
        """Whether the configuration may be the cause: the trial costs budget, and proposers learn from it."""
        return not self.is_infrastructure and self is not FailureKind.JUDGING_ERROR

    def describe(self) -> str:
        """The kind in words for people: `out of memory`, `launcher failure`."""
        nouns = (FailureKind.LAUNCHER, FailureKind.COMMUNICATION)
        return f"{self.value} failure" if self in nouns else self.value.replace("_", " ")


_INFRASTRUCTURE = frozenset(
    {
        FailureKind.PREEMPTED,
        FailureKind.ALLOCATION_ENDED,
        FailureKind.NODE_FAILED,
        FailureKind.LAUNCHER,
        FailureKind.CANCELLED,
    }
)


class Stage(StrEnum):
    """Stage at which a trial failed."""

    SUBMIT = "submit"
    RUN = "run"
    TRACE = "trace"
    SCORE = "score"


MEMORY_HINT = "the kernel does so when memory runs out"
"""Part of the message about a process that was killed, if memory is the likely reason."""


class Failure(Model):
    """Reason of a trial's failure; a failure is never encoded as a number."""

    stage: Stage
    kind: FailureKind
    message: str
    """The root exception of the first rank that failed, or the launcher's own reason."""
    rank: StrictInt | None = None


class Provenance(StrEnum):
    """Origin of a measurement; they are never mixed in one ranking."""

    MEASURED = "measured"
    CALLER = "caller-measured"
    """A function of the caller of the Python API returned it: no run script declares what ran, no trace shows it."""
    RECORDED = "recorded"
    SIMULATED = "simulated"

    @property
    def is_repeatable(self) -> bool:
        """Whether something ran to measure it, so that it has noise and another run can confirm it."""
        return self in (Provenance.MEASURED, Provenance.CALLER)

    @property
    def mark(self) -> str:
        """Suffix of a figure that was not measured, for example ` (recorded)`; else empty."""
        return "" if self is Provenance.MEASURED else f" ({self.value})"


def _take_whole(value: Any) -> Any:
    """The value, a whole float as an int: scripts write 1.0e9 bytes."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Number = Annotated[float, Strict()]
"""Any number; also one that is not finite, which its reader leaves out or explains."""
Count = Annotated[int, Strict(), BeforeValidator(_take_whole), Field(ge=0, lt=2**63)]
"""A whole number from 0."""
PositiveCount = Annotated[int, Strict(), BeforeValidator(_take_whole), Field(ge=1, lt=2**63)]
# Clocks have nanoseconds, and 1e9 s are 30 years.
Seconds = Annotated[float, Strict(), Field(ge=1e-9, le=1e9)]
"""A measured duration."""
TimeLimit = Annotated[float, Strict(), Field(gt=0)]
"""Seconds that a job may take; infinite without a limit."""
Joules = Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False)]


def _parse(parse: Any) -> BeforeValidator:
    """Validate a text of a file by `parse`; a truth value is not a number."""

    def read(value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError("must be a number, not true or false")
        return parse(value) if isinstance(value, str) else value

    return BeforeValidator(read)


TrialCount = Annotated[int, _parse(parse_whole), Field(ge=1, le=MAX_TRIALS)]
"""Number of trials of a search."""
Amount = Annotated[float, _parse(parse_number), Field(gt=0, le=MAX_AMOUNT)]
"""Hours, dollars and the like, above 0."""
Whole = Annotated[int, _parse(parse_whole), Field(ge=0, le=MAX_COUNT)]
"""A whole number from 0."""


class BootMoment(Model):
    """A moment by both clocks: the boot clock counts on this machine until it restarts, and nothing sets it."""

    wall_s: float
    """Unix time."""
    boot_id: str
    boot_s: float
    """Seconds since that boot, suspension included."""

    @classmethod
    def now(cls) -> BootMoment:
        """Return this moment."""
        return cls(wall_s=time.time(), boot_id=boot_id(), boot_s=boot_clock_s())

    def elapsed_s(self) -> float:
        """Return the seconds since then: by the boot clock; after a restart or on another machine by the wall clock."""
        if self.boot_id and self.boot_id == boot_id():
            return max(0.0, boot_clock_s() - self.boot_s)
        return max(0.0, time.time() - self.wall_s)
