"""Model and hardware FLOP utilization."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from pydantic import JsonValue

from cclsearch.core.text import one_line
from cclsearch.trace.events import Reason
from cclsearch.trace.flops import find_flops
from cclsearch.trace.intervals import Int64s, total_ns
from cclsearch.trace.metric import Draft, NotAvailable, metric
from cclsearch.trace.metrics.steps import measure_step_time, require_card, tokens_per_step
from cclsearch.trace.names.kernels import PRODUCTS
from cclsearch.trace.result import if_available, mean_over_ranks
from cclsearch.trace.view import RankView, TraceView, require_windows

if TYPE_CHECKING:
    from cclsearch.card.hardware import Accelerator
    from cclsearch.card.model import Card


@dataclass(frozen=True)
class Peak:
    """Peak rates of a device."""

    device: str
    flops: float
    """Dense FLOP/s at the requested dtype."""
    memory_bytes_per_s: float | None


def _find_device(trace: TraceView) -> Accelerator:
    """Return the accelerator that the trace ran on, by its name in the trace, else by the card; raises NotAvailable."""
    from cclsearch.card.hardware import match_accelerator

    named = next((d for view in trace.ranks.values() for d in view.table.devices if d.name), None)
    found = match_accelerator(named.name, (named.memory_bytes or 0) / 2**30 or None) if named else None
    is_named = named is not None and bool(named.name)
    stated = _accelerator_of(trace.card) if trace.card is not None else None
    if trace.card is not None and trace.card.hardware.peak_flops:
        found = stated
    elif not is_named:
        found = found or stated
    if found is None or found.nominal:
        what = f"{one_line(named.name, 60)!r} is not a known accelerator" if named and is_named else "is not known"
        needed = "give --set peak_flops=N --set memory_gb_per_s=N"
        raise NotAvailable(Reason.UNKNOWN_PEAK, f"the device {what}, so its peak rates are not known: {needed}")
    return found


def find_peak(trace: TraceView, precision: str) -> Peak:
    """Return the device's dense peak at the dtype; raises NotAvailable if hardware.yaml and the trace lack it."""
    from cclsearch.card.hardware import PRECISIONS

    try:
        device = _find_device(trace)
    except NotAvailable:
        stated = next((d for view in trace.ranks.values() for d in view.table.devices if d.peak_flops), None)
        if stated is None or stated.peak_flops is None or PRECISIONS.get(precision, precision) != "bf16":
            raise
        memory = stated.peak_memory_gbps * 1e9 if stated.peak_memory_gbps else None
        return Peak(one_line(stated.name, 60), stated.peak_flops, memory)
    peak = device.peak_flops_of(precision)
    if not peak:
        raise NotAvailable(Reason.UNKNOWN_PEAK, f"the peak FLOP/s of {device.name} at {precision!r} is not known")
    return Peak(device.name, peak, device.hbm_bytes_per_s)


def _accelerator_of(card: Card) -> Accelerator | None:
    """Return the accelerator that the card names; None if it names none or an unknown one."""
    named, stated = if_available(lambda: card.hardware.accelerator), card.hardware.peak_flops
    if named is None and not stated:
        return None
    from cclsearch.card.hardware import state_accelerator

    memory_gib = if_available(lambda: card.hardware.memory_gib)
    found = state_accelerator(named or "stated", memory_gib, stated, card.hardware.memory_gb_per_s)
    return found if found is None or not card.hardware.nominal else found.model_copy(update={"nominal": True})


def _cross_check(card: Card, device: str) -> str:
    stated = _accelerator_of(card)
    if stated is None or stated.name == device:
        return ""
    return f"the trace ran on {device}, but the card has {card.hardware.accelerator}"


@dataclass(frozen=True)
class ModelFlops:
    """Training FLOP per token of a card's model."""

    per_token: float
    active_params: int
    caveat: str = ""
    """Parts of the model that the count leaves out; empty if the card has the whole shape."""


def _model_flops(card: Card, attention: float) -> ModelFlops:
    """Return 6 N + `attention` L hidden S from the model's shape, or 6 N if the card has only its number of parameters.

    Raises NotAvailable if it has neither, or if experts make the parameters in use unknown.
    """
    from cclsearch.card.arch import count_parts, flops_per_token
    from cclsearch.card.model import ModelArch

    arch = card.arch
    if isinstance(arch, ModelArch):
        per_token = flops_per_token(arch, card.number("seq_len"))
        counted = 12.0 * arch.num_layers * arch.num_heads * arch.head_dim * card.number("seq_len")
        return ModelFlops(per_token + (attention - 12.0) / 12.0 * counted, count_parts(arch).active)
    if if_available(lambda: arch.moe) is not None or not arch.num_params:
        missing = if_available(lambda: arch.hidden_size)
        raise NotAvailable(
            Reason.CARD_MISSING_FIELD,
            "the card has neither the model's shape (num_layers, hidden_size, ...) nor, without experts, num_params: "
            f"give --set {'num_layers' if missing else 'num_params'}=...",
        )
    return ModelFlops(6.0 * arch.num_params, arch.num_params, "6 FLOP per parameter and token, without attention")


def _measure_mfu(trace: TraceView, attention: float) -> Draft:
    card = require_card(trace)
    peak = find_peak(trace, card.precision)
    step = measure_step_time(trace)
    model = _model_flops(card, attention)
    per_token = model.per_token
    if if_available(lambda: card.phase) == "inference":
        per_token /= 3.0
    achieved = per_token * tokens_per_step(card) / step.value / trace.num_devices
    if achieved > peak.flops:
        raise NotAvailable(
            Reason.NO_FLOPS_MODEL,
            f"{achieved / peak.flops:.2f} of the peak: card, dtype, step or device differs from what ran",
        )
    return Draft(
        value=achieved / peak.flops,
        n_steps=step.n_steps,
        reason=step.reason
        or (Reason.RANKS_MISSING if trace.device_count_caveat else None)
        or (Reason.CARD_MISSING_FIELD if model.caveat else None),
        detail="; ".join(
            filter(None, (step.detail, model.caveat, trace.device_count_caveat, _cross_check(card, peak.device)))
        ),
        inputs={
            "device": peak.device,
            "peak_flops": peak.flops,
            "flops_per_token": per_token,
            "tokens_per_step": tokens_per_step(card),
            "num_devices": trace.num_devices,
            "achieved_flops_per_device": achieved,
            "active_params": model.active_params,
        },
    )


@metric("mfu", unit="fraction", better="higher", over="trace")
def measure_mfu(trace: TraceView) -> Draft:
    """Model FLOP/s over the peak, with 6 (N_active - N_embedding) + 12 L hidden S per token (PaLM, appendix B). The
    forward pass only (a third) for inference cards. A value above 1 is not available."""
    return _measure_mfu(trace, attention=12.0)


@metric("mfu_causal", unit="fraction", better="higher", over="trace")
def measure_mfu_causal(trace: TraceView) -> Draft:
    """mfu with half of the attention FLOP, as a causal mask needs. That is 6 L hidden S per token."""
    return _measure_mfu(trace, attention=6.0)


@dataclass(frozen=True)
class AchievedFlops:
    """FLOP and time of a rank's operators with known FLOP in its windows."""

    flops: float
    seconds: float
    """Time that their kernels cover."""
    coverage: float | None
    """Share of the time of all kernels with matrix products that these cover; None if the device is the host."""

    @property
    def per_s(self) -> float:
        """FLOP/s while they ran."""
        return self.flops / self.seconds


MIN_COVERAGE = 0.95
"""Figures over a smaller share of the matrix products' time are partial."""


def achieved_flops(trace: TraceView) -> dict[int, AchievedFlops]:
    """Return rank -> FLOP and time of its operators with known shapes; raises NotAvailable if no rank has any."""
    found: dict[int, AchievedFlops] = {}
    for rank, view in trace.ranks.items():
        require_windows(view)
        counted = find_flops(view)
        if counted is not None:
            flops, rows = counted
            seconds = total_ns(view.merge_rows(rows)) / 1e9
            if flops > 0 and seconds > 0:
                found[rank] = AchievedFlops(flops, seconds, _coverage(view, rows))
    if not found:
        raise NotAvailable(Reason.NO_SHAPES, "no operator records its shapes (record_shapes=True) or its FLOP")
    return found


def _coverage(view: RankView, counted: Int64s) -> float | None:
    """Return the share of the time of matrix products in the windows in which counted kernels run."""
    if view.table.accelerator == "cpu":  # its operators enclose each other: one of them may be a part of another
        return None
    kernels = view.in_windows(view.compute_kernels)
    products = kernels[np.isin(view.table.name_class[view.table.name_id[kernels]], PRODUCTS)]
    every = total_ns(view.merge_rows(np.union1d(products, counted)))
    return total_ns(view.merge_rows(counted)) / every if every else None


def describe_coverage(found: Mapping[int, AchievedFlops]) -> tuple[float | None, Reason | None, str]:
    """Return the smallest coverage of a rank, and why a figure over these operators is partial."""
    known = [one.coverage for one in found.values() if one.coverage is not None]
    if not known or min(known) > 0.9995:
        return (min(known) if known else None), None, ""
    reason = Reason.NO_SHAPES if min(known) < MIN_COVERAGE else None
    return min(known), reason, f"covers {min(known):.1%} of the time of kernels with matrix products"


@metric("gemm_tflops", unit="TFLOP/s", better="higher", over="trace")
def measure_gemm_tflops(trace: TraceView) -> Draft:
    """FLOP/s of matrix products with recorded shapes, over the time that their kernels cover. Of mm, addmm, bmm,
    attention and convolutions, mean over ranks; `inputs` has the share of all matrix products' time."""
    found = achieved_flops(trace)
    rates = {rank: one.per_s / 1e12 for rank, one in found.items()}
    coverage, reason, detail = describe_coverage(found)
    draft = mean_over_ranks(rates, reason=reason, detail=detail)
    inputs: dict[str, JsonValue] = {
        "flops": sum(one.flops for one in found.values()),
        "kernel_s": sum(one.seconds for one in found.values()),
        "coverage": coverage,
        "flops_per_s": 1e12 * draft.value,
    }
    return replace(draft, inputs=inputs)


@metric("hfu", unit="fraction", over="trace")
def measure_hfu(trace: TraceView) -> Draft:
    """FLOP/s of the recorded shapes (recomputation included) in a step, over the peak. Mean over ranks; needs the dtype
    of the card."""
    card = require_card(trace)
    peak = find_peak(trace, card.precision)
    found = achieved_flops(trace)
    shares = {
        rank: one.flops / (float(trace.ranks[rank].parts.window_ns_W.sum()) / 1e9) / peak.flops
        for rank, one in found.items()
    }
    coverage, reason, detail = describe_coverage(found)
    inputs: dict[str, JsonValue] = {"device": peak.device, "peak_flops": peak.flops, "coverage": coverage}
    return at_most_one(mean_over_ranks(shares, inputs, reason=reason, detail=detail), "peak")


def at_most_one(draft: Draft, limit: str) -> Draft:
    """Return the draft; raises NotAvailable if its share of that limit is above 1."""
    if draft.value > 1:
        said = f"{draft.value:.2f} of the {limit}: dtype or device differs from what ran"
        raise NotAvailable(Reason.NO_FLOPS_MODEL, said)
    return draft
