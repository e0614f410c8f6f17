"""Figures of different windows of a cluster are compared through controls that run in both."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted_launcher import ScriptedLauncher, ran
from scripted_search import admit, open_search

from cclsearch.core.values import Provenance
from cclsearch.evaluation.control import MIN_CONTROLS
from cclsearch.evaluation.evaluate import TrialEvaluator
from cclsearch.evaluation.trial_input import make_input
from cclsearch.launch.base import Job
from cclsearch.loop.jobs import JobRunner
from cclsearch.loop.loop import run_search, view_search
from cclsearch.loop.session import Session, begin_or_resume
from cclsearch.record.event import Purpose
from cclsearch.record.state import RunState
from cclsearch.record.writer import RunWriter
from cclsearch.report.gather import gather_run
from cclsearch.report.page import render_page
from cclsearch.report.summary import best_as_json, describe_drift, summarize_run
from cclsearch.run.folder import load_run
from cclsearch.stats.drift import estimate_drift


class Measured(ScriptedLauncher):
    provenance = Provenance.MEASURED


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
    folder, session = open_search(project, Measured(decide), **limits)
    evaluator = TrialEvaluator(session.spec)
    jobs = JobRunner(
        session.spec,
        session.jobs.launcher,
        lambda *arguments: admit(evaluator(*arguments)),
        lambda trial: make_input(session.spec, trial),
    )
    session = replace(session, jobs=jobs)
    with RunWriter(folder) as writer:
        begin_or_resume(writer, session)
        run_search(writer, session)
    return load_run(folder).state, session, folder


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
    assert state.best is not None
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
    assert best is not None
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
    assert outcome is not None
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
    with RunWriter(folder) as writer:
        begin_or_resume(writer, session)
        run_search(writer, session)
        assert controls(writer.state) == []
        assert writer.state.windows.names == []
