"""vLLM's CPU build really serves a small model with random weights: `make test-vllm`, which installs it.

CCL_VLLM_PYTHON names the interpreter of its environment; without it these tests are skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm.cluster import start_cluster
from slurm.searches import wait_until_idle
from test_serving_live import LAUNCHERS
from waiting import find_processes

from cclsearch.space.framework import load_framework

PYTHON = os.environ.get("CCL_VLLM_PYTHON", "")
_FOUND = subprocess.run([PYTHON or "false", "-c", "import nixl"], capture_output=True, check=False)
HAS_NIXL = bool(PYTHON) and _FOUND.returncode == 0
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="CCL_VLLM_PYTHON names no interpreter with vLLM: `make test-vllm`"),
]
ARCH = {
    "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "hidden_size": 128, "intermediate_size": 256,
    "vocab_size": 512, "tied_embeddings": False, "gated_mlp": True, "moe": None,
}  # fmt: skip
NORMS = 5 * 128
PARAMETERS = 2 * 512 * 128 + 128 + 2 * (2 * 128 + 128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 256)


def prepare(folder: Path, config: dict[str, Any], **given: Any) -> tuple[str, dict[str, str]]:
    """Write a trial's `config.json`; returns the job's name and the environment of its script."""
    requests = [{"arrival_s": 0.0, "input_tokens": 20 + n % 5, "output_tokens": 6 + n % 3} for n in range(8)]
    data = {
        "config": {"enforce_eager": True, "kv_cache_gib": 1, **config}, "arch": ARCH, "seed": 0, "precision": "bf16",
        "num_ranks": 1, "requests": requests, "arrival": "closed", "concurrency": 4, "max_concurrency": None,
        "repeats": 1, "warmup_requests": 2, "shared_prefix_tokens": 4, "limits": {}, "nonce": "n1", **given,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(data))
    name = f"vllm-test-{os.getpid()}-{folder.name}"
    own = {"CCL_CONFIG": str(folder / "config.json"), "CCL_TRIAL_DIR": str(folder), "CCL_JOB_NAME": name}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return name, {**environment, **own, "CCL_TIMEOUT_S": "600", "VLLM_LOG_STATS_INTERVAL": "1"}


def read_end(folder: Path) -> dict[str, Any]:
    found = folder / "result.json"
    return dict(json.loads((found if found.is_file() else folder / "failures" / "rank-00000.json").read_text()))


def serve(folder: Path, config: dict[str, Any], script: str = "vllm_serve.py", **given: Any) -> dict[str, Any]:
    """The result of one trial, or its failure; nothing of it runs any more."""
    name, environment = prepare(folder, config, **given)
    subprocess.run([PYTHON, str(LAUNCHERS / script)], env=environment, capture_output=True, timeout=600, check=False)
    assert find_processes(name) == []
    return read_end(folder)


@contextlib.contextmanager
def two_nodes(
    folder: Path, config: dict[str, Any], script: str = "vllm_serve.py", **given: Any
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The scripts of a trial on two nodes, which are both this machine; nothing of it runs afterwards."""
    name, environment = prepare(folder, config, num_ranks=2, ranks_per_node=1, **given)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meet = {
            "OMP_NUM_THREADS": "1",
            "CCL_NUM_PROCESSES": "2",
            "CCL_COORDINATOR": f"127.0.0.1:{probe.getsockname()[1]}",
        }
    scripts = []
    for node in range(2):
        place = {**environment, **meet, "CCL_PROCESS_ID": str(node)}
        with (folder / f"script-{node}.log").open("wb") as log:
            scripts.append(subprocess.Popen([PYTHON, str(LAUNCHERS / script)], env=place, stdout=log, stderr=log))
    try:
        yield scripts
    finally:
        for script in scripts:
            script.wait(60)
        assert find_processes(name) == []


def test_a_trial_serves_the_cards_model_and_its_workers_say_what_they_hold(tmp_path):
    result = serve(tmp_path, {"max_num_seqs": 4, "max_num_batched_tokens": 64, "prefix_caching": True})
    assert result["status"] == "ok", result
    assert (result["num_params"], result["precision"], result["memory_kind"]) == (PARAMETERS, "bf16", "rss")
    assert result["versions"]["vllm"].startswith("0.32.0")
    log = [json.loads(line) for line in (tmp_path / "evidence.jsonl").read_text().splitlines()]
    measured = [record for record in log if not record["is_warm_up"]]
    assert sorted(record["number"] for record in measured) == list(range(8))
    assert all(r["output_tokens"] == len(r["token_times_s"]) == 6 + r["number"] % 3 for r in measured)
    assert float(result["extra"]["start_s"]) > float(result["extra"]["measuring_s"]) > 0


@pytest.mark.parametrize("degree", ["tp", "dp"])
def test_a_server_over_two_nodes_serves_every_request(tmp_path, degree):
    with two_nodes(tmp_path, {degree: 2, "max_num_seqs": 4}) as scripts:
        assert [script.wait(600) for script in scripts] == [0, 0]
    result = read_end(tmp_path)
    assert result["status"] == "ok", result
    twice = NORMS if degree == "tp" else 0  # tensor-parallel ranks share all weights but those of norms
    assert (result["num_params"], result["precision"], result["world_size"]) == (PARAMETERS + twice, "bf16", 2)
    assert len(result["hosts"]) == len(result["peak_memory_bytes"]) == 2
    assert all(peak > 100e6 for peak in result["peak_memory_bytes"]), "both nodes hold vLLM"
    log = [json.loads(line) for line in (tmp_path / "evidence.jsonl").read_text().splitlines()]
    assert [record["error"] for record in log] == [""] * 10
    assert not (tmp_path / "failures").exists()


def await_load(folder: Path, scripts: list[subprocess.Popen[bytes]]) -> None:
    until = time.monotonic() + 500
    while not (phase := folder / "phase").is_file() or phase.read_text() != "timing":
        assert time.monotonic() < until
        assert scripts[0].poll() is None, read_end(folder)
        time.sleep(0.5)


WARM = {"arrival_s": 0.0, "input_tokens": 20, "output_tokens": 2}
MANY = [WARM, WARM, *[{**WARM, "output_tokens": 400}] * 400]


def test_a_node_that_dies_under_load_is_one_failure_and_nothing_is_left(tmp_path):
    with two_nodes(tmp_path, {"tp": 2}, requests=MANY) as scripts:
        await_load(tmp_path, scripts)
        job = f"vllm-test-{os.getpid()}-{tmp_path.name}"
        commands = {number: Path(f"/proc/{number}/cmdline").read_bytes() for number in find_processes(job)}
        shares = {os.getpgid(number) for number, words in commands.items() if b"--headless" in words.split(b"\0")}
        os.killpg(shares.pop(), signal.SIGKILL)
        began = time.monotonic()
        assert scripts[0].wait(120) == 1
        assert time.monotonic() - began < 60, "requests that hang are not waited for"
    failure = read_end(tmp_path)
    assert failure["message"].startswith("NodeFailed: node 1 ("), failure
    assert "the server ended with signal 9 during the trial" in failure["message"]
    assert [path.name for path in (tmp_path / "failures").iterdir()] == ["rank-00000.json"]


CONNECTORS = [
    "ExampleConnector",
    pytest.param("NixlConnector", marks=pytest.mark.skipif(not HAS_NIXL, reason="NIXL is not installed beside vLLM")),
]


@pytest.mark.parametrize("connector", CONNECTORS)
def test_prefill_and_decode_on_servers_of_their_own_answer_every_request(tmp_path, connector):
    config = {
        "devices": 2, "prefill_workers": 1, "prefill_gpus_per_worker": 1, "decode_workers": 1,
        "decode_gpus_per_worker": 1, "kv_connector": connector, "block_size": 32, "max_num_seqs": 4,
    }  # fmt: skip
    long = [{"arrival_s": 0.0, "input_tokens": 90 + n, "output_tokens": 6} for n in range(8)]
    result = serve(tmp_path, config, script="vllm_disagg.py", num_ranks=2, ranks_per_node=2, requests=long)
    assert result["status"] == "ok", result
    assert (result["num_params"], result["precision"], result["world_size"]) == (PARAMETERS, "bf16", 2)
    log = [json.loads(line) for line in (tmp_path / "evidence.jsonl").read_text().splitlines()]
    assert [record["error"] for record in log] == [""] * 10
    assert {record["output_tokens"] for record in log} == {6}
    decoding = (tmp_path / "server-decode-1.log").read_text()
    moved = "Inject KV cache of 64 tokens" if connector == "ExampleConnector" else "Num successful transfers"
    assert moved in decoding, "keys and values came from the other server"
    assert not (tmp_path / "kv").exists()


ON_TWO_NODES = {
    "devices": 2, "prefill_workers": 1, "prefill_gpus_per_worker": 1, "decode_workers": 1, "decode_gpus_per_worker": 1,
    "block_size": 32, "max_num_seqs": 4,
}  # fmt: skip


@pytest.mark.skipif(not HAS_NIXL, reason="NIXL is not installed beside vLLM")
def test_prefill_on_one_node_and_decode_on_another_answer_every_request(tmp_path):
    long = [{"arrival_s": 0.0, "input_tokens": 90 + n, "output_tokens": 6} for n in range(8)]
    with two_nodes(tmp_path, ON_TWO_NODES, "vllm_disagg.py", requests=long) as scripts:
        assert [script.wait(600) for script in scripts] == [0, 0], read_end(tmp_path)
    result = read_end(tmp_path)
    assert result["status"] == "ok", result
    assert (result["num_params"], result["precision"], result["world_size"]) == (PARAMETERS, "bf16", 2)
    assert len(result["hosts"]) == len(result["peak_memory_bytes"]) == 2
    assert all(peak > 100e6 for peak in result["peak_memory_bytes"]), "both nodes hold vLLM"
    log = [json.loads(line) for line in (tmp_path / "evidence.jsonl").read_text().splitlines()]
    assert [record["error"] for record in log] == [""] * 10
    assert {record["output_tokens"] for record in log} == {6}
    decoding = (tmp_path / "server-decode-1.log").read_text()
    assert "Num successful transfers" in decoding, "keys and values came from the other node"


@pytest.mark.skipif(not HAS_NIXL, reason="NIXL is not installed beside vLLM")
def test_a_server_of_another_node_that_dies_under_load_is_one_failure(tmp_path):
    with two_nodes(tmp_path, ON_TWO_NODES, "vllm_disagg.py", requests=MANY) as scripts:
        await_load(tmp_path, scripts)
        job = f"vllm-test-{os.getpid()}-{tmp_path.name}"
        served = {number: Path(f"/proc/{number}/cmdline").read_bytes() for number in find_processes(job)}
        port = json.loads((tmp_path / "servers-1.json").read_text())["workers"][0]["port"]
        (decoding,) = (number for number, words in served.items() if f"--port\0{port}\0".encode() in words)
        os.kill(decoding, signal.SIGKILL)
        assert scripts[0].wait(120) == 1
    failure = read_end(tmp_path)
    assert failure["message"].startswith("NodeFailed: node 1 ("), failure
    assert f"Error: the decode server on port {port} ended with signal 9" in failure["message"]


def test_what_vllm_refuses_at_its_start_is_the_reason_of_the_failure(tmp_path):
    failure = serve(tmp_path, {"max_num_seqs": 64, "max_num_batched_tokens": 32})
    assert "must be greater than or equal to max_num_seqs" in failure["message"], failure


@pytest.mark.parametrize("name", ["vllm-cpu", "vllm", "vllm-tpu", "vllm-cpu-disagg", "vllm-disagg"])
def test_vllms_own_parser_takes_every_option_of_the_framework_file(name):
    framework = load_framework(name)
    configs: list[dict[str, Any]] = []
    for knob in (*framework.knobs, *framework.optional_knobs):
        choices = knob.choices if isinstance(knob.choices, tuple) else (1, 2, 8)
        configs += [{knob.name: choice} for choice in choices]
    folder = str(LAUNCHERS)
    program = f"""
import json, sys
sys.path.insert(0, {folder!r})
from vllm_disagg import FOLDER, NIXL, OWN_KNOBS, render_transfer
from vllm_serve import MASTER, REPLICAS, render_nodes, render_options
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
for config in json.loads(sys.stdin.read()):
    parser.parse_args(render_options({{knob: value for knob, value in config.items() if knob not in OWN_KNOBS}}))
nodes = parser.parse_args(render_nodes(2, 1, "10.0.0.1", {{MASTER: 5001, REPLICAS: 5002}}))
assert (nodes.nnodes, nodes.node_rank, nodes.master_port, nodes.headless) == (2, 1, 5001, True)
for connector in (NIXL, FOLDER):
    given = parser.parse_args(["--kv-transfer-config", render_transfer(connector, "/kv")]).kv_transfer_config
    assert given.kv_connector == connector
print("parsed")
"""
    asked = subprocess.run(
        [PYTHON, "-c", program], input=json.dumps(configs), capture_output=True, text=True, timeout=300, check=False
    )
    assert asked.stdout.strip().endswith("parsed"), asked.stderr[-2000:]


@pytest.mark.skipif(not HAS_NIXL, reason="NIXL is not installed beside vLLM")
def test_prefill_and_decode_are_on_nodes_of_their_own_of_a_real_slurm(project):
    """A search's trial, whose first attempt has a result; other processes may disturb its figures."""
    (project / "launchers").mkdir()
    (project / "launchers" / "cluster.yaml").write_text(
        f"launcher: slurm\ncpu_only: true\npoll_s: 0.5\npython: {PYTHON}\nenvironment: {{OMP_NUM_THREADS: '1'}}\n"
        "hardware: {num_accelerators: 2, accelerators_per_node: 1}\n"
    )
    command = [sys.executable, "-m", "cclsearch", "run", "-w", "tiny-serving", "-l", "cluster", "--name", "r"]
    command += ["--framework", "vllm-cpu-disagg", "-b", "1", "--set", "num_requests=8", "--set", "concurrency=2"]
    command += ["--set", "output_len=6"]
    for knob in ("kv_connector=NixlConnector", "enforce_eager=true", "kv_cache_gib=1", "block_size=32"):
        command += ["--knob", knob]
    with start_cluster("--no-db") as cluster:
        search = subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        until, folder = time.monotonic() + 1500, project / "runs" / "r" / "trials"
        while not (found := sorted(folder.glob("*/**/result.json"))) and search.poll() is None:
            if time.monotonic() > until:
                break
            time.sleep(1)
        search.send_signal(signal.SIGINT)
        said = search.communicate(timeout=120)[0]
        cluster.ask("scancel", "--me")
        wait_until_idle(cluster.ask)
    assert found, said
    result = json.loads(found[0].read_text())
    assert (result["status"], result["world_size"]) == ("ok", 2), result
    place = found[0].parent
    assert json.loads((place / "servers-0.json").read_text())["workers"][1].keys() == {"number", "role", "host", "port"}
    assert "Num successful transfers" in next(place.glob("server-decode-1.log")).read_text()
    log = [json.loads(line) for line in (place / "evidence.jsonl").read_text().splitlines()]
    assert {record["error"] for record in log} == {""}
