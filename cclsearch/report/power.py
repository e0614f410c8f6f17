"""Count the copies of a configuration that fit under a power limit, and find the one whose copies do the most work.

Under a power limit (as in POLCA, Patel et al. 2023) a slower configuration with less power can do more, since more
copies of it fit.
"""

from __future__ import annotations

from cclsearch.core.errors import UserError
from cclsearch.record.state import RunState
from cclsearch.record.trial import TrialState
from cclsearch.run.spec import RunSpec
from cclsearch.tasks.base import task_of

POWER = "power_w"


def describe_power_limit(spec: RunSpec, state: RunState, limit_w: float) -> list[str]:
    """Describe the best trial, and the one whose copies do the most work under the limit.

    Raises UserError if the task has no rate, if no ranked trial has a measured power, or if each needs more than that.
    """
    rate = task_of(spec.card).rate
    if rate is None:
        raise UserError(f"task {spec.card.task} has no metric of work per second: a power limit says nothing of it")
    ranked = [(t.number, t.outcome.metrics) for t in state.trials.select(TrialState.ADMITTED) if t.outcome]
    known = {number: found for number, found in ranked if POWER in found and rate in found}
    if not known:
        raise UserError(f"no ranked trial has {POWER}: their run script recorded no energy (docs/trial-contract.md)")
    fits = {number: int(limit_w // found[POWER]) for number, found in known.items()}
    done = {number: fits[number] * known[number][rate] for number in known}
    most = max(known, key=lambda number: done[number])
    if not fits[most]:
        least = min(found[POWER] for found in known.values())
        raise UserError(f"{limit_w:g} W are less than every ranked trial's power; the least is {least:.4g} W")
    metric = task_of(spec.card).metric(rate)

    def describe(number: int) -> str:
        power = f"{known[number][POWER]:.4g} W each"
        return f"{fits[number]} of trial {number} ({power}): {metric.show(done[number])} together"

    best = state.best
    chosen = [] if best is None or best.number not in known or best.number == most else [describe(best.number)]
    lines = [f"{limit_w:g} W are enough for {text}" for text in (*chosen, describe(most))]
    if chosen:
        lines[-1] += f": more than the best trial's; {state.trials[most].config}"
    return lines
