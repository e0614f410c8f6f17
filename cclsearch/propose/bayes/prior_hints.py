"""What a proposer says it has learnt of a framework, as evidence for the surrogate: a shift of the prior of some parts.

A belief moves the prior mean of a part's log multipliers by at most one standard deviation of that prior, and by half
as much with every few trials since it was said: right or wrong, it gives way to what is measured unless it is said
again. The state is the ledger's remarks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from cclsearch.propose.base import SearchView
from cclsearch.stats.calibration import Prior
from cclsearch.tasks.training.time import MULTIPLIERS

KEY = "beliefs"
"""Where a remark's data holds them, as JSON: part -> level."""

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
"""Part of a step -> the multipliers that say how long it takes, with the sign in which slower moves them."""

LEVELS: Mapping[str, float] = MappingProxyType(
    {"much_faster": -1.0, "faster": -0.5, "as_predicted": 0.0, "slower": 0.5, "much_slower": 1.0}
)
"""How a part is to the closed form -> the shift of its prior, in standard deviations."""

HALF_LIFE = 3.0
"""Trials after which a belief counts half."""

PriorHints = Mapping[str, str]
"""Part -> level, members of `PARTS` and `LEVELS` only."""


def parse_hints(raw: object) -> dict[str, str]:
    """Those of the items `{"part": ..., "is": ...}` that name a known part and level; whatever else is left out."""
    items = raw if isinstance(raw, list) else []
    found = {}
    for item in items[: len(PARTS) * len(LEVELS)]:
        part, level = (item.get("part"), item.get("is")) if isinstance(item, Mapping) else (None, None)
        if isinstance(part, str) and isinstance(level, str) and part in PARTS and level in LEVELS:
            found[part] = level
    return found


@dataclass(frozen=True)
class ActiveHint:
    """A belief as it stands now."""

    level: str
    weight: float
    """1 when it is said, half of that after `HALF_LIFE` trials."""


def format_hints(beliefs: PriorHints, num_seen: int) -> str:
    """The beliefs as a remark's data keeps them, with the number of trials seen when they were said."""
    return json.dumps({"seen": num_seen, **beliefs}, separators=(",", ":")) if beliefs else ""


def collect_hints(view: SearchView) -> dict[str, ActiveHint]:
    """What is believed now: of each part the latest word."""
    held: dict[str, ActiveHint] = {}
    for event in view.remarks:
        raw = event.data.get(KEY)
        if isinstance(raw, str) and raw:
            said = json.loads(raw)
            weight = 0.5 ** (max(0, len(view.observations) - int(said.get("seen", 0))) / HALF_LIFE)
            held |= {part: ActiveHint(said[part], weight) for part in PARTS if said.get(part) in LEVELS}
    return held


def shift_prior(held: Mapping[str, ActiveHint], prior: Prior) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """(P,) what to add to the prior's mean log multipliers, in the order of `MULTIPLIERS`."""
    shift_P = np.zeros(len(MULTIPLIERS))
    for part, hint in held.items():
        for name, sign in PARTS[part].items():
            at = MULTIPLIERS.index(name)
            shift_P[at] = sign * LEVELS[hint.level] * hint.weight * prior.sd_P[at]
    return shift_P
