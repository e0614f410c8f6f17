"""One rank of FSDP2 for `gpu.py`: trains the card's model sharded over two ranks that share a device, and traces it.

Run by `gpu.py` as `gpu_fsdp.py WORK`, with `launchers/` in PYTHONPATH and the variables of torch.distributed set.
WORK is JSON: `folder`, `arch`, `seq_len`, `rows` and `is_bf16`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cpu_model import Layout, Stage
from gpu import choose_backend, choose_device
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile, schedule

STEPS = 4


def main() -> None:
    work, rank = json.loads(sys.argv[1]), int(os.environ["RANK"])
    device = choose_device(rank)
    on_gpu = device.type == "cuda"
    dist.init_process_group(choose_backend(device, rank))
    alone = Layout(rank, tp=1, dp=1, pp=1, ep=1)
    model = Stage(work["arch"], alone, seq_len=work["seq_len"], seed=0, checkpointing="none").to(device)
    layer_params = sum(p.numel() for layer in model.layers for p in layer.parameters())
    other_params = sum(p.numel() for p in model.parameters()) - layer_params
    mesh = dist.device_mesh.init_device_mesh(device.type, (2,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, work["arch"]["vocab_size"], (work["rows"], work["seq_len"] + 1), device=device)

    def run_step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=work["is_bf16"]):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        adam.step()
        adam.zero_grad()

    for _ in range(2):
        run_step()
    marks: list[Any] = []
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    plan = schedule(wait=0, warmup=1, active=STEPS, repeat=1)
    with profile(activities=activities, schedule=plan, record_shapes=True) as profiler:
        for step in range(1 + STEPS):
            marks.append(torch.cuda.Event(enable_timing=True) if on_gpu else time.perf_counter())
            if on_gpu:
                marks[-1].record()
            run_step()
            if step == 0 and on_gpu:
                torch.cuda.synchronize()  # otherwise the trace begins with kernels of this step
            profiler.step()
        if on_gpu:
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(Path(work["folder"]) / f"rank{rank}.json.gz"))
    if rank == 0:
        periods = [a.elapsed_time(b) / 1e3 if on_gpu else b - a for a, b in pairwise(marks[2:])]  # inner steps only
        truth = {"period_s": statistics.median(periods), "layer_params": layer_params, "other_params": other_params}
        Path(work["folder"], "truth.json").write_text(json.dumps(truth))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
