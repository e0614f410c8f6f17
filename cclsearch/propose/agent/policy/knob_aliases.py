"""Maps keys and values of a policy program to knobs and choices, with common aliases."""

from __future__ import annotations

import re

from cclsearch.core.values import Value
from cclsearch.propose.agent.tools.configs import read_value
from cclsearch.space.knobs import canonical_name
from cclsearch.space.table import Knob, Space

_YES = {"full", "true", "yes", "on", "enabled", "enable"}
_NO = {"none", "false", "no", "off", "disabled", "disable"}
"""Words that frameworks and published policies use instead of a boolean."""
_COMPILE_MODES = {"inductor": True, "eager": False}


def find_knob(space: Space, key: str) -> Knob | None:
    """The knob with that name, here or in another framework; None if there is none."""
    plain = re.sub(r"[\s.\-]+", "_", key.strip()).lower().lstrip("_")
    lowered = {knob.name.lower(): knob for knob in space.knobs}
    exact = next((knob for knob in space.knobs if knob.name == key), None)
    return exact or lowered.get(plain) or space.find(canonical_name(plain))


def find_choice(knob: Knob, value: object) -> Value | None:
    """The choice that was meant (a boolean means `full` / `none`, and vice versa); None if there is none."""
    found = read_value(knob, value)
    if found is not None:
        return found
    if isinstance(value, str):
        word = value.strip().lower()
        if word in _YES | _NO:
            return _find_boolean_choice(knob, word in _YES)
        return _COMPILE_MODES.get(word) if _is_boolean(knob) else _find_number_choice(knob, word)
    if isinstance(value, bool):
        return _find_boolean_choice(knob, value)
    # `int(tp > 1)` is accepted for a boolean knob; the reverse is not: `tp: True` is a mistake.
    return value == 1 if value in (0, 1) and _is_boolean(knob) else None


def _find_boolean_choice(knob: Knob, value: bool) -> Value | None:
    if _is_boolean(knob):
        return value
    if knob.name == "zero_stage":
        # A framework with one kind of sharding has a boolean for it.
        stages = sorted(choice for choice in knob.choices if isinstance(choice, int))
        return stages[-1] if value and len(stages) == 2 else 0 if not value and 0 in stages else None
    return read_value(knob, "full" if value else "none")


def _is_boolean(knob: Knob) -> bool:
    return all(isinstance(choice, bool) for choice in knob.choices)


def _find_number_choice(knob: Knob, word: str) -> Value | None:
    try:
        return read_value(knob, float(word))
    except ValueError:
        return None
