"""Charts and the values of figures."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from cclsearch.charts.chart import PALETTE, Chart, page_data, page_script, paint, palette_css, render_png, render_svg
from cclsearch.charts.compare import NightPoint, draw_bests, draw_curves, draw_nights
from cclsearch.charts.knobs import draw_contour, draw_importance, draw_parallel, draw_slice
from cclsearch.charts.pareto import FrontPoint, draw_front, draw_hypervolume, draw_weight_choices
from cclsearch.charts.parts import LANES, Lane, StackedBar, as_trace_events, draw_parts, draw_timeline, join_spans
from cclsearch.charts.trials import (
    BEST,
    CONFIRMED,
    FAILED,
    NOT_ADMITTED,
    RANKED,
    Axis,
    NeighborPoint,
    TrialPoint,
    draw_against,
    draw_history,
    draw_neighbors,
    draw_prediction,
    draw_strip,
    varied_knobs,
)
from cclsearch.core.metrics import Direction, MetricInfo
from cclsearch.plugins import TASKS
from cclsearch.report.figures import (
    describe_difference,
    describe_gain,
    find_gain,
    format_value,
    name_value,
    name_values,
    show_value,
)

STEP_TIME = Axis("step time", "step time (s) (recorded)")
HOSTILE = "$green'</script><img src=x onerror=alert(1)>"


def make_points(count: int = 25) -> list[TrialPoint]:
    random.seed(count)
    points = []
    for number in range(1, count + 1):
        config = {
            "tp": 2 ** random.randint(0, 3),
            "zero.stage[0]": random.randint(0, 2),
            "ckpt": random.random() < 0.5,
            "kernel": random.choice(["flash", HOSTILE]),
            "fixed": 1,
        }
        kind = (RANKED, RANKED, FAILED, NOT_ADMITTED, RANKED, CONFIRMED)[number % 6]
        value = None if kind == FAILED else 8 / int(config["tp"]) ** 0.5 + random.random()
        expected = value and value * (2.0 if number == 13 else 1.05)
        points.append(TrialPoint(number, config, kind, value, 0.05, expected, "default", HOSTILE, {"mfu": number / 99}))
    best = min((p for p in points if p.kind == RANKED), key=lambda p: p.value or 0.0)
    points[best.number - 1] = replace(best, kind=BEST)
    return points


def make_front() -> list[FrontPoint]:
    given = [
        (1, 1.0, 10.0, True, (1.0, 0.0), (0.0, 0.4)),
        (2, 2.0, 5.0, True, (0.8, 0.8), (0.4, 0.9)),
        (3, 4.0, 3.0, True, (0.0, 0.9), (0.9, 1.0)),
        (4, 4.0, 8.0, False, None, None),
    ]
    return [
        FrontPoint("run", n, {"tp": HOSTILE}, (y, x), on, n == 2, (y * 0.9, y * 1.1), 0.0, scores, chosen)
        for n, x, y, on, scores, chosen in given
    ]


def all_charts() -> Iterator[Chart | None]:
    points, front = make_points(), make_front()
    yield draw_history(points, STEP_TIME, summary="what it shows", interval=(3.0, 3.2))
    yield draw_strip(points)
    yield draw_prediction(points, STEP_TIME)
    yield draw_neighbors([NeighborPoint("tp 2 → 4", 1.4, 3), NeighborPoint(HOSTILE, 2.0, None)], STEP_TIME)
    yield draw_against([("a", p) for p in points], "mfu", "MFU", STEP_TIME)
    yield draw_parallel(points, STEP_TIME)
    yield draw_importance({"tp": 0.6, HOSTILE: 0.4}, STEP_TIME)
    yield draw_slice(points, STEP_TIME, first="ckpt")
    yield draw_contour(points, STEP_TIME, first=("ckpt", "tp"))
    yield draw_bests([("a", 1.0, "tp=1"), (HOSTILE, 2.0, "tp=2")], STEP_TIME, "g")
    yield draw_curves([("a", points), (HOSTILE, points[3:])], STEP_TIME)
    bars = [StackedBar(HOSTILE, {"compute": 0.6, "wait": 0.3, "tiny": 0.001}), StackedBar("b", {"compute": 0.9})]
    yield draw_parts(bars, "seconds", name="causes", title="By cause", limit=1.0)
    yield draw_timeline(
        [Lane(rank, kind, [(n * 2, n * 2 + 1) for n in range(50)]) for rank in (0, 1) for kind in LANES]
    )
    yield draw_front(front, "accelerators", "step time (s)", name="front", x_greater=False, y_greater=False)
    yield draw_weight_choices(front, "score")
    yield draw_hypervolume([0.2, 0.5, 0.96, 1.0])
    nights = [NightPoint(f"202611{d}-062421", d / 9, HOSTILE, (1.0, 4.0), {HOSTILE: 2.0}) for d in (22, 23)]
    yield draw_nights(nights, "step time (s)", name="job-1", title="job")


def test_every_chart_is_valid_vega_lite_in_both_themes_and_widths():
    import altair

    charts = [chart for chart in all_charts() if chart is not None]
    assert len(charts) == 17
    for chart in charts:
        assert chart.title
        assert chart.summary
        for dark, width in ((False, 880), (True, 340)):
            painted = paint(chart, dark=dark, width=width)
            altair.Chart.from_dict(painted)  # raises SchemaValidationError
            assert not find_marks(painted), chart.name


def find_marks(node: Any, key: str = "") -> list[str]:
    """Colors and sizes that were not replaced, outside of data."""
    if isinstance(node, dict):
        skipped = ("values", "title", "labels", "options", "domain")
        return [mark for k, v in node.items() if k not in skipped for mark in find_marks(v, k)]
    if isinstance(node, list):
        return [mark for value in node for mark in find_marks(value, key)]
    return [f"{key}: {node}"] if isinstance(node, str) and node.startswith("$") else []


def test_text_from_outside_is_data_and_never_an_expression_or_a_color():
    for chart in all_charts():
        expressions = json.dumps(
            [*find_keys(chart.spec, ("expr", "calculate", "filter", "test", "labelExpr", "field"))]
        )
        assert "onerror" not in expressions
        assert "zero.stage" not in expressions
        assert HOSTILE[:8] in json.dumps(paint(chart)) or HOSTILE[:8] not in json.dumps(chart.spec)


def find_keys(node: Any, keys: tuple[str, ...]) -> Iterator[Any]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key in keys and isinstance(value, str):
                yield value
            if key != "values":
                yield from find_keys(value, keys)
    elif isinstance(node, list):
        for value in node:
            yield from find_keys(value, keys)


def test_charts_become_pictures_without_a_browser():
    chart = draw_slice(make_points(), STEP_TIME)
    assert chart is not None
    light, dark = render_svg(chart), render_svg(chart, dark=True)
    assert light.startswith("<svg")
    assert "step time (s) (recorded)" in light
    assert PALETTE["blue"][0] in light
    assert PALETTE["blue"][1] in dark
    assert "<script" not in light
    assert render_png(chart, scale=1.0).startswith(b"\x89PNG")


def test_the_script_of_pages_cannot_end_its_element():
    script = page_script()
    assert "vegaEmbed" in script
    assert "cclCharts" in script
    assert "</script" not in script.lower()


def test_page_data_holds_specifications_by_place():
    chart = draw_hypervolume([0.5, 1.0])
    data = page_data({"r1-hypervolume": chart})
    assert data["charts"]["r1-hypervolume"] == chart.spec
    assert data["palette"]["$green"] == PALETTE["green"]
    assert "--green:#00795a" in palette_css()


def test_history_has_noise_bars_failures_and_the_best_so_far():
    points = make_points()
    chart = draw_history(points, STEP_TIME, summary="s", interval=(3.0, 3.2))
    bars, line, marks, failed = [layer.get("data", {}).get("values") for layer in chart.spec["layer"][1:]]
    assert len(bars) == sum(p.value is not None for p in points)
    assert [row["v"] for row in line] == sorted((row["v"] for row in line), reverse=True)
    assert marks is None
    assert [row["trial"] for row in failed] == [p.number for p in points if p.kind == FAILED]
    refused = [row for row in chart.spec["data"]["values"] if row["kind"] == NOT_ADMITTED]
    assert refused
    assert all(row["shown"].endswith(", which does not count") for row in refused)
    assert draw_history([replace(p, value=None) for p in points], STEP_TIME, summary="s") is None


def test_the_chart_of_predictions_names_the_trial_that_is_far_off():
    chart = draw_prediction(make_points(), STEP_TIME)
    assert "furthest off: trial 13 by 2.00x" in chart.summary
    assert [row["trial"] for row in chart.spec["data"]["values"] if row["name"]] == [13]


def test_knobs_that_never_vary_are_left_out():
    assert "fixed" not in varied_knobs([point.config for point in make_points()])
    same = [TrialPoint(n, {"tp": 2}, RANKED, 1.0 * n) for n in (1, 2, 3, 4)]
    assert varied_knobs([point.config for point in same]) == ["tp"]
    assert draw_contour(same, STEP_TIME) is None
    assert draw_parallel(same[:1], STEP_TIME) is None


def test_spans_are_joined_at_the_smallest_gaps():
    spans = [(0.0, 1.0), (1.1, 2.0), (5.0, 6.0), (6.05, 7.0)]
    assert join_spans(spans, 2) == [(0.0, 2.0), (5.0, 7.0)]
    assert join_spans(spans, 3) == [(0.0, 1.0), (1.1, 2.0), (5.0, 7.0)]
    assert join_spans(spans) == spans
    events = as_trace_events([Lane(3, "compute", [(1.0, 1.5)])])
    assert events[-1] == {"ph": "X", "name": "compute", "pid": 3, "tid": 0, "ts": 1000.0, "dur": 500.0}


def luminance(color: str) -> float:
    parts = [int(color[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_text_and_series_contrast_with_light_and_dark_backgrounds(mode):
    for role in ("ink", "muted", "blue", "orange", "green", "purple", "yellow"):
        lights = sorted((luminance(PALETTE[role][mode]), luminance(PALETTE["paper"][mode])))
        assert (lights[1] + 0.05) / (lights[0] + 0.05) >= 4.5, role


TRAINING = TASKS.get("training")
SECONDS = TRAINING.primary_metric


def make_metric(unit: str | None, *, greater: bool = True, label: str = "") -> MetricInfo:
    direction = Direction.MAXIMIZE if greater else Direction.MINIMIZE
    return MetricInfo(name="figure", unit=unit, direction=direction, source="result", label=label)


@pytest.mark.parametrize(
    ("unit", "value", "full", "short"),
    [
        ("s", 0.17356329, "0.1736 s", "0.174 s"),
        ("s", 12.0, "12 s", "12 s"),
        ("requests/s", 12345.6, "12,346 requests/s", "12,346 requests/s"),
        ("requests/s", 3.14159, "3.142 requests/s", "3.14 requests/s"),
        ("fraction", 0.45314, "45.31%", "45.3%"),
        ("GiB", 33.1234, "33.12 GiB", "33.1 GiB"),
        ("B", 3.2214e9, "3.221 GB", "3.221 GB"),
        ("B", 12.0, "12 B", "12 B"),
        (None, 0.5, "0.5", "0.5"),
    ],
)
def test_a_value_has_its_unit(unit, value, full, short):
    metric = make_metric(unit)
    assert format_value(metric, value) == full
    assert show_value(metric, value) == short


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("tokens_per_s", 103644.03, "103,644 tokens/s"),
        ("tokens_per_s_per_accelerator", 6477.75, "6,478 tokens/s per accelerator"),
        ("mfu", 0.36908, "MFU 36.9%"),
        ("peak_memory_gib", 47.7, "peak memory 47.7 GiB"),
        ("step_time_s", 10.11709, "step time 10.1 s"),
        ("overlap", 0.5, "overlap 0.5"),
    ],
)
def test_words_that_start_with_the_unit_replace_it(name, value, text):
    assert name_value(TRAINING.metric(name), value) == text


def test_words_that_start_with_the_letter_of_the_unit_do_not_replace_it():
    assert (SECONDS.words, SECONDS.shown_unit, name_values(SECONDS)) == ("step time", "s", "step times")
    assert SECONDS.words_with_unit == "step time (s)"
    assert TRAINING.metric("tokens_per_s").words_with_unit == "tokens/s"
    assert TRAINING.metric("mfu").words_with_unit == "MFU"
    assert name_values(TRAINING.metric("mfu")) == "values of MFU"


@pytest.mark.parametrize(
    ("metric", "other", "best", "difference", "gain"),
    [
        (SECONDS, 24.4, 9.316, "2.62x as long", "2.62x faster"),
        (SECONDS, 10.5, 10.0, "5.00% longer", "5.00% faster"),
        (SECONDS, 9.5, 10.0, "5.00% shorter", "not faster"),
        (make_metric("requests/s"), 100.0, 272.0, "63.24% lower", "2.72x better"),
        (make_metric("requests/s"), 80.0, 100.0, "20.00% lower", "1.25x better"),
        (make_metric("requests/s"), 103.0, 100.0, "3.00% higher", "not better"),
        (make_metric("fraction"), 0.6, 0.3, "2x as high", "not better"),
        (make_metric("GiB", greater=False), 30.0, 20.0, "1.5x as high", "1.5x better"),
    ],
)
def test_differences_and_gains_follow_the_unit_and_the_direction(metric, other, best, difference, gain):
    assert describe_difference(metric, other, best) == difference
    assert describe_gain(metric, other, best) == gain
    assert (find_gain(metric, other, best) > 1) is not gain.startswith("not")
