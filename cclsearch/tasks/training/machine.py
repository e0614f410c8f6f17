"""The hardware figures that the closed forms use: rates, latencies, and accelerators per node."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cclsearch.card.model import Card

UNKNOWN_PEAK_FLOPS, UNKNOWN_HBM_BYTES_S = 300e12, 2e12
"""Used for an accelerator that `hardware.yaml` does not list: those of a data-center GPU. Trials correct the scale."""
UNKNOWN_SCALE_UP_GBPS, UNKNOWN_SCALE_OUT_GBPS = 2400.0, 200.0
UNKNOWN_UP_LATENCY_S, UNKNOWN_OUT_LATENCY_S = 3e-6, 8e-6
LAUNCH_S = {"gpu": 8e-6, "tpu": 2e-6, "cpu": 2e-6}
"""Host seconds to launch one kernel: 5 to 10 us for CUDA in eager mode; XLA launches whole programs."""
CPU_PROCESS_GIB = 0.25
"""Resident set of a process that has imported torch for CPUs, measured; its allocator peak starts near zero."""
TPU_RESERVED_GIB = 0.3
"""HBM that the TPU runtime reserves."""
DEVICE_CONTEXT_GIB = 1.2
"""CUDA context, NCCL buffers and cuBLAS workspaces outside the allocator on A100 and H100 (0.5 to 2 GiB reported)."""


@dataclass(frozen=True)
class Machine:
    """One accelerator and its links, in SI units; bandwidths are per direction."""

    flops_per_s: float
    hbm_bytes_s: float
    up_bytes_s: float
    """Bandwidth inside a node."""
    out_bytes_s: float
    """Bandwidth between nodes."""
    up_latency_s: float
    out_latency_s: float
    node: int
    """Number of accelerators connected by the links inside a node."""
    memory_gib: float
    fixed_gib: float
    """Memory in use before the model is loaded."""
    launch_s: float
    """Host seconds to launch one kernel."""
    host_cores: float
    """Cores that the ranks of a node share if they run on its CPU; infinite if each has an accelerator."""


def read_machine(card: Card) -> Machine:
    """Return the machine of a card: rates from `hardware.yaml`, bandwidths from the card if it has them."""
    from cclsearch.card.hardware import match_accelerator

    hardware = card.hardware
    found = match_accelerator(hardware.accelerator, hardware.memory_gib) or match_accelerator(hardware.accelerator)
    up_gbps = hardware.scale_up_gbps or (found.scale_up_gbps if found else UNKNOWN_SCALE_UP_GBPS)
    out_gbps = hardware.scale_out_gbps or (found.scale_out_gbps if found else UNKNOWN_SCALE_OUT_GBPS)
    kind = found.kind if found else "gpu"
    return Machine(
        flops_per_s=(found.peak_flops_of(card.precision) if found else None) or UNKNOWN_PEAK_FLOPS,
        hbm_bytes_s=found.hbm_bytes_per_s if found else UNKNOWN_HBM_BYTES_S,
        up_bytes_s=up_gbps / 8 * 1e9,
        out_bytes_s=out_gbps / 8 * 1e9,
        up_latency_s=found.scale_up_latency_us * 1e-6 if found else UNKNOWN_UP_LATENCY_S,
        out_latency_s=found.scale_out_latency_us * 1e-6 if found else UNKNOWN_OUT_LATENCY_S,
        node=hardware.num_accelerators if kind == "tpu" else hardware.accelerators_per_node,
        memory_gib=hardware.memory_gib,
        fixed_gib={"cpu": CPU_PROCESS_GIB, "tpu": TPU_RESERVED_GIB}.get(kind, DEVICE_CONTEXT_GIB),
        launch_s=LAUNCH_S[kind],
        host_cores=float(hardware.host_cores or math.inf) if kind == "cpu" else math.inf,
    )
