"""Step time in closed form: its parts per configuration, and their combination with multipliers.

Public cost models agree on the parts. Frameworks and clusters differ in the multipliers, so trials calibrate those.
Sources: [M] Narayanan et al. 2021 (Megatron-LM, sections 2 and 3), [K] Korthikanti et al. 2022
(sequence parallelism, recomputation), [C] Isaev et al. 2023 (Calculon), [V] Bang et al. 2024 (vTrain), [T] Thakur et
al. 2005 with Chan et al. 2007 (rings), [Z] Rajbhandari et al. 2020 (ZeRO), [G] Lepikhin et al. 2021 (GShard),
[R] Liu et al. 2023 (Ring Attention).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cclsearch.card.arch import attention_span, count_parts, score_width
from cclsearch.card.model import Card
from cclsearch.tasks.machine import Machine
from cclsearch.tasks.training.layer_time import gemm_seconds, launch_seconds, layer_bytes
from cclsearch.tasks.training.layout import Array, Layout
from cclsearch.tasks.training.memory import (
    Multipliers,
    expert_group,
    experts_per_rank,
    name_multipliers,
    parameters_per_rank,
    trained_share,
)
from cclsearch.tasks.training.network import AXES, AxisLink, Network

LINK_MULTIPLIERS = ("tp_scale_up", "tp_scale_out", "expert_exchange", "p2p", "dp")
"""Multipliers of the seconds that messages take on links."""
MULTIPLIERS = (
    *("scale", "gemm", "attention", "elementwise", "replicated", "recompute", "vocabulary", "imbalance", "launch"),
    *("tp_scale_up", "tp_scale_out", "tp_wait", "tp_wait_staged", "expert_exchange", "bubble", "p2p", "p2p_wait", "dp"),
    *("dp_overlap", "optimizer"),
)
"""Multipliers that calibration may change, in the order of every vector of log multipliers."""

ATTENTION_PEAK_SHARE = 0.45
# Counted in Megatron-LM's cross entropy: cast to 4 bytes, maximum, difference, exponential, sum, quotient, gradient and
# cast back, each read and written, and the two products.
LOGIT_BYTES, FUSED_LOGIT_BYTES = 58.0, 16.0
"""Bytes per logit of the loss, forward and backward, and of a loss in one kernel."""
# Measured in eager PyTorch 2.11: 0.29 to 0.46 for GPT and Llama layers.
FORWARD_HOST_SHARE = 0.4
"""Share of a layer's host time that its forward pass takes (of the device's, a third)."""
# About a launch: a host that waits for a transfer cannot launch the collective ahead.
STAGED_WAIT_S = 2e-5
"""Additional seconds per rank that a tensor-parallel collective waits inside a pipeline, before calibration."""
# 25 MiB in PyTorch's DDP, 80 MB in Megatron-LM.
BUCKET_BYTES = 50e6
"""Bytes of gradients or weights that one collective sends."""
COLLECTIVE_WAIT = 1e-3
"""Seconds by which a point-to-point transfer of a pipeline delays its stage, before calibration."""


@dataclass(frozen=True, eq=False)
class TimeParts:
    """Seconds before multipliers: per micro-batch and stage, forward and backward, or per step if noted; (N,) each."""

    gemm: Array
    attention: Array
    elementwise: Array
    replicated: Array
    """Further seconds of `elementwise` if tensor-parallel ranks do not split the sequence (0 if that is declared)."""
    recompute_share: Array
    vocabulary: Array
    """Seconds of the vocabulary's layers on the last stage."""
    launch: Array
    """Host time to launch the kernels; overlaps with the device's work."""
    tp_scale_up: Array
    tp_scale_out: Array
    tp_wait: Array
    """Host and link latency of the tensor-parallel collectives; overlaps like `launch`."""
    tp_wait_staged: Array
    """Additional latency inside a pipeline, in frameworks that serialize the two."""
    expert_exchange: Array
    bubble: Array
    """Pipeline fill and drain, in micro-batches."""
    p2p: Array
    """Seconds between pipeline stages, and of the ring of context parallelism that attention does not hide."""
    p2p_wait: Array
    dp: Array
    """Per step: communication of gradients and, if sharded, of weights."""
    dp_exposed_floor: Array
    """Per step: communication that cannot overlap with the backward pass (weights gathered after the optimizer)."""
    dp_window: Array
    """Micro-batches behind whose computation that communication can hide."""
    optimizer: Array
    """Per step."""
    shared_tp: Array
    """Whether gradients leave their node while tensor-parallel collectives do, over links: 1 or 0."""
    shared_exchange: Array
    """The same of exchanges with experts."""
    shared_p2p: Array
    """The same of pipeline stages."""
    even_split: Array
    """Whether all pipeline stages have the same number of layers: 1, 0 (balanced by their work) or NaN."""
    balanced_first: Array
    """Layers of the first stages of a balanced pipeline, relative to an even one."""
    balanced_last: Array
    """The same for its last stage, which has the output projection."""
    micro_batches: Array
    virtual: Array
    pipelined: Array
    """1 - 1 / pp: share of the vocabulary's work in excess of an even split over the stages."""


def time_parts(card: Card, layout: Layout, machine: Machine) -> TimeParts:
    """Return the parts of every configuration before multipliers; the module docstring lists the sources."""
    return time_on(card, layout, machine, connect(card, layout, machine))


def connect(card: Card, layout: Layout, machine: Machine) -> Network:
    """Return the links of every configuration, with nodes in order of their traffic where that is asked for."""
    is_asked = machine.links is not None and (layout.hosts.any() or layout.devices.any())
    weights = count_bytes(card, layout, machine) if is_asked else None
    return Network(layout, machine, weights)


class _OneAxis(Network):
    """Links on which one axis sends a byte per second, and all else takes no time."""

    def __init__(self, layout: Layout, name: str) -> None:
        self._size, self._name = len(layout), name

    def axis(self, name: str) -> AxisLink:
        rate = np.full(self._size, 1.0 if name == self._name else np.inf)
        return AxisLink(rate, np.zeros(self._size), np.zeros(self._size, dtype=bool))


def count_bytes(card: Card, layout: Layout, machine: Machine) -> dict[str, Array]:
    """Return axis -> (N,) bytes that a member of its groups sends per step, before multipliers."""
    found = {}
    for name in AXES:
        parts = time_on(card, layout, machine, _OneAxis(layout, name))
        per_micro_batch = parts.tp_scale_up + parts.tp_scale_out + parts.expert_exchange + parts.p2p
        found[name] = parts.micro_batches * per_micro_batch + parts.dp
    return found


def time_on(card: Card, layout: Layout, machine: Machine, network: Network) -> TimeParts:
    """Return the parts on these links."""
    arch, counts = card.arch, count_parts(card.arch)
    tokens = layout.micro_batch * card.number("seq_len") / layout.cp
    layers = layout.stage_layers
    h, half_rate = arch.hidden_size, machine.half_flops_per_s
    # [M] eq. 3, attention matrix: half of it is masked, but only fused kernels skip that half
    sequence, width = attention_span(arch, card.number("seq_len")), score_width(arch)
    attention = 6.0 * tokens * sequence * width * layers / layout.tp / (half_rate * ATTENTION_PEAK_SHARE)
    attention = attention * layout.attention_slowness * (1 + layout.plain_attention)
    head = 6.0 * tokens * h * arch.vocab_size / layout.tp / (half_rate * machine.gemm_share)
    per_logit = np.where(layout.fused_loss > 0, FUSED_LOGIT_BYTES, LOGIT_BYTES)
    logits = per_logit * tokens * arch.vocab_size / layout.tp / machine.hbm_bytes_s
    tp_up, tp_out, tp_wait, tp_wait_staged = _tensor_parallel(card, layout, machine, network, tokens, layers)
    dp, floor = _data_parallel(card, layout, machine, network)
    ring = _context_parallel(card, layout, network, tokens, layers)
    # ranks that share the cores of a host take turns
    turns = np.maximum(np.minimum(layout.ranks, machine.node) / machine.host_cores, 1.0)
    hop = 2.0 * machine.element_bytes * tokens * h / network.axis("pp").bytes_s
    split = np.where(layout.sequence_parallel > 0, layout.tp, 1.0)  # [M] section 4.1: each rank sends its part
    nodes = np.maximum(layout.ranks / machine.node, 1.0)
    staged = (layout.pp > 1).astype(np.float64)
    local_params = parameters_per_rank(counts, arch.num_layers, layout)
    sharded = np.where(layout.zero >= 1, layout.sharding, 1.0)
    moved, replicated = layer_bytes(card, layout, machine, tokens)
    first, last = _balanced_layers(card, layout)
    shared = [_shares_ports(machine, network, name) for name in ("tp", "exchange", "pp")]
    return TimeParts(
        gemm=gemm_seconds(card, layout, machine, tokens) * layers * turns,
        attention=attention * turns,
        elementwise=moved * layers / machine.hbm_bytes_s * turns,
        replicated=replicated * layers / machine.hbm_bytes_s * turns,
        recompute_share=layout.repeated,
        vocabulary=(head + logits) * turns,
        launch=launch_seconds(card, layout, machine, layers) * turns,
        tp_scale_up=tp_up,
        tp_scale_out=tp_out,
        tp_wait=tp_wait,
        tp_wait_staged=tp_wait_staged,
        expert_exchange=_expert_exchange(card, layout, machine, network, tokens, layers),
        bubble=_bubble(layout),
        # activations forward, gradients backward; the ring hides behind the attention on its last block
        p2p=staged * layout.virtual * hop / split + ring * ring / (ring + attention + 1e-12),
        p2p_wait=staged * layout.blocks * COLLECTIVE_WAIT * layout.virtual * nodes,
        dp=dp,
        dp_exposed_floor=floor,
        # gradients are reduced in the last backward pass; sharded ones and gathered weights in every micro-batch
        dp_window=np.where(layout.zero >= 2, layout.accumulation, 1.0) * layout.overlaps,
        optimizer=30.0 * trained_share(layout) * local_params / sharded / machine.hbm_bytes_s * turns + 2e-3,
        shared_tp=shared[0],
        shared_exchange=shared[1],
        shared_p2p=shared[2],
        even_split=layout.even_split,
        balanced_first=first / layout.stage_layers,
        balanced_last=last / layout.stage_layers,
        micro_batches=layout.accumulation,
        virtual=layout.virtual,
        pipelined=1 - 1 / layout.pp,
    )


def _balanced_layers(card: Card, layout: Layout) -> tuple[Array, Array]:
    """Return (N,) layers of the first and of the last stage if stages are balanced by their work, in whole layers.

    The output projection counts as many layers as have its parameters, as nanotron counts it (`build_model`).
    """
    arch, counts = card.arch, count_parts(card.arch)
    layer = (counts.active - counts.embedding - counts.head) / arch.num_layers
    head = arch.vocab_size * arch.hidden_size / layer
    first = np.ceil((arch.num_layers + head) / layout.pp - 1e-9)
    return first, np.maximum(arch.num_layers - (layout.pp - 1) * first, 0.0)


def _shares_ports(machine: Machine, network: Network, name: str) -> Array:
    """(N,) 1 where an axis and the gradients both leave their nodes over links, and so use the same ports.

    Links are measured, or belong to a simulated cluster, where each rank has a port to a tier.
    """
    gradients = network.axis("sharding").crosses | network.axis("replicated").crosses
    return np.asarray((network.axis(name).crosses & gradients) * float(machine.has_network))


def combine_time(parts: TimeParts, log_multipliers: NDArray[np.float64]) -> Array:
    """(N,) seconds per optimizer step for (P,) log multipliers in the order of `MULTIPLIERS`; (S, N) for (S, P)."""
    m = name_multipliers(MULTIPLIERS, log_multipliers)
    slot, _ = _slot_time(parts, m)
    slots = parts.micro_batches + m["bubble"] * parts.bubble
    exposed = _exposed_traffic(parts, m, slot)
    step = slots * slot + exposed + m["dp"] * parts.dp_exposed_floor + m["optimizer"] * parts.optimizer
    return np.asarray(m["scale"] * step)


def split_time(parts: TimeParts, log_multipliers: NDArray[np.float64]) -> dict[str, Array]:
    """Return part -> (N,) seconds per step; the parts add up to `combine_time`."""
    m = name_multipliers(MULTIPLIERS, log_multipliers)
    slot, head = _slot_time(parts, m)
    scale, count = m["scale"], parts.micro_batches
    between = m["elementwise"] * (parts.elementwise + m["replicated"] * parts.replicated)
    layer = m["gemm"] * parts.gemm + m["attention"] * parts.attention + between
    pieces = {
        "gemm": count * m["gemm"] * parts.gemm,
        "attention": count * m["attention"] * parts.attention,
        "elementwise": count * between,
        "recompute": count * layer * m["recompute"] * parts.recompute_share / 3,
        "vocabulary": count * head,
        "tensor parallel": count * (m["tp_scale_up"] * parts.tp_scale_up + m["tp_scale_out"] * parts.tp_scale_out),
        "expert exchange": count * m["expert_exchange"] * parts.expert_exchange,
        "point to point": count * m["p2p"] * parts.p2p,
    }
    launch = count * slot - np.sum(list(pieces.values()), axis=0)
    rest = {
        "launch and latency": launch,
        "pipeline bubble": m["bubble"] * parts.bubble * slot,
        "data parallel": _exposed_traffic(parts, m, slot) + m["dp"] * parts.dp_exposed_floor,
        "optimizer": m["optimizer"] * parts.optimizer,
    }
    return {name: scale * np.asarray(seconds) for name, seconds in (pieces | rest).items()}


def slot_seconds(parts: TimeParts) -> Array:
    """(N,) seconds of a stage per micro-batch before calibration, with the whole output projection if it has it."""
    return _slot_time(parts, name_multipliers(MULTIPLIERS, np.zeros(len(MULTIPLIERS))))[0]


def _slot_time(parts: TimeParts, m: Multipliers) -> tuple[Array, Array]:
    """Return the seconds of the slowest stage per micro-batch, and the vocabulary's addition to its layers."""
    between = m["elementwise"] * (parts.elementwise + m["replicated"] * parts.replicated)
    layers = m["gemm"] * parts.gemm + m["attention"] * parts.attention + between
    layers = layers * (1 + m["recompute"] * parts.recompute_share / 3)
    layers = layers + m["tp_scale_up"] * parts.tp_scale_up + m["tp_scale_out"] * parts.tp_scale_out
    layers = layers + m["expert_exchange"] * parts.expert_exchange
    head = _head_time(parts, m, layers)
    host = m["launch"] * parts.launch + m["tp_wait"] * parts.tp_wait + m["tp_wait_staged"] * parts.tp_wait_staged
    host = host + m["p2p_wait"] * parts.p2p_wait
    forward = layers / (3 + m["recompute"] * parts.recompute_share)
    backward = layers - forward + head + m["p2p"] * parts.p2p
    return _both_passes(forward, backward, host), np.asarray(head)


def _both_passes(forward: Array, backward: Array, host: Array) -> Array:
    """Return the seconds of a forward and a backward pass; each waits for the slower of its device and its host."""
    first = _wait_for_slower(forward, FORWARD_HOST_SHARE * host)
    return first + _wait_for_slower(backward, (1 - FORWARD_HOST_SHARE) * host)


def _wait_for_slower(device: Array, host: Array) -> Array:
    """Return a smooth maximum of the two: the device waits for the host or the host for the device."""
    device2, host2 = device * device, host * host
    return np.asarray(np.sqrt(np.sqrt(device2 * device2 + host2 * host2)))


def _head_time(parts: TimeParts, m: Multipliers, layers: Array) -> Array:
    """Return the seconds by which the slowest stage is slower than an even one without the output projection.

    With an even split all wait for the last stage, which has it; a balanced one has fewer layers there.
    """
    head = m["vocabulary"] * parts.vocabulary
    balanced = np.maximum(layers * parts.balanced_first, layers * parts.balanced_last + head) - layers
    even = np.where(np.isnan(parts.even_split), _share(m["imbalance"]), parts.even_split)
    even = np.where(parts.pipelined > 0, even, 1.0)
    return np.asarray(even * head + (1 - even) * balanced)


def _exposed_traffic(parts: TimeParts, m: Multipliers, slot: Array) -> Array:
    """Return the seconds of data-parallel traffic that computation does not hide; smooth in both limits.

    While other messages of a micro-batch use the ports of the nodes, gradients cannot.
    """
    busy = parts.shared_tp * m["tp_scale_out"] * parts.tp_scale_out + parts.shared_p2p * m["p2p"] * parts.p2p
    busy = busy + parts.shared_exchange * m["expert_exchange"] * parts.expert_exchange
    traffic, hides = m["dp"] * parts.dp, m["dp_overlap"] * 0.5 * parts.dp_window * (slot - busy)
    return np.asarray(traffic * traffic / (traffic + hides + 1e-12))


def _share(multiplier: Array) -> Array:
    """Map a positive multiplier around 1 to a share around 0.5."""
    return multiplier / (1 + multiplier)


def _bubble(layout: Layout) -> Array:
    """(N,) pipeline fill and drain in micro-batches: [M] section 2.2 with at least as many micro-batches as stages.

    With fewer, a micro-batch that has passed all first chunks waits for no other: the pipeline lasts as long as the
    last micro-batch needs for all chunks, pp + (m - 1) / v in place of m + (pp - 1) / v.
    """
    few = layout.pp - layout.accumulation + (layout.accumulation - 1) / layout.virtual
    return np.asarray(np.maximum((layout.pp - 1) / layout.virtual, few))


def _tensor_parallel(
    card: Card, layout: Layout, machine: Machine, network: Network, tokens: Array, layers: Array
) -> tuple[Array, Array, Array, Array]:
    """Return scale-up, scale-out, wait and staged-wait seconds of tensor parallelism.

    [M] section 2.3: two all-reduces per layer forward and two backward (sequence parallelism moves the same bytes, [K]
    section 4.2).
    """
    message = machine.element_bytes * tokens * card.arch.hidden_size
    share = 2.0 * (layout.tp - 1) / layout.tp  # [T] ring
    calls = 4.0 * layers * (1 + 0.5 * (layout.recompute >= 1)) * (layout.tp > 1)
    link = network.axis("tp")
    inside = np.minimum(layout.tp, machine.node)
    if not machine.has_network:
        out_wait = link.crosses * 8 * machine.out_latency_s * layout.tp
        wait = calls * (8 * machine.up_latency_s * np.log2(inside + 1) + out_wait)
    else:
        wait = calls * 8 * link.latency_s * np.where(link.crosses, layout.tp, np.log2(layout.tp + 1))
    staged = calls * (layout.pp > 1) * layout.tp * STAGED_WAIT_S
    seconds = calls * message * share / link.bytes_s
    return seconds * ~link.crosses, seconds * link.crosses, wait, staged


def _data_parallel(card: Card, layout: Layout, machine: Machine, network: Network) -> tuple[Array, Array]:
    """Return the communication seconds per step, and the seconds after the optimizer that cannot overlap.

    [Z] section 7: gradients, 2 bytes per parameter (4 over measured links in a precision of 4 bytes), reduced once per
    step; sharded weights gathered again. Experts are reduced over the ranks that hold the same ones.
    """

    def ring_s(axis: str, params: Array, group: Array) -> Array:
        return _ring_seconds(network.axis(axis), machine.element_bytes * params, group, most)

    counts = count_parts(card.arch)
    local = parameters_per_rank(counts, card.arch.num_layers, layout)
    trained = trained_share(layout)
    most = np.where(layout.zero >= 3, layout.stage_layers, np.inf)  # one collective for each layer
    once = ring_s("sharding", local, layout.sharding)
    if card.arch.moe is not None:
        experts = experts_per_rank(counts, card.arch.num_layers, layout)
        once = ring_s("sharding", local - experts, layout.sharding)
        once = once + ring_s("experts", experts, expert_group(layout)[1])
    gathers = np.where(layout.zero >= 3, 2.0 * layout.accumulation, 0.0)
    reduces = np.where(layout.zero == 0, 2.0, np.where(layout.zero >= 2, layout.accumulation, 1.0))
    after_step = np.where((layout.zero >= 1) & (layout.zero < 3), 1.0, 0.0)
    # HSDP: each rank reduces its shard of the gradients over the replicas, which are a whole sharding group apart
    share = local / layout.sharding
    between = 2.0 * ring_s("replicated", share, layout.replicated)
    between = between * np.maximum(reduces, 1.0)
    return np.asarray(once * (trained * reduces + gathers) + trained * between), np.asarray(trained * once * after_step)


def _ring_seconds(link: AxisLink, size: Array, group: Array, most_calls: Array) -> Array:
    """(N,) seconds of one pass of `size` bytes around a ring of `group` ranks ([T]).

    Each bucket, of `most_calls` at most, waits for group - 1 hops: latency, not bandwidth, limits large groups.
    """
    moved = size * (group - 1) / group / link.bytes_s
    buckets = np.maximum(np.minimum(size / BUCKET_BYTES, most_calls), 1.0)
    return np.asarray(moved + link.latency_s * (group - 1) * buckets)


def _context_parallel(card: Card, layout: Layout, network: Network, tokens: Array, layers: Array) -> Array:
    """(N,) seconds of the blocks of keys and values around the ring of context-parallel ranks, in both passes.

    [R] section 3.1: every rank passes on its block cp - 1 times; in the backward pass its gradients go with it.
    """
    link = network.axis("cp")
    block = 2.0 * tokens * 2 * card.arch.num_kv_heads * card.arch.head_dim / layout.tp  # 2 bytes per value
    return np.asarray((layout.cp - 1) * layers * (3.0 + layout.repeated) * (block / link.bytes_s + link.latency_s))


def _expert_exchange(
    card: Card, layout: Layout, machine: Machine, network: Network, tokens: Array, layers: Array
) -> Array:
    """(N,) seconds of the all-to-all of tokens to experts and back, in both passes ([G] section 3.2).

    Between nodes a token goes once to each node with experts of it, and is copied inside (DeepSeek-V3, section 3.2.2).
    """
    moe = card.arch.moe
    if moe is None:
        return np.zeros(len(layout))
    mixtures = layers * count_parts(card.arch).moe_layers / card.arch.num_layers
    copy = machine.element_bytes * tokens / layout.tp * card.arch.hidden_size
    link = network.axis("exchange")
    nodes = np.maximum(layout.ep / machine.node, 1.0) if not machine.has_network else np.ones(len(layout))
    inside = copy * moe.top_k * (layout.ep - 1) / layout.ep / link.bytes_s
    reached = nodes * (1 - (1 - 1 / nodes) ** moe.top_k)  # of nodes, by top_k experts at random
    between = copy * reached * (nodes - 1) / nodes / machine.out_bytes_s
    latency = link.latency_s * layout.ep
    return np.asarray(
        (layout.ep > 1) * 4.0 * mixtures * (1 + 0.5 * (layout.recompute >= 1)) * (inside + between + latency)
    )
