"""Absurd figures stay out of the ledger, and an error in our own judging costs neither the search nor its budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripted_launcher import ScriptedLauncher, ran
from scripted_search import open_search, run_session

from cclsearch.analysis.re_evaluate import re_evaluate_run, write_revisions
from cclsearch.cli import EXIT_DEFECT, main
from cclsearch.core.errors import UserError
from cclsearch.core.values import FailureKind
from cclsearch.evaluation import evaluate
from cclsearch.launch.base import Job
from cclsearch.loop import drive
from cclsearch.record.event import EndKind
from cclsearch.record.state import RunState
from cclsearch.run.folder import load_run
from cclsearch.tasks.training.contract import TrainingResult

ABSURD: dict[str, dict[str, Any]] = {
    "huge step times": {"step_times_s": (1e308,) * 5},
    "huge step times of an even number": {"step_times_s": (1e308,) * 6},
    "tiny step times": {"step_times_s": (5e-324,) * 5},
    "step times from tiny to huge": {"step_times_s": (5e-324, 5e-324, 1e308, 1e308, 1e308)},
    "huge energy": {"energy_j": 1e308},
    "huge memory": {"peak_memory_bytes": (2**63 - 1,)},
    "huge work": {"global_batch_size": 2**63 - 1, "seq_len": 2**63 - 1},
    "no cores": {"foreign_cpu_cores": 1.0, "logical_cores": 0},
    "huge load": {"foreign_cpu_cores": 1e308, "logical_cores": 1},
    "huge metrics": {"metrics": {"a": 1e308, "b": -1e308}},
    "huge losses": {"losses": (1e308,) * 5},
}


def search(project: Path, decide: Any, **limits: int) -> RunState:
    run_session(*open_search(project, ScriptedLauncher(decide), **limits))
    return load_run(project / "runs" / "r").state


@pytest.mark.parametrize("what", ABSURD)
def test_an_absurd_figure_costs_no_other_trial(project, what):
    def decide(job: Job) -> TrainingResult:
        valid = ran(job)
        return valid.model_copy(update=ABSURD[what]) if job.trial == 2 else valid

    state = search(project, decide, parallel=1)
    assert state.bad_lines == []
    assert (len(state.trials), state.num_unfinished, state.ended is not None) == (4, 0, True)
    for number in (1, 3, 4):
        outcome = state.trials[number].outcome
        assert (outcome.failure, outcome.metrics["step_time_s"]) == (None, 1.0)
    failure = state.trials[2].outcome.failure
    assert failure is None or failure.kind in (FailureKind.CRASHED, FailureKind.WORK_MISMATCH)


def test_a_derived_metric_that_is_not_finite_is_left_out_and_a_note_says_so(project):
    state = search(project, lambda job: ran(job, energy_j=1e308), budget=1)
    outcome = state.trials[1].outcome
    assert "energy_j_per_mtoken" not in outcome.metrics
    assert outcome.metrics["energy_j_per_step"] == 1e308
    assert "energy_j_per_mtoken would be inf and was left out" in outcome.notes


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Numbers of the trials that our own code fails to judge."""
    numbers: set[int] = set()
    real = evaluate.evaluate_evidence

    def evaluate_or_raise(evidence: Any, *arguments: Any, **fields: Any) -> Any:
        if evidence.payload.trial in numbers:
            token = "hf_" + "a" * 34
            raise KeyError(f"our own mistake, token={token}")
        return real(evidence, *arguments, **fields)

    monkeypatch.setattr(evaluate, "evaluate_evidence", evaluate_or_raise)
    return numbers


def test_a_judging_error_costs_no_budget_teaches_nothing_and_keeps_its_traceback(project, broken):
    broken.add(2)
    state = search(project, ran, parallel=1)
    outcome = state.trials[2].outcome
    assert (outcome.failure.kind, outcome.loss, outcome.metrics) == (FailureKind.JUDGING_ERROR, None, {})
    assert "our own mistake" in outcome.failure.message
    assert "judging_error.txt" in outcome.failure.message
    assert (len(state.trials), state.num_spent, len(state.trials[2].retries)) == (5, 4, 0)
    assert [trial.number for trial in state.unjudged] == [2]
    assert state.infrastructure_failures == []
    assert [o.trial for o in state.trials.observe()] == [1, 3, 4, 5]
    assert state.trials[2].config not in [state.trials[n].config for n in (1, 3, 4, 5)]
    kept = (project / "runs" / "r" / "trials" / "0002" / "judging_error.txt").read_text()
    assert kept.startswith("Traceback (most recent call last):")
    assert "in evaluate_or_raise" in kept
    assert "hf_aaaa" not in kept + outcome.failure.message


def test_three_judging_errors_in_a_row_stop_the_search_with_their_own_exit_code(project, broken, monkeypatch, capsys):
    broken.update({1, 2, 4, 5, 6, 7})
    folder, session = open_search(project, ScriptedLauncher(ran), budget=9, parallel=1)
    monkeypatch.setattr(drive, "open_session", lambda *_, **__: session)
    assert main(["resume", "r", "--quiet"]) == EXIT_DEFECT == 70
    state = load_run(folder).state
    assert state.stopped.kind is EndKind.JUDGING_ERRORS
    assert "judging_error.txt of trial 6" in state.stopped.reason
    assert (list(state.trials), state.num_spent) == ([1, 2, 3, 4, 5, 6], 1)
    capsys.readouterr()
    assert main(["status", "r"]) == 0
    assert "(5 judging errors do not count)" in capsys.readouterr().out


def test_admit_judges_such_a_trial_later_and_writes_it(project, broken, monkeypatch):
    broken.add(2)
    search(project, ran, parallel=1)
    folder = project / "runs" / "r"
    before = (folder / "ledger.jsonl").read_bytes()
    monkeypatch.setattr("cclsearch.analysis.re_evaluate.evaluate_evidence", lambda *_, **__: 1 / 0)
    assert main(["admit", "r", "--write", "--json"]) == EXIT_DEFECT
    assert (folder / "ledger.jsonl").read_bytes() == before, "an error of ours revises nothing"
    monkeypatch.undo()
    monkeypatch.chdir(project)
    assert main(["admit", "r", "--write"]) == 0
    state = load_run(folder).state
    trial = state.trials[2]
    assert (trial.outcome.failure, trial.outcome.metrics["step_time_s"], state.num_spent) == (None, 1.0, 5)
    assert state.unjudged == []
    assert [o.trial for o in state.trials.observe()] == [1, 2, 3, 4, 5]


def test_verdicts_that_another_process_wrote_in_the_meantime_are_not_overwritten(project, broken, monkeypatch):
    broken.add(2)
    search(project, ran, parallel=1)
    folder = project / "runs" / "r"
    run = load_run(folder)
    entries = re_evaluate_run(run)
    write_revisions(run, entries)
    before = (folder / "ledger.jsonl").read_bytes()
    with pytest.raises(UserError, match="another process revised trial 2"):
        write_revisions(run, entries)
    assert (folder / "ledger.jsonl").read_bytes() == before


def test_a_folder_in_place_of_our_own_files_does_not_stop_the_search(project):
    def decide(job: Job) -> TrainingResult:
        for name in ("metrics.json", "admission.json", "judging_error.txt"):
            (job.trial_dir / name / "of-the-job").mkdir(parents=True)
        return ran(job)

    assert search(project, decide, budget=2).ended is not None
    folder = project / "runs" / "r" / "trials" / "0001"
    assert json.loads((folder / "metrics.json").read_text())["metrics"]["step_time_s"] == 1.0
    assert (folder / "metrics.json.1" / "of-the-job").is_dir()


def test_an_interrupt_while_a_trial_is_judged_is_not_a_judging_error(project, monkeypatch):
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate, "evaluate_evidence", interrupt)
    with pytest.raises(KeyboardInterrupt):
        search(project, ran, parallel=1)
    assert load_run(project / "runs" / "r").state.trials[1].outcome is None


def test_a_search_that_a_launcher_refused_is_stopped_with_the_reason_not_killed(project):
    class Refusing(ScriptedLauncher):
        def submit(self, jobs: Any) -> Any:
            raise UserError("no such partition: token=hf_" + "b" * 34)

    with pytest.raises(UserError, match="no such partition"):
        run_session(*open_search(project, Refusing(ran)))
    run = load_run(project / "runs" / "r")
    assert run.status == "stopped"
    assert (run.state.stopped.kind, "no such partition" in run.state.stopped.reason) == (EndKind.REFUSED, True)
    assert "hf_bbb" not in run.state.stopped.reason
