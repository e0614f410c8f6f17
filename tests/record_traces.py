"""Records the small traces under `tests/recorded`: torch on CPU over gloo (two ranks), and JAX on two CPU devices.

python tests/record_traces.py gloo TARGET
python tests/record_traces.py execution TARGET
python tests/record_traces.py jax TARGET
"""

from __future__ import annotations

import gzip
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any


def record_gloo(target: Path, world: int = 2, *, execution: bool = False) -> None:
    """Record three DDP steps of a small network on each rank, with shapes or with an execution trace beside."""
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as scratch:
        mp.spawn(_run_rank, args=(world, str(target), f"{scratch}/store", execution), nprocs=world)


def _run_rank(rank: int, world: int, target: str, store: str, execution: bool) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, schedule

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = schedule(wait=1, warmup=1, active=3)
    Path(target).mkdir(parents=True, exist_ok=True)
    operators = Path(target) / f"execution_rank{rank}.json"
    observer = ExecutionTraceObserver().register_callback(str(operators)) if execution else None
    options: dict[str, Any] = {"record_shapes": not execution, "execution_trace_observer": observer}
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, **options) as profiler:
        for _ in range(5):
            model(torch.randn(16, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    path = Path(target) / f"rank{rank}_trace.json"
    profiler.export_chrome_trace(str(path))
    text = path.read_text().replace(socket.gethostname(), "host").replace(str(Path(target).resolve()), ".")
    path.write_text(text)
    for written in (path, operators) if execution else (path,):
        written.with_suffix(".json.gz").write_bytes(gzip.compress(written.read_bytes(), mtime=0))
        written.unlink()
    dist.destroy_process_group()


def record_jax(target: Path, devices: int = 2) -> None:
    """Record four data-parallel steps, marked by `step_num`, as XSpace and JSON in the same folder."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(jax.devices(), ("dp",))
    rows = NamedSharding(mesh, PartitionSpec("dp"))
    x = jax.device_put(jnp.ones((16, 64)), rows)
    w = jax.device_put(jnp.ones((64, 32)), NamedSharding(mesh, PartitionSpec()))

    @jax.jit
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)

    w = step(w, x).block_until_ready()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(str(target), create_perfetto_link=False, profiler_options=options):
        for number in range(4):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                w = step(w, x).block_until_ready()
    for path in target.rglob("*.*"):
        if path.is_file():
            path.rename(path.with_name(path.name.replace(socket.gethostname(), "host")))
    project = str(Path(__file__).resolve().parent.parent).encode()
    for path in target.rglob("*.xplane.pb"):  # of equal length, since a message states the length of its strings
        path.write_bytes(path.read_bytes().replace(project, b"/project".ljust(len(project), b"_")[: len(project)]))


if __name__ == "__main__":
    where = Path(sys.argv[2])
    shutil.rmtree(where, ignore_errors=True)
    record_jax(where) if sys.argv[1] == "jax" else record_gloo(where, execution=sys.argv[1] == "execution")
