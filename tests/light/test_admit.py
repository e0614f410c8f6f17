"""Re-evaluation of finished trials: edited evidence is detected, untouched evidence gives the same result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recorded_runs import search, write_recording

from cclsearch.analysis.re_evaluate import re_evaluate_run, write_revisions
from cclsearch.cli import main
from cclsearch.record.lock import FolderLock
from cclsearch.run.folder import Run, load_run


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


def test_an_edited_result_is_refused_and_the_ledger_keeps_its_figure(run, cli):
    number = best_of(run)
    before = run.state.trials[number].loss
    edit_result(run, number, step_times_s=[0.001])
    answer = cli.json(["admit", "r", "--json"], 1)
    entry = next(trial for trial in answer["trials"] if trial["trial"] == number)
    assert (entry["admitted"], entry["admitted_in_ledger"]) == (False, True)
    assert "changed after its hash was recorded in the ledger" in entry["reason"]
    assert load_run(run.folder).state.trials[number].loss == before


def test_a_missing_or_damaged_result_is_refused(run):
    number = best_of(run)
    path = run.trial_folder(number) / "result.json"
    path.write_text("{", encoding="utf-8")
    assert [entry.trial.number for entry in re_evaluate_run(run) if entry.is_lost] == [number]
    path.unlink()
    lost = [entry for entry in re_evaluate_run(run) if entry.is_lost]
    assert "result.json is missing" in lost[0].reason


def test_a_shortened_sequence_is_refused_by_its_own_rule(run, cli):
    number = best_of(run)
    edit_result(run, number, seq_len=1024)
    shown = cli.out(["admit", "r", "--trial", str(number)], 1)
    assert "sequence length is 1024, but 2048 in the card" in shown
    assert "NO  unedited" in shown


def test_changed_frozen_inputs_are_detected(run, cli):
    path = run.folder / "search.yaml"
    path.write_text(path.read_text() + "# a note\n", encoding="utf-8")
    assert "search.yaml was changed after the search started" in cli.out(["admit", "r"], 1)


def test_admission_files_are_rewritten_only_on_request(run):
    number = best_of(run)
    path = run.trial_folder(number) / "admission.json"
    edit_result(run, number, world_size=4)
    re_evaluated = re_evaluate_run(run)
    assert json.loads(path.read_text())["admitted"] is True
    write_revisions(run, re_evaluated)
    assert json.loads(path.read_text())["admitted"] is False


def test_a_changed_verdict_is_written_to_the_ledger_and_back(run, cli):
    number = best_of(run)
    loss, num_ranked = run.state.trials[number].loss, len(run.state.losses_by_trial())
    path = run.trial_folder(number) / "result.json"
    before, ledger = path.read_bytes(), (run.folder / "ledger.jsonl").read_bytes()
    edit_result(run, number, step_times_s=[0.001])
    assert "The ledger has their new results" in cli.out(["admit", "r", "--write"], 1)
    state = load_run(run.folder).state
    assert (run.folder / "ledger.jsonl").read_bytes().startswith(ledger)
    assert state.trials[number].loss is None
    assert len(state.losses_by_trial()) == num_ranked - 1
    assert state.best.number != number
    assert "changed after its hash was recorded" in state.trials[number].revisions[0].text
    assert f"revised: trial {number} is not ranked now" in cli.out(["show", "r", str(number)])
    assert main(["report", "r", "--no-png", "--out", "page.html"]) == 0
    assert f"revised: trial {number} is not ranked now" in Path("page.html").read_text(encoding="utf-8")
    assert main(["admit", "r"]) == 0, "the ledger agrees with the evidence"
    path.write_bytes(before)
    assert main(["admit", "r", "--write"]) == 0
    again = load_run(run.folder).state
    assert (again.trials[number].loss, best_of(load_run(run.folder))) == (loss, number)
    assert len(again.trials[number].revisions) == 2


def test_a_revised_baseline_is_replaced_by_the_next_ranked_trial(run):
    baseline = run.state.baseline
    edit_result(run, baseline.number, world_size=4)
    write_revisions(run, re_evaluate_run(run))
    after = load_run(run.folder).state
    ranked = [number for number in run.state.trials.finish_order if run.state.trials[number].loss is not None]
    assert after.baseline.number == next(number for number in ranked if number != baseline.number)
    assert after.num_spent == run.state.num_spent


def test_no_verdict_is_written_while_another_process_writes_or_if_the_inputs_changed(run, cli):
    edit_result(run, best_of(run), world_size=4)
    ledger = (run.folder / "ledger.jsonl").read_bytes()
    with FolderLock(run.folder):
        assert "is in use by process" in cli.err(["admit", "r", "--write"])
    spec = run.folder / "search.yaml"
    spec.write_text(spec.read_text() + "# a note\n", encoding="utf-8")
    assert "was changed after the search started" in cli.err(["admit", "r", "--write"])
    assert (run.folder / "ledger.jsonl").read_bytes() == ledger
