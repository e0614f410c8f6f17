"""Refines the predictor by a simulation of the rows that look best, if the task has one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.bayes.candidates import rank_rows, select_window
from cclsearch.propose.bayes.models import MetricModels
from cclsearch.stats.closed_form import Predictor


def refine_predictor(
    view: SearchView, predictor: Predictor, earlier: tuple[Observation, ...], wanted: NDArray[np.int64] | None = None
) -> Predictor:
    """Return the predictor, corrected by a simulation of the rows that look best; itself if there is none.

    Multipliers and rows are from after the first 1, 2, 4, ... trials, so that most proposals find it done; rows that
    were tried until then come first, since later trials are compared with them. Others than `wanted` come last.
    """
    if predictor.refine is None:
        return predictor
    count = len(view.observations)
    first = 1 << (count.bit_length() - 1) if count else 0
    then = replace(view, observations=select_window(view.observations[:first]))
    models = MetricModels(then, predictor, earlier)
    thetas = {metric: models.ensemble(metric).most_likely.theta_P for metric in predictor.forms}
    tried = np.array([o.row for o in then.observations if o.row is not None], dtype=np.int64)
    ranked = rank_rows(models, then, predictor)
    if wanted is not None:
        ranked = ranked[np.argsort(~np.isin(ranked, wanted), kind="stable")]
    return predictor.refine(predictor, thetas, _join(tried, ranked))


def _join(tried: NDArray[np.int64], ranked: NDArray[np.int64]) -> NDArray[np.int64]:
    rows = np.concatenate([tried, ranked])
    return rows[np.sort(np.unique(rows, return_index=True)[1])]
