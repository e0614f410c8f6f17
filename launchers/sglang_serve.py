"""Run script `sglang`: serves the card's model with SGLang on this machine and measures the card's load.

The server is `sglang.launch_server` on a port of the loopback interface; on several nodes each runs a part of it. It
serves the checkpoint in the folder that CCL_MODEL_PATH names; on CPUs, without one, a model of the card's shape with
random weights. Requests go to `/generate` with token ids: no tokenizer is loaded.

Knobs: see `OPTIONS`; checked by the parser of SGLang 0.5.23. Tried with it on a CPU (`make test-sglang`); on GPUs it
was not tried.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import (
    IllegalConfig,
    LaunchForm,
    MissingRequirement,
    Trial,
    find_packages_first,
    package_versions,
    run_rank,
)
from power_caps import KNOBS as POWER_KNOBS
from serving_load import SGLANG
from serving_model import (
    DTYPES,
    FP8,
    LAUNCH_PORT,
    MODEL,
    NO_OPTION,
    count_checkpoint,
    count_nodes,
    describe_checkpoint,
    find_checkpoint,
    find_max_len,
    list_launch_notes,
    name_model,
    place_server,
    render_weights,
    require_whole_nodes,
    write_checkpoint,
)
from serving_run import EngineCounters, Server, Share, peak_resident, serve_trial

OPTIONS = {
    "tp": "--tensor-parallel-size",
    "pp": "--pipeline-parallel-size",
    "dp": "--data-parallel-size",
    "attention_dp": "--attn-dp-size",
    "ep": "--expert-parallel-size",
    "max_num_seqs": "--max-running-requests",
    "prefill_chunk": "--chunked-prefill-size",
    "mixed_chunk": "--enable-mixed-chunk",
    "prefix_caching": "--disable-radix-cache",
    "async_scheduling": "--disable-overlap-schedule",
    "memory_fraction": "--mem-fraction-static",
    "block_size": "--page-size",
    "kv_cache_tokens": "--max-total-tokens",
    "kv_cache_dtype": "--kv-cache-dtype",
    "scheduling_policy": "--schedule-policy",
    "max_graph_size": "--cuda-graph-max-bs-decode",
    "compile": "--enable-torch-compile",
    "speculative": "--speculative-algorithm",
    "attention_backend": "--attention-backend",
    "moe_backend": "--moe-runner-backend",
    "all2all_backend": "--moe-a2a-backend",
    "stream_interval": "--stream-interval",
}
"""Knob -> option. `--disable-` options are given if the knob is false, the other switches if it is true."""
PRECISION = "precision"
COUNTERS: dict[str, tuple[str, ...]] = {
    "preemptions": ("sglang:num_retracted_requests_total",),
    "queue_mean_s": ("sglang:queue_time_seconds_sum", "sglang:queue_time_seconds_count"),
}
"""Metric of a load -> counters of the server."""
SIZES = {"kv_cache_tokens": r"^sglang:max_total_num_tokens(?:\{.*\})? ([\d.e+]+)$"}
"""Metric -> the line that states it (sglang/srt/observability/metrics_collector.py)."""
ON_CPU = ("--device", "cpu", "--attention-backend", "torch_native", "--model-impl", "transformers")
"""Without GPUs: SGLang's wheels have no kernels for CPUs, so that attention is torch's and the model transformers'."""


def render_options(config: Mapping[str, Any]) -> list[str]:
    """Return the options of the server for a configuration."""
    words: list[str] = []
    for knob, value in config.items():
        if knob in (PRECISION, *POWER_KNOBS):  # rendered with the weights' type; set before the start
            continue
        option = OPTIONS.get(knob)
        if option is None:
            raise IllegalConfig(f"sglang has no knob {knob!r}; it has {', '.join(OPTIONS)}")
        if isinstance(value, bool):
            words += [option] if value is not option.startswith("--disable-") else []
        elif value not in NO_OPTION:
            words += [option, str(value)]
    return words


MASTER = "master"
"""Port of node 0 on which its workers and those of other nodes meet."""


def render_nodes(num_nodes: int, node: int | str, address: str) -> list[str]:
    """Return the options of a node of a server over several; `address` is node 0's."""
    if num_nodes == 1:
        return []
    return ["--nnodes", str(num_nodes), "--node-rank", str(node), "--dist-init-addr", address]


def is_on_cpu(data: Mapping[str, Any]) -> bool:
    """Return whether the card's accelerator is the CPU."""
    return bool(data.get("accelerator") == "cpu")


def render_command(data: Mapping[str, Any], model: str, port: int | str) -> list[str]:
    """Return the command of the server, without the interpreter."""
    weights = render_weights(data, "sglang", model)
    require_whole_nodes(data, spreads_replicas=False, whole_stages=True)
    words = [
        "-m",
        "sglang.launch_server",
        "--model-path",
        model,
        *weights,
        *(ON_CPU if is_on_cpu(data) else ()),
    ]
    words += ["--random-seed", str(data["seed"]), "--host", "127.0.0.1", "--port", str(port)]
    return [*words, "--context-length", str(find_max_len(data)), *render_options(data["config"])]


def show_launch(data: Mapping[str, Any]) -> LaunchForm:
    """Return how to serve one configuration with SGLang alone."""
    nodes = render_nodes(count_nodes(data), "NODE_RANK", "HEAD_NODE:29501")
    return LaunchForm(
        "sglang.launch_server",
        ["python", *place_server(render_command(data, name_model(), LAUNCH_PORT)), *nodes],
        "the parser of SGLang 0.5.23 (options and their choices)",
        notes=[*list_launch_notes("--context-length"), *([NODES_NOTE] if nodes else [])],
    )


NODES_NOTE = "Run the command on every node: NODE_RANK is the node's number from 0, HEAD_NODE the name of node 0."


def serve(trial: Trial) -> None:
    """Run the whole trial."""
    find_packages_first()
    if importlib.util.find_spec("sglang") is None:
        raise MissingRequirement(
            f"sglang must be importable by {sys.executable}: pip install sglang there, or set the profile's `python`,"
            " `modules` or `container`"
        )
    folder = find_folder(trial)
    more = ["--skip-tokenizer-init", "--incremental-streaming-output", "--enable-metrics"]

    def command(port: int, share: Share) -> Sequence[str]:
        place = share.place
        nodes = render_nodes(place.num_nodes, place.node, f"{place.host}:{share.ports.get(MASTER)}")
        return [sys.executable, *render_command(trial.data, str(folder), port), *nodes, *more]

    def describe(server: Server) -> Mapping[str, Any]:
        memory = {"memory_kind": "rss", "peak_memory_bytes": [peak_resident(server)]} if is_on_cpu(trial.data) else {}
        return {
            **describe_server(server),
            **memory,
            "num_params": count_checkpoint(folder),
            **describe_checkpoint(trial.data["precision"]),
        }

    serve_trial(trial, command, EngineCounters(COUNTERS, SIZES).read, describe, api=SGLANG, port_names=(MASTER,))


def find_folder(trial: Trial) -> Path:
    """Return the folder of the checkpoint; on CPUs it is written if none is named."""
    if os.environ.get(MODEL) or not is_on_cpu(trial.data):
        return find_checkpoint()
    folder = trial.folder / "model"
    write_checkpoint(folder, trial.data, DTYPES.get(trial.data["precision"], "float32"))
    return folder


def describe_server(server: Server) -> Mapping[str, Any]:
    """Return what the server says that it computes in."""
    said = json.loads(server.get("/server_info") or b"{}")
    names = {dtype: precision for precision, dtype in DTYPES.items() if precision != FP8}
    precision = FP8 if said.get("quantization") == FP8 else names.get(str(said.get("dtype", "")))
    return {"precision": precision, "versions": package_versions("sglang", "torch", "transformers")}


if __name__ == "__main__":
    sys.exit(run_rank(serve, show_launch))
