"""Whose job is it: copied and moved runs, runs of one name, other PID namespaces, and jobs that write late."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml
from scripted_launcher import Ending, ScriptedLauncher, failed, ran
from scripted_search import open_search, run_session
from trials import make_input, make_job

from cclsearch.core.errors import UnavailableError
from cclsearch.core.processes import start_ticks
from cclsearch.core.values import FailureKind
from cclsearch.launch.base import Handle, Job, JobState, JobStatus
from cclsearch.launch.local import LocalLauncher
from cclsearch.launch.ownership import RunPlace, is_own, move_handle, stamp_handle
from cclsearch.launch.profile import make_launcher, profile_from_mapping
from cclsearch.launch.tpu_vm.gcloud import make_token
from cclsearch.loop.loop import run_search
from cclsearch.loop.session import Session, begin_or_resume
from cclsearch.record.writer import RunWriter

NEW_NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
SLEEP = "import time; time.sleep(600)"


def make_run(folder: Path) -> Path:
    """Make a folder that looks like a run."""
    (folder / "trials" / "0001").mkdir(parents=True)
    (folder / "search.yaml").write_text("{}")
    return folder


def test_a_moved_run_keeps_its_jobs_and_a_copy_gets_none(tmp_path):
    run = make_run(tmp_path / "run")
    trial, place = run / "trials" / "0001" / "attempts" / "1", RunPlace.of(run)
    assert is_own(run, trial, place.inode)
    link = tmp_path / "link"
    link.symlink_to(run)
    assert is_own(link, trial, place.inode)
    copy = shutil.copytree(run, tmp_path / "copy")
    assert not is_own(copy, trial, place.inode)
    assert not place.is_of(copy)
    moved = run.rename(tmp_path / "moved")
    assert is_own(moved, trial, place.inode)
    assert place.is_of(moved)
    assert not is_own(copy, trial, place.inode), "also where the original cannot be seen, as on another machine"
    assert is_own(moved, trial), "a job of an earlier version, which recorded no inode"


def test_a_job_is_taken_for_own_if_nothing_says_whose_run_it_is(tmp_path):
    run = make_run(tmp_path / "run")
    assert is_own(None, run / "trials" / "0001", "7"), "a launcher without a run folder"
    assert is_own(run, tmp_path / "elsewhere", "7"), "a job that was started in no run"


def test_the_handle_of_a_moved_run_points_to_where_the_run_is(tmp_path):
    run = make_run(tmp_path / "run")
    trial = run / "trials" / "0001"
    details = {"folder": str(trial / "slurm-a1"), "note": "run"}
    handle = stamp_handle(Handle(launcher="x", job_name="j", job_id="1", trial_dir=trial, details=details), run)
    moved = move_handle(handle, run.rename(tmp_path / "moved"))
    assert moved.trial_dir == tmp_path / "moved" / "trials" / "0001"
    assert moved.details["folder"] == str(moved.trial_dir / "slurm-a1")
    assert (moved.details["note"], moved.job_id) == ("run", "1")


def test_a_copy_of_a_run_on_a_tpu_gets_its_own_token(tmp_path):
    run = make_run(tmp_path / "run")
    token = make_token(run)
    copy = shutil.copytree(run, tmp_path / "copy")
    assert make_token(copy) != token
    assert make_token(run) == token
    assert make_token(run.rename(tmp_path / "moved")) == token


@pytest.fixture
def start(project: Path):
    """Start a job that sleeps in a run folder; all such jobs are ended at the end."""
    started: list[tuple[LocalLauncher, Handle]] = []
    (project / "launchers").mkdir()
    (project / "launchers" / "mine.py").write_text(SLEEP)
    knobs = [{"name": "tp", "choices": [1, 2]}]
    framework = yaml.safe_dump({"script": "mine.py", "runner": "process", "knobs": knobs})
    (project / "launchers" / "mine.framework.yaml").write_text(framework)

    def begin(run: Path) -> tuple[LocalLauncher, Handle]:
        launcher = open_launcher(make_run(run))
        job = make_job(run / "trials" / "0001" / "attempts" / "1", make_input({"tp": 2}, run_id=run.name))
        [handle] = launcher.submit([job])
        started.append((launcher, handle))
        return launcher, handle

    yield begin
    for launcher, handle in started:
        launcher.cancel([handle])


def open_launcher(run: Path) -> LocalLauncher:
    profile = profile_from_mapping({"launcher": "local", "python": sys.executable}, name="here")
    launcher = make_launcher(profile, framework="mine", run_dir=run)
    assert isinstance(launcher, LocalLauncher)
    return launcher


def test_runs_of_one_name_in_two_projects_do_not_end_each_others_jobs(start, project):
    first, mine = start(project / "a" / "night")
    second, other = start(project / "b" / "night")
    assert mine.job_name == other.job_name
    first.cancel([mine])
    assert first.poll([mine])[0].state is JobState.DONE
    assert second.poll([other])[0].state is JobState.RUNNING


def test_a_copied_run_folder_does_not_touch_the_originals_local_job(start, project):
    launcher, handle = start(project / "run")
    copy = open_launcher(shutil.copytree(project / "run", project / "copy"))
    handles = copy.find("run")
    copy.poll(handles)
    copy.cancel([*handles, move_handle(handle, project / "copy")])
    assert launcher.poll([handle])[0].state is JobState.RUNNING
    assert [found.job_id for found in launcher.find("run")] == [handle.job_id]


def test_the_local_job_of_a_moved_run_is_still_found_and_cancelled(start, project):
    _, handle = start(project / "run")
    moved = (project / "run").rename(project / "moved")
    later = open_launcher(moved)
    [found] = later.find("run")
    assert later.poll([found])[0].state is JobState.RUNNING
    later.cancel([found])
    assert start_ticks(int(handle.job_id)) is None


def test_a_process_that_got_the_id_and_start_time_of_a_job_is_not_ended(start, project):
    """After a restart of a container, ids and start times come again; name and folder do not."""
    launcher, handle = start(project / "run")
    stranger = handle.model_copy(update={"job_id": str(os.getpid())})
    ticks = {**handle.details, "start_ticks": str(start_ticks(os.getpid()))}
    launcher.cancel([stranger.model_copy(update={"details": ticks})])
    assert start_ticks(os.getpid()) is not None
    assert launcher.poll([stranger.model_copy(update={"details": ticks})])[0].state is JobState.DONE


@pytest.mark.parametrize("changed", ["boot_id", "pid_ns"])
def test_a_restart_of_machine_or_container_is_not_the_trials_fault(start, project, changed):
    launcher, handle = start(project / "run")
    os.kill(int(handle.job_id), 9)
    launcher.cancel([handle])
    later = handle.model_copy(update={"details": {**handle.details, changed: "of an earlier one"}})
    failure = launcher.poll([later])[0].failure
    assert failure.kind is FailureKind.NODE_FAILED


IN_NAMESPACE = """
import json, sys
from pathlib import Path
from cclsearch.core.errors import UserError
from cclsearch.launch.base import Handle
from cclsearch.launch.profile import make_launcher, profile_from_mapping
profile = profile_from_mapping({"launcher": "local", "python": sys.executable}, name="here")
launcher = make_launcher(profile, framework="mine", run_dir=Path(sys.argv[1]))
[handle] = launcher.find("run")
[status] = launcher.poll([handle])
try:
    launcher.cancel([handle])
    answer = "cancelled"
except UserError as error:
    answer = str(error)
print(json.dumps([status.state, answer]))
"""


def test_a_job_is_not_taken_for_dead_in_another_pid_namespace(start, project):
    """The kernel says that its processes hold its lock; they cannot be ended from there, which is said."""
    launcher, handle = start(project / "run")
    command = [*NEW_NAMESPACE, sys.executable, "-c", IN_NAMESPACE, str(project / "run")]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=120, check=False)
    if "unshare" in done.stderr:
        pytest.skip("no PID namespace can be made here")
    state, answer = json.loads(done.stdout)
    assert state == "running", done.stderr
    assert "runs in another PID namespace" in answer
    assert launcher.poll([handle])[0].state is JobState.RUNNING
    elsewhere = handle.model_copy(update={"details": {**handle.details, "pid_ns": "pid:[1]"}})
    os.kill(int(handle.job_id), 9)
    launcher.cancel([elsewhere])  # what the namespace of the search can see of the job is ended
    assert launcher.poll([elsewhere])[0].state is JobState.DONE


class LateJobs(ScriptedLauncher):
    """Jobs that outlive their submission, and so write to their attempt's folder."""

    poll_interval_s = 0.001

    def __init__(self, decide: Callable[[Job], Ending]) -> None:
        super().__init__(decide)
        self.calls: list[str] = []
        self.refuse_cancel = 0

    def submit(self, jobs: Sequence[Job]) -> list[Handle]:
        self.calls += [f"submit {job.name}" for job in jobs]
        return super().submit(jobs)

    def cancel(self, handles: Sequence[Handle]) -> None:
        if self.refuse_cancel:
            self.refuse_cancel -= 1
            raise UnavailableError("the scheduler does not answer")
        self.calls += [f"cancel {handle.job_name}" for handle in handles]


def test_an_attempt_is_cancelled_before_it_is_repeated(project):
    """Also if the scheduler does not answer at first: the next attempt waits."""
    launcher = LateJobs(lambda job: failed(FailureKind.PREEMPTED) if job.attempt == 1 else ran(job))
    launcher.refuse_cancel = 2
    folder, session = open_search(project, launcher, budget=1)
    state = run_session(folder, session)
    assert launcher.calls == ["submit r-t0001-a1", "cancel r-t0001-a1", "submit r-t0001-a2"]
    assert state.trials[1].loss == 1.0


def test_a_job_that_writes_late_changes_nothing_that_is_read(project):
    jobs: list[Job] = []

    def decide(job: Job) -> Ending:
        jobs.append(job)
        (job.trial_dir / "stdout.log").write_text(f"attempt {job.attempt}")
        return failed(FailureKind.PREEMPTED) if job.attempt == 1 else ran(job)

    launcher = LateJobs(decide)
    folder, session = open_search(project, launcher, budget=1)
    run_session(folder, session)
    trial = folder / "trials" / "0001"
    before = (trial / "result.json").read_bytes()
    for job in jobs:
        (job.trial_dir / "result.json").write_text(ran(job, step_time_s=0.001).model_dump_json())
        (job.trial_dir / "stdout.log").write_text("late")
    state = run_session(folder, session)
    assert (trial / "result.json").read_bytes() == before
    assert (trial / "stdout.log").read_text() == "attempt 2"
    assert state.trials[1].loss == 1.0
    assert len(jobs) == 2


@pytest.mark.parametrize("at", range(1, 6))
@pytest.mark.parametrize("ends_well", [True, False])
def test_a_kill_while_evidence_is_moved_changes_nothing(project, monkeypatch, at, ends_well):
    """The search dies at one of the renames; a resumed search records what an undisturbed one would have."""

    class Killed(BaseException):
        pass

    def decide(job: Job) -> Ending:
        for name in ("stdout.log", "stderr.log"):
            (job.trial_dir / name).write_text(name)
        (job.trial_dir / "trace").mkdir()
        return ran(job) if ends_well else failed(FailureKind.OUT_OF_MEMORY)

    calls = 0

    def rename(source: Path, target: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise Killed
        os.replace(source, target)

    launcher = LateJobs(decide)
    folder, session = open_search(project, launcher, budget=1)
    monkeypatch.setattr("cclsearch.run.trial_folder.os.rename", rename)
    was_killed = False
    try:
        run_session(folder, session)
    except Killed:
        was_killed = True
        launcher._endings.clear()  # what the launcher would now say of a job whose files were moved is worth nothing
        trial = run_session(folder, session).trials[1]
        failure = trial.outcome.failure
        assert (failure and failure.kind) is (None if ends_well else FailureKind.OUT_OF_MEMORY)
        assert trial.retries == ()
    assert was_killed is (at <= (4 if ends_well else 3))
    trial_folder = folder / "trials" / "0001"
    assert {path.name for path in trial_folder.iterdir()} >= {"stdout.log", "stderr.log", "trace", "config.json"}
    assert (trial_folder / "result.json").exists() is ends_well
    assert len(launcher.submitted) == 1


def test_a_copied_run_repeats_its_running_trial_and_leaves_the_originals_job(project):
    """`cp -a` of a search whose trial runs, the lock removed, `resume` in the copy."""
    launcher = LateJobs(lambda job: None)
    folder, session = open_search(project, launcher, budget=1)
    with RunWriter(folder) as writer:
        begin_or_resume(writer, session)
        _propose(writer, session)
        copy = shutil.copytree(folder, project / "runs" / "copy")
        (copy / "lock").unlink()
    launcher.decide = ran
    state = run_session(copy, session)
    assert launcher.cancelled == []
    assert [call for call in launcher.calls if call.startswith("cancel")] == []
    assert launcher.calls[-1] == "submit r-t0001-a2"
    assert (state.trials[1].loss, len(state.trials[1].retries)) == (1.0, 1)
    assert "copy of" in state.trials[1].retries[0].reason
    assert not (folder / "trials" / "0001" / "attempts" / "2").exists()


def _propose(writer: RunWriter, session: Session) -> None:
    """Let the search submit its first trial and die."""

    class Dead(BaseException):
        pass

    def die(*_: object) -> list[JobStatus]:
        raise Dead

    session.jobs.launcher.poll = die  # type: ignore[method-assign]
    with pytest.raises(Dead):
        run_search(writer, session)
    del session.jobs.launcher.poll
