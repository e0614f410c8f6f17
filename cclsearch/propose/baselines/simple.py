"""Baseline strategies that learn nothing from the trials (the heuristic learns from failures only)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cclsearch.propose.base import PROPOSERS, Proposal, Proposer, SearchView


def open_rows(view: SearchView) -> NDArray[np.int64]:
    """Return the rows that may still be proposed, in order."""
    return np.flatnonzero(~view.taken_N)


@PROPOSERS.register("random")
class RandomProposer(Proposer):
    """Uniform over the search space, without repetition."""

    name = "random"

    def propose(self, view: SearchView, count: int) -> Sequence[Proposal]:
        """Return up to `count` untried configurations in random order, the same for the same view."""
        rows = open_rows(view)
        rng = np.random.default_rng([view.seed, len(view.observations), len(view.pending)])
        chosen = rng.permutation(rows)[:count]
        return [Proposal(view.space.config(int(row)), self.name, "drawn at random") for row in chosen]


@PROPOSERS.register("grid")
class GridProposer(Proposer):
    """An even grid through the rows of the search space, with as many points as the budget."""

    name = "grid"

    def propose(self, view: SearchView, count: int) -> Sequence[Proposal]:
        """Return the next `count` points of the grid, then the remaining rows in order."""
        rows = open_rows(view)
        budget = len(view.observations) + len(view.pending) + view.budget_left
        points = np.linspace(0, len(view.space) - 1, max(budget, 1)).round().astype(np.int64)
        ordered = [int(row) for row in points if row in set(rows.tolist())]
        ordered += [int(row) for row in rows if row not in set(ordered)]
        return [Proposal(view.space.config(row), self.name, "next point of an even grid") for row in ordered[:count]]


@PROPOSERS.register("heuristic")
class HeuristicProposer(Proposer):
    """Tries configurations like a careful engineer by hand, in the order of the task's rule of thumb.

    The rule for training is similar to NVIDIA NeMo's auto-configurator. It learns from failed trials only.
    """

    name = "heuristic"

    def propose(self, view: SearchView, count: int) -> Sequence[Proposal]:
        """Return the next `count` untried configurations in that order."""
        failed = [o.row for o in view.observations if o.failure is not None and o.row is not None]
        by_thumb = view.predictor.rule_of_thumb
        order = by_thumb(failed) if by_thumb else np.arange(len(view.space))
        free = set(open_rows(view).tolist())
        rows = [int(row) for row in order if int(row) in free]
        return [Proposal(view.space.config(row), self.name, "next by the rule of thumb") for row in rows[:count]]
