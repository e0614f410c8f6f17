"""Re-evaluation of finished trials: edited evidence is detected, untouched evidence gives the same result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recorded_runs import search, write_recording

from cclsearch.analysis.re_evaluate import re_evaluate_run, write_admissions
from cclsearch.cli import main
from cclsearch.run.folder import Run, load_run


@pytest.fixture
def run(project: Path) -> Run:
    return search(write_recording(project / "toy"), "r", budget=5)


def edit_result(run: Run, number: int, **fields: object) -> None:
    path = run.trial_folder(number) / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields), encoding="utf-8")


def best_of(run: Run) -> int:
    assert run.state.best is not None
    return run.state.best.number


def test_untouched_evidence_gives_the_same_result(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert all(entry.now.is_ranked == entry.then.is_ranked for entry in re_evaluate_run(run))
    assert main(["admit", "r"]) == 0
    assert "trials admitted" in capsys.readouterr().out


def test_an_edited_result_is_refused_and_the_ledger_keeps_its_figure(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    number = best_of(run)
    before = run.state.trials[number].loss
    edit_result(run, number, step_times_s=[0.001])
    assert main(["admit", "r", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    entry = next(trial for trial in answer["trials"] if trial["trial"] == number)
    assert (entry["admitted"], entry["admitted_in_ledger"]) == (False, True)
    assert "changed after its hash was recorded in the ledger" in entry["reason"]
    assert load_run(run.folder).state.trials[number].loss == before


def test_a_missing_or_damaged_result_is_refused(run: Run) -> None:
    number = best_of(run)
    path = run.trial_folder(number) / "result.json"
    path.write_text("{", encoding="utf-8")
    assert [entry.trial.number for entry in re_evaluate_run(run) if entry.is_lost] == [number]
    path.unlink()
    lost = [entry for entry in re_evaluate_run(run) if entry.is_lost]
    assert "result.json is missing" in lost[0].reason


def test_a_shortened_sequence_is_refused_by_its_own_rule(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    number = best_of(run)
    edit_result(run, number, seq_len=1024)
    assert main(["admit", "r", "--trial", str(number)]) == 1
    shown = capsys.readouterr().out
    assert "sequence length is 1024, but 2048 in the card" in shown
    assert "NO  unedited" in shown


def test_changed_frozen_inputs_are_detected(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    path = run.folder / "search.yaml"
    path.write_text(path.read_text() + "# a note\n", encoding="utf-8")
    assert main(["admit", "r"]) == 1
    assert "search.yaml was changed after the search started" in capsys.readouterr().out


def test_admission_files_are_rewritten_only_on_request(run: Run) -> None:
    number = best_of(run)
    path = run.trial_folder(number) / "admission.json"
    edit_result(run, number, world_size=4)
    re_evaluated = re_evaluate_run(run)
    assert json.loads(path.read_text())["admitted"] is True
    write_admissions(run, re_evaluated)
    assert json.loads(path.read_text())["admitted"] is False


def test_an_unknown_trial_is_named(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["admit", "r", "--trial", "99"]) == 2
    assert "trial 99 is not among its 5" in capsys.readouterr().err
