"""The objective's constraints: the chance of each candidate to satisfy them, and its expected excess.

A trial that violates a constraint is a valid measurement: it teaches every model, and is not a failure.
"""

from __future__ import annotations

import numpy as np
from scipy.special import ndtr, ndtri

from cclsearch.propose.bayes.excess import find_bounds, log_excess
from cclsearch.propose.bayes.loads import LoadDraws
from cclsearch.propose.bayes.models import Drawn, Draws
from cclsearch.scoring.objective import Constraint
from cclsearch.stats.kernel import Array

QUANTILES_Q = ndtri((np.arange(16) + 0.5) / 16)
"""Standard normal quantiles over which an expectation is averaged."""
MAX_LOG = 300.0


def judge_constraints(draws: Draws, counted: LoadDraws | None = None) -> tuple[Array, Array]:
    """(m,) P(all constraints are satisfied), and (m,) expected log of 1 + excess over them.

    `counted` has judged the limits of the load that counts, if trials measure several. A constraint on a metric that
    no closed form predicts and no trial has measured is ignored.
    """
    p_m, excess_m = np.ones(len(draws.rows)), np.zeros(len(draws.rows))
    if counted is not None:
        p_m, excess_m = counted.satisfies_km.mean(axis=0), counted.excess_km.mean(axis=0)
    for constraint in draws.models.view.objective.constraints:
        if counted is not None and constraint.metric in counted.limited:
            continue
        drawn, is_log = draws.find(constraint.metric)
        if drawn is not None:
            p_m *= _p_satisfies(constraint, drawn, is_log)
            excess_m += _expected_excess(constraint, drawn, is_log)
    return p_m, excess_m


def _p_satisfies(constraint: Constraint, drawn: Drawn, is_log: bool) -> Array:
    low, high = (_log(bound) if is_log else bound for bound in find_bounds(constraint))
    p_km = ndtr((high - drawn.mean_km) / drawn.sd_km) - ndtr((low - drawn.mean_km) / drawn.sd_km)
    return np.asarray(drawn.weight_k @ p_km)


def _log(bound: float) -> float:
    return float(np.log(bound)) if bound > 0 else -np.inf


def _expected_excess(constraint: Constraint, drawn: Drawn, is_log: bool) -> Array:
    """(m,) expected log of 1 + `Constraint.excess`, with one normal distribution in place of the models."""
    mean_m = drawn.weight_k @ drawn.mean_km
    variance_m = drawn.weight_k @ (drawn.sd_km**2 + drawn.mean_km**2) - mean_m**2
    value_mQ = mean_m[:, None] + np.sqrt(np.maximum(variance_m, 0.0))[:, None] * QUANTILES_Q
    value_mQ = np.exp(np.minimum(value_mQ, MAX_LOG)) if is_log else value_mQ
    return np.asarray(log_excess(constraint, value_mQ).mean(axis=1))
