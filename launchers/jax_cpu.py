"""Run script `jax-cpu`: trains a sharded transformer with JAX on CPU devices.

One process drives the devices of its host; on several hosts (`CCL_PROCESS_ID`, `CCL_NUM_PROCESSES` and
`CCL_COORDINATOR` are set by the launcher) the processes join through `jax.distributed`. The mesh has the axes `data`,
`expert` and `tensor`; the compiler inserts the collectives. Knobs: tp, dp, ep (inside dp), micro_batch_size,
activation_checkpointing (none, full), attention (library, grouped).
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

from common import (
    CpuClock,
    IllegalConfig,
    PeakMemory,
    Trial,
    close_window,
    device_name,
    foreign_cores,
    host_name,
    learning_rate,
    limit_memory,
    number_step,
    open_window,
    package_versions,
    read_trial,
    reporting_failures,
    say_phase,
    use_nonce,
    write_json,
    write_result,
)
from energy import energy_per_step, find_used_energy, open_cpu_counter, read_energy
from jax_cpu_model import Model, make_mesh
from step_window import time_steps


def set_devices(trial: Trial, num_processes: int) -> None:
    """Set XLA's number of CPU devices for this process; must run before jax is imported."""
    ranks = int(trial.data["num_ranks"])
    if ranks % num_processes:
        raise IllegalConfig(f"the {num_processes} processes must divide the {ranks} devices of the trial")
    share = ranks // num_processes
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={share}".strip()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


class Trainer:
    """Model, AdamW and the compiled optimizer step over the fixed global batch."""

    def __init__(self, trial: Trial, model: Model) -> None:
        import jax
        import jax.numpy as jnp

        self.trial, self.model = trial, model
        data = trial.data
        trial.require_whole_batch()
        self.accumulation = int(data["gradient_accumulation"])
        self.rows = trial.degree("dp") * trial.micro_batch_size
        self.batch_sharding = model.sharding((None, ("data", "expert"), None))
        self.weights = model.draw_weights()
        shardings = {name: weight.sharding for name, weight in self.weights.items()}
        shapes = {name: weight.shape for name, weight in self.weights.items()}
        zeros = jax.jit(lambda: {name: jnp.zeros(shape) for name, shape in shapes.items()}, out_shardings=shardings)
        self.moments = (zeros(), zeros())
        self.step = 0
        self.losses: list[Any] = []
        out = (
            shardings,
            (shardings, shardings),
            model.sharding(()),
        )  # same as the inputs: otherwise a second compilation would be timed
        self._run = jax.jit(self._train_step, donate_argnums=(0, 1), out_shardings=out)

    def _train_step(self, weights: Any, moments: Any, tokens: Any, count: Any) -> Any:
        import jax
        import jax.numpy as jnp

        if self.trial.data["precision"] == "bf16":
            cast = partial(jax.tree.map, lambda w: w.astype(jnp.bfloat16))
        else:
            cast = partial(jax.tree.map, lambda w: w)

        def accumulate(total: Any, batch: Any) -> Any:
            loss, grads = jax.value_and_grad(lambda w: self.model.loss(cast(w), batch))(weights)
            return jax.tree.map(jnp.add, total, (loss, grads)), None

        zero = (jnp.float32(0.0), jax.tree.map(jnp.zeros_like, weights))
        (loss, grads), _ = jax.lax.scan(accumulate, zero, tokens)
        loss, grads = jax.tree.map(lambda x: x / self.accumulation, (loss, grads))
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], grads)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, moments[1], grads)

        rate = learning_rate(self.trial.data["arch"])

        def update(weight: Any, m: Any, v: Any) -> Any:
            change = (m / (1 - 0.9**count)) / (jnp.sqrt(v / (1 - 0.999**count)) + 1e-6)
            return weight - rate * (change + 0.01 * weight)

        return jax.tree.map(update, weights, first, second), (first, second), loss

    def run_step(self) -> None:
        """Run one optimizer step and wait for it."""
        import jax
        import jax.numpy as jnp

        count = jnp.float32(self.step + 1)
        self.weights, self.moments, loss = self._run(self.weights, self.moments, self._draw_tokens(), count)
        jax.block_until_ready((self.weights, loss))
        self.losses.append(loss)
        self.step += 1

    def _draw_tokens(self) -> Any:
        """Return (accumulation, rows, S + 1) tokens: a noisy, learnable pattern, the same in every layout."""
        import jax
        import numpy as np

        data, vocab = self.trial.data, self.model.arch["vocab_size"]
        generator = np.random.default_rng(data["seed"] * 7919 + number_step(data, self.step))
        noise = generator.integers(0, 3, (data["global_batch_size"], data["seq_len"] + 1))
        noise[:, 0] = generator.integers(0, vocab, data["global_batch_size"])
        tokens = (noise.cumsum(axis=1) % vocab).astype(np.int32).reshape(self.accumulation, self.rows, -1)
        return jax.make_array_from_callback(tokens.shape, self.batch_sharding, tokens.__getitem__)


def train(trial: Trial, process: int, num_processes: int) -> None:
    """Run the whole trial in one process."""
    set_devices(trial, num_processes)
    import jax

    if num_processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(os.environ["CCL_COORDINATOR"], num_processes, process)
    jax.block_until_ready(jax.jit(lambda x: x @ x)(jax.numpy.ones((64, 64))))
    limit_memory()
    memory = PeakMemory()
    trainer = Trainer(trial, Model(trial, make_mesh(trial)))
    report = _measure(trial, trainer, process, num_processes)
    report["peak_bytes"] = memory.peak_bytes()
    if trial.data["profiled_steps"] and not report["is_pruned"]:
        say_phase(trial, process, "profiling")
        _profile(trial, trainer, process)
    reports = _gather(trial, report, process, num_processes)
    if process == 0:
        _write_report(trial, trainer, reports)


def _find_slowest(step_times_s: list[float], num_processes: int) -> list[float]:
    """Return the seconds of each step by the slowest process; every process calls it."""
    if num_processes == 1:
        return step_times_s
    import numpy as np
    from jax.experimental import multihost_utils

    gathered = multihost_utils.process_allgather(np.array(step_times_s, dtype=np.float32))
    return [float(seconds) for seconds in np.asarray(gathered).max(axis=0)]


def _share_nonce(nonce: str, num_processes: int) -> str:
    """Return the nonce of process 0; every process calls it."""
    if num_processes == 1:
        return nonce
    import numpy as np
    from jax.experimental import multihost_utils

    text = multihost_utils.broadcast_one_to_all(np.frombuffer(nonce.encode().ljust(32), np.uint8))
    return bytes(np.asarray(text).astype(np.uint8)).decode().strip()


def _measure(trial: Trial, trainer: Trainer, process: int, num_processes: int) -> dict[str, Any]:
    say_phase(trial, process, "warm-up")
    for _ in range(trial.data["warmup_steps"]):
        trainer.run_step()
    say_phase(trial, process, "timing")
    counter = open_cpu_counter(host=host_name())
    first = trainer.step
    use_nonce(trial, _share_nonce(open_window(trial) if process == 0 else "", num_processes))
    start, start_j = CpuClock.read(), read_energy(counter)  # after the wait: its energy and load are not the steps'
    timed = time_steps(trial, trainer.run_step, partial(_find_slowest, num_processes=num_processes))
    if process == 0:
        close_window(trial, map(float, trainer.losses[first:]))
    end = CpuClock.read()
    own_s = end.own_s - start.own_s
    energy = find_used_energy(counter, start_j)
    return {
        **timed,
        "foreign_cpu_cores": foreign_cores(start, end, own_s),
        "window_s": end.wall_s - start.wall_s,
        "energy": energy,
        "host": host_name(),
        "device": device_name(),
    }


def _profile(trial: Trial, trainer: Trainer, process: int) -> None:
    """Run the separate profiled window; each process writes its own XSpace under `trace/`."""
    import jax

    folder = trial.trace_folder / f"process{process}"
    with jax.profiler.trace(str(folder)):
        for _ in range(trial.data["profiled_steps"]):
            with jax.profiler.StepTraceAnnotation("train", step_num=trainer.step):
                with jax.profiler.TraceAnnotation(trial.mark):
                    pass
                trainer.run_step()


def _gather(trial: Trial, report: dict[str, Any], process: int, num_processes: int) -> list[dict[str, Any]]:
    """Return every process's report, exchanged through the coordinator: hosts need no shared file system."""
    import json

    if num_processes == 1:
        return [report]
    import numpy as np
    from jax.experimental import multihost_utils

    text = json.dumps(report).encode().ljust(8192)
    stacked = multihost_utils.process_allgather(np.frombuffer(text, np.uint8))
    write_json(trial.folder / f"process{process}.json", report)
    return [json.loads(bytes(row)) for row in np.asarray(stacked).astype(np.uint8)]


def _write_report(trial: Trial, trainer: Trainer, reports: list[dict[str, Any]]) -> None:
    share = trial.data["num_ranks"] // len(reports)
    times = [report["step_times_s"] for report in reports]
    foreign = [r["foreign_cpu_cores"] for r in reports if r["foreign_cpu_cores"] is not None]
    write_result(
        trial,
        status="pruned" if reports[0]["is_pruned"] else "ok",
        world_size=trial.data["num_ranks"],
        global_batch_size=trainer.rows * trainer.accumulation,
        seq_len=trial.data["seq_len"],
        num_layers=trainer.model.arch["num_layers"],
        num_params=trainer.model.num_params,
        step_times_s=[max(step) for step in zip(*times, strict=True)],
        timed_window_s=max(report["timed_window_s"] for report in reports),
        warmup_steps=trial.data["warmup_steps"],
        peak_memory_bytes=[report["peak_bytes"] // share for report in reports for _ in range(share)],
        memory_kind="rss",
        precision="bf16" if trial.data["precision"] == "bf16" else "fp32",
        losses=[float(loss) for loss in trainer.losses],
        versions=package_versions("jax", "jaxlib", "numpy"),
        devices=[report["device"] for report in reports for _ in range(share)],
        hosts=[report["host"] for report in reports for _ in range(share)],
        foreign_cpu_cores=max(foreign) if len(reports) == 1 and foreign else None,
        logical_cores=os.cpu_count(),
        energy_j=energy_per_step(
            dict(report["energy"] for report in reports), reports[0]["window_s"], len(reports[0]["step_times_s"])
        ),
    )


def main() -> int:
    trial = read_trial()
    process = int(os.environ.get("CCL_PROCESS_ID", "0"))
    with reporting_failures(trial, process):
        train(trial, process, int(os.environ.get("CCL_NUM_PROCESSES", "1")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
