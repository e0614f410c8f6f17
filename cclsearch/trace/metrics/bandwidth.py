"""Bandwidth and volume of collectives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from pydantic import JsonValue

from cclsearch.trace.collectives import (
    CollectiveSample,
    collect_samples,
    explain_no_communication,
    is_scale_up,
    scale_up_size,
    sized_share,
    wire_bytes_of,
)
from cclsearch.trace.events import Reason
from cclsearch.trace.intervals import Int64s
from cclsearch.trace.metric import Draft, NotAvailable, metric
from cclsearch.trace.metrics.ranks import find_caveat
from cclsearch.trace.result import mean_over_ranks
from cclsearch.trace.view import RankView, TraceView

if TYPE_CHECKING:
    from cclsearch.card.model import Card

# Smaller messages measure latency rather than bandwidth.
MIN_BANDWIDTH_BYTES = 1 << 20
"""Smallest message of a bandwidth sample."""
MIN_SIZES_TO_FIT = 3
MIN_GROWTH = 0.02
"""Minimum growth of the fitted time from the smallest to the largest message, as a share of the longest time."""
MIN_SIZED_SHARE = 0.95
"""Minimum share of communication time with known sizes for a complete volume."""


def require_samples(trace: TraceView) -> tuple[list[CollectiveSample], Reason | None, str]:
    """Return the samples, and why figures from them are only partial; raises NotAvailable if there are none."""
    if not any(len(view.comm_rows) for view in trace.ranks.values()):
        raise NotAvailable(Reason.NO_COMM_EVENTS, "no communication was recorded")
    samples, free_of_waiting = collect_samples(trace)
    if not samples:
        raise _explain_no_samples(trace)
    if not free_of_waiting:
        reason = trace.unmatched_reason if trace.matching.is_empty else Reason.RANKS_MISSING
        why = "needs durations of several ranks" if len(trace.ranks) < 2 else "needs collectives matched over ranks"
        return samples, reason, f"includes waiting: separating it from data transfer {why}"
    return samples, *find_caveat(trace)


def _explain_no_samples(trace: TraceView) -> NotAvailable:
    calls = [call for view in trace.ranks.values() for call in view.table.collectives]
    if any(call.in_nelems and call.in_bytes is None for call in calls):
        dtypes = sorted({str(call.dtype) for call in calls if call.in_nelems and call.in_bytes is None})
        return NotAvailable(Reason.UNKNOWN_DTYPE, f"unknown data types: {', '.join(dtypes)}")
    if any(call.message_bytes for call in calls) and trace.num_devices < 2:
        unknown = "no trace records how many ranks the groups of the calls have"
        return NotAvailable(Reason.SINGLE_RANK, "a group of one rank moves no data" if trace.world_size else unknown)
    return NotAvailable(Reason.NO_COLLECTIVE_ARGS, "no collective records its message size")


def weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the weighted median: the value at which half of the weight is reached."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(np.asarray(weights)[order])
    return float(np.asarray(values)[order][np.searchsorted(reached, reached[-1] / 2)])


def _bandwidth(samples: Iterable[CollectiveSample]) -> float:
    chosen = list(samples)
    large = [s for s in chosen if s.message_bytes >= MIN_BANDWIDTH_BYTES] or chosen
    return weighted_median([s.bus_gbps for s in large], [s.seconds for s in large])


def _bucket(message_bytes: int) -> str:
    low = 1 << (max(message_bytes, 1).bit_length() - 1)
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if low >= size:
            return f"{low // size} {unit}"
    return f"{low} B"


def group_samples(samples: Iterable[CollectiveSample], *fields: str) -> dict[tuple[str, ...], list[CollectiveSample]]:
    """Return the samples by these of their labels: `kind`, `group` and `bucket` (of message sizes)."""
    found: dict[tuple[str, ...], list[CollectiveSample]] = defaultdict(list)
    for sample in samples:
        label = {"kind": str(sample.call.kind), "group": sample.group, "bucket": _bucket(sample.message_bytes)}
        found[tuple(label[field] for field in fields)].append(sample)
    return found


@metric("bus_bw", unit="GB/s", better="higher", over="trace")
def measure_bus_bw(trace: TraceView) -> Draft:
    """Bus bandwidth (nccl-tests) of collectives of 1 MiB and more: duration-weighted median. `inputs` has it by
    collective, group and size. 1 GB is 1e9 bytes."""
    samples, reason, detail = require_samples(trace)
    by_size = group_samples(samples, "kind", "bucket")
    small = not any(s.message_bytes >= MIN_BANDWIDTH_BYTES for s in samples)
    return Draft(
        value=_bandwidth(samples),
        reason=reason,
        detail="; ".join(filter(None, (detail, "all messages are smaller than 1 MiB" if small else ""))),
        inputs={
            "by_collective_gbps": {
                kind: _bandwidth(found) for (kind,), found in group_samples(samples, "kind").items()
            },
            "by_group_gbps": {
                f"{kind} {group}": _bandwidth(found)
                for (kind, group), found in group_samples(samples, "kind", "group").items()
            },
            "by_size_gbps": {f"{kind} from {low}": _bandwidth(found) for (kind, low), found in by_size.items()},
            "num_samples": len(samples),
        },
    )


@metric("bw_util", unit="fraction", better="higher", over="trace")
def measure_bw_util(trace: TraceView) -> Draft:
    """bus_bw over the bandwidth (from the card) of the links that the group uses. Duration-weighted median; links count
    in one direction; `inputs` has it by collective and by link."""
    if trace.card is None:
        raise NotAvailable(Reason.CARD_MISSING_FIELD, "needs a workload card (--card) with link bandwidths")
    samples, reason, detail = require_samples(trace)
    shares: list[tuple[CollectiveSample, str, float]] = []
    for sample in [s for s in samples if s.message_bytes >= MIN_BANDWIDTH_BYTES] or samples:
        link = link_gbytes_per_s(trace.card, sample)
        if link:
            inside = is_scale_up(sample.call, sample.size, scale_up_size(trace.card))
            shares.append((sample, "scale_up" if inside else "scale_out", sample.bus_gbps / link))
    if not shares:
        raise NotAvailable(Reason.CARD_MISSING_FIELD, "the card has no bandwidth for the links in use")
    kinds = dict.fromkeys(str(sample.call.kind) for sample, _, _ in shares)
    links = dict.fromkeys(link for _, link, _ in shares)
    inputs: dict[str, JsonValue] = {
        "num_samples": len(shares),
        "by_collective": {kind: _median_share([s for s in shares if str(s[0].call.kind) == kind]) for kind in kinds},
        "by_link": {link: _median_share([s for s in shares if s[1] == link]) for link in links},
    }
    return Draft(_median_share(shares), reason=reason, detail=detail, inputs=inputs)


def _median_share(shares: Sequence[tuple[CollectiveSample, str, float]]) -> float:
    return weighted_median([share for _, _, share in shares], [sample.seconds for sample, _, _ in shares])


def link_gbytes_per_s(card: Card, sample: CollectiveSample) -> float | None:
    """Return the one-way GB/s of the links that a collective's group uses; None if the card does not state it."""
    hardware = card.hardware
    if is_scale_up(sample.call, sample.size, scale_up_size(card)):
        return hardware.scale_up_gbps / 8 if hardware.scale_up_gbps else None
    return hardware.scale_out_gbps / 8 if hardware.scale_out_gbps else None


@metric("comm_volume", unit="B/step", better="lower", over="trace", needs_times=False)
def measure_comm_volume(trace: TraceView) -> Draft:
    """Bytes that a rank's links carry per step: message bytes times the collective's factor, mean over ranks. Never of
    the whole file or summed over ranks; `inputs` has the message bytes."""
    if not any(len(view.comm_rows) for view in trace.ranks.values()):
        raise NotAvailable(Reason.NO_COMM_EVENTS, "no communication was recorded")
    volumes: dict[int, float | None] = {}
    wire: dict[str, float] = defaultdict(float)
    message: dict[str, float] = defaultdict(float)
    shares = []
    world = trace.num_devices if trace.world_size or trace.num_devices > 1 else None
    for rank, view in trace.ranks.items():
        rows = _rows_of_steps(view)
        per_step = max(view.windows.num_steps, 1)
        kinds = [str(call.kind) for call in view.table.collectives]
        bytes_ = wire_bytes_of(view, rows, world)
        known = np.isfinite(bytes_)
        volumes[rank] = float(bytes_[known].sum()) / per_step if known.any() or not len(rows) else None
        shares.append(sized_share(view))
        for row, carried in zip(rows[known].tolist(), bytes_[known].tolist(), strict=True):
            call_id = int(view.table.coll_id[row])
            wire[kinds[call_id]] += carried / per_step / len(trace.ranks)
            size = view.table.collectives[call_id].message_bytes or 0
            message[kinds[call_id]] += size / per_step / len(trace.ranks)
    reason, detail = _volume_caveat(trace, min(shares))
    detail = detail or (explain_no_communication(trace) if trace.is_timed else "")
    inputs: dict[str, JsonValue] = {
        "wire_bytes_by_collective": dict(wire),
        "message_bytes_by_collective": dict(message),
        "message_bytes": sum(message.values()),
        "all_ranks_bytes": sum(filter(None, volumes.values())),
        "sized_share_of_comm_time" if trace.is_timed else "sized_share_of_calls": min(shares),
    }
    return mean_over_ranks(volumes, inputs, reason=reason, detail=detail, missing=_explain_no_samples(trace))


def _rows_of_steps(view: RankView) -> Int64s:
    """Return the communication rows of the inner steps: by the step that launched them, else by their start."""
    rows = view.comm_rows
    if not view.windows.are_steps:
        return rows
    step_of_row = view.table.step_id[rows]
    if (step_of_row >= 0).any() and view.windows.reason is None:
        return rows[np.isin(step_of_row, view.windows.step_index_W)]
    return view.in_windows(rows)


def _volume_caveat(trace: TraceView, share: float) -> tuple[Reason | None, str]:
    if share < MIN_SIZED_SHARE:
        of = "communication time has" if trace.is_timed else "communication calls have"
        return (Reason.NO_COLLECTIVE_ARGS, f"a lower bound: {share:.0%} of {of} a known size")
    if trace.device_count_caveat and any(map(_has_unsized_groups, trace.ranks.values())) and not trace.window_reason:
        return Reason.RANKS_MISSING, trace.device_count_caveat
    return None, ""


def _has_unsized_groups(view: RankView) -> bool:
    """Return whether the rank has collectives whose number of ranks no trace records."""
    return any(call.message_bytes and not call.group_size and not call.group_ranks for call in view.table.collectives)


@dataclass(frozen=True)
class HockneyFit:
    """The fit t = alpha + message / beta of one collective and group."""

    alpha_s: float
    beta_bytes_per_s: float
    num_sizes: int
    num_samples: int
    seconds: float
    """Total time of the samples."""


def fit_hockney(samples: Sequence[CollectiveSample]) -> HockneyFit | None:
    """Return the least-squares fit of t = alpha + bytes/beta to the median time of each message size.

    Returns None for fewer than three sizes or without a slope. Medians give each size the same weight: a size that
    occurs a thousand times must not outweigh the others.
    """
    sizes = sorted({sample.message_bytes for sample in samples})
    if len(sizes) < MIN_SIZES_TO_FIT:
        return None
    times = [float(np.median([s.seconds for s in samples if s.message_bytes == size])) for size in sizes]
    design = np.stack([np.ones(len(sizes)), np.array(sizes, dtype=float)], axis=1)
    (alpha, slope), *_ = np.linalg.lstsq(design, np.array(times), rcond=None)
    if alpha < 0:
        alpha, slope = 0.0, float(np.dot(sizes, times) / np.dot(sizes, sizes))
    if slope * (sizes[-1] - sizes[0]) < MIN_GROWTH * max(times):
        return None
    return HockneyFit(float(alpha), 1 / float(slope), len(sizes), len(samples), sum(s.seconds for s in samples))


@metric("hockney_fit", unit="B/s", over="trace")
def measure_hockney_fit(trace: TraceView) -> Draft:
    """Beta of t = alpha + bytes/beta, of the collective with the most time (all fits in --json). In message bytes per
    second; `inputs` has every fit."""
    samples, reason, detail = require_samples(trace)
    fits = {key: fit for key, found in group_samples(samples, "kind", "group").items() if (fit := fit_hockney(found))}
    if not fits:
        raise NotAvailable(
            Reason.NO_COLLECTIVE_ARGS,
            f"no collective has {MIN_SIZES_TO_FIT} message sizes with times that grow with the size",
        )
    main = max(fits, key=lambda key: fits[key].seconds)
    described: dict[str, JsonValue] = {
        " ".join(key): {name: value for name, value in vars(fit).items() if name != "seconds"}
        for key, fit in fits.items()
    }
    inputs: dict[str, JsonValue] = {"main": " ".join(main), "alpha_s": fits[main].alpha_s, "fits": described}
    inputs["seconds_per_byte"] = 1.0 / fits[main].beta_bytes_per_s
    return Draft(fits[main].beta_bytes_per_s, reason=reason, detail=detail, inputs=inputs)
