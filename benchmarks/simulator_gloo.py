"""Real collectives of Gloo between network namespaces with shaped links, beside the simulation of the same links."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from cclsearch.network.collectives import Collectives
from cclsearch.network.matrix import LinkMatrix
from cclsearch.network.measured import MeasuredNetwork

NAME = "cclsim"
ROUNDS = 9
BUCKET_KIB = 128
"""Two segments of 64 KiB, which the kernel passes on whole only if the bucket holds them."""
QUEUE = "30ms"
WORKER = """
import json, os, sys, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
rank, world, rounds = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[5])
dist.init_process_group("gloo", init_method="tcp://" + sys.argv[3], rank=rank, world_size=world)
found = {}
for kind, count in json.loads(sys.argv[4]):
    data, parts = torch.zeros(count), list(torch.zeros(count).chunk(world))
    for repeat in range(rounds + 1):
        dist.barrier()
        begin = time.perf_counter()
        if kind == "all_reduce": dist.all_reduce(data)
        elif kind == "all_gather": dist.all_gather(parts, data[: count // world])
        elif kind == "broadcast": dist.broadcast(data, 0)
        elif kind == "all_to_all": dist.all_to_all_single(torch.empty_like(data), data)
        elif kind == "send":
            if rank == 0: dist.send(data, 1)
            elif rank == 1: dist.recv(data, 0)
        if repeat: found.setdefault(f"{kind} {count}", []).append(time.perf_counter() - begin)
slowest = [None] * world
dist.all_gather_object(slowest, found)
if rank == 0: print(json.dumps({key: [max(one[key][i] for one in slowest) for i in range(rounds)] for key in found}))
dist.destroy_process_group()
"""


INTRODUCTION = """Ranks are processes in network namespaces on one machine of 2 cores, connected by a bridge; `tc tbf`
shapes each rank's link in both directions. Median of 9 rounds after one warm-up, of the slowest rank, with the fastest
and the slowest round and the mean; the ranks run at nice -15, since other processes use the machine. The simulator is
given the shaped rates, the algorithm that Gloo uses (rings in one direction; a broadcast to all children of a binomial
tree at once; all-gather and all-to-all with turns, see `cclsearch/network/collectives.py`), 100 us of latency, and
94.1 % of the rate for TCP's payload (1448 of 1538 bytes of a frame). The time of an all-to-all depends on the order in
which ranks arrive, most over unlike links; the simulated one is the mean over all orders of up to four ranks, or 24
orders of more. One of two ranks takes one message's time if both arrive within the latency of a message, else two,
which is what is simulated. `tbf` has a token bucket: a link that was idle passes that many bytes at once. It is not
simulated, and holds 128 KiB here, two of the kernel's segments (see below).
"""
BUCKETS = """### What the token bucket does to a broadcast

The root of a broadcast sends to its children at once (`gloo/broadcast.cc`), so that by max-min sharing the child that
must pass it on has everything after two messages' time, and the last of four ranks after three. The congestion control
here is BBR. The flow that begins first empties the bucket at the speed of memory, takes that for the bandwidth of the
path, and keeps more bytes in flight for its next ten round trips: 280 to 440 segments beside 180 to 210 of the other
flow (`TCP_INFO` of the root's sockets at 400 Mbit/s, buckets of 400 KiB, no retransmissions). In the one queue of the
link, shares are those of the bytes in flight, so that one of the children is served before the other. The smaller the
bucket is beside the message, the closer is the broadcast to fair sharing:
"""


Calls = list[tuple[str, int]]
LINKS = ([200.0] * 2, [100.0] * 4, [400.0] * 4, [100.0] * 6, [400.0, 400.0, 400.0, 50.0])
ALGORITHMS = {"all_reduce": "ring", "all_gather": "turns", "broadcast": "binomial", "all_to_all": "turns"}
"""Those of Gloo."""


def command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@contextmanager
def namespaces(mbit: list[float], bucket_kib: int) -> Iterator[list[str]]:
    """Connect one namespace a rank to a bridge; rank i sends at `mbit[i]` at most, and gets as much."""
    made: list[str] = []
    try:
        command("ip", "link", "add", f"{NAME}br", "type", "bridge")
        command("ip", "link", "set", f"{NAME}br", "up")
        for rank, rate in enumerate(mbit):
            space, inner, outer = f"{NAME}{rank}", f"{NAME}i{rank}", f"{NAME}o{rank}"
            command("ip", "netns", "add", space)
            made.append(space)
            command("ip", "link", "add", outer, "type", "veth", "peer", "name", inner, "netns", space)
            command("ip", "link", "set", outer, "master", f"{NAME}br", "up")
            command("ip", "-n", space, "addr", "add", f"10.213.7.{rank + 1}/24", "dev", inner)
            command("ip", "-n", space, "link", "set", inner, "up")
            command("ip", "-n", space, "link", "set", "lo", "up")
            limit = ("root", "tbf", "rate", f"{rate}mbit", "burst", f"{bucket_kib}kb", "latency", QUEUE)
            command("tc", "-n", space, "qdisc", "add", "dev", inner, *limit)
            command("tc", "qdisc", "add", "dev", outer, *limit)
        yield made
    finally:
        for space in made:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", f"{NAME}br"], check=False, capture_output=True)


def run_gloo(mbit: list[float], calls: Calls, bucket_kib: int = BUCKET_KIB) -> dict[str, list[float]]:
    """Return `kind count` -> seconds of the slowest rank in each round."""
    with namespaces(mbit, bucket_kib) as spaces, tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "worker.py"
        script.write_text(WORKER)
        workers = []
        for rank, space in enumerate(spaces):
            words = ["nice", "-n", "-15", "ip", "netns", "exec", space]
            words += [sys.executable, str(script), str(rank), str(len(spaces))]
            words += ["10.213.7.1:29655", json.dumps(calls), str(ROUNDS)]
            environment = os.environ | {"GLOO_SOCKET_IFNAME": f"{NAME}i{rank}", "OMP_NUM_THREADS": "1"}
            workers.append(subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True))
        try:
            outputs = [worker.communicate(timeout=240)[0] for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
    found: dict[str, list[float]] = json.loads(outputs[0].strip().splitlines()[-1])
    return found


def measure_gloo() -> None:
    """Print real and simulated times, or why there are none."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        print("Not run: needs root, `ip` and `tc`.\n")
        return
    print(INTRODUCTION)
    calls = [("all_reduce", 1 << 20), ("all_reduce", 1 << 22), ("all_gather", 1 << 21), ("broadcast", 1 << 20)]
    calls += [("send", 1 << 20), ("all_to_all", 1 << 21)]
    _print_table([(mbit, calls, BUCKET_KIB) for mbit in LINKS])
    print(BUCKETS)
    one = [("broadcast", 1 << 20)]
    _print_table([([rate] * 4, one, bucket_kib) for rate in (400.0, 100.0) for bucket_kib in (128, 400, 1600)])
    print(
        "Of ranks, rates and sizes that were not used to find the cause; the bucket is an eighth of 1.05e+06 bytes:\n"
    )
    sizes = [("broadcast", 1 << 18), ("broadcast", 1 << 20), ("broadcast", 1 << 22)]
    held_out = ((3, 150.0, 3), (5, 60.0, 2), (6, 250.0, 3), (8, 50.0, 2))
    _print_table([([rate] * ranks, sizes[:most], BUCKET_KIB) for ranks, rate, most in held_out])


def _print_table(runs: Sequence[tuple[list[float], Calls, int]]) -> None:
    """Print a row for each call, and how far they are off."""
    heads = ("ranks", "links", "bucket", "collective", "bytes", "real, median", "of", "mean", "simulated", "difference")
    print(f"| {' | '.join(heads)} |\n{'| --- ' * len(heads)}|")
    found = np.abs([each for mbit, calls, bucket_kib in runs for each in _compare(mbit, calls, bucket_kib)])
    said = [
        f"{int((off <= 0.2).sum())} of {len(off)} within 20 %, largest {100 * off.max():.1f} %, by the {name}"
        for off, name in zip(found.T, ("medians", "means"), strict=True)
    ]
    middle = f"median difference {100 * np.median(found[:, 0]):.1f} %"
    print(f"\n{'; '.join(said)}; {middle}. Load average of the machine at the end: {os.getloadavg()[0]:.0f}.\n")


def _compare(mbit: list[float], calls: Calls, bucket_kib: int) -> Iterator[tuple[float, float]]:
    """Print a row for each call; yields how far the simulated time is off the median and the mean."""
    ranks = len(mbit)
    calls = [(kind, count // ranks * ranks) for kind, count in calls]
    real = run_gloo(mbit, calls, bucket_kib)
    time.sleep(0.2)
    on = Collectives(_network(mbit), one_way=True)
    for kind, count in calls:
        size = 4.0 * count
        group = np.arange(ranks)[None]
        algorithm = ALGORITHMS.get(kind, "direct")
        simulated = on.schedule(kind, group[:, :2] if kind == "send" else group, size, algorithm).seconds
        each = real[f"{kind} {count}"]
        median, mean = float(np.median(each)), float(np.mean(each))
        links = f"{mbit[0]:g} Mbit/s" + (f", one {min(mbit):g}" if min(mbit) != max(mbit) else "")
        extent = f"{min(each):.3f} to {max(each):.3f} s"
        times = (
            f"{median:.3f} s | {extent} | {mean:.3f} s | {simulated:.3f} s | {100 * (simulated / median - 1):+.1f} %"
        )
        print(f"| {ranks} | {links} | {bucket_kib} KiB | {kind} | {size:.3g} | {times} |", flush=True)
        yield simulated / median - 1, simulated / mean - 1


def _network(mbit: list[float]) -> MeasuredNetwork:
    """Return the network of the shaped links."""
    ranks = range(len(mbit))
    rows = tuple(tuple(0.0 if i == j else 0.941 * min(mbit[i], mbit[j]) / 1e3 for j in ranks) for i in ranks)
    latency = tuple(tuple(100.0 * (i != j) for j in ranks) for i in ranks)
    return MeasuredNetwork(LinkMatrix(endpoints=tuple(f"r{i}" for i in ranks), gbps=rows, latency_us=latency))
