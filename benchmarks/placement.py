"""Placement of ranks on uneven links: real training over shaped links, and simulation on published bandwidths.

    sudo python benchmarks/placement.py devices         # namespaces that stand for the devices of one node
    sudo python benchmarks/placement.py real            # namespaces with shaped links on this machine; needs root
    python benchmarks/placement.py published FOLDER     # FOLDER has sailor-multizone.csv and galvatron-allreduce.csv

Each layout is run (or predicted) with its default placement, where AMP (Li et al. 2022) and Megatron-LM place ranks
(degrees in the order tp, dp, pp, nodes as given), with the worst and the best one found over orders of the degrees and
nodes together, and with the nodes alone in another order.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from shaped_links import shaped

from cclsearch.card.load import load_card
from cclsearch.card.model import Card
from cclsearch.checks.links import measure_links
from cclsearch.core.values import Config
from cclsearch.launch.profile import profile_from_mapping
from cclsearch.launch.spread import main as _spread
from cclsearch.links.groups import slowest_ring
from cclsearch.links.matrix import LinkMatrix
from cclsearch.space.table import Knob, space_from_rows
from cclsearch.stats.calibration import CalibrationData, ParametricModel, RowModel, calibrate
from cclsearch.stats.closed_form import ClosedForm, predict_space, predictor_of
from cclsearch.stats.kernel import read_features
from cclsearch.tasks.base import task_of
from cclsearch.tasks.machine import read_machine
from cclsearch.tasks.training.layout import read_layout
from cclsearch.tasks.training.network import Freedom, Mesh, place_ranks
from cclsearch.tasks.training.prediction import STEP_TIME
from cclsearch.tasks.training.time import count_bytes

ROOT = Path(__file__).parent.parent
REAL = (
    {"tp": 1, "dp": 4, "pp": 1},
    {"tp": 2, "dp": 2, "pp": 1},
    {"tp": 2, "dp": 1, "pp": 2},
    {"tp": 1, "dp": 2, "pp": 2},
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


ORDERS = ("tp-dp-pp", "tp-pp-dp", "dp-tp-pp", "dp-pp-tp", "pp-tp-dp", "pp-dp-tp")
DEFAULT = ORDERS[0]
Found = tuple[float, str, tuple[int, ...]]
"""Predicted seconds per step, order of the degrees, place of each rank."""


def at_places(links: LinkMatrix, places: Sequence[int]) -> LinkMatrix:
    """Return the matrix whose place r is the one that rank r has; ports are of single places, or of whole nodes."""
    at, node = links.endpoint_P[list(places)], links.node_P[list(places)]
    rates = np.where(np.isinf(links.bytes_s_EE), 0.0, links.bytes_s_EE)[np.ix_(at, at)] * 8e-9
    latencies = links.latency_s_EE[np.ix_(at, at)] * 1e6
    return LinkMatrix(
        endpoints=tuple(f"rank {rank}" for rank in range(len(at))),
        nodes=tuple(f"node {each}" for each in node),
        gbps=tuple(map(tuple, rates.tolist())),
        latency_us=tuple(map(tuple, latencies.tolist())),
        places_per_port=links.places_per_port,
    )


def predict_at(card: Card, config: dict[str, object], order: str, places: Sequence[int]) -> Found:
    """Return what is predicted with the degrees in this order and the ranks at these places."""
    assert card.hardware.links is not None
    hardware = card.hardware.model_copy(update={"links": at_places(card.hardware.links, places)})
    seconds = predict(card.model_copy(update={"hardware": hardware}), {**config, "rank_order": order})
    return seconds, order, tuple(places)


def place(card: Card, config: dict[str, object], order: str, freedom: Freedom, *, slowest: bool = False) -> Found:
    """Return a placement with the degrees in this order, improved (or made worse) as far as it is free."""
    machine, row = read_machine(card), {**config, "rank_order": order}
    assert machine.links is not None
    layout = read_layout(card, space_from_rows([Knob(name, (value,)) for name, value in row.items()], [row]))  # type: ignore[arg-type,list-item]
    weights = {name: float(each[0]) for name, each in count_bytes(card, layout, machine).items()}
    places = place_ranks(
        machine.links, Mesh.at(layout, 0), weights, freedom, ring_per_port=machine.ring_per_port, slowest=slowest
    )
    return predict_at(card, config, order, places.tolist())


def compare(card: Card, config: dict[str, object], *, devices: bool = False) -> dict[str, Found]:
    """Return the default placement, the worst one found, the best by the nodes alone, and the best of all orders.

    `worst` and `best` are over all orders of the degrees, each with its nodes (and devices) in the orders that local
    improvement finds; the default is one of both.
    """
    ranks = range(int(np.prod([int(str(config[name])) for name in ("tp", "dp", "pp")])))
    hosts, free = Freedom(nodes=True), Freedom(nodes=True, devices=devices)
    default = predict_at(card, config, DEFAULT, ranks)
    nodes = min(default, place(card, config, DEFAULT, hosts), key=lambda found: found[0])
    worst = [place(card, config, order, free, slowest=True) for order in ORDERS]
    best = [place(card, config, order, free) for order in ORDERS]
    return {
        "default": default,
        "worst": max(default, *worst, key=lambda found: found[0]),
        "nodes": nodes,
        "best": min(default, nodes, *best, key=lambda found: found[0] * (1 + 1e-9 * ORDERS.index(found[1]))),
    }


def run_real(
    names: list[str], card: Card, config: dict[str, object], places: Sequence[int], per_node: int = 1
) -> float:
    """Train with the ranks on these namespaces, so many of which are a node; returns the median seconds per step."""
    with tempfile.TemporaryDirectory() as folder:
        task = task_of(card)
        payload = task.make_input(card, Config(config), is_measured=False, run_id="r", trial=1)  # type: ignore[arg-type]
        data = {**json.loads(payload.model_dump_json()), "warmup_steps": 1, "timed_steps": 3}
        (Path(folder) / "config.json").write_text(json.dumps(data))
        words = [f"namespaces={','.join(names)}", "ranks=4", f"places={','.join(map(str, places))}"]
        words += [f"per_node={per_node}", f"namespaces_per_node={per_node}"]
        command = [sys.executable, sys.modules[_spread.__module__].__file__, ROOT / "launchers" / "cpu.py", *words]
        variables = {"CCL_TRIAL_DIR": folder, "CCL_CONFIG": f"{folder}/config.json", "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env={**os.environ, **variables}, check=True, timeout=300)  # type: ignore[arg-type]
        return statistics.median(json.loads((Path(folder) / "result.json").read_text())["step_times_s"])


def real() -> None:
    """Measure links, then train each layout in its placements, and compare with predictions."""
    with shaped(MBIT_S) as names, tempfile.TemporaryDirectory() as folder:
        profile = profile_from_mapping({"launcher": "local", "network_namespaces": names}, name="shaped")
        hardware = profile.hardware.model_copy(update={"accelerators_per_node": 1})
        profile = profile.model_copy(update={"hardware": hardware, "environment": {"OMP_NUM_THREADS": "1"}})
        measured = measure_links(profile, num_ranks=4, folder=Path(folder), timeout_s=600, say=print)
        print(measured.links.describe())
        tiny = load_card("tiny")
        on_links, on_card = with_links(tiny, measured.links, 4, 1), with_links(tiny, None, 4, 4)
        print("| layout | placement | degrees | nodes | step s, measured | predicted with the matrix | without |")
        print("| --- " * 7 + "|")
        ran: list[Ran] = []
        for layout in REAL:
            full = {"micro_batch_size": 4, "activation_checkpointing": "none", "zero_stage": 0, **layout}
            ran += _run_layout(names, on_links, on_card, full)
        _print_errors(on_links, ran)


def real_devices() -> None:
    """Train on four namespaces that stand for the devices of one node, in the given order and in the better one."""
    with shaped(MBIT_S) as names:
        rates = tuple(tuple(rate / 1e3 for rate in row) for row in MBIT_S)
        endpoints, latency = tuple(f"a:{k}" for k in range(4)), tuple((100.0,) * 4 for _ in range(4))
        links = LinkMatrix(endpoints=endpoints, nodes=("a",) * 4, gbps=rates, latency_us=latency)
        card = with_links(load_card("tiny"), links, 4, 4)
        config = {"tp": 2, "dp": 2, "pp": 1, "micro_batch_size": 4, "activation_checkpointing": "none", "zero_stage": 0}
        print("| device_order | devices | step s, measured | predicted |\n| --- | --- | --- | --- |")
        for order in ("given", "links"):
            asked = Config({**config, "device_order": order})  # type: ignore[arg-type,dict-item]
            places = task_of(card).make_input(card, asked, is_measured=True, run_id="r", trial=1).places or range(4)
            seconds, predicted = (
                run_real(names, card, config, places, 4),
                predict(card, {**config, "device_order": order}),
            )
            print(f"| {order} | {','.join(map(str, places))} | {seconds:.3f} | {predicted:.3f} |", flush=True)


@dataclass(frozen=True)
class Ran:
    """One placement that was trained."""

    config: dict[str, object]
    places: tuple[int, ...]
    measured_s: float
    predicted_s: float
    without_s: float


def _run_layout(names: list[str], on_links: Card, on_card: Card, full: dict[str, object]) -> list[Ran]:
    took: dict[tuple[str, tuple[int, ...]], Ran] = {}
    shown = " ".join(f"{k}={full[k]}" for k in ("tp", "dp", "pp"))
    found = compare(on_links, full)
    for name, (predicted, order, places) in found.items():
        config = {**full, "rank_order": order}
        if (order, places) not in took:
            seconds = run_real(names, on_card, config, places)
            took[order, places] = Ran(config, places, seconds, predicted, predict(on_card, config))
        ran = took[order, places]
        nodes = ",".join(map(str, places))
        figures = f"{ran.measured_s:.3f} | {predicted:.3f} | {ran.without_s:.3f}"
        print(f"| {shown} | {name} | {order} | {nodes} | {figures} |", flush=True)
    times = {name: took[order, places].measured_s for name, (_, order, places) in found.items()}
    ratios = ", ".join(f"{times[name] / times['best']:.2f}x against {name}" for name in ("worst", "default", "nodes"))
    print(f"| {shown} | best: {ratios} | | | | | |", flush=True)
    return list(took.values())


def _print_errors(card: Card, ran: Sequence[Ran]) -> None:
    """Print the median error before any trial, and of the others after three of the runs were trials of a search."""
    measured = np.array([each.measured_s for each in ran])
    for name, values in (("with", [r.predicted_s for r in ran]), ("without", [r.without_s for r in ran])):
        error = statistics.median(abs(np.array(values) / measured - 1).tolist())
        print(f"median error of the prediction {name} the matrix, before any trial: {100 * error:.0f} %")
    forms = [_form_of(card, each) for each in ran]
    space = space_from_rows(*_rows_of(ran))
    at = np.array([int(np.flatnonzero(space.matching(row))[0]) for row in _rows_of(ran)[1]])
    own = np.log([each.predicted_s for each in ran])
    errors, by_factor = [], []
    for trials in itertools.combinations(range(len(ran)), 3):
        tried, rest = np.array(trials), np.array([k for k in range(len(ran)) if k not in trials])
        evidence = CalibrationData.measured(at[tried], np.log(measured[tried]))
        position = {int(row): k for k, row in enumerate(at)}
        model = _model_of(forms, position)
        posterior = calibrate(model, read_features(space), forms[0].prior, evidence)
        after = np.exp(posterior.marginals(at[rest])[0])
        errors.append(statistics.median(abs(after / measured[rest] - 1).tolist()))
        factor = np.mean(np.log(measured[tried]) - own[tried])
        by_factor.append(statistics.median(abs(np.exp(own[rest] + factor) / measured[rest] - 1).tolist()))
    print(
        f"after 3 of the {len(ran)} runs as trials, error of the others: {100 * statistics.median(errors):.0f} %;"
        f" with one common factor from them in place of the multipliers: {100 * statistics.median(by_factor):.0f} %"
        f" (medians over all {len(errors)} choices of three)"
    )


def _rows_of(ran: Sequence[Ran]) -> tuple[list[Knob], list[dict[str, object]]]:
    """Return knobs and rows of the runs, with their places as a knob."""
    rows = [{**each.config, "places": "-".join(map(str, each.places))} for each in ran]
    return [Knob(name, tuple(dict.fromkeys(row[name] for row in rows))) for name in rows[0]], rows  # type: ignore[arg-type,misc]


def _form_of(card: Card, ran: Ran) -> ClosedForm:
    """Return the closed form of the step time of one run on the links of its places."""
    assert card.hardware.links is not None
    hardware = card.hardware.model_copy(update={"links": at_places(card.hardware.links, ran.places)})
    space = space_from_rows([Knob(k, (v,)) for k, v in ran.config.items()], [ran.config])  # type: ignore[arg-type,list-item]
    return predictor_of(card.model_copy(update={"hardware": hardware}), space).forms[STEP_TIME]


def _model_of(forms: Sequence[ClosedForm], position: Mapping[int, int]) -> ParametricModel:
    """Return rows -> log multipliers -> log step times, each row by its own form."""
    each = [form.log_cost(np.array([0])) for form in forms]

    def at(rows: NDArray[np.int64]) -> RowModel:
        return lambda theta: np.concatenate([each[position[int(row)]](theta) for row in rows], axis=-1)

    return at


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


NVLINKS = (
    (0, 1, 1, 2, 2, 0, 0, 0),
    (1, 0, 2, 1, 0, 2, 0, 0),
    (1, 2, 0, 2, 0, 0, 1, 0),
    (2, 1, 2, 0, 0, 0, 0, 1),
    (2, 0, 0, 0, 0, 1, 1, 2),
    (0, 2, 0, 0, 1, 0, 2, 1),
    (0, 0, 1, 0, 1, 2, 0, 2),
    (0, 0, 0, 1, 2, 1, 2, 0),
)
"""NVLinks between the GPUs of a DGX-1 with V100, as `nvidia-smi topo -m` prints them (NV1, NV2, SYS)."""
XGMI_LINKS = (
    (0, 4, 1, 0, 0, 0, 2, 0),
    (4, 0, 0, 1, 0, 1, 0, 0),
    (1, 0, 0, 4, 2, 0, 0, 0),
    (0, 1, 4, 0, 0, 0, 0, 1),
    (0, 0, 2, 0, 0, 4, 1, 0),
    (0, 1, 0, 0, 4, 0, 0, 1),
    (2, 0, 0, 0, 1, 0, 0, 4),
    (0, 0, 0, 1, 0, 1, 4, 0),
)
"""xGMI links between the 8 GCDs of four MI250X: `connMatrix` of `rome_model_71` in RCCL's src/graph/rome_models.cc."""
NODES = {
    "DGX-1 V100": ("v100", NVLINKS, 25.0),
    "4 x MI250X": ("mi250x-gcd", XGMI_LINKS, 50.0),
}
"""Accelerator, links between the devices of a node, GB/s of a link in one direction (NVLink 2, xGMI)."""
HOST_GB_S = 10.0
"""Pairs without a link, through the host: nominal."""
NODE_LAYOUTS = ((2, 4, 1), (4, 2, 1), (8, 1, 1), (2, 2, 2), (2, 1, 4), (1, 4, 2), (1, 2, 4), (4, 1, 2))
"""tp, dp, pp of 8 accelerators."""


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


if __name__ == "__main__":
    if sys.argv[1:2] == ["real"]:
        real()
    elif sys.argv[1:2] == ["devices"]:
        real_devices()
    elif len(sys.argv) == 3 and sys.argv[1] == "published":
        published(Path(sys.argv[2]))
    else:
        sys.exit(__doc__)
