"""A Pareto front as plain data and as charts: its points, the choice of each weight, the hypervolume over trials."""

from __future__ import annotations

import csv
import io
import itertools
from dataclasses import dataclass, field

from cclsearch.charts.chart import Chart
from cclsearch.charts.pareto import FrontPoint, draw_front, draw_hypervolume, draw_weight_choices
from cclsearch.core.metrics import Direction
from cclsearch.core.values import Provenance
from cclsearch.scoring.objective import Term


def axis_label(axis: Term) -> str:
    """The metric, with its unit unless its name contains it."""
    return f"{axis.metric} ({axis.unit})" if axis.unit and axis.unit not in axis.metric else axis.metric


@dataclass(frozen=True)
class ParetoPage:
    """A Pareto front of one run or several."""

    title: str
    runs: tuple[str, ...]
    work: str
    provenance: str
    axes: tuple[Term, ...]
    points: tuple[FrontPoint, ...]
    growth: tuple[float, ...]
    """Hypervolume after each trial, in order of their ends, as a share of the last one; failed trials included."""
    hypervolume: float
    reference: tuple[float, ...]
    """Reference point of the hypervolume, in the units of the axes."""
    is_by_ratio: bool
    """Whether the hypervolume is measured in logarithms."""
    objective: str = ""
    weights: tuple[tuple[float, int, float], ...] = ()
    """Weight, index of the point that it chooses, and that point's score."""
    notes: tuple[str, ...] = field(default=())

    @property
    def mark(self) -> str:
        return Provenance(self.provenance).mark

    @property
    def front(self) -> list[FrontPoint]:
        """Points on the Pareto front, ordered by the first metric."""
        return sorted((p for p in self.points if p.on_front), key=lambda p: p.values)

    @property
    def choices(self) -> list[FrontPoint]:
        """Points that some weight chooses, ordered by weight."""
        return sorted((p for p in self.points if p.chosen), key=lambda p: p.chosen or (0.0, 0.0))


def draw_pareto_page(page: ParetoPage) -> list[Chart]:
    """Every chart that the page's data allow."""
    pairs = list(itertools.combinations(range(len(page.axes)), 2))
    charts: list[Chart | None] = [draw_pareto_front(page, y=first, x=second) for first, second in pairs]
    if page.choices:
        charts.append(draw_weight_choices(page.points, f"{page.objective.split(':')[0]} score{page.mark}"))
    charts.append(draw_hypervolume(page.growth))
    return [chart for chart in charts if chart is not None]


def draw_pareto_front(page: ParetoPage, *, y: int = 0, x: int = 1) -> Chart:
    """The Pareto front over two of its metrics."""
    up, across = page.axes[y], page.axes[x]
    return draw_front(
        page.points, axis_label(across), axis_label(up) + page.mark,
        name=f"front-{up.metric}-{across.metric}".replace("_", "-"), axes=(x, y),
        x_greater=across.direction is Direction.MAXIMIZE, y_greater=up.direction is Direction.MAXIMIZE,
    )  # fmt: skip


def render_pareto_csv(page: ParetoPage) -> str:
    """CSV with one row per configuration: run, trial, knobs, metrics, membership of the front, weights choosing it."""
    knobs = list(dict.fromkeys(knob for point in page.points for knob in point.config))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    axes = [axis.metric for axis in page.axes]
    marks = ["on_front", "knee", "hypervolume_share", "low", "high", "weight_from", "weight_to"]
    writer.writerow(["run", "trial", "provenance", *knobs, *axes, *marks])
    for point in sorted(page.points, key=lambda p: (not p.on_front, p.values)):
        config = [escape_formula(point.config.get(knob, "")) for knob in knobs]
        flags = [int(point.on_front), int(point.is_knee), f"{point.hypervolume_share:.6g}"]
        ranges = [*(point.interval or ("", "")), *(point.chosen or ("", ""))]
        run = escape_formula(point.run)
        writer.writerow([run, point.trial, page.provenance, *config, *point.values, *flags, *ranges])
    return text.getvalue()


def escape_formula(value: object) -> object:
    """The value, with a leading quote if it is text that a spreadsheet would read as a formula."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return "'" + value
    return value
