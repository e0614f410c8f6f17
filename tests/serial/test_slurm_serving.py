"""A served model, tuned on a real Slurm. Trials are timed, so that nothing may run beside them."""

from __future__ import annotations

import json
import sys

from command_line import run_command
from paths import ROOT
from slurm.searches import wait_until_idle

LAUNCHERS = ROOT / "launchers"


def test_a_server_is_tuned_on_slurm_and_its_processes_end_with_the_job(cluster, project):
    """Each trial is a job that starts a server on its node, measures both loads, and leaves nothing in the queue."""
    profile = project / "launchers" / "cluster.yaml"
    profile.parent.mkdir()
    profile.write_text(
        f"launcher: slurm\ncpu_only: true\npoll_s: 0.5\npython: {sys.executable}\n"
        "hardware: {num_accelerators: 1, accelerators_per_node: 1}\n"
    )
    loads = ["--set", "num_requests=12", "--set", "other_concurrency=1", "--set", "other_num_requests=4"]
    command = ["run", "-w", "tiny-serving", "-l", str(profile), "-b", "2", *loads, "--name", "r", "--json"]
    done = run_command(*command, cwd=project)
    wait_until_idle(cluster.ask)
    assert done.returncode == 0, done.stdout + done.stderr
    best = json.loads(done.stdout.splitlines()[-1])["best"]
    assert best["provenance"] == "measured"
    assert best["output_tokens_per_s_per_accelerator"] > 0
    assert best["other_load_output_tokens_per_s_per_accelerator"] > 0
    results = [json.loads(path.read_text()) for path in (project / "runs" / "r").glob("trials/*/result.json")]
    assert [result["status"] for result in results] == ["ok"] * 3, "the best one's window was computed again"


PAIR = r"""
import json, os, sys
from pathlib import Path
from common import run_rank
from serving_run import serve_trial
SERVER = Path(os.environ["LAUNCHERS"]) / "cpu_serving_server.py"
def command(port, share):
    (folder / f"share-{share.place.node}").write_text(os.environ["SLURMD_NODENAME"])
    if share.place.node:
        return [sys.executable, "-c", "import time; time.sleep(600)"]
    return [sys.executable, str(SERVER), str(folder / "server.json"), str(port)]
def describe(server):
    found = json.loads(server.get("/stats"))
    return {"num_params": found["num_params"], "precision": "fp32", "memory_kind": "rss", "peak_memory_bytes": [1]}
def serve(trial):
    global folder
    folder = trial.folder
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "block_size": 16, "kv_cache_mib": 8,
               "chunked_prefill": True, "prefix_caching": False, "threads": 1}
    given = {**options, "arch": trial.data["arch"], "seed": 0, "max_len": 400}
    if not int(os.environ["CCL_PROCESS_ID"]):
        (folder / "server.json").write_text(json.dumps(given))
    serve_trial(trial, command, lambda server: {}, describe)
sys.exit(run_rank(serve))
"""


def test_a_server_over_two_nodes_of_slurm_is_one_trial_and_ends_on_both(cluster, project):
    """The script runs on both nodes; node 0 serves, and the other's share ends with the trial."""
    folder = project / "launchers"
    folder.mkdir()
    (folder / "pair.py").write_text(PAIR)
    (folder / "pair.framework.yaml").write_text(
        "title: a server over nodes\nscript: pair.py\nrunner: process\ntasks: [serving]\ncpu_only: true\n"
        "knobs: [{name: tp, choices: {divisors_of: accelerators}}]\nrules: [{rule: num_accelerators}]\n"
    )
    (folder / "cluster.yaml").write_text(
        f"launcher: slurm\ncpu_only: true\npoll_s: 0.5\npython: {sys.executable}\n"
        "hardware: {num_accelerators: 2, accelerators_per_node: 1}\n"
        f"environment: {{PYTHONPATH: {LAUNCHERS}, LAUNCHERS: {LAUNCHERS}}}\n"
    )
    command = ["run", "-w", "tiny-serving", "-l", "cluster", "--framework", "pair"]
    command += ["-b", "1", "--knob", "tp=2", "--set", "num_requests=12", "--name", "r"]
    done = run_command(*command, cwd=project)
    wait_until_idle(cluster.ask)
    found = sorted((project / "runs" / "r").glob("trials/*/**/result.json"))
    assert found, done.stdout + done.stderr
    results = [json.loads(path.read_text()) for path in found]
    assert {result["status"] for result in results} == {"ok"}
    assert all(result["world_size"] == len(result["hosts"]) == 2 for result in results)
    trial = project / "runs" / "r" / "trials" / "0001"
    shares = [next(trial.glob(f"**/share-{node}")).read_text() for node in range(2)]
    assert len(set(shares)) == 2, "on different nodes"
