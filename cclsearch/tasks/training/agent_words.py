"""Explain training to the LLM agent: assumptions of a prediction, and the meaning of its names."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from cclsearch.card.model import Card

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "micro_batches": "micro-batches per optimizer step and data-parallel rank (gradient accumulation)",
        "scale": "the whole step, every part of it alike",
        "gemm": "matrix multiplications of the layers",
        "attention": "attention kernels",
        "elementwise": "kernels limited by memory bandwidth: norms, activations, residuals",
        "recompute": "forward passes repeated by activation checkpointing",
        "vocabulary": "output projection and loss, on the last pipeline stage",
        "imbalance": "how much that stage delays the other stages (belief stage_imbalance)",
        "launch": "host time to launch kernels, which overlaps with the device's work",
        "tp scale up, tp scale out": "tensor-parallel collectives in a node, and between nodes: bytes over bandwidth",
        "tp wait": "latency of each of these collectives; tp wait staged: more of it, if there are pipeline stages too",
        "launch and latency": "what launch, tp wait and p2p wait add to a step",
        "bubble": "fill and drain of the pipeline",
        "p2p (point to point), p2p wait": "transfers between pipeline stages: bytes over bandwidth, and delay of each",
        "dp (data parallel)": "reduction of gradients and gathering of sharded weights, as far as it is exposed",
        "dp overlap": "the share of it that the backward pass hides",
        "each_micro_batch": "a belief about launch, tp wait and p2p wait: what each micro-batch costs, however small",
    }
)
"""Name in tables, predictions and beliefs -> its meaning."""
ADAM_BYTES = {
    True: "bf16 weights, fp32 gradients, fp32 master weights and two fp32 moments: 18 bytes",
    False: "fp32 weights, gradients and two moments: 16 bytes",
}
"""Whether the work is in 16 bits -> the bytes that `memory.py` counts per parameter."""


def describe_assumptions(card: Card) -> str:
    """Return the closed forms' assumptions for undeclared behaviour, in one line."""
    is_16_bit = card.precision not in {"fp32", "float32", "tf32"}
    return (
        f"assumed by the closed form unless a knob says otherwise: Adam with {ADAM_BYTES[is_16_bit]} per parameter; "
        "1F1B pipeline schedule without interleaving; no activation recomputation; gradients reduced once a step, "
        "overlapped with the last backward pass. If neither a knob nor the framework's file says it, the trials teach "
        "whether ranks shard optimizer states, split the sequence or recompute activations, and the bytes of "
        "gradients. The framework may do otherwise"
    )
