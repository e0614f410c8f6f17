"""Nights that are stopped or killed continue; two nights never overlap."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from nights import BASE, DECIDE, night, run_stopped, time_of, write
from scripted_launcher import Ending, ran

from cclsearch.cli import main
from cclsearch.launch.base import Job
from cclsearch.loop.jobs import StopSignal
from cclsearch.nightly.run import NightBusyError, run_night
from cclsearch.record.lock import FolderLock
from cclsearch.run.folder import load_run


def test_a_stopped_night_continues_the_same_search(nightly_project: Path) -> None:
    from cclsearch.nightly.config import load_nightly

    stop, count = StopSignal(), iter(range(100))

    def stopping(job: Job) -> Ending:
        if next(count) == 2:
            stop.request("stopped by the test")
            return None
        return ran(job, time_of(job))

    DECIDE.append(stopping)
    interrupted = run_night(load_nightly(write()), Path("runs").absolute(), stop=stop)
    DECIDE.append(lambda job: ran(job, time_of(job)))
    assert load_run(Path("runs") / str(interrupted.jobs[0].run)).status == "stopped"
    again = night(code=0)
    assert again.jobs[0].run == interrupted.jobs[0].run
    assert again.jobs[0].resumed
    run = load_run(Path("runs") / str(again.jobs[0].run))
    assert run.status == "ended"
    assert len({trial.config for trial in run.state.trials.values()}) == 6


def test_a_killed_night_is_continued_with_what_it_spent(nightly_project: Path) -> None:
    from cclsearch.nightly import window as module
    from cclsearch.nightly.config import load_nightly

    first = night(budget={"trials": 8})
    home = Path("runs") / "nights" / "nightly"
    for name in ("summary.json", "summary.md", "report.html"):
        (home / first.night / name).unlink()
    config = load_nightly(Path("nightly.yaml"))
    found = module.find_window(config, Path("runs").absolute(), time.time())
    assert found.stamp == first.night
    assert found.jobs == {"a": first.jobs[0].run}
    again = night(budget={"trials": 8})
    assert again.night == first.night
    assert again.spent.trials == 6
    other = load_nightly(write(budget={"trials": 9}))
    (home / first.night / "summary.json").unlink()
    assert module.find_window(other, Path("runs").absolute(), time.time()).stamp != first.night


def test_a_night_stopped_by_a_signal_is_continued_and_its_spending_counts(nightly_project: Path) -> None:
    jobs = [{**BASE["jobs"][0], "name": "a"}, {**BASE["jobs"][0], "name": "b"}]
    more: dict[str, Any] = {"jobs": jobs, "budget": {"trials": 7}}
    interrupted = run_stopped(2, **more)
    assert interrupted.stopped
    assert "stopped before its end" in interrupted.text
    assert interrupted.spent.trials == 2
    again = night(**more)
    assert again.night == interrupted.night
    assert not again.stopped
    assert again.spent.trials == 7
    assert [job.trials for job in again.jobs] == [4, 3]
    assert night(**more).night != interrupted.night


def test_an_interrupted_trial_counts_for_the_night_that_finishes_it(nightly_project: Path) -> None:
    interrupted = run_stopped(2)
    assert interrupted.spent.trials == 2
    again = night(budget={"trials": 3})
    assert (again.jobs[0].run, again.jobs[0].resumed) == (interrupted.jobs[0].run, True)
    assert (again.spent.trials, again.jobs[0].trials) == (3, 3)
    assert len(load_run(Path("runs") / str(interrupted.jobs[0].run)).state.trials) == 5


def test_a_stop_after_the_last_trial_completes_the_night(nightly_project: Path) -> None:
    interrupted = run_stopped(4, budget={"trials": 4})
    assert interrupted.spent.trials == 4
    assert not interrupted.stopped
    assert night(budget={"trials": 4}).night != interrupted.night


def test_two_nights_never_overlap(nightly_project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from cclsearch.nightly.config import load_nightly

    home = Path("runs") / "nights"
    home.mkdir(parents=True)
    with FolderLock(home, purpose="nightly"):
        with pytest.raises(NightBusyError):
            run_night(load_nightly(write()), Path("runs").absolute(), stop=StopSignal())
        assert main(["nightly", "nightly.yaml"]) == 5
    assert "in use by process" in capsys.readouterr().err
    assert sorted(p.name for p in Path("runs").iterdir()) == ["nights"]


def test_a_process_that_runs_every_night_survives_a_failing_night(
    nightly_project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cclsearch.nightly import service

    starts = iter([True, True, False])
    profile = Path("launchers/sim.yaml")
    valid = profile.read_text()

    def next_start(*given: object) -> bool:
        """The profile is broken at the first start and repaired at the second."""
        broken = not profile.read_text().endswith("nonsense: [\n")
        profile.write_text(valid + "nonsense: [\n" if broken else valid)
        return next(starts)

    monkeypatch.setattr(service, "wait_for_start", next_start)
    write(start="22:00 UTC")
    assert main(["nightly", "nightly.yaml", "--quiet"]) == 0
    output = capsys.readouterr()
    assert output.err.count("this night failed: ") == 1
    assert "1 job: 1 without an earlier night" in output.out
