"""A mixture of a closed form and of variants that the LLM proposed: each is a group of hypotheses with a weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp, softmax

from cclsearch.propose.observations import Observation
from cclsearch.stats.calibration import ParametricModel, Posterior, RowModel, weigh_hypotheses
from cclsearch.stats.closed_form import Cells, ClosedForm, Loads
from cclsearch.stats.kernel import Array

MIN_WEIGHT = 0.01
"""A correction with less weight is left out of the mixture."""
Fit = Callable[[ClosedForm, Sequence[Observation]], tuple[Sequence[Posterior], Sequence[float]]]
"""A closed form and trials -> its hypotheses, with their log probabilities up to a constant of the trials."""


@dataclass(frozen=True, eq=False)
class Variant:
    """The closed form with some corrections."""

    labels: tuple[str, ...]
    """Labels of its corrections."""
    shift_N: Array
    """Log factor of each row's cost."""
    log_odds: float
    """Log of its weight over that of the form without corrections, before trials that its author had not seen."""
    last_seen: int

    def shift(self, form: ClosedForm) -> ClosedForm:
        """Return the form with these factors."""
        return shift_form(form, self.shift_N)

    def knows(self, observations: Sequence[Observation]) -> list[Observation]:
        """Return the trials that its author had seen, and later ones of the same configurations."""
        rows = {o.row for o in observations if o.trial <= self.last_seen}
        return [o for o in observations if o.trial <= self.last_seen or o.row in rows]


class Mixed(NamedTuple):
    """The hypotheses of a mixture."""

    hypotheses: tuple[Posterior, ...]
    weight_h: Array
    shares: tuple[tuple[Variant | None, float], ...]
    """The variants that count, and None for the closed form without corrections, with their weights."""


def _shift_model(model: ParametricModel, shift_N: Array) -> ParametricModel:
    """Return the model of the log of a metric with these additions to it."""

    def shifted(rows: NDArray[np.int64]) -> RowModel:
        plain, shift_m = model(rows), shift_N[rows]
        return lambda theta: np.asarray(plain(theta) + shift_m)

    return shifted


def shift_form(form: ClosedForm, shift_N: Array) -> ClosedForm:
    """Return the form with the cost of each row times the exponential of this."""
    split = form.split

    def split_all(theta_P: Array) -> Mapping[str, Array]:
        assert split is not None
        return {part: cost_N * np.exp(shift_N) for part, cost_N in split(theta_P).items()}

    return replace(form, log_cost=_shift_model(form.log_cost, shift_N), split=split_all if split else None)


def shift_loads(loads: Loads, shift_N: Array) -> Loads:
    """Return the loads with the same of each row's cost: a dearer token takes longer, at the same load."""

    def build(rows: NDArray[np.int64], loads_n: Array) -> Cells:
        cells = loads.build(rows, loads_n)
        models = {name: _shift_model(model, shift_N[rows]) for name, model in cells.models.items()}
        return replace(cells, models=models)

    return replace(loads, build=build)


def mix_forms(
    fit: Fit, form: ClosedForm, variants: Sequence[Variant], observations: Sequence[Observation], least: float
) -> Mixed:
    """Return the hypotheses of the form and of its variants; of each, those with a weight of at least `least`."""
    plain = fit(form, observations)
    own, weight_h = weigh_hypotheses(*plain, least)
    groups, scores = [(own, weight_h)], [0.0]
    for variant in variants:
        shifted, seen = variant.shift(form), variant.knows(observations)
        fitted = fit(shifted, observations)
        gain = known = float(logsumexp(fitted[1]) - logsumexp(plain[1]))
        if len(seen) < len(observations):
            known = float(logsumexp(fit(shifted, seen)[1]) - logsumexp(fit(form, seen)[1]))
        # what its author had seen counts only against it
        scores.append(variant.log_odds + gain - max(known, 0.0))
        groups.append(weigh_hypotheses(*fitted, least))
    share = softmax(scores)
    share[1:][share[1:] < MIN_WEIGHT] = 0.0
    share /= share.sum()
    kept = [n for n in range(len(groups)) if share[n] > 0]
    hypotheses = tuple(hypothesis for n in kept for hypothesis in groups[n][0])
    weights = np.concatenate([share[n] * groups[n][1] for n in kept])
    named: list[Variant | None] = [None, *variants]
    return Mixed(hypotheses, weights, tuple((named[n], float(share[n])) for n in kept))


def weigh_labels(shares: Sequence[tuple[Variant | None, float]]) -> dict[str, float]:
    """Return label of a correction -> the weight of the variants with it."""
    found: dict[str, float] = {}
    for variant, share in shares:
        for label in variant.labels if variant else ():
            found[label] = found.get(label, 0.0) + share
    return found
