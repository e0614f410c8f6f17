"""Counts what a search spent of a night, the night's remaining budget, and each job's fair share of it."""

from __future__ import annotations

import math

from cclsearch.core.values import Model
from cclsearch.nightly.config import Budget
from cclsearch.propose.events import LlmReport, LlmTurn
from cclsearch.record.state import RunState
from cclsearch.run.spec import RunSpec
from cclsearch.run.usage import count_node_hours


class Spent(Model):
    """Amounts that were spent, in the units of a budget."""

    trials: int = 0
    hours: float = 0.0
    node_hours: float = 0.0
    tokens: int = 0
    usd: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(**{name: value + getattr(other, name) for name, value in self})


def count_spent(spec: RunSpec, state: RunState, since_s: float, now_s: float) -> Spent:
    """Count what a search spent since a moment; wall time is not in a ledger and stays 0.

    A trial that started earlier and was interrupted counts for the night in which it finished.
    """
    trials = [trial for trial in state.trials.values() if (trial.finished_s or now_s) >= since_s]
    turns = [event for event in state.reported if isinstance(event, LlmTurn | LlmReport) and event.time_s >= since_s]
    started = [trial for trial in trials if trial.proposed_s >= since_s or trial.is_finished]
    return Spent(
        trials=sum(trial.costs_budget for trial in started),
        node_hours=sum(count_node_hours(spec, trial, since_s, now_s) for trial in trials),
        tokens=sum(turn.cost.usage.total for turn in turns),
        usd=sum(turn.cost.usd or 0.0 for turn in turns),
    )


def find_remaining(budget: Budget, spent: Spent) -> dict[str, float | None]:
    """The remainder of each limit (at least 0); None if there is no limit."""
    limits = {name: getattr(budget, name) for name in Spent.model_fields}
    return {k: None if limit is None else max(0.0, limit - getattr(spent, k)) for k, limit in limits.items()}


def split_remaining(left: dict[str, float | None], priority: float, waiting: float) -> dict[str, float | None]:
    """Return a job's share of the remaining budget; `waiting` is the sum of its own and all waiting jobs' priorities.

    Trials are whole, and at least one while one is left.
    """
    fraction = priority / waiting
    share = {name: None if value is None else value * fraction for name, value in left.items()}
    trials = left["trials"]
    if trials is not None:
        share["trials"] = min(trials, max(1, math.floor(trials * fraction + 1e-9)))
    return share


def find_lower_limits(share: dict[str, float | None], own: Budget, spent: Spent) -> dict[str, float | None]:
    """Return, for each limit, the lower of the night's share and the remainder of the job's own budget."""
    rest = find_remaining(own, spent)
    limits = {name: [limit for limit in (value, rest[name]) if limit is not None] for name, value in share.items()}
    return {name: min(given, default=None) for name, given in limits.items()}


def find_exhausted(left: dict[str, float | None]) -> str | None:
    """The first limit that is used up; None if none is."""
    return next((name for name, value in left.items() if value is not None and value <= 0), None)
