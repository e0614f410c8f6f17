"""The machine that `gpu.py` runs on, and the project folder with card, profile and search space for its size."""

from __future__ import annotations

import gc
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import yaml
from gpu_report import Report

from cclsearch.card.arch import flops_per_token
from cclsearch.card.hardware import match_accelerator
from cclsearch.card.load import load_card
from cclsearch.card.model import Card
from cclsearch.core.trust import trust_project
from cclsearch.core.values import Value
from cclsearch.space.build import build_space
from cclsearch.space.framework import load_framework
from cclsearch.space.parse import parse_knob
from cclsearch.space.table import Space

LAUNCHERS = Path(__file__).resolve().parent.parent / "launchers"
STEP_S = 0.15
"""Wanted time of a step, at a third of the measured rate of matrix products."""
SMALL_ARCH = {
    "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "head_dim": 16,
    "hidden_size": 64, "intermediate_size": 96, "vocab_size": 256,
}  # fmt: skip


@dataclass
class Bench:
    """What every part needs."""

    report: Report
    folder: Path
    """The project, with `card.yaml` and the profile `here`."""
    out: Path
    """Folder of results and traces."""
    device: torch.device
    card: Card
    script: ModuleType
    """The run script `gpu`."""
    gemm_flops: float
    """Measured FLOP/s of a large matrix product in the card's precision."""
    copy_bytes_per_s: float
    knobs: dict[str, list[Value]] = field(default_factory=dict)
    table: dict[Any, Any] = field(default_factory=dict)
    """Config -> its measured row, filled by the first part."""

    @property
    def small(self) -> bool:
        return self.report.small

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def options(self) -> list[str]:
        """Command-line options of the search space."""
        shown = {name: ",".join(str(c).lower() for c in choices) for name, choices in self.knobs.items()}
        return [word for name, choices in shown.items() for word in ("--knob", f"{name}={choices}")]

    def space(self) -> Space:
        """The search space of the card with those knobs."""
        knobs = [parse_knob(text) for text in self.options[1::2]]
        return build_space(self.card, load_framework("gpu"), extra_knobs=knobs)

    def free(self) -> None:
        """Give back unused memory of the device, which another process may need."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.is_gpu:
            torch.cuda.synchronize()


def make_project(folder: Path, out: Path, report: Report, *, device: str, small: bool) -> Bench:
    """Write the project for this machine, make it the current folder and return the bench; measures the device."""
    on_gpu = device == "gpu"
    where = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    bf16 = on_gpu and torch.cuda.is_bf16_supported()
    gemm = _measure_gemm(where, torch.bfloat16 if bf16 else torch.float32, 512 if small else 8192)
    copy = _measure_copy(where, 2**22 if small else 2**30)
    trust_project(folder)
    (folder / "launchers").mkdir()
    environment = {"OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": "lo"} | ({} if on_gpu else {"CCL_DEVICE": "cpu"})
    profile = {"launcher": "local", "description": "this machine", "environment": environment}
    (folder / "launchers" / "here.yaml").write_text(yaml.safe_dump(profile))
    os.chdir(folder)
    name, memory_gib = _find_hardware(folder, where, gemm, copy)
    card = _write_card(folder / "card.yaml", name, memory_gib, small=small, bf16=bf16, rate=gemm)
    script = _load_script()
    bench = Bench(report, folder, out, where, card, script, gemm, copy)
    bench.knobs = _choose_knobs(bench)
    return bench


def describe_machine(bench: Bench) -> None:
    """Record device, versions and ceilings, and check `hardware.yaml` against the measured rate."""
    report, figures = bench.report, bench.report.figures
    figures["python"], figures["torch"] = sys.version.split()[0], torch.__version__
    if bench.is_gpu:
        properties = torch.cuda.get_device_properties(bench.device)
        figures["device"] = properties.name
        figures["memory_gib"] = round(properties.total_memory / 2**30, 1)
        figures["runtime"] = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        figures["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        if torch.version.hip:
            report.note("AMD: this script was never tried on such a device")
    else:
        figures["device"] = "CPU"
    figures["precision"] = bench.card.precision
    figures["gemm_tflops"], figures["copy_gb_per_s"] = bench.gemm_flops / 1e12, bench.copy_bytes_per_s / 1e9
    figures["knobs"] = {name: " ".join(map(str, choices)) for name, choices in bench.knobs.items()}
    figures["global_batch"], figures["seq_len"] = bench.card.number("global_batch_size"), bench.card.number("seq_len")
    known = match_accelerator(bench.card.hardware.accelerator, bench.card.hardware.memory_gib)
    peak = known.peak_flops_of(bench.card.precision) if known is not None and not known.nominal else None
    if peak is None:
        report.skip("measured matrix products beside the peak in hardware.yaml", "no peak is known for this device")
        return
    share = bench.gemm_flops / peak
    report.check(
        "share of the peak in hardware.yaml that a large matrix product reaches", "30 % to 102 %", f"{share:.0%}",
        0.3 <= share <= 1.02,
    )  # fmt: skip


def time_median(bench_device: torch.device, run: Callable[[], object], repeats: int) -> float:
    """Return the median seconds of a call, after three to warm up."""
    wait = torch.cuda.synchronize if bench_device.type == "cuda" else lambda: None
    times = []
    for number in range(3 + repeats):
        started = time.perf_counter()
        run()
        wait()
        if number >= 3:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def _measure_gemm(device: torch.device, dtype: torch.dtype, size: int) -> float:
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2.0 * size**3 / time_median(device, lambda: a @ b, 10)


def _measure_copy(device: torch.device, size: int) -> float:
    source = torch.randint(0, 255, (size,), device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2.0 * size / time_median(device, lambda: target.copy_(source), 10)


def _find_hardware(folder: Path, device: torch.device, gemm: float, copy: float) -> tuple[str, float]:
    """Return the device's name and memory in GiB; one that hardware.yaml lacks is added with the measured rates."""
    if device.type == "cpu":
        return "cpu", 4
    properties = torch.cuda.get_device_properties(device)
    memory_gib = round(properties.total_memory / 2**30, 1)
    known = match_accelerator(properties.name, memory_gib)
    if known is not None:
        return known.name, memory_gib
    own = {
        "kind": "gpu", "aliases": [properties.name], "memory_gib": memory_gib, "nominal": True,
        "peak_flops": {"bf16": gemm * 1.3, "fp32": gemm * 1.3}, "memory_gb_per_s": copy / 1e9 * 1.1,
        "scale_up_gbps": 200, "scale_out_gbps": 100, "scale_up_latency_us": 5.0, "scale_out_latency_us": 10.0,
        "source": "measured by benchmarks/gpu.py; no vendor states them",
    }  # fmt: skip
    (folder / "hardware.yaml").write_text(yaml.safe_dump({"version": 1, "accelerators": {"this-gpu": own}}))
    return "this-gpu", memory_gib


def _write_card(path: Path, device: str, memory_gib: float, *, small: bool, bf16: bool, rate: float) -> Card:
    card = yaml.safe_load((LAUNCHERS.parent / "workloads" / "tiny-gpu.yaml").read_text(encoding="utf-8"))
    work, device_fields = card["workload"], {"model": device, "memory_gb": memory_gib}
    work["model"]["precision"] = "bf16" if bf16 else "fp32"
    work["hardware"]["xpu_spec"] |= device_fields | ({"type": "CPU"} if device == "cpu" else {})
    if small:
        work["model"]["model_arch"] |= SMALL_ARCH
        work["data"] = {"batch_size": 8, "seq_len": 64}
    path.write_text(yaml.safe_dump(card))
    if small:
        return load_card(str(path))
    loaded = load_card(str(path))
    wanted = STEP_S * rate / 3 / (flops_per_token(loaded.arch, loaded.number("seq_len")) * loaded.number("seq_len"))
    work["data"]["batch_size"] = next((size for size in (64, 32, 16) if size <= wanted), 8)
    path.write_text(yaml.safe_dump(card))
    return load_card(str(path))


def _load_script() -> ModuleType:
    """Load the run script under another name: this folder has a `gpu` too."""
    sys.path.insert(0, str(LAUNCHERS))
    spec = importlib.util.spec_from_file_location("gpu_run_script", LAUNCHERS / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _choose_knobs(bench: Bench) -> dict[str, list[Value]]:
    """Return the choices of the search: what works on this device, about 70 configurations (8 in the small form)."""
    batch = bench.card.number("global_batch_size")
    attention = [name for name in bench.script.ATTENTION if _attends(bench, name)]
    if bench.small:
        return {
            "micro_batch_size": [2, 8], "activation_checkpointing": ["none"], "compile": [False],
            "optimizer": ["foreach", "fused"], "attention": [name for name in attention if name in ("math", "flash")],
        }  # fmt: skip
    bench.report.note(f"attention backends that work here: {', '.join(attention)}")
    if {"flash", "cudnn"} <= set(attention):
        attention = [name for name in attention if name != "efficient"]
    return {
        "micro_batch_size": sorted({batch // 16 or 1, batch // 4, batch}),
        "activation_checkpointing": ["none", "full"],
        "compile": [False, True] if _compiles(bench) else [False],
        "optimizer": ["foreach", "fused"],
        "attention": attention,
    }


def _attends(bench: Bench, backend: str) -> bool:
    arch, dtype = bench.card.arch, torch.bfloat16 if bench.card.precision == "bf16" else torch.float32
    shape = (1, arch.num_heads, bench.card.number("seq_len"), arch.head_dim)
    q, k, v = (torch.randn(shape, device=bench.device, dtype=dtype, requires_grad=True) for _ in range(3))
    bench.script.choose_attention(backend)
    try:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
        bench.synchronize()
    except RuntimeError:
        return False
    finally:
        bench.script.choose_attention("auto")
    return True


def _compiles(bench: Bench) -> bool:
    try:
        torch.compile(lambda x: torch.nn.functional.silu(x) * 2)(torch.ones(64, device=bench.device))
        bench.synchronize()
    except Exception as error:
        bench.report.note(f"torch.compile does not work here: {type(error).__name__}: {str(error)[:200]}")
        return False
    return True
