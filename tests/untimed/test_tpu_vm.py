"""The `tpu-vm` launcher with real sshd processes, over plain SSH and through a fake gcloud."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import slices
import workers
import yaml
from command_line import run_command
from paths import TESTS
from waiting import wait_until

from cclsearch.core.errors import UserError
from cclsearch.core.trust import trust_project
from cclsearch.core.values import BootMoment
from cclsearch.launch.base import Handle, JobState, write_model
from cclsearch.launch.profile import load_profile, make_launcher, profile_from_mapping
from cclsearch.launch.tpu_vm import worker
from cclsearch.launch.tpu_vm.cloud_source import make_worker_source
from cclsearch.launch.tpu_vm.job import TpuJobRecord, TpuStartRecord, attempt_folder
from cclsearch.launch.tpu_vm.settings import TpuSettings
from cclsearch.launch.tpu_vm.workers import WorkersPending

BUDGET = ["--workload", "tiny-jax", "--sampler", "random"]


@pytest.fixture
def sshd() -> None:
    """Skip if no sshd can be started; fail instead if CCL_REQUIRE_SSHD is 1."""
    why = workers.find_sshd_problem()
    if why is not None and os.environ.get("CCL_REQUIRE_SSHD") == "1":
        pytest.fail(f"CCL_REQUIRE_SSHD=1, but {why}")
    if why is not None:
        pytest.skip(why)


@pytest.fixture
def quick(project: Path) -> dict[str, Any]:
    """Settings of a profile that runs the quick script in the project, which logs its starts to `starts`."""
    folder = project / "launchers"
    folder.mkdir()
    for name in ("quick.py", "quick.framework.yaml"):
        shutil.copyfile(TESTS / "tpu" / name, folder / name)
    environment = {"QUICK_STARTS": str(project / "starts"), "QUICK_ODD": "a 'b' \"c\" $HOME `id` \\ ünï"}
    return {"framework": "quick", "hardware": {"accelerators_per_node": 2}, "environment": environment}


def call(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run_command(*words, cwd=project)


def search(project: Path, profile: Path, *words: str, budget: int = 1) -> subprocess.CompletedProcess[str]:
    return call(project, "run", *BUDGET, "--budget", str(budget), "--launcher", str(profile), "--name", "r1", *words)


@contextmanager
def begun(project: Path, profile: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A search of one trial in its own process, which is killed at the end."""
    words = ["run", *BUDGET, "--budget", "1", "--name", "r1", "--launcher", str(profile)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-m", "cclsearch", *words], cwd=project, **quiet) as running:
        try:
            yield running
        finally:
            running.kill()


def events(project: Path, kind: str) -> list[dict[str, Any]]:
    lines = (project / "runs" / "r1" / "ledger.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def starts(project: Path) -> Counter[tuple[str, str]]:
    """Count how often each process of each job was started."""
    lines = (project / "starts").read_text().splitlines() if (project / "starts").exists() else []
    return Counter(tuple(line.split()[:2]) for line in lines)  # type: ignore[misc]


def make_source(cloud: slices.Cloud, run_dir: Path, **changes: Any) -> Any:
    """Return the worker source of a search, as a new process would make it."""
    data = {**yaml.safe_load(cloud.profile.read_text()), **changes}
    profile = profile_from_mapping(data, name="slice").model_copy(update={"run_dir": run_dir})
    return make_worker_source(profile.read_settings(TpuSettings), run_dir)


def test_resource_is_deleted_by_name_if_listing_fails_and_listing_is_retried(sshd, tmp_path):
    unavailable = "UNAVAILABLE: The service is currently unavailable"
    with slices.open_cloud(tmp_path / "cloud") as cloud:
        source = make_source(cloud, tmp_path / "run")
        source.request("r1")
        cloud.set_faults(list=[unavailable])
        source.release("r1")
        assert cloud.resources() == {}
        assert source.recorded_run() is None
        source.request("r1")
        cloud.set_faults(list=[unavailable] * 99)
        impatient = make_source(cloud, tmp_path / "run", delete_patience_s=0.1)
        with pytest.raises(UserError, match=r"ccl-search clean r1"):
            impatient.release("r1")
        assert cloud.resources() == {}
        assert impatient.recorded_run() == "r1"


def test_resource_is_found_after_gclouds_default_project_changed(sshd, tmp_path):
    with slices.open_cloud(tmp_path / "cloud") as cloud:
        make_source(cloud, tmp_path / "run", project=None).request("r1")
        cloud.set_default_project("other")
        later = make_source(cloud, tmp_path / "run", project=None)
        assert isinstance(later.find_workers("r1"), WorkersPending)
        assert [item.name for item in later.leftovers("r1")] == list(cloud.resources())
        existing = {"project": None, "queued_resource": None, "tpu": next(iter(cloud.resources()))}
        cloud.set_default_project("test")
        make_source(cloud, tmp_path / "second", **existing).request("r2")
        cloud.set_default_project("other")
        assert isinstance(make_source(cloud, tmp_path / "second", **existing).find_workers("r2"), WorkersPending)
        later.release("r1", thorough=True)
        assert cloud.resources() == {}
        asked = [words for words in cloud.calls() if words[0] == "compute"]
        assert all({"--project=test", "--zone=us-central1-a"} <= set(words) for words in asked)


def test_two_runs_with_one_name_do_not_touch_each_others_resource(sshd, tmp_path):
    with slices.open_cloud(tmp_path / "cloud") as cloud:
        sources = [make_source(cloud, tmp_path / name) for name in ("mine", "yours")]
        for source in sources:
            source.request("foo")
        assert cloud.num_created() == 2
        assert [len(source.leftovers("foo")) for source in sources] == [1, 1]
        assert make_source(cloud, tmp_path / "third").leftovers("foo") == []
        sources[0].release("foo", thorough=True)
        assert list(cloud.resources()) == [item.name for item in sources[1].leftovers("foo")]


LOGIN_EXPIRED = (
    "There was a problem refreshing your current auth tokens: Reauthentication failed. cannot prompt during"
    " non-interactive execution."
)


def test_search_ends_at_once_when_the_login_expires_and_adopts_jobs_later(sshd, tmp_path):
    with slices.open_cloud(tmp_path / "cloud") as cloud:
        source = make_source(cloud, tmp_path / "run")
        source.request("r1")
        cloud.set_faults(login=LOGIN_EXPIRED)
        for ask in (source.find_workers, source.request, source.release):
            with pytest.raises(UserError, match="Reauthentication failed"):
                ask("r1")
        assert source.recorded_run() == "r1"
        cloud.set_faults(describe=["There was a problem refreshing your current auth tokens: connection timed out"])
        found = source.find_workers("r1")
        assert isinstance(found, WorkersPending)
        assert found.unanswered


@pytest.mark.parametrize(("started_s_ago", "ends"), [(0.0, False), (500.0, True)])
def test_trial_fails_after_its_time_limit_if_the_cloud_does_not_answer(sshd, tmp_path, started_s_ago, ends):
    trust_project(tmp_path)
    run, trial = tmp_path / "run", tmp_path / "run" / "trials" / "0001"
    began = BootMoment(wall_s=time.time() - started_s_ago, boot_id="another", boot_s=0.0)
    with slices.open_cloud(tmp_path / "cloud") as cloud:
        make_source(cloud, run).request("r1")
        cloud.set_faults(describe=["UNAVAILABLE: The service is currently unavailable"] * 2)
        common = {"run_id": "r1", "trial": 1, "attempt": 1, "name": "r1-t0001-a1", "trial_dir": trial}
        record = TpuJobRecord(**common, num_processes=2, timeout_s=10)
        write_model(attempt_folder(trial, 1) / "job.json", record)
        write_model(attempt_folder(trial, 1) / "begun.json", TpuStartRecord(place="x", moment=began, coordinator=""))
        launcher = make_launcher(load_profile(str(cloud.profile)), framework="jax-cpu", run_dir=run)
        handle = Handle(launcher="tpu-vm", job_name=record.name, job_id=record.name, trial_dir=trial)
        status = launcher.poll([handle])[0]
        launcher.close()
        assert (status.state is JobState.DONE) == ends
        assert (status.failure is not None and "UNAVAILABLE" in status.failure.message) == ends
        assert bool(cloud.resources()) != ends


def test_only_earlier_attempts_of_the_run_are_ended_on_a_worker(tmp_path):
    job = {"run_id": "r1", "token": "ab12"}
    own, new = tmp_path / "r1-t0001-a1-ab12", tmp_path / "r1-t0001-a2-ab12"
    others = [tmp_path / name for name in ("r1-two-t0001-a1-ab12", "r1-t0001-a1", "r1-t0001-a1-cd34")]
    running = {
        folder: subprocess.Popen(["sleep", "600"], env={"CCL_TRIAL_DIR": f"{folder}/w0/trial", "PATH": os.defpath})
        for folder in (own, new, *others)
    }
    try:
        pattern = worker.attempts_pattern(str(new), job)
        wait_until(lambda: worker.find_trial_processes(pattern, f"{new}/") == [running[own].pid])
        worker.kill_trial_processes(pattern, f"{new}/")
        assert running.pop(own).wait(timeout=60)
        assert all(process.poll() is None for process in running.values())
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def test_trial_runs_on_every_host_and_leaves_nothing_there(sshd, project, quick, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "not-to-be-passed-on")
    with slices.open_hosts(project / "slice", 2, **quick) as hosts:
        done = search(project, hosts.profile)
        trial = project / "runs" / "r1" / "trials" / "0001"
        out = (trial / "stdout.log").read_text()
        for rank in (0, 1):
            assert f"[rank{rank}]: odd: {quick['environment']['QUICK_ODD']}" in out
            assert f"[rank{rank}]: secrets: []" in out
            assert f"[rank{rank}]: to stderr" in (trial / "stderr.log").read_text()
            assert (trial / "trace" / f"note {rank}.txt").read_text() == "as it is"
        assert json.loads((trial / "result.json").read_text())["world_size"] == 4
        assert starts(project) == {("r1-t0001-a1", "0"): 1, ("r1-t0001-a1", "1"): 1}, done.stderr
        assert [list((w.home / ".ccl-search").iterdir()) for w in hosts.workers] == [[], []]
        assert not any(worker.processes() for worker in hosts.workers)


def test_failure_of_a_rank_is_reported_and_an_existing_slice_is_kept(sshd, project, quick):
    quick["environment"]["QUICK_FAIL"] = "1"
    with slices.open_cloud(project / "cloud", **quick) as cloud:
        cloud.give_slice("mine", "v5litepod-8")
        search(project, cloud.profile)
        assert cloud.resources()["mine"]["node"] == "READY"
        assert not any(machine.processes() for machine in cloud.machines())
    failure = events(project, "trial_finished")[0]["outcome"]["failure"]
    assert failure["kind"] == "out_of_memory"
    assert "RESOURCE_EXHAUSTED" in failure["message"]


def test_slice_with_too_few_workers_ends_the_search_and_is_deleted(sshd, project, quick):
    with slices.open_cloud(project / "cloud", accelerator_type="v5litepod-4", **quick) as cloud:
        done = search(project, cloud.profile)
        assert done.returncode == 2
        assert "needs 2 workers, but there are 1" in done.stderr.strip().splitlines()[-1]
        assert (cloud.resources(), cloud.num_created()) == ({}, 1)


def test_trial_is_retried_when_a_lost_worker_is_back(sshd, project, quick):
    quick["environment"]["QUICK_SECONDS"] = "600"
    with slices.open_hosts(project / "slice", 2, **quick) as hosts:
        with begun(project, hosts.profile) as running:
            wait_until(lambda: len(starts(project)) == 2)
            hosts.workers[1].kill()
            wait_until(lambda: events(project, "trial_retried"))
            hosts.workers[1].start()
            running.wait(timeout=180)
        assert not any(worker.processes() for worker in hosts.workers)
    failure = events(project, "trial_retried")[0]["failure"]
    assert failure["kind"] == "node_failed"
    assert "worker 1" in failure["message"]
    assert events(project, "trial_finished")[0]["outcome"]["failure"] is None
    assert max(starts(project).values()) == 1


def test_preempted_slice_is_replaced_and_deleted(sshd, project, quick):
    quick["environment"]["QUICK_SECONDS"] = "600"
    with slices.open_cloud(project / "cloud", **quick) as cloud:
        cloud.set_faults(delete=["INTERNAL: an internal error has occurred"])
        with begun(project, cloud.profile) as running:
            wait_until(lambda: len(starts(project)) == 2)
            cloud.preempt()
            running.wait(timeout=180)
        assert events(project, "trial_retried")[0]["failure"]["kind"] == "preempted"
        assert events(project, "trial_finished")[0]["outcome"]["failure"] is None
        assert cloud.num_created() == 2
        assert cloud.resources() == {}
        created = [words for words in cloud.calls() if words[2:4] == ["queued-resources", "create"]]
        assert all(any(word.startswith("--labels=ccl-run=ccl-r1-") for word in words) for words in created)
        assert max(starts(project).values()) == 1


def test_quota_error_ends_the_search_and_missing_capacity_is_retried(sshd, project, quick):
    with slices.open_cloud(project / "cloud", **quick) as cloud:
        quota = "RESOURCE_EXHAUSTED: Quota limit 'TPUV5sLitepodPerProjectPerZone' has been exceeded. Limit: 0"
        cloud.set_faults(create=[quota])
        done = search(project, cloud.profile)
        assert done.returncode == 2
        assert "Quota limit" in done.stderr.strip().splitlines()[-1]
        assert cloud.resources() == {}
        cloud.set_faults(stock_out=["There is no more capacity in the zone"])
        done = call(project, "resume", "r1")
        assert "no more capacity" in events(project, "trial_retried")[0]["failure"]["message"]
        assert len(events(project, "trial_finished")) == 1, done.stderr
        assert cloud.resources() == {}


@pytest.mark.parametrize("moment", ["create", "running"])
def test_killed_search_is_resumed_without_starting_anything_twice(sshd, project, quick, moment):
    quick["environment"]["QUICK_SECONDS"] = "4"
    with slices.open_cloud(project / "cloud", **quick) as cloud:
        with begun(project, cloud.profile):
            wait_until(lambda: cloud.resources() if moment == "create" else len(starts(project)) == 2)
        left = json.loads(call(project, "clean", "r1", "--dry-run", "--json").stdout)
        assert "queued resource" in {item["kind"] for item in left}
        done = call(project, "resume", "r1")
        assert len(events(project, "trial_finished")) == 1, done.stderr
        assert (cloud.resources(), cloud.num_created()) == ({}, 1)
        assert starts(project) == {("r1-t0001-a1", "0"): 1, ("r1-t0001-a1", "1"): 1}
        assert "has no unfinished job and no resource" in call(project, "clean", "r1").stdout


def test_clean_removes_job_and_resource_of_a_killed_search(sshd, project, quick):
    quick["environment"]["QUICK_SECONDS"] = "600"
    with slices.open_cloud(project / "cloud", **quick) as cloud:
        with begun(project, cloud.profile):
            wait_until(lambda: len(starts(project)) == 2)
        done = call(project, "clean", "r1")
        assert "2 things removed" in done.stdout, done.stderr
        assert cloud.resources() == {}
        assert not any(machine.processes() for machine in cloud.machines())


def test_tiny_jax_on_two_workers_is_admitted_with_every_rank_traced(sshd, project):
    pytest.importorskip("jax")
    settings = {"hardware": {"accelerators_per_node": 2}, "environment": {"OMP_NUM_THREADS": 1}}
    with slices.open_cloud(project / "cloud", **settings) as cloud:
        knobs = ("tp=1", "dp=4", "ep=1", "micro_batch_size=4", "activation_checkpointing=none")
        done = search(project, cloud.profile, *(word for knob in knobs for word in ("--knob", knob)))
        assert cloud.resources() == {}
    outcome = events(project, "trial_finished")[0]["outcome"]
    assert outcome["failure"] is None, done.stderr
    verdicts = {verdict["rule"]: verdict for verdict in outcome["admission"]["verdicts"]}
    assert verdicts["ranks_traced"]["ok"], verdicts
    assert verdicts["world_size"]["ok"]
    assert verdicts["work"]["ok"]


def test_links_between_devices_of_two_workers_are_measured_with_xla(sshd, project):
    pytest.importorskip("jax")
    hardware = {"accelerators_per_node": 1, "num_accelerators": 2}
    with slices.open_cloud(project / "cloud", framework="jax-cpu", hardware=hardware) as cloud:
        done = call(project, "links", "measure", "--launcher", str(cloud.profile), "--json")
        assert cloud.resources() == {}
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert len(set(measured["endpoints"])) == 2
    assert "xla cpu" in measured["source"]
    for i, j in ((0, 1), (1, 0)):
        assert 0.01 < measured["gbps"][i][j] < 1000, "of a socket of this machine"
        assert 1 < measured["latency_us"][i][j] < 1e5
    (small, small_s, _), *_, (large, large_s, _) = measured["all_reduce"]
    assert large == 4096 * small
    assert large_s > small_s > 0


@pytest.mark.parametrize("profile", ["tpu-v5e", "tpu-v5p", "tpu-v6e"])
def test_shipped_profile_without_workers_is_refused_in_one_line(project, profile):
    done = call(project, "run", "--workload", "tiny-jax", "--launcher", profile, "--dry-run")
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert "`hosts`" in done.stderr
    assert "`queued_resource`" in done.stderr
