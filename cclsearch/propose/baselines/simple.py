"""Strategies that learn nothing: what any other must beat."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cclsearch.plugins import PROPOSERS
from cclsearch.propose.base import Proposal, SearchView


def open_rows(view: SearchView) -> NDArray[np.int64]:
    """Rows that may still be proposed, in order."""
    return np.flatnonzero(~view.taken_N)


@PROPOSERS.register("random")
class RandomProposer:
    """Uniform over the legal set, without repetition."""

    name = "random"

    def propose(self, view: SearchView, count: int) -> Sequence[Proposal]:
        """Up to `count` members in random order; the same view and seed give the same ones."""
        rows = open_rows(view)
        rng = np.random.default_rng([view.seed, len(view.observations), len(view.pending)])
        chosen = rng.permutation(rows)[:count]
        return [Proposal(view.space.config(int(row)), self.name, "drawn at random") for row in chosen]


@PROPOSERS.register("grid")
class GridProposer:
    """The legal set in its own order, spread evenly over the budget."""

    name = "grid"

    def propose(self, view: SearchView, count: int) -> Sequence[Proposal]:
        """The next `count` points of an even grid through the rows."""
        rows = open_rows(view)
        budget = len(view.observations) + len(view.pending) + view.budget_left
        stops = np.linspace(0, len(view.space) - 1, max(budget, 1)).round().astype(np.int64)
        ordered = [int(row) for row in stops if row in set(rows.tolist())]
        ordered += [int(row) for row in rows if row not in set(ordered)]
        return [Proposal(view.space.config(row), self.name, "next of an even grid") for row in ordered[:count]]


@PROPOSERS.register("heuristic")
class HeuristicProposer:
    """What a careful engineer tries by hand: TP inside the node, the smallest PP that fits, the largest micro-batch.

    In the manner of NVIDIA NeMo's auto-configurator: model-parallel sizes from small to large among what the memory
    model says fits, each with its largest micro-batch first; what is larger than a failure in every degree waits.
    """

    name = "heuristic"

    def propose(self, view: SearchView, count: int) -> Sequence[Proposal]:
        """The next `count` members of that order."""
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
        doomed = memory_gib >= min((memory_gib[row] for row in failed), default=np.inf)
        order = np.lexsort((layout.recompute, -layout.micro_batch, layout.pp, parallel, doomed, ~inside, ~fits))
        free = set(open_rows(view).tolist())
        rows = [int(row) for row in order if int(row) in free]
        return [Proposal(view.space.config(row), self.name, "next by rule of thumb") for row in rows[:count]]
