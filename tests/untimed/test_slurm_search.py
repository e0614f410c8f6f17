"""A search on a real Slurm that is killed at random moments: nothing is submitted twice, lost or left behind."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from command_line import run_command
from slurm.cluster import Cluster
from slurm.searches import kill_and_resume, start, wait_until_idle


def test_a_repeatedly_killed_search_loses_and_repeats_nothing(cluster: Cluster) -> None:
    with tempfile.TemporaryDirectory(prefix="ccl-sl-") as folder:
        runs = Path(folder) / "runs"
        runs.mkdir()
        tally = kill_and_resume(runs, kills=4, budget=10, parallel=4, seed=7, ask=cluster.ask, longest_s=3.0)
        assert tally.kills >= 1  # on a fast machine the search may end before all four
        assert tally.finished == 10
        assert (tally.finished_twice, tally.doubled, tally.lost, tally.alive) == ([], [], [], [])
        _leave_jobs_and_clean(cluster, runs)


def test_links_between_ranks_of_a_slurm_job_are_measured(cluster: Cluster, project: Path) -> None:
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
