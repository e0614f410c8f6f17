"""The trial that comes closest to the constraints of an objective that no trial satisfies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cclsearch.record.state import RunState
from cclsearch.record.trial import Trial, TrialState
from cclsearch.scoring.objective import Constraint, Objective
from cclsearch.scoring.outcome import Outcome


@dataclass(frozen=True)
class Closest:
    """The trial with the least violation, and its excess."""

    trial: Trial
    violation: float
    """Sum over the constraints of the relative excess."""
    text: str
    """`no configuration tried satisfies peak_memory_gib <= 10 GiB; closest: trial 3 with 12.4 GiB, 24% over`."""


def find_closest(objective: Objective, state: RunState) -> Closest | None:
    """The closest trial; None if a trial is ranked, or if not one is kept from it by the constraints alone."""
    if not objective.constraints or state.best is not None:
        return None
    kept_back = {
        trial.number: trial.outcome.metrics
        for trial in state.trials.select(TrialState.REFUSED)
        if trial.outcome and _is_kept_back(trial.outcome)
    }
    if not kept_back:
        return None
    baseline = next(iter(kept_back.values()))
    violation, _, number = min((objective.violation(m), objective.loss(m, baseline), n) for n, m in kept_back.items())
    wanted, misses = " and ".join(map(str, objective.constraints)), _describe_misses(objective, kept_back[number])
    text = f"no configuration tried satisfies {wanted}; closest: trial {number} with {misses}"
    return Closest(state.trials[number], violation, text)


def _is_kept_back(outcome: Outcome) -> bool:
    """Whether the constraints are the only rule that the trial violates."""
    verdicts = outcome.admission.verdicts if outcome.admission and outcome.failure is None else ()
    return [verdict.rule for verdict in verdicts if verdict.ok is False] == ["constraints"]


def _describe_misses(objective: Objective, metrics: Mapping[str, float]) -> str:
    alone = len(objective.constraints) == 1
    missed = [bound for bound in objective.constraints if bound.excess(metrics[bound.metric])]
    return " and ".join(f"{'' if alone else f'{c.metric} '}{_describe_miss(c, metrics[c.metric])}" for c in missed)


def _describe_miss(constraint: Constraint, value: float) -> str:
    """`12.4 GiB, 24% over`; without a percentage if the bound is 0."""
    is_over = constraint.at_most is not None and value > constraint.at_most
    bound = constraint.at_most if is_over else constraint.at_least
    excess = constraint.excess(value)
    by = f"{excess:.0%} " if bound and excess >= 0.1 else f"{excess:.1%} " if bound else ""
    return f"{value:.4g} {constraint.unit or ''}".rstrip() + f", {by}{'over' if is_over else 'under'}"
