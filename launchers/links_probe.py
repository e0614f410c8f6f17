"""Run script `links-probe`: measures the links between ranks with torch.distributed, over NCCL or gloo.

Each pair of endpoints is measured while the others wait: an endpoint is a rank, or a node if there are more than
`MAX_RANKS` ranks. `evidence.jsonl` has the matrix; `result.json` only says that it ran.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from common import Trial, node_name, package_versions, run_rank, say_phase, write_json, write_result
from links_matrix import REPEATS, measure_all
from torch import Tensor

MAX_RANKS = 32
"""Ranks up to which each is an endpoint: 32 have 992 ordered pairs."""
SMALL, LARGE = 1 << 16, 1 << 28
"""Bytes of the first message of a pair, and of the largest."""
PINGS = 10


class Probe:
    """One rank's part of the measurement."""

    def __init__(self, trial: Trial) -> None:
        on_gpu = torch.cuda.is_available()
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(self.device)
        self.backend = "nccl" if on_gpu else "gloo"
        dist.init_process_group(self.backend, timeout=timedelta(minutes=10))
        self.control: Any = dist.new_group(backend="gloo") if on_gpu else None
        self.seconds = float(trial.config["pair_seconds"])
        self.buffer = torch.ones(SMALL, dtype=torch.uint8, device=self.device)
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, (node_name(), local), group=self.control)
        self.nodes = [node for node, _ in found]
        self.names = [f"{node}:{index}" for node, index in found]

    def wait(self) -> None:
        dist.barrier(group=self.control)

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def message(self, size: int) -> Tensor:
        if self.buffer.numel() < size:
            self.buffer = torch.ones(size, dtype=torch.uint8, device=self.device)
        return self.buffer[:size]

    def send(self, pairs: Sequence[tuple[int, int]], size: int) -> float:
        """Return the seconds in which every source of these pairs sends `size` bytes and gets one byte back."""
        own = next((pair for pair in pairs if self.rank in pair), None)
        if own is None:
            return 0.0
        source, target = own
        data, answer = self.message(size), torch.ones(1, dtype=torch.uint8, device=self.device)
        self.sync()
        start_s = time.perf_counter()
        if self.rank == source:
            dist.send(data, target)
            dist.recv(answer, target)
        else:
            dist.recv(data, source)
            dist.send(answer, source)
        self.sync()
        return time.perf_counter() - start_s

    def measure(self, pairs: Sequence[tuple[int, int]]) -> tuple[float, float]:
        """Return bytes per second and seconds of latency from source to target of the slowest of these pairs.

        The rate is that of what a large message has more than a quarter of it: neither the latency nor a burst that a
        shaped link lets through counts.
        """
        self.wait()
        self.send(pairs, 1)
        round_trip_s = self.slowest(min(self.send(pairs, 1) for _ in range(PINGS)))
        size = SMALL
        while True:
            taken_s = self.slowest(self.send(pairs, size))
            if taken_s - round_trip_s >= self.seconds or size >= LARGE:
                break
            missing = self.seconds / max(taken_s - round_trip_s, 1e-6)
            size = min(LARGE, size * int(min(max(missing * 1.2, 2), 8)))
        large_s = self.slowest(min(self.send(pairs, size) for _ in range(REPEATS)))
        quarter_s = self.slowest(min(self.send(pairs, size // 4) for _ in range(REPEATS)))
        more_s = large_s - quarter_s if large_s > quarter_s else large_s
        more_bytes = size - size // 4 if large_s > quarter_s else size
        return more_bytes / max(more_s, 1e-9), round_trip_s / 2

    def reduce_together(self, size: int) -> float:
        """Return the seconds of an all-reduce of `size` bytes over all ranks."""
        data = torch.ones(size // 4, device=self.device)
        seconds = []
        for _ in range(1 + REPEATS):
            self.wait()
            self.sync()
            start_s = time.perf_counter()
            dist.all_reduce(data)
            self.sync()
            seconds.append(self.slowest(time.perf_counter() - start_s))
            data.fill_(1)
        return statistics.median(seconds[1:])

    def slowest(self, seconds: float) -> float:
        worst = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.control)
        return float(worst)


def probe(trial: Trial) -> None:
    """Measure pairs, ports and collectives, and write the matrix."""
    links = Probe(trial)
    say_phase(trial, links.rank, "timing")
    data = measure_all(links, MAX_RANKS)
    if links.rank == 0:
        write_json(trial.folder / "evidence.jsonl", data)
        write_result(trial, world_size=links.world, versions=package_versions("torch"), hosts=links.nodes)
    links.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(run_rank(probe))
