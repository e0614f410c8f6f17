"""Hints of the LLM about a framework ("the pipeline is slow"), applied as shifts of the surrogate's prior.

A hint moves the prior mean of a part's log multipliers by at most one standard deviation of that prior, and by half as
much after every `HALF_LIFE` trials. So measurements override it, right or wrong, unless it is repeated. The hints are
kept in the ledger's LLM turns.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from cclsearch.propose.base import SearchView
from cclsearch.propose.events import LlmTurn
from cclsearch.stats.closed_form import Predictor

LEVELS: Mapping[str, float] = MappingProxyType(
    {"much_faster": -1.0, "faster": -0.5, "as_predicted": 0.0, "slower": 0.5, "much_slower": 1.0}
)
"""How a part compares with the closed form -> shift of its prior, in standard deviations."""

HALF_LIFE = 3.0
"""Trials after which a hint has half its weight."""

PriorHints = Mapping[str, str]
"""Part -> level; only names from `Predictor.hint_parts` and `LEVELS`."""


def parse_hints(raw: object, parts: Collection[str]) -> dict[str, str]:
    """Return the items `{"part": ..., "is": ...}` with one of these parts and a known level; ignores others."""
    items = raw if isinstance(raw, list) else []
    found = {}
    for item in items[: len(parts) * len(LEVELS)]:
        part, level = (item.get("part"), item.get("is")) if isinstance(item, Mapping) else (None, None)
        if isinstance(part, str) and isinstance(level, str) and part in parts and level in LEVELS:
            found[part] = level
    return found


@dataclass(frozen=True)
class ActiveHint:
    """The latest hint about a part, with its present weight."""

    level: str
    weight: float
    """1 when it was given, 0.5 after `HALF_LIFE` trials."""


def collect_hints(view: SearchView) -> dict[str, ActiveHint]:
    """Return the latest hint about each part, with its weight after the trials since."""
    hints: dict[str, ActiveHint] = {}
    for event in view.events:
        if isinstance(event, LlmTurn):
            weight = 0.5 ** (max(0, len(view.observations) - event.num_seen) / HALF_LIFE)
            given = event.beliefs
            hints |= {
                part: ActiveHint(given[part], weight) for part in view.predictor.hint_parts if given.get(part) in LEVELS
            }
    return hints


def apply_hints(predictor: Predictor, view: SearchView) -> Predictor:
    """Return the predictor with the primary metric's prior shifted by the hints that proposers gave in this search."""
    hints = collect_hints(view)
    if not hints:
        return predictor
    form = predictor.form(view.primary)
    shift_P = np.zeros(len(form.multipliers))
    for part, hint in hints.items():
        for name, sign in predictor.hint_parts[part].items():
            at = form.multipliers.index(name)
            shift_P[at] = sign * LEVELS[hint.level] * hint.weight * form.prior.sd_P[at]
    shifted = replace(form, prior=replace(form.prior, mean_P=form.prior.mean_P + shift_P))
    return replace(predictor, forms={**predictor.forms, view.primary.name: shifted})
