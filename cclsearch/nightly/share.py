"""The remaining budget of a night, and each job's fair share of it."""

from __future__ import annotations

import math

from cclsearch.core.values import Model
from cclsearch.nightly.config import Budget


class Spent(Model):
    """What was spent, in the units of a budget."""

    trials: int = 0
    hours: float = 0.0
    node_hours: float = 0.0
    tokens: int = 0
    usd: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(**{name: value + getattr(other, name) for name, value in self})


def find_remaining(budget: Budget, spent: Spent) -> dict[str, float | None]:
    """The remainder of each limit (at least 0); None if there is no limit."""
    limits = {name: getattr(budget, name) for name in Spent.model_fields}
    return {k: None if limit is None else max(0.0, limit - getattr(spent, k)) for k, limit in limits.items()}


def split_remaining(left: dict[str, float | None], priority: float, waiting: float) -> dict[str, float | None]:
    """A job's share of the remaining budget; `waiting` is the sum of its own and all waiting jobs' priorities.

    Trials are whole, and at least one while one is left.
    """
    fraction = priority / waiting
    share = {name: None if value is None else value * fraction for name, value in left.items()}
    trials = left["trials"]
    if trials is not None:
        share["trials"] = min(trials, max(1, math.floor(trials * fraction + 1e-9)))
    return share


def find_lower_limits(share: dict[str, float | None], own: Budget, spent: Spent) -> dict[str, float | None]:
    """For each limit, the lower of the night's share and the remainder of the job's own budget."""
    rest = find_remaining(own, spent)
    limits = {name: [limit for limit in (value, rest[name]) if limit is not None] for name, value in share.items()}
    return {name: min(given, default=None) for name, given in limits.items()}


def find_exhausted(left: dict[str, float | None]) -> str | None:
    """The first limit that is used up; None if none is."""
    return next((name for name, value in left.items() if value is not None and value <= 0), None)
