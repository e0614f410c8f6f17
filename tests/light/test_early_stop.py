"""A trial that is slower than the best one beyond doubt ends early; it is not ranked, and it teaches."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from scripted_launcher import ScriptedLauncher, ran
from scripted_search import admit, open_search

from cclsearch.core.values import Failure, FailureKind, Provenance
from cclsearch.evaluation.evaluate import TrialEvaluator
from cclsearch.launch.base import Job
from cclsearch.launch.contract import CONFIG_FILE, RunStatus
from cclsearch.loop.early_stop import DOUBT, find_margin, find_stop_above
from cclsearch.loop.loop import run_search
from cclsearch.loop.session import begin_or_resume
from cclsearch.record.state import RunState
from cclsearch.record.trial import TrialState, find_state
from cclsearch.record.writer import RunWriter
from cclsearch.report.summary import summarize_run
from cclsearch.run.folder import load_run
from cclsearch.scoring.objective import load_objective
from cclsearch.stats.noise import Noise
from cclsearch.study.mapping import NUMBER
from cclsearch.study.view import STUDY_FILE
from cclsearch.tasks.training.contract import TrainingResult

Ending = Callable[[Job, float], TrainingResult]


def test_two_runs_of_one_configuration_rarely_differ_by_more_than_the_margin():
    rng = np.random.default_rng(1)
    pairs = np.exp(rng.normal(0.0, 0.05, size=(200_000, 2)))
    share = np.mean(pairs[:, 0] / pairs[:, 1] > find_margin(Noise(0.05, 1e6)))
    assert share == pytest.approx(DOUBT, abs=0.001)
    assert find_margin(Noise(0.05, 2.0)) > find_margin(Noise(0.05, 8.0)), "less is known of the noise"


def end_early(job: Job, step_time_s: float) -> TrainingResult:
    """Do as a run script does that reads `stop_above`."""
    limit = job.payload.stop_above
    if limit is None or step_time_s <= limit:
        return ran(job, step_time_s, simulated=False)
    return ran(job, step_time_s, simulated=False, status=RunStatus.PRUNED, step_times_s=(step_time_s,) * 3)


def search(project: Path, times_s: list[float], ending: Ending = end_early, **limits: int) -> tuple[Path, RunState]:
    """Run a search whose trials take these times in order; every complete trial is admitted."""
    left = iter(times_s)
    launcher = ScriptedLauncher(lambda job: ending(job, next(left)))
    launcher.provenance = Provenance.MEASURED
    folder, session = open_search(project, launcher, budget=len(times_s), **limits)
    evaluator = TrialEvaluator(session.spec)

    def evaluate(*arguments: object) -> object:
        outcome = evaluator(*arguments)  # type: ignore[arg-type]
        return outcome if outcome.is_pruned or outcome.failure else admit(outcome)

    def find(state: RunState, trial: object) -> float | None:
        return find_stop_above(session.spec, session.space, state, trial)  # type: ignore[arg-type]

    jobs = replace(session.jobs, evaluate=evaluate, find_stop_above=find)  # type: ignore[arg-type]
    with RunWriter(folder) as writer:
        begin_or_resume(writer, session)
        run_search(writer, replace(session, jobs=jobs))
        return folder, writer.state


def limits_of(folder: Path) -> list[float | None]:
    paths = sorted(folder.glob(f"trials/*/{CONFIG_FILE}")) or sorted(folder.glob(f"trials/*/attempts/*/{CONFIG_FILE}"))
    return [json.loads(path.read_text()).get("stop_above") for path in paths]


def test_a_hopeless_trial_ends_early_and_one_within_the_noise_does_not(tmp_path):
    folder, state = search(tmp_path, [1.0, 1.02, 9.0, 1.05, 0.5, 0.9])
    assert [find_state(state.trials[n]) for n in range(1, 7)] == [
        TrialState.ADMITTED, TrialState.ADMITTED, TrialState.PRUNED, TrialState.ADMITTED, TrialState.ADMITTED,
        TrialState.PRUNED,
    ]  # fmt: skip
    first, second, third, *_, last = limits_of(folder)
    assert first is second is None, "nothing to compare with, and one trial alone may have done less than the work"
    assert third is not None
    assert 1.1 < third < 9.0
    assert last is not None
    assert 0.5 < last < 0.9, "the limit follows the best"
    assert state.best is not None
    assert state.best.number == 5
    pruned = state.trials[3]
    assert pruned.loss is None
    assert pruned.costs_budget
    assert pruned.outcome is not None
    assert pruned.outcome.saved_s is not None
    done, planned = 2 + 3, 2 + 5 + 3
    assert pruned.outcome.saved_s == pytest.approx((planned - done) * 9.0)
    run = load_run(folder)
    assert any("2 trials ended early" in line for line in summarize_run(run.spec, run.state, folder))
    assert {find_state(t) for t in run.state.trials.values()} == {TrialState.ADMITTED, TrialState.PRUNED}


def test_the_optuna_study_has_it_as_pruned_with_what_it_measured(tmp_path):
    folder, state = search(tmp_path, [1.0, 1.02, 9.0, 1.05])
    storage = JournalStorage(JournalFileBackend(str(folder / STUDY_FILE)))
    (summary,) = storage.get_all_studies()
    trials = optuna.load_study(study_name=summary.study_name, storage=storage).trials
    states = {trial.user_attrs[NUMBER]: trial.state.name for trial in trials}
    assert states == {1: "COMPLETE", 2: "COMPLETE", 3: "PRUNED", 4: "COMPLETE"}
    pruned = next(trial for trial in trials if trial.state.name == "PRUNED")
    outcome = state.trials[3].outcome
    assert outcome is not None
    assert pruned.intermediate_values == {0: pytest.approx(outcome.metrics["step_time_s"])}
    assert outcome.metrics["step_time_s"] > 2.0


def test_what_a_trial_that_ended_early_measured_is_learned_from(tmp_path):
    _folder, state = search(tmp_path, [1.0, 1.02, 9.0])
    seen = state.trials.observe(None)[2]
    assert seen.is_pruned
    assert seen.is_valid
    assert seen.loss is None
    assert seen.failure is None
    assert seen.value("step_time_s") == 9.0


@pytest.mark.parametrize(("value", "allowed"), [(9.0, False), (1.0, True)])
def test_a_script_that_ends_early_without_reason_has_failed(tmp_path, value, *, allowed):
    def ending(job: Job, step_time_s: float) -> TrainingResult:
        is_first = job.trial <= 2
        status = RunStatus.OK if is_first and allowed else RunStatus.PRUNED
        return ran(job, step_time_s, simulated=False, status=status)

    _, state = search(tmp_path, [1.0, 1.02, value] if allowed else [value], ending)
    outcome = state.trials[len(state.trials)].outcome
    assert outcome is not None
    assert outcome.failure is not None
    assert outcome.failure.kind is FailureKind.CRASHED
    assert ("is not above" if allowed else "nothing allowed it to") in outcome.failure.message


def test_no_trial_ends_early_if_the_user_says_so(tmp_path):
    folder, state = search(tmp_path, [1.0, 9.0, 8.0], early_stop=False)
    assert limits_of(folder) == [None] * 3
    assert all(find_state(trial) is TrialState.ADMITTED for trial in state.trials.values())


@pytest.mark.parametrize(
    ("objective", "has_limit"),
    [("step_time", True), ("throughput_per_accelerator", True), ("composite", False), ("pareto", False)],
)
def test_only_a_loss_that_follows_from_the_step_time_sets_a_limit(tmp_path, objective, *, has_limit):
    launcher = ScriptedLauncher(lambda job: ran(job, 1.0, simulated=False))
    launcher.provenance = Provenance.MEASURED
    folder, session = open_search(tmp_path, launcher, budget=2)
    spec = session.spec.model_copy(update={"objective": load_objective(objective)})
    evaluator = TrialEvaluator(spec)
    jobs = replace(session.jobs, evaluate=lambda *a: admit(evaluator(*a)))
    with RunWriter(folder) as writer:
        begin_or_resume(writer, session)
        run_search(writer, replace(session, jobs=jobs))
        trial = replace(writer.state.trials[2], outcome=None)
        limit = find_stop_above(spec, session.space, writer.state, trial)
    assert (limit is not None) == has_limit
    if objective == "throughput_per_accelerator" and limit is not None:
        best = writer.state.best
        assert best is not None
        ranks = [int(np.prod([t.config.as_int(k) for k in ("tp", "dp", "pp")])) for t in (best, trial)]
        assert limit / find_margin(Noise(0.03, 2.0)) == pytest.approx(ranks[0] / ranks[1], rel=0.2)


def test_a_failure_of_the_job_is_not_taken_for_an_early_end(tmp_path):
    def ending(job: Job, step_time_s: float) -> TrainingResult | Failure:
        return ran(job, 1.0, simulated=False, status=RunStatus.PRUNED, step_times_s=())

    _, state = search(tmp_path, [1.0], ending)  # type: ignore[arg-type]
    outcome = state.trials[1].outcome
    assert outcome is not None
    assert outcome.failure is not None
    assert "there are none" in outcome.failure.message
