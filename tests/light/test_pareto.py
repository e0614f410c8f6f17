"""Pareto fronts and the proposer that searches one."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_runs import write_recording

from cclsearch.card.load import load_card
from cclsearch.core.errors import UserError
from cclsearch.core.values import Failure, FailureKind, Stage
from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.bayes.pareto_proposer import ParetoProposer
from cclsearch.recording.join import find_family, join_recordings
from cclsearch.recording.load import Recording, load_recording
from cclsearch.scoring.objective import load_objective
from cclsearch.space.build import build_space
from cclsearch.space.framework import load_framework
from cclsearch.space.table import count_ranks
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
from cclsearch.stats.simulated import SimulatedCluster, SimulatedSettings

# step time and accelerators: (4, 1) (2, 2) (1.5, 4) are the Pareto front; (3, 2) and (2, 4) are dominated
POINTS = np.array([[4.0, 1.0], [3.0, 2.0], [2.0, 2.0], [2.0, 4.0], [1.5, 4.0]])


def test_the_pareto_front_is_what_no_other_point_dominates():
    assert find_pareto_front(POINTS).tolist() == [True, False, True, False, True]


def test_equal_points_are_all_on_the_pareto_front():
    assert find_pareto_front(np.array([[1.0, 1.0], [1.0, 1.0], [2.0, 0.5]])).all()


def test_the_hypervolume_agrees_with_an_area_computed_by_hand():
    # below (5, 5): x 1.5-2 height 1, x 2-4 height 3, x 4-5 height 4
    assert measure_hypervolume(POINTS, np.array([5.0, 5.0])) == pytest.approx(0.5 * 1 + 2 * 3 + 1 * 4)
    assert measure_hypervolume(POINTS, np.array([1.0, 1.0])) == 0.0
    assert measure_hypervolume(np.array([[2.0], [3.0]]), np.array([5.0])) == 3.0
    cube = np.array([[1.0, 1.0, 1.0], [0.0, 0.0, 2.0]])
    assert measure_hypervolume(cube, np.array([3.0, 3.0, 3.0])) == pytest.approx(8 + 9 - 4)


@settings(deadline=None, derandomize=True, database=None, max_examples=40)
@given(st.lists(st.tuples(*[st.integers(0, 5)] * 3), min_size=1, max_size=8))
def test_the_volume_agrees_with_counting_cells(points):
    values = np.array(points, dtype=float)
    cells = {(x, y, z) for p in points for x in range(p[0], 6) for y in range(p[1], 6) for z in range(p[2], 6)}
    assert measure_hypervolume(values, np.array([6.0, 6.0, 6.0])) == pytest.approx(len(cells))


def test_the_cumulative_hypervolume_never_falls_and_ends_at_the_total():
    reference = choose_reference_point(POINTS)
    growth = cumulative_hypervolume(POINTS, reference)
    assert np.all(np.diff(growth) >= 0)
    assert growth[-1] == measure_hypervolume(POINTS, reference) > 0


def test_a_dominated_point_contributes_no_hypervolume():
    hypervolume_share = hypervolume_contributions(POINTS.tolist(), np.array([5.0, 5.0]))
    assert (hypervolume_share > 0).tolist() == find_pareto_front(POINTS).tolist()


def test_the_knee_is_where_the_front_bends():
    bent = np.array([[10.0, 1.0], [1.2, 1.2], [1.0, 10.0]])
    assert find_knee(bent) == 1
    assert find_knee(bent[:2]) is None
    assert find_knee(np.array([[4.0, 1.0], [2.0, 2.0], [1.0, 4.0]])) is None


def test_axes_of_positive_metrics_are_ratios():
    spread = log_axes(np.array([[1.0, -1.0], [np.e, 2.0]]))
    np.testing.assert_allclose(spread, [[0.0, -1.0], [1.0, 2.0]], rtol=1e-12)


def test_the_weight_at_which_the_choice_changes_is_exact():
    # score = w x speed + (1 - w) x thrift: a (1, 4), b (2, 3), c (5, 1), d dominated
    thrift, speed = np.array([4.0, 3.0, 1.0, 0.5]), np.array([1.0, 2.0, 5.0, 0.5])
    choices = choose_by_weight(thrift, speed)
    assert [choice.point for choice in choices] == [0, 2]
    # a and c meet where 4 - 3w = 1 + 4w; b would have to beat them there: 3 - 3/7 < 4 - 9/7
    assert choices[0].to_weight == pytest.approx(3 / 7)
    assert (choices[0].from_weight, choices[-1].to_weight) == (0.0, 1.0)


@settings(deadline=None, derandomize=True, database=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=12))
def test_the_choice_at_every_weight_has_the_greatest_score(points):
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


def test_without_points_there_is_no_choice():
    assert choose_by_weight(np.array([]), np.array([])) == []


def test_weights_include_both_ends():
    assert parse_weights("0:1:0.1") == (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    assert parse_weights("1,0,0.5") == (0.0, 0.5, 1.0)


@pytest.mark.parametrize("text", ["", "0:1", "0:1:0", "0:1:-1", "1:0:0.1", "0:2:0.1", "a", "nan", "-1,0", "0:1:inf:1"])
def test_invalid_weights_are_refused(text):
    with pytest.raises(UserError, match="weights must be from:to:step"):
        parse_weights(text)


@pytest.fixture
def joined(tmp_path: Path) -> Recording:
    for size in (4, 8, 16):
        write_recording(tmp_path / "r" / f"toy-{size}", size)
    return load_recording(join_recordings(find_family(tmp_path / "r" / "toy-4"), tmp_path / "joined"))


def view_of(recording: Recording, rows: list[int], pending: frozenset[int] = frozenset()) -> SearchView:
    seen = tuple(observe(recording, row, n) for n, row in enumerate(rows, 1))
    left, target = 27 - len(rows), load_objective("pareto")
    return SearchView(recording.card, recording.space, seen, pending, left, seed=0, target=target)


def observe(recording: Recording, row: int, trial: int) -> Observation:
    config, metrics = recording.rows[row].config, recording.rows[row].metrics
    if metrics.get("step_time_s") is None:
        failure = Failure(stage=Stage.RUN, kind=FailureKind.OUT_OF_MEMORY, message="recorded as oom")
        return Observation(trial, config, row, None, failure=failure)
    more = {"num_accelerators": float(recording.space.num_accelerators_N[row])}
    return Observation(trial, config, row, metrics["step_time_s"], metrics=metrics | more)


def ask(recording: Recording, proposer: ParetoProposer, count: int) -> list[int]:
    rows: list[int] = []
    while len(rows) < count and (proposals := proposer.propose(view_of(recording, rows), 1)):
        row = recording.space.row(proposals[0].config)
        assert row is not None
        rows.append(row)
    return rows


def test_the_pareto_front_is_found_in_two_thirds_of_the_rows_without_repeats(joined):
    rows = ask(joined, ParetoProposer(), 18)
    assert len(set(rows)) == len(rows) == 18
    found = {int(joined.space.num_accelerators_N[row]): np.inf for row in rows}
    for row in rows:
        size = int(joined.space.num_accelerators_N[row])
        found[size] = min(found[size], joined.rows[row].metrics.get("step_time_s") or np.inf)
    assert found == {4: 4.0, 8: 2.0, 16: 1.0}


def test_it_proposes_until_every_row_was_tried(joined):
    assert sorted(ask(joined, ParetoProposer(), 99)) == list(range(27))


def test_a_batch_is_deterministic_distinct_and_not_running(joined):
    pending = frozenset({0, 9})
    view = view_of(joined, [4, 13], pending)
    first, again = ParetoProposer().propose(view, 5), ParetoProposer().propose(view, 5)
    assert [p.config for p in first] == [p.config for p in again]
    rows = [joined.space.row(p.config) for p in first]
    assert len(set(rows)) == 5
    assert not set(rows) & {0, 9, 4, 13}
    assert all(p.proposer == "pareto" and p.rationale and p.expects.metrics["step_time_s"] for p in first)


def test_a_proposer_used_on_another_space_does_not_mix_them(joined, tmp_path):
    proposer = ParetoProposer()
    ask(joined, proposer, 2)
    family = find_family(tmp_path / "r" / "toy-4")
    smaller = load_recording(join_recordings(family[:2], tmp_path / "joined"))
    assert all(smaller.space.row(p.config) is not None for p in proposer.propose(view_of(smaller, []), 3))


def test_other_metrics_form_a_pareto_front_too(joined):
    proposer = ParetoProposer([("step_time_s", "minimize"), ("peak_memory_gib", "minimize")])
    rows = ask(joined, proposer, 4)
    assert len(set(rows)) == 4


def test_a_size_that_runs_out_of_memory_is_not_tried_again_and_again():
    card = load_card("wl5")
    space = build_space(card, load_framework(card.framework), use_fewer=True)
    cluster = SimulatedCluster.of(SimulatedSettings(), card, space)
    seen: list[Observation] = []
    for trial in range(1, 13):
        view = SearchView(card, space, tuple(seen), frozenset(), 13 - trial, seed=0, target=load_objective("pareto"))
        config = ParetoProposer().propose(view, 1)[0].config
        row = space.row(config)
        assert row is not None
        result = cluster.run(row, 1)
        failure = None if result.metrics else Failure(stage=Stage.RUN, kind=FailureKind.OUT_OF_MEMORY, message="oom")
        metrics = {**result.metrics, "num_accelerators": float(count_ranks(config))}
        seen.append(Observation(trial, config, row, result.metrics.get("step_time_s"), failure, metrics=metrics))
    assert sum(o.failure is not None for o in seen) <= 3
    assert {count_ranks(o.config) for o in seen if o.failure is None} >= {8, 12, 16}
