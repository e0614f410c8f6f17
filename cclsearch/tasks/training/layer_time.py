"""Time of one layer, forward and backward: its matrix products, the operators between them, and their launches.

Sources: [K] Korthikanti et al. 2022 (bytes of activations), [N] NVIDIA, Matrix Multiplication Background User's Guide
(tiles and waves of a matrix product).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cclsearch.card.arch import ParameterCount, count_parts, score_width
from cclsearch.card.model import Card, ModelArch
from cclsearch.tasks.machine import Machine
from cclsearch.tasks.training.layout import Array, Layout

# The last wave of tiles leaves half of the multiprocessors idle on average ([N]): 108 (A100) to 132 (H100) of them,
# with the small tiles that are chosen where large ones fill them badly.
HALF_WAVE = 0.5 * 120 * 64 * 128
"""Values of a product that half a wave computes."""
# A pipeline of four steps of 32 (CUTLASS).
TILE_OVERHEAD = 128.0
"""Terms of each value's sum that take as long as a tile's start and end."""
# Tiles have 128 to 256.
HALF_RATE = 192.0
"""Rows or columns of an expert's products at which they reach half of their share of the peak."""
# The cast value is written in both orders with its scales, and some kernels before it do not cast themselves, so that
# it is read again.
CAST_BYTES = 3.0
"""Bytes that the cast of a value to 8 or 4 bits moves."""
ROUTED_BYTES, EXPERT_BYTES = 20.0, 16.0
"""Bytes per routed copy of a token that are moved, forward and backward, per hidden unit (permuted, sent and summed
again) and per unit of an expert's width (the activation function)."""
MOE_KERNELS, EXPERT_KERNELS = 60.0, 8.0
"""Additional kernels of an MoE layer (router, permutation), and per expert of the rank (its GEMMs and casts)."""
# [K] section 4 counts about 34 bytes of activations, which are written and read, forward and backward.
SHARED_BYTES, SPLIT_BYTES = 60.0, 60.0
"""Bytes per token and hidden unit outside and inside of tensor-parallel regions."""
# Cast to 4 bytes, square, scaled value, cast back and product with the weight, each read and written.
EAGER_NORM_BYTES = 2 * 3 * 28.0
"""Additional bytes per token and hidden unit that a layer's two unfused norms move, forward and twice that backward."""
# Forward the values are read (2 bytes), cast to 4, multiplied and cast back; backward the same.
EAGER_ROTARY_BYTES = 2 * 20.0
"""Additional bytes per value of queries and keys that rotary embeddings move if their operators are kernels each."""
# Forward the activated gate is written and read again; backward both factors and the gradients of both.
EAGER_GATE_BYTES = 4.0 + 10.0
"""Additional bytes per unit of a gated feed-forward part if its activation function and product are kernels each."""
# Counted in torch: 110 to 120 of a Llama layer whose norms and rotary embedding are unfused, 62 to 75 of a GPT layer.
KERNELS_PER_LAYER = 110.0
"""Kernels per layer, forward and backward, in eager mode."""


def gemm_seconds(card: Card, layout: Layout, machine: Machine, tokens: Array) -> Array:
    """(N,) seconds of the linear layers, per layer: 2 FLOP per parameter and token forward, twice that backward."""
    arch, counts = card.arch, count_parts(card.arch)
    # without gradients of the weights, which are a third of the work, if only adapters are trained
    rate = machine.flops_per_s * machine.gemm_share * np.where(layout.frozen > 0, 1.5, 1.0)
    moe_share = counts.moe_layers / arch.num_layers
    params = np.zeros(len(layout))
    for inputs, outputs, number in _dense_matrices(arch, counts):
        params = params + number * inputs * outputs * slow_gemm(tokens, inputs, outputs / layout.tp)
    params = params + moe_share * counts.router
    seconds = 6.0 * params * tokens / layout.tp / rate
    if arch.moe is None:
        return np.asarray(seconds)
    spread = np.where(layout.ep > 1, layout.tp / layout.ep, 1.0)  # ranks that share an expert's tokens
    rows = tokens * arch.moe.top_k / arch.moe.num_experts / spread
    columns = arch.moe.expert_intermediate_size / np.where(layout.ep > 1, 1.0, layout.tp)
    slow = (1 + HALF_RATE / rows) * (1 + HALF_RATE / columns)
    return np.asarray(seconds + 6.0 * moe_share * counts.active_experts * tokens / layout.tp / rate * slow)


def _dense_matrices(arch: ModelArch, counts: ParameterCount) -> Iterator[tuple[int, float, float]]:
    """Yield the matrices of a mean layer as (width that is whole, width that tensor parallelism splits, number)."""
    h, out = arch.hidden_size, arch.num_heads * (arch.v_head_dim or arch.head_dim)
    yield h, counts.attention / h - out, 1.0
    yield h, out, 1.0
    number = 3.0 if arch.gated_mlp else 2.0
    dense = counts.dense_layers / arch.num_layers
    yield h, arch.intermediate_size, number * dense
    if counts.shared_experts:
        yield h, counts.shared_experts / h / number, number * (1 - dense)


def slow_gemm(rows: Array, inputs: float, outputs: Array) -> Array:
    """(N,) time of the three products of a linear layer, on average, relative to the rate of large ones.

    The idle half of a product's last wave slows it, more the fewer values it has; the start and end of each tile slow
    it, more the shorter its sums are.
    """
    shapes = ((rows, outputs, inputs), (rows, inputs, outputs), (inputs, outputs, rows))
    each = [(1 + HALF_WAVE / (high * wide)) * (1 + TILE_OVERHEAD / deep) for high, wide, deep in shapes]
    return np.asarray(sum(each) / len(each))


def layer_bytes(card: Card, layout: Layout, machine: Machine, tokens: Array) -> tuple[Array, Array]:
    """Return (N,) bytes that the operators between the GEMMs read and write, per layer, forward and backward.

    And (N,) more if tensor-parallel ranks do not split the sequence, where that is undeclared.
    """
    arch, counts = card.arch, count_parts(card.arch)
    h, moe = arch.hidden_size, arch.moe
    outside = h * (SHARED_BYTES + EAGER_NORM_BYTES * np.maximum(layout.unfused_norms, layout.eager_norms))
    rotated = EAGER_ROTARY_BYTES * arch.head_dim * (arch.num_heads + arch.num_kv_heads) * layout.eager_norms
    gated = EAGER_GATE_BYTES * arch.intermediate_size * (arch.gated_mlp and moe is None) * layout.eager
    touched = (outside + h * SPLIT_BYTES + rotated + gated) / layout.tp
    replicated = outside * (1 - 1 / layout.tp)
    if layout.declares_sequence_parallel:
        touched = touched + np.where(layout.sequence_parallel > 0, 0.0, replicated)
        replicated = np.zeros(len(layout))
    matrix = 11.0 * arch.num_heads * card.number("seq_len") / layout.tp
    touched = touched + matrix * layout.plain_attention * layout.matrix_traffic
    mixed = counts.moe_layers / arch.num_layers
    cast = 2.0 * (h + score_width(arch)) + (1 - mixed) * (h + 2 * arch.intermediate_size)
    if moe is not None:
        width, copies = moe.expert_intermediate_size, moe.top_k + moe.num_shared_experts
        touched = touched + mixed * moe.top_k * (ROUTED_BYTES * h + EXPERT_BYTES * width) / layout.tp
        cast += mixed * copies * (h + 2 * width)
    if machine.flops_per_s > machine.half_flops_per_s:  # linear layers of 8 or 4 bits
        touched = touched + 2 * CAST_BYTES * cast / layout.tp  # inputs forward, gradients backward
    return np.asarray(tokens * touched), np.asarray(tokens * replicated)


def launch_seconds(card: Card, layout: Layout, machine: Machine, layers: Array) -> Array:
    """(N,) host seconds to launch the kernels of a micro-batch."""
    kernels = np.full(len(layout), KERNELS_PER_LAYER)
    if card.arch.moe is not None:
        mixed = count_parts(card.arch).moe_layers / card.arch.num_layers
        kernels = kernels + mixed * (MOE_KERNELS + EXPERT_KERNELS * card.arch.moe.num_experts / layout.ep)
    return np.asarray((layers * kernels + 20.0) * machine.launch_s * (1 + 0.3 * layout.repeated))
