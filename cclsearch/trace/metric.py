"""What a metric is and what it answers: a value with its ranks and steps, or the reason why there is none.

A metric is a function, registered by name. One that looks at a single rank gets a `RankView` and returns a number:

    from cclsearch.trace.metric import NotAvailable, metric

    @metric("longest_kernel", unit="s", summary="longest compute kernel", combine="max")
    def measure_longest_kernel(rank):
        kernels = rank.compute_kernels
        if not len(kernels):
            raise NotAvailable("no_gpu_events")
        return rank.table.dur_ns[kernels].max() / 1e9

One that needs all ranks (`over="trace"`) gets a `TraceView` and returns a `Draft`. A package brings its metrics by
naming the module under the entry-point group `cclsearch`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import JsonValue, model_validator

from cclsearch.core.values import Model
from cclsearch.plugins import METRICS
from cclsearch.trace.events import Reason

if TYPE_CHECKING:
    from cclsearch.trace.view import TraceView


class Status(StrEnum):
    """How far a result may be trusted."""

    OK = "ok"
    PARTIAL = "partial"
    NOT_AVAILABLE = "not_available"


class NotAvailable(Exception):
    """Raised by a metric that cannot be told from what is there: an answer, not a fault."""

    def __init__(self, reason: Reason | str, detail: str = "") -> None:
        super().__init__(detail or str(reason))
        self.reason = Reason(reason)
        self.detail = detail


class MetricResult(Model):
    """The result contract. `value` is None exactly where `status` is `not_available`; zero only when measured zero."""

    name: str
    value: float | None
    unit: str
    per_rank: dict[int, float | None] = {}
    """Rank -> the value of that rank alone, where the metric has one."""
    per_step: tuple[float, ...] = ()
    """One value a step, combined over ranks as `value` is; empty where the metric has none."""
    n_ranks: int = 0
    """Ranks that went into the value."""
    world_size: int | None = None
    """Ranks of the run, as the trace says; None where it does not."""
    n_steps: int = 0
    """Steps that went into the value; 0 where it covers the whole file."""
    status: Status
    reason: Reason | None = None
    """Why it is not `ok`."""
    detail: str = ""
    """One line for people: what was missing, or what the value leaves out."""
    inputs: dict[str, JsonValue] = {}
    """What the value was made from, and figures that belong to it (p95, by collective, ...)."""

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
    """What a metric over a whole trace returns; names, world size and the trace's own faults are filled in for it."""

    value: float
    per_rank: Mapping[int, float | None] = field(default_factory=dict)
    per_step: tuple[float, ...] = ()
    n_steps: int = 0
    n_ranks: int | None = None
    """None: as many as `per_rank` has values, or else all that were read."""
    reason: Reason | None = None
    """Set where the value stands with a reservation: the status becomes `partial`."""
    detail: str = ""
    inputs: dict[str, JsonValue] = field(default_factory=dict)
    needs_steps: bool = True
    """False: the value stands whether or not the windows that the metric looked at are steps."""


Combine = Literal["mean", "max", "min", "sum", "median"]
Better = Literal["lower", "higher"]


@dataclass(frozen=True)
class Metric:
    """One registered metric."""

    name: str
    unit: str
    summary: str
    """One line for `ccl-search score --list`."""
    over: Literal["rank", "trace"]
    combine: Combine
    function: Callable[[Any], Any]
    better: Better | None = None
    """Which way is better; None where that depends on what is wanted, or where it tells of the trace alone."""

    def __call__(self, trace: TraceView) -> MetricResult:
        """The result over a trace; a metric that raises gives `not_available`, never an exception."""
        from cclsearch.trace.measure import measure_metric

        return measure_metric(self, trace)


F = TypeVar("F", bound=Callable[..., Any])


def metric(
    name: str,
    *,
    unit: str,
    summary: str,
    over: Literal["rank", "trace"] = "rank",
    combine: Combine = "mean",
    better: Better | None = None,
) -> Callable[[F], F]:
    """Decorator: register a function as the metric `name`; it stays callable as it is."""

    def enter(function: F) -> F:
        METRICS.register(name)(Metric(name, unit, summary, over, combine, function, better))
        return function

    return enter
