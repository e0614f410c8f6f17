"""Noise of measurements, and drift of the machine."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_launcher import MeasuredLauncher, ScriptedLauncher, ran
from scripted_search import open_search, run_session

from cclsearch.evaluation.control import MIN_CONTROLS
from cclsearch.launch.base import Job
from cclsearch.loop.loop import view_search
from cclsearch.loop.session import Session
from cclsearch.record.event import Purpose
from cclsearch.record.state import RunState
from cclsearch.record.writer import RunWriter
from cclsearch.report.gather import gather_run
from cclsearch.report.page import render_page
from cclsearch.report.summary import best_as_json, describe_drift, summarize_run
from cclsearch.run.folder import load_run
from cclsearch.space.table import Knob
from cclsearch.stats.drift import estimate_drift
from cclsearch.stats.noise import (
    PRIOR_RELATIVE,
    Noise,
    chances_to_be_best,
    confidence_better,
    confidence_interval,
    estimate_noise,
    find_outliers,
    is_better,
    pick_finalists,
)


def test_a_gap_inside_the_noise_is_not_better_and_a_gap_far_beyond_it_is():
    noise = estimate_noise([[1.0, 1.02, 0.98, 1.01]])
    assert not is_better([0.99], [1.0], noise)
    assert is_better([0.7], [1.0], noise)
    assert confidence_better([1.0], [1.0], noise) == pytest.approx(0.5)


def test_more_runs_of_the_same_gap_raise_the_confidence():
    noise = estimate_noise([[1.0, 1.02, 0.98]])
    once = confidence_better([0.95], [1.0], noise)
    often = confidence_better([0.95, 0.95, 0.95], [1.0, 1.0, 1.0], noise)
    assert 0.5 < once < often < 1.0


# Student's t with two degrees of freedom has a closed form: F(x) = 1/2 + x / (2 sqrt(2 + x^2)), and its 97.5 % point
# is 0.95 / sqrt(2 x 0.975 x 0.025) = 4.30265.
TWO_DOF = Noise(relative=0.1, dof=2.0)
HIGHER = math.exp(0.2)
"""A loss 0.2 above 1 on the log scale: two standard deviations of one run."""


@pytest.mark.parametrize(
    ("num_new", "num_old", "chance"),
    [
        (1, 1, 0.853553),  # x = 0.2 / (0.1 sqrt(1 + 1)) = 1.414214
        (2, 8, 0.936436),  # x = 0.2 / (0.1 sqrt(1/2 + 1/8)) = 2.529822
        (8, 2, 0.936436),
    ],
)
def test_the_confidence_of_a_gap_agrees_with_students_closed_form(num_new, num_old, chance):
    new, old = [1.0] * num_new, [HIGHER] * num_old
    assert confidence_better(new, old, TWO_DOF) == pytest.approx(chance, abs=1e-6)
    assert confidence_better(old, new, TWO_DOF) == pytest.approx(1 - chance, abs=1e-6)
    drawn = chances_to_be_best({"new": new, "old": old}, TWO_DOF)
    assert drawn["new"] == pytest.approx(chance, abs=0.01)


def test_the_unit_of_a_loss_does_not_change_the_confidence():
    noise = Noise(relative=0.5**0.5, dof=2.0)
    # e times the loss is 1 on the log scale; x = 1 / (sqrt(1/2) sqrt(2)) = 1
    for unit in (1e-6, 0.01, 1.0, 1000.0):
        assert confidence_better([unit], [unit * math.e], noise) == pytest.approx(0.788675, abs=1e-6)


def test_reaching_the_confidence_exactly_is_enough():
    assert is_better([1.0], [1.0], TWO_DOF, confidence=0.5)
    assert not is_better([1.0], [1.0], TWO_DOF, confidence=0.501)


def test_the_interval_agrees_with_students_closed_form():
    one = confidence_interval([2.0], TWO_DOF)
    assert (one.low, one.high) == pytest.approx((2 * math.exp(-0.430265), 2 * math.exp(0.430265)), rel=1e-5)
    four = confidence_interval([1.0] * 4, TWO_DOF)
    assert (four.low, four.high) == pytest.approx((math.exp(-0.215133), math.exp(0.215133)), rel=1e-5)
    below_zero = confidence_interval([-2.0], TWO_DOF)
    assert (below_zero.low, below_zero.high) == pytest.approx((-2.860531, -1.139469), rel=1e-5)
    assert (one.confidence, one.num_runs, four.num_runs) == (0.95, 1, 4)


def test_a_loss_of_zero_among_the_runs_gives_a_finite_interval():
    interval = confidence_interval([0.0, 1.0, 2.0], TWO_DOF)
    assert 0 < interval.low < 1 < interval.high < 2


def test_losses_that_are_mostly_zero_are_compared_unscaled():
    # deviations -4/3, -4/3 and 8/3 from the mean: squares of 32/3, and 2 x 0.03^2 of the prior, over 2 + 2
    assert estimate_noise([], own=[[0.0, 0.0, 4.0]]).relative == pytest.approx(math.sqrt((32 / 3 + 0.0018) / 4))


def test_one_repeat_is_a_measurement_and_single_runs_are_not():
    one = estimate_noise([[1.0, 1.1], [5.0], []])
    assert (one.num_repeats, one.dof, one.is_measured) == (1, 3.0, True)
    # half the squared gap of ln 1.1 = 0.0953102, and 2 x 0.03^2 of the prior, over 2 + 1
    assert one.relative == pytest.approx(math.sqrt((0.0045420 + 0.0018) / 3), rel=1e-4)
    assert not Noise(relative=0.03, dof=2.0).is_measured


def test_losses_that_are_not_positive_can_be_compared():
    noise = estimate_noise([[-2.0], [-1.0]])
    assert confidence_better([-2.0], [-1.0], noise) > 0.95
    interval = confidence_interval([-2.0], noise)
    assert interval.low < -2.0 < interval.high


def test_the_interval_covers_the_truth_at_its_confidence():
    draws = np.random.default_rng(11)
    hits = 0
    for _ in range(400):
        sigma = 0.05
        repeats = [list(np.exp(sigma * draws.standard_normal(4))) for _ in range(3)]
        noise = estimate_noise(repeats)
        interval = confidence_interval(repeats[0], noise)
        hits += interval.low <= 1.0 <= interval.high
    assert 0.88 <= hits / 400 <= 0.99


def test_chances_to_be_best_add_up_and_favor_the_lowest():
    noise = estimate_noise([])
    chances = chances_to_be_best({"a": [1.0], "b": [1.01], "c": [3.0]}, noise)
    assert sum(chances.values()) == pytest.approx(1.0)
    assert chances["a"] > chances["b"] > chances["c"]
    assert chances["c"] < 0.05
    assert chances_to_be_best({}, noise) == {}


def test_repeats_count_by_their_mean_and_not_by_their_number():
    chances = chances_to_be_best({"often": [0.5] * 4, "once": [0.5]}, estimate_noise([]))
    assert chances["often"] == pytest.approx(0.5, abs=0.02)
    slow = chances_to_be_best({"a": [500.0], "b": [500.0]}, estimate_noise([]))
    assert slow["a"] == pytest.approx(0.5, abs=0.02)


def test_beyond_twelve_standard_deviations_the_chance_is_zero():
    behind = {n: chances_to_be_best({"best": [1.0], "far": [math.exp(0.1 * n)]}, TWO_DOF)["far"] for n in (11.9, 12.1)}
    assert behind[11.9] > 0.0
    assert behind[12.1] == 0.0


def test_finalists_are_those_within_the_noise_of_the_best():
    noise = estimate_noise([[1.0, 1.01, 0.99, 1.0, 1.01]])
    assert pick_finalists({"a": [1.0], "b": [1.005], "c": [5.0]}, noise, 3) == ["a", "b"]
    assert pick_finalists({"a": [1.0], "c": [5.0]}, noise, 2) == ["a"]


def test_a_spread_inside_runs_raises_the_prior_to_half_of_it():
    assert estimate_noise([], spreads=[0.2, 0.2]).relative == pytest.approx(0.1)


def test_noise_of_losses_around_zero_does_not_depend_on_their_unit():
    two, four = (estimate_noise([], own=[[0.0, value]]).relative for value in (2.0, 4.0))
    assert two == pytest.approx(four)
    assert two > PRIOR_RELATIVE


@pytest.mark.parametrize(("choices", "numeric"), [((1, 2.5), True), ((False, True), False), (("a", "b"), False)])
def test_only_numbers_with_an_order_make_a_numeric_knob(choices, numeric):
    assert Knob("k", choices).is_numeric is numeric


def test_one_outlier_does_not_make_the_other_configurations_uncertain():
    noise = estimate_noise([[36.0, 4.8], [70.0, 70.9], [4.6]])
    assert (noise.num_outliers, noise.num_repeats) == (1, 1)
    assert noise.relative < PRIOR_RELATIVE
    assert is_better([4.6], [70.0, 70.9], noise)
    alone = estimate_noise([[36.0, 4.8], [4.6]])
    assert (alone.relative, alone.is_measured, alone.num_outliers) == (PRIOR_RELATIVE, False, 1)


def test_what_is_said_of_an_outlier_itself_counts_its_own_runs():
    noise = estimate_noise([[70.0, 70.9]], own=[[36.0, 4.8]])
    assert (noise.num_outliers, noise.num_repeats) == (0, 2)
    assert noise.relative > 0.5


def test_runs_that_often_differ_are_the_noise_and_no_outliers():
    noise = estimate_noise([[1.0, 1.6], [3.4, 2.0], [5.0, 3.1]])
    assert noise.num_outliers == 0
    assert noise.relative > 0.2


def test_normal_noise_is_seldom_taken_for_an_outlier():
    draws = np.random.default_rng(5)
    searches = [[list(np.exp(0.04 * draws.standard_normal(2))) for _ in range(6)] for _ in range(500)]
    found = [estimate_noise(runs) for runs in searches]
    assert sum(noise.num_outliers > 0 for noise in found) <= 0.02 * len(found)
    assert np.mean([noise.relative**2 for noise in found]) ** 0.5 == pytest.approx(0.04, rel=0.1)


def test_a_run_that_two_others_contradict_is_not_compared():
    assert find_outliers({"a": [36.0, 4.6, 4.7], "b": [4.8, 4.9]}) == {"a": {0}}
    assert find_outliers({"a": [4.6, 0.6, 4.7], "b": [4.8]}) == {"a": {1}}
    assert find_outliers({"two": [36.0, 4.6], "b": [4.8]}) == {}
    assert find_outliers({"a": [1.0, 2.0, 4.0], "b": [3.0, 1.4]}) == {}


def time_of(job: Job) -> float:
    """Seconds per step of a configuration on a steady cluster."""
    config = job.payload.config
    return 1.0 + 0.1 * job.payload.gradient_accumulation + 0.05 * config.as_int("tp") + 0.02 * config.as_int("pp")


def moving(first: int, factor: float, time: Callable[[Job], float] = time_of) -> Callable[[Job], Any]:
    """Trials up to `first` run on node n1, where everything takes `factor` times as long, later ones on n2."""

    def decide(job: Job) -> Any:
        host, slower = ("n1", factor) if job.trial <= first else ("n2", 1.0)
        return ran(job, slower * time(job), simulated=False, hosts=(host,) * job.payload.num_ranks)

    return decide


def search(project: Path, decide: Callable[[Job], Any], **limits: int) -> tuple[RunState, Session, Path]:
    limits = {"budget": 8, "parallel": 1, "max_attempts": 1, **limits}
    folder, session = open_search(project, MeasuredLauncher(decide), admits=True, **limits)
    return run_session(folder, session), session, folder


def controls(state: RunState) -> list[int]:
    return [trial.number for trial in state.trials.values() if trial.purpose is Purpose.CONTROL]


def test_a_fast_window_does_not_decide_which_configuration_is_best(project):
    in_order = iter((1.30, 1.25, 1.20, 1.35, 1.40, 1.10, 1.45, 1.50))  # the best one runs in the slower window
    times: dict[str, float] = {}

    def time_in_order(job: Job) -> float:
        config = str(job.payload.config)
        if config not in times:
            times[config] = next(in_order)
        return times[config]

    state, session, folder = search(project, moving(5, 1 / 1.6, time_in_order))
    measured = {n: state.trials[n].loss or math.inf for n in state.trials if n not in controls(state)}
    lucky = state.trials[min(measured, key=lambda n: measured[n])]
    assert times[str(state.best.config)] == min(times.values())
    assert times[str(lucky.config)] > min(times.values()), "without the control, a slower configuration would win"
    assert controls(state) == [7]
    assert state.trials[7].config in [state.trials[n].config for n in range(1, 6)]
    assert state.num_spent == 8, "a control costs no budget"
    text = "\n".join(summarize_run(session.spec, state, folder))
    assert "1 control ran outside the budget" in text
    assert "figures are shown as measured" in text
    page = gather_run(load_run(folder))
    assert page.drift == tuple(describe_drift(state))
    assert f"Drift: {page.drift[0]}" in render_page([page])
    best = best_as_json(session.spec, state, folder)
    assert best["loss"] == state.best.loss, "the ledger keeps what was measured"


def test_the_proposer_sees_corrected_figures(project):
    state, session, folder = search(project, moving(5, 1.6))
    with RunWriter(folder) as writer:
        seen = {o.trial: o for o in view_search(writer, session, budget_left=0).observations}
    pair = controls(state)[0]
    twin = next(n for n in range(1, 6) if state.trials[n].config == state.trials[pair].config)
    raw = (state.trials[twin].loss or 0) / (state.trials[pair].loss or 1)
    corrected = (seen[twin].loss or 0) / (seen[pair].loss or 1)
    assert raw == pytest.approx(1.6)
    assert corrected == pytest.approx(1.0, abs=0.05)
    assert seen[pair].metrics["step_time_s"] == seen[pair].loss
    assert seen[twin].metrics["step_time_s"] == 1.6 * time_of_trial(state, twin)


def time_of_trial(state: RunState, number: int) -> float:
    outcome = state.trials[number].outcome
    return outcome.metrics["step_time_s"] / 1.6


def test_one_window_needs_no_control_and_changes_nothing(project):
    state, _, _ = search(project, moving(0, 1.0))
    assert controls(state) == []
    assert describe_drift(state) == []
    assert state.window_errors == []
    assert all(state.corrected_loss(n) == state.trials[n].loss for n in state.trials)


def test_no_difference_is_an_answer():
    runs = [(config, window, 1.0 + 0.1 * config) for config in range(20) for window in (0, 1)]
    ratio = estimate_drift(runs)[1]
    assert ratio.is_no_difference
    assert ratio.ratio == pytest.approx(1.0, abs=1e-6)
    single = estimate_drift(runs[:2])[1]
    assert not single.is_difference
    assert single.error > ratio.error


def test_windows_are_compared_through_others_but_never_without_a_link():
    runs = [("a", 0, 1.0), ("a", 1, 1.5), ("b", 1, 3.0), ("b", 2, 6.0), ("c", 3, 9.0)]
    ratios = estimate_drift(runs)
    assert sorted(ratios) == [0, 1, 2]
    assert ratios[2].ratio == pytest.approx(3.0, rel=0.25)
    assert ratios[1].ratio == pytest.approx(1.5, rel=0.1)
    assert ratios[2].error > ratios[1].error


def test_nodes_that_change_with_every_job_do_not_double_the_search(project):
    def decide(job: Job) -> Any:
        return ran(job, time_of(job), simulated=False, hosts=(f"n{job.trial}",) * job.payload.num_ranks)

    state, _, _ = search(project, decide)
    assert len(controls(state)) == MIN_CONTROLS
    assert state.num_spent == 8
    unknown = [line for line in describe_drift(state) if line.startswith("unknown for trials ")]
    assert len(unknown) == 1, "one line, however many windows there are"


def test_controls_repeat_every_so_many_trials_if_asked(project):
    def slowing(job: Job) -> Any:
        return ran(job, time_of(job) * 1.15**job.trial, simulated=False, hosts=("n1",) * job.payload.num_ranks)

    state, _, _ = search(project, slowing, control_every=3)
    assert controls(state) == [4, 8]
    assert len(state.windows.names) == 3


def test_a_simulation_has_no_controls(project):
    folder, session = open_search(project, ScriptedLauncher(moving(2, 2.0)), budget=5, parallel=1, control_every=1)
    state = run_session(folder, session)
    assert controls(state) == []
    assert state.windows.names == []
