"""The hardware figures that the closed forms use: rates, latencies, and accelerators per node."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cclsearch.card.model import Card
from cclsearch.network.matrix import LinkMatrix
from cclsearch.network.spec import ClusterSpec, parse_cluster

# GPUs lower their clock under full load, TPUs do not: MaxText publishes 52 to 71 % MFU of whole steps on TPU v4 and
# v5p, recomputation not counted.
GEMM_SHARE = {"tpu": 0.85}
"""Share of the data-sheet rate that large GEMMs reach."""
# [M] table 1 and [V] in `training/time.py`: 0.5 to 0.75 end to end.
GPU_GEMM_SHARE = 0.72
"""The same share on all other accelerators."""
# The bare launch takes 5 to 10 us; eager PyTorch with its modules and autograd takes 16 to 118 us from one launch to
# the next (medians of four public profiles: Qwen on MI300X 16, TimeSformer on H100 62, Switch on A100 101, ResNet on
# A100 118), part of which is the profiler's. XLA launches whole programs.
LAUNCH_S = {"gpu": 20e-6, "tpu": 1e-6, "npu": 1e-6, "cpu": 1e-6}
"""Host seconds per kernel."""
# Measured; its allocator peak starts near zero.
CPU_PROCESS_GIB = 0.25
"""Resident set of a process that has imported torch for CPUs."""
TPU_RESERVED_GIB = 0.3
"""HBM that the TPU runtime reserves."""
# 0.5 to 2 GiB are reported.
DEVICE_CONTEXT_GIB = 1.2
"""CUDA context, NCCL buffers and cuBLAS workspaces outside the allocator on A100 and H100."""

FOUR_BYTES = {"fp32", "tf32"}
"""Precisions whose activations have four bytes."""


@dataclass(frozen=True)
class Machine:
    """One accelerator and its links, in SI units; bandwidths are per direction."""

    flops_per_s: float
    """Rate of the linear layers, which run in the card's precision."""
    half_flops_per_s: float
    """Rate of attention and the output projection, which stay in 16 bits if the linear layers have fewer."""
    gemm_share: float
    """Share of these rates that large GEMMs reach."""
    hbm_bytes_s: float
    up_bytes_s: float
    """Bandwidth inside a node."""
    out_bytes_s: float
    """Bandwidth between nodes."""
    up_latency_s: float
    out_latency_s: float
    node: int
    """Number of accelerators connected by the scale-up links: a node, unless the links go further."""
    memory_gib: float
    fixed_gib: float
    """Memory in use before the model is loaded."""
    launch_s: float
    """Host seconds to launch one kernel."""
    host_cores: float
    """Cores that the ranks of a node share if they run on its CPU; infinite if each has an accelerator."""
    links: LinkMatrix | None = None
    """Measured links, which replace the bandwidths and latencies above."""
    cluster: ClusterSpec | None = None
    """A simulated network, which replaces them too."""
    ring_per_port: bool = True
    """Whether collectives use the ports of all members of a group in a node (NCCL), or one ring (gloo on CPUs)."""
    element_bytes: float = 2.0
    """Bytes of a sent activation. 2 without measured links, as calibrated with the catalogue's bandwidths."""

    @property
    def has_network(self) -> bool:
        """Whether links are known pair by pair, measured or simulated."""
        return self.links is not None or self.cluster is not None


def read_machine(card: Card) -> Machine:
    """Return the machine of a card: rates from `hardware.yaml`, or from the card if it states them."""
    hardware = card.hardware
    found = hardware.chip
    flops_per_s = found.rate_for(card.precision)[1]
    half = "fp16" if card.precision == "fp16" else "bf16"  # V100 computes bf16 without tensor cores
    return Machine(
        flops_per_s=flops_per_s,
        half_flops_per_s=min(found.rate_for(half)[1], flops_per_s),
        gemm_share=GEMM_SHARE.get(found.kind, GPU_GEMM_SHARE),
        hbm_bytes_s=found.hbm_bytes_per_s,
        up_bytes_s=(hardware.scale_up_gbps or found.scale_up_gbps) / 8 * 1e9,
        out_bytes_s=(hardware.scale_out_gbps or found.scale_out_gbps) / 8 * 1e9,
        up_latency_s=found.scale_up_latency_us * 1e-6,
        out_latency_s=found.scale_out_latency_us * 1e-6,
        node=hardware.num_accelerators if found.kind == "tpu" else hardware.domain,
        memory_gib=hardware.memory_gib,
        fixed_gib={"cpu": CPU_PROCESS_GIB, "tpu": TPU_RESERVED_GIB}.get(found.kind, DEVICE_CONTEXT_GIB),
        launch_s=LAUNCH_S[found.kind],
        host_cores=float(hardware.host_cores or math.inf) if found.kind == "cpu" else math.inf,
        links=hardware.known_links,
        cluster=parse_cluster(hardware.cluster) if hardware.cluster else None,
        ring_per_port=found.kind != "cpu",
        element_bytes=4.0 if hardware.links is not None and card.precision in FOUR_BYTES else 2.0,
    )


def read_machines(card: Card) -> tuple[Machine, ...]:
    """Return the machine of each group of unlike hardware; the only one if there are no groups."""
    if not card.hardware.groups:
        return (read_machine(card),)
    return tuple(_read_group(card, number) for number in range(len(card.hardware.groups)))


def _read_group(card: Card, number: int) -> Machine:
    group = card.hardware.groups[number]
    machine = read_machine(card.model_copy(update={"hardware": card.hardware.of_group(number)}))
    return replace(
        machine,
        flops_per_s=machine.flops_per_s * group.speed,
        half_flops_per_s=machine.half_flops_per_s * group.speed,
        hbm_bytes_s=machine.hbm_bytes_s * group.speed,
        # a rank on a CPU that is held back launches more slowly too
        launch_s=machine.launch_s / (group.speed if group.chip.kind == "cpu" else 1.0),
    )
