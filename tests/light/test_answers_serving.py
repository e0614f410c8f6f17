"""What a serving search hands over: launch and manifests of its winner; results of load generators as recordings."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from cclsearch.cli import main

CARD = """
version: 1
hf_url: https://huggingface.co/meta-llama/Llama-3.1-8B-Instruct
workload:
  task: serving
  model: {model_family: Llama-3.1-8B, precision: bf16}
  data: {input_len: 200, output_len: 50, concurrency: 4}
  hardware:
    network_topo: {topology: nvlink, bandwidth_gbps: [400, 3600]}
    xpu_spec: {type: GPU, model: h100, memory_gb: 80, total_count: 2, count_per_node: 2}
Model-executor: {framework: {name: vllm}}
"""
PROFILE = (
    'launcher: simulate\nenvironment: {CCL_SERVE_HOST: 10.0.0.7, CCL_SERVE_PORT: "9000", CCL_MAX_MODEL_LEN: "32768"}'
)


def test_the_winner_is_launched_and_deployed_with_model_context_host_and_port(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "chat.yaml").write_text(CARD)
    (tmp_path / "mine.yaml").write_text(PROFILE)
    run = [
        "run",
        "-w",
        str(tmp_path / "chat.yaml"),
        "--launcher",
        str(tmp_path / "mine.yaml"),
        "-b",
        "2",
        "--name",
        "r",
    ]
    assert main([*run, "--runs", str(tmp_path / "runs"), "--quiet"]) == 0
    best = ["best", "r", "--runs", str(tmp_path / "runs")]
    capsys.readouterr()
    main([*best, "--json"])
    words = json.loads(capsys.readouterr().out)["launch"]["command"]
    shown = shlex.join(words)
    assert "vllm serve meta-llama/Llama-3.1-8B-Instruct" in shown
    assert "--host 10.0.0.7 --port 9000 --max-model-len 32768" in shown
    found = {}
    for form in ("manifest", "llm-d", "dynamo"):
        assert main([*best, "--kubernetes", form]) == 0
        text = capsys.readouterr().out
        assert "tried on no cluster" in text
        found[form] = list(yaml.safe_load_all(text))
    deployment, service = found["manifest"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["command"] + container["args"] == words
    assert container["ports"][0]["containerPort"] == service["spec"]["ports"][0]["port"] == 9000
    tp = int(words[words.index("--tensor-parallel-size") + 1])
    assert found["llm-d"][0]["decode"]["parallelism"]["tensor"] == tp
    worker = found["dynamo"][0]["spec"]["services"]["Worker"]
    assert worker["extraPodSpec"]["mainContainer"]["args"][:2] == ["--model", "meta-llama/Llama-3.1-8B-Instruct"]
    for args in (found["llm-d"][0]["decode"]["containers"][0]["args"], worker["extraPodSpec"]["mainContainer"]["args"]):
        assert "--max-model-len" in args
        assert "--port" not in args


MILLISECONDS = {"mean": 120.0, "median": 110.0, "percentiles": {"p90": 200.0, "p99": 300.0}}
RESULTS: dict[str, Any] = {
    "vllm.json": {"request_throughput": 8.0, "output_throughput": 2000.0, "total_token_throughput": 10000.0,
                  "mean_ttft_ms": 120.0, "p99_ttft_ms": 300.0, "max_concurrency": 16, "request_rate": "inf"},
    "sglang.jsonl": {"request_throughput": 8.0, "output_throughput": 2000.0, "median_e2e_latency_ms": 1900.0,
                     "mean_ttft_ms": 120.0, "p99_ttft_ms": 300.0, "max_concurrency": 16},
    "guidellm.json": {"metadata": {"guidellm_version": "0.3.1"}, "benchmarks": [{"metrics": {
        "time_to_first_token_ms": {"successful": MILLISECONDS}, "request_concurrency": {"successful": {"mean": 16}},
        "output_tokens_per_second": {"successful": {"mean": 2000.0}}}}]},
    "genai.json": {"request_latency": {"avg": 2000.0}, "output_token_throughput": {"avg": 2000.0},
                   "time_to_first_token": {"avg": 120.0, "p99": 300.0},
                   "input_config": {"loadgen": {"concurrency": 16}}},
}  # fmt: skip


@pytest.mark.parametrize("name", RESULTS)
def test_score_reads_results_of_load_generators_as_rows_of_a_recording(name: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / name
    path.write_text(json.dumps(RESULTS[name]) + "\n")
    assert main(["score", str(path), "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out).values()
    wanted = {"ttft_mean_s": 0.12, "ttft_p99_s": 0.3, "output_tokens_per_s": 2000.0, "concurrency": 16.0}
    assert {key: result["runs"][0][key] for key in wanted} == pytest.approx(wanted)
    assert main(["score", str(path)]) == 0
    heads, row = capsys.readouterr().out.splitlines()[-2:]
    assert dict(zip(heads.split(","), row.split(","), strict=True))["ttft_p99_s"] == "0.3"


def test_a_result_of_another_version_is_one_line(tmp_path: Path, capsys: Any) -> None:
    other = {"metadata": {"guidellm_version": "9.1"}, "benchmarks": [{"figures": {}}]}
    (tmp_path / "g.json").write_text(json.dumps(other))
    assert main(["score", str(tmp_path / "g.json")]) == 2
    said = capsys.readouterr().err
    assert "a result of guidellm, but of another version (its version: 9.1)" in said
    assert said.count("\n") == 1
