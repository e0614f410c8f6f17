"""Step time with another network: a measured step replayed with communication times from a cost model.

The model is alpha-beta (Hockney): t = alpha + bytes / beta, fitted to the trace for each collective and group.
Measured times are scaled by the ratio that the model gives, so that an unchanged scenario changes no duration. With too
few message sizes to fit alpha, the result is two bounds: all of the time is bandwidth, or all of it is latency."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from cclsearch.card.model import Card
from cclsearch.core.text import format_value
from cclsearch.core.values import Model
from cclsearch.network.engine import Work
from cclsearch.trace.collectives import (
    CollectiveSample,
    collect_samples,
    count_unsized,
    group_label,
    is_scale_up,
    scale_up_size,
)
from cclsearch.trace.diagnosis.causes import median_windows
from cclsearch.trace.events import Collective, CollectiveKind, Kind, Reason
from cclsearch.trace.metric import NotAvailable
from cclsearch.trace.metrics.bandwidth import HockneyFit, fit_hockney, group_samples
from cclsearch.trace.metrics.steps import measure_step_time
from cclsearch.trace.view import TraceView
from cclsearch.trace.whatif.graph import Floats, RankGraph, StepTimer, build_graph

Algorithm = Literal["ring", "tree"]


@dataclass(frozen=True)
class Scenario:
    """Changes to the measured system; the default changes nothing."""

    scale_up_bw: float = 1.0
    """Factor on the bandwidth inside a scale-up domain."""
    scale_out_bw: float = 1.0
    """Factor on the bandwidth between domains."""
    scale_up_domain: int | None = None
    """Ranks per scale-up domain; None: unchanged."""
    algorithm: Algorithm | None = None
    """Algorithm of all-reduces; None: unchanged."""
    compress_ratio: float = 1.0
    """Factor by which messages shrink."""
    compress_cost_s_per_byte: float = 0.0
    """Time to encode and decode, in s per byte of the original message."""
    compute: float = 1.0
    """Factor on the speed of compute."""
    copies: float = 1.0
    """Factor on the bandwidth of memory copies."""


@dataclass(frozen=True)
class CommModel:
    """Alpha-beta fits of a trace, and the size of its scale-up domains."""

    fits: Mapping[tuple[str, ...], HockneyFit]
    domain_size: int
    """Ranks per scale-up domain of the recorded system."""
    num_ranks: int
    up_over_out: float | None
    """Bandwidth inside a domain over bandwidth between domains; None if neither trace nor card states it."""
    notes: tuple[str, ...] = ()

    def transfer_bounds(
        self, call: Collective, measured_s: float, scenario: Scenario, tree: bool
    ) -> tuple[float, float]:
        """Return bounds, in seconds, of a transfer measured as `measured_s`; `tree`: with the tree algorithm."""
        size = call.group_size or (len(call.group_ranks) if call.group_ranks else self.num_ranks)
        fit = self.fits.get((str(call.kind), group_label(call)))
        message = float(call.message_bytes or 0)
        coding = scenario.compress_cost_s_per_byte * message
        hop_ratio, byte_ratio = _algorithm_ratios(call, size, scenario, tree)
        totals = []
        for alpha_share in _alpha_shares(fit, message):
            latency = measured_s * alpha_share
            moving = (measured_s - latency) / self._speedup(call, size, scenario)
            moving /= scenario.compress_ratio
            latency *= hop_ratio
            moving *= byte_ratio
            totals.append(latency + moving + coding)
        return min(totals), max(totals)

    def _speedup(self, call: Collective, size: int, scenario: Scenario) -> float:
        before = is_scale_up(call, size, self.domain_size)
        after = is_scale_up(call, size, scenario.scale_up_domain or self.domain_size)
        factor = scenario.scale_up_bw if after else scenario.scale_out_bw
        if before == after:
            return factor
        ratio = self.up_over_out or 1.0
        return factor * ratio if after else factor / ratio


def _alpha_shares(fit: HockneyFit | None, message: float) -> tuple[float, ...]:
    """Return the share of latency in a transfer: one value with a fit, both extremes without."""
    if fit is None or not message:
        return 0.0, 1.0
    total = fit.alpha_s + message / fit.beta_bytes_per_s
    return (fit.alpha_s / total,)


def _algorithm_ratios(call: Collective, size: int, scenario: Scenario, tree: bool) -> tuple[float, float]:
    """Return latency and wire bytes per byte of message of the new algorithm over the old.

    A ring has 2(n-1) hops and 2(n-1)/n bytes, a double binary tree 2 log2 n hops and 2 bytes.
    """
    if scenario.algorithm is None or call.kind is not CollectiveKind.ALL_REDUCE or size < 2:
        return 1.0, 1.0
    old: Algorithm = "tree" if tree else "ring"
    hops = {"ring": 2.0 * (size - 1), "tree": 2.0 * max(math.log2(size), 1.0)}
    wire_bytes = {"ring": 2.0 * (size - 1) / size, "tree": 2.0}
    return hops[scenario.algorithm] / hops[old], wire_bytes[scenario.algorithm] / wire_bytes[old]


def fit_comm_model(trace: TraceView, ranks_per_domain: int | None = None) -> CommModel:
    """Return the model of a trace. Domain size: as given, else the card's node, else ranks per host, else all ranks."""
    samples, _ = collect_samples(trace)
    by_group = group_samples(samples, "kind", "group")
    fits = {key: fit for key, found in by_group.items() if (fit := fit_hockney(found))}
    domain, notes = _domain_size(trace, ranks_per_domain)
    ratio = _up_over_out(domain, samples, trace.card)
    unfitted = sorted({" ".join(key) for key in by_group} - {" ".join(key) for key in fits})
    if unfitted:
        notes.append(
            f"too few message sizes to separate latency from bandwidth (bounds instead): {', '.join(unfitted)}"
        )
    return CommModel(fits, domain, trace.num_devices, ratio, tuple(notes))


def _domain_size(trace: TraceView, given: int | None) -> tuple[int, list[str]]:
    if given is not None:
        return given, []
    if trace.card is not None:
        return scale_up_size(trace.card), []
    hosts = [view.table.host for view in trace.ranks.values()]
    if all(hosts) and len(hosts) == trace.num_devices:
        return max(hosts.count(host) for host in set(hosts)), []
    return trace.num_devices, ["no card and no host names: assumes one scale-up domain of all ranks"]


def _up_over_out(domain_size: int, samples: Sequence[CollectiveSample], card: Card | None) -> float | None:
    rates: dict[bool, list[float]] = {True: [], False: []}
    for sample in samples:
        rates[is_scale_up(sample.call, sample.size, domain_size)].append(sample.bus_gbps)
    if rates[True] and rates[False]:
        return max(rates[True]) / max(rates[False])
    if card is not None and card.hardware.scale_up_gbps and card.hardware.scale_out_gbps:
        return card.hardware.scale_up_gbps / card.hardware.scale_out_gbps
    return None


MAX_UNNOTED_DEVIATION = 0.01
"""A replay of the unchanged step that differs more from the measured one gets a note."""
NO_GAIN = 0.005
"""A smaller change of the step counts as none."""
MIN_CHANGED_SHARE = 0.02
"""Smallest share of the step in events that a scenario changes for a note on why it gains nothing."""
DOUBLED_RESOURCES: Mapping[str, Scenario] = {
    "compute": Scenario(compute=2.0),
    "scale_up_bw": Scenario(scale_up_bw=2.0),
    "scale_out_bw": Scenario(scale_out_bw=2.0),
    "copies": Scenario(copies=2.0),
}
"""Resource -> the scenario in which it is twice as fast."""


class WhatIf(Model):
    """Bounds of the step time in a scenario; they are equal if the trace shows every dependency and latency."""

    step_time_s: float
    """The measured `trace_step_time`, which the scenario changes; without steps the length of the file."""
    low_s: float
    high_s: float
    """The step time of the scenario is between `low_s` and `high_s`."""
    notes: tuple[str, ...] = ()

    @property
    def gain_low(self) -> float:
        """Smallest share of the measured step that is saved."""
        return 1 - self.high_s / self.step_time_s

    @property
    def gain_high(self) -> float:
        """Largest share of the measured step that is saved."""
        return 1 - self.low_s / self.step_time_s


@dataclass(frozen=True)
class Replay:
    """The dependency graphs of one step of every rank, to be timed in any scenario."""

    trace: TraceView
    graphs: tuple[RankGraph, ...]
    model: CommModel
    step_time_s: float
    window_s: float
    """Measured time of the replayed step."""
    notes: tuple[str, ...]
    is_step: bool = True
    """False: the trace has no steps, and the whole file is replayed."""
    slowest: int = 0
    """The rank whose step is replayed: the slowest."""

    @cached_property
    def _timers(self) -> dict[bool, StepTimer]:
        return {best: StepTimer(self.graphs, self.trace.matching, apart=True, best=best) for best in (True, False)}

    def _time_step(self, scenario: Scenario, *, best: bool) -> float:
        """Return the seconds of the replayed step in the scenario, of which `best` is the lower bound."""
        seconds = [_new_durations(self, graph, scenario, best) for graph in self.graphs]
        moves = []
        for data in self._timers[best].moving:
            ((g, i),) = data.ending
            waited_s = (data.arrived_ns - int(self.graphs[g].start_ns[i])) / 1e9
            moves.append(Work(max(float(seconds[g][i]) - waited_s, 0.0)))
        return self._timers[best].time(seconds, moves)

    @cached_property
    def _unchanged_s(self) -> tuple[float, float]:
        """Lower and upper bound that the replay gives for the unchanged step."""
        return self._time_step(Scenario(), best=True), self._time_step(Scenario(), best=False)

    def time(self, scenario: Scenario) -> WhatIf:
        """Return bounds of the step time in the scenario."""
        bounds = (self._time_step(scenario, best=True), self._time_step(scenario, best=False))
        changes = [bound - unchanged for bound, unchanged in zip(bounds, self._unchanged_s, strict=True)]
        scale = self.step_time_s / self.window_s
        found = [self.step_time_s + change * scale for change in changes]
        notes = [*self.notes, *self._fidelity_notes, *self.model.notes, *_scenario_notes(self, scenario)]
        if max(abs(change) for change in changes) < NO_GAIN * self.window_s:
            notes += self._launch_notes(scenario)
        return WhatIf(step_time_s=self.step_time_s, low_s=min(found), high_s=max(found), notes=tuple(notes))

    @cached_property
    def _fidelity_notes(self) -> list[str]:
        """One line if the replay of the unchanged step differs from the measured one: gains may be wrong by as much."""
        off = max((bound / self.window_s - 1 for bound in self._unchanged_s), key=abs)
        if abs(off) <= MAX_UNNOTED_DEVIATION:
            return []
        return [
            f"the replay of the unchanged {self.what} takes {100 * (1 + off):.0f} % of the measured time: the trace"
            " does not show all dependencies, and gains may be wrong by as much"
        ]

    def _launch_notes(self, scenario: Scenario) -> list[str]:
        """One line if the scenario changes nothing because the host's launches bound the step."""
        kinds = _changed_kinds(scenario)
        changed_ns = [int((g.end_ns - g.start_ns)[np.isin(g.kind, kinds)].sum()) for g in self.graphs]
        if not kinds or max(changed_ns, default=0) < MIN_CHANGED_SHARE * self.window_s * 1e9:
            return []
        free = replace(self, graphs=tuple(_without_launches(graph) for graph in self.graphs))
        gain = 1 - free._time_step(scenario, best=True) / free._time_step(Scenario(), best=True)
        if abs(gain) < NO_GAIN:
            return []
        return [f"nothing changes: the host's launches bound the {self.what}, not what this scenario speeds up"]

    @property
    def what(self) -> str:
        """Word for the replayed time: a step, or the recorded window."""
        return "step" if self.is_step else "window"

    def utilities(self) -> dict[str, WhatIf]:
        """Return resource -> the step time with that resource twice as fast: its utility is the share saved."""
        return {name: self.time(scenario) for name, scenario in DOUBLED_RESOURCES.items()}


def prepare_replay(trace: TraceView, ranks_per_domain: int | None = None) -> Replay:
    """Return the graphs of all ranks for the slowest rank's median step; without steps, for the whole files.

    Raises NotAvailable if no rank has device events that take time.
    """
    lengths = _measure_lengths(trace)
    slowest = max(lengths, key=lambda rank: lengths[rank])
    view = trace.ranks[slowest]
    at = int(median_windows(view.parts.window_ns_W)[-1])
    number = view.windows.numbers[at]
    offsets = trace.matching.offset_ns
    graphs = []
    for rank, other in trace.ranks.items():
        if number in other.windows.numbers:
            start, end = other.windows.spans_W2[other.windows.numbers.index(number)].tolist()
            graphs.append(build_graph(trace, other, (start, end), (offsets or {}).get(rank, 0)))
    window_s = int(view.parts.window_ns_W[at]) / 1e9
    if window_s <= 0:
        raise NotAvailable(Reason.TOO_FEW_STEPS, "the step has length 0")
    return Replay(
        trace=trace,
        graphs=tuple(graphs),
        model=fit_comm_model(trace, ranks_per_domain),
        step_time_s=lengths[slowest],
        window_s=window_s,
        notes=tuple(_replay_notes(trace, number, window_s, lengths[slowest])),
        is_step=view.windows.are_steps,
        slowest=slowest,
    )


def _measure_lengths(trace: TraceView) -> dict[int, float]:
    """Return rank -> seconds of its median step; without steps in any rank, of its whole file."""
    if any(view.windows.are_steps for view in trace.ranks.values()):
        return {rank: value for rank, value in measure_step_time(trace).per_rank.items() if value is not None}
    lengths = {rank: view.parts.window_ns_W for rank, view in trace.ranks.items()}
    found = {rank: float(ns_W[0]) / 1e9 for rank, ns_W in lengths.items() if len(ns_W)}
    if not found:
        raise NotAvailable(Reason.NO_GPU_EVENTS, "no device event that takes time")
    return found


def _changed_kinds(scenario: Scenario) -> list[Kind]:
    """Return the kinds of events whose durations the scenario changes."""
    kinds = [Kind.COMPUTE] if scenario.compute != 1 else []
    kinds += [Kind.MEMCPY, Kind.MEMSET] if scenario.copies != 1 else []
    return kinds if replace(scenario, compute=1.0, copies=1.0) == Scenario() else [*kinds, Kind.COMM]


def _without_launches(graph: RankGraph) -> RankGraph:
    """Return the graph of a host that launches everything early enough."""
    none = np.full(len(graph.rows), -1, dtype=np.int64)
    return replace(graph, launch_ns=none, host_after=none, is_host_bound=np.zeros(len(graph.rows), dtype=bool))


def _replay_notes(trace: TraceView, number: int, window_s: float, step_s: float) -> list[str]:
    notes = []
    if number < 0:
        notes.append(f"{trace.unmarked}: the whole file ({format_value(window_s, 's')}) is replayed")
    elif abs(window_s / step_s - 1) > 1e-6:
        replayed, median = format_value(window_s, "s"), format_value(step_s, "s")
        notes.append(f"step {number} ({replayed}) is replayed and scaled to the median step ({median})")
    communicates = any(len(view.comm_rows) for view in trace.ranks.values())
    if communicates and trace.matching.is_empty:
        notes.append(
            "one rank does not separate waiting from data transfer: the bounds assume only waiting and only transfer"
        )
    elif communicates and trace.matching.offset_ns is None:
        notes.append("clocks of the ranks are not aligned: waiting in collectives is kept as measured")
    return notes


def _scenario_notes(replay: Replay, scenario: Scenario) -> list[str]:
    model, notes = replay.model, []
    wider = scenario.scale_up_domain is not None and scenario.scale_up_domain != model.domain_size
    if wider and model.up_over_out is None:
        notes.append("neither trace nor card states how much faster links inside a domain are: assumed to be equal")
    tables = [view.table for view in replay.trace.ranks.values()]
    if scenario.algorithm and all(_used_tree(table.names) is None for table in tables):
        notes.append("kernel names do not show which algorithm ran: assumed to be a ring")
    if scenario.compress_cost_s_per_byte:
        unsized, total = count_unsized((replay.trace.ranks[graph.rank].table, graph.rows) for graph in replay.graphs)
        if unsized:
            notes.append(
                f"{unsized} of {total} collectives have no recorded message size: their coding cost is not included, so"
                " the step may be longer than both bounds"
            )
    return notes


def _used_tree(names: tuple[str, ...]) -> bool | None:
    joined = " ".join(name for name in names if "AllReduce" in name).upper()
    if "TREE" in joined:
        return True
    return False if "RING" in joined else None


def _new_durations(replay: Replay, graph: RankGraph, scenario: Scenario, best: bool) -> Floats:
    """Return the seconds of each event in the scenario, with waiting in collectives as measured."""
    duration = (graph.end_ns - graph.start_ns) / 1e9
    duration[graph.kind == Kind.COMPUTE] /= scenario.compute
    duration[np.isin(graph.kind, (Kind.MEMCPY, Kind.MEMSET))] /= scenario.copies
    table = replay.trace.ranks[graph.rank].table
    tree = bool(_used_tree(table.names))
    single = replay.trace.matching.is_empty
    for i in np.flatnonzero(graph.kind == Kind.COMM).tolist():
        call = table.collectives[int(table.coll_id[graph.rows[i]])]
        moving = int(graph.transfer_ns[i]) / 1e9
        ends = [*replay.model.transfer_bounds(call, moving, scenario, tree)]
        ends += [moving] if single and not graph.is_matched[i] else []
        duration[i] += (min(ends) if best else max(ends)) - moving
    return np.asarray(np.maximum(duration, 0.0))
