"""Scaling efficiency between two traces of the same model."""

from __future__ import annotations

from typing import Literal

from cclsearch.card.arch import tokens_per_step
from cclsearch.card.model import Phase
from cclsearch.trace.events import Reason
from cclsearch.trace.metric import Draft, NotAvailable, metric
from cclsearch.trace.metrics.breakdown import (
    measure_compute_frac,
    measure_exposed_comm_frac,
    measure_exposed_mem_frac,
    measure_idle_frac,
)
from cclsearch.trace.metrics.steps import measure_step_time, require_card
from cclsearch.trace.view import NO_TIMES, TraceView

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
