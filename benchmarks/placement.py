"""Placement of ranks on uneven links: real training over shaped links, and simulation on published bandwidths.

    sudo python benchmarks/placement.py real            # namespaces with shaped links on this machine; needs root
    python benchmarks/placement.py published FOLDER     # FOLDER has sailor-multizone.csv and galvatron-allreduce.csv

Each layout is run (or predicted) with its nodes in three orders: as they are given, the worst order that local search
finds, and the order of `host_order=links`. AMP (Li et al. 2022) and Megatron-LM place ranks in the given order.
"""

from __future__ import annotations

import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from shaped_links import shaped

from cclsearch.card.load import load_card
from cclsearch.card.model import Card
from cclsearch.checks.links import measure_links
from cclsearch.core.values import Config
from cclsearch.launch.profile import profile_from_mapping
from cclsearch.launch.spread import main as _spread
from cclsearch.links.groups import slowest_ring
from cclsearch.links.matrix import LinkMatrix
from cclsearch.links.placement import chain_nodes, identity_order, improve_order, spread_nodes
from cclsearch.space.table import Knob, space_from_rows
from cclsearch.stats.closed_form import predict_space
from cclsearch.tasks.base import task_of
from cclsearch.tasks.machine import read_machine
from cclsearch.tasks.training.layout import read_layout
from cclsearch.tasks.training.network import Mesh, links_of
from cclsearch.tasks.training.time import count_bytes

ROOT = Path(__file__).parent.parent
ORDERS = ("given", "worst", "links")
REAL = (
    {"tp": 1, "dp": 4, "pp": 1, "rank_order": "tp-dp-pp"},
    {"tp": 2, "dp": 2, "pp": 1, "rank_order": "tp-dp-pp"},
    {"tp": 2, "dp": 1, "pp": 2, "rank_order": "tp-dp-pp"},
    {"tp": 1, "dp": 2, "pp": 2, "rank_order": "tp-dp-pp"},
)
MBIT_S = ((0, 40, 800, 160), (40, 0, 160, 800), (800, 160, 0, 160), (160, 800, 160, 0))
"""Two zones, nodes 0 and 2 and nodes 1 and 3; one pair between the zones is slower still."""


def with_links(card: Card, links: LinkMatrix | None, ranks: int, per_node: int) -> Card:
    """Return the card on these links."""
    hardware = {"links": links, "num_accelerators": ranks, "accelerators_per_node": per_node, "host_cores": 2}
    return card.model_copy(update={"hardware": card.hardware.model_copy(update=hardware)})


def predict(card: Card, config: dict[str, object]) -> float:
    """Return predicted seconds per step, before any trial."""
    space = space_from_rows([Knob(name, (value,)) for name, value in config.items()], [config])  # type: ignore[arg-type,list-item]
    found = predict_space(card, space)
    assert found is not None
    return float(found.value_N[0])


def order_nodes(card: Card, config: dict[str, object]) -> dict[str, tuple[int, ...]]:
    """Return the three orders of the nodes."""
    machine = read_machine(card)
    assert machine.links is not None
    links = machine.links
    space = space_from_rows([Knob(name, (value,)) for name, value in config.items()], [config])  # type: ignore[arg-type,list-item]
    layout = read_layout(card, space)
    weights = {name: float(each[0]) for name, each in count_bytes(card, layout, machine).items()}
    mesh = Mesh.at(layout, 0)

    def cost(order: Sequence[int]) -> float:
        found = links_of(links, mesh, spread_nodes(links, order)[: mesh.num_ranks], ring_per_port=machine.ring_per_port)
        return sum(size / found[name].bytes_s for name, size in weights.items() if size)

    given = identity_order(links)
    return {
        "given": given,
        "worst": improve_order(given, lambda order: -cost(order), chain_nodes(links, slowest=True)),
        "links": improve_order(given, cost, chain_nodes(links)),
    }


def compare(card: Card, config: dict[str, object]) -> dict[str, float]:
    """Return predicted seconds per step with each order of the nodes."""
    links = card.hardware.links
    assert links is not None
    found = {}
    for name, order in order_nodes(card, config).items():
        hardware = card.hardware.model_copy(update={"links": links.select(order)})
        found[name] = predict(card.model_copy(update={"hardware": hardware}), config)
    return found


def run_real(names: list[str], card: Card, config: dict[str, object], order: Sequence[int]) -> float:
    """Train with the ranks on these namespaces; returns the median seconds per step."""
    with tempfile.TemporaryDirectory() as folder:
        task = task_of(card)
        knobs = {"micro_batch_size": 4, "activation_checkpointing": "none", "zero_stage": 0, **config}
        payload = task.make_input(card, Config(knobs), is_measured=False, run_id="r", trial=1)  # type: ignore[arg-type]
        data = {**json.loads(payload.model_dump_json()), "warmup_steps": 1, "timed_steps": 3}
        (Path(folder) / "config.json").write_text(json.dumps(data))
        words = [f"namespaces={','.join(names)}", "ranks=4", "per_node=1", f"places={','.join(map(str, order))}"]
        command = [sys.executable, sys.modules[_spread.__module__].__file__, ROOT / "launchers" / "cpu.py", *words]
        variables = {"CCL_TRIAL_DIR": folder, "CCL_CONFIG": f"{folder}/config.json", "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env={**os.environ, **variables}, check=True, timeout=300)  # type: ignore[arg-type]
        return statistics.median(json.loads((Path(folder) / "result.json").read_text())["step_times_s"])


def real() -> None:
    """Measure links, then train each layout in the three orders, and compare with predictions."""
    with shaped(MBIT_S) as names, tempfile.TemporaryDirectory() as folder:
        profile = profile_from_mapping({"launcher": "local", "network_namespaces": names}, name="shaped")
        hardware = profile.hardware.model_copy(update={"accelerators_per_node": 1})
        profile = profile.model_copy(update={"hardware": hardware, "environment": {"OMP_NUM_THREADS": "1"}})
        measured = measure_links(profile, num_ranks=4, folder=Path(folder), timeout_s=600, say=print)
        print(measured.links.describe())
        tiny = load_card("tiny")
        on_links, on_card = with_links(tiny, measured.links, 4, 1), with_links(tiny, None, 4, 4)
        print("| layout | order of the nodes | step s, measured | predicted with the matrix | without |")
        print("| --- | --- | --- | --- | --- |")
        errors: dict[str, list[float]] = {"with": [], "without": []}
        for config in REAL:
            full = {"micro_batch_size": 4, "activation_checkpointing": "none", "zero_stage": 0, **config}
            predicted, took = compare(on_links, full), {}
            for name, order in order_nodes(on_links, full).items():
                took[name] = run_real(names, on_card, config, order)
                without = predict(on_card, full)
                errors["with"].append(abs(predicted[name] / took[name] - 1))
                errors["without"].append(abs(without / took[name] - 1))
                layout = " ".join(f"{k}={config[k]}" for k in ("tp", "dp", "pp"))
                shown = ",".join(map(str, order))
                print(
                    f"| {layout} | {name} ({shown}) | {took[name]:.3f} | {predicted[name]:.3f} | {without:.3f} |",
                    flush=True,
                )
            print(
                f"| {layout} | links against worst {took['worst'] / took['links']:.2f}x,"
                f" against given {took['given'] / took['links']:.2f}x | | | |",
                flush=True,
            )
        for name, each in errors.items():
            print(f"median error of the prediction {name} the matrix: {100 * statistics.median(each):.0f} %")


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


CLUSTERS = {
    "two regions": ("us-central1-a", "us-west1-b"),
    "five zones": ("us-central1-a", "us-west1-b", "us-central1-b", "us-central1-c", "us-central1-f"),
}
LAYOUTS = ((4, 8, 1), (4, 4, 2), (4, 2, 4), (4, 1, 8), (2, 4, 4))
"""tp, dp, pp of 32 accelerators."""


def published(folder: Path) -> None:
    """Predict each layout on the published bandwidths, and check the groups against measured all-reduces."""
    rows = read_rows(folder / "sailor-multizone.csv")
    print("| cluster (8 nodes of 4) | layout | given | worst | links | worst/links | given/links |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    gains = []
    for gpu, accelerator in (("A100-40", "a100-40"), ("V100-16", "v100")):
        for title, zones in CLUSTERS.items():
            links = sailor_links(rows, [zones[k % len(zones)] for k in range(8)], gpu, 4)
            card = with_links(load_card("wl2"), links, 32, 4)
            hardware = card.hardware.model_copy(update={"accelerator": accelerator, "peak_flops": None})
            card = card.model_copy(update={"hardware": hardware})
            for tp, dp, pp in LAYOUTS:
                config = {"tp": tp, "dp": dp, "pp": pp, "micro_batch_size": 1, "activation_checkpointing": "full"}
                times = compare(card, config)
                gains.append((times["worst"] / times["links"], times["given"] / times["links"]))
                cells = " | ".join(f"{times[name]:.1f} s" for name in ORDERS)
                print(f"| {gpu}, {title} | {tp} {dp} {pp} | {cells} | {gains[-1][0]:.2f}x | {gains[-1][1]:.2f}x |")
    worst, given = (statistics.median(each) for each in zip(*gains, strict=True))
    least = min(ratio for _, ratio in gains)
    print(
        f"simulated; median: {worst:.2f}x against worst, {given:.2f}x against given; least against given {least:.3f}x"
    )
    galvatron(read_rows(folder / "galvatron-allreduce.csv"))


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


if __name__ == "__main__":
    if sys.argv[1:2] == ["real"]:
        real()
    elif len(sys.argv) == 3 and sys.argv[1] == "published":
        published(Path(sys.argv[2]))
    else:
        sys.exit(__doc__)
