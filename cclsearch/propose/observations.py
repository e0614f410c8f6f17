"""A finished trial as a proposer sees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cclsearch.core.values import Config, Failure


@dataclass(frozen=True, slots=True)
class Observation:
    """One finished trial of one configuration, as a proposer sees it."""

    trial: int
    config: Config
    row: int | None
    """Row of the space; None for a configuration outside it (of an earlier run, or a baseline)."""
    loss: float | None
    """Finite value that the objective minimizes; None if it failed, was not admitted or violates a constraint."""
    failure: Failure | None = None
    """None if the trial has a loss. Infrastructure failures are never shown to a proposer."""
    spread: float | None = None
    """Relative spread of the primary metric inside the run."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metric -> measured value; of a failed trial at most `peak_memory_gib`."""
    loads: tuple[Mapping[str, float], ...] = ()
    """The metrics of each load if the trial measured several; `metrics` are of the load that counts."""
    is_confirmation: bool = False
    violation: float = 0.0
    """Excess over the objective's constraints (`Objective.violation`); 0 if the trial satisfies all."""
    is_pruned: bool = False
    """Whether it ended early, slower than the best one beyond doubt: its metrics are of fewer steps."""
    refusals: tuple[str, ...] = ()
    """Why it was not admitted: each broken rule with its finding."""

    @property
    def is_valid(self) -> bool:
        """Whether proposers can learn from its metrics: it was admitted, apart from the constraints, or ended early."""
        return self.loss is not None or self.violation > 0 or self.is_pruned

    @property
    def is_unjudged(self) -> bool:
        """Whether it ran, but was not admitted: its configuration may run once more."""
        return self.failure is None and not self.is_valid

    def value(self, metric: str) -> float | None:
        """The metric's value if the trial is valid and measured it, else None."""
        return self.metrics.get(metric) if self.is_valid else None


def observed_rows(observations: Sequence[Observation]) -> NDArray[np.int64]:
    """Return the observed rows of the space, in no order."""
    return np.array([o.row for o in observations if o.row is not None], dtype=np.int64)


def closed_rows(observations: Sequence[Observation]) -> NDArray[np.int64]:
    """Return the observed rows of the space without those whose only run was not admitted."""
    runs = Counter(o.row for o in observations)
    closed = [o for o in observations if not o.is_unjudged or runs[o.row] > 1]
    return observed_rows(closed)


def observed_losses(observations: Sequence[Observation]) -> NDArray[np.float64]:
    """(n,) loss of each observation; NaN for one without."""
    return np.array([np.nan if o.loss is None else o.loss for o in observations], dtype=np.float64)


def count_failures(observations: Sequence[Observation], excluded: Collection[int]) -> tuple[int, int]:
    """Return the number of observations outside the excluded rows, and how many of these failed."""
    counted = [o.failure is not None for o in observations if o.row not in excluded]
    return len(counted), sum(counted)
