"""Values of metrics with their units, and two values compared in words."""

from __future__ import annotations

import pytest

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

TRAINING = TASKS.get("training")
STEP_TIME = TRAINING.primary_metric


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
    ],
)
def test_words_that_start_with_the_unit_replace_it(name, value, text):
    assert name_value(TRAINING.metric(name), value) == text


def test_words_that_start_with_the_letter_of_the_unit_do_not_replace_it():
    assert (STEP_TIME.words, STEP_TIME.shown_unit) == ("step time", "s")
    assert STEP_TIME.words_with_unit == "step time (s)"
    assert TRAINING.metric("tokens_per_s").words_with_unit == "tokens/s"
    assert TRAINING.metric("mfu").words_with_unit == "MFU"


def test_a_metric_that_the_task_does_not_list_has_its_name_only():
    assert TRAINING.metric("overlap").words == "overlap"
    assert name_value(TRAINING.metric("overlap"), 0.5) == "overlap 0.5"


@pytest.mark.parametrize(
    ("metric", "other", "best", "text"),
    [
        (STEP_TIME, 24.4, 9.316, "2.62x as long"),
        (STEP_TIME, 10.5, 10.0, "5.00% longer"),
        (STEP_TIME, 9.5, 10.0, "5.00% shorter"),
        (make_metric("requests/s"), 80.0, 100.0, "20.00% lower"),
        (make_metric("requests/s"), 103.0, 100.0, "3.00% higher"),
        (make_metric("fraction"), 0.6, 0.3, "2x as high"),
        (make_metric("GiB", greater=False), 30.0, 20.0, "1.5x as high"),
    ],
)
def test_difference_is_in_the_words_of_the_unit(metric, other, best, text):
    assert describe_difference(metric, other, best) == text


@pytest.mark.parametrize(
    ("metric", "old", "new", "text"),
    [
        (STEP_TIME, 27.2, 10.0, "2.72x faster"),
        (STEP_TIME, 10.5, 10.0, "5.00% faster"),
        (STEP_TIME, 9.0, 10.0, "not faster"),
        (make_metric("requests/s"), 100.0, 272.0, "2.72x better"),
        (make_metric("requests/s"), 100.0, 105.0, "5.00% better"),
        (make_metric("fraction"), 0.9, 0.5, "not better"),
        (make_metric("GiB", greater=False), 30.0, 20.0, "1.5x better"),
    ],
)
def test_gain_follows_the_direction(metric, old, new, text):
    assert describe_gain(metric, old, new) == text
    assert (find_gain(metric, old, new) > 1) is not text.startswith("not")


def test_plural_of_the_words():
    assert name_values(STEP_TIME) == "step times"
    assert name_values(TRAINING.metric("mfu")) == "values of MFU"
