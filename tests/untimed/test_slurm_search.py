"""Searches and nights on a real Slurm that are killed: nothing is submitted twice, lost or left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from command_line import run_command
from slurm.cluster import Cluster
from slurm.searches import COMMAND, QUICK, kill_and_resume, start, wait_until_idle
from waiting import wait_until

from cclsearch.core.trust import confirm


def test_a_repeatedly_killed_search_loses_and_repeats_nothing(cluster):
    with tempfile.TemporaryDirectory(prefix="ccl-sl-") as folder:
        runs = Path(folder) / "runs"
        runs.mkdir()
        tally = kill_and_resume(runs, kills=4, budget=10, parallel=4, seed=7, ask=cluster.ask, longest_s=3.0)
        assert tally.kills >= 1  # on a fast machine the search may end before all four
        assert tally.finished == 10
        assert (tally.finished_twice, tally.doubled, tally.lost, tally.alive) == ([], [], [], [])
        _leave_jobs_and_clean(cluster, runs)


def test_links_between_ranks_of_a_slurm_job_are_measured(cluster, project):
    hardware = "{num_accelerators: 2, accelerators_per_node: 1}"
    profile = project / "launchers" / "cluster.yaml"
    profile.parent.mkdir()
    profile.write_text(
        f"launcher: slurm\ncpu_only: true\npoll_s: 0.5\npython: {sys.executable}\nhardware: {hardware}\n"
        "environment: {OMP_NUM_THREADS: 1, GLOO_SOCKET_IFNAME: lo}\n"
    )
    done = run_command("links", "measure", "--launcher", str(profile), "--json", cwd=project)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert len(measured["endpoints"]) == len(set(measured["nodes"])) == 2, "one rank on each of two nodes"
    assert min(measured["gbps"][0][1], measured["gbps"][1][0]) > 0.01
    assert (profile.parent / "cluster.links.csv").read_text().startswith("#")


FAULTY = """
import os, sys
ecc = "terminate called after throwing an instance of 'c10::Error'\\n  what():  CUDA error: uncorrectable ECC error"
print(ecc if "attempts/1" in os.environ["CCL_TRIAL_DIR"] else "ValueError: odd heads", file=sys.stderr)
sys.exit(1)
"""


def test_a_trial_whose_hardware_fails_is_repeated_on_another_node_and_says_why(cluster, project):
    launchers = project / "launchers"
    launchers.mkdir()
    (launchers / "faulty.py").write_text(FAULTY)
    knob = "{name: micro_batch_size, choices: [1]}"
    (launchers / "faulty.framework.yaml").write_text(f"script: faulty.py\nrunner: process\nknobs: [{knob}]\n")
    (launchers / "four.yaml").write_text("launcher: slurm\ncpu_only: true\npoll_s: 0.5\ngrace_s: 1\n")
    words = ["--framework", "faulty", "--set", "total_count=1", "--budget", "1", "--name", "r", "--keep-going"]
    done = run_command("run", "-w", "tiny", "-l", "four", *words, cwd=project)
    assert done.returncode == 1, done.stderr
    trial = project / "runs/r/trials/0001"
    nodes = [
        json.loads(path.read_text())["node"]
        for attempt in (1, 2)
        for path in trial.glob(f"**/slurm-a{attempt}/node-0.json")
    ]
    assert len(set(nodes)) == 2
    why = run_command("logs", "r", "1", "--why", cwd=project).stdout.splitlines()
    assert why[0].startswith(f"attempt 1 does not count: node_failed: the hardware of node {nodes[0]} is at fault: c10")
    assert why[1:] == [
        "trial 1: crashed: ValueError: odd heads",
        "its logs: stderr.log, line 1: crashed: ValueError: odd heads",
    ]


def _leave_jobs_and_clean(cluster: Cluster, runs: Path) -> None:
    """`clean` shows and cancels the jobs of a killed search that is not resumed."""
    arguments = ["run", "-w", "tiny", "-b", "4", "-l", "sleepy", "--sampler", "random", "--parallel", "4"]
    process = start(*arguments, "--name", "left", runs=runs)
    deadline = time.monotonic() + 120
    while len(list((runs / "left").glob("trials/*/attempts/1/slurm-a1/started.json"))) < 4:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.kill()
    process.wait()
    assert start("clean", "left", runs=runs).wait(timeout=120) == 0
    assert "4 jobs cancelled" in (runs.parent / "search.log").read_text()
    wait_until_idle(cluster.ask)
    assert start("clean", "left", runs=runs).wait(timeout=120) == 0
    assert "has no unfinished job" in (runs.parent / "search.log").read_text()


NIGHT = {
    "name": "n",
    "jobs": [{"name": "s", "workload": "tiny", "launcher": "sleepy", "sampler": "random", "budget": {"trials": 2}}],
}


def start_night(project: Path) -> subprocess.Popen[bytes]:
    """Start the command line as a process; its output goes to `night.log`."""
    confirm(QUICK)
    environment = {**os.environ, "CCL_SEARCH_PATH": str(QUICK)}
    with (project / "night.log").open("ab") as log:
        return subprocess.Popen(
            [*COMMAND, "nightly", "nightly.yaml", "--once"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            cwd=project,
        )


def test_a_killed_night_is_continued_and_a_stopped_one_leaves_no_job(cluster):
    with tempfile.TemporaryDirectory(prefix="ccl-ni-") as folder:
        project = Path(folder)
        (project / "ccl-search.yaml").write_text("{}\n")
        (project / "nightly.yaml").write_text(yaml.safe_dump(NIGHT))
        log, runs = project / "night.log", project / "runs"
        killed = start_night(project)
        wait_until(lambda: any(runs.glob("n-*-s/trials/0001/attempts/1/slurm-a1/started.json")))
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        jobs = cluster.ask("squeue", "--noheader", "--format=%i").split()
        assert len(jobs) == 1
        again = start_night(project)
        wait_until(lambda: "continues" in log.read_text())
        again.send_signal(signal.SIGTERM)
        assert again.wait(timeout=120) == 1
        wait_until_idle(cluster.ask)
        assert cluster.ask("squeue", "--noheader") == ""
        listed = cluster.ask("squeue", "--states=all", "--noheader", "--format=%i %Z").splitlines()
        assert [line.split()[0] for line in listed if folder in line] == jobs
        summary = json.loads((runs / "nights" / "n" / "summary.json").read_text())
        assert summary["stopped"]
        assert [path.parent.name for path in (runs / "nights" / "n").glob("*/night.json")] == [summary["night"]]


def test_the_job_script_of_the_best_trains_it_without_the_search(cluster, project):
    (project / "launchers").mkdir()
    (project / "launchers" / "cluster.yaml").write_text(
        f"launcher: slurm\ncpu_only: true\npartition: train\npython: {sys.executable}\ncpus_per_task: 1\n"
        "hardware: {num_accelerators: 2, accelerators_per_node: 1}\n"
        "environment: {OMP_NUM_THREADS: 1, GLOO_SOCKET_IFNAME: lo}\n"
    )
    words = ["-w", "tiny", "-l", "simulate", "--budget", "1", "--name", "r", "--quiet"]
    assert run_command("run", *words, "--knob", "dp=2", "--knob", "tp=1", "--knob", "pp=1", cwd=project).returncode == 0
    refused = run_command("best", "r", "--sbatch", cwd=project)
    assert (refused.returncode, "simulate starts no jobs of Slurm" in refused.stderr) == (2, True), refused.stderr
    shown = run_command("best", "r", "--sbatch", "cluster", cwd=project)
    assert "#SBATCH --nodes=2" in shown.stdout, shown.stderr
    (project / "job.sbatch").write_text(shown.stdout)
    done = subprocess.run(
        ["sbatch", "--wait", "job.sbatch"], cwd=project, capture_output=True, timeout=120, check=False
    )
    log = "".join(path.read_text() for path in project.glob("slurm-*.log"))
    assert done.returncode == 0, log
    result = json.loads((project / "result.json").read_text())
    assert (result["status"], result["world_size"]) == ("ok", 2)
