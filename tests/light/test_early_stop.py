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
from scripted_launcher import MeasuredLauncher, ran
from scripted_search import admit_all, open_search, run_session

from cclsearch.core.values import FailureKind
from cclsearch.launch.base import Job
from cclsearch.launch.contract import CONFIG_FILE, RunStatus
from cclsearch.loop.early_stop import DOUBT, find_margin, find_stop_above
from cclsearch.record.state import RunState
from cclsearch.record.trial import Trial, TrialState, find_state
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
    launcher = MeasuredLauncher(lambda job: ending(job, next(left)))
    folder, session = open_search(project, launcher, budget=len(times_s), **limits)
    session = admit_all(session)

    def find(state: RunState, trial: Trial) -> float | None:
        return find_stop_above(session.spec, session.space, state, trial)

    return folder, run_session(folder, replace(session, jobs=replace(session.jobs, find_stop_above=find)))


def limits_of(folder: Path) -> list[float | None]:
    paths = sorted(folder.glob(f"trials/*/{CONFIG_FILE}")) or sorted(folder.glob(f"trials/*/attempts/*/{CONFIG_FILE}"))
    return [json.loads(path.read_text()).get("stop_above") for path in paths]


def test_a_hopeless_trial_ends_early_and_one_within_the_noise_does_not(tmp_path):
    folder, state = search(tmp_path, [1.0, 1.02, 9.0, 1.05, 0.5, 0.9])
    ended_early = [number for number, trial in state.trials.items() if find_state(trial.outcome) is TrialState.PRUNED]
    assert ended_early == [3, 6]
    assert [find_state(state.trials[n].outcome) for n in (1, 2, 4, 5)] == [TrialState.ADMITTED] * 4
    first, second, third, *_, last = limits_of(folder)
    assert first is second is None, "nothing to compare with, and one trial alone may have done less than the work"
    assert 1.1 < third < 9.0
    assert 0.5 < last < 0.9, "the limit follows the best"
    assert state.best.number == 5
    pruned = state.trials[3]
    assert pruned.loss is None
    assert pruned.costs_budget
    done, planned = 2 + 3, 2 + 5 + 3
    assert pruned.outcome.saved_s == pytest.approx((planned - done) * 9.0)
    run = load_run(folder)
    assert any("2 trials ended early" in line for line in summarize_run(run.spec, run.state, folder))
    assert {find_state(t.outcome) for t in run.state.trials.values()} == {TrialState.ADMITTED, TrialState.PRUNED}


def test_the_optuna_study_has_it_as_pruned_with_what_it_measured(tmp_path):
    folder, _ = search(tmp_path, [1.0, 1.02, 9.0, 1.05])
    storage = JournalStorage(JournalFileBackend(str(folder / STUDY_FILE)))
    (summary,) = storage.get_all_studies()
    trials = optuna.load_study(study_name=summary.study_name, storage=storage).trials
    states = {trial.user_attrs[NUMBER]: trial.state.name for trial in trials}
    assert states == {1: "COMPLETE", 2: "COMPLETE", 3: "PRUNED", 4: "COMPLETE"}
    [pruned] = [trial for trial in trials if trial.state.name == "PRUNED"]
    assert pruned.intermediate_values == {0: pytest.approx(9.0)}


def test_what_a_trial_that_ended_early_measured_is_learned_from(tmp_path):
    _, state = search(tmp_path, [1.0, 1.02, 9.0])
    seen = state.trials.observe(None)[2]
    assert (seen.is_pruned, seen.is_valid, seen.loss, seen.failure) == (True, True, None, None)
    assert seen.value("step_time_s") == 9.0


@pytest.mark.parametrize(("times_s", "message"), [([9.0], "nothing allowed it to"), ([1.0, 1.02, 1.0], "is not above")])
def test_a_script_that_ends_early_without_reason_has_failed(tmp_path, times_s, message):
    def ending(job: Job, step_time_s: float) -> TrainingResult:
        status = RunStatus.PRUNED if job.trial == len(times_s) else RunStatus.OK
        return ran(job, step_time_s, simulated=False, status=status)

    _, state = search(tmp_path, times_s, ending)
    failure = state.trials[len(times_s)].outcome.failure
    assert failure.kind is FailureKind.CRASHED
    assert message in failure.message


def test_no_trial_ends_early_if_the_user_says_so(tmp_path):
    folder, state = search(tmp_path, [1.0, 9.0, 8.0], early_stop=False)
    assert limits_of(folder) == [None] * 3
    assert all(find_state(trial.outcome) is TrialState.ADMITTED for trial in state.trials.values())


@pytest.mark.parametrize(
    ("objective", "has_limit"),
    [("step_time", True), ("throughput_per_accelerator", True), ("composite", False), ("pareto", False)],
)
def test_only_a_loss_that_follows_from_the_step_time_sets_a_limit(tmp_path, objective, *, has_limit):
    launcher = MeasuredLauncher(lambda job: ran(job, 1.0, simulated=False))
    folder, session = open_search(tmp_path, launcher, budget=2)
    spec = session.spec.model_copy(update={"objective": load_objective(objective)})
    state = run_session(folder, admit_all(session, spec=spec))
    trial = replace(state.trials[2], outcome=None)
    limit = find_stop_above(spec, session.space, state, trial)
    assert (limit is not None) == has_limit
    if objective == "throughput_per_accelerator":
        ranks = [int(np.prod([t.config.as_int(k) for k in ("tp", "dp", "pp")])) for t in (state.best, trial)]
        assert limit / find_margin(Noise(0.03, 2.0)) == pytest.approx(ranks[0] / ranks[1], rel=0.2)


def test_a_failure_of_the_job_is_not_taken_for_an_early_end(tmp_path):
    def ending(job: Job, step_time_s: float) -> TrainingResult:
        return ran(job, 1.0, simulated=False, status=RunStatus.PRUNED, step_times_s=())

    _, state = search(tmp_path, [1.0], ending)
    assert "there are none" in state.trials[1].outcome.failure.message
