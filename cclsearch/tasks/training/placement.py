"""Rank placement and stage layers of one configuration."""

from __future__ import annotations

from cclsearch.card.model import Card
from cclsearch.core.values import Config
from cclsearch.space.table import Knob, space_from_rows
from cclsearch.tasks.machine import read_machine, read_machines
from cclsearch.tasks.training.layout import Layout, read_layout
from cclsearch.tasks.training.staged import find_stages
from cclsearch.tasks.training.time import connect


def find_places(card: Card, config: Config) -> tuple[int, ...]:
    """Return the place of each rank; empty if they are in order, or if the configuration does not ask for it."""
    layout = _layout_of(card, config)
    places = connect(card, layout, read_machine(card)).place(0).tolist()
    return tuple(places) if places != list(range(len(places))) else ()


def find_layers(card: Card, config: Config) -> tuple[int, ...]:
    """Return the layers of each pipeline stage."""
    card, layout = card.for_trial(config), _layout_of(card, config)
    network = connect(card, layout, read_machine(card))
    stages = find_stages(card, layout, read_machines(card), network)
    return tuple(stages.layers_NS[0].tolist())


def _layout_of(card: Card, config: Config) -> Layout:
    """Return the layout of this configuration alone."""
    return read_layout(card, space_from_rows([Knob(name, (value,)) for name, value in config.items()], [dict(config)]))
