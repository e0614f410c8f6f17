"""A search on a real Slurm that is killed at random moments: nothing is submitted twice, lost or left behind."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from slurm.cluster import Cluster, start_cluster
from slurm.searches import kill_and_resume, start, wait_until_idle

pytestmark = [pytest.mark.serial, pytest.mark.untimed]


def test_a_repeatedly_killed_search_loses_and_repeats_nothing() -> None:
    with start_cluster("--no-db") as cluster, tempfile.TemporaryDirectory(prefix="ccl-sl-") as folder:
        runs = Path(folder) / "runs"
        runs.mkdir()
        tally = kill_and_resume(runs, kills=4, budget=10, parallel=4, seed=7, ask=cluster.ask, longest_s=3.0)
        assert tally.kills >= 1  # on a fast machine the search may end before all four
        assert tally.finished == 10
        assert (tally.finished_twice, tally.doubled, tally.lost, tally.alive) == ([], [], [], [])
        _leave_jobs_and_clean(cluster, runs)


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
