"""The result of a metric: its fields, its status, and the exception of a metric that has no value."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from pydantic import JsonValue, model_validator

from cclsearch.core.values import Model
from cclsearch.trace.events import Reason
from cclsearch.trace.events import Status as Status


class NotAvailable(Exception):
    """Raised by a metric that cannot be computed from the trace: a valid outcome, not an error."""

    def __init__(self, reason: Reason | str, detail: str = "") -> None:
        super().__init__(detail or str(reason))
        self.reason = Reason(reason)
        self.detail = detail


T = TypeVar("T")


def if_available(get: Callable[[], T]) -> T | None:
    """Return what `get` returns; None if it raises NotAvailable."""
    try:
        return get()
    except NotAvailable:
        return None


class MetricResult(Model):
    """The result of a metric. `value` is None only if `status` is `not_available`, and 0 only if 0 was measured."""

    name: str
    value: float | None
    unit: str
    per_rank: dict[int, float | None] = {}
    """Rank -> its own value, if the metric has one per rank."""
    per_step: tuple[float, ...] = ()
    """One value per step, combined over ranks as `value` is; empty if the metric has none per step."""
    n_ranks: int = 0
    """Number of ranks that `value` covers."""
    world_size: int | None = None
    """Number of ranks of the run; None if the trace does not record it."""
    n_steps: int = 0
    """Number of steps that `value` covers; 0 if it covers the whole file."""
    status: Status
    reason: Reason | None = None
    """Reason for a status other than `ok`."""
    detail: str = ""
    """One line for people with the missing part, or the part that the value does not include."""
    inputs: dict[str, JsonValue] = {}
    """Inputs of the value, and related figures (p95, by collective, ...)."""

    @model_validator(mode="after")
    def _value_matches_status(self) -> MetricResult:
        if (self.value is None) != (self.status is Status.NOT_AVAILABLE):
            raise ValueError(f"{self.name}: a value of {self.value!r} cannot have the status {self.status.value!r}")
        if self.value is not None and not math.isfinite(self.value):
            raise ValueError(f"{self.name}: {self.value!r} is not a finite number")
        if (self.reason is None) != (self.status is Status.OK):
            raise ValueError(f"{self.name}: status {self.status.value!r} with the reason {self.reason!r}")
        return self


@dataclass(frozen=True)
class Draft:
    """Return value of a metric over all ranks; name, world size and the trace's own problems are added later."""

    value: float
    per_rank: Mapping[int, float | None] = field(default_factory=dict)
    per_step: tuple[float, ...] = ()
    n_steps: int | None = None
    """None: the steps of all ranks if the metric used the windows, else 0."""
    n_ranks: int | None = None
    """None: the number of values in `per_rank`, or the number of ranks read if it is empty."""
    reason: Reason | None = None
    """Why the value is only `partial`, apart from windows that are not steps; None if it is complete."""
    detail: str = ""
    inputs: Mapping[str, JsonValue] = field(default_factory=dict)
    needs_steps: bool = True
    """False: the value is complete even if the windows that the metric used are not steps."""


_NO_EVENTS = NotAvailable(Reason.NO_GPU_EVENTS, "no device events")


def mean_over_ranks(
    per_rank: Mapping[int, float | None],
    inputs: Mapping[str, JsonValue] | None = None,
    *,
    reason: Reason | None = None,
    detail: str = "",
    missing: NotAvailable = _NO_EVENTS,
) -> Draft:
    """Return the mean of the ranks that have a value; raises `missing` if none has."""
    found = [value for value in per_rank.values() if value is not None]
    if not found:
        raise missing
    return Draft(float(np.mean(found)), per_rank, reason=reason, detail=detail, inputs=inputs or {})
