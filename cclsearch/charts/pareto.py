"""Charts of a Pareto front: its points with a slider for the weight, scores by weight, the hypervolume."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cclsearch.charts.chart import TRIAL, Chart, Row, category, cut, fixed, layer, make_spec, number, quantity, tips
from cclsearch.core.text import show_number
from cclsearch.core.values import Value, format_config


@dataclass(frozen=True)
class FrontPoint:
    """One configuration that was measured and admitted."""

    run: str
    trial: int
    config: Mapping[str, Value]
    values: tuple[float, ...]
    """Measured values, in the order of the axes."""
    on_front: bool
    is_knee: bool = False
    interval: tuple[float, float] | None = None
    """Interval of the first metric; None if the noise is unknown."""
    hypervolume_share: float = 0.0
    """Share of the Pareto front's hypervolume that would be lost without it."""
    scores: tuple[float, float] | None = None
    """Scores at weight 0 and at weight 1; more is better."""
    chosen: tuple[float, float] | None = None
    """The weights that choose it."""

    @property
    def name(self) -> str:
        return f"{self.run}:{self.trial}"

    @property
    def config_text(self) -> str:
        return format_config(self.config)

    def score_at(self, weight: float) -> float:
        low, high = self.scores or (0.0, 0.0)
        return (1 - weight) * low + weight * high


def name_points(points: Sequence[FrontPoint]) -> dict[str, str]:
    """Name of each point -> its label: the number of the trial if all are of one run."""
    is_one_run = len({point.run for point in points}) < 2
    return {point.name: str(point.trial) if is_one_run else point.name for point in points}


def _row(point: FrontPoint, label: str, axes: tuple[int, int], **more: object) -> Row:
    x, y = (point.values[axis] for axis in axes)
    row: Row = {"trial": point.trial, "run": point.run, "name": label, "config": point.config_text, "x": x, "y": y}
    row |= {"xs": show_number(x), "ys": show_number(y)}
    row |= {"kind": "knee" if point.is_knee else "on the front" if point.on_front else "dominated"}
    return row | more


def draw_front(
    points: Sequence[FrontPoint], x_title: str, y_title: str, *, name: str, x_greater: bool, y_greater: bool,
    axes: tuple[int, int] = (1, 0),
) -> Chart:  # fmt: skip
    """The front, the points that it dominates, and, if scores are known, the choice of a weight that a slider sets.

    `axes` are the places of the two metrics, x and y, among the values; with others the front has no border to draw.
    """
    at_x, at_y = axes
    is_whole = all(len(point.values) == 2 for point in points)
    labels = name_points(points)
    front = sorted((point for point in points if point.on_front), key=lambda p: p.values[at_x], reverse=x_greater)
    x = quantity("x", x_title, [p.values[at_x] for p in points])
    y = quantity("y", y_title, [p.values[at_y] for p in points])
    layers: list[dict[str, Any]] = []
    if is_whole and front:
        line = {"color": "$green", "interpolate": "step-after", "strokeWidth": 1.8}
        border = [_row(p, labels[p.name], axes, order=n) for n, p in enumerate(front)]
        layers.append(layer("line", {"x": x, "y": y, "order": {"field": "order"}}, border, **line))
    known = [(p.values[at_x], p.interval) for p in front if p.interval and at_y == 0]
    spans = [{"x": value, "low": low, "high": high} for value, (low, high) in known]
    if spans:
        ends = {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}}
        layers.append(layer("rule", ends, spans, color="$green", strokeWidth=1.6))
    looks = {"color": ["$green", "$purple", "$gray"], "shape": ["circle", "diamond", "triangle-up"]}
    kinds = ["on the front", "knee", "dominated"]
    tooltip = tips(name="trial", ys=y_title, xs=x_title, kind="state", config="configuration")
    kind = category("kind", legend={"title": None})
    look = {name: {**kind, "scale": {"domain": kinds, "range": given}} for name, given in looks.items()}
    layers.append(layer("point", {"x": x, "y": y, "tooltip": tooltip, **look}, filled=True, size=80, cursor="pointer"))
    beside: Row = {"dx": 10, "dy": -9, "align": "left", "fontSize": 11, "color": "$muted"}
    names = layer("text", {"x": x, "y": y, "text": {"field": "trial"}}, **beside)
    layers.append(names | {"transform": [{"filter": "datum.kind !== 'dominated'"}]})
    rows = [_row(point, labels[point.name], axes) for point in points]
    params = []
    weighted = [_row(p, labels[p.name], axes, s0=p.scores[0], s1=p.scores[1]) for p in points if p.scores]
    if weighted:
        bind = {"input": "range", "min": 0, "max": 1, "step": 0.01, "name": "weight "}
        params = [{"name": "weight", "value": 0.5, "bind": bind}]
        layers += _chosen_layers(weighted, x, y, tooltip)
    summary = "On the Pareto front: " + "; ".join(
        f"trial {labels[p.name]}: {show_number(p.values[at_y])}, {show_number(p.values[at_x])}" for p in front
    )
    spec = make_spec(rows, 340, layer=layers, **({"params": params} if params else {}))
    direction = f"better is {'up' if y_greater else 'down'} and {'right' if x_greater else 'left'}"
    return Chart(name, f"Pareto front ({direction})", summary, spec)


def _chosen_layers(rows: Sequence[Row], x: Row, y: Row, tooltip: Sequence[Row]) -> list[dict[str, Any]]:
    """A ring and a label at the point with the highest score at the slider's weight."""
    transform = [
        {"calculate": "(1 - weight) * datum.s0 + weight * datum.s1", "as": "score"},
        {"window": [{"op": "rank", "as": "place"}], "sort": [{"field": "score", "order": "descending"}]},
        {"filter": "datum.place === 1"},
        {"calculate": "'chosen at weight ' + format(weight, '.2f') + ': trial ' + datum.trial", "as": "words"},
    ]
    ring = {"shape": "circle", "filled": False, "size": 420, "color": "$orange", "strokeWidth": 3}
    text = {"align": "right", "x": {"expr": "width"}, "y": 10, "color": "$orange", "fontWeight": "bold"}
    return [
        layer("point", {"x": x, "y": y, "tooltip": list(tooltip)}, rows, **ring) | {"transform": transform},
        layer("text", {"text": {"field": "words"}}, rows, **text) | {"transform": transform},
    ]


def draw_weight_choices(points: Sequence[FrontPoint], score_title: str) -> Chart | None:
    """Score by weight: a line for each configuration that some weight chooses, thick where it is chosen."""
    kept = [(p, p.scores, p.chosen) for p in points if p.scores and p.chosen]
    if not kept:
        return None
    kept.sort(key=lambda entry: entry[2])
    labels = name_points(points)
    whole: list[Row] = []
    thick: list[Row] = []
    for point, (at_0, at_1), (low, high) in kept:
        name = f"trial {labels[point.name]}"
        tip = f"{name} from weight {low:.3g} to {high:.3g}"
        shared: Row = {"point": name, "tip": tip, "config": point.config_text}
        whole += [shared | {"w": w, "score": score} for w, score in ((0, at_0), (1, at_1))]
        thick += [shared | {"w": w, "score": point.score_at(w)} for w in (low, high)]
    score = number("score", title=score_title, scale={"zero": False})
    lines = {"x": number("w", title="weight", scale=fixed(0, 1)), "y": score}
    lines |= {"color": category("point", legend={"title": None})}
    chosen = {**lines, "tooltip": tips(tip="chosen", config="configuration")}
    ends = {**chosen, "shape": category("point", legend=None)}
    layers = [
        layer("line", lines, strokeDash=[4, 4], strokeWidth=1.2),
        layer("line", chosen, thick, strokeWidth=4),
        layer("point", ends, thick, filled=True, size=60, opacity=1),
    ]
    summary = "; ".join(f"trial {labels[p.name]} from weight {low:.3g} to {high:.3g}" for p, _, (low, high) in kept)
    return Chart("weights", "Configuration chosen by each weight", summary, make_spec(whole, 300, layer=layers))


def draw_hypervolume(growth: Sequence[float]) -> Chart | None:
    """Hypervolume after each trial, as a share of the last one."""
    if len(growth) < 2:
        return None
    reached = next(n for n, share in enumerate(growth, 1) if share >= 0.95)
    rows = [{"trial": n, "share": share} for n, share in enumerate((0.0, *growth))]
    share = number("share", title="share of the final hypervolume", axis={"format": "%"})
    place = {"x": {**TRIAL, "title": "trials"}, "y": share}
    is_late = reached > len(growth) / 2
    beside: Row = {"align": "right", "dx": -10, "dy": -4} if is_late else {"align": "left", "dx": 10, "dy": 16}
    named: list[Row] = [{"trial": reached, "share": growth[reached - 1], "words": f"95% after {reached} trials"}]
    layers = [
        layer("line", place, interpolate="step-after", strokeWidth=2),
        layer("point", place, named, filled=True, size=90, color="$orange", shape="diamond"),
        layer("text", {**place, "text": {"field": "words"}}, named, **beside),
    ]
    summary = f"95% of the hypervolume after {reached} of {len(growth)} trials"
    return Chart("hypervolume", "Hypervolume over trials", cut(summary, 200), make_spec(rows, 240, layer=layers))
