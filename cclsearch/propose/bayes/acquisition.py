"""The acquisition function: expected improvement times P(success), less a penalty for a failed trial.

Only candidates whose gain times chance is a fair share of the largest are compared (`CandidatePosterior.utility_m`).
"""

from __future__ import annotations

import numpy as np
from scipy.special import ndtr

from cclsearch.propose.base import SearchView
from cclsearch.propose.bayes.surrogate import CandidatePosterior
from cclsearch.propose.observations import count_failures
from cclsearch.stats.kernel import Array

# If little can be gained, the safe choice wins.
MIN_FAILURE_PENALTY, MAX_FAILURE_PENALTY = 0.001, 0.05
"""Cost of a failed trial, in units of relative improvement."""
FAILED_SHARE = 0.1
"""Share of a search's trials that may fail before the penalty rises."""
MIN_P_SUCCESS = 0.02
"""P(success) below which no untried configuration is proposed."""
FIRST_MARGIN = 0.15
"""Before the first success, the incumbent is the best expected loss plus this (log units)."""


def has_nothing_feasible(posterior: CandidatePosterior) -> bool:
    """Return whether a trial has succeeded and every untried configuration will almost surely fail."""
    return posterior.best is not None and float(posterior.p_success_m.max()) < MIN_P_SUCCESS


def failure_penalty(view: SearchView) -> float:
    """Return the cost of one more failure: 10 times higher per failure beyond `FAILED_SHARE` of the trials, capped."""
    # The LLM's trials (`llm_rows`) do not count: a careless LLM must not make the surrogate too cautious.
    own, failed = count_failures(view.observations, view.llm_rows)
    allowed = FAILED_SHARE * (own + view.budget_left)
    return float(min(MIN_FAILURE_PENALTY * 10 ** max(0.0, failed + 1 - allowed), MAX_FAILURE_PENALTY))


def choose_batch(
    posterior: CandidatePosterior, count: int, penalty: float, *, is_won: bool = False
) -> list[tuple[int, float]]:
    """Return up to `count` candidate indices with their expected improvement, chosen one after another.

    Each chosen candidate counts as running: it lowers the incumbent by its expected loss. `is_won`: none of them is
    likely to win.
    """
    incumbent_k = incumbent(posterior)
    chosen: list[tuple[int, float]] = []
    free = np.ones(len(posterior.rows_m), dtype=bool)
    for _ in range(min(count, len(posterior.rows_m))):
        gain_m = np.where(free, expected_improvement(posterior, incumbent_k), 0.0)
        utility = np.where(free, posterior.utility_m(gain_m, penalty, is_won=is_won), -np.inf)
        m = int(np.argmax(utility))
        free[m] = False
        chosen.append((m, float(gain_m[m])))
        incumbent_k = np.minimum(incumbent_k, posterior.mean_km[:, m] + 0.5 * posterior.sd_km[:, m])
    return chosen


def incumbent(posterior: CandidatePosterior) -> Array:
    """(k,) loss that a new trial must beat in each model: the best so far, or a running trial's if lower."""
    if posterior.best is not None:
        incumbent_k = np.full(len(posterior.weight_k), posterior.best)
    else:
        incumbent_k = np.full(len(posterior.weight_k), float(np.min(find_safe_loss(posterior))) + FIRST_MARGIN)
    return np.minimum(incumbent_k, posterior.pending_kp.min(axis=1)) if posterior.pending_kp.shape[1] else incumbent_k


def find_safe_loss(posterior: CandidatePosterior) -> Array:
    """(m,) expected loss, up to e^3 worse by the probability of failure: the best is one likely to count."""
    return np.asarray(posterior.mean_m + 3.0 * (1 - posterior.p_valid_m))


def expected_improvement(posterior: CandidatePosterior, incumbent_k: Array) -> Array:
    """(m,) expected improvement, averaged over the models, in units of the loss scale (Jones et al. 1998, eq. 15).

    The incumbent is one for all candidates, or has one column for each.
    """
    z = (incumbent_k.reshape(len(incumbent_k), -1) - posterior.mean_km) / posterior.sd_km
    density = np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi)
    return np.asarray(posterior.weight_k @ (posterior.sd_km * (z * ndtr(z) + density)))
