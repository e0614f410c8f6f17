"""Metrics of training, from the result of a trial and its card; metrics without a measurement are absent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from cclsearch.card.arch import flops_per_token, tokens_per_step
from cclsearch.card.model import Card
from cclsearch.core.metrics import Direction
from cclsearch.scoring.catalog import ENERGY, HEADROOM, MEMORY, NO_ENERGY, SIZE, result_metric
from cclsearch.scoring.derive import measure_memory, read_reported
from cclsearch.tasks.training.contract import TrainingEvidence, TrainingResult

MTOKEN = 1e6

_LOW, _HIGH = Direction.MINIMIZE, Direction.MAXIMIZE
_NO_TIMES = "the run script reported no step times"
_NO_PEAK = "the accelerator's peak or the model's FLOPs are unknown"

METRICS = (
    result_metric("step_time_s", "s", _LOW, _NO_TIMES, label="step time", short="step", axis="seconds per step"),
    result_metric("tokens_per_s", "tokens/s", _HIGH, _NO_TIMES, label="tokens/s"),
    result_metric(
        "tokens_per_s_per_accelerator", "tokens/s", _HIGH, _NO_TIMES,
        label="tokens/s per accelerator", heading="tokens/s per accel.",
    ),
    result_metric("samples_per_s", "sequences/s", _HIGH, _NO_TIMES, label="sequences/s"),
    result_metric("mfu", "fraction", _HIGH, _NO_PEAK, label="MFU"),
    SIZE,
    result_metric(
        "accelerator_seconds_per_mtoken", "accelerator-s/Mtoken", _LOW, _NO_TIMES, label="accelerator time per token"
    ),
    MEMORY,
    HEADROOM,
    result_metric("energy_j_per_step", "J", _LOW, NO_ENERGY, label="energy per step", needs=ENERGY.needs),
    result_metric("energy_j_per_mtoken", "J/Mtoken", _LOW, NO_ENERGY, label="energy per token", needs=ENERGY.needs),
    result_metric("power_w", "W", _LOW, NO_ENERGY, label="power", needs=ENERGY.needs),
)  # fmt: skip
"""`Mtoken` is a million tokens; a sequence has `seq_len` tokens."""


def derive_metrics(evidence: TrainingEvidence) -> dict[str, float]:
    """Metric -> finite value, in the units of `METRICS`; work and devices as the run reported them."""
    result, card = evidence.result, evidence.card
    metrics = read_reported(evidence)
    step_time_s = median_step_time(result)
    if step_time_s is not None:
        metrics |= _throughput(step_time_s, metrics["num_accelerators"], result, card)
    metrics |= measure_memory(result, card)
    if result.energy_j is not None and math.isfinite(result.energy_j) and result.energy_j > 0:
        metrics["energy_j_per_step"] = result.energy_j
        metrics["energy_j_per_mtoken"] = result.energy_j / tokens_per_step(card) * MTOKEN
        if step_time_s is not None:
            metrics["power_w"] = result.energy_j / step_time_s
    return metrics


def median_step_time(result: TrainingResult) -> float | None:
    """Median step time of the unprofiled window in seconds; None if there is no usable step time."""
    times = result.step_times_s
    if not times or not all(math.isfinite(t) and t > 0 for t in times):
        return None
    return float(np.median(times))


def _throughput(step_time_s: float, num_accelerators: float, result: TrainingResult, card: Card) -> Mapping[str, float]:
    sequences = result.global_batch_size or card.number("global_batch_size")
    tokens = sequences * (result.seq_len or card.number("seq_len"))
    metrics = {"step_time_s": step_time_s, **find_throughput(step_time_s, num_accelerators, sequences, tokens)}
    mfu = find_mfu(card, metrics["tokens_per_s_per_accelerator"])
    return metrics if mfu is None else {**metrics, "mfu": mfu}


THROUGHPUT = ("tokens_per_s", "tokens_per_s_per_accelerator", "samples_per_s", "accelerator_seconds_per_mtoken")
"""The metrics of `find_throughput`."""


MFU_FORMULA = (
    "MFU = tokens/s per accelerator x (6 x parameters used per token without the input embedding + 12 x layers x heads"
    " x head size x sequence) / peak FLOP/s in the card's precision (PaLM, Chowdhery et al. 2022, appendix B)"
)
"""Result of `find_mfu`; attention counts whole, as if it were not causal."""


def find_throughput(step_time_s: Any, num_accelerators: Any, sequences: int, tokens: int) -> dict[str, Any]:
    """Return the metrics that follow from the step time (a number or an array) and the work of a step."""
    tokens_per_s = tokens / step_time_s
    values = (tokens_per_s, tokens_per_s / num_accelerators, sequences / step_time_s)
    return dict(zip(THROUGHPUT, (*values, num_accelerators * step_time_s / tokens * MTOKEN), strict=True))


def find_step_flops(card: Card) -> float:
    """Model FLOPs of an optimizer step without recomputation (PaLM, appendix B)."""
    return flops_per_token(card.arch, card.number("seq_len")) * tokens_per_step(card)


def find_mfu(card: Card, tokens_per_s_per_accelerator: float) -> float | None:
    """Model FLOPs utilization (MFU), 0 to 1; None if the accelerator's peak at the card's precision is unknown."""
    hardware = card.hardware
    chips = [hardware.of_group(number).chip for number in range(len(hardware.groups))] or [hardware.chip]
    peaks = [None if chip.nominal else chip.peak_flops_of(card.precision) for chip in chips]
    counts = [group.num_accelerators for group in hardware.groups] or [1]
    known = [peak * count for peak, count in zip(peaks, counts, strict=True) if peak]
    peak = sum(known) / sum(counts) if len(known) == len(peaks) else None
    return None if not peak else tokens_per_s_per_accelerator * find_step_flops(card) / tokens_per_step(card) / peak
