"""Placements simulated on published bandwidths, for `placement.py`: zones, devices with unlike links, all-reduces."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from node_links import NVLINKS, XGMI_LINKS
from placement_orders import Found, compare, with_links

from cclsearch.card.load import load_card
from cclsearch.card.model import Card
from cclsearch.network.groups import slowest_ring
from cclsearch.network.matrix import LinkMatrix

CLUSTERS = {
    "two regions": ("us-central1-a", "us-west1-b"),
    "five zones": ("us-central1-a", "us-west1-b", "us-central1-b", "us-central1-c", "us-central1-f"),
}
LAYOUTS = ((4, 8, 1), (4, 4, 2), (4, 2, 4), (4, 1, 8), (2, 4, 4))
"""tp, dp, pp of 32 accelerators."""
NODES = {
    "DGX-1 V100": ("v100", NVLINKS, 25.0),
    "4 x MI250X": ("mi250x-gcd", XGMI_LINKS, 50.0),
}
"""Accelerator, links between the devices of a node, GB/s of a link in one direction (NVLink 2, xGMI)."""
HOST_GB_S = 10.0
"""Pairs without a link, through the host: nominal."""
NODE_LAYOUTS = ((2, 4, 1), (4, 2, 1), (8, 1, 1), (2, 2, 2), (2, 1, 4), (1, 4, 2), (1, 2, 4), (4, 1, 2))
"""tp, dp, pp of 8 accelerators."""


def published(folder: Path) -> None:
    """Predict each layout on the published bandwidths, and check the groups against measured all-reduces."""
    rows = read_rows(folder / "sailor-multizone.csv")
    print("| cluster | layout | default | worst | nodes only | best | its degrees | worst/best | default/best |")
    print("| --- " * 9 + "|")
    gains = []
    for gpu, accelerator in (("A100-40", "a100-40"), ("V100-16", "v100")):
        for title, zones in CLUSTERS.items():
            links = sailor_links(rows, [zones[k % len(zones)] for k in range(8)], gpu, 4)
            card = with_links(load_card("wl2"), links, 32, 4)
            card = on_accelerator(card, accelerator)
            for layout in LAYOUTS:
                gains.append(_print_row(f"{gpu}, {title}", layout, compare(card, _config_of(layout))))
    _print_gains(gains)
    uneven_devices()
    galvatron(read_rows(folder / "galvatron-allreduce.csv"))


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def sailor_links(rows: list[dict[str, str]], zones: Sequence[str], gpu: str, per_node: int) -> LinkMatrix:
    """Return nodes in these zones: a node's ranks share its port; 25 us between nodes and 5 inside are nominal."""
    count = str(per_node)
    kind = (gpu, count, gpu, count)
    rate = {
        (row["src_zone"], row["dst_zone"]): float(row["max_bandwidth_gbit_s"])
        for row in rows
        if row["scope"] == "inter-node"
        and row["source_file"] == "multizone_bandwidths.json"
        and (row["src_gpu"], row["src_gpus_per_node"], row["dst_gpu"], row["dst_gpus_per_node"]) == kind
    }
    inside = next(
        float(row["max_bandwidth_gbit_s"])
        for row in rows
        if row["scope"] == "intra-node" and row["src_gpu"] == gpu and row["src_gpus_per_node"] == count
    )
    return LinkMatrix(
        endpoints=tuple(f"{zone}-{k}" for k, zone in enumerate(zones)),
        places=per_node,
        gbps=tuple(tuple(inside if i == j else rate[a, b] for j, b in enumerate(zones)) for i, a in enumerate(zones)),
        latency_us=tuple(tuple(5.0 if i == j else 25.0 for j in range(len(zones))) for i in range(len(zones))),
        places_per_port=per_node,
    )


def on_accelerator(card: Card, accelerator: str) -> Card:
    """Return the card on another accelerator, in fp16 on V100, which has no tensor cores for bf16."""
    hardware = card.hardware.model_copy(update={"accelerator": accelerator, "peak_flops": None})
    precision = "fp16" if accelerator == "v100" else "bf16"
    return card.model_copy(update={"hardware": hardware, "precision": precision})


def _config_of(layout: Sequence[int]) -> dict[str, object]:
    degrees = dict(zip(("tp", "dp", "pp"), layout, strict=True))
    return {**degrees, "micro_batch_size": 1, "activation_checkpointing": "full"}


def _print_row(title: str, layout: Sequence[int], found: dict[str, Found]) -> tuple[float, float]:
    best = found["best"][0]
    gain = found["worst"][0] / best, found["default"][0] / best
    cells = " | ".join(f"{found[name][0]:.2f} s" for name in ("default", "worst", "nodes", "best"))
    shown = " ".join(map(str, layout))
    print(f"| {title} | {shown} | {cells} | {found['best'][1]} | {gain[0]:.2f}x | {gain[1]:.2f}x |", flush=True)
    return gain


def _print_gains(gains: Sequence[tuple[float, float]]) -> None:
    worst, default = (statistics.median(each) for each in zip(*gains, strict=True))
    reached = sum(ratio >= 1.3 for ratio, _ in gains)
    least = min(ratio for ratio, _ in gains), min(ratio for _, ratio in gains)
    print(
        f"\nSimulated; {reached} of {len(gains)} layouts at least 1.3x against worst; median: {worst:.2f}x against"
        f" worst, {default:.2f}x against the default; least: {least[0]:.2f}x and {least[1]:.3f}x\n"
    )


def device_links(counts: Sequence[Sequence[int]], gb_s: float, order: Sequence[int]) -> LinkMatrix:
    """Return one node whose devices are numbered in this order."""
    picked = np.array(counts)[np.ix_(order, order)]
    rate = np.where(picked > 0, picked * gb_s, HOST_GB_S) * 8
    np.fill_diagonal(rate, 0.0)
    return LinkMatrix(
        endpoints=tuple(f"a:{k}" for k in range(len(rate))),
        nodes=("a",) * len(rate),
        gbps=tuple(map(tuple, rate.tolist())),
        latency_us=tuple((5.0,) * len(rate) for _ in rate),
    )


def uneven_devices() -> None:
    """Predict layouts inside one node of devices with unlike links, numbered as they are and in other orders."""
    print("| node of 8 | layout | default | worst | best | its degrees | its devices | worst/best | default/best |")
    print("| --- " * 9 + "|")
    gains = []
    for title, (accelerator, counts, gb_s) in NODES.items():
        card = with_links(load_card("wl2"), device_links(counts, gb_s, range(8)), 8, 8)
        card = on_accelerator(card, accelerator)
        for layout in NODE_LAYOUTS:
            found = compare(card, _config_of(layout), devices=True)
            best = found["best"]
            gains.append((found["worst"][0] / best[0], found["default"][0] / best[0]))
            cells = " | ".join(f"{found[name][0]:.2f} s" for name in ("default", "worst", "best"))
            shown, devices = " ".join(map(str, layout)), "".join(map(str, best[2]))
            ratios = f"{gains[-1][0]:.2f}x | {gains[-1][1]:.2f}x"
            print(f"| {title} | {shown} | {cells} | {best[1]} | {devices} | {ratios} |", flush=True)
    _print_gains(gains)


def galvatron(rows: list[dict[str, str]]) -> None:
    """Compare the slowest ring with measured bus bandwidths of two nodes of 8; the pair figures are their p2p rows."""
    own = [row for row in rows if row["set"] == "galvatron" and row["bandwidth_GB_s_derived"]]
    own = [row for row in own if row["gpus_per_node"] == "8"]
    pair = {
        row["nodes"]: float(row["bandwidth_GB_s_derived"])
        for row in own
        if row["op"] == "p2p" and row["group_size"] == "2" and row["gpus_per_node"] == "8"
    }
    inside, between = 8 * pair["1"], 8 * pair["2"]
    links = LinkMatrix(
        endpoints=("a", "b"), places=8, gbps=((inside, between), (between, inside)), latency_us=((5, 25), (25, 5))
    )
    print("\n| all-reduce over 2 nodes of 8 | measured GB/s | by the matrix | by the slower of two bandwidths |")
    print("| --- | --- | --- | --- |")
    errors: list[tuple[float, float]] = []
    for row in own:
        if row["op"] != "all_reduce" or row["nodes"] != "2" or row["gpus_per_node"] != "8" or row["message_MB"]:
            continue
        size, ranks = int(row["group_size"]), np.arange(16)
        groups = ranks.reshape(-1, size) if row["placement"] == "consecutive" else ranks.reshape(size, -1).T
        found = slowest_ring(links, groups, ring_per_port=True)
        took, simple = float(row["bandwidth_GB_s_derived"]), pair["2" if found.crosses else "1"]
        if found.crosses:
            errors.append((abs(found.bytes_s / 1e9 / took - 1), abs(simple / took - 1)))
        print(f"| {size} {row['placement']} | {took:.1f} | {found.bytes_s / 1e9:.1f} | {simple:.1f} |")
    by_matrix, by_two = (statistics.median(each) for each in zip(*errors, strict=True))
    errors_of = f"{100 * by_matrix:.0f} % by the matrix, {100 * by_two:.0f} % by two bandwidths"
    print(f"median error of groups that leave the node: {errors_of}")
