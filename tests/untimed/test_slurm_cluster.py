"""The Slurm launcher on a real Slurm: every end of a job, and kills of the search at every step of a submission."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from paths import TESTS
from slurm.cluster import Cluster
from slurm.trials import make_job
from waiting import wait_until

from cclsearch.core.errors import UserError
from cclsearch.core.values import FailureKind
from cclsearch.launch.base import Handle, JobState, JobStatus
from cclsearch.launch.slurm.allocation import AllocationLauncher
from cclsearch.launch.slurm.job_files import SUBMITTED_FILE, RunScript
from cclsearch.launch.slurm.launcher import SlurmLauncher
from cclsearch.launch.slurm.settings import SlurmSettings
from cclsearch.space.promises import RequiredVariable

SCRIPT = TESTS / "slurm" / "trial_script.py"
PATIENCE_S = 120.0


@dataclass
class Site:
    """The cluster, and a folder for runs."""

    cluster: Cluster
    folder: Path
    launchers: list[SlurmLauncher] = field(default_factory=list)

    def launcher(self, name: str, **settings: Any) -> SlurmLauncher:
        fields = {"poll_s": 0.5, "grace_s": 3, "cpu_only": True, "python": sys.executable, **settings}
        kind = AllocationLauncher if "in_allocation" in fields else SlurmLauncher
        return kind(
            SlurmSettings.model_validate(fields),
            RunScript(SCRIPT, "process", {"PUBLIC": "1"}),
            run_dir=self.folder / name,
        )

    def job(self, run: str, trial: int, **arguments: Any) -> Any:
        return make_job(self.folder / run, trial, **arguments)


@pytest.fixture(scope="module")
def site(cluster: Cluster) -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="ccl-sl-runs-") as folder:
        yield Site(cluster, Path(folder))


@pytest.fixture(scope="module")
def slow(site: Site) -> tuple[SlurmLauncher, list[Handle]]:
    """A job on node1 that Slurm ends at its limit of one minute while other tests run; not the node program's limit."""
    launcher = site.launcher("slow", nodelist="node1")
    handles = launcher.submit([site.job("slow", 1, ranks=1, behaviour="hang", timeout_s=900)])
    site.cluster.ask("scontrol", "update", f"jobid={handles[0].job_id}", "timelimit=1")
    return launcher, handles


def wait_for(launcher: SlurmLauncher, handles: Sequence[Handle], state: JobState = JobState.DONE) -> list[JobStatus]:
    """Return the statuses once every job is in that state; fail the test on timeout."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        statuses = launcher.poll(handles)
        if all(status.state is state for status in statuses):
            return statuses
        time.sleep(0.2)
    raise AssertionError(f"not {state}: {statuses}")


def kind_of(status: JobStatus) -> FailureKind | None:
    return status.failure.kind if status.failure else None


def listed(cluster: Cluster) -> list[str]:
    """Return the ids of unfinished jobs."""
    return sorted(cluster.ask("squeue", "--noheader", "--array", "--format=%i").split())


def test_each_kind_of_end_is_recognized(site, slow):
    launcher = site.launcher("kinds")
    wanted = {
        "ok": None,
        "crash": FailureKind.CRASHED,
        "quiet": FailureKind.CRASHED,
        "oom": FailureKind.OUT_OF_MEMORY,
        "hang": FailureKind.TIMEOUT,
    }
    os.environ["A_SECRET_TOKEN"] = "do-not-pass-on"
    try:
        handles = launcher.submit(
            [
                site.job("kinds", n, behaviour=word, timeout_s=8 if word == "hang" else 60)
                for n, word in enumerate(wanted, start=1)
            ]
            + [site.job("kinds", 6, ranks=7, per_node=2, behaviour="ok", seconds=0.5, timeout_s=60)]
        )
    finally:
        del os.environ["A_SECRET_TOKEN"]
    statuses = wait_for(launcher, handles)
    assert [kind_of(status) for status in statuses] == [*wanted.values(), None]
    assert statuses[1].failure.message == "RuntimeError: the loss is not a number"
    assert "8 s" in statuses[4].failure.message
    log = (handles[5].trial_dir / "stdout.log").read_text()
    assert sorted(line.split()[1] for line in log.splitlines()) == ["node1", "node2", "node3", "node4"]
    seen = json.loads((handles[5].trial_dir / "seen-3.json").read_text())
    assert "A_SECRET_TOKEN" not in seen
    assert (seen["PUBLIC"], seen["CCL_BEHAVIOUR"], seen["CCL_NUM_NODES"]) == ("1", "ok", "4")
    assert (seen["CCL_PROCESS_ID"], seen["CCL_NUM_PROCESSES"], seen["CCL_JOB_NAME"]) == ("3", "4", handles[5].job_name)
    assert seen["CCL_COORDINATOR"] == f"{seen['MASTER_ADDR']}:{seen['MASTER_PORT']}"


def test_someone_elses_cancel_is_not_the_trials_fault(site, slow):
    launcher = site.launcher("cancel")
    handles = launcher.submit(
        [site.job("cancel", n, behaviour=b) for n, b in ((1, "failed"), (2, "hang"), (3, "hang"))]
    )
    wait_for(launcher, handles, JobState.RUNNING)
    for handle in handles[:2]:
        wait_until((handle.trial_dir / "seen-0.json").exists)
    site.cluster.ask("scancel", handles[0].job_id, handles[1].job_id)
    statuses = wait_for(launcher, handles[:2])
    assert [kind_of(status) for status in statuses] == [FailureKind.CANCELLED] * 2
    assert all("not by the search" in status.failure.message for status in statuses if status.failure)
    launcher.cancel(handles[2:])
    assert handles[2].job_id not in listed(site.cluster)
    assert "by the search" in str(wait_for(launcher, handles[2:])[0].failure)


def test_cancelling_leaves_no_process_of_the_trial(site, slow):
    """Cancelled right after the start, while running, and with a script that ignores SIGTERM."""
    launcher = site.launcher("gone")
    folder = site.folder / "gone"
    behaviours = ("hang", "hang", "stubborn")
    for trial, behaviour in enumerate(behaviours, start=1):
        handles = launcher.submit([site.job("gone", trial, ranks=2, behaviour=behaviour)])
        wait_for(launcher, handles, JobState.RUNNING)
        if trial > 1:
            wait_until((handles[0].trial_dir / "seen-1.json").exists)
            assert find_processes(folder)
        launcher.cancel(handles)
        assert kind_of(wait_for(launcher, handles)[0]) is FailureKind.CANCELLED
    wait_until(lambda: find_processes(folder) == [])


def find_processes(folder: Path) -> list[str]:
    """Return the commands of the processes of that folder, found by their arguments or environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
        except OSError:
            continue
        if int(process.name) != os.getpid() and str(folder).encode() in command + environment:
            found.append(command.replace(b"\0", b" ").decode(errors="replace"))
    return found


def test_a_kill_between_submit_and_record_does_not_submit_twice(site, slow):
    jobs = [site.job("killed", n, behaviour="hang") for n in (1, 2)]
    handles = site.launcher("killed").submit(jobs)
    for path in (site.folder / "killed").rglob(SUBMITTED_FILE):
        path.unlink()  # as if the search had been killed while sbatch answered
    before = listed(site.cluster)
    again = site.launcher("killed")
    assert again.find("killed") == handles
    assert site.launcher("killed").submit(jobs) == handles
    assert listed(site.cluster) == before
    assert site.launcher("other-run").find("killed") == []
    again.cancel(handles)
    assert site.launcher("killed").find("killed") == handles  # ended, but still must not be submitted again


def test_a_second_job_for_the_same_trial_does_nothing(site, slow):
    launcher = site.launcher("twice")
    handles = launcher.submit([site.job("twice", 1, behaviour="hang", ranks=1)])
    wait_until((handles[0].trial_dir / "slurm-a1" / "started.json").exists)
    script = next(handles[0].trial_dir.rglob("job.sbatch"))
    double = site.cluster.ask("sbatch", "--parsable", "--wait", str(script)).strip()
    assert "runs this trial already" in (script.parent / f"slurm-{double}.log").read_text()
    assert launcher.poll(handles)[0].state is JobState.RUNNING
    launcher.cancel(handles)


def test_a_job_that_slurm_starts_again_does_nothing_and_is_cancelled(site, slow):
    """An administrator forces a requeue: the job writes nothing where it is read, and ends before its successor."""
    launcher = site.launcher("again")
    [handle] = launcher.submit([site.job("again", 1, behaviour="hang", ranks=1)])
    wait_until((handle.trial_dir / "seen-0.json").exists)
    wait_for(launcher, [handle], JobState.RUNNING)  # listed once: its submit time is recorded
    site.cluster.ask("scontrol", "update", f"jobid={handle.job_id}", "requeue=1")
    site.cluster.ask("scontrol", "requeue", handle.job_id)
    wait_until(lambda: handle.job_id not in listed(site.cluster))  # it was started again, and ended by itself
    logs = "".join(path.read_text() for path in handle.trial_dir.rglob(f"slurm-{handle.job_id}.log"))
    assert "it does nothing now" in logs
    status = wait_for(launcher, [handle])[0]
    assert status.failure.kind.is_infrastructure

    [handle] = launcher.submit([site.job("again", 2, behaviour="hang", ranks=1)])
    wait_until((handle.trial_dir / "seen-0.json").exists)
    wait_for(launcher, [handle], JobState.RUNNING)
    site.cluster.ask("scontrol", "update", f"jobid={handle.job_id}", "requeue=1")
    site.cluster.ask("scontrol", "requeue", handle.job_id)
    launcher.cancel([handle])  # what the search does before it repeats the trial
    assert handle.job_id not in listed(site.cluster)


def test_somebody_elses_job_with_a_recorded_number_is_left_alone(site, slow):
    """Slurm was reset, and its numbers came again: `clean` of an old search must not cancel what has them now."""
    old = site.launcher("reset")
    [handle] = old.submit([site.job("reset", 1, behaviour="hang", ranks=1)])
    wait_for(old, [handle], JobState.RUNNING)
    old.cancel([handle])
    thesis = site.cluster.ask("sbatch", "--parsable", "-J", "my-thesis", "--chdir=/tmp", "--wrap", "sleep 300").strip()
    for path in handle.trial_dir.rglob("*.json"):
        text = path.read_text()
        if path.name in ("submitted.json", "seen.json", "started.json"):
            path.write_text(json.dumps({**json.loads(text), "job_id": thesis}))
    resumed = site.launcher("reset")
    handles = resumed.find("reset")
    assert [found.job_id for found in handles] == [thesis]
    assert wait_for(resumed, handles)[0].failure is not None
    resumed.cancel(handles)
    assert thesis in listed(site.cluster)
    site.cluster.ask("scancel", thesis)


def test_no_trial_fails_while_the_controller_does_not_answer(site, slow):
    launcher = site.launcher("away")
    handles = launcher.submit(
        [site.job("away", 1, behaviour="ok", seconds=4, ranks=1), site.job("away", 2, behaviour="hang", ranks=1)]
    )
    wait_until((handles[0].trial_dir / "seen-0.json").exists)
    wait_until((handles[1].trial_dir / "seen-0.json").exists)
    os.kill(site.cluster.pid("slurmctld"), signal.SIGTERM)
    try:
        wait_for(launcher, handles[:1])  # found by its result file
        statuses = launcher.poll(handles)
        assert [kind_of(status) for status in statuses] == [None, None]
        assert [status.state for status in statuses] == [JobState.DONE, JobState.RUNNING]
    finally:
        site.cluster.up()
    assert wait_for(launcher, handles[1:], JobState.RUNNING)
    launcher.cancel(handles)


def test_preemption_and_node_loss_are_infrastructure_failures(site, slow):
    launcher = site.launcher("lost")
    jobs = [site.job("lost", n, ranks=2, behaviour="failed") for n in (1, 2)]
    on_34 = site.launcher("lost", nodelist="node[3-4]").submit(jobs[:1])
    on_2 = site.launcher("lost", nodelist="node2").submit([site.job("lost", 3, ranks=1, behaviour="hang")])
    for handle in [*on_34, *on_2]:
        wait_until((handle.trial_dir / "seen-0.json").exists)
    try:
        site.cluster.fail_node("node4")
        urgent = site.cluster.ask(
            *("sbatch", "--parsable", "-p", "urgent", "--exclusive", "-w", "node2", "--wrap", "sleep 1")
        ).strip()
        statuses = wait_for(launcher, [*on_34, *on_2])
    finally:
        site.cluster.up()
    assert urgent.isdigit()
    assert [kind_of(status) for status in statuses] == [FailureKind.NODE_FAILED, FailureKind.PREEMPTED]
    assert listed(site.cluster).count(on_2[0].job_id) == 0  # no automatic requeue


def test_a_job_that_can_never_start_fails_at_once(site, slow):
    launcher = site.launcher("held")
    blocker = site.cluster.ask("sbatch", "--parsable", "--exclusive", "-w", "node2", "--wrap", "sleep 300").strip()
    handles = site.launcher("held", nodelist="node2").submit([site.job("held", 1, ranks=1, behaviour="ok")])
    site.cluster.ask("scontrol", "hold", handles[0].job_id)
    status = wait_for(launcher, handles)[0]
    assert kind_of(status) is FailureKind.LAUNCHER
    assert "JobHeldAdmin" in str(status.failure) or "JobHeldUser" in str(status.failure)
    site.cluster.ask("scancel", blocker)
    assert handles[0].job_id not in listed(site.cluster)
    with pytest.raises(UserError, match=r"(?i)invalid partition.*sinfo"):
        site.launcher("held", partition="nowhere").submit([site.job("held", 2, ranks=1)])
    with pytest.raises(UserError, match="Node count"):
        site.launcher("held").submit([site.job("held", 3, ranks=9, per_node=1)])


def test_a_node_whose_hardware_failed_is_used_if_the_others_are_too_few(site):
    blamed = site.folder / "few" / "trials" / "0007" / "slurm-a1" / "bad_node.json"
    blamed.parent.mkdir(parents=True)
    blamed.write_text('{"node": "node2"}')
    for trial, settings, ranks in ((1, {}, 4), (2, {"nodelist": "node2"}, 1)):
        launcher = site.launcher("few", **settings)
        handles = launcher.submit([site.job("few", trial, ranks=ranks, per_node=1, behaviour="hang")])
        assert handles[0].job_id in listed(site.cluster)
        launcher.cancel(handles)


def test_steps_of_a_held_allocation(site, slow):
    held = site.cluster.ask("sbatch", "--parsable", "-N2", "-w", "node[3-4]", "-t", "10", "--wrap", "sleep 300").strip()
    wait_until(lambda: site.cluster.ask("squeue", "-h", "-j", held, "-o", "%T").strip() == "RUNNING")
    launcher = site.launcher("steps", in_allocation=held)
    assert launcher.max_parallel == 2
    jobs = [
        site.job("steps", 1, ranks=2, behaviour="ok"),
        site.job("steps", 2, ranks=1, behaviour="crash"),
        site.job("steps", 3, ranks=1, behaviour="ok", timeout_s=3600),
    ]
    statuses = wait_for(launcher, launcher.submit(jobs))
    assert [kind_of(s) for s in statuses] == [None, FailureKind.CRASHED, FailureKind.ALLOCATION_ENDED]
    assert "s left" in str(statuses[2].failure)
    with pytest.raises(UserError, match="3 nodes"):
        launcher.submit([site.job("steps", 4, ranks=3)])
    handles = launcher.submit([site.job("steps", n, ranks=1, behaviour="hang") for n in (5, 6)])
    wait_for(launcher, handles, JobState.RUNNING)
    for handle in handles:
        wait_until((handle.trial_dir / "seen-0.json").exists)
    resumed = site.launcher("steps", in_allocation=held)
    assert {handle.job_name for handle in resumed.find("steps")} >= {handle.job_name for handle in handles}
    resumed.cancel(handles[:1])
    site.cluster.ask("scancel", held)
    ends = wait_for(resumed, handles)
    assert [kind_of(s) for s in ends] == [FailureKind.CANCELLED, FailureKind.ALLOCATION_ENDED]


def test_a_profile_is_checked_against_the_cluster(site, slow):
    launcher = site.launcher("check")
    launcher.ranks_per_node = 2
    launcher.run_script = replace(launcher.run_script, needs=(RequiredVariable(env="PUBLIC", what="a mark"),))
    checks = {check.name: check for check in launcher.check()}
    assert all(check.ok for check in checks.values()), checks
    assert list(checks)[-5:] == ["shared folder", "run script", "torch", "gloo", "PUBLIC"]
    assert checks["PUBLIC"].detail == "on the compute node: '1' is a mark"
    assert "over 2 ranks" in checks["gloo"].detail
    failed = site.launcher("check", python="/nowhere/python").check()[-1]
    assert not failed.ok
    assert "python" in failed.remedy
    assert not site.launcher("check", account="x", partition="nowhere").check()[-1].ok


def test_slurms_own_time_limit_is_a_timeout(slow):
    status = wait_for(*slow)[0]
    assert kind_of(status) is FailureKind.TIMEOUT


@pytest.fixture
def enforced(cluster: Cluster) -> Iterator[None]:
    """Enforce accounts and limits."""
    cluster.up("--enforce")
    yield
    cluster.up()


def test_limits_are_waited_for_and_unknown_accounts_are_refused(site, enforced):
    launcher = site.launcher("limits", account="ccl", qos="small")
    assert launcher.max_parallel == 4
    handles = launcher.submit([site.job("limits", n, ranks=1, behaviour="ok", seconds=0.5) for n in range(1, 8)])
    assert [bool(handle.job_id) for handle in handles].count(True) <= 4
    waiting = launcher.poll(handles)[-1]
    assert waiting.state is JobState.QUEUED
    assert "QOSMaxSubmitJobPerUserLimit" in waiting.note
    # jobs that a killed search had not submitted yet are taken over too
    resumed = site.launcher("limits", account="ccl", qos="small")
    assert [kind_of(status) for status in wait_for(resumed, handles)] == [None] * 7
    with pytest.raises(UserError, match=r"Invalid account.*sacctmgr"):
        site.launcher("limits", account="nobody").submit([site.job("limits", 8, ranks=1)])
