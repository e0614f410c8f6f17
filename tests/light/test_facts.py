"""Sentences about a search state facts: its own metric and unit, its own counts, no certainty without alternatives."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted_launcher import Ending, MeasuredLauncher, ran
from scripted_search import admit, open_search, run_session

from cclsearch.cli import main
from cclsearch.core.metrics import Direction
from cclsearch.core.values import Failure, FailureKind, Provenance, Stage
from cclsearch.evaluation.evaluate import TrialEvaluator
from cclsearch.launch.base import Job
from cclsearch.launch.local import LocalLauncher
from cclsearch.loop.loop import run_search
from cclsearch.loop.session import begin_or_resume
from cclsearch.nightly.history import read_night
from cclsearch.plan.plan import plan_search
from cclsearch.plan.request import SearchRequest
from cclsearch.record.event import TrialRevised
from cclsearch.record.trial import Trial, describe_counts
from cclsearch.record.writer import RunWriter
from cclsearch.report.data import draw_run, summarize
from cclsearch.report.figures import find_figure, format_share
from cclsearch.report.gather import gather_run
from cclsearch.report.page import render_page
from cclsearch.report.summary import best_as_json, summarize_run
from cclsearch.report.terminal import watch_lines
from cclsearch.run.folder import load_run
from cclsearch.run.spec import SearchLimits
from cclsearch.scoring.objective import Objective, Term
from cclsearch.scoring.outcome import Admission, Outcome

QUALITY = Objective(
    name="quality", description="", terms=(Term(metric="my_quality", direction=Direction.MAXIMIZE, unit="points"),)
)


def speak(
    project: Path, decide: Callable[[Job], Ending], *, objective: Objective | None = None, budget: int = 3
) -> tuple[list[str], str, dict[str, Any] | None]:
    """Lines while the search runs, the text of its summary, and `best --json`; every trial that ran is admitted."""
    folder, session = open_search(project, MeasuredLauncher(decide), budget=budget, parallel=1, max_attempts=1)
    spec = session.spec.model_copy(update={"objective": objective or session.spec.objective})
    evaluator = TrialEvaluator(spec)

    def evaluate(*arguments: Any) -> Outcome:
        outcome = evaluator(*arguments)
        loss = None if outcome.failure else spec.objective.loss(outcome.metrics)
        return admit(outcome).model_copy(update={"loss": loss})

    session = replace(session, spec=spec, jobs=replace(session.jobs, spec=spec, evaluate=evaluate))
    shown = io.StringIO()
    with RunWriter(folder) as writer:
        begin_or_resume(writer, session)
        writer.watch(watch_lines(budget, find_figure(spec), shown))
        run_search(writer, session)
        summary = "\n".join(summarize_run(spec, writer.state, folder))
        return shown.getvalue().splitlines(), summary, best_as_json(spec, writer.state, folder)


def rate(job: Job) -> Ending:
    return ran(job, 2.0 - 0.1 * job.trial, metrics={"my_quality": 10.0 + job.trial})


def test_a_custom_objective_is_spoken_of_in_its_own_metric_and_unit(project):
    lines, text, best = speak(project, rate, objective=QUALITY)
    finished = [line for line in lines if "best so far" in line]
    assert "11 points" in finished[0]
    assert "best so far 13 points" in finished[-1]
    assert "my_quality 13 points (greater is better)" in text
    assert "runner-up: trial 2 (my_quality 7.69% lower)" in text
    assert "trial 1: 11 points -> 13 points" in text
    assert "interval of the my_quality: " in text
    assert best["objective_figure"] == {"name": "my_quality", "unit": "points", "value": 13.0}


def test_values_of_zero_and_below_are_compared_without_a_ratio(project):
    _, text, _ = speak(project, lambda job: ran(job, metrics={"my_quality": job.trial - 3.0}), objective=QUALITY)
    assert "runner-up: trial 2 (my_quality -1 points)" in text
    assert "the first ranked trial: trial 1: -2 points -> 0 points" in text


def test_one_configuration_has_no_probability_of_being_the_best(project):
    _, text, best = speak(project, ran, budget=1)
    assert "only one configuration was admitted: nothing to compare with" in text
    assert "100%" not in text
    assert best["confidence"]["chance_best"] is None


def test_a_clear_winner_is_not_certain(project):
    _, text, _ = speak(project, lambda job: ran(job, 10.0**job.trial))
    assert "more than 99.9% probability of being the best configuration tried" in text
    assert "100%" not in text


def test_a_baseline_that_is_not_the_first_trial_is_called_so(project):
    crash = Failure(stage=Stage.RUN, kind=FailureKind.CRASHED, message="boom")
    _, text, _ = speak(project, lambda job: crash if job.trial == 1 else ran(job, 5.0 - job.trial), budget=4)
    assert "than the first ranked trial (trial 2: 3 s -> 1 s" in text
    assert "trial 2 is the first that was ranked, trial 1 was not" in text


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.5, "50%"), (0.989, "99%"), (0.996, "99.6%"), (0.9994, "99.9%"), (0.99951, "more than 99.9%")],
)
def test_no_share_below_one_is_rounded_to_100_percent(share, text):
    assert format_share(share) == text


def test_a_busy_machine_is_said_before_the_first_trial(monkeypatch):
    launcher = object.__new__(LocalLauncher)
    monkeypatch.setattr("cclsearch.core.processes.measure_load", lambda: 7.04)
    warning = launcher.warn_at_start()
    assert warning.startswith("other processes use 7.0 of ")
    assert "Stop the processes" in warning
    monkeypatch.setattr("cclsearch.core.processes.measure_load", lambda: 0.1)
    assert launcher.warn_at_start() is None


class Busy(MeasuredLauncher):
    def warn_at_start(self) -> str | None:
        return f"other processes use {7 + len(self.submitted)}.0 of 2 cores"


def test_the_warning_is_an_event_before_the_first_trial_and_status_shows_the_last_one(project, cli):
    folder, session = open_search(project, Busy(ran), budget=1, parallel=1)
    with RunWriter(folder) as writer:
        begin_or_resume(writer, session)
        run_search(writer, session)
        notes = [event for event in writer.state.reported if event.label == "busy machine"]
        assert [event.text for event in notes] == ["other processes use 7.0 of 2 cores"]
        assert notes[0].time_s <= writer.state.trials[1].proposed_s
        run_search(writer, session)
        assert len([event for event in writer.state.reported if event.label == "busy machine"]) == 2
    lines = cli.out(["status", "r"]).splitlines()
    assert [line for line in lines if "busy" in line] == ["busy machine: other processes use 8.0 of 2 cores"]


def test_what_was_measured_but_not_admitted_is_shown_with_the_rule(project):
    folder, session = open_search(
        project, MeasuredLauncher(lambda job: ran(job, 0.68, simulated=False)), budget=1, parallel=1
    )
    shown = io.StringIO()
    with RunWriter(folder) as writer:
        begin_or_resume(writer, session)
        writer.watch(watch_lines(1, find_figure(session.spec), shown))
        run_search(writer, session)
    line = next(line for line in shown.getvalue().splitlines() if "not admitted" in line)
    assert "0.68 s, not admitted: " in line
    page = gather_run(load_run(folder))
    [history] = [chart for chart in draw_run(page) if chart.name == "progress"]
    assert "0.68, which does not count" in str(history.spec["data"])
    assert "not admitted: " in render_page([page])


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        ("num_accelerators <= 0", "the search space needs at least "),
        ("num_accelerators >= 999", "the search space has at most "),
        ("step_time_s <= 0", "step time is always above 0"),
    ],
)
def test_a_constraint_that_no_trial_can_satisfy_is_said_at_the_start(project, constraint, reason):
    plan = plan_search(SearchRequest("tiny", SearchLimits(budget=1), constraints=(constraint,)))
    assert plan.spec.banner[0].startswith("no trial can satisfy the constraint ")
    assert reason in plan.spec.banner[0]
    fine = plan_search(SearchRequest("tiny", SearchLimits(budget=1), constraints=("step_time_s <= 5",)))
    assert not any("no trial can satisfy" in line for line in fine.spec.banner)


def test_report_and_trial_have_words_and_units(project, cli):
    usual = "tp=8,dp=2,pp=1,zero_stage=0,micro_batch_size=1"
    run = ["run", "--workload", "wl2", "--launcher", "replay", "--budget", "3", "--name", "w", "--quiet"]
    assert main([*run, "--baseline", usual]) == 0
    shown = cli.out(["show", "w", "1"])
    assert "  step time: 18.23 s\n" in shown
    assert "  accelerators: 16 accelerators\n" not in shown
    assert "  MFU: 20.48%\n" in shown
    page = render_page([gather_run(load_run(project / "runs" / "w"))])
    compared = page[page.index("best / baseline</th>") :]
    assert '<th scope="row">step time</th>' in compared
    assert "step_time_s</th>" not in compared


def end_in_every_way(project: Path) -> Path:
    """With a confirmation; trial 1 crashes, 2 is lost, 3 is refused, 4 cannot be judged, 5 is refused later."""
    kinds = {1: FailureKind.CRASHED, 2: FailureKind.NODE_FAILED}

    def decide(job: Job) -> Ending:
        kind = kinds.get(job.trial)
        return Failure(stage=Stage.RUN, kind=kind, message="boom") if kind else ran(job, 5.0 - 0.1 * job.trial)

    folder, session = open_search(project, MeasuredLauncher(decide), budget=6, parallel=1, max_attempts=1, confirm=1)
    evaluator = TrialEvaluator(session.spec)

    def evaluate(trial: Trial, *arguments: Any) -> Outcome:
        outcome = evaluator(trial, *arguments)
        if trial.number == 4:
            failure = Failure(stage=Stage.SCORE, kind=FailureKind.JUDGING_ERROR, message="ours")
            return Outcome(provenance=Provenance.MEASURED, failure=failure)
        return outcome if trial.number == 3 else admit(outcome)

    state = run_session(folder, replace(session, jobs=replace(session.jobs, evaluate=evaluate)))
    worse = {"admission": Admission(admitted=False, verdicts=()), "loss": None}
    refused = state.trials[5].outcome.model_copy(update=worse)
    with RunWriter(folder) as writer:
        writer.record(TrialRevised(time_s=state.last_s, trial=5, outcome=refused, text="refused later"))
    return folder


def test_every_place_counts_the_trials_alike(project, cli):
    folder = end_in_every_way(project)
    run = load_run(folder)
    assert len(run.state.trials) == 9
    counts = "4 of 9 trials admitted (1 failed, 2 not admitted, 1 lost to infrastructure, 1 could not be judged)"
    assert counts in summarize_run(run.spec, run.state, folder)
    assert f"r  ended; {counts}; best 4." in cli.out(["status"])
    assert f"\n{counts}\n" in cli.out(["status", "r"])
    page = gather_run(run)
    assert page.counts == counts
    assert ("trials admitted", "4 of 9") in page.facts
    assert summarize(page).startswith(f"{counts}.")
    assert counts in cli.out(["export", "r", "--to", "csv"])
    with (folder / "trials.csv").open() as file:
        assert sum(row["state"] == "ranked" for row in csv.DictReader(file)) == 4
    ends = read_night(run).ends
    assert describe_counts(ends) == counts
