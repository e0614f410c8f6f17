"""Measures the links of a profile's cluster, places a configuration on them, and predicts it on other ones."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from cclsearch.card.model import Card
from cclsearch.core.errors import UserError
from cclsearch.core.job_file import JobFileError, read_job_bytes
from cclsearch.core.text import one_line
from cclsearch.core.values import Config, Failure, Model, PositiveCount, Value
from cclsearch.launch.base import Job, JobState, Launcher
from cclsearch.launch.collect import collect_end
from cclsearch.launch.contract import EVIDENCE_FILE, TrialInput
from cclsearch.launch.profile import Profile, make_launcher
from cclsearch.network.groups import slowest_ring
from cclsearch.network.matrix import LinkMatrix
from cclsearch.network.placement import NEARLY, count_devices
from cclsearch.plan.subject import Asked, find_subject
from cclsearch.run.trial_folder import prepare_folder
from cclsearch.space.framework import find_framework
from cclsearch.space.parse import parse_assignments
from cclsearch.space.table import Knob, Space, space_from_rows
from cclsearch.stats.closed_form import predict_space
from cclsearch.tasks.base import task_of

PROBES = {"torch": "links-probe", "jax": "links-probe-jax"}
"""Python package that moves the bytes -> framework whose run script measures with it."""
MAX_BYTES = 64 * 2**20


class Reduced(Model):
    """An all-reduce over all ranks."""

    bytes: PositiveCount
    seconds: float = Field(gt=0, allow_inf_nan=False)


class ProbedLinks(Model):
    """One line of a probe's `evidence.jsonl`: its measurements."""

    endpoints: tuple[str, ...]
    nodes: tuple[str, ...]
    places: PositiveCount
    bytes_s: tuple[tuple[float, ...], ...]
    latency_s: tuple[tuple[float, ...], ...]
    places_per_port: PositiveCount
    port_bytes_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    all_reduce: tuple[Reduced, ...]
    backend: str


@dataclass(frozen=True)
class Measured:
    """The matrix, and measured all-reduces over all ranks beside the matrix's predictions."""

    links: LinkMatrix
    reduced: tuple[tuple[int, float, float], ...]
    """(bytes, measured seconds, seconds by the matrix)."""


def measure_links(
    profile: Profile,
    *,
    num_ranks: int,
    folder: Path,
    timeout_s: float,
    package: str | None = None,
) -> Measured:
    """Run the probe as a job and return its measurements; UserError names in one line the cause of a failure.

    `package` is one of `PROBES`; by default the base of the profile's framework, or torch.
    """
    own = find_framework(profile.framework) if profile.framework else None
    probe = PROBES[package or (own.package if own is not None and own.package in PROBES else "torch")]
    per_node = min(profile.hardware.accelerators_per_node or num_ranks, num_ranks)
    launcher = make_launcher(profile.model_copy(update={"framework": probe}), run_dir=folder)
    payload = TrialInput(
        run_id=folder.name,
        trial=1,
        config=Config(pair_seconds=0.1),
        precision="fp32",
        num_ranks=num_ranks,
        ranks_per_node=per_node,
    )
    job = Job(
        run_id=folder.name,
        trial=1,
        attempt=1,
        trial_dir=folder / "trials" / "0001",
        payload=payload,
        timeout_s=timeout_s,
    )
    try:
        _run(launcher, job)
    finally:
        launcher.close()
    return read_probe(job.trial_dir / EVIDENCE_FILE)


def _run(launcher: Launcher, job: Job) -> None:
    """Run the job to its end; UserError if it has no result."""
    prepare_folder(job, launcher.render(job))
    handles = launcher.submit([job])
    try:
        while (status := launcher.poll(handles)[0]).state is not JobState.DONE:
            time.sleep(max(launcher.poll_interval_s, 0.05))
    except BaseException:
        launcher.cancel(handles)
        raise
    failure = status.failure
    if failure is None:
        end = collect_end(job.trial_dir)
        failure = end if isinstance(end, Failure) else end.failure
    if failure is not None:
        raise UserError(f"the links were not measured: {one_line(failure.message, 300)} (logs: {job.trial_dir})")


def read_probe(path: Path) -> Measured:
    """Return a probe's results in its folder; UserError if they are unusable."""
    try:
        found = ProbedLinks.model_validate(json.loads(read_job_bytes(path, MAX_BYTES)))
        links = LinkMatrix(
            endpoints=found.endpoints,
            nodes=found.nodes if found.nodes != found.endpoints else (),
            places=found.places,
            gbps=tuple(tuple(float(f"{rate * 8e-9:.4g}") for rate in row) for row in found.bytes_s),
            latency_us=tuple(tuple(float(f"{latency * 1e6:.4g}") for latency in row) for row in found.latency_s),
            places_per_port=found.places_per_port,
            port_gbps=None if found.port_bytes_s is None else float(f"{found.port_bytes_s * 8e-9:.4g}"),
            source=f"measured with {one_line(found.backend, 20)} over {len(found.endpoints)} endpoints",
        )
    except (OSError, JobFileError, ValidationError, ValueError) as error:
        raise UserError(f"{path}: is not a measurement of links: {one_line(str(error), 300)}") from None
    count = links.num_places
    ring = slowest_ring(links, np.arange(count)[None], ring_per_port=found.backend == "nccl")
    steps = 2 * (count - 1)
    by_size = ((each.bytes, each.seconds) for each in found.all_reduce)
    reduced = tuple((size, s, steps / count * size / ring.bytes_s + steps * ring.latency_s) for size, s in by_size)
    return Measured(links, reduced if math.isfinite(ring.bytes_s) else ())


DEFAULT = "given"
KINDS = {
    DEFAULT: "degrees, nodes and devices in the framework's order and the matrix's",
    "host_order": "nodes in another order",
    "device_order": "nodes, and the devices inside nodes, in another order",
    "rank_order": "with the framework's degrees in another order",
    "ranks": "each rank at a place of its own, for any order of the degrees (srun or mpirun; not torchrun)",
}
"""Kind of placement -> its change, in words."""


@dataclass(frozen=True)
class Placement:
    """A configuration with its placement."""

    kind: str
    """One of `KINDS`."""
    config: Config
    """With `rank_order` if the framework has it."""
    predicted: float
    """The task's primary metric."""
    hosts: tuple[str, ...]
    """Host of each rank."""
    devices: tuple[int, ...]
    """Device of each rank of a node; empty: in their numbering."""


@dataclass(frozen=True)
class Placed:
    """A configuration, and its placements of each kind, the default first."""

    config: Config
    unit: str
    placements: tuple[Placement, ...]

    @property
    def best(self) -> Placement:
        """The fastest; of equal ones, the one that changes least."""
        return min(self.placements, key=lambda each: each.predicted * (1 + NEARLY * list(KINDS).index(each.kind)))


def place_config(workload: str, launcher: str, config: str | None, knobs: Sequence[str]) -> Placed:
    """Return placements of the configuration that is predicted to be fastest among those that match, best of each kind.

    The order of the degrees, of the nodes and of the devices inside them are searched together.
    """
    orders = _find_orders(launcher, workload, knobs)
    is_named = any(text.partition("=")[0].strip() == "rank_order" for text in knobs)
    added = [f"rank_order={','.join(orders)}"] if orders and not is_named else []
    card, space, links, row, matching = _choose(workload, launcher, config, [*knobs, *added])
    chosen = {name: v for name, v in space.config(row).items() if name not in PLACEMENT_KNOBS}
    rows = _list_placements(space, matching, chosen, links)
    tried = [Knob(name, tuple(dict.fromkeys(row[name] for row in rows))) for name in rows[0]]
    found = predict_space(card, space_from_rows(tried, rows))
    assert found is not None
    best: dict[str, tuple[float, dict[str, Value]]] = {}
    for each, value in zip(rows, found.value_N.tolist(), strict=True):
        for kind in _kinds_of(each, default=rows[0]):
            if kind not in best or value < best[kind][0] * (1 - NEARLY):
                best[kind] = value, each
    kept = [_make_placement(card, kind, *best[kind]) for kind in KINDS if kind in best]
    return Placed(Config(chosen), task_of(card).primary_metric.unit or "", tuple(kept))


PLACEMENT_KNOBS = ("rank_order", "host_order", "device_order")
Row = dict[str, Value]


def _find_orders(launcher: str, workload: str, knobs: Sequence[str]) -> tuple[str, ...]:
    """Return the orders of the degrees that the framework can express, its own first."""
    framework = find_subject(Asked(workload=workload, launcher=launcher, knobs=tuple(knobs))).framework
    knob = framework.find_optional("rank_order") if framework is not None else None
    return tuple(map(str, knob.choices)) if knob is not None and isinstance(knob.choices, tuple) else ()


def _list_placements(space: Space, matching: NDArray[np.int64], chosen: Row, links: LinkMatrix) -> list[Row]:
    """Return the rows of all placements of a configuration, the default first."""
    same = matching[space.matching(chosen)[matching]]
    orders = list(dict.fromkeys(space.config(int(row)).get("rank_order") for row in same))
    knob = space.find("rank_order")
    if knob is not None:
        orders.sort(key=knob.choices.index)  # type: ignore[arg-type]
    own: list[Row] = [{} if order is None else {"rank_order": order} for order in orders]
    devices = ("given", "links") if links.places < count_devices(links) else ("given",)
    rows = [{**each, "host_order": hosts, "device_order": inside} for each in own for hosts in ("given", "links")
            for inside in devices]  # fmt: skip
    rows += [{**own[0], "host_order": "ranks", "device_order": inside} for inside in devices]
    return [{**chosen, **row} for row in rows]


def _kinds_of(row: Row, default: Row) -> list[str]:
    """Return the kinds that may change as much as this row does."""
    changed = {name for name in PLACEMENT_KNOBS if row.get(name) != default.get(name)}
    allowed = {
        DEFAULT: set(),
        "host_order": {"host_order"},
        "device_order": {"host_order", "device_order"},
        "rank_order": set(PLACEMENT_KNOBS),
    }
    if row["host_order"] == "ranks":
        return ["ranks"]
    fewest = [kind for kind, names in allowed.items() if changed <= names]
    return fewest[:1]


def _make_placement(card: Card, kind: str, value: float, row: Row) -> Placement:
    payload = task_of(card).make_input(card, Config(row), is_measured=True, run_id="", trial=1)
    links = card.hardware.links
    assert links is not None
    places = payload.places or tuple(range(payload.num_ranks))
    nodes = links.nodes or links.endpoints
    hosts = tuple(nodes[int(links.endpoint_P[place])] for place in places)
    inside = _devices_of(places, links) if row["device_order"] != "given" else ()
    config = Config({name: v for name, v in row.items() if name not in ("host_order", "device_order")})
    return Placement(kind, config, value, hosts, inside)


def _devices_of(places: Sequence[int], links: LinkMatrix) -> tuple[int, ...]:
    """Return the devices of the first rank's node in the order of its ranks; empty if they are in order."""
    node_P = links.node_P
    mine = [place for place in places if node_P[place] == node_P[places[0]]]
    first = int(np.flatnonzero(node_P == node_P[places[0]])[0])
    found = tuple(int(place) - first for place in mine)
    return found if found != tuple(range(len(found))) else ()


@dataclass(frozen=True)
class OnLinks:
    """A prediction on other links."""

    name: str
    value: float
    """The task's primary metric of the configuration that is best on the measured links, or was asked for."""
    best_value: float
    """Value of the best matching configuration on these links."""
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
    """Return the matrix, and variants with links repaired or faster, each with its name."""
    nodes = np.array(links.nodes or links.endpoints)
    between = nodes[:, None] != nodes[None, :]
    rates = np.array(links.gbps)

    def with_rates(gbps: NDArray[np.float64]) -> LinkMatrix:
        return links.changed(gbps=gbps.tolist())

    found = [("as measured", links)]
    if between.any():
        middle = float(np.median(rates[between]))
        slow = int(np.where(between, rates, np.inf).argmin())
        one, other = np.array(links.endpoints)[list(divmod(slow, len(rates)))]
        repaired = np.zeros_like(between)
        repaired.flat[slow] = True
        repaired |= repaired.T
        found += [
            (
                f"{one} and {other} (the slowest) as fast as the median",
                with_rates(np.where(repaired, rates.clip(middle), rates)),
            ),
            ("no link slower than the median", with_rates(np.where(between, rates.clip(middle), rates))),
            ("links between nodes twice as fast", with_rates(np.where(between, 2 * rates, rates))),
        ]
    if (~between & (rates > 0)).any():
        found.append(("links inside nodes twice as fast", with_rates(np.where(between, rates, 2 * rates))))
    return [*found, ("half the latency", links.changed(latency_us=(np.array(links.latency_us) / 2).tolist()))]


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
