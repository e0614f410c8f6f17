"""Describes a device by short measurements: products of matrices, memory, launches, and collectives of local ranks.

It answers for an accelerator that `hardware.yaml` does not have. The rates are measured ones, below a vendor's peak: an
entry from them is `nominal`, good enough to order predictions until trials calibrate them, and never used for MFU.
"""

from __future__ import annotations

import math
import os
import platform
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line
from cclsearch.core.values import Model

GEMM_SIZES = {"cpu": (256, 512, 1024, 2048), "cuda": (1024, 2048, 4096, 8192)}
COPY_BYTES = {"cpu": 1 << 27, "cuda": 1 << 30}
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
REDUCE_BYTES = 1 << 25
MAX_RANKS = 8


class GemmRate(Model):
    """One square product."""

    dtype: str
    size: int
    flops_per_s: float


class DeviceProbe(Model):
    """Measurements of one device."""

    name: str
    kind: str
    """`gpu` or `cpu`."""
    memory_gib: float
    gemms: tuple[GemmRate, ...]
    copy_bytes_per_s: float
    """Bytes read and written per second by a copy of a large tensor."""
    launch_us: float
    """Launch time of a kernel that does almost nothing."""
    ranks: int
    """Local ranks of the collectives; 1: there were none to measure."""
    all_reduce_gbps: float | None = None
    """Gbit/s of a rank in one direction, from a large all-reduce (bus bandwidth)."""
    all_reduce_us: float | None = None
    """Time of an all-reduce of four bytes."""

    def best_rate(self, dtype: str) -> float:
        """Return the highest FLOP/s of that type; 0 if it was not measured."""
        return max((gemm.flops_per_s for gemm in self.gemms if gemm.dtype == dtype), default=0.0)

    def as_entry(self, key: str) -> dict[str, Any]:
        """Return the entry for a project's `hardware.yaml`; links of one local rank are unknown, and then left at 1."""
        rates = {dtype: float(f"{self.best_rate(dtype):.4g}") for dtype in DTYPES if self.best_rate(dtype)}
        latency = self.all_reduce_us / 2 if self.all_reduce_us else 1.0
        links = float(f"{self.all_reduce_gbps or 1.0:.4g}")
        entry = {
            "kind": self.kind,
            "memory_gib": float(f"{self.memory_gib:.4g}"),
            "peak_flops": rates,
            "memory_gb_per_s": float(f"{self.copy_bytes_per_s / 1e9:.4g}"),
            "scale_up_gbps": links,
            "scale_out_gbps": links,
            "scale_up_latency_us": float(f"{latency:.3g}"),
            "scale_out_latency_us": float(f"{latency:.3g}"),
            "nominal": True,
            "source": f"measured by `ccl-search device probe` on {one_line(self.name, 80)}; scale-out as scale-up",
        }
        return {"version": 1, "accelerators": {key: entry}}


def probe_device(*, with_collectives: bool = True, budget_s: float = 0.3) -> DeviceProbe:
    """Measure the first CUDA device, else the CPU; `budget_s` is the time for each figure. UserError without torch."""
    try:
        import torch
    except ImportError:
        raise UserError("device probe needs PyTorch: pip install 'ccl-search[torch]'") from None
    kind = "cuda" if torch.cuda.is_available() else "cpu"

    if kind == "cuda":
        properties = torch.cuda.get_device_properties(0)
        name, num_bytes = properties.name, properties.total_memory
    else:
        name = f"{platform.machine()} CPU"
        num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gemms = []
    for dtype in DTYPES if kind == "cuda" else ("fp32", "bf16"):
        for size in GEMM_SIZES[kind]:
            a = torch.ones(size, size, dtype=getattr(torch, DTYPES[dtype]), device=kind)
            seconds = _time(partial(torch.matmul, a, a), budget_s)
            gemms.append(GemmRate(dtype=dtype, size=size, flops_per_s=2.0 * size**3 / seconds))
    data = torch.ones(COPY_BYTES[kind] // 4, device=kind)
    target = torch.empty_like(data)
    copy_s = _time(partial(target.copy_, data), budget_s)
    one = torch.ones(1, device=kind)
    launch_s = _time(partial(one.add_, 1.0), budget_s)
    ranks = min(torch.cuda.device_count() if kind == "cuda" else 2, MAX_RANKS)
    gbps, small_us = _measure_reduce(ranks, kind) if with_collectives and ranks > 1 else (None, None)
    return DeviceProbe(
        name=name,
        kind="gpu" if kind == "cuda" else "cpu",
        memory_gib=num_bytes / 2**30,
        gemms=tuple(gemms),
        copy_bytes_per_s=2.0 * COPY_BYTES[kind] / copy_s,
        launch_us=launch_s * 1e6,
        ranks=ranks if gbps is not None else 1,
        all_reduce_gbps=gbps,
        all_reduce_us=small_us,
    )


def _time(work: Callable[[], object], budget_s: float) -> float:
    """Return the median seconds of one call, the device's work included."""
    from torch.utils.benchmark import Timer

    return float(Timer("work()", globals={"work": work}).blocked_autorange(min_run_time=budget_s).median)


def _measure_reduce(ranks: int, kind: str) -> tuple[float, float]:
    """Return Gbit/s of a large all-reduce, and microseconds of a small one, over local processes."""
    import torch.multiprocessing as processes

    with tempfile.TemporaryDirectory() as folder:
        context = processes.get_context("spawn")
        found = context.SimpleQueue()
        arguments = (ranks, kind, f"file://{folder}/meet", found)
        processes.spawn(_reduce, args=arguments, nprocs=ranks, join=True)
        large_s, small_s = found.get()
    return 2 * (ranks - 1) / ranks * REDUCE_BYTES * 8 / large_s / 1e9, small_s * 1e6


def _reduce(rank: int, ranks: int, kind: str, meet: str, found: Any) -> None:
    import torch
    import torch.distributed as dist

    device = f"cuda:{rank}" if kind == "cuda" else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", init_method=meet, rank=rank, world_size=ranks)
    times = []
    for count, calls in ((REDUCE_BYTES // 4, 5), (1, 50)):
        data = torch.ones(count, device=device)
        best = math.inf
        for _ in range(4):
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(calls):
                dist.all_reduce(data)
            if kind == "cuda":
                torch.cuda.synchronize()
            best = min(best, (time.perf_counter() - begin) / calls)
        times.append(best)
    if rank == 0:
        found.put(tuple(times))
    dist.barrier()
    dist.destroy_process_group()
