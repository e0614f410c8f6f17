"""Step time, throughput, and scaling efficiency between two traces of the same model."""

from __future__ import annotations

import statistics
from typing import Literal

import numpy as np
from pydantic import JsonValue

from cclsearch.card.arch import tokens_per_step
from cclsearch.card.model import Card, Phase
from cclsearch.trace.events import Reason
from cclsearch.trace.metric import Draft, NotAvailable, metric
from cclsearch.trace.metrics.breakdown import (
    measure_compute_frac,
    measure_exposed_comm_frac,
    measure_exposed_mem_frac,
    measure_idle_frac,
)
from cclsearch.trace.result import if_available
from cclsearch.trace.view import NO_TIMES, TraceView


@metric("trace_step_time", unit="s", better="lower", over="trace")
def measure_step_time(trace: TraceView) -> Draft:
    """Period of a step on the device with the profiler on: median over steps, slowest rank."""
    medians: dict[int, float | None] = {}
    by_number: dict[int, list[float]] = {}
    periods: list[float] = []
    for rank, view in trace.ranks.items():
        if not view.windows.are_steps:
            medians[rank] = None
            continue
        seconds = view.parts.window_ns_W / 1e9
        medians[rank] = float(np.median(seconds))
        periods.extend(seconds.tolist())
        for number, value in zip(view.windows.numbers, seconds, strict=True):
            by_number.setdefault(number, []).append(float(value))
    found = {rank: value for rank, value in medians.items() if value is not None}
    if not found:
        raise NotAvailable(Reason.NO_STEP_MARKERS, "no rank has step markers")
    slowest = max(found, key=lambda rank: found[rank])
    alone = any(trace.ranks[rank].windows.reason is Reason.TOO_FEW_STEPS for rank in found)
    return Draft(
        value=found[slowest],
        per_rank=medians,
        per_step=tuple(max(values) for _, values in sorted(by_number.items())),
        n_steps=min(trace.ranks[rank].windows.num_steps for rank in found),
        reason=Reason.TOO_FEW_STEPS if alone else Reason.NO_STEP_MARKERS if len(found) < len(medians) else None,
        detail="one step only: the time that its work takes, not the time from one step to the next" if alone else "",
        inputs=_describe_periods(trace, periods, slowest),
    )


def _describe_periods(trace: TraceView, periods: list[float], slowest: int) -> dict[str, JsonValue]:
    view = trace.ranks[slowest]
    inputs: dict[str, JsonValue] = {
        "slowest_rank": slowest,
        "step_source": view.table.step_source,
        "p95_s": float(np.percentile(periods, 95)),
        "step_numbers": list(view.windows.numbers),
    }
    if len(periods) > 1:
        inputs["cv"] = statistics.stdev(periods) / statistics.fmean(periods)
    host = [
        (view.table.steps[i].end_ns - view.table.steps[i].start_ns) / 1e9
        for i in view.windows.step_index_W.tolist()
        if i >= 0 and view.table.step_source != "gpu_annotation"
    ]
    if host:
        inputs["cpu_step_time_s"] = statistics.median(host)
    if view.launch_lag_s is not None:
        inputs["host_ahead_s"] = view.launch_lag_s
    return inputs


def require_card(trace: TraceView, phase: Phase | None = None) -> Card:
    """Return the card; raises NotAvailable if there is none or it is for another phase."""
    if trace.card is None:
        raise NotAvailable(Reason.CARD_MISSING_FIELD, "needs a workload card (--card)")
    card = trace.card
    stated = if_available(lambda: card.phase)
    if phase is not None and stated is not None and stated is not phase:
        raise NotAvailable(Reason.PHASE_MISMATCH, f"the card is for {card.task}, not for {phase.value}")
    return card


@metric("tokens_per_s", unit="tokens/s", better="higher", over="trace")
def measure_tokens_per_s(trace: TraceView) -> Draft:
    """Tokens of the card's global batch over trace_step_time. `inputs` has the rate per device."""
    card = require_card(trace, Phase.TRAINING)
    step = measure_step_time(trace)
    rate = tokens_per_step(card) / step.value
    return Draft(
        value=rate,
        n_steps=step.n_steps,
        reason=step.reason,
        detail=step.detail,
        inputs={
            "tokens_per_step": tokens_per_step(card),
            "trace_step_time_s": step.value,
            "tokens_per_s_per_device": rate / trace.num_devices,
        },
    )


@metric("tokens_per_s_per_device", unit="tokens/s", better="higher", over="trace")
def measure_tokens_per_s_per_device(trace: TraceView) -> Draft:
    """tokens_per_s over the number of accelerators."""
    total = measure_tokens_per_s(trace)
    return Draft(
        value=total.value / trace.num_devices,
        n_steps=total.n_steps,
        reason=total.reason or (Reason.RANKS_MISSING if trace.device_count_caveat else None),
        detail="; ".join(filter(None, (total.detail, trace.device_count_caveat))),
        inputs={"num_devices": trace.num_devices, "tokens_per_s": total.value},
    )


Rule = Literal["strong", "weak"]


@metric("scaling_efficiency", unit="fraction", better="higher", over="trace")
def measure_scaling_efficiency(trace: TraceView) -> Draft:
    """Throughput at N over N/N0 times the throughput at N0 (the first of two traces), split by cause. `inputs` has the
    seconds lost to each cause.

    The cards decide: the same card or the same tokens per step is strong scaling; a base card with other tokens per
    step is weak scaling. Without cards the batch is assumed to be the same (strong), and the result is `partial`.
    """
    if trace.baseline is None:
        raise NotAvailable(Reason.NO_TRACE_FILES, "needs a base trace: ccl-search score BASE TRACE")
    if not trace.baseline.is_timed:
        raise NotAvailable(Reason.NO_TIMES, f"the base trace: {NO_TIMES}")
    base, (rule, work_ratio, stated) = trace.baseline, _batch_rule(trace, trace.baseline)
    here, there = measure_step_time(trace), measure_step_time(base)
    ratio = trace.num_devices / base.num_devices
    value = work_ratio * there.value / here.value / ratio
    change = {}
    for name, measure in (
        ("compute", measure_compute_frac),
        ("exposed_comm", measure_exposed_comm_frac),
        ("exposed_mem", measure_exposed_mem_frac),
        ("idle", measure_idle_frac),
    ):
        ideal = measure(base).value * there.value * work_ratio / ratio
        change[f"lost_to_{name}_s"] = measure(trace).value * here.value - ideal
    caveat = trace.device_count_caveat or base.device_count_caveat
    reason = Reason.RANKS_MISSING if caveat else None if stated else Reason.CARD_MISSING_FIELD
    assumed = "" if stated else "assumes the same batch: no card states it"
    return Draft(
        value=value,
        n_steps=min(here.n_steps or 0, there.n_steps or 0),
        reason=here.reason or there.reason or reason,
        detail="; ".join(filter(None, (f"{rule} scaling", assumed, caveat))),
        inputs={
            "num_devices": trace.num_devices,
            "base_num_devices": base.num_devices,
            "step_time_s": here.value,
            "base_step_time_s": there.value,
            "rule": rule,
            **change,
        },
    )


def _batch_rule(trace: TraceView, base: TraceView) -> tuple[Rule, float, bool]:
    """Return strong or weak, the ratio of tokens per step to the base, and whether cards state it."""
    if trace.card is None or base.card is None:
        return "strong", 1.0, False
    card, other = require_card(trace, Phase.TRAINING), require_card(base, Phase.TRAINING)
    ratio = tokens_per_step(card) / tokens_per_step(other)
    return ("strong" if ratio == 1 else "weak"), ratio, True
