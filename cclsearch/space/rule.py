"""The named constraints: each is one vectorised check over columns of knobs, and one sentence about a configuration.

A rule is made for a card (its numbers are bound then) and applied twice in the same form: to whole columns when the
space is enumerated, and to a single configuration when `explain` says why it is illegal. So the two never disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cclsearch.card.model import Card
from cclsearch.core.values import Value

BoolArray = NDArray[np.bool_]
Check = Callable[["Columns"], BoolArray]
Explain = Callable[[Mapping[str, Any]], str]

NEUTRAL: dict[str, Value] = {"zero_stage": 0, "sequence_parallel": False}
"""What a knob is worth where the space lacks it; 1 for every other."""


class Columns:
    """Values of N configurations by knob; a knob that the space lacks has its neutral value."""

    def __init__(self, values: Mapping[str, NDArray[Any]], size: int) -> None:
        self._values = values
        self.size = size

    def __getitem__(self, knob: str) -> NDArray[np.int64]:
        """(N,) whole numbers; truth is 1."""
        if knob in self._values:
            return self._values[knob].astype(np.int64)
        return np.full(self.size, int(NEUTRAL.get(knob, 1)), dtype=np.int64)

    def equals(self, knob: str, choices: tuple[Value, ...]) -> BoolArray:
        """(N,) whether the knob has one of these values (true is not 1)."""
        hits = (any(same_value(value, choice) for choice in choices) for value in self._values[knob].tolist())
        return np.fromiter(hits, bool, count=self.size)


@dataclass(frozen=True)
class Rule:
    """One constraint, bound to a card."""

    name: str
    knobs: tuple[str, ...]
    """The knobs that it looks at: it is applied as soon as those are enumerated. The first is its subject: a space
    without that knob has no use for the rule."""
    summary: str
    """What must hold, with the card's numbers."""
    check: Check
    explain: Explain
    """The sentence for one configuration, with its numbers."""
    needs_all: bool = False
    """Whether a space that lacks any of the knobs, and not only the first, has no use for the rule."""


RuleFactory = Callable[[Card, Mapping[str, Any]], Rule | None]
RULES: dict[str, RuleFactory] = {}
"""Name -> what makes the rule for a card and the framework's parameters; None where it does not apply to the card."""
PARAMETERS: dict[str, frozenset[str]] = {}
"""Name -> the parameters that a framework file may give."""
ALWAYS = (
    "num_accelerators",
    "tp_divides_heads",
    "tp_divides_kv_heads",
    "pp_at_most_layers",
    "accumulation_whole",
    "ep_divides_experts",
    "ep_inside_stage",
)
"""Rules that hold whatever the framework."""


def register_rule(name: str, *parameters: str) -> Callable[[RuleFactory], RuleFactory]:
    """Decorator: enter what makes a rule under its name, with the parameters that a framework file may give it."""

    def enter(maker: RuleFactory) -> RuleFactory:
        RULES[name] = maker
        PARAMETERS[name] = frozenset(parameters)
        return maker

    return enter


def same_value(left: Value, right: Value) -> bool:
    """Whether two values are the same choice (true is not 1)."""
    return isinstance(left, bool) == isinstance(right, bool) and left == right


def count_of(config: Mapping[str, Any], knob: str) -> int:
    """The knob's value in a configuration as a whole number; its neutral value where the space lacks it."""
    return int(config.get(knob, NEUTRAL.get(knob, 1)))
