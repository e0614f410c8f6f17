"""Trial folders that the ledger does not know: nothing runs before somebody said what becomes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted_launcher import ScriptedLauncher, ran
from scripted_search import open_search

from cclsearch.cli import main
from cclsearch.loop.session import begin_or_resume
from cclsearch.record.event import TrialProposed
from cclsearch.record.ledger import LEDGER_FILE
from cclsearch.record.state import RunState
from cclsearch.record.writer import RunWriter
from cclsearch.run.folder import load_run

REPLAY = ["run", "--workload", "wl2", "--launcher", "replay", "--sampler", "random", "--name", "r", "--quiet"]


@pytest.fixture
def run(project: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The folder of an ended search of six recorded trials."""
    assert main([*REPLAY, "--budget", "6"]) == 0
    capsys.readouterr()
    return project / "runs" / "r"


def cut_before(run: Path, mark: bytes) -> None:
    """Cut the ledger at the start of the first line with this text."""
    ledger = run / LEDGER_FILE
    data = ledger.read_bytes()
    ledger.write_bytes(data[: data.rindex(b"\n", 0, data.index(mark)) + 1])


def state_of(run: Path) -> RunState:
    return load_run(run).state


CUT = b'"trial":4,"config"'


def test_headless_nothing_runs_and_one_line_names_the_option(run, cli):
    cut_before(run, CUT)
    before = (run / LEDGER_FILE).read_bytes()
    [line] = cli.err(["resume", "r", "--quiet"]).splitlines()
    assert "has 3 trials (4-6; 3 with a result) that its ledger.jsonl does not contain" in line
    assert "--unknown-trials adopt" in line
    assert "--unknown-trials leave" in line
    assert (run / LEDGER_FILE).read_bytes() == before


def test_adopted_trials_are_judged_without_running_again(run):
    before = state_of(run)
    hashes = {number: before.trials[number].result_sha256 for number in before.trials}
    cut_before(run, CUT)
    assert main(["resume", "r", "--quiet", "--unknown-trials", "adopt"]) == 0
    after = state_of(run)
    assert {number: after.trials[number].result_sha256 for number in after.trials} == hashes
    for number in before.trials:
        then, now = before.trials[number], after.trials[number]
        assert (now.config, now.loss, now.handle) == (then.config, then.loss, None)
    assert [after.trials[number].proposer for number in (3, 4, 5, 6)] == ["random", *["recovered"] * 3]
    assert (after.num_spent, after.ended is not None) == (6, True)
    assert not list(run.glob("trials/*/attempts"))


def test_left_trials_keep_their_folders_and_numbers_and_are_not_asked_about_again(run):
    cut_before(run, CUT)
    left = {path: path.read_bytes() for path in run.glob("trials/000[456]/result.json")}
    assert main(["resume", "r", "--quiet", "--unknown-trials", "leave"]) == 0
    state = state_of(run)
    assert (state.left_trials, state.num_spent, sorted(state.trials)[:4]) == ({4, 5, 6}, 6, [1, 2, 3, 7])
    assert {path: path.read_bytes() for path in left} == left
    assert main(["resume", "r", "--quiet", "--budget", "7"]) == 0
    assert state_of(run).num_spent == 7


@pytest.mark.parametrize("lose", [lambda path: path.write_bytes(b""), Path.unlink], ids=["empty", "missing"])
def test_a_search_whose_ledger_is_lost_is_recovered_from_its_folders(run, lose):
    best = state_of(run).best
    lose(run / LEDGER_FILE)
    assert main(["status", "r"]) == 0
    assert main(["resume", "r", "--quiet"]) == 2
    assert main(["resume", "r", "--quiet", "--unknown-trials", "adopt"]) == 0
    state = state_of(run)
    assert (len(state.trials), state.num_spent) == (6, 6)
    assert (state.best.config, state.best.loss) == (best.config, best.loss)


def test_a_folder_of_another_run_or_with_another_configuration_is_left(run):
    cut_before(run, CUT)
    config = run / "trials" / "0004" / "config.json"
    config.write_text(config.read_text().replace('"run_id": "r"', '"run_id": "other"'))
    (run / "trials" / "0005" / "config.json").write_text("[" * 100_000)
    assert main(["resume", "r", "--quiet", "--unknown-trials", "adopt"]) == 0
    state = state_of(run)
    assert state.left_trials == {4, 5}
    assert sorted(state.trials) == [1, 2, 3, 6, 7, 8]


@pytest.mark.parametrize(("answer", "code", "spent"), [("adopt", 0, 6), ("", 2, 3), ("leave", 0, 6)])
def test_on_a_terminal_it_asks(run, monkeypatch, capsys, answer, code, spent):
    cut_before(run, CUT)
    asked = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or answer)
    assert main(["resume", "r"]) == code
    assert asked == ["adopt, leave, or stop? [stop] "]
    assert "3 with a result" in capsys.readouterr().out
    assert state_of(run).num_spent == spent


def spoil(run: Path, *marks: bytes) -> bytes:
    """Spoil the first line with each of these texts; returns the ledger."""
    data = (run / LEDGER_FILE).read_bytes()
    for mark in marks:
        assert mark in data
        data = data.replace(mark, mark.replace(b":", b" :", 1), 1)
    (run / LEDGER_FILE).write_bytes(data)
    return data


LINES_OF_TRIAL_1 = {
    "submitted": [b'"event":"trial_submitted"'],
    "submitting and submitted": [b'"event":"trial_submitting"', b'"event":"trial_submitted"'],
    "the first line": [b'"event":"search_started"'],
}


@pytest.mark.parametrize("lines", LINES_OF_TRIAL_1)
@pytest.mark.parametrize("is_running", [True, False], ids=["running", "with a result"])
def test_a_job_whose_lines_are_damaged_is_found_again_and_not_submitted_twice(project, lines, is_running):
    """The search was killed after it submitted its first trial."""
    launcher = ScriptedLauncher(lambda job: None if is_running else ran(job))
    folder, session = open_search(project, launcher, budget=2, parallel=1)
    with RunWriter(folder) as writer:
        begin_or_resume(writer, session)
        config = session.space.config(0)
        writer.record(TrialProposed(time_s=1.0, trial=1, config=config, proposer="random"))
        session.jobs.start_waiting(writer)
    data = spoil(folder, *LINES_OF_TRIAL_1[lines])
    launcher.decide = ran
    with RunWriter(folder) as writer:
        assert len(writer.state.bad_lines) == len(LINES_OF_TRIAL_1[lines])
        begin_or_resume(writer, session)
        session.jobs.adopt(writer)
        trial = writer.state.trials[1]
        assert (trial.attempt, trial.handle is not None or trial.is_finished) == (1, True)
        assert launcher.submitted == ["r-t0001-a1"]
    assert (folder / LEDGER_FILE).read_bytes().startswith(data), "nothing is cut or overwritten"


def test_a_trial_whose_end_is_damaged_is_judged_again_and_does_not_run_again(run):
    before = {number: trial.outcome for number, trial in state_of(run).trials.items()}
    cut_before(run, b'"event":"search_ended"')
    data = spoil(run, b'"event":"trial_finished"')
    assert main(["resume", "r", "--quiet"]) == 0
    after = state_of(run)
    assert (len(after.bad_lines), after.num_spent) == (1, 6)
    assert {number: trial.outcome for number, trial in after.trials.items()} == before
    assert (run / LEDGER_FILE).read_bytes().startswith(data)


def test_a_budget_below_the_present_one_is_refused(run, cli):
    assert "--budget 5: the search has a budget of 6 trials" in cli.err(["resume", "r", "--quiet", "--budget", "5"])
    assert main(["resume", "r", "--quiet", "--budget", "6"]) == 0


def test_the_number_of_a_trial_whose_proposal_is_damaged_is_not_given_to_another(run):
    ledger = run / LEDGER_FILE
    ledger.write_bytes(ledger.read_bytes().replace(CUT, b'"trial":4,"c0nfig"'))
    with RunWriter(run) as writer:
        assert (4 in writer.state.trials, len(writer.state.trials), writer.next_trial) == (False, 5, 7)
    assert main(["resume", "r", "--quiet", "--unknown-trials", "adopt"]) == 0
    assert len(state_of(run).trials) == 6
