"""Describe the latest trials beside their predictions, and the surrogate's next choice with its reasons, in lines."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from cclsearch.propose.agent.prompt.row_facts import compare_parts
from cclsearch.propose.agent.tools.configs import format_config
from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.bayes.ensemble import predict_without
from cclsearch.propose.bayes.snapshot import find_gain
from cclsearch.propose.bayes.surrogate import CandidatePosterior
from cclsearch.stats.closed_form import Prediction, predict_space

# Each needs a fit without it.
NUM_REVIEWED = 3
"""Number of latest trials that are compared with predictions."""
MIN_MEASURED = 2
"""Number of measured trials from which each is predicted from the others."""
NUM_DIFFERENCES = 3
"""Parts of the closed form that explain why one configuration is predicted better than another."""


def review_trials(view: SearchView, posterior: CandidatePosterior, order: Sequence[int]) -> tuple[str, ...]:
    """Return the latest trials beside their predictions, the latest first, then the surrogate's next choice."""
    prediction = predict_space(view.card, view.space, view.predictor)
    latest = sorted((o for o in view.observations if o.row is not None), key=lambda o: -o.trial)[:NUM_REVIEWED]
    lines = [_review(view, posterior, prediction, o) for o in latest]
    return (*lines, *_describe_next(view, posterior, prediction, order))


def _review(view: SearchView, posterior: CandidatePosterior, prediction: Prediction | None, o: Observation) -> str:
    metric, value, row = view.primary, o.value(view.primary.name), o.row
    assert row is not None
    closed_form = None if prediction is None else float(prediction.value_N[row])
    if value is None:
        memory = "" if prediction is None else f"; closed form: P(fits) {prediction.fits_N[row]:.2f}"
        return f"trial {o.trial}: {o.failure.kind.value if o.failure else 'not admitted'}{memory}"
    parts = [f"trial {o.trial}: measured {metric.show(value)}"]
    if closed_form:
        parts.append(f"closed form before any trial {metric.show(closed_form)} (x{value / closed_form:.2f} of it)")
    if sum(o.value(metric.name) is not None for o in view.observations) >= MIN_MEASURED:
        mean, sd = predict_without(row, posterior.models.primary, posterior.models.view.observations, ())
        expected = math.exp(metric.sign * mean)
        away = (metric.sign * math.log(value) - mean) / sd
        parts.append(f"the surrogate without it {metric.show(expected)} (x{value / expected:.2f}, {away:+.1f} sd)")
    return "; ".join(parts)


def _describe_next(
    view: SearchView, posterior: CandidatePosterior, prediction: Prediction | None, order: Sequence[int]
) -> list[str]:
    """Describe the surrogate's next choice, its gain and its chance, and the parts that make it better than the best
    trial.
    """
    where = {int(row): m for m, row in enumerate(posterior.rows_m)}
    if not order or order[0] not in where:
        return []
    row = order[0]
    m = where[row]
    text = f"it would run next: {format_config(view.space, view.space.config(row))}"
    if posterior.best is not None:
        gain = find_gain(posterior, np.array([m]))
        text += f", with P(success) {posterior.p_success_m[m]:.2f}, expected improvement {gain:.2%} of the best"
    ranked = [o for o in view.observations if o.loss is not None and o.row is not None]
    best = min(ranked, key=lambda o: o.loss or 0.0, default=None)
    if best is not None and prediction is not None:
        differences = compare_parts(prediction, row, best.row or 0, NUM_DIFFERENCES)
        text += f"; closed form of it less that of the best: {differences}" if differences else ""
    return [text]
