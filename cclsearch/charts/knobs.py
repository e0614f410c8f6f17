"""Charts of the effects of knobs: parallel coordinates, importance, one knob, and two knobs together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cclsearch.charts.chart import (
    Chart,
    Row,
    category,
    cut,
    fixed,
    layer,
    make_spec,
    named_bars,
    number,
    quantity,
    show_choice,
    tips,
)
from cclsearch.charts.trials import Axis, TrialPoint, place_choices, varied_knobs
from cclsearch.core.text import show_number
from cclsearch.core.values import format_config

MAX_LINES = 300
"""Lines in parallel coordinates: the best ones."""


HALO: Row = {"stroke": "$paper", "strokeWidth": 3, "strokeJoin": "round"}
"""Border of a text over marks, which is drawn again without it."""


def _shades(axis: Axis) -> Row:
    """A scale of colors, the lightest for the worst figure."""
    return {"range": ["$low", "$high"] if axis.greater_is_better else ["$high", "$low"]}


def _tips(axis: Axis) -> list[Row]:
    return tips(trial="trial", shown=axis.words, config="configuration")


def _ranked(points: Sequence[TrialPoint], axis: Axis) -> list[tuple[TrialPoint, float]]:
    """Points that count with their figures, the best first."""
    kept = [(point, point.value) for point in points if point.counts and point.value is not None]
    return sorted(kept, key=lambda pair: -pair[1] if axis.greater_is_better else pair[1])


def draw_parallel(points: Sequence[TrialPoint], axis: Axis) -> Chart | None:
    """Parallel coordinates: a line per configuration over its knobs, ending at its figure."""
    ranked = _ranked(points, axis)[:MAX_LINES]
    configs = [point.config for point, _ in ranked]
    knobs = varied_knobs(configs)
    if len(ranked) < 2 or not knobs:
        return None
    order = [place_choices(configs, knob, alone=0.5) for knob in knobs]
    values = [value for _, value in ranked]
    low, high = min(values), max(values)
    places = {point.number: (value - low) / (high - low) if high > low else 0.5 for point, value in ranked}
    rows: list[Row] = []
    for nth, (point, value) in enumerate(reversed(ranked), 1):
        shared: Row = {"trial": point.number, "figure": places[point.number], "best": nth == len(ranked)}
        shared |= {"shown": show_number(value), "config": format_config(point.config)}
        for at, (knob, known) in enumerate(zip(knobs, order, strict=True)):
            if knob in point.config:
                rows.append({"at": at, "y": known[point.config[knob]], **shared})
        rows.append({"at": len(knobs), "y": places[point.number], **shared})
    ticks: list[Row] = [
        {"at": at, "y": place, "label": cut(str(show_choice(value)), 12)}
        for at, known in enumerate(order)
        for value, place in known.items()
    ]
    ticks += [
        {"at": len(knobs), "y": 0, "label": show_number(low)},
        {"at": len(knobs), "y": 1, "label": show_number(high)},
    ]
    heads = [{"at": at, "head": cut(name, 22)} for at, name in enumerate([*knobs, axis.words])]
    x = number("at", axis=None, scale=fixed(-0.15, len(knobs) + 0.4))
    y = number("y", axis=None, scale=fixed(-0.04, 1.04))

    def of_line(pointed: object, best: object) -> Row:
        return {"condition": [{"param": "pointed", "value": pointed, "empty": False},
                              {"test": "datum.best", "value": best}]}  # fmt: skip

    shade = number("figure", legend=None, scale=_shades(axis))
    select = {"type": "point", "fields": ["trial"], "on": "pointerover", "clear": "pointerout"}
    lines = {"x": x, "y": y, "detail": {"field": "trial"}, "order": {"field": "at"}, "tooltip": _tips(axis)}
    lines |= {"color": of_line("$orange", "$green") | shade, "strokeWidth": of_line(3, 3.5) | {"value": 1.2}}
    label = {"x": x, "y": y, "text": {"field": "label"}}
    head = {"x": x, "y": {"value": -10}, "text": {"field": "head"}}
    is_narrow = f"width / {len(knobs) + 1} < 90"
    slant: Row = {"angle": {"expr": f"{is_narrow} ? -24 : 0"}, "align": {"expr": f"{is_narrow} ? 'left' : 'center'"}}
    layers = [
        layer("rule", {"x": x}, heads, color="$grid"),
        layer("line", lines, opacity=0.8, cursor="pointer") | {"params": [{"name": "pointed", "select": select}]},
        layer("text", label, ticks, align="left", dx=5, fontSize=11, **HALO),
        layer("text", label, ticks, align="left", dx=5, fontSize=11),
        layer("text", head, heads, fontSize=11.5, **slant),
    ]
    best = ranked[0][0]
    limit = f" (the best {MAX_LINES})" if len(ranked) == MAX_LINES else ""
    summary = f"{len(ranked)} configurations{limit} over {', '.join(knobs)}; the best, trial {best.number}, is green"
    spec = make_spec(rows, 300, layer=layers, padding={"top": 34, "left": 5, "right": 5, "bottom": 5})
    return Chart("parallel", f"Parallel coordinates{limit}", summary, spec)


def draw_importance(shares: Mapping[str, float], axis: Axis) -> Chart | None:
    """Share of the figure's variation that each knob explains, by PED-ANOVA of Optuna."""
    if not shares:
        return None
    rows = [
        {"knob": cut(k, 30), "share": s, "shown": f"{s:.0%}"} for k, s in sorted(shares.items(), key=lambda i: -i[1])
    ]
    title, most = f"importance for {axis.words} (PED-ANOVA of Optuna)", max(1e-9, *shares.values())
    x = number("share", title=title, scale=fixed(0, most * 1.12), axis={"format": "%", "tickCount": 6})
    layers = named_bars(x, category("knob"), tips(knob="knob", shown="importance"))
    summary = ", ".join(f"{row['knob']} {row['shown']}" for row in rows)
    return Chart("importance", "Knob importance", summary, make_spec(rows, {"step": 26}, layer=layers))


def _wide(points: Sequence[TrialPoint], axis: Axis) -> tuple[list[str], list[Row]]:
    """The varied knobs, and a row per trial that counts with its knobs as `k0`, `k1`, ...

    Fields have names of ours because Vega reads `.` and `[` in a field's name as a path.
    """
    ranked = _ranked(points, axis)
    knobs = varied_knobs([point.config for point, _ in ranked])
    rows: list[Row] = []
    for point, value in ranked:
        row: Row = {"trial": point.number, "v": value, "shown": show_number(value)}
        row |= {"config": format_config(point.config)}
        row |= {f"k{n}": show_choice(point.config[knob]) for n, knob in enumerate(knobs) if knob in point.config}
        rows.append(row)
    return knobs, rows


def _choose(name: str, label: str, knobs: Sequence[str], first: int) -> dict[str, Any]:
    """A selection box of the page that chooses a knob."""
    fields = [f"k{n}" for n in range(len(knobs))]
    bind = {"input": "select", "options": fields, "labels": [cut(knob, 40) for knob in knobs], "name": f"{label} "}
    return {"name": name, "value": f"k{first}", "bind": bind}


def draw_slice(points: Sequence[TrialPoint], axis: Axis, *, first: str | None = None) -> Chart | None:
    """The figure by the values of one knob, which the reader chooses; `first` is shown at first."""
    knobs, rows = _wide(points, axis)
    if len(rows) < 3 or not knobs:
        return None
    at = knobs.index(first) if first in knobs else 0
    x = {"field": "x", "type": "ordinal", "title": "value of the knob", "axis": {"labelAngle": 0, "labelOverlap": True}}
    y = quantity("v", axis.title, [row["v"] for row in rows])
    best = {**y, "aggregate": "max" if axis.greater_is_better else "min"}
    points_of = {"x": x, "y": y, "tooltip": _tips(axis)}
    layers = [
        layer("point", points_of, filled=True, size=70, opacity=0.75, cursor="pointer"),
        layer("line", {"x": x, "y": best}, color="$green", point=False, strokeWidth=2),
    ]
    spec = make_spec(
        rows, 280, layer=layers, params=[_choose("knob", "knob", knobs, at)],
        transform=[{"calculate": "datum[knob]", "as": "x"}, {"filter": "isValid(datum.x)"}],
    )  # fmt: skip
    summary = f"{axis.words} of {len(rows)} trials by the value of one knob; the line joins the best of each value"
    return Chart("slice", "One knob", summary, spec)


def draw_contour(points: Sequence[TrialPoint], axis: Axis, *, first: Sequence[str] = ()) -> Chart | None:
    """The best figure for each pair of values of two knobs, which the reader chooses."""
    knobs, rows = _wide(points, axis)
    if len(rows) < 4 or len(knobs) < 2:
        return None
    chosen = [knobs.index(knob) for knob in first if knob in knobs][:2]
    one, two = [*chosen, *(n for n in range(len(knobs)) if n not in chosen)][:2]
    best = "max" if axis.greater_is_better else "min"
    x = {"field": "x", "type": "ordinal", "title": "first knob", "axis": {"labelAngle": 0, "labelOverlap": True}}
    y = {"field": "y", "type": "ordinal", "title": "second knob", "sort": "descending"}
    legend = {"orient": "top", "gradientLength": 180, "format": "~g", "titleLimit": 320}
    color = number("top", title=f"best {axis.title}", scale=_shades(axis), legend=legend)
    tooltip = [{"field": "top", "title": f"best {axis.words}", "format": ".4~g"}, {"field": "n", "title": "trials"}]
    transform = [
        {"calculate": "datum[first]", "as": "x"},
        {"calculate": "datum[second]", "as": "y"},
        {"filter": "isValid(datum.x) && isValid(datum.y)"},
        {"aggregate": [{"op": best, "field": "v", "as": "top"}, {"op": "count", "as": "n"}], "groupby": ["x", "y"]},
    ]
    text = {"x": x, "y": y, "text": {"field": "top", "format": ".3~g"}}
    layers = [
        layer("rect", {"x": x, "y": y, "color": color, "tooltip": tooltip}, stroke="$paper", strokeWidth=2),
        layer("text", text, fontSize=11, **HALO),
        layer("text", text, fontSize=11),
    ]
    params = [_choose("first", "first knob", knobs, one), _choose("second", "second knob", knobs, two)]
    summary = f"the best {axis.words} of each pair of values of two knobs, over {len(rows)} trials"
    return Chart(
        "contour", "Two knobs", summary, make_spec(rows, 280, layer=layers, params=params, transform=transform)
    )
