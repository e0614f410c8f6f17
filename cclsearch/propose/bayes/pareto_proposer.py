"""The `pareto` strategy: expected hypervolume improvement of the Pareto front of several metrics.

For the primary metric and the number of accelerators, the second metric is known before a trial runs. The problem then
splits into one search per number of accelerators, each with its own model, and the expected hypervolume improvement is
exact: the expected improvement over the best of all sizes up to the candidate's, times the width of its strip (Yang et
al. 2019, box decomposition in two dimensions, on logarithmic axes). Other metrics use
`cclsearch.propose.bayes.hypervolume`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cclsearch.core.metrics import NUM_ACCELERATORS, Direction
from cclsearch.propose.base import PROPOSERS, Proposal, Proposer, ProposerRole, SearchView
from cclsearch.propose.bayes.acquisition import expected_improvement, failure_penalty, incumbent
from cclsearch.propose.bayes.hypervolume import propose_pareto
from cclsearch.propose.bayes.surrogate import CandidatePosterior, fit_posterior
from cclsearch.scoring.objective import single_metric
from cclsearch.space.table import Space
from cclsearch.stats.kernel import Array

MAX_SIZES = 32
"""Number of sizes (numbers of accelerators) above which one model covers all of them."""


class _Size(NamedTuple):
    """The part of a space with one number of accelerators."""

    num_accelerators: int
    space: Space
    row_of: Mapping[int, int]
    """Row of the whole space -> row of this part."""
    width: float
    """Width of this size's strip on the accelerator axis of the hypervolume, relative to the mean width."""


class _Candidate(NamedTuple):
    utility: float
    size: _Size
    row: int
    posterior: CandidatePosterior
    position: int


@PROPOSERS.register("pareto")
class ParetoProposer(Proposer):
    """Proposes by expected hypervolume improvement over `metrics`: the primary one and the number of accelerators."""

    name = "pareto"
    role = ProposerRole.PART

    def __init__(self, metrics: Sequence[tuple[str, str]] = ()) -> None:
        self.metrics = tuple(metrics)
        self._sizes: tuple[Space, list[_Size]] | None = None
        self._posteriors: dict[int, tuple[object, CandidatePosterior | None]] = {}

    def propose(self, view: SearchView, count: int) -> Sequence[Proposal]:
        """Return up to `count` untried configurations; none if every one was proposed."""
        primary = single_metric(view.primary).terms[0]
        by_size = ((primary.metric, primary.direction), (NUM_ACCELERATORS, Direction.MINIMIZE))
        sizes = self._split(view.space) if set(self.metrics or by_size) == set(by_size) else []
        if not 1 < len(sizes) <= MAX_SIZES:
            return propose_pareto(view, count, self.metrics or by_size, proposer=self.name)
        taken: list[_Candidate] = []
        while len(taken) < count:
            best = self._find_best(view, sizes, taken)
            if best is None:
                break
            taken.append(best)
        return [self._propose(candidate, view.primary.unit or "") for candidate in taken]

    def _split(self, space: Space) -> list[_Size]:
        if self._sizes is None or self._sizes[0] is not space:
            self._sizes, self._posteriors = (space, split_by_size(space)), {}
        return self._sizes[1]

    def _find_best(self, view: SearchView, sizes: Sequence[_Size], taken: Sequence[_Candidate]) -> _Candidate | None:
        """Return the untaken candidate of the highest utility; those in `taken` count as running."""
        found: list[tuple[_Size, CandidatePosterior, Array]] = []
        best_of_smaller = math.inf
        for size in sizes:
            pending = frozenset(candidate.row for candidate in taken if candidate.size is size)
            part = _limit_view(view, size, pending)
            posterior = self._fit_posterior(part, size)
            own = [math.log(o.loss) for o in part.observations if o.loss]
            best_of_smaller = min([best_of_smaller, *own])
            if posterior is None:
                continue
            gain_m = expected_improvement(posterior, np.minimum(incumbent(posterior), best_of_smaller))
            found.append((size, posterior, gain_m))
        largest = max((size.width * float((gain_m * p.p_valid_m).max()) for size, p, gain_m in found), default=0.0)
        best: _Candidate | None = None
        penalty = failure_penalty(view)
        for size, posterior, gain_m in found:
            utility_m = size.width * posterior.utility_m(gain_m, penalty, largest / size.width)
            m = int(np.argmax(utility_m))
            if best is None or utility_m[m] > best.utility:
                best = _Candidate(float(utility_m[m]), size, int(posterior.rows_m[m]), posterior, m)
        return best

    def _fit_posterior(self, part: SearchView, size: _Size) -> CandidatePosterior | None:
        """Return the posterior of one size; fitted again only if its observations or running trials changed."""
        key = (tuple((o.row, o.trial) for o in part.observations), part.pending, len(part.prior), len(part.held_back))
        cached = self._posteriors.get(size.num_accelerators)
        if cached is None or cached[0] != key:
            cached = (key, fit_posterior(part))
            self._posteriors[size.num_accelerators] = cached
        return cached[1]

    def _propose(self, candidate: _Candidate, unit: str) -> Proposal:
        posterior, m = candidate.posterior, candidate.position
        expects = posterior.expected_outcome(m)
        value = expects.metrics.get(posterior.metric)
        rationale = (
            f"largest expected gain of the Pareto front, on {candidate.size.num_accelerators} accelerators:"
            f"{'' if value is None else f' expected {value:.3g} {unit},'} P(success) {posterior.p_success_m[m]:.0%}"
        )
        return Proposal(candidate.size.space.config(candidate.row), self.name, rationale, expects)


def split_by_size(space: Space) -> list[_Size]:
    """Return the parts of the space by number of accelerators, ascending."""
    sizes, position_N = np.unique(space.num_accelerators_N, return_inverse=True)
    widths = _strip_widths(sizes)
    parts = []
    for n, size in enumerate(sizes.tolist()):
        rows = np.flatnonzero(position_N == n)
        loads = tuple(space.loads[int(row)] for row in rows) if space.loads else ()
        part = Space(space.knobs, space.codes_NK[rows], num_raw=len(rows), rules=space.rules, loads=loads)
        row_of = {int(row): here for here, row in enumerate(rows)}
        parts.append(_Size(int(size), part, row_of, float(widths[n])))
    return parts


def _strip_widths(sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the log distance from each size to the next larger one over their mean; the last gets the mean."""
    if len(sizes) < 2:
        return np.ones(len(sizes))
    steps = np.diff(np.log(sizes.astype(np.float64)))
    return np.asarray(np.append(steps, steps.mean()) / steps.mean())


def _limit_view(view: SearchView, size: _Size, pending: frozenset[int]) -> SearchView:
    """Return the view of a search for the primary metric at that size; rows of it in `pending` count as running."""
    target = single_metric(view.primary).model_copy(update={"constraints": view.objective.constraints})
    here = [
        replace(o, row=size.row_of[o.row], loss=None if o.loss is None else target.loss(o.metrics))
        for o in view.observations
        if o.row is not None and o.row in size.row_of and (o.loss is None or view.primary.name in o.metrics)
    ]
    running, held_back = (
        frozenset(size.row_of[row] for row in rows if row in size.row_of) for rows in (view.pending, view.held_back)
    )
    return replace(
        view,
        space=size.space,
        observations=tuple(here),
        pending=running | pending,
        held_back=held_back,
        target=target,
    )
