"""Memory of the fullest device in closed form, with its parts, before and after multipliers.

Sources: [K] Korthikanti et al. 2022 (activations a layer, with tensor and sequence parallelism), [Z] Rajbhandari et al.
2020 (bytes of mixed-precision Adam and its sharding), [M] Narayanan et al. 2021 (micro-batches in flight under 1F1B).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cclsearch.card.model import Card
from cclsearch.predict.arch import ParameterCount, count_parts
from cclsearch.predict.layout import Array, Layout
from cclsearch.predict.machine import Machine

GIB = float(2**30)
MULTIPLIERS = ("all", "states", "activations", "logits", "fixed")
"""What may be calibrated, in the order of every vector of log multipliers."""


@dataclass(frozen=True, eq=False)
class MemoryParts:
    """GiB of the fullest pipeline stage. (N,) each."""

    weights: Array
    gradients: Array
    optimizer: Array
    activations: Array
    logits: Array
    """Of the last stage."""
    fixed: Array
    early_activations: Array
    """Of the first stage, which holds the most micro-batches in flight and no logits."""


def parameters_per_rank(counts: ParameterCount, num_layers: int, layout: Layout) -> Array:
    """(N,) parameters that one device holds, of a pipeline's fuller end stage; experts divide by ep instead of tp."""
    layers = np.ceil(num_layers / layout.pp)
    moe_share = counts.moe_layers / num_layers
    dense = counts.attention + counts.norms + (1 - moe_share) * counts.dense_mlp
    dense = dense + moe_share * (counts.shared_experts + counts.router)
    experts = moe_share * counts.experts
    spread = np.where(layout.ep > 1, layout.ep, layout.tp)
    ends = counts.embedding + np.where(layout.pp > 1, 0.0, counts.head)
    return np.asarray(layers * (dense / layout.tp + experts / spread) + ends / layout.tp)


def memory_parts(card: Card, layout: Layout, machine: Machine) -> MemoryParts:
    """Raw parts of every configuration, in GiB."""
    arch, counts = card.arch, count_parts(card.arch)
    params = parameters_per_rank(counts, arch.num_layers, layout)
    width = 4.0 if card.precision in {"fp32", "float32", "tf32"} else 2.0
    by_dp = layout.dp
    weights = width * params / np.where(layout.zero >= 3, by_dp, 1.0)
    gradients = 4.0 * params / np.where(layout.zero >= 2, by_dp, 1.0)
    optimizer = (12.0 if width == 2.0 else 8.0) * params / np.where(layout.zero >= 1, by_dp, 1.0)
    tokens = layout.micro_batch * card.seq_len
    layers = np.ceil(arch.num_layers / layout.pp)
    per_layer = _activation_bytes(card, layout, tokens)
    kept = 2.0 * tokens * arch.hidden_size / np.where(layout.sequence_parallel > 0, layout.tp, 1.0)
    held = layers * (layout.recompute * kept + (1 - layout.recompute) * per_layer)
    in_flight = np.minimum(layout.pp, layout.accumulation)  # [M] section 2.2: the first stage
    interleaved = np.where(layout.virtual > 1, 1 + (layout.pp - 1) / (layout.pp * layout.virtual), 1.0)
    working = layout.recompute * per_layer
    logits = 10.0 * tokens * arch.vocab_size / layout.tp
    return MemoryParts(
        weights=weights / GIB,
        gradients=gradients / GIB,
        optimizer=optimizer / GIB,
        activations=(held + working) / GIB,
        logits=logits / GIB,
        fixed=np.full(len(layout), machine.fixed_gib),
        early_activations=(held * in_flight * interleaved + working) / GIB,
    )


def combine_memory(parts: MemoryParts, log_multipliers: NDArray[np.float64]) -> Array:
    """(N,) GiB of the fullest device with these log multipliers (in the order of `MULTIPLIERS`)."""
    m = dict(zip(MULTIPLIERS, np.exp(log_multipliers), strict=True))
    states = m["states"] * (parts.weights + parts.gradients + parts.optimizer)
    first = m["activations"] * parts.early_activations
    last = m["activations"] * parts.activations + m["logits"] * parts.logits
    return np.asarray(m["all"] * (states + np.maximum(first, last)) + m["fixed"] * parts.fixed)


def split_memory(parts: MemoryParts, log_multipliers: NDArray[np.float64]) -> dict[str, Array]:
    """The memory of the fullest device by part, in GiB; the parts add up to `combine_memory`."""
    m = dict(zip(MULTIPLIERS, np.exp(log_multipliers), strict=True))
    first = m["activations"] * parts.early_activations
    last = m["activations"] * parts.activations + m["logits"] * parts.logits
    is_last = last >= first
    states = m["all"] * m["states"]
    return {
        "weights": states * parts.weights,
        "gradients": states * parts.gradients,
        "optimizer": states * parts.optimizer,
        "activations": m["all"] * np.where(is_last, m["activations"] * parts.activations, first),
        "logits": m["all"] * np.where(is_last, m["logits"] * parts.logits, 0.0),
        "fixed": m["fixed"] * parts.fixed,
    }


def _activation_bytes(card: Card, layout: Layout, tokens: Array) -> Array:
    """(N,) bytes that one layer keeps for its backward pass. [K] eq. 1 to 4, with the feed-forward part's own width."""
    arch = card.arch
    h, tp = arch.hidden_size, layout.tp
    outside = np.where(layout.sequence_parallel > 0, 10.0 / tp, 10.0)
    if arch.moe is None:
        ffn = arch.intermediate_size * 1.0
    else:
        ffn = arch.moe.expert_intermediate_size * (arch.moe.top_k + arch.moe.num_shared_experts)
    # [K]: 24 = 8 of attention + 16 of a feed-forward part four times as wide; a gated one keeps three such tensors
    attention = 2.0 * arch.head_dim * (2 * arch.num_heads + 2 * arch.num_kv_heads) / h
    mlp = (6.0 if arch.gated_mlp else 4.0) * ffn / h
    matrix = 5.0 * arch.num_heads * card.seq_len / h * layout.plain_attention
    return np.asarray(tokens * h * (outside + (attention + mlp + matrix) / tp))
