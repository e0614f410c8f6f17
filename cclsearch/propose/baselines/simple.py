"""Baseline strategies that learn nothing from the trials (the heuristic learns from failures only)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cclsearch.plugins import PROPOSERS
from cclsearch.propose.base import Proposal, SearchView


def open_rows(view: SearchView) -> NDArray[np.int64]:
    """Return the rows that may still be proposed, in order."""
    return np.flatnonzero(~view.taken_N)


@PROPOSERS.register("random")
class RandomProposer:
    """Uniform over the search space, without repetition."""

    name = "random"

    def propose(self, view: SearchView, count: int) -> Sequence[Proposal]:
        """Return up to `count` untried configurations in random order, the same for the same view."""
        rows = open_rows(view)
        rng = np.random.default_rng([view.seed, len(view.observations), len(view.pending)])
        chosen = rng.permutation(rows)[:count]
        return [Proposal(view.space.config(int(row)), self.name, "drawn at random") for row in chosen]


@PROPOSERS.register("grid")
class GridProposer:
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
class HeuristicProposer:
    """What a careful engineer tries by hand: TP inside the node, the smallest PP that fits, the largest micro-batch.

    Similar to NVIDIA NeMo's auto-configurator: among the configurations that fit by the memory model, model-parallel
    sizes from small to large, each with its largest micro-batch first. Configurations that need at least as much
    memory as the smallest failed one come last.
    """

    name = "heuristic"

    def propose(self, view: SearchView, count: int) -> Sequence[Proposal]:
        """Return the next `count` untried configurations in that order."""
        from cclsearch.tasks.training.memory import combine_memory
        from cclsearch.tasks.training.prediction import load_priors, model_of

        model = model_of(view.card, view.space)
        layout = model.layout
        memory_gib = combine_memory(model.memory_parts, load_priors().memory.mean_P)
        fits = memory_gib <= 0.9 * model.machine.memory_gib
        inside = layout.tp <= model.machine.node
        parallel = layout.tp * layout.pp
        # a configuration that needs less memory than one that failed is tried first
        failed = [o.row for o in view.observations if o.failure is not None and o.row is not None]
        needs_more = memory_gib >= min((memory_gib[row] for row in failed), default=np.inf)
        order = np.lexsort((layout.recompute, -layout.micro_batch, layout.pp, parallel, needs_more, ~inside, ~fits))
        free = set(open_rows(view).tolist())
        rows = [int(row) for row in order if int(row) in free]
        return [Proposal(view.space.config(row), self.name, "next by the rule of thumb") for row in rows[:count]]
