"""Scales, ticks and the frame of a chart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cclsearch.draw.scene import Item, Path, Text

PADDING = 0.06
"""Space on both sides of the values, as a share of their range."""


@dataclass(frozen=True)
class Scale:
    """Maps values to pixels, linearly or logarithmically."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, 1e-300))
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)


def fit_scale(values: Sequence[float], start: float, end: float, *, log: bool | None = None) -> Scale:
    """A scale that contains all values with some padding; logarithmic if they span more than a factor of 5."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if log is None:
        log = low > 0 and high / low > 5
    if log and low > 0:
        padding = max((high / low) ** PADDING, 1.05)
        return Scale(low / padding, high * padding, start, end, log=True)
    padding = (high - low) * PADDING or abs(high) * 0.1 or 1.0
    return Scale(low - padding, high + padding, start, end)


def make_ticks(scale: Scale, count: int = 5) -> list[float]:
    """Round values inside the scale."""
    if scale.log:
        return _log_ticks(scale.low, scale.high, count)
    span = (scale.high - scale.low) / max(count, 1)
    step = 10 ** math.floor(math.log10(span))
    step *= min((factor for factor in (1, 2, 2.5, 5, 10) if factor * step >= span), default=10)
    first = math.ceil(scale.low / step - 1e-9)
    ticks: list[float] = []
    while first * step <= scale.high * (1 + 1e-12) + 1e-300 and len(ticks) < 30:
        ticks.append(round(first * step, 12))
        first += 1
    return ticks


def _log_ticks(low: float, high: float, count: int) -> list[float]:
    ticks: list[float] = []
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
        if len(ticks) >= min(count, 4):
            return ticks
    return ticks


def show_number(value: float) -> str:
    """The number with about three significant digits: `0.0123`, `1.23`, `123`, `12,300`, `1.2e+09`."""
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e9 or size < 1e-4:
        return f"{value:.3g}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


@dataclass(frozen=True)
class Frame:
    """The plotting area of a chart: its two scales."""

    x: Scale
    y: Scale

    @property
    def left(self) -> float:
        return self.x.start

    @property
    def right(self) -> float:
        return self.x.end

    @property
    def top(self) -> float:
        return self.y.end

    @property
    def bottom(self) -> float:
        return self.y.start

    def draw(
        self,
        x_label: str,
        y_label: str,
        *,
        x_ticks: Sequence[float] | None = None,
        y_ticks: Sequence[float] | None = None,
        x_names: Sequence[str] | None = None,
    ) -> list[Item]:
        """Grid, ticks and labels; `x_names` replace the numbers of `x_ticks`."""
        items: list[Item] = []
        for tick in make_ticks(self.y) if y_ticks is None else y_ticks:
            y = self.y(tick)
            items.append(Path(((self.left, y), (self.right, y)), "grid"))
            items.append(Text(self.left - 8, y + 4, show_number(tick), 11.5, "end", "muted"))
        ticks = make_ticks(self.x, 7) if x_ticks is None else x_ticks
        names = [show_number(tick) for tick in ticks] if x_names is None else x_names
        for tick, name in zip(ticks, names, strict=True):
            x = self.x(tick)
            items.append(Path(((x, self.bottom), (x, self.bottom + 4)), "muted"))
            items.append(Text(x, self.bottom + 18, name, 11.5, "middle", "muted"))
        items.append(Path(((self.left, self.bottom), (self.right, self.bottom)), "muted"))
        items.append(Text((self.left + self.right) / 2, self.bottom + 38, x_label, 12.5, "middle", "ink"))
        items.append(Text(self.left - 52, (self.top + self.bottom) / 2, y_label, 12.5, "middle", "ink", upright=True))
        return items
