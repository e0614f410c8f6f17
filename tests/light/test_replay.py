"""The replay launcher: look-ups under the trial contract, each row once per run."""

from __future__ import annotations

from pathlib import Path

import pytest
from paths import ROOT

from cclsearch.core.errors import UserError
from cclsearch.core.values import FailureKind, Provenance
from cclsearch.launch.base import Job, JobState
from cclsearch.launch.contract import CONFIG_FILE, RESULT_FILE, RunStatus
from cclsearch.launch.profile import profile_from_mapping
from cclsearch.launch.replay import ReplayLauncher
from cclsearch.recording.load import Recording, load_recording
from cclsearch.tasks.training.contract import TrainingInput, TrainingResult

LANDSCAPE = ROOT / "benchmarks" / "landscapes" / "nanotron-8b-2n"


@pytest.fixture(scope="module")
def recording() -> Recording:
    return load_recording(LANDSCAPE)


def make_job(recording: Recording, folder: Path, row: int, trial: int) -> Job:
    config = recording.rows[row].config
    payload = TrainingInput(
        run_id="r",
        trial=trial,
        config=config,
        arch=recording.card.arch,
        global_batch_size=recording.card.number("global_batch_size"),
        seq_len=recording.card.number("seq_len"),
        precision="bf16",
        gradient_accumulation=1,
        num_ranks=16,
        ranks_per_node=8,
    )
    trial_dir = folder / f"{trial:04d}"
    trial_dir.mkdir(parents=True)
    (trial_dir / CONFIG_FILE).write_text(payload.model_dump_json(), encoding="utf-8")
    return Job(run_id="r", trial=trial, attempt=1, trial_dir=trial_dir, payload=payload, timeout_s=60)


def read(job: Job) -> TrainingResult:
    return TrainingResult.model_validate_json((job.trial_dir / RESULT_FILE).read_text(encoding="utf-8"))


def test_a_measured_row_comes_back_as_recorded(recording, tmp_path):
    launcher = ReplayLauncher(recording)
    job = make_job(recording, tmp_path, recording.best_row, 1)
    statuses = launcher.poll(launcher.submit([job]))
    result = read(job)
    assert [status.state for status in statuses] == [JobState.DONE]
    assert statuses[0].failure is None
    assert launcher.provenance is Provenance.RECORDED
    assert result.recorded
    assert not result.simulated
    assert result.step_times_s == (recording.best_value,)
    assert result.global_batch_size == recording.card.number("global_batch_size")
    assert result.peak_memory_bytes[0] / 2**30 == pytest.approx(58.3)
    assert result.extra["source"] == recording.card.source


def test_a_failed_row_says_that_the_source_does_not_know_why(recording, tmp_path):
    row = next(n for n, recorded in enumerate(recording.rows) if recorded.status == "failed")
    launcher = ReplayLauncher(recording)
    job = make_job(recording, tmp_path, row, 1)
    launcher.submit([job])
    result = read(job)
    assert result.status is RunStatus.FAILED
    assert result.failure is not None
    assert result.failure.kind is FailureKind.CRASHED
    assert 'says only "failed"' in result.failure.message
    assert result.step_times_s == ()


def test_a_row_is_read_once_per_run_even_after_a_restart(recording, tmp_path):
    first = make_job(recording, tmp_path, 30, 1)
    ReplayLauncher(recording).submit([first])
    restarted = ReplayLauncher(recording)
    again = make_job(recording, tmp_path, 30, 2)
    status = restarted.poll(restarted.submit([again]))[0]
    assert status.failure is not None
    assert "read once" in status.failure.message
    assert status.failure.kind.is_infrastructure, "the configuration itself did not fail"
    assert not (again.trial_dir / RESULT_FILE).exists()


def test_submitting_the_same_trial_again_changes_nothing(recording, tmp_path):
    launcher = ReplayLauncher(recording)
    job = make_job(recording, tmp_path, recording.best_row, 1)
    launcher.submit([job])
    before = (job.trial_dir / RESULT_FILE).read_bytes()
    assert launcher.poll(launcher.submit([job]))[0].failure is None
    assert (job.trial_dir / RESULT_FILE).read_bytes() == before


def test_a_configuration_that_was_not_measured_is_refused(recording, tmp_path):
    job = make_job(recording, tmp_path, 0, 1)
    config = type(job.payload.config)({**job.payload.config, "tp": 3})
    job = job.model_copy(update={"payload": job.payload.model_copy(update={"config": config})})
    launcher = ReplayLauncher(recording)
    status = launcher.poll(launcher.submit([job]))[0]
    assert status.failure is not None
    assert "not in the recording" in status.failure.message


def test_a_profile_names_the_folder():
    profile = profile_from_mapping({"launcher": "replay", "recording": str(LANDSCAPE)}, name="r")
    launcher = ReplayLauncher.from_profile(profile)
    assert launcher.check()[0].ok
    assert "114 recorded configurations" in launcher.check()[0].detail
    with pytest.raises(UserError, match="recording"):
        ReplayLauncher.from_profile(profile_from_mapping({"launcher": "replay"}, name="r"))
