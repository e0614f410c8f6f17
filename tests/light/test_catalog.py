"""The catalog of metrics, and expressions over them."""

from __future__ import annotations

import pytest

from cclsearch.core.errors import UserError
from cclsearch.core.metrics import Direction
from cclsearch.scoring.catalog import find_metric, list_metrics
from cclsearch.scoring.declaration import evaluate, parameter_names

TRAINING = list_metrics("training")


def test_energy_metrics_need_a_run_script_that_records_energy():
    needing = {name for name, info in TRAINING.items() if info.needs == "energy_j"}
    assert needing == {"energy_j_per_step", "energy_j_per_mtoken", "power_w"}
    assert not TRAINING["step_time_s"].needs


def test_only_headroom_may_be_zero_or_below():
    assert [name for name, info in TRAINING.items() if not info.is_positive] == ["memory_headroom_frac"]


def test_a_trace_metric_has_its_unit_and_direction():
    infos = {name: find_metric(name, "file") for name in ("comm_time", "overlap", "concentration")}
    assert {(info.source, info.is_positive) for info in infos.values()} == {("trace", False)}
    assert (infos["comm_time"].unit, infos["overlap"].unit) == ("s", "fraction")
    directions = [info.direction for info in infos.values()]
    assert directions == [Direction.MINIMIZE, Direction.MAXIMIZE, None]


def test_a_metric_of_the_run_script_is_accepted_unchecked():
    own = find_metric("stalls", "file", from_script=True)
    assert (own.source, own.unit, own.direction) == ("script", None, None)


def test_a_mistyped_name_gets_up_to_three_suggestions():
    with pytest.raises(UserError) as caught:
        find_metric("comm_frac", "file")
    error = str(caught.value)
    assert error.startswith("file: there is no metric 'comm_frac'; did you mean comm_wait_frac or compute_frac or ")
    assert error.count(" or ") == 2
    with pytest.raises(UserError, match=r"known: .*step_time_s, tokens_per_s, .*trace_step_time"):
        find_metric("zzz", "file")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3.0),
        (" 1 - weight ", 0.75),
        ("2 + 3 * 4", 14.0),
        ("(2 + 3) * 4", 20.0),
        ("price / 3600", 0.5),
        ("-weight + 1", 0.75),
        ("8 / 4 / 2", 1.0),
        ("weight" + " " * 194, 0.25),
    ],
)
def test_an_expression_has_its_arithmetic_value(text, value):
    assert evaluate(text, {"weight": 0.25, "price": 1800.0}, "file") == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1" * 201, "at most 200 characters; this one has 201"),
        ("1 +", "is not arithmetic over parameters"),
        ("2 ** 3", "only numbers, parameters"),
        ("2 % 3", "only numbers, parameters"),
        ("not 1", "only numbers, parameters"),
        ("+1", "only numbers, parameters"),
        ("True", "only numbers, parameters"),
        ("'word'", "only numbers, parameters"),
        ("__import__('os')", "only numbers, parameters"),
        ("1 / 0", "has no finite value"),
        ("1e308 * 10", "has no finite value"),
        ("price", "there is no parameter 'price'; known: weight"),
    ],
)
def test_anything_else_is_rejected_with_its_location(text, message):
    with pytest.raises(UserError, match="file: ") as caught:
        evaluate(text, {"weight": 0.25}, "file")
    assert message in str(caught.value)


def test_parameter_names_are_found_without_values():
    assert parameter_names("a * (b + 1) - a", "file") == {"a", "b"}
    assert parameter_names("2", "file") == frozenset()
