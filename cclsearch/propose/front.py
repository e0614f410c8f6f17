"""The `pareto` strategy: what pushes the front of several metrics furthest, one batch at a time."""

from __future__ import annotations

from collections.abc import Sequence

from cclsearch.plugins import PROPOSERS
from cclsearch.propose.base import Proposal, SearchView
from cclsearch.propose.pareto import Direction, propose_pareto

STEP_TIME_AND_SIZE: tuple[tuple[str, Direction], ...] = (("step_time_s", "minimize"), ("num_accelerators", "minimize"))


class FrontProposer:
    """Proposes by expected hypervolume improvement over `metrics`."""

    name = "pareto"

    def __init__(self, metrics: Sequence[tuple[str, Direction]] = STEP_TIME_AND_SIZE) -> None:
        self.metrics = tuple(metrics)

    def propose(self, view: SearchView, count: int) -> Sequence[Proposal]:
        """Up to `count` new members; none where nothing is left."""
        return propose_pareto(view, count, self.metrics, proposer=self.name)


@PROPOSERS.register("pareto")
def make_front_proposer() -> FrontProposer:
    """Over step time and the number of accelerators; a search with several metrics of its own names them."""
    return FrontProposer()
