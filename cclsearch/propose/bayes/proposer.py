"""The default strategy: expected improvement under plausible models of the step time, times the chance of success."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.special import ndtr

from cclsearch.plugins import PROPOSERS
from cclsearch.propose.base import ExpectedOutcome, Proposal, SearchView
from cclsearch.propose.bayes.surrogate import CandidatePosterior, fit_posterior
from cclsearch.tasks.training.layout import Array
from cclsearch.tasks.training.prediction import Priors

MIN_FAILURE_PENALTY, MAX_FAILURE_PENALTY = 0.001, 0.05
"""What a failed trial costs, in units of relative improvement: where little is to be gained, the safe choice wins."""
FAILED_SHARE = 0.1
"""Share of a search's trials that may fail before failures grow dear."""
MIN_P_SUCCESS = 0.02
"""Where no open configuration is at least this likely to succeed, the search has nothing more to ask."""
FIRST_MARGIN = 0.15
"""Before anything has succeeded, improvement is over this much more than the best that is expected (log units)."""


@PROPOSERS.register("default")
class DefaultProposer:
    """Learns the parts of the step time from the trials, and asks for the one that promises most."""

    name = "default"

    def __init__(self, priors: Priors | None = None) -> None:
        self._priors = priors

    def propose(self, view: SearchView, count: int) -> Sequence[Proposal]:
        """The `count` members that promise most, each given what the ones before it are expected to show."""
        posterior = fit_posterior(view, self._priors)
        if posterior is None or has_nothing_feasible(posterior):
            return ()
        return [
            self._propose_row(view, posterior, m, gain)
            for m, gain in choose_batch(posterior, count, failure_penalty(view))
        ]

    def _propose_row(self, view: SearchView, posterior: CandidatePosterior, m: int, gain: float) -> Proposal:
        expects = ExpectedOutcome(
            step_time_s=float(np.exp(posterior.log_time_m[m])),
            peak_memory_gib=float(posterior.memory_gib_m[m]),
            fits=float(posterior.p_fits_m[m]),
        )
        rationale = f"{expects.step_time_s:.3g} s expected, {posterior.p_success_m[m]:.0%} to succeed"
        if posterior.best is not None and view.objective == "step_time":
            rationale += f", expected improvement {gain:.2%}"
        return Proposal(view.space.config(int(posterior.rows_m[m])), self.name, rationale, expects)


def has_nothing_feasible(posterior: CandidatePosterior) -> bool:
    """Whether something has succeeded and all that is left will almost surely fail: a trial would only burn time."""
    return posterior.best is not None and float(posterior.p_success_m.max()) < MIN_P_SUCCESS


def failure_penalty(view: SearchView) -> float:
    """What one more failure costs: tenfold for each one beyond the share that a search may spend on learning limits.

    What others tried against this strategy's advice does not make it timid.
    """
    own = [o for o in view.observations if o.row not in view.overruled]
    failed = sum(o.failure is not None for o in own)
    allowed = FAILED_SHARE * (len(own) + view.budget_left)
    return float(min(MIN_FAILURE_PENALTY * 10 ** max(0.0, failed + 1 - allowed), MAX_FAILURE_PENALTY))


def choose_batch(posterior: CandidatePosterior, count: int, price: float) -> list[tuple[int, float]]:
    """Positions among the candidates with their gain, one after another; each is told what the others would show."""
    incumbent_k = incumbent(posterior)
    chosen: list[tuple[int, float]] = []
    free = np.ones(len(posterior.rows_m), dtype=bool)
    for _ in range(min(count, len(posterior.rows_m))):
        gain = expected_improvement(posterior, incumbent_k)
        utility = np.where(free, gain * posterior.p_success_m - price * (1 - posterior.p_success_m), -np.inf)
        m = int(np.argmax(utility))
        free[m] = False
        chosen.append((m, float(gain[m])))
        incumbent_k = np.minimum(incumbent_k, posterior.mean_km[:, m] + 0.5 * posterior.sd_km[:, m])
    return chosen


def incumbent(posterior: CandidatePosterior) -> Array:
    """(k,) what each model takes a new trial to have to beat: the best so far, or what runs now if that is better."""
    if posterior.best is not None:
        incumbent_k = np.full(len(posterior.weight_k), posterior.best)
    else:
        doomed = 3.0 * (1 - posterior.p_success_m)
        incumbent_k = np.full(len(posterior.weight_k), float(np.min(posterior.mean_m + doomed)) + FIRST_MARGIN)
    return np.minimum(incumbent_k, posterior.pending_kp.min(axis=1)) if posterior.pending_kp.shape[1] else incumbent_k


def expected_improvement(posterior: CandidatePosterior, incumbent_k: Array) -> Array:
    """(m,) expected improvement over the models, in units of the scale (Jones et al. 1998, eq. 15)."""
    z = (incumbent_k[:, None] - posterior.mean_km) / posterior.sd_km
    density = np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi)
    return np.asarray(posterior.weight_k @ (posterior.sd_km * (z * ndtr(z) + density)))
