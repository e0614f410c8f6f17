"""The trial that comes closest to the constraints of an objective that no trial satisfies."""

from __future__ import annotations

from dataclasses import dataclass

from cclsearch.core.errors import TrialError
from cclsearch.record.state import RunState
from cclsearch.record.trial import Trial
from cclsearch.score.objective import Constraint, Objective
from cclsearch.score.outcome import Outcome


@dataclass(frozen=True)
class Closest:
    """The trial with the least violation, and by how much it misses."""

    trial: Trial
    violation: float
    """Sum over the constraints of the relative excess."""
    text: str
    """`no configuration tried satisfies peak_memory_gib <= 10 GiB; closest: trial 3 with 12.4 GiB, 24% over`."""


def find_closest(objective: Objective, state: RunState) -> Closest | None:
    """The closest trial; None if a trial is ranked, or if not one is kept from it by the constraints alone."""
    if not objective.constraints or state.best is not None:
        return None
    found: list[tuple[float, float, int]] = []
    baseline = None
    for trial in state.trials.values():
        if trial.outcome is not None and _is_kept_back(trial.outcome):
            metrics = trial.outcome.metrics
            baseline = baseline or metrics
            try:
                found.append((objective.violation(metrics), objective.loss(metrics, baseline), trial.number))
            except TrialError:
                continue
    if not found:
        return None
    violation, _, number = min(found)
    trial = state.trials[number]
    wanted = " and ".join(map(str, objective.constraints))
    return Closest(
        trial,
        violation,
        f"no configuration tried satisfies {wanted}; closest: trial {number} with {_describe_misses(objective, trial)}",
    )


def _is_kept_back(outcome: Outcome) -> bool:
    """Whether the constraints are the only rule that the trial violates."""
    verdicts = outcome.admission.verdicts if outcome.admission and outcome.failure is None else ()
    return [verdict.rule for verdict in verdicts if verdict.ok is False] == ["constraints"]


def _describe_misses(objective: Objective, trial: Trial) -> str:
    assert trial.outcome is not None
    metrics, alone = trial.outcome.metrics, len(objective.constraints) == 1
    missed = [bound for bound in objective.constraints if bound.excess(metrics.get(bound.metric, 0.0))]
    return " and ".join(f"{'' if alone else f'{c.metric} '}{_describe_miss(c, metrics[c.metric])}" for c in missed)


def _describe_miss(constraint: Constraint, value: float) -> str:
    """`12.4 GiB, 24% over`; without a percentage if the bound is 0."""
    is_over = constraint.at_most is not None and value > constraint.at_most
    bound = constraint.at_most if is_over else constraint.at_least
    excess = constraint.excess(value)
    by = f"{excess:.0%} " if bound and excess >= 0.1 else f"{excess:.1%} " if bound else ""
    return f"{value:.4g} {constraint.unit or ''}".rstrip() + f", {by}{'over' if is_over else 'under'}"
