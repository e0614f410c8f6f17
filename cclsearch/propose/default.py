"""The default strategy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.special import ndtr

from cclsearch.plugins import PROPOSERS
from cclsearch.predict.layout import Array
from cclsearch.predict.model import Priors
from cclsearch.propose.base import Expectation, Proposal, SearchView
from cclsearch.propose.surrogate import believe


def expected_improvement(mean: Array, sd: Array, best: float) -> Array:
    """(m,) expected decrease below `best` of normal beliefs (Jones et al. 1998, eq. 15)."""
    z = (best - mean) / sd
    return np.asarray(sd * (z * ndtr(z) + np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi)))


FAILURE_PRICE = 0.01


@PROPOSERS.register("default")
class DefaultProposer:
    """Expected improvement under the calibrated closed form, times the probability that the trial works."""

    name = "default"

    def __init__(self, priors: Priors | None = None) -> None:
        self.priors = priors

    def propose(self, view: SearchView, count: int) -> Sequence[Proposal]:
        belief = believe(view, self.priors)
        if belief is None:
            return ()
        best = belief.best_log_loss
        if best is None:
            best = float(np.min(belief.mean_m + 3.0 * (1 - belief.works_m))) + 0.3
        gain = belief.weight_k @ expected_improvement(
            belief.mean_km, belief.sd_km, best
        ) * belief.works_m - FAILURE_PRICE * (1 - belief.works_m)
        row = int(np.argmax(gain))
        n = belief.rows_m[row]
        expects = Expectation(
            step_time_s=float(np.exp(belief.mean_m[row])),
            peak_memory_gib=float(belief.memory_gib_m[row]),
            fits=float(belief.fits_m[row]),
        )
        return [Proposal(view.space.config(int(n)), self.name, expects=expects)]
