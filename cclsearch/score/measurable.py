"""Whether what an objective asks for can be measured at all, told before the first trial."""

from __future__ import annotations

from cclsearch.core.errors import UserError
from cclsearch.score.catalog import ENERGY_METRICS
from cclsearch.score.objective import Objective
from cclsearch.space.framework import Framework

ENERGY = "energy_j"


def require_measurable(objective: Objective, framework: Framework) -> None:
    """Refuse an objective that needs energy where the run script records none: each trial would fail for it."""
    needed = [*objective.metrics, *(constraint.metric for constraint in objective.constraints)]
    of_energy = [metric for metric in needed if metric in ENERGY_METRICS]
    if of_energy and ENERGY not in framework.records:
        raise UserError(
            f"--objective {objective.name}: needs {of_energy[0]}, and the run script of framework {framework.name!r}"
            f" records no {ENERGY}: choose another objective, or a framework of your own whose script leaves it in"
            f" result.json and whose file says `records: [{ENERGY}]` (docs/trial-contract.md)"
        )
