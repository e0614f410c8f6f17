"""The leaderboard: the best admitted trial of each workload, framework and hardware, by the names of CCL-Bench.

Runs are ranked only within a group of equal work and equal origin. Figures that grow or shrink with the number of
accelerators are also shown per accelerator, and by what the accelerators cost, so that unlike hardware can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from cclsearch.core.metrics import NUM_ACCELERATORS
from cclsearch.core.numbers import read_amount
from cclsearch.record.trial import Trial
from cclsearch.report.figures import find_shown_metric, format_value
from cclsearch.tasks.base import Task, task_of
from cclsearch.trace.ccl_bench import DASHBOARD, describe_name, find_recorded
from cclsearch.ui.evidence import TracedName
from cclsearch.ui.run_index import RunEntry

MAX_PRICES = 40
SECONDS_PER_HOUR = 3600.0


class Normalization(StrEnum):
    """Ways to make figures of unlike hardware comparable."""

    MEASURED = "measured"
    PER_ACCELERATOR = "accelerator"
    COST = "cost"

    @property
    def words(self) -> str:
        """Name of the choice in the page."""
        return {"measured": "as measured", "accelerator": "per accelerator", "cost": "by cost"}[self.value]


class Scaling(StrEnum):
    """Dependence of a figure on the number of accelerators."""

    TIME = "time"
    """Seconds for an amount of work: more accelerators shorten it, so it is multiplied by their number."""
    RATE = "rate"
    """Work per second: divided by their number."""
    RATE_EACH = "rate_each"
    """Work per second and accelerator: changes only by what an accelerator costs."""
    NONE = "none"
    """A share, a latency or a figure of one accelerator: it is the same in every view."""


@dataclass(frozen=True)
class LeaderColumn:
    """One metric of the leaderboard."""

    name: str
    label: str
    unit: str
    greater_is_better: bool | None
    """None if neither direction is better."""
    scaling: Scaling
    differs: str = ""
    """Difference of CCL-Bench's definition; empty for a metric of the task."""


@dataclass(frozen=True)
class LeaderCell:
    """One figure; `value` is None if there is none, and `why` then says why."""

    value: float | None
    shown: str
    why: str = ""


@dataclass(frozen=True)
class LeaderRow:
    """The best trial of one workload, framework and hardware."""

    entry: RunEntry
    trial: Trial
    num_accelerators: int
    cells: Mapping[str, LeaderCell]
    num_runs: int
    """Runs of this workload, framework and hardware."""


@dataclass(frozen=True)
class LeaderGroup:
    """Rows that may be compared: equal task, work and origin; the best first."""

    title: str
    origin: str
    """Origin of the figures; `measured` if trials ran."""
    rows: tuple[LeaderRow, ...]


def make_columns(entries: Sequence[RunEntry]) -> list[LeaderColumn]:
    """The primary metric of each task that occurs, then the names of CCL-Bench's dashboard."""
    columns: dict[str, LeaderColumn] = {}
    for entry in entries:
        task = task_of(entry.spec.card)
        for name in dict.fromkeys((task.primary, *task.efficiency)):
            metric = task.metric(name)
            unit, scaling = metric.unit or "", Scaling.TIME if metric.is_time else Scaling.NONE
            if unit.endswith("/s"):
                scaling = Scaling.RATE_EACH if "per accelerator" in metric.words else Scaling.RATE
            better = None if metric.direction is None else metric.greater_is_better
            columns[name] = LeaderColumn(name, metric.words, unit, better, scaling)
    for name in DASHBOARD:
        known = describe_name(name)
        better = {"higher": True, "lower": False}.get(known.better)
        scaling = Scaling.TIME if known.is_per_work else Scaling.NONE
        columns[name] = LeaderColumn(name, name, known.unit, better, scaling, known.differs)
    return list(columns.values())


def make_groups(
    entries: Sequence[RunEntry],
    columns: Sequence[LeaderColumn],
    sort: LeaderColumn,
    view_as: Normalization,
    prices: Mapping[str, float],
    traced: Mapping[tuple[Path, int], Mapping[str, TracedName]],
) -> list[LeaderGroup]:
    """The groups, each sorted by one column in one view; rows without that figure come last."""
    best: dict[tuple[str, ...], LeaderRow] = {}
    counts: dict[tuple[str, ...], int] = {}
    for entry in entries:
        if entry.best is None:
            continue
        spec, hardware = entry.spec, entry.spec.card.hardware
        key: tuple[str, ...] = (spec.card.task, entry.work, entry.origin, spec.workload, spec.framework, entry.hardware)
        counts[key] = counts.get(key, 0) + 1
        own = traced.get((entry.folder, entry.best.number), {})
        row = _make_row(entry, task_of(entry.spec.card), columns, view_as, prices.get(hardware.accelerator), own)
        if key not in best or _rank(row, sort) < _rank(best[key], sort):
            best[key] = row
    groups: dict[tuple[str, ...], list[LeaderRow]] = {}
    for key, row in best.items():
        counted = LeaderRow(row.entry, row.trial, row.num_accelerators, row.cells, counts[key])
        groups.setdefault(key[:3], []).append(counted)
    return [
        LeaderGroup(f"{task}: {work}", origin, tuple(sorted(rows, key=lambda row: _rank(row, sort))))
        for (task, work, origin), rows in sorted(groups.items())
    ]


def _rank(row: LeaderRow, sort: LeaderColumn) -> tuple[bool, float, str]:
    value = row.cells[sort.name].value
    sign = -1.0 if sort.greater_is_better else 1.0
    return value is None, 0.0 if value is None else sign * value, row.entry.name


def _make_row(
    entry: RunEntry,
    task: Task,
    columns: Sequence[LeaderColumn],
    view_as: Normalization,
    price: float | None,
    traced: Mapping[str, TracedName],
) -> LeaderRow:
    trial = entry.best
    assert trial is not None, "only runs with a best trial have a row"
    metrics = trial.outcome.metrics if trial.outcome else {}
    number = round(metrics.get(NUM_ACCELERATORS, entry.spec.card.hardware.num_accelerators))
    cells = {}
    for column in columns:
        if column.name in DASHBOARD:
            value, why = find_recorded(column.name, metrics, number)
            if value is None and column.name in traced:
                value, why = traced[column.name].value, traced[column.name].why
        else:
            value = metrics.get(column.name)
            why = "" if value is not None else f"this trial has no {column.label}"
        if value is None:
            cells[column.name] = LeaderCell(None, "-", why)
            continue
        scaled, unit = _normalize(column, value, number, view_as, price)
        metric = find_shown_metric(task, column.name).model_copy(update={"unit": unit})
        cells[column.name] = LeaderCell(scaled, format_value(metric, scaled))
    return LeaderRow(entry, trial, number, cells, 1)


def _normalize(
    column: LeaderColumn, value: float, number: int, view_as: Normalization, price: float | None
) -> tuple[float, str]:
    """The figure in that view, and its unit.

    By cost: money for the time, or work per unit of money. Without a price, an accelerator-hour is the unit of cost.
    """
    is_time, is_each = column.scaling is Scaling.TIME, column.scaling is Scaling.RATE_EACH
    if view_as is Normalization.MEASURED or column.scaling is Scaling.NONE:
        return value, column.unit
    if view_as is Normalization.PER_ACCELERATOR:
        if is_each:
            return value, column.unit
        unit = f"accelerator-{column.unit}" if is_time else f"{column.unit} per accelerator"
        return (value * number if is_time else value / number), unit
    money = "money" if price is not None else "accelerator-h"
    cost_per_s = (1 if is_each else number) * (1.0 if price is None else price) / SECONDS_PER_HOUR
    if is_time:
        return value * cost_per_s, money
    return value / cost_per_s, f"{column.unit.removesuffix('/s')} per {money}"


def read_prices(parameters: Mapping[str, str], accelerators: Sequence[str]) -> dict[str, float]:
    """Accelerator -> price of an hour, from the fields `price.0`, `price.1`, ... of the page; others are left out."""
    prices = {}
    for place, name in enumerate(accelerators[:MAX_PRICES]):
        try:
            prices[name] = read_amount(parameters.get(f"price.{place}", ""), 1e-6, 1e6)
        except ValueError:
            continue
    return prices


def name_unit(column: LeaderColumn) -> str:
    """The unit that a heading names; empty if it is a share or unknown."""
    return "" if column.unit in ("", "fraction") else column.unit
