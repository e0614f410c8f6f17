"""A night on a real Slurm: a killed night is continued, and a signal leaves no job in the queue."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import yaml
from slurm.cluster import Cluster
from slurm.searches import COMMAND, QUICK, wait_until_idle

from cclsearch.core.trust import confirm

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


def wait_for(is_so: Callable[[], bool], night: subprocess.Popen[bytes], log: Path, limit_s: float = 120) -> None:
    """Wait until the condition is true, while the night runs."""
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert night.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def test_a_killed_night_is_continued_and_a_stopped_one_leaves_no_job(cluster: Cluster) -> None:
    with tempfile.TemporaryDirectory(prefix="ccl-ni-") as folder:
        project = Path(folder)
        (project / "ccl-search.yaml").write_text("{}\n")
        (project / "nightly.yaml").write_text(yaml.safe_dump(NIGHT))
        log, runs = project / "night.log", project / "runs"
        killed = start_night(project)
        wait_for(lambda: any(runs.glob("n-*-s/trials/0001/attempts/1/slurm-a1/started.json")), killed, log)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        jobs = cluster.ask("squeue", "--noheader", "--format=%i").split()
        assert len(jobs) == 1
        again = start_night(project)
        wait_for(lambda: "continues" in log.read_text(), again, log)
        again.send_signal(signal.SIGTERM)
        assert again.wait(timeout=120) == 1
        wait_until_idle(cluster.ask)
        assert cluster.ask("squeue", "--noheader") == ""
        listed = cluster.ask("squeue", "--states=all", "--noheader", "--format=%i %Z").splitlines()
        assert [line.split()[0] for line in listed if folder in line] == jobs
        summary = json.loads((runs / "nights" / "n" / "summary.json").read_text())
        assert summary["stopped"]
        assert [path.parent.name for path in (runs / "nights" / "n").glob("*/night.json")] == [summary["night"]]
