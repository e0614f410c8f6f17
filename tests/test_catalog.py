"""What is known of a metric before anything ran."""

from __future__ import annotations

import pytest

from cclsearch.core.errors import UserError
from cclsearch.score.catalog import CATALOG, ENERGY_METRICS, RECORDED_METRICS, Direction, find_metric


def test_energy_is_what_only_some_run_scripts_leave() -> None:
    assert {"energy_j_per_step", "energy_j_per_mtoken", "power_w"} == ENERGY_METRICS
    assert {"step_time_s", "mfu", "peak_memory_gib", "memory_headroom_frac"} <= RECORDED_METRICS
    assert not ENERGY_METRICS & RECORDED_METRICS


def test_only_headroom_may_be_zero_or_below() -> None:
    assert [name for name, info in CATALOG.items() if not info.is_positive] == ["memory_headroom_frac"]


def test_a_metric_of_the_traces_brings_its_unit_and_its_better_way() -> None:
    told = {name: find_metric(name, "file") for name in ("comm_time", "overlap", "concentration")}
    assert {(info.source, info.is_positive) for info in told.values()} == {("trace", False)}
    assert (told["comm_time"].unit, told["overlap"].unit) == ("s", "fraction")
    directions = [info.direction for info in told.values()]
    assert directions == [Direction.MINIMIZE, Direction.MAXIMIZE, None]


def test_a_figure_of_the_run_script_is_taken_on_trust() -> None:
    own = find_metric("stalls", "file", from_script=True)
    assert (own.source, own.unit, own.direction) == ("script", None, None)


def test_a_mistyped_name_is_answered_with_up_to_three_near_ones() -> None:
    with pytest.raises(UserError) as caught:
        find_metric("comm_frac", "file")
    told = str(caught.value)
    assert told.startswith("file: there is no metric 'comm_frac'; did you mean comm_wait_frac or compute_frac or ")
    assert told.count(" or ") == 2
    with pytest.raises(UserError, match=r"there are: step_time_s, tokens_per_s, .*trace_step_time"):
        find_metric("zzz", "file")
