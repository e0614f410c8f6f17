"""The losses of training: every layout trains the same weights on the same data, so the losses of all trials agree."""

from __future__ import annotations

import math

from cclsearch.scoring.agreement import Measure, find_largest
from cclsearch.space.framework import Framework
from cclsearch.tasks.training.contract import TrainingInput, TrainingResult


class SameLosses:
    """Compares the loss of each optimizer step between the trials of one search and precision."""

    rule = "same_losses"
    values = "losses"
    deviation = "relative deviation"
    tolerated = frozenset({"load", "spread", "constraints"})

    def read(self, payload: TrainingInput, result: TrainingResult) -> tuple[float, ...]:
        losses = result.losses[: count_steps(payload) + 1]  # torch's profiler has a step of its own to warm up
        return losses if all(map(math.isfinite, losses)) else ()

    def kind(self, payload: TrainingInput) -> str:
        return payload.precision

    def bound(self, framework: Framework, kind: str) -> float | None:
        return framework.same_losses.bound(kind)

    def measure(self, framework: Framework, kind: str) -> Measure:
        return find_largest

    def find_missing(self, framework: Framework, payload: TrainingInput, num_values: int) -> str:
        want = count_steps(payload)
        if self.bound(framework, payload.precision) is None or num_values >= want:
            return ""
        found = f"the run script reported the losses of {num_values} of {want} steps"
        return f"{found}, but {framework.name} declares a bound for them"

    def explain(self, framework: Framework, payload: TrainingInput) -> str:
        why = framework.same_losses.none
        return f"{framework.name} promises no bound: {why}" if why else f"{framework.name} declares no bound"

    def describe_value(self, payload: TrainingInput, index: int, value: float) -> str:
        return f"{value:.6g} at step {index + 1} ({name_window(payload, index)})"


def count_steps(payload: TrainingInput) -> int:
    """Return the optimizer steps whose losses a run script reports: warm-up, timed and profiled ones."""
    return payload.warmup_steps + payload.timed_steps + payload.profiled_steps


def name_window(payload: TrainingInput, index: int) -> str:
    """Return the window of the step with that index, from 0: `warm-up`, `timed` or `profiled`."""
    if index < payload.warmup_steps:
        return "warm-up"
    return "timed" if index < payload.warmup_steps + payload.timed_steps else "profiled"
