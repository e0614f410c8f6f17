"""Metrics of one trial from its result and its card; metrics without a measurement are absent."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from cclsearch.card.arch import tokens_per_step
from cclsearch.card.model import Card
from cclsearch.launch.contract import TrialInput, TrialResult
from cclsearch.score.evidence import TraceEvidence

GIB = 2**30
MTOKEN = 1e6
MAD_TO_SIGMA = 1.4826
"""Standard deviation divided by median absolute deviation, for a normal distribution."""


def derive_metrics(
    payload: TrialInput, result: TrialResult, card: Card, trace: TraceEvidence | None
) -> dict[str, float]:
    """Metric -> finite value, in the units of `cclsearch.score.catalog`; work and devices as the run reported them."""
    metrics = {name: value for name, value in result.metrics.items() if math.isfinite(value)}
    metrics |= {name: value for name, value in (trace.metrics if trace else {}).items() if math.isfinite(value)}
    num_accelerators = result.world_size or payload.num_ranks
    metrics["num_accelerators"] = float(num_accelerators)
    step_time_s = median_step_time(result)
    if step_time_s is not None:
        metrics |= _throughput(step_time_s, num_accelerators, result, card)
    if result.peak_memory_bytes:
        metrics |= _memory(result, card)
    if result.energy_j is not None and math.isfinite(result.energy_j) and result.energy_j > 0:
        metrics["energy_j_per_step"] = result.energy_j
        metrics["energy_j_per_mtoken"] = result.energy_j / tokens_per_step(card) * MTOKEN
        if step_time_s is not None:
            metrics["power_w"] = result.energy_j / step_time_s
    return metrics


def median_step_time(result: TrialResult) -> float | None:
    """Median step time of the unprofiled window in seconds; None if there is no usable step time."""
    times = result.step_times_s
    if not times or not all(math.isfinite(t) and t > 0 for t in times):
        return None
    return float(np.median(times))


def relative_spread(step_times_s: tuple[float, ...]) -> float | None:
    """Median absolute deviation x 1.4826 / median; None with fewer than two steps."""
    if len(step_times_s) < 2:
        return None
    times = np.asarray(step_times_s)
    median = float(np.median(times))
    return MAD_TO_SIGMA * float(np.median(np.abs(times - median))) / median


def _throughput(step_time_s: float, num_accelerators: int, result: TrialResult, card: Card) -> Mapping[str, float]:
    from cclsearch.score.work import find_mfu

    sequences = result.global_batch_size or card.number("global_batch_size")
    tokens = sequences * (result.seq_len or card.number("seq_len"))
    tokens_per_s = tokens / step_time_s
    metrics = {
        "step_time_s": step_time_s,
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_accelerator": tokens_per_s / num_accelerators,
        "samples_per_s": sequences / step_time_s,
        "accelerator_seconds_per_mtoken": num_accelerators * step_time_s / tokens * MTOKEN,
    }
    mfu = find_mfu(card, tokens_per_s / num_accelerators)
    return metrics if mfu is None else {**metrics, "mfu": mfu}


def _memory(result: TrialResult, card: Card) -> Mapping[str, float]:
    peak_gib = max(result.peak_memory_bytes) / GIB
    if result.memory_kind == "rss":
        return {"peak_memory_gib": peak_gib}
    return {"peak_memory_gib": peak_gib, "memory_headroom_frac": 1.0 - peak_gib / card.hardware.memory_gib}
