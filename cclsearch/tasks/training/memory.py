"""Memory of the fullest device in closed form: its parts per configuration, and their sum with multipliers.

Sources: [K] Korthikanti et al. 2022 (activations per layer, with tensor and sequence parallelism), [Z] Rajbhandari et
al. 2020 (bytes of mixed-precision Adam and its sharding), [M] Narayanan et al. 2021 (micro-batches in flight in 1F1B).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cclsearch.card.arch import ParameterCount, count_parts
from cclsearch.card.model import Card
from cclsearch.tasks.machine import Machine
from cclsearch.tasks.training.layout import Array, Layout

GIB = float(2**30)
EAGER_NORM_BYTES = 2 * 8.0
"""Additional bytes per token and hidden unit that a layer's two unfused norms keep for the backward pass:
the input and the normalized value, 4 bytes each."""
# The whole sequence before a block and the partial sums after it, forward and backward, 2 bytes each.
PASSING_BYTES = 8.0
"""Bytes per token and hidden unit that tensor-parallel ranks have while they gather or reduce."""
# Two layers of weights in 2 bytes, since the next is gathered meanwhile, and the gradients of one in 4.
GATHERED_BYTES = 8.0
"""Bytes per parameter of a layer while ranks that shard weights compute it."""
# Liger (Hsu et al. 2024) computes chunks of the tokens.
LOSS_CHUNK_SHARE = 0.1
"""Share of the logits that a fused loss has in memory at once."""
Multipliers = dict[str, Array]
"""Name -> multiplier: a scalar, or (S, 1) for S sets of them at once."""
MULTIPLIERS = ("all", "states", "gradients", "unsharded", "activations", "replicated", "logits", "fixed", "kept")
"""Multipliers that calibration may change, in the order of every vector of log multipliers."""


@dataclass(frozen=True, eq=False)
class MemoryParts:
    """GiB on the fullest pipeline stage; (N,) each."""

    weights: Array
    gradients: Array
    optimizer: Array
    unsharded: Array
    """Further optimizer states if the data-parallel ranks do not shard them (0 if the space declares sharding)."""
    held: Array
    """Activations that one micro-batch keeps for its backward pass."""
    kept: Array
    """Further activations that it keeps if no layer is recomputed (0 if the space declares recomputation)."""
    replicated: Array
    """Further activations if tensor-parallel ranks do not split the sequence (0 if the space declares it)."""
    working: Array
    """Activations of one layer while it is recomputed."""
    hidden_working: Array
    """The same if the layers are recomputed and the space does not declare it (0 if it does)."""
    in_flight: Array
    """Micro-batches whose activations the first stage keeps at once."""
    logits: Array
    """GiB of the logits on the last stage."""
    fixed: Array


def name_multipliers(names: Sequence[str], log_multipliers: NDArray[np.float64]) -> Multipliers:
    """Return the multipliers of one set (P,) by name, or of S sets (S, P) as columns that broadcast over (N,) parts."""
    values = np.exp(log_multipliers)
    columns = values if values.ndim == 1 else values.T[:, :, None]
    return dict(zip(names, columns, strict=True))


def parameters_per_rank(counts: ParameterCount, num_layers: int, layout: Layout) -> Array:
    """(N,) parameters per device of the pipeline stage that is looked at."""
    moe_share = counts.moe_layers / num_layers
    dense = counts.attention + counts.norms + (1 - moe_share) * counts.dense_mlp
    dense = dense + moe_share * (counts.shared_experts + counts.router)
    ends = np.minimum(layout.stage_ends, 1.0) * counts.embedding + np.maximum(layout.stage_ends - 1, 0.0) * counts.head
    return np.asarray((layout.stage_layers * dense + ends) / layout.tp + experts_per_rank(counts, num_layers, layout))


def experts_per_rank(counts: ParameterCount, num_layers: int, layout: Layout) -> Array:
    """(N,) parameters of routed experts among them; they divide by ep (by tp if ep is 1)."""
    spread = np.where(layout.ep > 1, layout.ep, layout.tp)
    return np.asarray(layout.stage_layers * counts.moe_layers / num_layers * counts.experts / spread)


def expert_group(layout: Layout) -> tuple[Array, Array]:
    """Return how many ranks apart the ranks with the same experts are, and how many they are."""
    apart = np.where(layout.ep > 1, layout.ep, layout.tp)
    return apart, np.maximum(layout.sharding * layout.tp / apart, 1.0)


def trained_share(layout: Layout) -> Array:
    """(N,) trained parameters as a share of all parameters of the model: with adapters, only theirs."""
    return np.where(layout.frozen > 0, layout.adapter_share, 1.0)


def base_bytes(layout: Layout, width: float) -> Array:
    """(N,) bytes per parameter of the weights; only frozen ones stay quantised."""
    stored = np.where(layout.base_bytes > 0, layout.base_bytes, width)
    return np.where(layout.frozen > 0, stored + layout.adapter_share * width, width)


def memory_parts(card: Card, layout: Layout, machine: Machine) -> MemoryParts:
    """Return the parts of every configuration before multipliers, in GiB."""
    arch, counts = card.arch, count_parts(card.arch)
    params = parameters_per_rank(counts, arch.num_layers, layout)
    width = 4.0 if card.precision in {"fp32", "float32", "tf32"} else 2.0
    # [Z]: data-parallel ranks shard states; those of an expert only the ranks that hold it
    experts = experts_per_rank(counts, arch.num_layers, layout)
    by_dp = params / ((params - experts) / layout.sharding + experts / expert_group(layout)[1])
    trained = trained_share(layout)
    weights = base_bytes(layout, width) * params / np.where(layout.zero >= 3, by_dp, 1.0)
    gradients = 4.0 * trained * params / np.where(layout.zero >= 2, by_dp, 1.0)
    optimizer = (12.0 if width == 2.0 else 8.0) * trained * params
    if layout.declares_sharding:
        optimizer, unsharded = optimizer / np.where(layout.zero >= 1, by_dp, 1.0), np.zeros(len(layout))
    else:
        optimizer, unsharded = optimizer / by_dp, optimizer * (1 - 1 / by_dp)
    tokens = layout.micro_batch * card.number("seq_len") / layout.cp
    layers = layout.stage_layers
    split, whole = _activation_bytes(card, layout, tokens)
    inputs = 2.0 * tokens * arch.hidden_size / np.where(layout.sequence_parallel > 0, layout.tp, 1.0)
    inputs = (1 - layout.offloads) * inputs
    kept, in_layer = 1 - layout.recompute, split + 0.5 * whole
    passing = PASSING_BYTES * tokens * arch.hidden_size * (1 - 1 / layout.tp)
    passing = passing + GATHERED_BYTES * params / layers * (layout.zero >= 3)
    if arch.moe is not None:
        passing = passing + 0.5 * PASSING_BYTES * arch.moe.top_k * tokens * arch.hidden_size * (layout.ep > 1)
    held = layers * (layout.recompute * inputs + kept * split)
    certain = held if layout.declares_recomputation else layers * np.minimum(inputs, split)
    chunks = np.where(layout.fused_loss > 0, LOSS_CHUNK_SHARE, 1.0)
    in_flight = np.minimum(layout.pp, layout.accumulation)  # [M] section 2.2: the first stage
    interleaved = np.where(layout.virtual > 1, 1 + (layout.pp - 1) / (layout.pp * layout.virtual), 1.0)
    return MemoryParts(
        weights=weights / GIB,
        gradients=gradients / GIB,
        optimizer=optimizer / GIB,
        unsharded=unsharded / GIB,
        held=certain / GIB,
        kept=(held - certain) / GIB,
        replicated=layers * kept * whole / GIB,
        working=(layout.recompute * in_layer + passing) / GIB,
        hidden_working=(0.0 if layout.declares_recomputation else 1.0) * in_layer / GIB,
        in_flight=in_flight * interleaved,
        logits=layout.logit_bytes * tokens * arch.vocab_size * chunks / layout.tp / GIB,
        fixed=np.full(len(layout), machine.fixed_gib),
    )


def combine_memory(parts: MemoryParts, log_multipliers: NDArray[np.float64]) -> Array:
    """(N,) GiB of the fullest device for (P,) log multipliers in the order of `MULTIPLIERS`; (S, N) for (S, P)."""
    m = name_multipliers(MULTIPLIERS, log_multipliers)
    states = m["states"] * (
        parts.weights + m["gradients"] * parts.gradients + parts.optimizer + m["unsharded"] * parts.unsharded
    )
    first, last = _stage_activations(parts, m)
    return np.asarray(
        m["all"] * (states + np.maximum(first, last + m["logits"] * parts.logits)) + m["fixed"] * parts.fixed
    )


def split_memory(parts: MemoryParts, log_multipliers: NDArray[np.float64]) -> dict[str, Array]:
    """Return part -> (N,) GiB of the fullest device; the parts add up to `combine_memory`."""
    m = name_multipliers(MULTIPLIERS, log_multipliers)
    first, last = _stage_activations(parts, m)
    logits = m["logits"] * parts.logits
    is_last = last + logits >= first
    states = m["all"] * m["states"]
    return {
        "weights": states * parts.weights,
        "gradients": states * m["gradients"] * parts.gradients,
        "optimizer": states * (parts.optimizer + m["unsharded"] * parts.unsharded),
        "activations": m["all"] * np.where(is_last, last, first),
        "logits": m["all"] * np.where(is_last, logits, 0.0),
        "fixed": m["fixed"] * parts.fixed,
    }


def _stage_activations(parts: MemoryParts, m: Multipliers) -> tuple[Array, Array]:
    """Return the GiB of activations on the first and on the last stage."""
    whole = np.where(parts.hidden_working > 0, m["kept"], 1.0) * m["replicated"] * parts.replicated
    one = parts.held + m["kept"] * parts.kept + whole
    working = parts.working + np.maximum(1 - m["kept"], 0.0) * parts.hidden_working
    first = m["activations"] * (one * parts.in_flight + working)
    return np.asarray(first), np.asarray(m["activations"] * (one + working))


def _activation_bytes(card: Card, layout: Layout, tokens: Array) -> tuple[Array, Array]:
    """Return (N,) bytes that one layer keeps for its backward pass, and (N,) more if the sequence is not split.

    [K] eq. 1 to 4, with the card's width of the feed-forward part.
    """
    arch = card.arch
    h, tp = arch.hidden_size, layout.tp
    if arch.moe is None:
        ffn = arch.intermediate_size * 1.0
    else:
        ffn = arch.moe.expert_intermediate_size * (arch.moe.top_k + arch.moe.num_shared_experts)
    # [K]: 24 = 8 for attention + 16 for a feed-forward part of 4x the hidden size; a gated one keeps three such tensors
    attention = 2.0 * arch.head_dim * (2 * arch.num_heads + 2 * arch.num_kv_heads) / h
    mlp = (6.0 + 2.0 * layout.eager if arch.gated_mlp else 4.0) * ffn / h
    copies = 0.0 if arch.moe is None else 2.0 * (arch.moe.top_k - 1)  # each expert has its own copy of a token
    matrix = 5.0 * arch.num_heads * card.number("seq_len") / h * layout.kept_matrix
    certain = (10.0 + attention + mlp + copies + matrix) / tp
    eager = EAGER_NORM_BYTES * np.maximum(layout.unfused_norms, layout.eager_norms * (layout.recompute <= 0))
    certain = certain + eager / tp
    more = (10.0 + eager) * (1 - 1 / tp)
    if layout.declares_sequence_parallel:
        certain = certain + np.where(layout.sequence_parallel > 0, 0.0, more)
        more = np.zeros(len(layout))
    return np.asarray(tokens * h * certain), np.asarray(tokens * h * more)
