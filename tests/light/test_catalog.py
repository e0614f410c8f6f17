"""The catalog of metrics: unit, direction and source, known before a trial runs."""

from __future__ import annotations

import pytest

from cclsearch.core.errors import UserError
from cclsearch.core.metrics import Direction
from cclsearch.scoring.catalog import find_metric, list_metrics

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
