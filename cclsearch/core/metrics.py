"""Properties of a metric before anything runs: name, unit, better direction and description."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Protocol

from cclsearch.core.registry import Registry
from cclsearch.core.values import Model

PEAK_MEMORY = "peak_memory_gib"
"""Largest memory use of a device, in GiB: measured for every task, and limited by the hardware."""
NUM_ACCELERATORS = "num_accelerators"
"""Number of accelerators that a trial used; every task knows it before a trial runs."""


class Direction(StrEnum):
    """Better direction of a metric."""

    MINIMIZE = "minimize"
    MAXIMIZE = "maximize"


class TraceMetric(Protocol):
    """Properties of a metric of traces; see `cclsearch.trace.metric.Metric`."""

    name: str
    unit: str
    summary: str
    better: Any
    """`lower` or `higher`; None if that depends on the goal."""

    def __call__(self, trace: Any) -> Any:
        """Return the result over a `TraceView`."""


METRICS: Registry[TraceMetric] = Registry(
    "metric", "cclsearch.trace.metrics:MODULES", needs=("unit", "summary", "function")
)
"""name -> metric over an event table; registered by `cclsearch.trace.metric.metric`."""


class MetricInfo(Model):
    """Properties of a metric before a trial runs."""

    name: str
    unit: str | None
    """None if the toolkit's registry has no unit."""
    direction: Direction | None
    """None if either direction may be wanted."""
    source: str
    """`result` (the run script's result and the card), `trace`, `script` (a metric of the script's own), or `code`
    (computed by code of the project or a package from the trial's other metrics)."""
    label: str = ""
    """Words for people, such as `step time`; the name if it is empty. Words that start with the unit replace it."""
    short: str = ""
    """Word in the columns of compact tables, such as `step` in `step_s`; the name if it is empty."""
    heading: str = ""
    """Heading of a narrow column; the label with its unit if it is empty."""
    axis: str = ""
    """Words at the axis of a chart, such as `seconds per step`; the label with its unit if it is empty."""
    missing: str = ""
    """Reason of a missing value, for messages."""
    is_positive: bool = False
    """Whether every measured value is above 0."""
    needs: str = ""
    """Optional measurement of the run script that the metric needs and a framework declares, such as `energy_j`."""

    @property
    def words(self) -> str:
        """The label, or the name in its place."""
        return self.label or self.name

    @property
    def sign(self) -> float:
        """-1 if greater is better, else 1: the metric times its sign is a cost."""
        return -1.0 if self.direction is Direction.MAXIMIZE else 1.0

    @property
    def is_time(self) -> bool:
        """Whether it is a time in seconds, so that a better value is a faster one."""
        return self.unit == "s"

    @property
    def quantity(self) -> str:
        """`time` for a time, else its words."""
        return "time" if self.is_time else self.words

    @property
    def column(self) -> str:
        """Name of its column in compact tables."""
        return f"{self.short}_{self.unit}" if self.short else self.name

    def show(self, value: float | None) -> str:
        """The value with its unit: `9.31 s`; `-` in place of a missing value."""
        return f"{'-' if value is None else f'{value:.4g}'} {self.unit or ''}".rstrip()

    @property
    def greater_is_better(self) -> bool:
        return self.direction is Direction.MAXIMIZE

    @property
    def has_unit_in_words(self) -> bool:
        """Whether the words start with the unit: `tokens/s per accelerator`."""
        return self.words.split(" ")[0] == self.unit

    @property
    def shown_unit(self) -> str:
        """The unit behind a value; empty for a fraction, which is shown in percent, and if the words have it."""
        return "" if self.has_unit_in_words or self.unit == "fraction" else self.unit or ""

    @property
    def words_with_unit(self) -> str:
        """`step time (s)`."""
        return f"{self.words} ({self.shown_unit})" if self.shown_unit else self.words

    @property
    def axis_label(self) -> str:
        return self.axis or self.words_with_unit

    @property
    def title(self) -> str:
        """The words with a capital letter: `Step time`."""
        return self.words[:1].upper() + self.words[1:]
