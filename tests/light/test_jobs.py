"""Running trials: which are retried, which cost budget, which jobs are adopted, and what a stop leaves behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_launcher import Ending, MeasuredLauncher, ScriptedLauncher, failed, ran
from scripted_search import admit_all, open_search, run_session

from cclsearch.core.values import FailureKind
from cclsearch.evaluation.trial_input import make_input
from cclsearch.launch.base import Handle, Job, JobState, JobStatus
from cclsearch.launch.contract import CONFIG_FILE, trial_environment
from cclsearch.loop.jobs import StopSignal
from cclsearch.loop.session import Session, begin_or_resume
from cclsearch.record.event import Purpose, TrialProposed, TrialSubmitting
from cclsearch.record.state import RunState
from cclsearch.record.writer import RunWriter
from cclsearch.scoring.objective import load_objective


def search(project: Path, decide: Callable[[Job], Ending], **limits: int) -> tuple[RunState, ScriptedLauncher]:
    launcher = ScriptedLauncher(decide)
    return run_session(*open_search(project, launcher, **limits)), launcher


def test_an_infrastructure_failure_is_retried_and_costs_no_budget(project):
    state, launcher = search(project, lambda job: failed(FailureKind.PREEMPTED) if job.attempt == 1 else ran(job))
    assert len(state.trials) == 4
    assert all(trial.loss is not None and len(trial.retries) == 1 for trial in state.trials.values())
    assert len(launcher.submitted) == 8


@pytest.mark.parametrize("kind", [FailureKind.PREEMPTED, FailureKind.LAUNCHER, FailureKind.CRASHED])
def test_what_a_scheduler_or_ssh_says_is_stored_without_its_secrets(kind, project):
    said = "scontrol: Comment=HF_TOKEN=hf_Zq3vT8mK1xW5bN7cR2dL9f ssh: proxy http://me:p@ss-w0rd@proxy:3128 refused"
    failure = failed(kind).model_copy(update={"message": said})
    state, _ = search(project, lambda job: failure if job.attempt == 1 else ran(job), budget=1)
    assert state.trials
    kept = {path: path.read_text() for path in (project / "runs").rglob("*") if path.is_file()}
    assert any("scontrol: Comment=HF_TOKEN=[secret]" in text for text in kept.values())
    assert [path for path, text in kept.items() if "hf_Zq3" in text or "ss-w0rd" in text] == []


def test_every_measured_attempt_gets_a_nonce_of_its_own_which_the_ledger_keeps(project):
    """The ledger keeps it, so that a job cannot choose the nonce that its traces must contain."""
    jobs: list[Job] = []

    def decide(job: Job) -> Ending:
        jobs.append(job)
        return failed(FailureKind.PREEMPTED) if job.attempt == 1 else ran(job, simulated=False)

    state = run_session(*open_search(project, MeasuredLauncher(decide), keep_going=True))
    nonces = {trial.number: trial.nonce for trial in state.trials.values()}
    assert len({job.payload.nonce for job in jobs}) == 8
    assert nonces == {job.trial: job.payload.nonce for job in jobs if job.attempt == 2}
    for job in jobs[1::2]:
        assert len(job.payload.nonce) == 16
        assert json.loads((job.trial_dir / CONFIG_FILE).read_text())["nonce"] == job.payload.nonce
        assert trial_environment(job.trial_dir, job.payload)["CCL_NONCE"] == job.payload.nonce


def test_a_search_stops_after_3_consecutive_infrastructure_failures(project):
    state, launcher = search(project, lambda job: failed(FailureKind.NODE_FAILED))
    assert state.ended is None
    assert "3 consecutive infrastructure failures" in state.stopped.reason
    assert state.num_spent == 0
    assert len(launcher.submitted) == 9


def test_a_search_stops_when_its_allocation_ends_and_can_resume(project):
    """The allocation is too short for the second trial: the search stops at once, and a resume runs that trial."""
    launcher = ScriptedLauncher(lambda job: failed(FailureKind.ALLOCATION_ENDED) if job.trial == 2 else ran(job))
    folder, session = open_search(project, launcher)
    assert "allocation has ended" in run_session(folder, session).stopped.reason
    assert len(launcher.submitted) == 2
    launcher.decide = ran
    state = run_session(folder, replace(session, stop=StopSignal()))
    assert state.ended is not None
    assert state.trials[2].loss is not None
    assert len(state.trials) == 4


def test_trials_lost_to_infrastructure_are_retried_after_a_resume(project):
    launcher = ScriptedLauncher(lambda job: failed(FailureKind.NODE_FAILED))
    folder, session = open_search(project, launcher, budget=1000)
    lost = {trial.config for trial in run_session(folder, session).trials.values()}
    launcher.decide = ran
    state = run_session(folder, replace(session, stop=StopSignal()))
    ranked = {trial.config for trial in state.trials.values() if trial.loss is not None}
    assert len(lost) == 3
    assert lost <= ranked
    assert len(ranked) == len(session.space)


def test_a_configuration_failure_costs_budget_and_is_not_retried(project):
    state, launcher = search(project, lambda job: failed(FailureKind.OUT_OF_MEMORY))
    assert [t.outcome.failure.kind for t in state.trials.values()] == [FailureKind.OUT_OF_MEMORY] * 4
    assert len(launcher.submitted) == 4
    assert state.ended is not None


def begin_first_trial(writer: RunWriter, session: Session) -> Job:
    """Record what a search records before it submits trial 1, and return the job."""
    begin_or_resume(writer, session)
    writer.record(TrialProposed(time_s=0, trial=1, config=session.space.config(0), proposer="random"))
    writer.record(TrialSubmitting(time_s=0, trial=1, attempt=1))
    trial_dir = writer.trial_folder(1).absolute()
    trial_dir.mkdir(parents=True)
    payload = make_input(session.spec, writer.state.trials[1])
    return Job(run_id="r", trial=1, attempt=1, trial_dir=trial_dir, payload=payload, timeout_s=60)


def test_jobs_of_a_killed_search_are_adopted_not_submitted_again(project):
    """The search was killed after the launcher accepted the job and before the ledger recorded it."""
    launcher = ScriptedLauncher(ran)
    folder, session = open_search(project, launcher, budget=1)
    with RunWriter(folder) as writer:
        job = begin_first_trial(writer, session)
        launcher.submit([job])
    assert run_session(folder, session).trials[1].loss == 1.0
    assert launcher.submitted == [job.name]


def test_a_result_of_a_job_the_launcher_no_longer_lists_is_used(project):
    launcher = ScriptedLauncher(ran)
    folder, session = open_search(project, launcher, budget=1)
    with RunWriter(folder) as writer:
        job = begin_first_trial(writer, session)
        (job.trial_dir / "result.json").write_text(ran(job, 0.5).model_dump_json())
    assert run_session(folder, session).trials[1].loss == 0.5
    assert launcher.submitted == []


@pytest.mark.parametrize("detach", [False, True])
def test_a_stop_cancels_running_jobs_unless_detached(project, detach):
    stop = StopSignal(leave_jobs=detach)
    launcher = ScriptedLauncher(lambda job: stop.request("requested by the test"))
    folder, session = open_search(project, launcher)
    state = run_session(folder, replace(session, stop=stop))
    assert state.stopped is not None
    assert (state.trials[1].handle is not None) is detach
    assert launcher.cancelled == ([] if detach else ["r-t0001-a1"])


def test_an_unreachable_run_folder_does_not_fail_a_job(project):
    """A poll that finds no result because a shared file system is unreachable does not prove that the job failed."""
    away = project / "away"

    class LosesRunFolder(ScriptedLauncher):
        def poll(self, handles: Sequence[Handle]) -> list[JobStatus]:
            if folder.exists() and not away.exists() and not self.looked:
                self.looked = True
                folder.rename(away)
                return [JobStatus(state=JobState.DONE, failure=failed(FailureKind.NODE_FAILED)) for _ in handles]
            return super().poll(handles)

    launcher = LosesRunFolder(ran)
    folder, session = open_search(project, launcher, budget=1)
    with pytest.raises(OSError, match=r"\[Errno"):
        run_session(folder, session)
    away.rename(folder)
    (folder / "lock").unlink()  # in reality the process that holds the lock would be dead
    trial = run_session(folder, session).trials[1]
    assert trial.loss == 1.0
    assert trial.retries == ()
    assert len(launcher.submitted) == 1


def test_files_of_earlier_attempts_are_kept(project):
    def decide(job: Job) -> Ending:
        (job.trial_dir / "stderr.log").write_text(f"attempt {job.attempt}")
        return failed(FailureKind.PREEMPTED) if job.attempt == 1 else ran(job)

    search(project, decide, budget=1)
    folder = project / "runs" / "r" / "trials" / "0001"
    assert (folder / "stderr.log").read_text() == "attempt 2"
    assert (folder / "attempts" / "1" / "stderr.log").read_text() == "attempt 1"


def test_a_folder_where_the_next_trials_files_belong_is_moved_aside(project):
    def decide(job: Job) -> Ending:
        if job.trial == 1:
            (job.trial_dir.parent / "0002" / "config.json").mkdir(parents=True)
        return ran(job)

    state, _ = search(project, decide, budget=2)
    assert [trial.loss is not None for trial in state.trials.values()] == [True, True]
    assert (state.num_spent, state.num_unfinished) == (2, 0)
    folder = project / "runs" / "r" / "trials" / "0002"
    assert (folder / "config.json").is_file()
    assert (folder / "config.json.1").is_dir()


@pytest.mark.parametrize("place", ["0002", "0002/attempts", "0002/attempts/1"])
@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_or_link_where_the_next_trials_folder_belongs_is_moved_aside(project, place, is_link):
    elsewhere = project / "elsewhere"
    elsewhere.mkdir()

    def decide(job: Job) -> Ending:
        if job.trial == 1:
            path = project / "runs" / "r" / "trials" / place
            path.parent.mkdir(parents=True, exist_ok=True)
            if is_link:
                path.symlink_to(elsewhere)
            else:
                path.write_text("not a folder")
        return ran(job)

    state, _ = search(project, decide, budget=2)
    assert [trial.loss is not None for trial in state.trials.values()] == [True, True]
    assert not list(elsewhere.iterdir())


class OneAtATime(MeasuredLauncher):
    """Takes one job at a time, and keeps how many it was given together."""

    max_parallel = 1
    given: tuple[int, ...] = ()

    def submit(self, jobs: Sequence[Job]) -> list[Handle]:
        self.given += (len(jobs),)
        return super().submit(jobs)


def test_confirmations_are_new_trials_that_cost_no_budget_and_run_one_after_the_other(project):
    launcher = OneAtATime(lambda job: ran(job, 1.0 + 0.001 * job.trial, simulated=False))
    folder, session = open_search(project, launcher, confirm=2)
    state = run_session(folder, admit_all(session))
    purposes = [trial.purpose.value for trial in state.trials.values()]
    assert purposes == ["search"] * 4 + ["confirmation"] * 2
    assert launcher.given == (1,) * 6
    assert state.num_spent == 4
    assert len({trial.config for trial in state.trials.values()}) == 4


def test_a_multi_objective_search_confirms_its_pareto_front(project):
    """Fewer ranks are slower, so the fastest configuration of each size is on the Pareto front."""
    launcher = MeasuredLauncher(lambda job: ran(job, 8.0 / job.payload.num_ranks + 0.01 * job.trial, simulated=False))
    folder, session = open_search(project, launcher, budget=15, confirm=2)
    spec = session.spec.model_copy(update={"objective": load_objective("pareto")})
    state = run_session(folder, admit_all(session, spec=spec))
    confirmations = [trial for trial in state.trials.values() if trial.purpose is Purpose.CONFIRMATION]
    sizes = [int(t.config["tp"]) * int(t.config["dp"]) * int(t.config["pp"]) for t in confirmations]
    assert sorted(sizes) == [1, 4]


def test_a_stop_does_not_count_as_an_attempt(project):
    """The search is stopped three times while its trial runs; the trial is then preempted twice and still succeeds."""
    stop = StopSignal()

    def decide(job: Job) -> Ending:
        if job.attempt <= 3:
            return stop.request("requested by the test")
        return failed(FailureKind.PREEMPTED) if job.attempt <= 5 else ran(job)

    folder, session = open_search(project, ScriptedLauncher(decide), budget=1)
    for _ in range(4):
        stop = StopSignal()
        trial = run_session(folder, replace(session, stop=stop)).trials[1]
    assert trial.loss == 1.0
    assert len(trial.retries) == 5
