"""Places a configuration of a workload on a profile's measured links, and predicts it on other ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cclsearch.card.model import Card
from cclsearch.core.errors import UserError
from cclsearch.core.values import Config
from cclsearch.links.matrix import LinkMatrix
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
    card, space, links, row, _ = _choose(workload, launcher, config, knobs)
    chosen = {name: v for name, v in space.config(row).items() if name != "host_order"}
    both = predict_space(card, _two_orders(chosen))
    assert both is not None
    best = Config({**chosen, "host_order": "links"})
    payload = task_of(card).make_input(card, best, is_measured=True, run_id="", trial=1)
    places = payload.places or tuple(range(payload.num_ranks))
    nodes = links.nodes or links.endpoints
    hosts = [nodes[int(links.endpoint_P[place])] for place in places]
    values = dict(zip(PLACED, both.value_N.tolist(), strict=True))
    return Placed(Config(chosen), hosts, values, task_of(card).primary_metric.unit or "")


@dataclass(frozen=True)
class OnLinks:
    """What is predicted on other links."""

    name: str
    value: float
    """The task's primary metric of the configuration that is best on the measured links, or was asked for."""
    best_value: float
    """Of the best matching configuration on these links."""
    best: Config


def predict_on_links(
    workload: str, launcher: str, config: str | None, knobs: Sequence[str]
) -> tuple[Config, str, list[OnLinks]]:
    """Return a configuration, the unit of the task's primary metric, and predictions on the measured and other links.

    The configuration is the one that is predicted to be best on the measured links among those that match `config`.
    """
    card, space, links, row, rows = _choose(workload, launcher, config, knobs)
    found = []
    for name, changed in vary_links(links):
        hardware = card.hardware.model_copy(update={"links": changed})
        prediction = predict_space(card.model_copy(update={"hardware": hardware}), space)
        assert prediction is not None
        best = int(prediction.order(rows)[0])
        values = prediction.value_N
        found.append(OnLinks(name, float(values[row]), float(values[best]), space.config(best)))
    return space.config(row), task_of(card).primary_metric.unit or "", found


def vary_links(links: LinkMatrix) -> list[tuple[str, LinkMatrix]]:
    """Return the matrix, and what it would be with links repaired or faster, each with its name."""
    nodes = np.array(links.nodes or links.endpoints)
    between = nodes[:, None] != nodes[None, :]
    rates, latencies = np.array(links.gbps), np.array(links.latency_us)

    def changed(gbps: NDArray[np.float64], latency: NDArray[np.float64] = latencies) -> LinkMatrix:
        fields = {name: getattr(links, name) for name in ("endpoints", "nodes", "places", "places_per_port")}
        return LinkMatrix(**fields, gbps=gbps.tolist(), latency_us=latency.tolist())

    found = [("as measured", links)]
    if between.any():
        middle = float(np.median(rates[between]))
        slow = int(np.where(between, rates, np.inf).argmin())
        one, other = np.array(links.endpoints)[list(divmod(slow, len(rates)))]
        repaired = np.zeros_like(between)
        repaired.flat[slow] = True
        repaired |= repaired.T
        found.append(
            (
                f"{one} and {other} (the slowest) as fast as the median",
                changed(np.where(repaired, rates.clip(middle), rates)),
            )
        )
        found.append(("no link slower than the median", changed(np.where(between, rates.clip(middle), rates))))
        found.append(("links between nodes twice as fast", changed(np.where(between, 2 * rates, rates))))
    if (~between & (rates > 0)).any():
        found.append(("links inside nodes twice as fast", changed(np.where(between, rates, 2 * rates))))
    return [*found, ("half the latency", changed(rates, latencies / 2))]


def _choose(
    workload: str, launcher: str, config: str | None, knobs: Sequence[str]
) -> tuple[Card, Space, LinkMatrix, int, NDArray[np.int64]]:
    """Return card, space, measured links, the row that is predicted to be best, and all rows that match."""
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
    return card, space, links, int(prediction.order(rows)[0]), rows


def _two_orders(config: Mapping[str, bool | int | float | str]) -> Space:
    """Return a space of the configuration with each order of the nodes."""
    rows = [{**config, "host_order": order} for order in PLACED]
    knobs = [Knob(name, (value,)) for name, value in config.items()]
    return space_from_rows([*knobs, Knob("host_order", tuple(PLACED))], rows)
