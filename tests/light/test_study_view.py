"""The Optuna study of a run: what it has, and that nothing that becomes of its file changes the search."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from paths import ROOT

from cclsearch.cli import main
from cclsearch.core.values import Failure, FailureKind, Provenance, Stage
from cclsearch.loop.loop import run_search
from cclsearch.loop.session import begin_or_resume, open_session, rebuild_space
from cclsearch.record.event import SpaceGrown, TrialRevised, TrialSubmitted
from cclsearch.record.writer import RunWriter
from cclsearch.run.folder import load_run
from cclsearch.scoring.outcome import Outcome
from cclsearch.study.view import STUDY_FILE, StudyView

LANDSCAPE = ROOT / "benchmarks" / "landscapes" / "nanotron-8b-4n"
BUDGET = 6


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ccl-search.yaml").write_text("{}\n")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return tmp_path


def start(*more: str, name: str = "r", budget: int = BUDGET) -> Path:
    given = ["--recording", str(LANDSCAPE), "--budget", str(budget), "--name", name, "--quiet", "--seed", "1"]
    assert main(["run", *given, *more]) in (0, 1)
    return Path("runs") / name


def copy_inputs(folder: Path, name: str) -> Path:
    """A run with the same inputs that has not begun."""
    Path("runs", name).mkdir()
    shutil.copy(folder / "search.yaml", Path("runs", name))
    return Path("runs", name)


def open_storage(folder: Path) -> JournalStorage:
    return JournalStorage(JournalFileBackend(str(folder / STUDY_FILE)))


def last_study(folder: Path) -> optuna.Study:
    storage = open_storage(folder)
    names = [study.study_name for study in storage.get_all_studies()]
    return optuna.load_study(study_name=names[-1], storage=storage)


def list_proposed(folder: Path) -> list[dict[str, Any]]:
    return [dict(trial.config) for trial in load_run(folder).state.trials.values()]


def require_agreement(folder: Path) -> None:
    """The last study has the ledger's trials, with their configurations, states and values."""
    run, study = load_run(folder), last_study(folder)
    assert [t.user_attrs["trial"] for t in study.trials] == [t.number for t in run.state.trials.values()]
    for told, trial in zip(study.trials, run.state.trials.values(), strict=True):
        assert told.params == dict(trial.config)
        assert (told.state == TrialState.COMPLETE) == (trial.loss is not None)
        assert told.values == (None if trial.loss is None else [trial.loss])
        assert told.user_attrs["provenance"] == "recorded"
        if trial.outcome and trial.outcome.failure:
            assert told.state == TrialState.FAIL
            assert told.user_attrs["reason"] == trial.outcome.failure.message


def test_the_study_has_the_trials_of_the_ledger():
    folder = start("--sampler", "random")
    require_agreement(folder)
    study = last_study(folder)
    assert {t.state for t in study.trials} == {TrialState.COMPLETE, TrialState.FAIL}
    assert study.study_name == "r (recorded)"
    assert study.metric_names == ["step_time_s"]
    best = load_run(folder).state.best
    assert study.best_trial.user_attrs["trial"] == best.number


def test_a_resumed_search_continues_its_study():
    folder = start("--sampler", "tpe")
    assert main(["resume", "r", "--budget", "12", "--quiet"]) == 0
    require_agreement(folder)
    assert len(open_storage(folder).get_all_studies()) == 1


def be_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def be_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def delete_study(path: Path) -> None:
    study = last_study(path.parent)
    optuna.delete_study(study_name=study.study_name, storage=study._storage)


def add_trials(path: Path) -> None:
    study = last_study(path.parent)
    study.enqueue_trial({"tp": 1})
    study.add_trial(optuna.create_trial(value=0.001))


def end_running(path: Path) -> None:
    study = last_study(path.parent)
    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        study._storage.set_trial_state_values(trial._trial_id, TrialState.COMPLETE, [0.001])


HARM: dict[str, Callable[[Path], Any]] = {
    "its end is cut off": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "binary data before it": lambda path: path.write_bytes(os.urandom(300) + b"\n" + path.read_bytes()),
    "removed": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "other JSON": lambda path: path.write_text('{"op_code": 4}\n[1, 2]\n"x"\n'),
    "a lock is left": lambda path: os.symlink(path.name, f"{path}.lock"),
    "the study is deleted": delete_study,
    "more trials": add_trials,
    "running trials end": end_running,
    "a folder": be_a_folder,
    "a pipe": be_a_pipe,
}
BLOCKED = ("a folder", "a pipe")


def drive(folder: Path, at: int, harm: Callable[[Path], None] | None) -> list[str]:
    """Continue a search, doing harm to its study after that many events; returns what the user was told."""
    said: list[str] = []
    session = replace(open_session(folder), tell=said.append)
    seen = 0

    def watch(event: object, state: object) -> None:
        nonlocal seen
        seen += 1
        if seen == at and harm is not None:
            harm(folder / STUDY_FILE)

    with RunWriter(folder) as writer:
        begin_or_resume(writer, session)
        writer.watch(watch)
        run_search(writer, session)
    return said


@pytest.mark.parametrize("harm", HARM)
def test_what_becomes_of_the_file_while_it_runs_changes_no_trial(harm, monkeypatch):
    monkeypatch.setattr("cclsearch.study.journal.LOCK_WAIT_S", 0.2)
    whole = start("--sampler", "cmaes", name="whole")
    copy_inputs(whole, "r")
    said = drive(Path("runs/r"), 12, HARM[harm])
    assert list_proposed(Path("runs/r")) == list_proposed(whole)
    assert len(said) == (harm in BLOCKED), said
    if harm in BLOCKED:
        shutil.rmtree("runs/r/study.log") if harm == "a folder" else Path("runs/r/study.log").unlink()
    assert main(["resume", "r", "--budget", str(BUDGET + 1), "--quiet"]) == 0
    if harm == "more trials":
        ours = [t for t in last_study(Path("runs/r")).trials if "trial" in t.user_attrs]
        assert [t.user_attrs["trial"] for t in ours] == list(range(1, BUDGET + 2))
    else:
        require_agreement(Path("runs/r"))


@pytest.mark.parametrize("sampler", ["surrogate", "tpe", "cmaes", "nsgaii", "qmc"])
def test_a_search_killed_anywhere_proposes_what_it_would_have(sampler):
    whole = start("--sampler", sampler, name="whole")
    for at in (3, 10, 17):
        folder = copy_inputs(whole, f"killed{at}")
        with pytest.raises(KeyboardInterrupt):
            drive(folder, at, kill)
        assert drive(folder, 0, None) == []
        assert list_proposed(folder) == list_proposed(whole)
        require_agreement(folder)


def kill(path: Path) -> None:
    HARM["its end is cut off"](path)
    raise KeyboardInterrupt


def test_a_full_disk_gets_one_line_and_the_search_goes_on(monkeypatch):
    write = os.write

    def refuse(file: int, data: bytes) -> int:
        if os.readlink(f"/proc/self/fd/{file}").endswith(STUDY_FILE):
            raise OSError(28, "No space left on device")
        return write(file, data)

    whole = start(name="whole")
    folder = copy_inputs(whole, "r")
    monkeypatch.setattr("os.write", refuse)
    [line] = drive(folder, 0, None)
    assert list_proposed(folder) == list_proposed(whole)
    assert "No space left on device" in line
    assert "the search continues without it" in line


def test_a_changed_verdict_and_a_grown_space_get_a_study_of_a_new_name():
    folder = start("--sampler", "random")
    run = load_run(folder)
    knobs = rebuild_space(run.spec).knobs
    view = StudyView(folder, run.spec, knobs, pytest.fail)
    view.open(run.state)
    trial = next(trial for trial in run.state.trials.values() if trial.loss is not None)
    assert trial.outcome is not None
    view.watch(TrialRevised(trial=trial.number, outcome=trial.outcome, text="looked again"), run.state)
    view.close(run.state)
    grown = SpaceGrown(choices={"tp": (1, 2, 4, 64), "new": ("a", "b")}, space_sha256="", space_size=1, text="more")
    view.watch(grown, run.state)
    view.close(run.state)
    names = [study.study_name for study in open_storage(folder).get_all_studies()]
    assert names == ["r (recorded)", "r (recorded) #2", "r (recorded) #3"]
    require_agreement(folder)
    assert last_study(folder).trials[0].distributions["tp"].high == 64


def test_a_lost_trial_is_not_told(tmp_path):
    folder = start("--sampler", "random")
    run = load_run(folder)
    number = 3
    lost = Failure(stage=Stage.RUN, kind=FailureKind.NODE_FAILED, message="the node went away")
    outcome = Outcome(provenance=Provenance.RECORDED, failure=lost)
    view = StudyView(folder, run.spec, rebuild_space(run.spec).knobs, pytest.fail)
    view.open(run.state)
    with RunWriter(folder) as writer, writer.watching(view.watch):
        writer.record(TrialRevised(trial=number, outcome=outcome, text="lost", time_s=1.0))
        view.close(writer.state)
    told = [trial.user_attrs["trial"] for trial in last_study(folder).trials]
    assert told == [n for n in range(1, BUDGET + 1) if n != number]


def test_a_sweep_is_a_study_of_several_values():
    given = ["--recording", str(LANDSCAPE), "--budget", "6", "--objective", "pareto", "--name", "s", "--quiet"]
    assert main(["sweep", *given, "--sampler", "nsgaii"]) == 0
    study = last_study(Path("runs/s"))
    assert len(study.directions) == 2
    assert study.metric_names == list(load_run(Path("runs/s")).spec.objective.metrics)
    done = [trial for trial in study.trials if trial.state == TrialState.COMPLETE]
    assert done
    for trial in done:
        assert trial.values == [trial.user_attrs[name] for name in study.metric_names]
    assert study.best_trials


def test_trials_that_run_are_running_in_the_study():
    folder = copy_inputs(start("--sampler", "tpe", "--parallel", "2", budget=4), "p")
    states: list[list[TrialState]] = []
    drive_states(folder, states)
    assert [TrialState.RUNNING] * 2 in states
    require_agreement(folder)


def drive_states(folder: Path, states: list[list[TrialState]]) -> None:
    session = open_session(folder)

    def watch(event: object, state: object) -> None:
        if isinstance(event, TrialSubmitted):
            states.append([trial.state for trial in last_study(folder).trials])

    with RunWriter(folder) as writer:
        begin_or_resume(writer, session)
        writer.watch(watch)
        run_search(writer, session)
