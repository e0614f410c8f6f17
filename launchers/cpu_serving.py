"""Run script `cpu-serving`: serves a small transformer on this machine's CPU and measures the card's load.

The server (`cpu_serving_server.py`) is a process of its own on a port of the loopback interface; requests are sent
over HTTP by `serving_load.py`, as to any other server.

Knobs: see `KNOBS`. The last three are those of servers with static graphs, as on embedded devices (KV-RM).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import IllegalConfig, Trial, package_versions, run_rank
from serving_model import find_longest
from serving_run import Server, Share, serve_trial

SERVER = Path(__file__).with_name("cpu_serving_server.py")
KNOBS = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "block_size": 16,
    "kv_cache_mib": 8,
    "chunked_prefill": True,
    "prefix_caching": False,
    "threads": 1,
    "batch_bucket": 1,
    "context_bucket": 1,
    "reserve_kv_cache": False,
}
"""Knob -> its value in a space without it."""
STATS = ("preemptions", "kv_cache_use_peak", "queue_mean_s", "tokens_per_step", "prefix_cache_hit_rate")
"""What the server reports of a load."""


def serve(trial: Trial) -> None:
    """Run the whole trial."""
    options = {knob: trial.config.get(knob, default) for knob, default in KNOBS.items()}
    longest = find_longest(trial.data)
    held = options["kv_cache_mib"] * 2**20 // bytes_per_token(trial.data["arch"])
    held = held // options["block_size"] * options["block_size"]
    if held < longest + options["block_size"]:
        raise IllegalConfig(
            f"a KV cache of {options['kv_cache_mib']} MiB holds {held} tokens in blocks of {options['block_size']}, but"
            f" a request has up to {longest}: raise kv_cache_mib"
        )
    given = {**options, "arch": trial.data["arch"], "seed": trial.data["seed"], "max_len": longest}
    path = trial.folder / "server.json"
    path.write_text(json.dumps(given), encoding="utf-8")

    def command(port: int, _: Share) -> Sequence[str]:
        return [sys.executable, str(SERVER), str(path), str(port)]

    def read(server: Server) -> dict[str, Any]:
        text = server.get("/stats")
        found: dict[str, Any] = {} if text is None else json.loads(text)
        return found

    def read_stats(server: Server) -> Mapping[str, float]:
        found = read(server)
        return {name: float(found[name]) for name in STATS if name in found}

    def describe(server: Server) -> Mapping[str, Any]:
        found = read(server)
        return {
            "num_params": found.get("num_params"),
            "precision": found.get("precision"),
            "peak_memory_bytes": [found["peak_memory_bytes"]] if "peak_memory_bytes" in found else [],
            "memory_kind": "rss",
            "versions": package_versions("torch"),
        }

    serve_trial(trial, command, read_stats, describe)


def bytes_per_token(arch: Mapping[str, Any]) -> int:
    """Return the bytes of keys and values of one token in fp32."""
    return int(2 * 4 * arch["num_layers"] * arch["num_kv_heads"] * arch["head_dim"])


if __name__ == "__main__":
    sys.exit(run_rank(serve))
