"""The admission rules on the step times of training: measured ones differ, and agree with the traces and the clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from cclsearch.scoring.admission import MAX_UNSEEN, MAX_UNSEEN_S, Finding, admission_rule
from cclsearch.tasks.training.contract import TrainingEvidence
from cclsearch.tasks.training.thresholds import DEFAULT

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
    """Whether traced and declared step time are of the same order."""
    declared, traced = evidence.metrics.get("step_time_s"), evidence.trace.step_time_s if evidence.trace else None
    if declared is None or traced is None:
        return None, "the traces have no step time"
    ratio = traced / declared
    low, high = DEFAULT.min_traced_time, DEFAULT.max_traced_time
    if evidence.is_on_cpu:
        low, high = DEFAULT.min_traced_time_cpu, DEFAULT.max_traced_time_cpu
    detail = f"traced step time {traced:.4g} s, {ratio:.2f}x the timed {declared:.4g} s"
    waiting = evidence.trace.seconds_by_cause.get("host_idle", 0.0) if evidence.trace else 0.0
    if ratio > high and (traced - waiting) / declared <= 1:  # a profiler slows a host that the device waits for anyway
        return True, f"{detail}; without waiting for the host it would take {traced - waiting:.4g} s"
    if not low <= ratio <= high:
        return False, f"{detail}; between {low:g} and {high:g}x is allowed"
    return True, detail
