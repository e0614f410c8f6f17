"""The first trials of a search: the prediction's best, then a safe default while nothing has run."""

from __future__ import annotations

import numpy as np

from cclsearch.propose.agent.agent import Agent
from cclsearch.propose.agent.surrogate_table import SurrogateTable, open_rows
from cclsearch.propose.base import ExpectedOutcome, Proposal, Proposer, SearchView

SAFE = 0.9
"""Probability of fitting from which a configuration counts as safe."""


def propose_seed(view: SearchView, fallback: Proposer, agent: Agent) -> list[Proposal]:
    """The next seed; empty where it would tell nothing new.

    A seed policy that the user named goes first. Once a trial has run, the safe default is not needed.
    """
    if agent.options.seed_policy and not view.observations and not view.pending:
        found = _from_policy(view, agent)
        if found:
            return found
    if any(observation.loss is not None for observation in view.observations):
        return []
    if not view.observations and view.next_trial <= 1:
        return [_as_seed(proposal, "the prediction's best") for proposal in fallback.propose(view, 1)][:1]
    return _safe_default(view, agent.look(view)) or [_as_seed(p, "next best") for p in fallback.propose(view, 1)][:1]


def _safe_default(view: SearchView, look: SurrogateTable) -> list[Proposal]:
    """The fastest predicted configuration among those that surely fit; the surest where none does."""
    open_N = open_rows(view) & np.isfinite(look.time_N)
    if not open_N.any():
        return []
    safe = open_N & (look.fits_N >= SAFE)
    rows = np.flatnonzero(safe if safe.any() else open_N)
    key = look.time_N[rows] if safe.any() else -look.fits_N[rows]
    row = int(rows[np.argmin(key)])
    expects = ExpectedOutcome(float(look.time_N[row]), float(look.memory_gib_N[row]), float(look.fits_N[row]))
    return [Proposal(view.space.config(row), "seed", "a safe default: the fastest that surely fits", expects)]


def _from_policy(view: SearchView, agent: Agent) -> list[Proposal]:
    name = agent.options.seed_policy
    choice = agent.policies.choose(agent.seed_program(view), view, agent.look(view))
    row = view.space.row(choice.config) if choice.config else None
    if choice.config is None or row is None or not open_rows(view)[row]:
        return []
    return [Proposal(choice.config, "seed", f"seed policy {name}")]


def _as_seed(proposal: Proposal, why: str) -> Proposal:
    return Proposal(proposal.config, "seed", proposal.rationale or why, proposal.expects)
