"""Pareto fronts compared with examples computed by hand and by brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cclsearch.core.errors import UserError
from cclsearch.stats.pareto import (
    choose_by_weight,
    choose_reference_point,
    cumulative_hypervolume,
    find_knee,
    find_pareto_front,
    hypervolume_contributions,
    log_axes,
    measure_hypervolume,
    parse_weights,
)

# step time and accelerators: (4, 1) (2, 2) (1.5, 4) are the Pareto front; (3, 2) and (2, 4) are dominated
POINTS = np.array([[4.0, 1.0], [3.0, 2.0], [2.0, 2.0], [2.0, 4.0], [1.5, 4.0]])


def test_the_pareto_front_is_what_no_other_point_dominates() -> None:
    assert find_pareto_front(POINTS).tolist() == [True, False, True, False, True]


def test_equal_points_are_all_on_the_pareto_front() -> None:
    assert find_pareto_front(np.array([[1.0, 1.0], [1.0, 1.0], [2.0, 0.5]])).all()


def test_the_hypervolume_agrees_with_an_area_computed_by_hand() -> None:
    # below (5, 5): x 1.5-2 height 1, x 2-4 height 3, x 4-5 height 4
    assert measure_hypervolume(POINTS, np.array([5.0, 5.0])) == pytest.approx(0.5 * 1 + 2 * 3 + 1 * 4)
    assert measure_hypervolume(POINTS, np.array([1.0, 1.0])) == 0.0
    assert measure_hypervolume(np.array([[2.0], [3.0]]), np.array([5.0])) == 3.0
    cube = np.array([[1.0, 1.0, 1.0], [0.0, 0.0, 2.0]])
    assert measure_hypervolume(cube, np.array([3.0, 3.0, 3.0])) == pytest.approx(8 + 9 - 4)


@settings(deadline=None, derandomize=True, database=None, max_examples=40)
@given(st.lists(st.tuples(*[st.integers(0, 5)] * 3), min_size=1, max_size=8))
def test_the_volume_agrees_with_counting_cells(points: list[tuple[int, int, int]]) -> None:
    values = np.array(points, dtype=float)
    cells = {(x, y, z) for p in points for x in range(p[0], 6) for y in range(p[1], 6) for z in range(p[2], 6)}
    assert measure_hypervolume(values, np.array([6.0, 6.0, 6.0])) == pytest.approx(len(cells))


def test_the_cumulative_hypervolume_never_falls_and_ends_at_the_total() -> None:
    reference = choose_reference_point(POINTS)
    growth = cumulative_hypervolume(POINTS, reference)
    assert np.all(np.diff(growth) >= 0)
    assert growth[-1] == measure_hypervolume(POINTS, reference) > 0


def test_a_dominated_point_contributes_no_hypervolume() -> None:
    hypervolume_share = hypervolume_contributions(POINTS.tolist(), np.array([5.0, 5.0]))
    assert (hypervolume_share > 0).tolist() == find_pareto_front(POINTS).tolist()


def test_the_knee_is_where_the_front_bends() -> None:
    bent = np.array([[10.0, 1.0], [1.2, 1.2], [1.0, 10.0]])
    assert find_knee(bent) == 1
    assert find_knee(bent[:2]) is None
    assert find_knee(np.array([[4.0, 1.0], [2.0, 2.0], [1.0, 4.0]])) is None


def test_axes_of_positive_metrics_are_ratios() -> None:
    spread = log_axes(np.array([[1.0, -1.0], [np.e, 2.0]]))
    np.testing.assert_allclose(spread, [[0.0, -1.0], [1.0, 2.0]], rtol=1e-12)


def test_the_weight_at_which_the_choice_changes_is_exact() -> None:
    # score = w x speed + (1 - w) x thrift: a (1, 4), b (2, 3), c (5, 1), d dominated
    thrift, speed = np.array([4.0, 3.0, 1.0, 0.5]), np.array([1.0, 2.0, 5.0, 0.5])
    choices = choose_by_weight(thrift, speed)
    assert [choice.point for choice in choices] == [0, 2]
    # a and c meet where 4 - 3w = 1 + 4w; b would have to beat them there: 3 - 3/7 < 4 - 9/7
    assert choices[0].to_weight == pytest.approx(3 / 7)
    assert (choices[0].from_weight, choices[-1].to_weight) == (0.0, 1.0)


@settings(deadline=None, derandomize=True, database=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=12))
def test_the_choice_at_every_weight_has_the_greatest_score(points: list[tuple[int, int]]) -> None:
    at_0, at_1 = np.array(points, dtype=float).T
    choices = choose_by_weight(at_0, at_1)
    assert choices[0].from_weight == 0.0
    assert choices[-1].to_weight == 1.0
    for before, after in itertools.pairwise(choices):
        assert before.to_weight == after.from_weight
    for choice in choices:
        weight = (choice.from_weight + choice.to_weight) / 2
        scores = (1 - weight) * at_0 + weight * at_1
        assert scores[choice.point] == pytest.approx(scores.max())


def test_without_points_there_is_no_choice() -> None:
    assert choose_by_weight(np.array([]), np.array([])) == []


def test_weights_include_both_ends() -> None:
    assert parse_weights("0:1:0.1") == (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    assert parse_weights("1,0,0.5") == (0.0, 0.5, 1.0)


@pytest.mark.parametrize("text", ["", "0:1", "0:1:0", "0:1:-1", "1:0:0.1", "0:2:0.1", "a", "nan", "-1,0", "0:1:inf:1"])
def test_invalid_weights_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="weights must be from:to:step"):
        parse_weights(text)
