"""Re-evaluation of finished trials: edited evidence is detected, untouched evidence gives the same result."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest
from recorded_runs import search, write_recording
from scripted_launcher import MeasuredLauncher, ran
from scripted_search import open_search, run_session

from cclsearch.analysis.re_evaluate import re_evaluate_run, write_revisions
from cclsearch.cli import main
from cclsearch.record.lock import FolderLock
from cclsearch.run import log_masking, trial_folder
from cclsearch.run.folder import Run, load_run
from cclsearch.scoring.evaluate import evaluate_evidence, replace_verdict
from cclsearch.scoring.objective import load_objective
from cclsearch.scoring.outcome import Verdict


@pytest.fixture
def run(project: Path) -> Run:
    return search(write_recording(project / "toy"), "r", budget=5)


def edit_result(run: Run, number: int, **fields: object) -> None:
    path = run.trial_folder(number) / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields), encoding="utf-8")


def best_of(run: Run) -> int:
    return run.state.best.number


def test_untouched_evidence_gives_the_same_result(run, cli):
    assert all(entry.now.is_ranked == entry.then.is_ranked for entry in re_evaluate_run(run))
    assert "trials admitted" in cli.out(["admit", "r"])


def test_an_edited_result_keeps_its_verdict_by_the_values_in_the_ledger(run, cli):
    number = best_of(run)
    before = run.state.trials[number].loss
    edit_result(run, number, step_times_s=[0.001])
    answer = cli.json(["admit", "r", "--json"], 1)
    entry = next(trial for trial in answer["trials"] if trial["trial"] == number)
    assert (entry["admitted"], entry["admitted_in_ledger"]) == (True, True)
    assert "changed after its hash was recorded in the ledger" in entry["reason"]
    ledger = (run.folder / "ledger.jsonl").read_bytes()
    shown = cli.out(["admit", "r", "--write"], 1)
    assert "[evidence changed]" in shown
    assert "keep their verdicts" in shown
    assert (run.folder / "ledger.jsonl").read_bytes() == ledger
    assert load_run(run.folder).state.trials[number].loss == before


def test_a_missing_or_damaged_result_keeps_its_verdict_too(run):
    number = best_of(run)
    path = run.trial_folder(number) / "result.json"
    path.write_text("{", encoding="utf-8")
    assert [entry.trial.number for entry in re_evaluate_run(run) if entry.changed] == [number]
    path.unlink()
    (entry,) = [entry for entry in re_evaluate_run(run) if entry.changed]
    assert "result.json is missing" in entry.reason
    assert entry.now.is_ranked


def test_the_verdict_of_a_trial_shows_that_its_evidence_changed(run, cli):
    number = best_of(run)
    edit_result(run, number, seq_len=1024)
    assert "NO  unedited" in cli.out(["admit", "r", "--trial", str(number)], 1)


def test_changed_frozen_inputs_are_detected(run, cli):
    path = run.folder / "search.yaml"
    path.write_text(path.read_text() + "# a note\n", encoding="utf-8")
    assert "search.yaml was changed after the search started" in cli.out(["admit", "r"], 1)


def refuse(monkeypatch, *numbers: int) -> None:
    """Let a version of the rules refuse these trials."""

    def judge(evidence, *args, **kwargs):
        outcome = evaluate_evidence(evidence, *args, **kwargs)
        if evidence.payload.trial not in numbers:
            return outcome
        verdict = Verdict(rule="new", ok=False, detail="a new rule refuses it")
        return replace_verdict(outcome, verdict, load_objective("step_time"), None)

    monkeypatch.setattr("cclsearch.analysis.re_evaluate.evaluate_evidence", judge)


def test_admission_files_are_rewritten_only_on_request(run, monkeypatch):
    number = best_of(run)
    path = run.trial_folder(number) / "admission.json"
    refuse(monkeypatch, number)
    re_evaluated = re_evaluate_run(run)
    assert json.loads(path.read_text())["admitted"] is True
    write_revisions(run, re_evaluated)
    assert json.loads(path.read_text())["admitted"] is False


def test_a_changed_verdict_is_written_to_the_ledger_and_back(run, cli, monkeypatch):
    number = best_of(run)
    loss, num_ranked = run.state.trials[number].loss, len(run.state.losses_by_trial())
    ledger = (run.folder / "ledger.jsonl").read_bytes()
    with monkeypatch.context() as changed:
        refuse(changed, number)
        assert "The ledger has their new results" in cli.out(["admit", "r", "--write"], 1)
        state = load_run(run.folder).state
        assert (run.folder / "ledger.jsonl").read_bytes().startswith(ledger)
        assert state.trials[number].loss is None
        assert len(state.losses_by_trial()) == num_ranked - 1
        assert state.best.number != number
        assert "a new rule refuses it" in state.trials[number].revisions[0].text
        assert f"revised: trial {number} is not ranked now" in cli.out(["show", "r", str(number)])
        assert main(["report", "r", "--no-png", "--out", "page.html"]) == 0
        assert f"revised: trial {number} is not ranked now" in Path("page.html").read_text(encoding="utf-8")
        assert main(["admit", "r"]) == 0, "the ledger agrees with the evidence"
    assert main(["admit", "r", "--write"]) == 0
    again = load_run(run.folder).state
    assert (again.trials[number].loss, best_of(load_run(run.folder))) == (loss, number)
    assert len(again.trials[number].revisions) == 2


def test_a_revised_baseline_is_replaced_by_the_next_ranked_trial(run, monkeypatch):
    baseline = run.state.baseline
    refuse(monkeypatch, baseline.number)
    write_revisions(run, re_evaluate_run(run))
    after = load_run(run.folder).state
    ranked = [number for number in run.state.trials.finish_order if run.state.trials[number].loss is not None]
    assert after.baseline.number == next(number for number in ranked if number != baseline.number)
    assert after.num_spent == run.state.num_spent


def test_no_verdict_is_written_while_another_process_writes_or_if_the_inputs_changed(run, cli, monkeypatch):
    refuse(monkeypatch, best_of(run))
    ledger = (run.folder / "ledger.jsonl").read_bytes()
    with FolderLock(run.folder):
        assert "is in use by process" in cli.err(["admit", "r", "--write"])
    spec = run.folder / "search.yaml"
    spec.write_text(spec.read_text() + "# a note\n", encoding="utf-8")
    assert "was changed after the search started" in cli.err(["admit", "r", "--write"])
    assert (run.folder / "ledger.jsonl").read_bytes() == ledger


def run_measured(project: Path, *, also: str = "") -> Path:
    """Return the folder of a search whose jobs left a trace."""

    def decide(job):
        (job.trial_dir / "trace").mkdir(exist_ok=True)
        (job.trial_dir / "trace" / "rank0.json").write_text(f"[{job.trial}{also}]")
        return ran(job, 1 + job.trial / 10, simulated=False)

    folder, session = open_search(project, MeasuredLauncher(decide), budget=3)
    run_session(folder, session)
    return folder


@pytest.fixture
def measured(project: Path) -> Path:
    return run_measured(project)


def test_evidence_with_a_secret_is_sealed_as_it_is_masked(project):
    secret = "hf_Zq3vT8mK1xW5bN7cR2dL9fGh4jPs6yAe"
    folder = run_measured(project, also=f', "{secret}"')
    assert secret not in (folder / "trials" / "0001" / "trace" / "rank0.json").read_text()
    assert [entry.changed for entry in re_evaluate_run(load_run(folder))] == ["", "", ""]


def test_evidence_that_another_user_owns_costs_no_trial(project, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(trial_folder, "open_job_file", refuse)
    monkeypatch.setattr(log_masking, "open_job_file", refuse)
    trials = load_run(run_measured(project)).state.trials
    assert [trial.outcome.admission is not None for trial in trials.values()] == [True] * 3


def test_the_files_of_a_judged_trial_are_read_only_and_its_folder_can_be_removed(measured):
    folder = measured / "trials" / "0002"
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 3
    assert [path for path in files if path.stat().st_mode & 0o222] == []
    shutil.rmtree(folder)
    assert not folder.exists()


def test_a_job_that_rewrites_the_evidence_of_others_changes_no_verdict_but_its_own(measured, cli):
    before = (measured / "ledger.jsonl").read_bytes()
    for number in (1, 2):
        path = measured / "trials" / f"{number:04d}" / "trace" / "rank0.json"
        path.chmod(0o644)
        path.write_text("[9]")
    run = load_run(measured)
    entries = re_evaluate_run(run)
    assert [entry.trial.number for entry in entries if entry.changed] == [1, 2]
    assert all("traces or its request log were changed" in entry.changed for entry in entries[:2])
    assert [entry.now.is_ranked for entry in entries] == [entry.then.is_ranked for entry in entries]
    assert main(["admit", str(measured), "--write"]) == 1
    assert (measured / "ledger.jsonl").read_bytes() == before
