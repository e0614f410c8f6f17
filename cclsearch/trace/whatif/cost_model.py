"""Cost model of a collective's transfer with other links, another algorithm or compression.

The model is alpha-beta (Hockney): t = alpha + bytes / beta, fitted to the trace for each collective and group.
Measured times are scaled by the ratio that the model gives, so that an unchanged scenario changes no duration. With too
few message sizes to fit alpha, the result is two bounds: all of the time is bandwidth, or all of it is latency.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cclsearch.card.model import Card
from cclsearch.trace.collectives import CollectiveSample, collect_samples, group_label, is_scale_up, scale_up_size
from cclsearch.trace.events import Collective, CollectiveKind
from cclsearch.trace.metrics.bandwidth import HockneyFit, fit_hockney, group_samples
from cclsearch.trace.view import TraceView

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
