"""Writes simulated landscapes, to try a strategy on unmeasured problems. They are simulated and never evidence.

    python benchmarks/simulate.py OUT [--count 40] [--seed 0]

Each is a random model (1B to 175B, some mixtures of experts), a random cluster (4 to 512 accelerators) and a random
framework: multipliers of every part with wider distributions than the priors, effects that the closed form does not
model (a smooth random field over the knobs, choices of a `kernel` knob), hiccups in 1 of 20 runs, and configurations
that run out of memory or crash. The format is that of measured landscapes, so `ccl-search bench` runs them.

The column `cause` says why a row fails.
"""

from __future__ import annotations

import argparse
import csv
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from cclsearch.card.load import card_from_mapping
from cclsearch.space.table import Knob, space_from_rows
from cclsearch.stats.kernel import Features, KernelShape, kernel
from cclsearch.tasks.training import memory, time
from cclsearch.tasks.training.prediction import make_predictor

MODELS = {  # hidden, layers, heads, feed-forward: published shapes
    "1b": (2048, 16, 32, 8192),
    "3b": (3072, 28, 24, 8192),
    "7b": (4096, 32, 32, 11008),
    "13b": (5120, 40, 40, 13824),
    "30b": (6656, 60, 52, 17920),
    "70b": (8192, 80, 64, 28672),
    "175b": (12288, 96, 96, 49152),
}
MEMORY_DRAWN = memory.MULTIPLIERS[:-1]
"""All but what recomputation that no knob declares keeps."""
CLUSTERS = (("nvidia_a100", 40, 2400, 200), ("nvidia_a100", 80, 2400, 800), ("nvidia_h100", 80, 3600, 400))
KERNELS = ("torch", "fused", "flash_attention2", "flash_attention2 + norm")


CAUSE = "cause"
"""Column right of the status that no search reads: why the row fails."""


def simulate(
    rng: np.random.Generator, name: str, fewest: int = 12, most: int = 250
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a card as YAML data and the `fewest` to `most` rows of `trials.csv`."""
    data, knobs = _draw_problem(rng, name)
    card = card_from_mapping(data, name)
    names = list(knobs)
    rows = [dict(zip(names, values, strict=True)) for values in itertools.product(*knobs.values())]
    rows = [row for row in rows if _is_legal(row, card)]
    if len(rows) > most:
        rows = [rows[n] for n in np.sort(rng.permutation(len(rows))[:most])]
    if len(rows) < fewest:
        return simulate(rng, name, fewest, most)
    space = space_from_rows([Knob(k, tuple(dict.fromkeys(row[k] for row in rows))) for k in names], rows)
    predictor = make_predictor(card, space)
    assert predictor.memory is not None
    every = np.arange(len(rows))
    spread = rng.normal(0.2, 0.7, len(time.MULTIPLIERS)) * _narrow(time.MULTIPLIERS)
    log_time = predictor.forms["step_time_s"].log_cost(every)(spread)
    log_time = log_time + _field(rng, predictor.features, 0.12) + _kernel_effect(rng, rows)
    log_time = log_time + rng.normal(0, rng.choice([0.005, 0.02, 0.1]), len(rows))
    hiccup = rng.random(len(rows)) < 0.05
    log_time = log_time + hiccup * rng.exponential(0.7, len(rows))
    spread = rng.normal(0, 0.35, len(MEMORY_DRAWN)) * _narrow(MEMORY_DRAWN)
    log_gib = predictor.memory.form.log_cost(every)(np.append(spread + _draw_memory_hypothesis(rng), 0.0))
    log_gib = log_gib + _field(rng, predictor.features, 0.05)
    crash = _field(rng, predictor.features, 1.0) > rng.uniform(1.5, 3.0)
    out = log_gib > np.log(0.95 * card.hardware.memory_gib)
    has_oom, has_peaks = rng.random() < 0.5, rng.random() < 0.6
    if (~out & ~crash).sum() < 5:
        return simulate(rng, name, fewest, most)
    for n, row in enumerate(rows):
        failed = bool(out[n] or crash[n])
        row["status"] = ("oom" if out[n] and has_oom else "failed") if failed else "ok"
        row["step_time_s"] = "" if failed else round(float(np.exp(log_time[n])), 5)
        if has_peaks:
            row["peak_memory_gib"] = "" if failed else round(float(np.exp(log_gib[n])), 1)
        row[CAUSE] = "memory" if out[n] else "crash" if crash[n] else ""
    return data, rows


def _draw_problem(rng: np.random.Generator, name: str) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    size = rng.choice(list(MODELS))
    hidden, layers, heads, ffn = MODELS[str(size)]
    chip, memory_gb, up, out = CLUSTERS[rng.integers(len(CLUSTERS))]
    min_log2 = {"1b": 2, "3b": 2, "7b": 3, "13b": 3, "30b": 4, "70b": 5, "175b": 6}[str(size)]
    accelerators = int(2 ** rng.integers(min_log2, 10))
    batch, seq = int(2 ** rng.integers(6, 11)), int(rng.choice([1024, 2048, 4096]))
    node = min(8, accelerators)
    powers = tuple(2**n for n in range(10))
    knobs: dict[str, tuple[Any, ...]] = {
        "tp": tuple(p for p in powers if p <= min(2 * node, accelerators, heads)),
        "pp": tuple(p for p in powers if p <= min(accelerators, layers, 32)),
        "dp": tuple(p for p in powers if p <= min(accelerators, batch)),
        "micro_batch_size": (1, 2, 4, 8),
    }
    is_moe = rng.random() < 0.15
    if is_moe:
        knobs["ep"] = (1, 2, 4, 8)
    extra = {"zero_stage": (0, 1), "activation_checkpointing": (False, True), "kernel": KERNELS}
    extra["sequence_parallel"] = (False, True)
    for knob in rng.permutation(list(extra))[: rng.integers(0, 4)]:
        knobs[str(knob)] = extra[str(knob)]
    arch: dict[str, Any] = {
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "vocab_size": int(rng.choice([32000, 50304, 128256])),
        "tied_embeddings": bool(rng.random() < 0.3),
    }
    if is_moe:
        arch |= {"num_experts": 8, "top_k": 2, "expert_intermediate_size": ffn // 4}
    return _card(name, str(size), arch, (batch, seq), (chip, memory_gb, up, out, accelerators, node)), knobs


def _card(
    name: str, size: str, arch: dict[str, Any], work: tuple[int, int], machine: tuple[Any, ...]
) -> dict[str, Any]:
    chip, memory_gb, up, out, accelerators, node = machine
    moe = "num_experts" in arch
    model = {"phase": "training", "moe": moe, "model_family": size, "precision": "bf16", "model_arch": arch}
    xpu = {"type": "GPU", "model": chip, "memory_gb": memory_gb, "total_count": accelerators, "count_per_node": node}
    hardware = {"network_topo": {"bandwidth_gbps": [out, up]}, "xpu_spec": xpu}
    return {
        "version": 1,
        "description": f"simulated {size} on {accelerators} {chip} ({name}); nothing was measured",
        "source": "simulated by benchmarks/simulate.py",
        "workload": {"model": model, "data": {"batch_size": work[0], "seq_len": work[1]}, "hardware": hardware},
        "Model-executor": {"framework": {"name": "simulated"}},
    }


def _is_legal(row: dict[str, Any], card: Any) -> bool:
    if row["tp"] * row["pp"] * row["dp"] != card.hardware.num_accelerators:
        return False
    if card.number("global_batch_size") % (row["dp"] * row["micro_batch_size"]) or card.arch.num_layers % row["pp"]:
        return False
    return bool((row["dp"] * row["tp"]) % row.get("ep", 1) == 0)


def _draw_memory_hypothesis(rng: np.random.Generator) -> np.ndarray:
    """Return log multipliers of the memory: states and sequences replicated or sharded, gradients of 4 or 2 bytes."""
    less = {"unsharded": -5.0, "replicated": -5.0, "gradients": float(np.log(0.5))}
    return np.array([less.get(name, 0.0) * (rng.random() < 0.5) for name in MEMORY_DRAWN])


def _narrow(names: tuple[str, ...]) -> np.ndarray:
    """Return the scale of each multiplier's spread: arithmetic varies less than links and hosts."""
    tight = {"scale": 0.6, "gemm": 0.3, "attention": 0.6, "bubble": 0.4, "states": 0.4, "all": 0.2, "gradients": 0.6}
    return np.array([tight.get(name, 1.0) for name in names])


def _field(rng: np.random.Generator, features: Features, size: float) -> np.ndarray:
    covariance = kernel(features, features, KernelShape(size, 1.2, 0.3 * size, 0.5 * size, 0.5))
    values, vectors = np.linalg.eigh(covariance)
    return np.asarray(vectors @ (np.sqrt(np.maximum(values, 0)) * rng.standard_normal(len(values))))


def _kernel_effect(rng: np.random.Generator, rows: list[dict[str, Any]]) -> np.ndarray:
    effect = {choice: rng.normal(0, 0.2) for choice in KERNELS}
    return np.array([effect[row["kernel"]] if "kernel" in row else 0.0 for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for n in range(args.count):
        name = f"simulated-{args.seed}-{n:03d}"
        rng = np.random.default_rng([args.seed, n])
        data, rows = simulate(rng, name)
        folder = args.out / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "card.yaml").write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
        with (folder / "trials.csv").open("w", newline="", encoding="utf-8") as lines:
            writer = csv.DictWriter(lines, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    print(f"wrote {args.count} simulated landscapes to {args.out}")


if __name__ == "__main__":
    main()
