"""Whole nights with a scripted launcher: comparison with earlier nights, trouble, budgets, totals."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from nights import BASE, DECIDE, NightLauncher, night, run_stopped, time_of, write
from scripted_launcher import Ending, failed, ran

from cclsearch.core.errors import DamagedLedger, UnavailableError
from cclsearch.core.values import FailureKind, Provenance
from cclsearch.launch.base import Handle, Job, JobStatus
from cclsearch.loop.jobs import StopSignal
from cclsearch.loop.loop import run_search
from cclsearch.nightly.run import run_night
from cclsearch.nightly.summary import NightSummary
from cclsearch.record.event import TrialProposed
from cclsearch.record.state import RunState
from cclsearch.record.trial import fold_trial
from cclsearch.record.writer import RunWriter
from cclsearch.run.folder import load_run


def test_the_best_of_earlier_nights_is_measured_again_first(nightly_project):
    first = night(code=0)
    assert first.jobs[0].verdict == "first"
    assert first.jobs[0].best is not None
    second = night(code=0)
    job = second.jobs[0]
    assert job.verdict == "unchanged"
    run = load_run(Path("runs") / str(job.run))
    assert run.state.trials[1].proposer == "earlier"
    assert dict(run.state.trials[1].config) == first.jobs[0].best.config
    assert job.nights_before == 1


def test_a_slower_configuration_is_a_regression_with_the_changes_around_it(nightly_project):
    night(code=0)
    night(code=0)
    DECIDE.append(lambda job: ran(job, 1.4 * time_of(job), versions={"torch": "2.2"}, hosts=("n1",)))
    summary = night(code=3)
    worse = summary.jobs[0].worse[0]
    assert worse.ratio == pytest.approx(1.4)
    assert "torch 2.1 → 2.2" in worse.why
    assert "hosts unknown → n1" in worse.why
    home = Path("runs") / "nights" / "nightly"
    assert "regressed" in (home / "summary.md").read_text()
    assert "torch 2.1 → 2.2" in (home / "report.html").read_text()
    assert json.loads((home / "summary.json").read_text())["exit_code"] == 3


def test_a_regression_names_changes_of_the_profile_but_no_secret(nightly_project):
    night(code=0)
    DECIDE.append(lambda job: ran(job, 1.4 * time_of(job)))
    profile = {"launcher": "scripted-night", "scratch": "/away", "my_token": 7, "environment": {"OMP_NUM_THREADS": 1}}
    Path("launchers/sim.yaml").write_text(yaml.safe_dump(profile))
    why = night(code=3).jobs[0].worse[0].why
    assert "the launcher's OMP_NUM_THREADS unset → 1" in why
    assert "the launcher's scratch unset → /away" in why
    assert "the launcher's my_token changed" in why


def test_a_configuration_that_ran_and_now_fails_is_a_regression(nightly_project):
    night(code=0)
    DECIDE.append(lambda job: failed(FailureKind.OUT_OF_MEMORY))
    summary = night(code=3)
    assert summary.jobs[0].worse[0].now is None
    assert "out_of_memory" in summary.jobs[0].worse[0].why[0]


def test_faster_beyond_noise_is_an_improvement_but_one_percent_is_not(nightly_project):
    night(code=0)
    DECIDE.append(lambda job: ran(job, 1.01 * time_of(job)))
    assert night(code=0).jobs[0].verdict == "unchanged"
    DECIDE.append(lambda job: ran(job, 0.5 * time_of(job)))
    assert night(code=0).jobs[0].verdict == "improved"


def test_failing_infrastructure_is_trouble_and_a_crash_is_no_result(nightly_project):
    DECIDE.append(lambda job: failed(FailureKind.CRASHED))
    assert night(code=1).jobs[0].verdict == "no result"
    DECIDE.append(lambda job: failed(FailureKind.NODE_FAILED))
    assert night(code=4).jobs[0].verdict == "infrastructure trouble"


def strange(job: Job) -> Ending:
    """A run that is not admitted, because it names another device than the card."""
    return ran(job, time_of(job), devices=("NVIDIA H100 80GB HBM3",) * job.payload.num_ranks)


def test_trials_that_are_not_admitted_are_counted_with_a_reason(nightly_project):
    night(code=0)
    DECIDE.append(lambda job: strange(job) if job.trial <= 2 else ran(job, time_of(job)))  # one more run is allowed
    job = night(code=0).jobs[0]
    assert (job.trials, job.refused) == (6, 2)
    assert "ran again but is not admitted (devices: " in job.text
    DECIDE.append(strange)
    job = night(code=1).jobs[0]
    assert (job.verdict, job.trials, job.refused) == ("no result", 6, 6)
    assert job.text.startswith("no trial was ranked: 6 not admitted (")
    DECIDE.append(lambda job: failed(FailureKind.CRASHED))
    job = night(code=3, start="22:00 UTC").jobs[0]
    assert (job.trials, job.failed) == (6, 6)


def test_a_failing_job_does_not_end_the_night_of_the_others(nightly_project):
    def broken(job: Job) -> Ending:
        if "-bad-" in job.name or "bad" in str(job.trial_dir):
            raise RuntimeError("a bug of somebody's")
        return ran(job, time_of(job))

    DECIDE.append(broken)
    jobs = [{**BASE["jobs"][0], "name": "bad", "priority": 9}, {**BASE["jobs"][0], "name": "good"}]
    summary = night(code=1, jobs=jobs)
    assert [job.verdict.value for job in summary.jobs] == ["no result", "first"]
    kept = Path("runs") / "nights" / "nightly" / summary.night / "bad.traceback.txt"
    assert "a bug of somebody's" in kept.read_text()


def test_an_unavailable_launcher_is_trouble_and_the_other_jobs_run(nightly_project, monkeypatch):
    poll = NightLauncher.poll

    def away(self: NightLauncher, handles: Sequence[Handle]) -> list[JobStatus]:
        if any("-a-" in handle.job_name for handle in handles):
            raise UnavailableError("the queue does not answer, so jobs may go on")
        return poll(self, handles)

    monkeypatch.setattr(NightLauncher, "poll", away)
    summary = night(code=4, jobs=[BASE["jobs"][0], {**BASE["jobs"][0], "name": "b"}])
    assert [job.verdict.value for job in summary.jobs] == ["infrastructure trouble", "first"]
    assert "does not answer" in summary.jobs[0].text


def test_a_night_stopped_while_the_launcher_is_unavailable_is_not_complete(nightly_project, monkeypatch):
    def away(self: NightLauncher, handles: Sequence[Handle]) -> None:
        raise UnavailableError("the queue does not answer, so jobs may go on")

    monkeypatch.setattr(NightLauncher, "cancel", away)
    interrupted = run_stopped(1)
    assert (interrupted.exit_code, interrupted.stopped) == (4, True)
    assert "does not answer" in interrupted.jobs[0].text


def test_a_trial_that_lost_its_node_is_trouble_and_one_that_only_waits_is_not(
    nightly_project,
):
    from cclsearch.nightly.config import load_nightly

    def stop_at(attempt: int, name: str) -> NightSummary:
        """A night whose nodes fail until that attempt of its first trial, which waits when the night is stopped."""
        stop = StopSignal()

        def decide(job: Job) -> Ending:
            if job.attempt < attempt:
                return failed(FailureKind.NODE_FAILED)
            stop.request("stopped by SIGTERM")
            return None

        DECIDE.append(decide)
        return run_night(load_nightly(write(name=name)), Path("runs").absolute(), stop=stop)

    lost, waiting = stop_at(2, "lost"), stop_at(1, "waiting")
    assert (lost.exit_code, waiting.exit_code) == (4, 1)
    assert "1 did not finish (node_failed: the test said node_failed; no other attempt" in lost.jobs[0].text
    assert "1 did not finish; " in waiting.jobs[0].text


def test_the_time_until_the_deadline_is_shared_among_the_jobs(nightly_project, monkeypatch):
    from cclsearch.nightly import night as module

    hours: list[float] = []

    class Watched(module.Meter):
        """Also records the hours that each search was allowed."""

        def __init__(self, spec: Any, allowance: Any, stop: Any, alive: Any) -> None:
            hours.append(allowance.hours)
            super().__init__(spec, allowance, stop, alive)

    monkeypatch.setattr(module, "Meter", Watched)
    moment = time.strftime("%H:%M", time.gmtime(time.time() + 8 * 3600))
    night(code=0, jobs=[BASE["jobs"][0], {**BASE["jobs"][0], "name": "b"}], deadline=f"{moment} UTC")
    assert 3 < hours[0] <= 4
    assert 7 < hours[1] <= 8


def test_trials_are_shared_by_priority_and_the_rest_goes_to_later_jobs(nightly_project):
    jobs = [
        {**BASE["jobs"][0], "name": "large", "priority": 2, "budget": {"trials": 50}},
        {**BASE["jobs"][0], "name": "small", "priority": 1, "budget": {"trials": 2}},
    ]
    summary = night(jobs=jobs, budget={"trials": 12})
    assert {job.job: job.trials for job in summary.jobs} == {"large": 10, "small": 2}
    assert summary.spent.trials == 12


def mixed(job: Job) -> Ending:
    if job.trial == 2:
        return failed(FailureKind.CRASHED)
    return strange(job) if job.trial == 3 else ran(job, time_of(job))


def test_the_totals_of_a_night_are_the_sums_of_its_jobs(nightly_project):
    DECIDE.append(mixed)
    jobs = [{**BASE["jobs"][0], "name": name, "seed": seed} for seed, name in enumerate("ab")]
    summary = night(jobs=jobs)
    for job in summary.jobs:
        assert job.trials == job.admitted + job.failed + job.refused + job.lost + job.unjudged
        runs = load_run(Path("runs") / str(job.run)).state.trials
        assert job.admitted == sum(trial.loss is not None for trial in runs.values())
    for name, total in summary.spent:
        assert total == pytest.approx(sum(getattr(job.spent, name) for job in summary.jobs)), name
    assert summary.spent.hours > 0
    counts = [sum(getattr(job, name) for job in summary.jobs) for name in ("trials", "admitted", "failed", "refused")]
    assert counts == [12, 8, 2, 2]
    text = (Path("runs") / "nights").glob("**/summary.md")
    assert "8 of 12 trials admitted (2 failed, 2 not admitted); 12 of the budget" in next(iter(text)).read_text()


def test_a_night_says_that_a_job_ended_because_its_trials_end_alike(nightly_project, monkeypatch):
    monkeypatch.setattr(NightLauncher, "provenance", Provenance.MEASURED)
    DECIDE.append(lambda job: failed(FailureKind.CRASHED))
    job = night(code=1).jobs[0]
    assert job.trials == 3
    assert "the same error ended trials 1, 2 and 3" in job.ending
    job = night(jobs=[{**BASE["jobs"][0], "name": "kept", "keep_going": True}]).jobs[0]
    assert job.trials == 6


@pytest.mark.parametrize(("lost", "verdict"), [(0, "no result"), (1, "infrastructure trouble")])
def test_a_night_does_not_blame_the_infrastructure_for_what_it_could_not_judge_and_names_ignored_ledger_lines(
    nightly_project, monkeypatch, lost, verdict
):
    from cclsearch.evaluation import evaluate
    from cclsearch.nightly import night as module

    def fail(*arguments: Any, **fields: Any) -> Any:
        raise KeyError("our own mistake")

    def search(writer: RunWriter, session: Any) -> None:
        run_search(writer, session)
        with (writer.folder / "ledger.jsonl").open("ab") as ledger:
            ledger.write(b"not an event\n")

    monkeypatch.setattr(evaluate, "evaluate_evidence", fail)
    monkeypatch.setattr(module, "run_search", search)
    DECIDE.append(lambda job: failed(FailureKind.LAUNCHER) if job.trial <= lost else ran(job))
    with pytest.warns(DamagedLedger):
        summary = night()
    [job] = summary.jobs
    assert (job.verdict.value, job.trials, job.lost, job.unjudged) == (verdict, 3 + lost, lost, 3)
    assert "3 not judged because of an error of ccl-search" in job.text
    assert ("infrastructure" in job.text) == bool(lost)
    [note] = summary.notes
    assert note.startswith(f"'{job.run}/ledger.jsonl': 1 line is not used, all others are: line ")
    page = Path("runs") / "nights" / "nightly" / summary.night / "summary.md"
    assert "1 line is not used" in page.read_text()


def test_node_hours_are_counted_by_a_clock_that_nobody_sets(nightly_project, monkeypatch):
    from cclsearch.loop import meter as module

    run = load_run(Path("runs") / str(night().jobs[0].run))
    spec = run.spec.model_copy(update={"provenance": Provenance.MEASURED})
    stop, state = StopSignal(), RunState()
    meter = module.Meter(spec, module.Allowance(node_hours=1.5, hours=1.5), stop, lambda: None)
    event = TrialProposed(time_s=time.time(), trial=1, config=run.state.trials[1].config, proposer="random")
    state.apply(event, 0)
    monkeypatch.setattr(state.trials, "_read", lambda index: fold_trial([event]))
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 7200)
    meter.watch(event, state)
    assert not stop.is_set()
    boot_s = module.boot_clock_s()
    monkeypatch.setattr(module, "boot_clock_s", lambda: boot_s + 7200)
    meter.watch(event, state)
    assert stop.is_set()
