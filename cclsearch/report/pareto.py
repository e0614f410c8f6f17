"""A Pareto front as plain data and as charts: its points, the choice of each weight, the hypervolume over trials."""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cclsearch.core.metrics import Direction
from cclsearch.core.values import Provenance, Value
from cclsearch.draw.axes import Frame, Scale, fit_scale, show_number
from cclsearch.draw.scene import SERIES, SHAPES, Item, Mark, Path, Scene, Text
from cclsearch.report.axes import WIDTH, draw_legend
from cclsearch.score.objective import Term

LEFT, RIGHT = 84.0, 24.0


def axis_label(axis: Term) -> str:
    """The metric, with its unit unless its name contains it."""
    return f"{axis.metric} ({axis.unit})" if axis.unit and axis.unit not in axis.metric else axis.metric


@dataclass(frozen=True)
class ParetoPoint:
    """One configuration that was measured and admitted."""

    run_id: str
    trial: int
    config: Mapping[str, Value]
    config_text: str
    values: tuple[float, ...]
    """As measured, in the order of the axes."""
    on_front: bool
    is_knee: bool = False
    interval: tuple[float, float] | None = None
    """Interval of the first metric; None if the noise is unknown."""
    hypervolume_share: float = 0.0
    """Share of the Pareto front's hypervolume that would be lost without it."""
    scores: tuple[float, float] | None = None
    """Scores at weight 0 and at weight 1."""
    chosen: tuple[float, float] | None = None
    """Range of the weights that choose it."""

    @property
    def name(self) -> str:
        return f"{self.run_id}:{self.trial}"

    def score_at(self, weight: float) -> float:
        low, high = self.scores or (0.0, 0.0)
        return (1 - weight) * low + weight * high


@dataclass(frozen=True)
class ParetoPage:
    """A Pareto front of one run or several."""

    title: str
    runs: tuple[str, ...]
    work: str
    provenance: str
    axes: tuple[Term, ...]
    points: tuple[ParetoPoint, ...]
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
    def front(self) -> list[ParetoPoint]:
        """Points on the Pareto front, ordered by the first metric."""
        return sorted((p for p in self.points if p.on_front), key=lambda p: p.values)

    @property
    def choices(self) -> list[ParetoPoint]:
        """Points that some weight chooses, ordered by weight."""
        return sorted((p for p in self.points if p.chosen), key=lambda p: p.chosen or (0.0, 0.0))


def draw_pareto_page(page: ParetoPage) -> list[Scene]:
    """Every chart that the page's data allow."""
    pairs = list(itertools.combinations(range(len(page.axes)), 2))
    scenes = [draw_pareto_front(page, y=first, x=second) for first, second in pairs]
    if page.choices:
        scenes.append(draw_weight_choices(page))
    if len(page.growth) > 1:
        scenes.append(draw_hypervolume_growth(page))
    return scenes


def draw_pareto_front(page: ParetoPage, *, y: int = 0, x: int = 1) -> Scene:
    """The Pareto front, the points it dominates, and the intervals of the points on it."""
    reach = [v for p in page.points for v in (p.values[y], *(p.interval or ()) * (y == 0))]
    across = [p.values[x] for p in page.points]
    frame = Frame(fit_scale(across, LEFT, WIDTH - RIGHT), fit_scale(reach, 400, 46))
    ticks = sorted(set(across)) if len(set(across)) <= 12 else None
    items = frame.draw(axis_label(page.axes[x]), axis_label(page.axes[y]) + page.mark, x_ticks=_thin(ticks, frame.x))
    front = [p for p in page.points if p.on_front]
    if len(page.axes) == 2:
        items.append(Path(_stairs(page, front, frame), "green", 1.8))
    for point in sorted(page.points, key=lambda p: p.on_front):
        px, py = frame.x(point.values[x]), frame.y(point.values[y])
        tip = f"{point.name}: {point.config_text}\n{_format_values(page, point)}"
        run = page.runs.index(point.run_id)
        if not point.on_front:
            items.append(Mark(px, py, SHAPES[run % 5], 8, "gray", hollow=True, tip=tip + "\ndominated"))
            continue
        if point.interval and y == 0:
            low, high = (frame.y(v) for v in point.interval)
            items.append(Path(((px, low), (px, high)), "green", 1.6))
        shape = "star" if point.is_knee else SHAPES[run % 5]
        items.append(Mark(px, py, shape, 18 if point.is_knee else 11, "green", tip=tip))
        items.append(Text(px + 9, py - 8, str(point.trial), 11, "start", "muted"))
    items += _front_legend(page)
    summary = "; ".join(f"trial {p.name}: {_format_values(page, p)}" for p in page.front)
    name = f"front-{page.axes[y].metric}-{page.axes[x].metric}".replace("_", "-")
    return Scene(name, "Pareto front", f"On the Pareto front: {summary}", WIDTH, 450, tuple(items))


def draw_weight_choices(page: ParetoPage) -> Scene:
    """Score by weight: a line for each configuration that some weight chooses, with the changes of choice marked."""
    choices = page.choices
    ends = [s for p in choices for s in (p.scores or ())]
    frame = Frame(Scale(0.0, 1.0, LEFT, WIDTH - RIGHT - 90), fit_scale(ends, 330, 40, log=False))
    items = frame.draw(
        "weight", f"{page.objective.split(':')[0]} score{page.mark}", x_ticks=[n / 10 for n in range(11)]
    )
    chosen_from = []
    for n, point in enumerate(choices):
        low, high = point.chosen or (0.0, 0.0)
        role = SERIES[n % len(SERIES)]
        line = tuple((frame.x(w), frame.y(point.score_at(w))) for w in (0.0, 1.0))
        items.append(Path(line, role, 1.2, dash=(4, 4)))
        (x0, y0), (x1, y1) = chosen = tuple((frame.x(w), frame.y(point.score_at(w))) for w in (low, high))
        tip = f"{point.name} from weight {low:.3g} to {high:.3g}\n{point.config_text}"
        items.append(Path(chosen, role, 4.0, tip=tip))
        items.append(Mark((x0 + x1) / 2, (y0 + y1) / 2, SHAPES[n % 5], 10, role, tip=tip))
        if high < 1:
            items.append(Path(((x1, frame.top), (x1, frame.bottom)), "muted", 1.0, dash=(2, 3)))
        chosen_from.append(f"trial {point.name} from {low:.3g} to {high:.3g}")
    items += _label_ends(choices, frame)
    summary = "; ".join(chosen_from)
    return Scene("weights", "Configuration chosen by each weight", summary, WIDTH, 384, tuple(items))


def draw_hypervolume_growth(page: ParetoPage) -> Scene:
    """Hypervolume over trials, as a share of the final one."""
    frame = Frame(Scale(0.0, float(len(page.growth)), LEFT, WIDTH - RIGHT), Scale(0.0, 1.03, 280, 30))
    items = frame.draw("trials", "share of the final hypervolume", y_ticks=[0, 0.25, 0.5, 0.75, 1.0])
    points: list[tuple[float, float]] = [(frame.x(0), frame.y(0))]
    for n, share in enumerate(page.growth, 1):
        points += [(frame.x(n), points[-1][1]), (frame.x(n), frame.y(share))]
    items.append(Path(tuple(points), "blue", 2.0))
    reached = next(n for n, share in enumerate(page.growth, 1) if share >= 0.95)
    x, y = frame.x(reached), frame.y(page.growth[reached - 1])
    items += [Mark(x, y, "diamond", 11, "orange"), Text(x + 10, y + 18, f"95 % after {reached} trials", 12)]
    summary = f"95 % of the hypervolume after {reached} of {len(page.growth)} trials"
    return Scene("hypervolume", "Hypervolume over trials", summary, WIDTH, 330, tuple(items))


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
        run = escape_formula(point.run_id)
        writer.writerow([run, point.trial, page.provenance, *config, *point.values, *flags, *ranges])
    return text.getvalue()


def escape_formula(value: object) -> object:
    """The value, with a leading quote if it is text that a spreadsheet would read as a formula."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return "'" + value
    return value


def _stairs(page: ParetoPage, front: Sequence[ParetoPoint], frame: Frame) -> tuple[tuple[float, float], ...]:
    """The border of the dominated region: from point to point along the axes."""
    greater_y, greater_x = (axis.direction is Direction.MAXIMIZE for axis in page.axes)
    ordered = sorted(front, key=lambda p: p.values[1], reverse=greater_x)
    if not ordered:
        return ()
    first, last = ordered[0], ordered[-1]
    worst_y = frame.bottom if greater_y else frame.top
    worst_x = frame.left if greater_x else frame.right
    points = [(frame.x(first.values[1]), worst_y)]
    for before, after in itertools.pairwise(ordered):
        points.append((frame.x(before.values[1]), frame.y(before.values[0])))
        points.append((frame.x(after.values[1]), frame.y(before.values[0])))
    points += [(frame.x(last.values[1]), frame.y(last.values[0])), (worst_x, frame.y(last.values[0]))]
    return tuple(points)


def _front_legend(page: ParetoPage) -> list[Item]:
    entries = [("on the front", Mark(0, 0, "circle", 11, "green"))]
    if any(p.is_knee for p in page.points):
        entries.append(("knee", Mark(0, 0, "star", 16, "green")))
    entries.append(("dominated", Mark(0, 0, "circle", 8, "gray", hollow=True)))
    if len(page.runs) > 1:
        entries += [(run, Mark(0, 0, SHAPES[n % 5], 9, "ink", hollow=True)) for n, run in enumerate(page.runs[:4])]
    return draw_legend(entries, LEFT, 24, gap=13, step=40)


def _label_ends(choices: Sequence[ParetoPoint], frame: Frame) -> list[Item]:
    """Trial names at the right ends of their lines, moved apart."""
    ends = sorted(((frame.y(p.score_at(1.0)), p, n) for n, p in enumerate(choices)), key=lambda end: end[0])
    items: list[Item] = []
    last = -math.inf
    for y, point, n in ends:
        last = max(y, last + 14)
        items.append(Text(frame.right + 8, last + 4, f"trial {point.trial}", 11.5, "start", SERIES[n % len(SERIES)]))
    return items


def _thin(ticks: Sequence[float] | None, scale: Scale) -> list[float] | None:
    """Ticks that are far enough apart for their labels."""
    if ticks is None:
        return None
    kept: list[float] = []
    for tick in ticks:
        if not kept or abs(scale(tick) - scale(kept[-1])) > 34:
            kept.append(tick)
    return kept


def _format_values(page: ParetoPage, point: ParetoPoint) -> str:
    return ", ".join(f"{axis.metric} {show_number(v)}" for axis, v in zip(page.axes, point.values, strict=True))
