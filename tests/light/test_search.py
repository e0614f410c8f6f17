"""Searches on recordings: budgets, seeds, refused inputs, and the launcher that replays."""

from __future__ import annotations

from pathlib import Path

import pytest
from paths import ROOT

from cclsearch.cli import main
from cclsearch.core.errors import UserError
from cclsearch.core.values import FailureKind, Provenance
from cclsearch.launch.base import Job, JobState
from cclsearch.launch.contract import CONFIG_FILE, RESULT_FILE, RunStatus
from cclsearch.launch.instant import ReplayLauncher
from cclsearch.launch.profile import profile_from_mapping
from cclsearch.recording.load import Recording, load_recording
from cclsearch.run.folder import Run, load_run
from cclsearch.tasks.training.contract import TrainingInput, TrainingResult

SEARCH = ["run", "--workload", "wl2", "--launcher", "replay", "--name", "r"]


def run_to_end(*more: str) -> Run:
    assert main([*SEARCH, "--quiet", *more]) == 0
    return load_run(Path("runs") / "r")


def test_a_search_spends_its_budget_on_different_configurations(project):
    run = run_to_end("--budget", "15")
    assert len(run.state.trials) == 15
    assert len({trial.config for trial in run.state.trials.values()}) == 15
    assert run.status == "ended"
    assert run.state.best is not None


def test_the_same_seed_gives_the_same_search(project):
    first = [str(t.config) for t in run_to_end("--budget", "6").state.trials.values()]
    assert main([*SEARCH[:-1], "again", "--quiet", "--budget", "6"]) == 0
    again = load_run(Path("runs") / "again")
    assert [str(t.config) for t in again.state.trials.values()] == first


def test_a_replayed_search_is_marked_recorded_in_its_output(project, cli):
    shown = cli.out([*SEARCH, "--budget", "3"])
    assert "recorded measurements, no trial runs here" in shown
    assert "256 x 4096 tokens/step on 16 x h100 with nanotron" in shown
    assert "To search wl2 itself, use `--launcher simulate`" in shown
    assert "no trial runs here" in shown
    assert "not wl2" in shown
    best = cli.json(["best", "r", "--json"])
    assert best["provenance"] == "recorded"
    assert set(best) >= {"run", "trial", "config", "step_time_s", "tokens_per_s", "evidence", "provenance"}
    assert Path(best["evidence"], "result.json").is_file()


def test_resume_with_a_larger_budget_continues_the_search(project):
    first = list(run_to_end("--budget", "4").state.trials.values())
    assert main(["resume", "r", "--budget", "9", "--quiet"]) == 0
    run = load_run(Path("runs") / "r")
    assert len(run.state.trials) == 9
    assert list(run.state.trials.values())[:4] == first


def test_confirming_a_replayed_search_is_refused(project, cli):
    run_to_end("--budget", "3")
    assert "cannot be confirmed by another run" in cli.err(["resume", "r", "--confirm", "2"])


def test_parallel_trials_are_all_different(project):
    run = run_to_end("--budget", "12", "--parallel", "4")
    assert len({trial.config for trial in run.state.trials.values()}) == 12


@pytest.mark.parametrize("change", ["card", "spec", "newer"])
def test_changed_inputs_are_refused_at_resume(project, change, cli):
    run_to_end("--budget", "2")
    path = Path("runs") / "r" / "search.yaml"
    text = path.read_text()
    changed = {
        "card": text.replace("global_batch_size: 256", "global_batch_size: 128"),
        "spec": text.replace("schema_version: 1", "schema_version: 1\nunknown_field: 1"),
        "newer": text.replace("schema_version: 1", "schema_version: 999"),
    }[change]
    assert changed != text
    path.write_text(changed)
    message = cli.err(["resume", "r", "--budget", "4"])
    assert {"card": "edited", "spec": "unknown_field", "newer": "newer"}[change] in message
    assert message.count("\n") == 1


BAD = [
    (["run", "--workload", "nope"], "wl2"),
    (["run", "--workload", "wl2", "--budget", "0"], "at least 1"),
    (["run", "--workload", "wl2", "--budget", "-3"], "at least 1"),
    (["run", "--workload", "wl2", "--budget", "many"], "whole number"),
    (["run", "--workload", "wl2", "--launcher", "replay", "--sampler", "nope"], "random"),
    (["run", "--workload", "wl2", "--launcher", "nope"], "slurm-generic"),
    (["run", "--workload", "wl2", "--launcher", "replay", "--objective", "nope"], "step_time"),
    (["run", "--workload", "wl2", "--launcher", "replay", "--llm", "nope"], "anthropic:MODEL"),
    (["run", "--workload", "wl2", "--launcher", "replay", "--strategy", "hybrid"], "--llm"),
    (["run", "--workload", "wl2", "--launcher", "replay", "--name", "../escape"], "../escape"),
    (["run", "--workload", "wl3", "--objective", "energy"], "--launcher"),
    (["run", "--workload", "wl2", "--recording", "nope"], "nanotron-8b-2n"),
    (["run", "--workload", "wl2", "--bogus"], "--bogus"),
    (["run"], "--workload"),
    (["resume", "nope"], "there are no runs in"),
    (["best", "nope"], "there are no runs in"),
    (["show", "nope", "1"], "there are no runs in"),
    (["bogus"], "there is no command"),
]


@pytest.mark.parametrize(("command", "message"), BAD, ids=[" ".join(command) for command, _ in BAD])
def test_bad_input_gives_one_line_and_creates_nothing(project, command, message, capsys):
    assert main(command) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not (project / "runs").exists()


def test_an_unwritable_runs_folder_is_refused(project, cli):
    (project / "file").write_text("")
    assert "cannot create the run folder" in cli.err([*SEARCH, "--runs", "file/runs"])


def test_a_dry_run_shows_space_and_proposals_and_writes_nothing(project, cli):
    shown = cli.out([*SEARCH, "--dry-run"])
    assert "valid configurations" in shown
    assert "first proposals" in shown
    assert not (project / "runs").exists()


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
    assert result.failure.kind is FailureKind.CRASHED
    assert 'says only "failed"' in result.failure.message
    assert result.step_times_s == ()


def test_a_row_is_read_once_per_run_even_after_a_restart(recording, tmp_path):
    first = make_job(recording, tmp_path, 30, 1)
    ReplayLauncher(recording).submit([first])
    restarted = ReplayLauncher(recording)
    again = make_job(recording, tmp_path, 30, 2)
    status = restarted.poll(restarted.submit([again]))[0]
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
    assert "not in the recording" in status.failure.message


def test_a_profile_names_the_folder():
    profile = profile_from_mapping({"launcher": "replay", "recording": str(LANDSCAPE)}, name="r")
    launcher = ReplayLauncher.from_profile(profile)
    assert launcher.check()[0].ok
    assert "114 recorded configurations" in launcher.check()[0].detail
    with pytest.raises(UserError, match="recording"):
        ReplayLauncher.from_profile(profile_from_mapping({"launcher": "replay"}, name="r"))
