"""Noise: repeats measure it, and better means better than it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cclsearch.noise import (
    PRIOR_RELATIVE,
    chances_to_be_best,
    confidence_better,
    estimate_noise,
    find_interval,
    is_better,
    pick_finalists,
)


def test_without_repeats_the_noise_is_the_stated_prior() -> None:
    noise = estimate_noise([[1.0], [2.0]])
    assert noise.relative == PRIOR_RELATIVE
    assert not noise.is_measured


def test_many_repeats_bring_the_noise_to_what_they_show() -> None:
    draws = np.random.default_rng(3)
    runs = [2.0 * np.exp(0.08 * draws.standard_normal(40)) for _ in range(10)]
    noise = estimate_noise([list(group) for group in runs])
    assert noise.relative == pytest.approx(0.08, rel=0.1)
    assert noise.num_repeats == 390


def test_wide_steps_inside_a_run_raise_the_noise_before_any_repeat() -> None:
    assert estimate_noise([[1.0]], spreads=[0.4]).relative > PRIOR_RELATIVE


def test_a_gap_inside_the_noise_is_not_better_and_a_gap_far_beyond_it_is() -> None:
    noise = estimate_noise([[1.0, 1.02, 0.98, 1.01]])
    assert not is_better([0.99], [1.0], noise)
    assert is_better([0.7], [1.0], noise)
    assert confidence_better([1.0], [1.0], noise) == pytest.approx(0.5)


def test_more_runs_of_the_same_gap_make_it_surer() -> None:
    noise = estimate_noise([[1.0, 1.02, 0.98]])
    once = confidence_better([0.95], [1.0], noise)
    often = confidence_better([0.95, 0.95, 0.95], [1.0, 1.0, 1.0], noise)
    assert 0.5 < once < often < 1.0


def test_losses_that_are_not_positive_compare_too() -> None:
    noise = estimate_noise([[-2.0], [-1.0]])
    assert confidence_better([-2.0], [-1.0], noise) > 0.95
    interval = find_interval([-2.0], noise)
    assert interval.low < -2.0 < interval.high


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    draws = np.random.default_rng(11)
    hits = 0
    for _ in range(400):
        sigma = 0.05
        repeats = [list(np.exp(sigma * draws.standard_normal(4))) for _ in range(3)]
        noise = estimate_noise(repeats)
        interval = find_interval(repeats[0], noise)
        hits += interval.low <= 1.0 <= interval.high
    assert 0.88 <= hits / 400 <= 0.99


def test_the_interval_narrows_with_runs() -> None:
    noise = estimate_noise([[1.0, 1.05, 0.97]])
    one, four = find_interval([1.0], noise), find_interval([1.0] * 4, noise)
    assert math.log(one.high / one.low) == pytest.approx(2 * math.log(four.high / four.low))


def test_chances_to_be_best_add_up_and_favour_the_lowest() -> None:
    noise = estimate_noise([])
    chances = chances_to_be_best({"a": [1.0], "b": [1.01], "c": [3.0]}, noise)
    assert sum(chances.values()) == pytest.approx(1.0)
    assert chances["a"] > chances["b"] > chances["c"]
    assert chances["c"] < 0.05
    assert chances_to_be_best({}, noise) == {}


def test_finalists_are_those_that_noise_leaves_open() -> None:
    noise = estimate_noise([[1.0, 1.01, 0.99, 1.0, 1.01]])
    assert pick_finalists({"a": [1.0], "b": [1.005], "c": [5.0]}, noise, 3) == ["a", "b"]
    assert pick_finalists({"a": [1.0], "c": [5.0]}, noise, 2) == ["a"]


def test_a_spread_inside_runs_raises_the_prior_to_half_of_it() -> None:
    assert estimate_noise([], spreads=[0.2, 0.2]).relative == pytest.approx(0.1)


def test_noise_of_losses_around_zero_does_not_hang_on_their_unit() -> None:
    assert estimate_noise([[0.0, 2.0]]).relative == pytest.approx(estimate_noise([[0.0, 4.0]]).relative)


@pytest.mark.parametrize(("choices", "numeric"), [((1, 2.5), True), ((False, True), False), (("a", "b"), False)])
def test_only_numbers_with_an_order_make_a_numeric_knob(
    choices: tuple[bool | int | float | str, ...], numeric: bool
) -> None:
    from cclsearch.space.table import Knob

    assert Knob("k", choices).is_numeric is numeric
