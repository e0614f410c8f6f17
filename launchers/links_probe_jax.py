"""Run script `links-probe-jax`: measures the links between JAX devices with XLA's collective permute.

One process drives the devices of its host; on several hosts the processes join through `jax.distributed`. Each pair of
endpoints is measured while the others wait: an endpoint is a device, or a host if there are more than `MAX_DEVICES`.
The source sends a large message and waits for four bytes back, many times in one compiled loop, so that neither the
start of a program nor a queue of sends counts. `evidence.jsonl` has the matrix; `result.json` only says that it ran.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from common import (
    IllegalConfig,
    Trial,
    node_name,
    package_versions,
    read_trial,
    reporting_failures,
    say_phase,
    write_json,
    write_result,
)
from links_matrix import REPEATS, measure_all

MAX_DEVICES = 16
"""Devices up to which each is an endpoint: each of the 240 ordered pairs takes two compilations."""
LARGE = 1 << 22
"""Bytes of the large message."""
MOST_TURNS = 1 << 16
NAME_BYTES = 64


class JaxProbe:
    """One process's part of the measurement."""

    def __init__(self, trial: Trial, process: int, num_processes: int) -> None:
        import jax
        import numpy as np

        self.devices = jax.devices()
        if len(self.devices) != trial.data["num_ranks"]:
            raise IllegalConfig(
                f"{trial.data['num_ranks']} ranks were asked for, but JAX has {len(self.devices)} devices"
            )
        self.num_processes = num_processes
        self.seconds = float(trial.config["pair_seconds"])
        self.mesh = jax.sharding.Mesh(np.array(self.devices), ("device",))
        self.backend = f"xla {self.devices[0].platform}"
        hosts = self._name_hosts(node_name(), process)
        self.nodes = [hosts[device.process_index] for device in self.devices]
        self.names = [f"{node}:{self.nodes[:rank].count(node)}" for rank, node in enumerate(self.nodes)]
        self._turns = cache(self._compile_turns)

    def _name_hosts(self, own: str, process: int) -> list[str]:
        """Return the name of each process's host; two processes of one host are two nodes."""
        import numpy as np

        name = np.frombuffer(own.encode()[:NAME_BYTES].ljust(NAME_BYTES), dtype=np.uint8)
        names = [bytes(row).decode(errors="replace").strip() for row in self._gather(name)]
        return [name if names.count(name) == 1 else f"{name}-{number}" for number, name in enumerate(names)]

    def _gather(self, value: Any) -> Any:
        """Return the values of all processes; each has the same shape."""
        import numpy as np

        if self.num_processes == 1:
            return np.asarray(value)[None]
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(value))

    def _slowest(self, seconds: float) -> float:
        import numpy as np

        return float(self._gather(np.float32(seconds)).max())

    def _sharded(self, body: Callable[..., Any], size: int) -> tuple[Callable[[int], Any], Any]:
        """Return a compiled loop that runs `body` so many times on `size` bytes a device, and the number of turns."""
        import jax
        import jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec

        try:
            shard_map = jax.shard_map
        except AttributeError:  # before JAX 0.6
            from jax.experimental.shard_map import shard_map
        rows, whole = PartitionSpec("device"), PartitionSpec()

        def loop(data: Any, turns: Any) -> Any:
            return jax.lax.fori_loop(0, turns, lambda _, carried: body(carried), data)

        run = jax.jit(shard_map(loop, mesh=self.mesh, in_specs=(rows, whole), out_specs=rows))
        sharding = NamedSharding(self.mesh, rows)
        shape = (len(self.devices) * max(size // 4, 1),)
        data = jax.jit(lambda: jnp.ones(shape, jnp.float32), out_shardings=sharding)()
        return (lambda turns: run(data, jnp.int32(turns))), data

    def _compile_turns(self, pairs: tuple[tuple[int, int], ...], size: int) -> Callable[[int], Any]:
        import jax

        back = [(target, source) for source, target in pairs]

        def turn(data: Any) -> Any:
            moved = jax.lax.ppermute(data, "device", pairs)
            answer = jax.lax.ppermute(moved[:1], "device", back)
            return data.at[0].set(answer[0])

        run, _ = self._sharded(turn, size)
        return run

    def _time(self, run: Callable[[int], Any], turns: int) -> float:
        import jax

        jax.block_until_ready(run(0))
        self._gather(self._zero())
        start_s = time.perf_counter()
        jax.block_until_ready(run(turns))
        return self._slowest(time.perf_counter() - start_s)

    @staticmethod
    def _zero() -> Any:
        import numpy as np

        return np.zeros(1, dtype=np.float32)

    def _seconds_per_turn(self, run: Callable[[int], Any]) -> float:
        """Return what each further turn takes, from two numbers of turns."""
        self._time(run, 2)  # the first message of a pair also opens its connection
        turns = 4
        while turns < MOST_TURNS and self._time(run, turns) < self.seconds:
            turns *= 4
        few = turns // 4
        more_s = min(self._time(run, turns) for _ in range(REPEATS))
        few_s = min(self._time(run, few) for _ in range(REPEATS))
        return (more_s - few_s) / (turns - few) if more_s > few_s else more_s / turns

    def measure(self, pairs: Sequence[tuple[int, int]]) -> tuple[float, float]:
        """Return bytes per second and seconds of latency from source to target of the slowest of these pairs."""
        chosen = tuple(pairs)
        small_s = self._seconds_per_turn(self._turns(chosen, 4))
        large_s = self._seconds_per_turn(self._turns(chosen, LARGE))
        moved_s = large_s - small_s if large_s > small_s else large_s
        return LARGE / moved_s, small_s / 2

    def reduce_together(self, size: int) -> float:
        """Return the seconds of an all-reduce of `size` bytes over all devices."""
        import jax

        def reduce(data: Any) -> Any:
            total = jax.lax.psum(data, "device") / len(self.devices)
            return jax.lax.pcast(total, "device", to="varying") if hasattr(jax.lax, "pcast") else total

        run, _ = self._sharded(reduce, size)
        return self._seconds_per_turn(run)


def probe(trial: Trial, process: int, num_processes: int) -> None:
    """Measure the links of all devices; every process of the job calls it."""
    ranks = int(trial.data["num_ranks"])
    if ranks % num_processes:
        raise IllegalConfig(f"the {num_processes} processes must divide the {ranks} devices")
    flags = os.environ.get("XLA_FLAGS", "")  # of CPUs; accelerators have the devices that they have
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={ranks // num_processes}".strip()
    import jax

    if num_processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(os.environ["CCL_COORDINATOR"], num_processes, process)
    links = JaxProbe(trial, process, num_processes)
    say_phase(trial, process, "timing")
    data = measure_all(links, MAX_DEVICES)
    if process == 0:
        write_json(trial.folder / "evidence.jsonl", data)
        write_result(trial, world_size=ranks, versions=package_versions("jax", "jaxlib"), hosts=links.nodes)


def main() -> int:
    trial = read_trial()
    process = int(os.environ.get("CCL_PROCESS_ID", "0"))
    with reporting_failures(trial, process):
        probe(trial, process, int(os.environ.get("CCL_NUM_PROCESSES", "1")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
