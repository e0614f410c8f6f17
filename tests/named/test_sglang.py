"""SGLang really serves a small model with random weights on this CPU: `make test-sglang`, which installs it.

CCL_SGLANG_PYTHON names the interpreter of its environment; without it these tests are skipped.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from test_serving_live import LAUNCHERS
from waiting import find_processes

from cclsearch.space.framework import load_framework

PYTHON = os.environ.get("CCL_SGLANG_PYTHON", "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="CCL_SGLANG_PYTHON names no interpreter with SGLang: `make test-sglang`"),
]
ARCH = {
    "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "hidden_size": 128, "intermediate_size": 256,
    "vocab_size": 512, "tied_embeddings": False, "gated_mlp": True, "moe": None,
}  # fmt: skip
PARAMETERS = 2 * 512 * 128 + 128 + 2 * (2 * 128 + 128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 256)
SMALL = {"max_num_seqs": 4, "prefill_chunk": 64, "kv_cache_tokens": 4096}


def start(folder: Path, config: dict[str, Any], **given: Any) -> tuple[str, subprocess.Popen[bytes]]:
    """The name of a trial and its script, which runs."""
    requests = [{"arrival_s": 0.0, "input_tokens": 90 + n % 5, "output_tokens": 6 + n % 3} for n in range(8)]
    data = {
        "config": config, "arch": ARCH, "seed": 0, "precision": "bf16", "accelerator": "cpu", "num_ranks": 1,
        "requests": requests, "arrival": "closed", "concurrency": 4, "max_concurrency": None, "repeats": 1,
        "warmup_requests": 2, "shared_prefix_tokens": 4, "limits": {}, "nonce": "n1", **given,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(data))
    name = f"sglang-test-{os.getpid()}-{folder.name}"
    own = {"CCL_CONFIG": str(folder / "config.json"), "CCL_TRIAL_DIR": str(folder), "CCL_JOB_NAME": name}
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CCL_MODEL_PATH")}
    environment |= {**own, "CCL_TIMEOUT_S": "600"}
    with (folder / "script.log").open("wb") as log:
        command = [PYTHON, str(LAUNCHERS / "sglang_serve.py")]
        return name, subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def finish(folder: Path, name: str, script: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The result of one trial, or its failure; nothing of it runs any more."""
    script.wait(600)
    assert find_processes(name) == []
    found = folder / "result.json"
    return dict(json.loads((found if found.is_file() else folder / "failures" / "rank-00000.json").read_text()))


def serve(folder: Path, config: dict[str, Any], **given: Any) -> dict[str, Any]:
    return finish(folder, *start(folder, config, **given))


def test_a_trial_serves_the_cards_model_and_every_request_is_answered(tmp_path):
    result = serve(tmp_path, {**SMALL, "prefix_caching": False})
    assert result["status"] == "ok", result
    assert (result["num_params"], result["precision"], result["memory_kind"]) == (PARAMETERS, "bf16", "rss")
    assert result["peak_memory_bytes"][0] > 100e6
    assert result["versions"]["sglang"] == "0.5.23"
    log = [json.loads(line) for line in (tmp_path / "evidence.jsonl").read_text().splitlines()]
    measured = [record for record in log if not record["is_warm_up"]]
    assert sorted(record["number"] for record in measured) == list(range(8))
    assert all(r["output_tokens"] == len(r["token_times_s"]) == 6 + r["number"] % 3 for r in measured)
    assert all(r["token_ids_sha256"] for r in measured)
    (load,) = result["loads"]
    assert load["metrics"]["queue_mean_s"] >= 0
    assert float(result["extra"]["start_s"]) > float(result["extra"]["measuring_s"]) > 0


def test_every_other_choice_serves_too(tmp_path):
    config = {
        **SMALL, "prefix_caching": True, "mixed_chunk": True, "block_size": 32, "async_scheduling": False,
        "scheduling_policy": "lpm", "stream_interval": 4,
    }  # fmt: skip
    result = serve(tmp_path, config, precision="fp32")
    assert (result["status"], result.get("precision")) == ("ok", "fp32"), result


def test_a_kv_cache_that_is_too_small_for_a_request_is_the_reason(tmp_path):
    failure = serve(tmp_path, {**SMALL, "kv_cache_tokens": 64})
    assert "aborted: Input length (90 tokens) exceeds the maximum allowed length" in failure["message"], failure


def test_what_sglang_refuses_at_its_start_is_the_reason_of_the_failure(tmp_path):
    failure = serve(tmp_path, {**SMALL, "block_size": 64, "prefill_chunk": 96})
    assert "AssertionError: chunked_prefill_size must be divisible by page_size" in failure["message"], failure


def test_a_scheduler_that_is_killed_under_load_ends_the_trial_with_its_reason(tmp_path):
    short = {"arrival_s": 0.0, "input_tokens": 20, "output_tokens": 2}
    many = [short, short, *[{**short, "output_tokens": 400}] * 400]
    name, script = start(tmp_path, SMALL, requests=many)
    until = time.monotonic() + 300
    while not (phase := tmp_path / "phase").is_file() or phase.read_text() != "timing":
        assert time.monotonic() < until
        assert script.poll() is None, finish(tmp_path, name, script)
        time.sleep(0.2)
    titles = {number: Path(f"/proc/{number}/cmdline").read_bytes() for number in find_processes(name)}
    (scheduler,) = (number for number, title in titles.items() if b"scheduler" in title)
    os.kill(scheduler, signal.SIGKILL)
    failure = finish(tmp_path, name, script)
    assert "the server ended with signal 9 under load" in failure["message"], failure


def read_configs(name: str) -> list[dict[str, Any]]:
    """A configuration for each choice of each knob."""
    framework = load_framework(name)
    configs: list[dict[str, Any]] = []
    for knob in (*framework.knobs, *framework.optional_knobs):
        choices = knob.choices if isinstance(knob.choices, tuple) else (1, 2, 8)
        configs += [{knob.name: choice} for choice in choices]
    return configs


def ask(program: str, given: Any) -> str:
    """What a program prints that SGLang's interpreter runs beside our run scripts."""
    begin = f"import json, sys\nsys.path.append({str(LAUNCHERS)!r})\ngiven = json.loads(sys.stdin.read())\n"
    asked = subprocess.run(
        [PYTHON, "-c", begin + program], input=json.dumps(given), capture_output=True, text=True, timeout=300,
        check=False, env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    assert asked.returncode == 0, asked.stderr[-2000:]
    return asked.stdout.strip().splitlines()[-1]


PARSER = """
import argparse
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
"""


@pytest.mark.parametrize("name", ["sglang", "sglang-cpu"])
def test_sglangs_own_parser_takes_every_option_of_the_framework_file(name):
    program = """
from sglang_serve import ON_CPU, render_nodes, render_options
for config in given:
    parser.parse_args(["--model-path", "m", *render_options(config), *ON_CPU])
nodes = parser.parse_args(["--model-path", "m", *render_nodes(2, 1, "10.0.0.1:5001")])
print(nodes.nnodes, nodes.node_rank, nodes.dist_init_addr)
"""
    assert ask(PARSER + program, read_configs(name)) == "2 1 10.0.0.1:5001"


def test_sglangs_own_parsers_take_servers_apart_and_their_router():
    whole = {
        "devices": 8, "prefill_workers": 2, "prefill_gpus_per_worker": 2, "decode_workers": 1,
        "decode_gpus_per_worker": 4,
    }  # fmt: skip
    configs = [{**whole, **config} for config in read_configs("sglang-disagg") if not {*config} & {*whole}]
    program = """
from serving_apart import place_servers
from sglang_disagg import render_router, render_server
from sglang_router.launch_router import parse_router_args
for config in given:
    data = {"config": config, "num_ranks": 8, "ranks_per_node": 4, "precision": "bf16", "seed": 0,
            "requests": [{"input_tokens": 9, "output_tokens": 9}]}
    seats = place_servers(data)
    servers = [parser.parse_args(render_server(data, seat, "m")[2:]) for seat in seats]
    router = parse_router_args(render_router(seats)[2:])
print([(each.disaggregation_mode, each.tp_size, each.base_gpu_id) for each in servers], router.prefill_urls,
      router.decode_urls, router.pd_disaggregation)
"""
    assert ask(PARSER + program, configs) == (
        "[('prefill', 2, 0), ('prefill', 2, 2), ('decode', 4, 0)]"
        " [('http://NODE_1:8100', 8998), ('http://NODE_1:8101', 8999)] ['http://NODE_0:8102'] True"
    )
