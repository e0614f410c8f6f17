"""Time and memory of pipelines with unlike stages: other hardware, other links, other numbers of layers.

Each stage is computed by itself, on the machine of its slowest rank, with its own layers. The parts of a configuration
are the slowest stage's (for memory: the stage closest to its device's limit), and the pipeline fills and drains in the
sum of all stages. The choice of the stage precedes calibration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cclsearch.card.model import Card
from cclsearch.core.values import Config
from cclsearch.space.table import Knob, space_from_rows
from cclsearch.stats.columns import map_columns
from cclsearch.tasks.machine import Machine, read_machine, read_machines
from cclsearch.tasks.training.layout import Array, Layout, read_layout
from cclsearch.tasks.training.memory import MULTIPLIERS as MEMORY_MULTIPLIERS
from cclsearch.tasks.training.memory import MemoryParts, combine_memory, memory_parts
from cclsearch.tasks.training.network import Mesh, Network
from cclsearch.tasks.training.stages import EVEN, apply_split, read_split
from cclsearch.tasks.training.time import TimeParts, connect, slot_seconds, time_on, time_parts

Numbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Stages:
    """The pipeline stages of N configurations, S at most."""

    layers_NS: Numbers
    """0 beyond a pipeline's last stage."""
    slowest_NS: Numbers
    """Group of the slowest rank of each stage."""
    smallest_NS: Numbers
    """Group of the rank with the least memory."""


def is_staged(card: Card, layout: Layout) -> bool:
    """Whether stages may differ: by groups of hardware, or by a knob that splits the layers."""
    return bool(card.hardware.groups) or layout.splits != (EVEN,)


def staged_time(card: Card, layout: Layout, machine: Machine) -> TimeParts:
    """Return the parts of time of every configuration before multipliers."""
    if not is_staged(card, layout):
        return time_parts(card, layout, machine)
    machines, network = read_machines(card), connect(card, layout, machine)
    stages = find_stages(card, layout, machines, network)
    total, longest, parts = np.zeros(len(layout)), np.zeros(len(layout)), None
    for stage in range(stages.layers_NS.shape[1]):
        one = _time_of_stage(card, layout, machines, network, stages, stage)
        seconds = np.where(stages.layers_NS[:, stage] > 0, slot_seconds(one), 0.0)
        total += seconds
        parts = one if parts is None else _choose_longest(parts, one, seconds > longest, seconds > 0)
        longest = np.maximum(longest, seconds)
    assert parts is not None
    ratio = np.divide(total / longest - 1, layout.pp - 1, out=np.zeros(len(layout)), where=layout.pp > 1)
    return replace(parts, bubble=parts.bubble * ratio)


def _time_of_stage(
    card: Card, layout: Layout, machines: Sequence[Machine], network: Network, stages: Stages, stage: int
) -> TimeParts:
    at = _look_at(layout, stages, stage)
    each = [time_on(card, at, machine, network) for machine in machines]
    parts: TimeParts = pick(each, stages.slowest_NS[:, stage])
    is_last = layout.pp == stage + 1
    return replace(parts, vocabulary=parts.vocabulary * is_last, pipelined=np.zeros(len(layout)))


def _choose_longest(
    parts: TimeParts, one: TimeParts, is_longer: NDArray[np.bool_], exists: NDArray[np.bool_]
) -> TimeParts:
    """Return the parts of the longer stage; the work after the pipeline takes as long as on its slowest stage."""
    chosen: TimeParts = pick([parts, one], is_longer.astype(np.int64))
    after = {name: (vars(parts)[name], vars(one)[name]) for name in ("dp", "dp_exposed_floor", "optimizer")}
    return replace(chosen, **{name: np.where(exists, np.maximum(a, b), a) for name, (a, b) in after.items()})


def staged_memory(card: Card, layout: Layout, machine: Machine) -> MemoryParts:
    """Return the parts of memory of every configuration before multipliers, of the device closest to its limit.

    They are scaled to the memory of the card's device, which is the first group's: with half of it, a stage counts
    twice.
    """
    if not is_staged(card, layout):
        return memory_parts(card, layout, machine)
    machines, network = read_machines(card), connect(card, layout, machine)
    stages = find_stages(card, layout, machines, network)
    has_G, prior = np.array([one.memory_gib for one in machines]), np.zeros(len(MEMORY_MULTIPLIERS))
    fullest, found = np.zeros(len(layout)), None
    for stage in range(stages.layers_NS.shape[1]):
        parts = memory_parts(card, _look_at(layout, stages, stage), machine)
        held = np.minimum(layout.pp - stage, layout.accumulation) / np.minimum(layout.pp, layout.accumulation)
        parts = replace(
            parts, in_flight=parts.in_flight * np.maximum(held, 0.0), logits=parts.logits * (layout.pp == stage + 1)
        )
        scale = machine.memory_gib / has_G[stages.smallest_NS[:, stage]]
        parts = MemoryParts(
            **{name: gib * (1.0 if name == "in_flight" else scale) for name, gib in vars(parts).items()}
        )
        needed = np.where(stages.layers_NS[:, stage] > 0, combine_memory(parts, prior), 0.0)
        found = parts if found is None else pick([found, parts], (needed > fullest).astype(np.int64))
        fullest = np.maximum(fullest, needed)
    assert found is not None
    return found


def find_stages(card: Card, layout: Layout, machines: Sequence[Machine], network: Network) -> Stages:
    """Return the layers of each stage, and the groups that its slowest and its smallest rank are of."""
    slowest_NS, smallest_NS = _find_groups(card, layout, machines, network)
    layers_NS = np.zeros(slowest_NS.shape, dtype=np.int64)
    if layout.splits == (EVEN,):
        layer_NG, head_NG = np.ones((len(layout), len(machines))), np.zeros((len(layout), len(machines)))
    else:
        layer_NG, head_NG = _time_layers(card, layout, machines, network)
    columns = [layout.pp, layout.split, layout.accumulation, *slowest_NS.T, *layer_NG.T, *head_NG.T]
    _, first, which = np.unique(np.stack(columns, axis=1), axis=0, return_index=True, return_inverse=True)
    for number, row in enumerate(first.tolist()):
        pp = int(layout.pp[row])
        groups = slowest_NS[row, :pp]
        layer_s = layer_NG[row, groups].tolist()
        extra_s = [0.0] * (pp - 1) + [float(head_NG[row, groups[-1]])]
        choice = read_split(layout.splits[int(layout.split[row])])
        assert choice is not None, "a rule of the space refuses other forms"
        layers = max(card.arch.num_layers, pp)
        layers_NS[which.reshape(-1) == number, :pp] = apply_split(
            choice, layer_s, extra_s, layers, float(layout.accumulation[row])
        )
    return Stages(layers_NS, slowest_NS, smallest_NS)


def _find_groups(card: Card, layout: Layout, machines: Sequence[Machine], network: Network) -> tuple[Numbers, Numbers]:
    """Return (N, S) groups: of the slowest rank of each stage, and of the one with the least memory."""
    size = len(layout), int(layout.pp.max(initial=1))
    slowest_NS, smallest_NS = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    if not card.hardware.groups:
        return slowest_NS, smallest_NS
    group_P = np.repeat(np.arange(len(machines)), [group.num_accelerators for group in card.hardware.groups])
    slow_G = np.array([1 / (one.flops_per_s * one.gemm_share) for one in machines])
    small_G = np.array([-one.memory_gib for one in machines])
    for row, rows in network.each_mesh():
        stages_PS = Mesh.at(layout, row).groups("pp")
        place_R = network.place(row)
        groups_PS = group_P[np.minimum(place_R[stages_PS], len(group_P) - 1)]
        for score_G, found_NS in ((slow_G, slowest_NS), (small_G, smallest_NS)):
            worst = np.argmax(score_G[groups_PS], axis=0)
            found_NS[rows, : groups_PS.shape[1]] = groups_PS[worst, np.arange(groups_PS.shape[1])]
    return slowest_NS, smallest_NS


def _time_layers(card: Card, layout: Layout, machines: Sequence[Machine], network: Network) -> tuple[Array, Array]:
    """Return (N, G) seconds of a layer and of the output projection on each group, before calibration."""
    layer_NG, head_NG = [], []
    for machine in machines:
        parts = time_on(card, layout, machine, network)
        parts = replace(parts, pipelined=np.zeros(len(layout)))
        alone = slot_seconds(replace(parts, vocabulary=np.zeros(len(layout))))
        layer_NG.append(alone / layout.stage_layers)
        head_NG.append(slot_seconds(parts) - alone)
    return np.stack(layer_NG, axis=1), np.stack(head_NG, axis=1)


def _look_at(layout: Layout, stages: Stages, stage: int) -> Layout:
    """Return the layout with the layers and ends of that stage; a stage that a pipeline has not is of one layer."""
    ends = np.where(layout.pp > 1, (stage == 0) + (layout.pp == stage + 1), 2)
    return replace(
        layout, stage_layers=np.maximum(stages.layers_NS[:, stage], 1).astype(float), stage_ends=ends.astype(float)
    )


def pick(each: Sequence[Any], which_N: Numbers) -> Any:
    """Return the parts whose row n is row n of `each[which_N[n]]`."""
    return each[0] if len(each) == 1 else map_columns(lambda *values: np.choose(which_N, values), *each)


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
