"""Places one configuration of a workload on a profile's measured links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cclsearch.core.errors import UserError
from cclsearch.core.values import Config
from cclsearch.plan.subject import Asked, find_subject
from cclsearch.space.parse import parse_assignments
from cclsearch.space.table import Knob, Space, space_from_rows
from cclsearch.stats.closed_form import predict_space
from cclsearch.tasks.base import task_of

PLACED = {"given": "nodes as the matrix has them", "links": "nodes in the order below"}


@dataclass(frozen=True)
class Placed:
    """A configuration, the host of each of its ranks, and what is predicted with both orders of the nodes."""

    config: Config
    hosts: list[str]
    predicted: Mapping[str, float]
    """Order of the nodes -> the task's primary metric."""
    unit: str


def place_config(workload: str, launcher: str, config: str | None, knobs: Sequence[str]) -> Placed:
    """Return the order of the nodes for the configuration that is predicted to be fastest among those that match."""
    subject = find_subject(Asked(workload=workload, launcher=launcher, knobs=tuple(knobs)))
    card, links = subject.card, subject.card.hardware.links
    if links is None:
        raise UserError(
            f"profile {launcher} has no measured links: run `ccl-search links measure --launcher {launcher}` first"
        )
    space = subject.build_space()
    rows = np.flatnonzero(space.matching(parse_assignments(config, space.knobs) if config else {}))
    prediction = predict_space(card, space)
    if prediction is None or not len(rows):
        raise UserError(f"no configuration of {card.name} matches --config {config!r}, or its task predicts no time")
    chosen = {name: v for name, v in space.config(int(prediction.order(rows)[0])).items() if name != "host_order"}
    both = predict_space(card, _two_orders(chosen))
    assert both is not None
    best = Config({**chosen, "host_order": "links"})
    payload = task_of(card).make_input(card, best, is_measured=True, run_id="", trial=1)
    places = payload.places or tuple(range(payload.num_ranks))
    nodes = links.nodes or links.endpoints
    hosts = [nodes[int(links.endpoint_P[place])] for place in places]
    values = dict(zip(PLACED, both.value_N.tolist(), strict=True))
    return Placed(Config(chosen), hosts, values, task_of(card).primary_metric.unit or "")


def _two_orders(config: Mapping[str, bool | int | float | str]) -> Space:
    """Return a space of the configuration with each order of the nodes."""
    rows = [{**config, "host_order": order} for order in PLACED]
    knobs = [Knob(name, (value,)) for name, value in config.items()]
    return space_from_rows([*knobs, Knob("host_order", tuple(PLACED))], rows)
