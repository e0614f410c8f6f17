"""The network simulator beside closed forms of collectives and ASTRA-sim's published results; and its speed.

python benchmarks/simulator.py [--astra-sim CSV]     # 20 seconds
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cclsearch.network.collectives import Collectives
from cclsearch.network.engine import Wait, Work, simulate
from cclsearch.network.spec import parse_cluster
from cclsearch.network.topology import TieredNetwork, share_flows

HERE = Path(__file__).parent
GIB = 1 << 30
Row = tuple[str, ...]


def table(heads: Row, rows: list[Row]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def form(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.4g} us"


def off(simulated: float, expected: float) -> str:
    return f"{100 * (simulated / expected - 1):+.1f} %"


Form = tuple[str, str, str, float, float]
"""Cluster, collective, form, its seconds and the simulated ones."""
LINK, LATENCY_S = 400e9 / 8, 3e-6
"""Bytes a second of a port, and the latency of a message."""


def closed_forms() -> Iterator[Form]:
    """Yield each cluster and collective whose time is known by a formula."""
    for n in (4, 24, 256):
        for size in (1e3, 1e6, 1e9):
            yield from _on_switch(n, size)
    yield from _by_bisection()
    yield from _by_hierarchy()


def _form(cluster: str, call: tuple[str, str, float], name: str, form: str, seconds: float) -> Form:
    """Return a row; `call` is the kind of the collective, its algorithm and bytes."""
    kind, algorithm, size = call
    net = TieredNetwork(parse_cluster(cluster))
    simulated = Collectives(net).schedule(kind, np.arange(net.num_ranks)[None], size, algorithm).seconds
    return cluster, f"{name}, {size:.0e} B", form, seconds, simulated


def _on_switch(n: int, size: float) -> Iterator[Form]:
    """Yield the collectives of n ranks on one switch (Thakur et al. 2005, Chan et al. 2007)."""
    share, depth = (n - 1) / n * size / LINK, math.ceil(math.log2(n))
    us, switch = LATENCY_S, f"switch:{n}:400:3"
    ring, tree = 2 * (n - 1) * us + 2 * share, 2 * depth * us + 2 * size / LINK
    yield _form(switch, ("all_reduce", "ring", size), "all-reduce, ring", "2(n-1)(a + M/n/b)", ring)
    yield _form(switch, ("all_gather", "ring", size), "all-gather, ring", "(n-1)(a + M/n/b)", ring / 2)
    yield _form(switch, ("all_reduce", "tree", size), "all-reduce, tree", "2 log2(n) a + 2 M/b", tree)
    if n & (n - 1) == 0:
        call, form = ("all_reduce", "halving-doubling", size), "2 log2(n) a + 2(n-1)/n M/b"
        yield _form(switch, call, "all-reduce, halving-doubling", form, 2 * depth * us + 2 * share)
    yield _form(switch, ("all_to_all", "direct", size), "all-to-all", "a + (n-1)/n M/b", us + share)


def _by_bisection() -> Iterator[Form]:
    """Yield all-to-alls of tori, whose middle cut limits them."""
    for k in (4, 8, 16):
        call, seconds = ("all_to_all", "direct", 1e9), k * 1e9 / 8 / (LINK / 4)
        yield _form(f"torus:{k}x{k}:400:0", call, "all-to-all", "bisection: k M / 8 / (b/4)", seconds)


def _by_hierarchy() -> Iterator[Form]:
    """Yield collectives of nodes with a fast network inside, and of an oversubscribed fat tree."""
    for nodes in (4, 64, 512):
        text = f"switch:8:3200:0/switch:{nodes}:400:0"
        inside, between = 2 * 7 / 8 * 1e9 / (8 * LINK), 2 * (nodes - 1) / nodes * 1e9 / 8 / LINK
        for algorithm, form, seconds in (
            ("hierarchical", "inside, then between on all ports", inside + between),
            ("hierarchical-pipelined", "the slower + a piece of the other", max(between + inside / 4, inside)),
        ):
            yield _form(text, ("all_reduce", algorithm, 1e9), f"all-reduce, {algorithm}", form, seconds)
    text = "switch:8:3200:0/fat-tree:32:400:0:leaf=64:over=4"
    uplink = 64 * 192 * 1e9 / 256 / (64 * LINK / 4)
    yield _form(text, ("all_to_all", "direct", 1e9), "all-to-all", "uplinks of a leaf: 64 x 192 M/256", uplink)


def astra_sim(results: Path) -> Iterator[tuple[dict[str, str], float, float]]:
    """Yield a row of the published results, its seconds and the simulated ones."""
    with results.open() as file:
        for row in csv.DictReader(file):
            gbps, hop_us, n = 50 * GIB * 8 / 1e9, 0.51, int(row["nodes"])  # its GB is 2^30; 10 ns of endpoint delay
            if row["topology"] == "switch":
                text, algorithm, pieces = f"switch:{n}:{gbps}:{2 * hop_us - 0.01}", "ring", 4
            else:  # an axis of two has one link here, and a ring has two
                sizes = [int(size) for size in row["shape"].split("x")]
                tiers = [f"ring:{size}:{gbps * min(size - 1, 2)}:{hop_us}" for size in sizes]
                text, algorithm = "/".join(tiers), "ring" if len(sizes) == 1 else "hierarchical-pipelined"
                pieces = 4 if len(sizes) == 1 else 1
            net = TieredNetwork(parse_cluster(text))
            # its all-gather counts what one rank contributes
            size = float(row["size_bytes"]) * (n if row["collective"] == "all_gather" else 1)
            on = Collectives(net, one_way=True)
            found = on.schedule(row["collective"], np.arange(n)[None], size, algorithm, pieces)
            yield row, int(row["latency_ns"]) / 1e9, found.seconds


def speed() -> Iterator[Row]:
    """Yield what was simulated, and how long that took."""
    for text in (
        "switch:8:2400:2.5/fat-tree:512:200:8:leaf=32:over=2",
        "switch:8:2400:2.5/rail:512:200:8:leaf=64:over=2",
        "torus:16x16x16:1600:1",
    ):
        begin = time.process_time()
        net = TieredNetwork(parse_cluster(text))
        on = Collectives(net)
        inside = np.arange(net.num_ranks).reshape(-1, 8)
        across = inside.T.copy()
        tasks: list[Work] = []
        for _ in range(8 * 64):  # micro-batches x layers
            first = len(tasks)
            reduce = on.schedule("all_reduce", inside, 64e6)
            gather = on.schedule("reduce_scatter", across, 100e6)
            follows = [(Wait(first + k - 4),) if first else () for k in range(4)]  # the same of the layer before
            tasks += [
                Work(seconds=1e-3, waits=(Wait(first - 2),) if first else ()),
                Work(schedule=reduce, waits=(Wait(first), *follows[1])),
                Work(seconds=1e-3, waits=(Wait(first + 1),)),
                Work(schedule=gather, waits=(Wait(first + 2), *follows[3])),
            ]
        everyone = np.arange(net.num_ranks)[None]
        tasks.append(Work(schedule=on.schedule("all_to_all", everyone, 1e9), waits=(Wait(len(tasks) - 3),)))
        step_s = simulate(tasks, net.capacity_L).seconds
        took = time.process_time() - begin
        yield text, f"{net.num_ranks} ranks, {len(tasks)} tasks", form(step_s), f"{took:.2f} s"
    rng = np.random.default_rng(0)
    net = TieredNetwork(parse_cluster("switch:8:2400:2.5/fat-tree:512:200:8:leaf=32:over=2"))
    source, target = rng.integers(0, 4096, (2, 1 << 20))
    routes = net.route(source, target)
    begin = time.process_time()
    rate = share_flows(routes.flow, routes.link, len(source), net.capacity_L)
    slowest = f"slowest {rate.min() / 1e6:.3g} MB/s"
    yield (
        "the same fat tree",
        "max-min rates of 1,048,576 flows of random pairs",
        slowest,
        (f"{time.process_time() - begin:.2f} s"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--astra-sim", type=Path, metavar="CSV", help="results of ASTRA-sim: see simulator.md")
    args = parser.parse_args()
    print("# The network simulator\n\nEvery time called *simulated* is computed, not measured. Printed by:\n")
    print("    python benchmarks/simulator.py\n")
    print("## Closed forms of collectives\n\na: latency of a message, b: bandwidth of a rank, M: message, n: ranks.\n")
    forms = list(closed_forms())
    shown = [(c, k, f, form(e), form(s), off(s, e)) for c, k, f, e, s in forms]
    print(table(("cluster", "collective", "closed form", "its time", "simulated", "difference"), shown))
    worst = max(abs(s / e - 1) for *_, e, s in forms)
    print(f"\nLargest difference of {len(forms)}: {100 * worst:.2f} %.\n")
    rows = list(astra_sim(args.astra_sim)) if args.astra_sim else []
    for backend in sorted({row["backend"] for row, _, _ in rows}):
        part = [(row, e, s) for row, e, s in rows if row["backend"] == backend]
        each = [
            (r["collective"], f"{r['topology']} {r['shape']}", r["size_bytes"], form(e), form(s), off(s, e))
            for r, e, s in part
        ]
        print(table(("collective", "network", "bytes", f"ASTRA-sim, {backend}", "simulated here", "difference"), each))
        differences = np.abs([s / e - 1 for _, e, s in part])
        print(
            f"\n{backend}: median difference of {len(part)} rows {100 * np.median(differences):.1f} %, largest"
            f" {100 * differences.max():.1f} %.\n"
        )
    print("## Speed\n\nCPU time of one process, including the network and all schedules.\n")
    print(table(("cluster", "what", "simulated step", "CPU time"), list(speed())))


if __name__ == "__main__":
    main()
