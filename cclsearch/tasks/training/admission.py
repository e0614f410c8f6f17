"""The admission gate of training: its own rules, and all of them in display order. Thresholds are beside it."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median
from typing import Any

from cclsearch.score.admission import (
    check_devices,
    check_load,
    check_provenance,
    check_ranks_traced,
    check_unedited,
    check_world_size,
)
from cclsearch.score.outcome import Verdict
from cclsearch.tasks.training.thresholds import DEFAULT
from cclsearch.tasks.training.work import TrainingEvidence, check_declared_work, check_possible, check_traced_work

WORK_RULES = frozenset({"work", "world_size", "traced_work"})
"""Rules whose violation means that the job did not do the requested work."""


def check_steps(evidence: TrainingEvidence) -> Verdict:
    """Whether enough optimizer steps were timed."""
    if not evidence.is_measured:
        return Verdict(rule="steps", ok=None, detail=f"{evidence.provenance.value}: no steps were timed here")
    want = max(evidence.payload.timed_steps, DEFAULT.min_timed_steps)
    got = len(evidence.result.step_times_s)
    if got < want:
        return Verdict(rule="steps", ok=False, detail=f"{got} steps were timed; at least {want} are required")
    return Verdict(rule="steps", ok=True, detail=f"{got} steps timed")


def check_warmup(evidence: TrainingEvidence) -> Verdict:
    """Whether warm-up steps ran before the timed window, and none is inside it."""
    if not evidence.is_measured:
        return Verdict(rule="warmup", ok=None, detail=f"{evidence.provenance.value}: no steps were timed here")
    want = max(evidence.payload.warmup_steps, DEFAULT.min_warmup_steps)
    got = evidence.result.warmup_steps
    if got < want:
        return Verdict(
            rule="warmup", ok=False, detail=f"{got} warm-up steps; at least {want} are required before the timed ones"
        )
    times = evidence.result.step_times_s
    bound = DEFAULT.max_first_step_cpu if evidence.is_on_cpu else DEFAULT.max_first_step
    if len(times) >= 3:
        ratio = times[0] / median(times[1:])
        if ratio > bound:
            detail = (
                f"the first timed step took {ratio:.1f} x the others: a warm-up step was timed (at most {bound:g} x)"
            )
            return Verdict(rule="warmup", ok=False, detail=detail)
    return Verdict(rule="warmup", ok=True, detail=f"{got} warm-up steps")


def check_spread(evidence: TrainingEvidence) -> Verdict:
    """Whether the spread of the step times is small enough."""
    if evidence.spread is None:
        return Verdict(rule="spread", ok=None, detail="only one step time")
    bound = DEFAULT.max_spread_cpu if evidence.is_on_cpu else DEFAULT.max_spread
    detail = f"the spread of the step times is {evidence.spread:.1%}"
    if evidence.spread > bound:
        return Verdict(rule="spread", ok=False, detail=f"{detail}; at most {bound:.0%} is allowed")
    return Verdict(rule="spread", ok=True, detail=detail)


def check_trace_time(evidence: TrainingEvidence) -> Verdict:
    """Whether traced and declared step time are of the same order (a profiler slows a step down)."""
    rule, bound = "trace_time", DEFAULT
    declared, traced = evidence.metrics.get("step_time_s"), evidence.trace.step_time_s if evidence.trace else None
    if declared is None or traced is None:
        return Verdict(rule=rule, ok=None, detail="the traces have no step time")
    ratio = traced / declared
    high = bound.max_traced_time_cpu if evidence.is_on_cpu else bound.max_traced_time
    detail = f"traced step time {traced:.4g} s, {ratio:.2f}x the timed {declared:.4g} s"
    if not bound.min_traced_time <= ratio <= high:
        detail = f"{detail}; between {bound.min_traced_time:g} and {high:g}x is allowed"
        return Verdict(rule=rule, ok=False, detail=detail)
    return Verdict(rule=rule, ok=True, detail=detail)


def check_training_loss(evidence: TrainingEvidence) -> Verdict:
    """Whether the training loss is finite."""
    losses = evidence.result.losses
    if not losses:
        return Verdict(rule="training_loss", ok=None, detail="the run script reported no training loss")
    if not all(math.isfinite(loss) for loss in losses):
        return Verdict(rule="training_loss", ok=False, detail="the training loss is not finite")
    return Verdict(rule="training_loss", ok=True, detail=f"{losses[0]:.4f} at the first step")


ADMISSION_RULES: tuple[Callable[[Any], Verdict], ...] = (
    check_provenance,
    check_declared_work,
    check_world_size,
    check_steps,
    check_warmup,
    check_spread,
    check_ranks_traced,
    check_trace_time,
    check_traced_work,
    check_possible,
    check_training_loss,
    check_devices,
    check_load,
    check_unedited,
)
"""The rules of the gate, in display order."""
