"""The first trials of a search: the best prediction, then a safe default until a trial succeeds."""

from __future__ import annotations

import numpy as np

from cclsearch.core.metrics import PEAK_MEMORY
from cclsearch.propose.agent.agent import Agent
from cclsearch.propose.agent.prompt.surrogate_table import SurrogateTable
from cclsearch.propose.base import ExpectedOutcome, Proposal, Proposer, SearchView

SAFE = 0.9
"""Minimum probability of fitting of a safe configuration."""


def propose_seed(view: SearchView, fallback: Proposer, agent: Agent) -> list[Proposal]:
    """The next seed; empty once a trial has succeeded, because the safe default is not needed then.

    A seed policy that the user named comes first.
    """
    if agent.options.seed_policy and not view.observations and not view.pending:
        found = _from_policy(view, agent)
        if found:
            return found
    if any(observation.is_valid for observation in view.observations):
        return []
    is_first = not view.observations and view.next_trial <= 1
    safe = [] if is_first else _safe_default(view, agent.make_table(view))
    why = "the best prediction" if is_first else "next best"
    return safe or [Proposal(p.config, "seed", p.rationale or why, p.expects) for p in fallback.propose(view, 1)[:1]]


def _safe_default(view: SearchView, table: SurrogateTable) -> list[Proposal]:
    """The best predicted configuration of those that are safe; if none is, the one most likely to fit."""
    open_N = ~view.taken_N & np.isfinite(table.value_N)
    if not open_N.any():
        return []
    safe = open_N & (table.fits_N >= SAFE)
    rows = np.flatnonzero(safe if safe.any() else open_N)
    key = view.primary.sign * table.value_N[rows] if safe.any() else -table.fits_N[rows]
    row = int(rows[np.argmin(key)])
    expects = ExpectedOutcome(
        {view.primary.name: float(table.value_N[row]), PEAK_MEMORY: float(table.memory_gib_N[row])},
        float(table.fits_N[row]),
    )
    best = "fastest" if view.primary.is_time else "best"
    return [Proposal(view.space.config(row), "seed", f"a safe default: the {best} that is very likely to fit", expects)]


def _from_policy(view: SearchView, agent: Agent) -> list[Proposal]:
    name = agent.options.seed_policy
    choice = agent.policies.choose(agent.seed_program(view), view, agent.make_table(view))
    row = view.space.row(choice.config) if choice.config else None
    if choice.config is None or row is None or view.taken_N[row]:
        return []
    return [Proposal(choice.config, "seed", f"seed policy {name}")]
