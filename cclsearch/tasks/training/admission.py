"""The admission gate of training: its own rules, and all of them in display order. Thresholds are beside it."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import mean, median
from typing import Any

from cclsearch.card.arch import count_parameters
from cclsearch.scoring import admission as general
from cclsearch.scoring.admission import Finding, admission_rule
from cclsearch.scoring.outcome import Verdict
from cclsearch.tasks.training.contract import TrainingEvidence
from cclsearch.tasks.training.thresholds import DEFAULT
from cclsearch.tasks.training.time_rules import check_step_times, check_trace_time
from cclsearch.tasks.training.trace_rules import check_precision, check_traced_layout, check_traced_work

WORK_RULES = frozenset({"work", "world_size", "traced_work", "precision", "traced_layout"})
"""Rules whose violation means that the job did not do the requested work."""


@admission_rule("work")
def check_declared_work(evidence: TrainingEvidence) -> Finding:
    """Whether the run declared the card's global batch, sequence length, layers and parameters."""
    result, card, payload = evidence.result, evidence.card, evidence.payload
    wrong, undeclared = [], []
    batch, seq_len = card.number("global_batch_size"), card.number("seq_len")
    for what, got, want in (
        ("global batch (requested)", payload.global_batch_size, batch),
        ("sequence length (requested)", payload.seq_len, seq_len),
        ("global batch", result.global_batch_size, batch),
        ("sequence length", result.seq_len, seq_len),
        ("layers", result.num_layers, card.arch.num_layers),
    ):
        if got is None:
            undeclared.append(what)
        elif got != want:
            wrong.append(f"{what} is {got}, but {want} in the card")
    wrong += _check_accumulation(evidence) + _check_parameters(evidence)
    needed = [what for what in undeclared if what in ("global batch", "sequence length")]
    if evidence.is_measured and needed:
        wrong.append(f"the run script did not declare its {' and '.join(needed)}")
    if wrong:
        return False, "; ".join(wrong)
    if needed:
        return None, f"{evidence.provenance.value}: not declared: {', '.join(needed)}"
    detail = f"{batch} sequences of {seq_len} tokens per step"
    detail += f"; not declared: {', '.join(undeclared)}" if undeclared else ""
    if evidence.is_measured and result.num_params is None:
        return None, f"{detail}; the run script does not declare num_params: version 0.4 will require it"
    return True, detail


@admission_rule("steps", unmeasured="no steps were timed here")
def check_steps(evidence: TrainingEvidence) -> Finding:
    """Whether enough optimizer steps were timed."""
    want = max(evidence.payload.timed_steps, DEFAULT.min_timed_steps)
    got = len(evidence.result.step_times_s)
    if got < want:
        return False, f"{got} steps were timed; at least {want} are required"
    return True, f"{got} steps timed"


@admission_rule("warmup", unmeasured="no steps were timed here")
def check_warmup(evidence: TrainingEvidence) -> Finding:
    """Whether warm-up steps ran before the timed window, and none is inside it."""
    times, got = evidence.result.step_times_s, evidence.result.warmup_steps
    want = max(evidence.payload.warmup_steps, DEFAULT.min_warmup_steps)
    bound = DEFAULT.max_first_step_cpu if evidence.is_on_cpu else DEFAULT.max_first_step
    if got < want:
        return False, f"{got} warm-up steps; at least {want} are required before the timed ones"
    if len(times) >= 3 and (ratio := times[0] / median(times[1:])) > bound:
        found = f"the first timed step took {ratio:.1f} x the others"
        return False, f"{found}: a warm-up step was timed (at most {bound:g} x)"
    return True, f"{got} warm-up steps"


@admission_rule("spread")
def check_spread(evidence: TrainingEvidence) -> Finding:
    """Whether the spread of the step times is small enough, and no few steps took the time of the others."""
    if evidence.spread is None:
        return None, "only one step time"
    bound = DEFAULT.max_spread_cpu if evidence.is_on_cpu else DEFAULT.max_spread
    detail = f"the spread of the step times is {evidence.spread:.1%}"
    if evidence.spread > bound:
        return False, f"{detail}; at most {bound:.0%} is allowed"
    times, most = evidence.result.step_times_s, DEFAULT.max_mean_cpu if evidence.is_on_cpu else DEFAULT.max_mean
    if len(times) > 3 and (ratio := mean(times[1:]) / median(times)) > most:
        detail += f", but the mean without the first is {ratio:.1f} x the median (at most {most:g} x)"
        remedy = "some took the time of others. Wait for the device after each step"
        return False, f"{detail}: {remedy}"
    return True, detail


@admission_rule("possible")
def check_possible(evidence: TrainingEvidence) -> Finding:
    """Whether the accelerators could reach the step time at all."""
    mfu = evidence.metrics.get("mfu")
    if mfu is None or evidence.is_on_cpu:
        return None, "the peak of the accelerators or the model's FLOPs are unknown"
    if mfu > DEFAULT.max_mfu:
        return False, f"the step time means {mfu:.0%} of the accelerators' peak: the work cannot have been done"
    return True, f"{mfu:.1%} of the accelerators' peak"


@admission_rule("training_loss")
def check_training_loss(evidence: TrainingEvidence) -> Finding:
    """Whether the training loss is finite."""
    losses = evidence.result.losses
    if not losses:
        return None, "the run script reported no training loss"
    if not all(math.isfinite(loss) for loss in losses):
        return False, "the training loss is not finite"
    return True, f"{losses[0]:.4f} at the first step"


def _check_accumulation(evidence: TrainingEvidence) -> list[str]:
    payload, want = evidence.payload, evidence.card.number("global_batch_size")
    if "micro_batch_size" not in payload.config:
        return []
    dp, micro = payload.config.as_int("dp"), payload.config.as_int("micro_batch_size")
    made = dp * micro * payload.gradient_accumulation
    parts = f"dp {dp} x micro-batch {micro} x accumulation {payload.gradient_accumulation}"
    return [] if made == want else [f"{parts} is a global batch of {made}, but {want} in the card"]


def _check_parameters(evidence: TrainingEvidence) -> list[str]:
    got, want = evidence.result.num_params, count_parameters(evidence.card.arch)
    if got is None:
        return []
    low, high = (1 - DEFAULT.params_below) * want, (1 + DEFAULT.params_above) * want
    return [] if low <= got <= high else [f"{got:,} parameters, but {want:,} in the card's model"]


ADMISSION_RULES: tuple[Callable[[Any], Verdict], ...] = (
    general.check_provenance,
    check_declared_work,
    general.check_world_size,
    check_steps,
    check_warmup,
    check_step_times,
    check_spread,
    general.check_ranks_traced,
    general.check_trace_origin,
    general.check_timed_window,
    check_trace_time,
    check_traced_work,
    check_precision,
    check_traced_layout,
    check_possible,
    check_training_loss,
    general.check_devices,
    general.check_load,
    general.check_unedited,
)
"""The rules of the gate, in display order."""
