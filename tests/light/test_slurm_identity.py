"""Whose job is it: Slurm gives numbers again, and only the search's own jobs are cancelled or believed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from slurm.fake_commands import SEPARATOR, SUBMITTED, FakeSlurm, open_launcher, row
from slurm.trials import make_job

from cclsearch.core.errors import UserError
from cclsearch.launch.base import Handle, JobState, JobStatus
from cclsearch.launch.slurm.commands import SlurmUnavailable, expand_ids, parse_duration, query_job, read_queue
from cclsearch.launch.slurm.job_files import RunScript, Submission, make_job_spec
from cclsearch.launch.slurm.launcher import SlurmLauncher
from cclsearch.launch.slurm.settings import SlurmSettings
from cclsearch.launch.slurm.submit import (
    DEFAULT_MAX_ARRAY,
    DEFAULT_MAX_JOBS,
    find_max_array,
    find_max_jobs,
    render_chunk,
)

EARLIER, LATER = "2025-12-31T00:00:00", "2026-01-02T04:00:00"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm(tmp_path / "bin", monkeypatch)


@pytest.fixture
def run(tmp_path: Path, slurm: FakeSlurm) -> tuple[SlurmLauncher, Handle]:
    """A search with job 77, which Slurm has listed once."""
    launcher = open_run(tmp_path)
    [handle] = launcher.submit([make_job(tmp_path / "mine", 1, ranks=1)])
    slurm.list_jobs(row("77", "RUNNING", place_of(handle), "mine-t0001-a1"))
    assert launcher.poll([handle])[0].state is JobState.RUNNING
    return launcher, handle


def open_run(folder: Path, **fields: object) -> SlurmLauncher:
    return open_launcher(folder / "mine", **{"grace_s": 0.0, **fields})


def place_of(handle: Handle) -> Path:
    """Return the working directory of the handle's job."""
    return Submission.model_validate_json((Path(handle.details["folder"]) / "submission.json").read_text()).folder


def account(job_id: str, state: str, folder: Path | str, name: str, submitted: str = SUBMITTED) -> str:
    return SEPARATOR.join([job_id, state, "n", name, submitted, str(folder)])


def age_submission(handle: Handle) -> None:
    """Make the submission old enough for a query to count."""
    path = Path(handle.details["folder"]) / "submission.json"
    record = json.loads(path.read_text())
    moment = {"wall_s": record["moment"]["wall_s"] - 3600, "boot_id": "another", "boot_s": 0.0}
    path.write_text(json.dumps({**record, "moment": moment}))


def strangers(handle: Handle) -> list[str]:
    """Return lines of jobs that have the number of the handle's job, and differ from it in one property each."""
    place = place_of(handle)
    return [
        row("77", "RUNNING", "/home/me/thesis", "mine-t0001-a1"),
        row("77", "RUNNING", place, "my-thesis"),
        row("77", "RUNNING", place, "mine-t0001-a1", EARLIER),
        row("77", "RUNNING", "", "mine-t0001-a1"),
    ]


@pytest.mark.parametrize("which", range(4))
def test_another_job_with_the_number_is_neither_cancelled_nor_believed(run, slurm, tmp_path, which):
    _, handle = run
    age_submission(handle)
    slurm.list_jobs(strangers(handle)[which])
    resumed = open_run(tmp_path)
    assert resumed.find("mine") == [handle]
    assert "not listed" in str(_poll_until_done(resumed, handle).failure)
    resumed.cancel([handle])
    assert slurm.cancelled == []


def test_the_searchs_own_job_is_cancelled_next_to_a_stranger_and_after_a_requeue(run, slurm, tmp_path):
    _, handle = run
    slurm.list_jobs(strangers(handle)[0], row("77", "PENDING", place_of(handle), "mine-t0001-a1", LATER))
    resumed = open_run(tmp_path)
    assert resumed.poll([handle])[0].state is JobState.QUEUED
    resumed.cancel([handle])
    assert slurm.cancelled == ["77"]


def test_on_several_clusters_only_the_jobs_own_is_asked_to_cancel(run, slurm, tmp_path):
    _, handle = run
    (Path(handle.details["folder"]) / "seen.json").unlink()
    own = row("77", "RUNNING", place_of(handle), "mine-t0001-a1")
    slurm.list_jobs("CLUSTER: east", strangers(handle)[0], "CLUSTER: west", own)
    open_run(tmp_path).cancel([handle])
    assert slurm.cancelled == ["--clusters=west 77"]


def test_the_accounting_of_an_earlier_job_with_the_number_is_not_believed(run, slurm):
    launcher, handle = run
    age_submission(handle)
    slurm.list_jobs()
    place = place_of(handle)
    own = account("77", "NODE_FAIL", place, "mine-t0001-a1")
    slurm.account(
        account("77", "OUT_OF_MEMORY", "/old", "old", EARLIER), own, account("77", "TIMEOUT", "/x", "y", LATER)
    )
    status = _poll_until_done(launcher, handle)
    assert "NODE_FAIL" in status.failure.message


@pytest.mark.parametrize(
    ("spoil", "kind", "says"),
    [
        (lambda spec: spec.write_text('{"run_id": 7}'), "crashed", "changed its own record: payload.json: run_id: "),
        (lambda spec: (spec.unlink(), spec.mkdir()), "crashed", "payload.json is a folder, not a regular file"),
        (lambda spec: spec.unlink(), "launcher", "the files of job 77 are missing"),
    ],
)
def test_a_spec_that_a_job_spoiled_is_told_from_a_missing_one(run, tmp_path, spoil, kind, says):
    handle = run[1].model_copy(update={"job_id": "77"})
    spoil(Path(handle.details["folder"]) / "payload.json")
    [status] = open_run(tmp_path).poll([handle])
    assert status.failure.kind == kind
    assert says in status.failure.message


def test_the_controllers_record_names_the_job(slurm):
    slurm.write(
        "scontrol",
        "echo 'JobId=77 JobName=my name UserId=me(0) JobState=PENDING PreemptTime=None Restarts=1"
        " SubmitTime=2026-01-02T03:04:05 WorkDir=/a b/c StdErr=/e Power='",
    )
    record = query_job("77")
    assert (record.name, record.folder, record.submitted) == ("my name", "/a b/c", SUBMITTED)
    assert (record.state, record.preempted) == ("PENDING", False)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("12_[-]", ["12"]),
        ("12_[]", ["12"]),
        ("12_[0-]", ["12"]),
        ("1_[0-999999999]", ["1"]),
        ("1_[" + ",".join(["0-9999"] * 1000) + "]", ["1"]),
        ("1_[0,2,...]", ["1"]),
        ("1_[" + "9" * 5000 + "]", ["1"]),
        ("12_[0-8:4%1]", ["12_0", "12_4", "12_8"]),
        ("12_[3-1]", []),
        ("12+1", ["12+1"]),
    ],
)
def test_any_list_of_tasks_is_bounded(text, ids):
    assert expand_ids(text) == ids


@pytest.mark.parametrize("tasks", ["[-]", "[0-999999999]", "[0,1,...]"])
def test_jobs_of_an_array_that_cannot_be_read_are_cancelled(slurm, tmp_path, tasks):
    launcher = open_run(tmp_path)
    handles = launcher.submit([make_job(tmp_path / "mine", n, ranks=1) for n in (1, 2)])
    slurm.list_jobs(row(f"77_{tasks}", "PENDING", place_of(handles[0]), "mine-x2"))
    assert [status.state for status in launcher.poll(handles)] == [JobState.QUEUED] * 2
    launcher.cancel(handles)
    assert slurm.cancelled == ["77_0 77_1"]


def test_jobs_of_another_user_are_not_taken_for_gone(run, tmp_path):
    """Slurm lists a user's own jobs only, so that root would submit the trial of somebody else's search again."""
    _, handle = run
    path = Path(handle.details["folder"]) / "submission.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "user": os.getuid() + 1}))
    with pytest.raises(UserError, match="only its user can see and cancel it"):
        open_run(tmp_path).find("mine")
    with pytest.raises(UserError, match="as that user"):
        open_run(tmp_path).poll([handle])


@pytest.mark.parametrize("by_s", [7200.0, -7200.0])
def test_a_wall_clock_that_is_set_gives_up_no_job(slurm, tmp_path, monkeypatch, by_s):
    """Neither a pending job with a `queue_limit` nor one that the queue does not list yet."""
    launcher = open_run(tmp_path, queue_limit=30)
    [handle] = launcher.submit([make_job(tmp_path / "mine", 1, ranks=1)])
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + by_s)
    assert launcher.poll([handle])[0].note == "submitted"
    slurm.list_jobs(row("77", "PENDING", place_of(handle), "mine-t0001-a1"))
    assert _poll_until(JobState.QUEUED, open_run(tmp_path, queue_limit=30), handle).note == "pending: None"
    assert slurm.cancelled == []


def _poll_until_done(launcher: SlurmLauncher, handle: Handle) -> JobStatus:
    return _poll_until(JobState.DONE, launcher, handle)


def _poll_until(state: JobState, launcher: SlurmLauncher, handle: Handle) -> JobStatus:
    for _ in range(200):
        [status] = launcher.poll([handle])
        if status.state is state:
            return status
    raise AssertionError(status)


def test_a_single_job_has_its_attempts_name_and_an_array_its_own(tmp_path):
    settings = SlurmSettings(cpu_only=True)
    jobs = [make_job(tmp_path / "mine", trial, ranks=1) for trial in (1, 2)]
    specs = [make_job_spec(job, RunScript(Path(__file__), "process", {}), settings) for job in jobs]
    assert "#SBATCH --job-name=mine-t0001-a1\n" in render_chunk(specs[:1], tmp_path, settings)
    assert "#SBATCH --job-name=mine-x2\n" in render_chunk(specs, tmp_path, settings)


@pytest.mark.parametrize(
    "answer",
    [
        "kill -INT $$",  # Ctrl-C reaches the tools of the search too
        "exit 137",  # a site's wrapper whose sbatch was killed
        "echo 'sbatch: error: Batch job submission failed: Invalid account' >&2",
        "head -c 3000 /dev/urandom",
        "echo Submitted batch job ١٢٣",
    ],
)
def test_an_sbatch_whose_answer_says_nothing_is_not_called_again_if_the_queue_has_its_job(slurm, tmp_path, answer):
    listed = row("77", "RUNNING", "$(dirname $1)", "mine-t0001-a1")
    slurm.write("sbatch", f'echo "{listed}" >{slurm.folder}/queue; echo >>{slurm.folder}/calls; {answer}')
    launcher = open_run(tmp_path)
    [handle] = launcher.submit([make_job(tmp_path / "mine", 1, ranks=1)])
    for _ in range(3):
        assert launcher.poll([handle])[0].state is JobState.RUNNING
    assert (slurm.folder / "calls").read_text() == "\n"


def test_tools_that_do_not_run_or_answer_in_endless_digits_stop_nothing(slurm):
    for name in ("scontrol", "sacctmgr", "squeue"):
        slurm.write(name, "printf 'MaxArraySize = '; head -c 100000 /dev/zero | tr '\\0' 9")
    slurm.write("sacctmgr", "printf '|'; head -c 100000 /dev/zero | tr '\\0' 9; printf '|²\\n'")
    assert (find_max_array(), find_max_jobs(SlurmSettings())) == (DEFAULT_MAX_ARRAY, DEFAULT_MAX_JOBS)
    assert parse_duration(f"{'9' * 5000}:00") is None
    (slurm.folder / "squeue").write_bytes(b"\x7fELF of another machine")
    with pytest.raises(SlurmUnavailable, match="squeue cannot be run"):
        read_queue()
