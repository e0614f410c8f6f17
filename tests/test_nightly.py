"""Whole nights with a scripted launcher: budgets, comparison, interruptions, pruning, messages."""

from __future__ import annotations

import json
import os
import resource
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripted_launcher import Ending, ScriptedLauncher, failed, ran

from cclsearch.cli import main
from cclsearch.core.errors import UnavailableError
from cclsearch.core.values import FailureKind, Provenance
from cclsearch.launch.base import Handle, Job, JobStatus
from cclsearch.nightly.run import NightBusyError, run_night
from cclsearch.nightly.summary import NightSummary
from cclsearch.plugins import LAUNCHERS
from cclsearch.record.lock import FolderLock
from cclsearch.run.folder import load_run
from cclsearch.search.jobs import StopSignal

DECIDE: list[Callable[[Job], Ending]] = []
"""Decides how trials end: the last entry counts."""


@LAUNCHERS.register("scripted-night")
class NightLauncher(ScriptedLauncher):
    """A scripted launcher made from a profile, as a night makes its launchers."""

    @classmethod
    def from_profile(cls, profile: object) -> NightLauncher:
        return cls(lambda job: DECIDE[-1](job))


def time_of(job: Job) -> float:
    """Seconds per step of a configuration: the more micro-batches, the slower."""
    config = job.payload.config
    return 1.0 + 0.1 * job.payload.gradient_accumulation + 0.3 * config.as_int("tp") + 0.2 * config.as_int("pp")


@pytest.fixture
def nightly_project(project: Path) -> Iterator[Path]:
    (project / "launchers").mkdir()
    (project / "launchers" / "sim.yaml").write_text("launcher: scripted-night\n")
    DECIDE.append(lambda job: ran(job, time_of(job), versions={"torch": "2.1"}))
    yield project
    DECIDE.clear()


BASE: dict[str, Any] = {"jobs": [{"workload": "tiny", "launcher": "sim", "name": "a", "budget": {"trials": 6}}]}
CLOCK = iter(range(10**6))


def write(**changes: Any) -> Path:
    path = Path("nightly.yaml")
    path.write_text(yaml.safe_dump({**BASE, **changes}))
    return path


def night(code: int | None = None, **changes: Any) -> NightSummary:
    """Run one night and check its exit code."""
    from cclsearch.nightly.config import load_nightly

    summary = run_night(load_nightly(write(**changes)), Path("runs").absolute(), stop=StopSignal())
    if code is not None:
        assert summary.exit_code == code, summary.model_dump_json(indent=1)
    return summary


@pytest.fixture(autouse=True)
def _nights_are_days_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each night a stamp of its own, without waiting for the next second."""
    from cclsearch.nightly import window as module

    find = module.find_window

    def later(config: Any, runs: Path, now_s: float) -> Any:
        from dataclasses import replace

        found = find(config, runs, now_s)
        if found.jobs or (found.folder / "night.json").exists():
            return found
        stamp = f"2030{next(CLOCK):04d}-000000"
        return replace(found, stamp=stamp, folder=found.folder.with_name(stamp))

    monkeypatch.setattr("cclsearch.nightly.run.find_window", later)


def test_the_best_of_earlier_nights_is_measured_again_first(nightly_project: Path) -> None:
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


def test_a_slower_configuration_is_a_regression_with_the_changes_around_it(nightly_project: Path) -> None:
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


def test_a_regression_names_changes_of_the_profile_but_no_secret(nightly_project: Path) -> None:
    night(code=0)
    DECIDE.append(lambda job: ran(job, 1.4 * time_of(job)))
    profile = {"launcher": "scripted-night", "scratch": "/away", "my_token": 7, "environment": {"OMP_NUM_THREADS": 1}}
    Path("launchers/sim.yaml").write_text(yaml.safe_dump(profile))
    why = night(code=3).jobs[0].worse[0].why
    assert "the launcher's OMP_NUM_THREADS unset → 1" in why
    assert "the launcher's scratch unset → /away" in why
    assert "the launcher's my_token changed" in why


def test_a_configuration_that_ran_and_now_fails_is_a_regression(nightly_project: Path) -> None:
    night(code=0)
    DECIDE.append(lambda job: failed(FailureKind.OUT_OF_MEMORY))
    summary = night(code=3)
    assert summary.jobs[0].worse[0].now is None
    assert "out_of_memory" in summary.jobs[0].worse[0].why[0]


def test_faster_beyond_noise_is_an_improvement_but_one_percent_is_not(nightly_project: Path) -> None:
    night(code=0)
    DECIDE.append(lambda job: ran(job, 1.01 * time_of(job)))
    assert night(code=0).jobs[0].verdict == "unchanged"
    DECIDE.append(lambda job: ran(job, 0.5 * time_of(job)))
    assert night(code=0).jobs[0].verdict == "improved"


def test_failing_infrastructure_is_trouble_and_a_crash_is_no_result(nightly_project: Path) -> None:
    DECIDE.append(lambda job: failed(FailureKind.CRASHED))
    assert night(code=1).jobs[0].verdict == "no result"
    DECIDE.append(lambda job: failed(FailureKind.NODE_FAILED))
    assert night(code=4).jobs[0].verdict == "infrastructure trouble"


def strange(job: Job) -> Ending:
    """A run that is not admitted, because it names another device than the card."""
    return ran(job, time_of(job), devices=("NVIDIA H100 80GB HBM3",) * job.payload.num_ranks)


def test_trials_that_are_not_admitted_are_counted_with_a_reason(nightly_project: Path) -> None:
    night(code=0)
    DECIDE.append(lambda job: strange(job) if job.trial == 1 else ran(job, time_of(job)))
    job = night(code=0).jobs[0]
    assert (job.trials, job.refused) == (6, 1)
    assert "ran again but is not admitted (devices: " in job.text
    DECIDE.append(strange)
    job = night(code=1).jobs[0]
    assert (job.verdict, job.trials, job.refused) == ("no result", 6, 6)
    assert job.text.startswith("no trial was ranked: 6 not admitted (")
    DECIDE.append(lambda job: failed(FailureKind.CRASHED))
    job = night(code=3, start="22:00 UTC").jobs[0]
    assert (job.trials, job.failed) == (6, 6)


def test_a_failing_job_does_not_end_the_night_of_the_others(nightly_project: Path) -> None:
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


def test_an_unavailable_launcher_is_trouble_and_the_other_jobs_run(
    nightly_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poll = NightLauncher.poll

    def away(self: NightLauncher, handles: Sequence[Handle]) -> list[JobStatus]:
        if any("-a-" in handle.job_name for handle in handles):
            raise UnavailableError("the queue does not answer, so jobs may go on")
        return poll(self, handles)

    monkeypatch.setattr(NightLauncher, "poll", away)
    summary = night(code=4, jobs=[BASE["jobs"][0], {**BASE["jobs"][0], "name": "b"}])
    assert [job.verdict.value for job in summary.jobs] == ["infrastructure trouble", "first"]
    assert "does not answer" in summary.jobs[0].text


def test_a_night_stopped_while_the_launcher_is_unavailable_is_not_complete(
    nightly_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(self: NightLauncher, handles: Sequence[Handle]) -> None:
        raise UnavailableError("the queue does not answer, so jobs may go on")

    monkeypatch.setattr(NightLauncher, "cancel", away)
    interrupted = run_stopped(1)
    assert (interrupted.exit_code, interrupted.stopped) == (4, True)
    assert "does not answer" in interrupted.jobs[0].text


def test_a_trial_that_lost_its_node_is_trouble_and_one_that_only_waits_is_not(
    nightly_project: Path,
) -> None:
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


def test_the_time_until_the_deadline_is_shared_among_the_jobs(
    nightly_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_trials_are_shared_by_priority_and_the_rest_goes_to_later_jobs(nightly_project: Path) -> None:
    jobs = [
        {**BASE["jobs"][0], "name": "large", "priority": 2, "budget": {"trials": 50}},
        {**BASE["jobs"][0], "name": "small", "priority": 1, "budget": {"trials": 2}},
    ]
    summary = night(jobs=jobs, budget={"trials": 12})
    assert {job.job: job.trials for job in summary.jobs} == {"large": 10, "small": 2}
    assert summary.spent.trials == 12


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


def stop_after(stop: StopSignal, count: int) -> Callable[[Job], Ending]:
    """The first `count` trials succeed; the next one keeps running, and the night is asked to stop."""
    begun = iter(range(100))

    def decide(job: Job) -> Ending:
        if next(begun) < count:
            return ran(job, time_of(job))
        stop.request("stopped by SIGTERM")
        return None

    return decide


def run_stopped(after: int, **changes: Any) -> NightSummary:
    """A night that SIGTERM stops after that many trials; later trials succeed again."""
    from cclsearch.nightly.config import load_nightly

    stop = StopSignal()
    DECIDE.append(stop_after(stop, after))
    summary = run_night(load_nightly(write(**changes)), Path("runs").absolute(), stop=stop)
    DECIDE.append(lambda job: ran(job, time_of(job)))
    return summary


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


def test_pruning_does_not_touch_a_run_that_tonight_continued(nightly_project: Path) -> None:
    interrupted = run_stopped(1, start="22:00 UTC")
    summary = night(keep={"nights": 1})
    assert summary.jobs[0].resumed
    assert summary.pruned.trials == 0
    trials = Path("runs") / str(summary.jobs[0].run) / "trials"
    assert len(list(trials.glob("*/result.json"))) == 6
    night(keep={"nights": 2})
    assert len(list(trials.glob("*/result.json"))) == 6
    assert night(keep={"nights": 2}).pruned.nights == (summary.night,)
    winners = {one.jobs[0].best.trial for one in (interrupted, summary) if one.jobs[0].best}
    assert {int(path.parent.name) for path in trials.glob("*/result.json")} == winners


def test_pruning_counts_and_removes_traces_on_scratch_and_nothing_else(nightly_project: Path) -> None:
    scratch = nightly_project / "scratch"
    Path("launchers/sim.yaml").write_text(f"launcher: scripted-night\nscratch: {scratch}\n")
    first = night().jobs[0]
    assert first.best is not None
    trials = Path("runs") / str(first.run) / "trials"
    winner, loser, foreign = first.best.trial, *[n for n in range(1, 7) if n != first.best.trial][:2]
    for number in (winner, loser):
        held = scratch / f"{first.run}-t{number:04d}-a1" / "trace"
        held.mkdir(parents=True)
        (held / "rank0.json").write_bytes(b"x" * 5000)
        (trials / f"{number:04d}" / "trace").symlink_to(held)
    others = scratch / "others-t0001-a1" / "trace"
    others.mkdir(parents=True)
    (scratch / f"{first.run}-t{loser:04d}-a1" / "out").symlink_to(others)
    (trials / f"{foreign:04d}" / "trace").symlink_to(others)
    summary = night(keep={"nights": None, "gib": 4000 / 2**30})
    assert summary.pruned.trials == 5
    assert summary.pruned.gib > 5000 / 2**30
    kept = sorted(path.name for path in scratch.iterdir())
    assert kept == sorted([f"{first.run}-t{winner:04d}-a1", "others-t0001-a1"])
    assert others.is_dir()


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


def test_pruning_keeps_winners_ledgers_and_the_targets_of_links(nightly_project: Path) -> None:
    first = night()
    run = Path("runs") / str(first.jobs[0].run)
    outside = nightly_project / "outside"
    outside.mkdir()
    (outside / "precious").write_text("keep me")
    assert first.jobs[0].best is not None
    best = run / "trials" / f"{first.jobs[0].best.trial:04d}"
    loser = next(p for p in sorted((run / "trials").iterdir()) if p != best)
    (loser / "link").symlink_to(outside)
    (run / "trials" / "0999").symlink_to(outside)
    (Path("runs") / "nightly-20300000-000001-a").symlink_to(outside)
    second = night(keep={"nights": 1})
    assert second.pruned.trials == 5
    assert second.pruned.nights == (first.night,)
    assert (outside / "precious").read_text() == "keep me"
    assert (best / "result.json").is_file()
    assert not loser.exists()
    assert load_run(run).state.best is not None
    third = night(keep={"nights": None, "gib": 1e-9})
    assert third.pruned.trials > 0
    tonight = Path("runs") / str(third.jobs[0].run) / "trials"
    assert len(list(tonight.glob("*/result.json"))) == 6


def test_pruning_keeps_the_winner_of_a_renamed_run_and_accepts_a_damaged_summary(nightly_project: Path) -> None:
    first = night()
    run = Path("runs") / str(first.jobs[0].run)
    assert first.jobs[0].best is not None
    named = next(n for n in range(1, 7) if n != first.jobs[0].best.trial)
    kept = Path("runs") / "nights" / "nightly" / first.night / "summary.json"
    data = json.loads(kept.read_text())
    data["jobs"][0]["best"]["trial"] = named
    kept.write_text(json.dumps(data))
    moved = run.rename(run.with_name(f"{run.name}-old"))
    second = night(keep={"nights": 1})
    assert second.pruned.trials == 4
    assert {int(path.name) for path in (moved / "trials").iterdir()} == {named, first.jobs[0].best.trial}
    kept.write_text('{"jobs": 3}')
    assert night(keep={"nights": 1}).pruned.trials == 6


class _Chat(BaseHTTPRequestHandler):
    received: list[dict[str, Any]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.received.append(json.loads(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def test_the_chat_gets_the_message_and_its_url_is_in_no_file(
    nightly_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HTTPServer(("127.0.0.1", 0), _Chat) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/hook/very-secret-part"
        monkeypatch.setenv("NIGHT_HOOK", url)
        summary = night(code=0, webhook_env="NIGHT_HOOK", name="n1")
        server.shutdown()
    assert "1 job: 1 without an earlier night" in _Chat.received[-1]["text"]
    assert summary.notes == ()
    content = b"".join(p.read_bytes() for p in nightly_project.rglob("*") if p.is_file())
    assert b"very-secret-part" not in content


def test_a_night_that_cannot_be_written_is_trouble_and_the_chat_gets_a_message(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {"workload": "wl2", "launcher": "replay", "name": "a", "budget": {"trials": 2}}
    write(jobs=[job], webhook_env="NIGHT_HOOK")
    command = [sys.executable, "-m", "cclsearch", "nightly", "nightly.yaml", "--once"]
    with HTTPServer(("127.0.0.1", 0), _Chat) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("NIGHT_HOOK", f"http://127.0.0.1:{server.server_address[1]}/hook")
        done = subprocess.run(
            command, preexec_fn=forbid_large_files, capture_output=True, text=True, timeout=300, check=False
        )
        server.shutdown()
    assert done.returncode == 4, done.stderr
    assert "cannot write" in done.stderr
    assert "Traceback" not in done.stderr
    assert "cannot write" in _Chat.received[-1]["text"]


def forbid_large_files() -> None:
    """Limit files to 2 kB: inputs, ledgers and pages are larger, a lock and the state of a running night are not."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, resource.RLIM_INFINITY))


def test_an_unreachable_chat_is_a_note_and_not_a_failure(
    nightly_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHT_HOOK", "http://127.0.0.1:1/very-secret-part")
    summary = night(code=0, webhook_env="NIGHT_HOOK")
    assert "may not have arrived" in summary.notes[-1]
    kept = Path("runs") / "nights" / "nightly" / summary.night
    for name in ("summary.json", "summary.md", "report.html"):
        assert "may not have arrived" in (kept / name).read_text()
    assert "very-secret-part" not in summary.notes[-1]
    monkeypatch.setenv("NIGHT_HOOK", "file:///etc/passwd")
    assert "is not an http" in night(code=0, webhook_env="NIGHT_HOOK").notes[-1]


def test_a_webhooks_url_is_a_secret_in_messages_and_jobs(
    nightly_project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cclsearch.launch.environment import inherited_environment

    url = "https://chat.example/hook/very-hidden-part"
    monkeypatch.setenv("CHAT_ADDRESS", url + "\n")
    DECIDE.append(lambda job: failed(FailureKind.CRASHED).model_copy(update={"message": f"no answer from {url}"}))
    write(webhook_env="CHAT_ADDRESS", jobs=[{**BASE["jobs"][0], "objective": f"no {url}"}])
    assert main(["nightly", "nightly.yaml"]) == 2
    output = capsys.readouterr()
    assert "very-hidden-part" not in output.out + output.err
    assert "CHAT_ADDRESS" not in inherited_environment()
    monkeypatch.setattr("cclsearch.nightly.run.send_webhook", lambda variable, text: None)
    summary = night(code=1, webhook_env="CHAT_ADDRESS", jobs=BASE["jobs"])
    assert "very-hidden-part" not in summary.model_dump_json()
    content = b"".join(p.read_bytes() for p in Path("runs").rglob("*") if p.is_file())
    assert b"very-hidden-part" not in content


def test_a_process_that_runs_every_night_survives_a_failing_night(
    nightly_project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cclsearch.cli import nightly

    starts = iter([True, True, False])
    profile = Path("launchers/sim.yaml")
    valid = profile.read_text()

    def next_start(config: object, stop: object, *, quiet: bool) -> bool:
        """The profile is broken at the first start and repaired at the second."""
        broken = not profile.read_text().endswith("nonsense: [\n")
        profile.write_text(valid + "nonsense: [\n" if broken else valid)
        return next(starts)

    monkeypatch.setattr(nightly, "wait_for_start", next_start)
    write(start="22:00 UTC")
    assert main(["nightly", "nightly.yaml", "--quiet"]) == 0
    output = capsys.readouterr()
    assert output.err.count("this night failed: ") == 1
    assert "1 job: 1 without an earlier night" in output.out


def test_dry_run_shows_jobs_and_repeated_configurations_and_writes_nothing(
    nightly_project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(deadline="06:00 Europe/Paris")
    assert main(["nightly", "nightly.yaml", "--dry-run"]) == 0
    assert not Path("runs").exists()
    night(code=0)
    before = sorted(Path("runs").rglob("*"))
    assert main(["nightly", "nightly.yaml", "--dry-run"]) == 0
    assert "measures again: " in capsys.readouterr().out
    assert sorted(Path("runs").rglob("*")) == before


def put_tables_tool(nightly_project: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a `crontab` or `scrontab` on PATH that stores its table in a file; returns that file."""
    table = nightly_project / "table"
    tools = nightly_project / "tools"
    tools.mkdir()
    script = (
        f'#!/bin/sh\nif [ "$1" = -l ]; then cat "{table}"; else cat > "{table}.new" && mv "{table}.new" "{table}"; fi\n'
    )
    (tools / name).write_text(script)
    (tools / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    return table


def test_installing_into_a_crontab_keeps_the_rest_and_replaces_its_own(
    nightly_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = put_tables_tool(nightly_project, "crontab", monkeypatch)
    table.write_text("# mine\n5 5 * * * echo hello\n")
    write(start="22:00 Europe/Paris")
    for _ in range(2):
        assert main(["nightly", "install", "nightly.yaml", "--cron"]) == 0
    text = table.read_text()
    assert text.startswith("# mine\n5 5 * * * echo hello\n")
    assert text.count("0 22 * * *") == 1
    assert text.count("CRON_TZ=Europe/Paris") == 1


def test_reinstalling_into_a_scrontab_keeps_the_lines_around_it(
    nightly_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = put_tables_tool(nightly_project, "scrontab", monkeypatch)
    above = "#SCRON --qos=mine\n5 5 * * * echo hello\n#SCRON --mem=4G\n"
    below = "#SCRON --time=00:10:00\n7 7 * * * echo more\n"
    table.write_text(above)
    write(start="22:00 Europe/Paris", deadline="06:00 Europe/Paris", scrontab={"partition": "cron", "account": 123})
    assert main(["nightly", "install", "nightly.yaml", "--scrontab"]) == 0
    table.write_text(table.read_text() + below)
    assert main(["nightly", "install", "nightly.yaml", "--scrontab", "--account", "m12", "--qos", "cron"]) == 0
    text = table.read_text()
    assert text.startswith(above + "# begin ccl-search-nightly-nightly\n")
    assert text.endswith("# end ccl-search-nightly-nightly\n" + below)
    for line in ("--time=09:20:00", "--partition=cron", "--account=m12", "--qos=cron"):
        assert text.count(f"#SCRON {line}\n") == 1
    assert text.count("0 22 * * *") == 1
    table.write_text(text.replace("# end ccl-search-nightly-nightly\n", ""))
    assert main(["nightly", "install", "nightly.yaml", "--scrontab"]) == 2


def test_cron_warns_about_another_zone_and_systemd_about_a_skipped_time(
    nightly_project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        write(start="02:30 Europe/Paris")
        assert main(["nightly", "install", "nightly.yaml", "--cron", "--dry-run"]) == 0
        assert "only cronie reads CRON_TZ" in capsys.readouterr().err
        assert main(["nightly", "install", "nightly.yaml", "--systemd", "--dry-run"]) == 0
        assert "skips 02:30 on 20" in capsys.readouterr().err
        write(start="02:30 UTC")
        assert main(["nightly", "install", "nightly.yaml", "--cron", "--dry-run"]) == 0
        assert capsys.readouterr().err == ""
    time.tzset()


def test_scrontab_warns_about_another_zone_and_a_missing_limit(
    nightly_project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(start="22:00 Europe/Paris", budget={"hours": 7})
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        assert main(["nightly", "install", "nightly.yaml", "--scrontab", "--dry-run"]) == 0
        first = capsys.readouterr()
        write(start="22:00 Etc/UTC")
        assert main(["nightly", "install", "nightly.yaml", "--scrontab", "--dry-run"]) == 0
        second = capsys.readouterr()
    time.tzset()
    assert "#SCRON --time=07:20:00\n" in first.out
    assert "the cluster's time zone" in first.err
    assert "--time" not in second.out
    assert second.err.count("warning: ") == 1
    assert "no time limit" in second.err


def test_installed_commands_quote_hostile_paths(tmp_path: Path) -> None:
    from cclsearch.nightly.clock import parse_moment
    from cclsearch.nightly.install import InstallPlan, quote_systemd, render_cron, render_systemd

    project = tmp_path / "a 'b\" $(touch owned) %h;x"
    project.mkdir()
    plan = InstallPlan("n", project / "nightly $HOME.yaml", project, parse_moment("6:05 UTC"))
    line = next(line for line in render_cron(plan).splitlines() if line.startswith("5 6"))
    command = line.removeprefix("5 6 * * * ").replace("\\%", "%").replace("exec ", "printf '%s\\n' ")
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[1:] == plan.command[1:]
    assert not list(tmp_path.rglob("owned"))
    assert quote_systemd('a"$b%c\\') == '"a\\"$$b%%c\\\\"'
    units = render_systemd(plan)
    assert "OnCalendar=*-*-* 06:05:00 UTC" in units["ccl-search-nightly-n.timer"]
    assert "%%h;x" in units["ccl-search-nightly-n.service"]
    odd = InstallPlan("n", tmp_path / "n.yaml", tmp_path / "back\\", parse_moment("6:05 UTC"))
    assert f"WorkingDirectory={tmp_path}/back\\/\n" in render_systemd(odd)["ccl-search-nightly-n.service"]


def test_systemd_itself_accepts_the_units(tmp_path: Path) -> None:
    from cclsearch.nightly.clock import parse_moment
    from cclsearch.nightly.install import InstallPlan, render_systemd

    project = tmp_path / "we ird %h $HOME 'q\"d"
    project.mkdir()
    probe = tmp_path / "probe.service"
    probe.write_text("[Service]\nExecStart=/bin/true\n")
    if (problems := verify_units(tmp_path, probe)) is None or problems:
        pytest.skip(f"systemd-analyze cannot verify units of a user: {problems}")
    units = render_systemd(InstallPlan("n", project / "n.yaml", project, parse_moment("6:05 Europe/Paris")))
    for name, text in units.items():
        (tmp_path / name).write_text(text)
    assert verify_units(tmp_path, *(tmp_path / name for name in units)) == ""


def verify_units(runtime: Path, *units: Path) -> str | None:
    """Complaints of `systemd-analyze`, empty if there are none; None if it is not installed."""
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(runtime)}
    command = ["systemd-analyze", "verify", "--user", *map(str, units)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    except OSError:
        return None
    return done.stderr if done.returncode == 0 or done.stderr else f"exit code {done.returncode}"


def test_systemd_units_are_written_to_the_users_folder(
    nightly_project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(nightly_project / "etc"))
    write(start="22:00 Europe/Paris")
    assert main(["nightly", "install", "nightly.yaml", "--systemd", "--dry-run"]) == 0
    assert not (nightly_project / "etc").exists()
    assert main(["nightly", "install", "nightly.yaml", "--systemd"]) == 0
    output = capsys.readouterr().out
    assert "loginctl enable-linger" in output
    assert "Persistent" not in output
    assert "TimeoutStopSec=1200" in output
    names = sorted(p.name for p in (nightly_project / "etc" / "systemd" / "user").iterdir())
    assert names == ["ccl-search-nightly-nightly.service", "ccl-search-nightly-nightly.timer"]


def mixed(job: Job) -> Ending:
    if job.trial == 2:
        return failed(FailureKind.CRASHED)
    return strange(job) if job.trial == 3 else ran(job, time_of(job))


def test_the_totals_of_a_night_are_the_sums_of_its_jobs(nightly_project: Path) -> None:
    DECIDE.append(mixed)
    jobs = [{**BASE["jobs"][0], "name": name, "seed": seed} for seed, name in enumerate("ab")]
    summary = night(jobs=jobs)
    for job in summary.jobs:
        assert job.trials == job.admitted + job.failed + job.refused + job.lost
        runs = load_run(Path("runs") / str(job.run)).state.trials
        assert job.admitted == sum(trial.loss is not None for trial in runs.values())
    for name, total in summary.spent:
        assert total == pytest.approx(sum(getattr(job.spent, name) for job in summary.jobs)), name
    assert summary.spent.hours > 0
    counts = [sum(getattr(job, name) for job in summary.jobs) for name in ("trials", "admitted", "failed", "refused")]
    assert counts == [12, 8, 2, 2]
    text = (Path("runs") / "nights").glob("**/summary.md")
    assert "12 trials: 8 admitted, 2 failed, 2 not admitted; 12 of the budget" in next(iter(text)).read_text()


def test_a_night_says_that_a_job_ended_because_its_trials_end_alike(
    nightly_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NightLauncher, "provenance", Provenance.MEASURED)
    DECIDE.append(lambda job: failed(FailureKind.CRASHED))
    job = night(code=1).jobs[0]
    assert job.trials == 3
    assert "the same error ended trials 1, 2 and 3" in job.ending
    job = night(jobs=[{**BASE["jobs"][0], "name": "kept", "keep_going": True}]).jobs[0]
    assert job.trials == 6
