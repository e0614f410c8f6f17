"""Placements of a layout that `placement.py` compares, with their predictions: default, worst and best found."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cclsearch.card.model import Card
from cclsearch.network.matrix import LinkMatrix
from cclsearch.space.table import Knob, space_from_rows
from cclsearch.stats.closed_form import predict_space
from cclsearch.tasks.machine import read_machine
from cclsearch.tasks.training.layout import read_layout
from cclsearch.tasks.training.network import Freedom, Mesh, place_ranks
from cclsearch.tasks.training.time import count_bytes


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
