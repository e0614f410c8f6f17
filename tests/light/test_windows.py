"""Timed windows: a nonce when one opens, its time, and the best trial's window computed again."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_launcher import MeasuredLauncher, ran
from scripted_search import admit_all, open_search, run_session
from test_run_script_options import load_script

from cclsearch.evaluation.comparison import RECOMPUTED_RULE, TrialComparison
from cclsearch.launch.base import Job
from cclsearch.launch.contract import TimedWindow, TrialInput, digest_results
from cclsearch.launch.windows import WindowKeeper
from cclsearch.record.event import Purpose
from cclsearch.record.state import RunState
from cclsearch.scoring.outcome import AttemptWindow, Outcome
from cclsearch.space.framework import load_framework
from cclsearch.tasks.training.task import SameLosses

LOSSES = (6.98009, 6.89341, 6.86549, 6.70390, 6.64752, 6.52565, 6.36004, 6.51139, 6.33425)
ELSEWHERE = "0123456789abcdef"


@pytest.fixture
def common(monkeypatch):
    return load_script("common", monkeypatch)


@pytest.fixture
def keeper():
    kept = WindowKeeper()
    yield kept
    kept.stop()


def make_trial(common, folder: Path, **data):
    folder.mkdir(exist_ok=True)
    return common.Trial(folder, {"opens_window": True, "seed": 0, **data}, {})


def test_a_window_gets_a_nonce_when_it_opens_and_its_time_is_the_search_s(common, keeper, tmp_path):
    trial = make_trial(common, tmp_path)
    keeper.watch(tmp_path, is_new=True)
    time.sleep(0.1)
    assert list(tmp_path.iterdir()) == []  # the script cannot know it before it asks
    nonces = []
    for number in (1, 2):
        nonces.append(common.open_window(trial, number))
        time.sleep(0.2)
        common.close_window(trial, [1.5, 2.0], number)
        os.utime(tmp_path / f"window-{number}.closed", (0, 0))  # what a script can set does not count
    windows = keeper.end(tmp_path)
    assert [window.nonce for window in windows] == nonces
    assert len(set(nonces)) == 2
    assert all(0.2 <= window.seconds < 2 for window in windows)
    assert [window.digest for window in windows] == [digest_results([1.5, 2.0])] * 2


def test_a_second_window_does_not_open_before_the_first_is_closed(common, keeper, tmp_path):
    keeper.watch(tmp_path, is_new=True)
    for number in (1, 2):
        (tmp_path / f"window-{number}.asked").touch()
    time.sleep(0.2)
    assert not (tmp_path / "window-2.nonce").exists()
    assert len(keeper.end(tmp_path)) == 1


def test_a_script_that_does_not_wait_for_its_nonce_is_seen(common, keeper, tmp_path):
    common.close_window(make_trial(common, tmp_path), [1.0])
    (tmp_path / "window-1.asked").touch()
    keeper.watch(tmp_path, is_new=True)
    time.sleep(0.2)
    (window,) = keeper.end(tmp_path)
    assert window.seconds < 0


def test_windows_that_the_ledger_has_survive_a_kill_and_others_have_no_nonce(common, keeper, tmp_path):
    trial = make_trial(common, tmp_path)
    keeper.watch(tmp_path, is_new=True)
    nonce = common.open_window(trial)
    (opened,) = keeper.list_opened(tmp_path)
    common.close_window(trial, [1.0])
    resumed = WindowKeeper()
    (window,) = resumed.end(tmp_path, [opened])
    assert window.nonce == nonce
    assert window.seconds >= 0
    assert WindowKeeper().end(tmp_path) == (TimedWindow(),)  # it had not come into the ledger


@pytest.mark.parametrize("num_known", [0, 1])
def test_a_window_that_a_killed_search_opened_is_not_answered_again(common, keeper, tmp_path, num_known):
    trial = make_trial(common, tmp_path)
    keeper.watch(tmp_path, is_new=True)
    nonces = []
    for number in (1, 2):
        nonces.append(common.open_window(trial, number))
        common.close_window(trial, [1.0], number)
        time.sleep(0.1)
    known = keeper.list_opened(tmp_path)[:num_known]
    keeper.stop()
    resumed = WindowKeeper()
    resumed.watch(tmp_path, known)
    assert common.open_window(trial, 3)
    windows = resumed.end(tmp_path, known)
    assert [(tmp_path / f"window-{number}.nonce").read_text() for number in (1, 2)] == nonces
    assert [bool(window.nonce) for window in windows] == [num_known > 0, False, True]
    assert len(WindowKeeper().end(tmp_path, known)) == 3  # the job ended before the search was resumed


def test_a_script_goes_on_with_known_data_if_no_search_answers(common, tmp_path, monkeypatch):
    monkeypatch.setattr(common, "WINDOW_WAIT_S", 0.1)
    trial = make_trial(common, tmp_path)
    assert common.open_window(trial) == ""
    common.use_nonce(trial, "")
    assert common.number_step(trial.data, 3) == 3
    assert list(tmp_path.iterdir()) == []  # a search that is resumed now does not take it for a window


def test_the_energy_of_a_wait_without_an_answer_is_not_that_of_the_load(common, tmp_path, monkeypatch):
    run = load_script("serving_run", monkeypatch)
    now = [0.0]
    monkeypatch.setattr(run, "open_window", lambda trial, number: now.__setitem__(0, now[0] + 120) or "")
    monkeypatch.setattr(run, "run_load", lambda target, load: now.__setitem__(0, now[0] + 5) or ([], 5.0))
    monkeypatch.setattr(run, "summarize_load", lambda *arguments: {})
    fields = {"max_concurrency": None, "limits": {}, "concurrency": None, "arrival": "closed"}
    trial = make_trial(
        common, tmp_path, num_ranks=1, repeats=1, warmup_requests=1, shared_prefix_tokens=0,
        requests=[{"arrival_s": 1.0}], **fields,
    )  # fmt: skip
    server = run.Server(None, 0, tmp_path / "log")
    report = run.measure_loads(trial, server, None, dict, lambda: {"gpu": 100 * now[0]})
    assert [load["metrics"]["energy_j"] for load in report.loads] == [500]


def test_the_nonce_moves_the_batches_and_equal_nonces_move_them_alike(common, tmp_path):
    one, two = make_trial(common, tmp_path), make_trial(common, tmp_path)
    common.use_nonce(one, ELSEWHERE)
    common.use_nonce(two, ELSEWHERE)
    assert common.number_step(one.data, 3) == common.number_step(two.data, 3) == 3 + 0x0123456789AB


def test_a_job_that_keeps_the_search_from_answering_learns_no_nonce(keeper, tmp_path):
    (tmp_path / "window-1.nonce" / "x").mkdir(parents=True)
    (tmp_path / "window-1.asked").touch()
    keeper.watch(tmp_path, is_new=True)
    time.sleep(0.2)
    assert [window.seconds for window in keeper.end(tmp_path)] == [None]


def test_the_windows_of_many_jobs_are_answered_at_the_same_time(common, keeper, tmp_path):
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        found[number] = common.open_window(make_trial(common, tmp_path / str(number)))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for number, thread in enumerate(threads):
        (tmp_path / str(number)).mkdir()
        keeper.watch(tmp_path / str(number), is_new=True)
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(set(found.values())) == 8
    assert "" not in found.values()


def search(project, cheating: int | None, budget: int = 4) -> RunState:
    """Run a search whose trials have a nonce each; trial `cheating` is the fastest, and does other work while timed."""

    def decide(job: Job):
        is_cheat = job.trial == cheating
        return ran(job, 0.5 if is_cheat else 1 + job.trial / 100, losses=LOSSES, simulated=False)

    folder, session = open_search(project, MeasuredLauncher(decide), budget=budget)
    comparison = TrialComparison(session.spec, SameLosses(), load_framework("cpu"))
    session = admit_all(session, spec=session.spec, comparison=comparison, proposer=session.proposer)
    evaluate = session.jobs.evaluate

    def judge(trial, payload: TrialInput, writer, failure) -> Outcome:
        number = trial.recomputes or trial.number
        late = [loss * (1 + number / 1000 + (trial.number == cheating) / 100) for loss in LOSSES[2:]]
        outcome = evaluate(trial, payload, writer, failure)
        window = AttemptWindow(
            started_s=0, ended_s=1, elapsed_s=1, timed=(TimedWindow(nonce=f"nonce{number}", seconds=1.0),)
        )
        outcome = outcome.model_copy(update={"attempt": window, "fingerprint": (*LOSSES[:2], *late)})
        return comparison.judge(trial, outcome, writer.state)

    return run_session(folder, replace(session, jobs=replace(session.jobs, evaluate=judge)))


def test_the_best_trial_is_computed_again_once_in_another_layout_and_that_run_is_not_ranked(project):
    state = search(project, None)
    (again,) = [trial for trial in state.trials.values() if trial.purpose is Purpose.REFERENCE]
    assert again.recomputes == state.best.number == 1
    assert again.config != state.best.config
    assert [verdict.rule for verdict in again.outcome.verdicts if verdict.ok is False] == [RECOMPUTED_RULE]
    assert state.trials[2].outcome.find_verdict("same_losses").ok
    assert state.num_spent == 4


def test_a_best_trial_that_did_other_work_while_timed_is_refused_and_the_next_one_is_computed_again(project):
    state = search(project, 3)
    assert state.best.number == 1
    verdict = state.trials[3].outcome.find_verdict("same_losses")
    assert verdict.ok is False
    assert "differ" in verdict.detail
    assert [trial.recomputes for trial in state.trials.values() if trial.recomputes] == [3, 3, 1]
    assert all(state.trials[number].loss is not None for number in (1, 2, 4))


def test_a_search_of_one_trial_is_not_longer(project):
    assert all(trial.purpose is Purpose.SEARCH for trial in search(project, None, budget=1).trials.values())
