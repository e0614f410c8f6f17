"""The default strategy: expected improvement under plausible models of the step time, times P(success)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.special import ndtr

from cclsearch.plugins import PROPOSERS
from cclsearch.propose.base import Proposal, SearchView
from cclsearch.propose.bayes.surrogate import CandidatePosterior, fit_posterior
from cclsearch.tasks.training.layout import Array
from cclsearch.tasks.training.prediction import Priors

MIN_FAILURE_PENALTY, MAX_FAILURE_PENALTY = 0.001, 0.05
"""Cost of a failed trial, in units of relative improvement: if little can be gained, the safe choice wins."""
FAILED_SHARE = 0.1
"""Share of a search's trials that may fail before the penalty rises."""
MIN_P_SUCCESS = 0.02
"""If no untried configuration is at least this likely to succeed, nothing is proposed."""
FIRST_MARGIN = 0.15
"""Before the first success, the incumbent is the best expected loss plus this (log units)."""


@PROPOSERS.register("default")
class DefaultProposer:
    """Calibrates the parts of the step time on the trials and proposes the configuration of the highest utility."""

    name = "default"

    def __init__(self, priors: Priors | None = None) -> None:
        self._priors = priors

    def propose(self, view: SearchView, count: int) -> Sequence[Proposal]:
        """Return the `count` configurations of the highest utility, as one batch; none if nothing is feasible."""
        posterior = fit_posterior(view, self._priors)
        if posterior is None or has_nothing_feasible(posterior):
            return ()
        return [
            self._propose_row(view, posterior, m, improvement)
            for m, improvement in choose_batch(posterior, count, failure_penalty(view))
        ]

    def _propose_row(self, view: SearchView, posterior: CandidatePosterior, m: int, improvement: float) -> Proposal:
        expects = posterior.expected_outcome(m)
        rationale = f"expected {expects.step_time_s:.3g} s, P(success) {posterior.p_success_m[m]:.0%}"
        if posterior.best is not None and view.objective == "step_time":
            rationale += f", expected improvement {improvement:.2%}"
        return Proposal(view.space.config(int(posterior.rows_m[m])), self.name, rationale, expects)


def has_nothing_feasible(posterior: CandidatePosterior) -> bool:
    """Return whether a trial has succeeded and every untried configuration will almost surely fail."""
    return posterior.best is not None and float(posterior.p_success_m.max()) < MIN_P_SUCCESS


def failure_penalty(view: SearchView) -> float:
    """Return the cost of one more failure: 10 times higher per failure beyond `FAILED_SHARE` of the trials, with a cap.

    Trials that an LLM chose against the surrogate's advice (`overruled`) do not count.
    """
    own = [o for o in view.observations if o.row not in view.overruled]
    failed = sum(o.failure is not None for o in own)
    allowed = FAILED_SHARE * (len(own) + view.budget_left)
    return float(min(MIN_FAILURE_PENALTY * 10 ** max(0.0, failed + 1 - allowed), MAX_FAILURE_PENALTY))


def choose_batch(posterior: CandidatePosterior, count: int, penalty: float) -> list[tuple[int, float]]:
    """Return up to `count` candidate indices with their expected improvement, chosen one after another.

    Each chosen candidate counts as running: it lowers the incumbent by its expected loss.
    """
    incumbent_k = incumbent(posterior)
    chosen: list[tuple[int, float]] = []
    free = np.ones(len(posterior.rows_m), dtype=bool)
    for _ in range(min(count, len(posterior.rows_m))):
        gain_m = expected_improvement(posterior, incumbent_k)
        utility = np.where(free, gain_m * posterior.p_success_m - penalty * (1 - posterior.p_success_m), -np.inf)
        m = int(np.argmax(utility))
        free[m] = False
        chosen.append((m, float(gain_m[m])))
        incumbent_k = np.minimum(incumbent_k, posterior.mean_km[:, m] + 0.5 * posterior.sd_km[:, m])
    return chosen


def incumbent(posterior: CandidatePosterior) -> Array:
    """(k,) loss that a new trial must beat in each model: the best so far, or that of a running trial if lower."""
    if posterior.best is not None:
        incumbent_k = np.full(len(posterior.weight_k), posterior.best)
    else:
        # a row counts as up to e^3 slower by its probability of failure, so that the incumbent is one likely to run
        failing = 3.0 * (1 - posterior.p_success_m)
        incumbent_k = np.full(len(posterior.weight_k), float(np.min(posterior.mean_m + failing)) + FIRST_MARGIN)
    return np.minimum(incumbent_k, posterior.pending_kp.min(axis=1)) if posterior.pending_kp.shape[1] else incumbent_k


def expected_improvement(posterior: CandidatePosterior, incumbent_k: Array) -> Array:
    """(m,) expected improvement, averaged over the models, in units of the loss scale (Jones et al. 1998, eq. 15)."""
    z = (incumbent_k[:, None] - posterior.mean_km) / posterior.sd_km
    density = np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi)
    return np.asarray(posterior.weight_k @ (posterior.sd_km * (z * ndtr(z) + density)))
