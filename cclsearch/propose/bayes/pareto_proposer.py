"""The `pareto` strategy: expected hypervolume improvement of the Pareto front of several metrics.

For the primary metric and the number of accelerators, the second metric is known before a trial runs. The expected
hypervolume improvement is then exact: the expected improvement over the best of all sizes up to the candidate's, times
the width of its strip (Yang et al. 2019, box decomposition in two dimensions, on logarithmic axes). All sizes share one
model, so that trials and failures of one teach the others. Other metrics use `cclsearch.propose.bayes.hypervolume`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cclsearch.core.metrics import NUM_ACCELERATORS, Direction
from cclsearch.propose.base import PROPOSERS, Proposal, Proposer, ProposerRole, SearchView
from cclsearch.propose.bayes.acquisition import FIRST_MARGIN, expected_improvement, failure_penalty, find_safe_loss
from cclsearch.propose.bayes.hypervolume import propose_pareto
from cclsearch.propose.bayes.prediction import describe_expected
from cclsearch.propose.bayes.surrogate import CandidatePosterior, fit_posterior
from cclsearch.scoring.objective import single_metric
from cclsearch.stats.kernel import Array
from cclsearch.stats.one_thread import on_one_thread

MAX_SIZES = 32
"""Number of sizes (numbers of accelerators) above which they are a metric like any other."""


@PROPOSERS.register("pareto")
class ParetoProposer(Proposer):
    """Proposes by expected hypervolume improvement over `metrics`: the primary one and the number of accelerators."""

    name = "pareto"
    role = ProposerRole.PART

    def __init__(self, metrics: Sequence[tuple[str, str]] = ()) -> None:
        self.metrics = tuple(metrics)

    @on_one_thread
    def propose(self, view: SearchView, count: int) -> Sequence[Proposal]:
        """Return up to `count` untried configurations; none if every one was proposed."""
        primary = single_metric(view.primary).terms[0]
        by_size = ((primary.metric, primary.direction), (NUM_ACCELERATORS, Direction.MINIMIZE))
        sizes_S = np.unique(view.space.num_accelerators_N)
        if set(self.metrics or by_size) != set(by_size) or not 1 < len(sizes_S) <= MAX_SIZES:
            return propose_pareto(view, count, self.metrics or by_size, proposer=self.name)
        aimed = _aim_at_primary(view)
        posterior = fit_posterior(aimed, groups_N=view.space.num_accelerators_N)
        if posterior is None:
            return ()
        return [self._propose(aimed, posterior, m) for m in _choose(aimed, posterior, sizes_S, count)]

    def _propose(self, view: SearchView, posterior: CandidatePosterior, m: int) -> Proposal:
        expects, row = posterior.expected_outcome(m), int(posterior.rows_m[m])
        figures = (describe_expected(posterior, m), f"P(success) {posterior.p_success_m[m]:.0%}")
        size = f"{view.space.num_accelerators_N[row]} accelerators"
        rationale = f"largest expected gain of the Pareto front, on {size}: {', '.join(filter(None, figures))}"
        return Proposal(view.space.config(row), self.name, rationale, expects)


def _choose(view: SearchView, posterior: CandidatePosterior, sizes_S: NDArray[np.int64], count: int) -> list[int]:
    """Return up to `count` candidates by utility; each chosen one counts as running for the next."""
    at_m = np.searchsorted(sizes_S, view.space.num_accelerators_N[posterior.rows_m])
    incumbent_kS = _find_incumbents(view, posterior, sizes_S, at_m)
    width_m, penalty, free = _strip_widths(sizes_S)[at_m], failure_penalty(view), np.ones(len(at_m), dtype=bool)
    chosen: list[int] = []
    for _ in range(min(count, len(at_m))):
        gain_m = np.where(free, width_m * expected_improvement(posterior, incumbent_kS[:, at_m]), 0.0)
        m = int(np.argmax(np.where(free, posterior.utility_m(gain_m, penalty), -np.inf)))
        free[m] = False
        chosen.append(m)
        reached_k = posterior.mean_km[:, m] + 0.5 * posterior.sd_km[:, m]
        incumbent_kS[:, at_m[m] :] = np.minimum(incumbent_kS[:, at_m[m] :], reached_k[:, None])
    return chosen


def _find_incumbents(
    view: SearchView, posterior: CandidatePosterior, sizes_S: NDArray[np.int64], at_m: NDArray[np.int64]
) -> Array:
    """(k, S) loss that a trial of each size must beat: the best or a running one of all sizes up to it.

    Until a trial of the size or a smaller one succeeds: the expected loss of a candidate that is likely to count.
    """
    # Its probability of failure is not added as in a search of one size: the less likely a size is to run at all, the
    # more its trials would seem to gain, and one after another fail.
    ranks_N, safe_m = view.space.num_accelerators_N, find_safe_loss(posterior)
    order_m = np.argsort(safe_m, kind="stable")
    first_S = [next((m for m in order_m if at_m[m] == s), None) for s in range(len(sizes_S))]
    best_S = np.array([np.inf if m is None else posterior.mean_m[m] + FIRST_MARGIN for m in first_S])
    losses = [(ranks_N[o.row], np.log(o.loss)) for o in view.observations if o.loss and o.row is not None]
    measured_S = np.array([min((loss for n, loss in losses if n <= size), default=np.inf) for size in sizes_S])
    incumbent_kS = np.tile(np.where(np.isfinite(measured_S), measured_S, best_S), (len(posterior.weight_k), 1))
    for p, row in enumerate(sorted(view.pending)):
        first = int(np.searchsorted(sizes_S, ranks_N[row]))
        incumbent_kS[:, first:] = np.minimum(incumbent_kS[:, first:], posterior.pending_kp[:, p, None])
    return incumbent_kS


def _strip_widths(sizes_S: NDArray[np.int64]) -> Array:
    """(S,) log distance from each size to the next larger one over their mean; the last gets the mean."""
    steps = np.diff(np.log(sizes_S.astype(np.float64)))
    return np.asarray(np.append(steps, steps.mean()) / steps.mean())


def _aim_at_primary(view: SearchView) -> SearchView:
    """Return the view of a search for the primary metric with the same constraints."""
    target = single_metric(view.primary).model_copy(update={"constraints": view.objective.constraints})
    seen = [o for o in view.observations if o.loss is None or view.primary.name in o.metrics]
    observations = [replace(o, loss=None if o.loss is None else target.loss(o.metrics)) for o in seen]
    return replace(view, observations=tuple(observations), target=target)
