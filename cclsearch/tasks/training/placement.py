"""Where the ranks of one configuration run: nodes in the order that suits their measured links."""

from __future__ import annotations

from cclsearch.card.model import Card
from cclsearch.core.values import Config
from cclsearch.space.table import Knob, space_from_rows
from cclsearch.tasks.machine import read_machine
from cclsearch.tasks.training.layout import read_layout
from cclsearch.tasks.training.network import Mesh, place_ranks
from cclsearch.tasks.training.time import count_bytes


def find_places(card: Card, config: Config) -> tuple[int, ...]:
    """Return the place of each rank; empty if they are in order, or if the configuration does not ask for it."""
    machine = read_machine(card)
    if config.get("host_order") != "links" or machine.links is None:
        return ()
    space = space_from_rows([Knob(name, (value,)) for name, value in config.items()], [dict(config)])
    layout = read_layout(card, space)
    weights = {name: float(each[0]) for name, each in count_bytes(card, layout, machine).items()}
    places = place_ranks(machine.links, Mesh.at(layout, 0), weights, ring_per_port=machine.ring_per_port).tolist()
    return tuple(places) if places != list(range(len(places))) else ()
