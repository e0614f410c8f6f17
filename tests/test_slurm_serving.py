"""A served model, tuned on a real Slurm. Trials are timed, so that nothing may run beside them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from slurm.cluster import start_cluster
from slurm.searches import wait_until_idle

pytestmark = pytest.mark.serial


def test_a_server_is_tuned_on_slurm_and_its_processes_end_with_the_job(project: Path) -> None:
    """Each trial is a job that starts a server on its node, measures both loads, and leaves nothing in the queue."""
    profile = project / "launchers" / "cluster.yaml"
    profile.parent.mkdir()
    profile.write_text(
        f"launcher: slurm\ncpu_only: true\npoll_s: 0.5\npython: {sys.executable}\n"
        "hardware: {num_accelerators: 1, accelerators_per_node: 1}\n"
    )
    with start_cluster("--no-db") as cluster:
        loads = ["--set", "num_requests=12", "--set", "other_concurrency=1", "--set", "other_num_requests=4"]
        command = [
            sys.executable,
            "-m",
            "cclsearch",
            "run",
            "-w",
            "tiny-serving",
            "-l",
            str(profile),
            "-b",
            "2",
            *loads,
        ]
        done = subprocess.run(
            [*command, "--name", "r", "--json"], cwd=project, capture_output=True, text=True, timeout=300, check=False
        )
        wait_until_idle(cluster.ask)
    assert done.returncode == 0, done.stdout + done.stderr
    best = json.loads(done.stdout.splitlines()[-1])["best"]
    assert best["provenance"] == "measured"
    assert best["output_tokens_per_s_per_accelerator"] > 0
    assert best["other_load_output_tokens_per_s_per_accelerator"] > 0
    results = [json.loads(path.read_text()) for path in (project / "runs" / "r").glob("trials/*/result.json")]
    assert [result["status"] for result in results] == ["ok", "ok"]
