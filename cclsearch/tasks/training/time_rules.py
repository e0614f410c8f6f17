"""The admission rules on the step times of training: measured ones differ, and agree with the traces and the clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from cclsearch.scoring.admission import MAX_UNSEEN, MAX_UNSEEN_S, Finding, admission_rule
from cclsearch.scoring.derive import MAD_TO_SIGMA
from cclsearch.scoring.evidence import OtherTrial
from cclsearch.tasks.training.contract import TrainingEvidence
from cclsearch.tasks.training.thresholds import DEFAULT

MIN_OTHERS = 3
"""Trials that the ratio of traced and timed step time is compared with, at least."""
# A clock has nanoseconds.
ROUNDED = 1e-5
"""Step times that are multiples of this share of their median were rounded."""


@admission_rule("step_times", unmeasured="no steps were timed here")
def check_step_times(evidence: TrainingEvidence) -> Finding:
    """Whether the step times look measured, and fit into the time that the attempt took."""
    times, elapsed_s = evidence.result.step_times_s, evidence.attempt.elapsed_s if evidence.attempt else math.inf
    total_s = sum(times)
    if total_s > elapsed_s:
        return False, f"the timed steps take {total_s:.4g} s, but the attempt took {elapsed_s:.4g} s"
    if uncounted := _find_uncounted(evidence, total_s):
        return False, uncounted
    if len(times) < 3:
        return None, "too few step times to tell measured from invented ones"
    if pattern := _find_pattern(evidence):
        return False, f"{pattern}: report the time of each step as measured"
    window_s = _find_window(evidence)
    found = f"{len(set(times))} different step times"
    if window_s is None:
        return True, f"{found}; the run script does not report timed_window_s"
    return True, f"{found} in a window of {window_s:.4g} s"


def _find_window(evidence: TrainingEvidence) -> float | None:
    """Return the seconds of the timed window: as the search saw it, else as reported."""
    return evidence.windows[0].seconds if evidence.windows else evidence.result.timed_window_s


def _find_uncounted(evidence: TrainingEvidence, total_s: float) -> str:
    """Say how much longer the timed window was than the sum of its steps; "" if as long, or not reported."""
    window_s = _find_window(evidence)
    share, slack_s = DEFAULT.max_uncounted_cpu if evidence.is_on_cpu else DEFAULT.max_uncounted, DEFAULT.max_uncounted_s
    if evidence.windows:
        share, slack_s = MAX_UNSEEN, MAX_UNSEEN_S
    if window_s is None or window_s <= total_s * (1 + share) + slack_s:
        return ""
    return (
        f"the timed steps take {total_s:.4g} s, but their window took {window_s:.4g} s by another clock"
        f" ({window_s / total_s:.2f}x; at most {1 + share:g}x and {slack_s:g} s more are allowed):"
        " count what runs between steps in their times, or log and save checkpoints outside the window"
    )


def _find_pattern(evidence: TrainingEvidence) -> str:
    """Name a pattern of the times that measured ones lack: a coarse grid, equal digits, equal differences.

    A script that rounds (MaxText logs milliseconds) may report equal times, if its grid is fine enough.
    """
    times, middle = evidence.result.step_times_s, median(evidence.result.step_times_s)
    unit = _find_unit(times, middle)
    if unit is not None:
        is_coarse = unit >= DEFAULT.max_quantum * middle
        return f"all step times are multiples of {unit:g} s" if is_coarse else ""
    if len(set(times)) == 1:
        return f"all {len(times)} step times are equal to the last digit"
    differences = [b - a for a, b in pairwise(times)]
    if max(differences) - min(differences) <= 1e-12 * middle:
        return f"each step takes {differences[0]:.3g} s longer than the one before"
    earlier = (other for other in evidence.others if other.is_earlier)
    same = (other.number for other in earlier if other.metrics.get("step_time_s") == middle)
    number = next(same, None)
    return "" if number is None else f"the median step time equals that of trial {number} to the last digit"


def _find_unit(times: Sequence[float], middle: float) -> float | None:
    """Return the largest decimal unit, of at least `ROUNDED` of the median, that divides every time; None without."""
    for digits in range(-3, 12):
        unit = 10.0**-digits
        if unit < ROUNDED * middle:
            return None
        if all(abs(time / unit - round(time / unit)) < 1e-6 for time in times):
            return unit
    return None


@admission_rule("trace_time")
def check_trace_time(evidence: TrainingEvidence) -> Finding:
    """Whether traced and declared step time agree: of the same order, and as in the search's other trials."""
    declared, traced = evidence.metrics.get("step_time_s"), evidence.trace.step_time_s if evidence.trace else None
    if declared is None or traced is None:
        return None, "the traces have no step time"
    ratio = traced / declared
    low, high = DEFAULT.min_traced_time, DEFAULT.max_traced_time
    if evidence.is_on_cpu:
        low, high = DEFAULT.min_traced_time_cpu, DEFAULT.max_traced_time_cpu
    detail = f"traced step time {traced:.4g} s, {ratio:.2f}x the timed {declared:.4g} s"
    if not low <= ratio <= high:
        return False, f"{detail}; between {low:g} and {high:g}x is allowed"
    bound = DEFAULT.max_ratio_of_others_cpu if evidence.is_on_cpu else DEFAULT.max_ratio_of_others
    unlike = _compare_with_others(evidence, ratio, bound)
    return not unlike, f"{detail}{unlike}"


def _compare_with_others(evidence: TrainingEvidence, ratio: float, bound: float) -> str:
    """Say how far the ratio is above the other trials' ratios; "" if it is like theirs, or there are too few.

    Two causes are honest: a profiler makes the device wait for the host, so idle time is left out; and load during the
    profiled window slows matrix products down as much as the step. A lower ratio gains nothing.
    """
    others = [found for other in evidence.others if other.is_ranked and (found := _read_other(other))]
    if len(others) < MIN_OTHERS:
        return ""
    ratios = [ratio for ratio, _ in others]
    rate, idle = evidence.metrics.get("gemm_tflops"), evidence.metrics.get("idle_frac", 0.0)
    excess = _find_excess(ratio * (1 - idle), ratios, bound)
    with_rate = [ratio * its_rate for ratio, its_rate in others if its_rate]
    if rate and len(with_rate) >= MIN_OTHERS:
        excess = min(excess, _find_excess(ratio * rate, with_rate, bound))
    if excess <= 1:
        return ""
    return f"; the median of {len(others)} other trials is {median(ratios):.2f}x: {excess:.1f}x more is too far off"


def _read_other(other: OtherTrial) -> tuple[float, float | None] | None:
    timed, traced = other.metrics.get("step_time_s"), other.metrics.get("trace_step_time")
    return (traced / timed, other.metrics.get("gemm_tflops")) if timed and traced else None


def _find_excess(value: float, others: Sequence[float], bound: float) -> float:
    """Return the factor above the median of the others; 1 within the bound or within their spread."""
    logs = [math.log(other) for other in others]
    middle = median(logs)
    spread = MAD_TO_SIGMA * median(abs(log - middle) for log in logs)
    distance = math.log(value) - middle if value > 0 else 0.0
    return 1.0 if distance <= max(math.log(bound), DEFAULT.max_sigmas * spread) else math.exp(distance)
