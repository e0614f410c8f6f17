"""Hints of the LLM about a framework ("the pipeline is slow"), applied as shifts of the surrogate's prior.

A hint moves the prior mean of a part's log multipliers by at most one standard deviation of that prior, and by half as
much after every `HALF_LIFE` trials. So measurements override it, right or wrong, unless it is repeated. The hints are
kept in the ledger's LLM turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from cclsearch.propose.base import SearchView
from cclsearch.propose.events import LlmTurn
from cclsearch.stats.calibration import Prior
from cclsearch.tasks.training.time import MULTIPLIERS

PARTS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "pipeline": {"bubble": 1.0, "p2p": 1.0, "p2p_wait": 1.0, "imbalance": 1.0},
        "tensor_parallel_in_node": {"tp_scale_up": 1.0, "tp_wait": 1.0},
        "tensor_parallel_across_nodes": {"tp_scale_out": 1.0},
        "data_parallel": {"dp": 1.0, "dp_overlap": -1.0},
        "expert_parallel": {"expert_exchange": 1.0},
        "recomputation": {"recompute": 1.0},
        "launch_overhead": {"launch": 1.0},
        "optimizer": {"optimizer": 1.0},
    }
)
"""Part of a step -> its multipliers, each with the sign of its change if the part is slower."""

LEVELS: Mapping[str, float] = MappingProxyType(
    {"much_faster": -1.0, "faster": -0.5, "as_predicted": 0.0, "slower": 0.5, "much_slower": 1.0}
)
"""How a part compares with the closed form -> shift of its prior, in standard deviations."""

HALF_LIFE = 3.0
"""Trials after which a hint has half its weight."""

PriorHints = Mapping[str, str]
"""Part -> level; only names from `PARTS` and `LEVELS`."""


def parse_hints(raw: object) -> dict[str, str]:
    """Return the items `{"part": ..., "is": ...}` with a known part and level; ignores everything else."""
    items = raw if isinstance(raw, list) else []
    found = {}
    for item in items[: len(PARTS) * len(LEVELS)]:
        part, level = (item.get("part"), item.get("is")) if isinstance(item, Mapping) else (None, None)
        if isinstance(part, str) and isinstance(level, str) and part in PARTS and level in LEVELS:
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
            hints |= {part: ActiveHint(given[part], weight) for part in PARTS if given.get(part) in LEVELS}
    return hints


def shift_prior(hints: Mapping[str, ActiveHint], prior: Prior) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """(P,) shift of the prior's mean log multipliers, in the order of `MULTIPLIERS`."""
    shift_P = np.zeros(len(MULTIPLIERS))
    for part, hint in hints.items():
        for name, sign in PARTS[part].items():
            at = MULTIPLIERS.index(name)
            shift_P[at] = sign * LEVELS[hint.level] * hint.weight * prior.sd_P[at]
    return shift_P
