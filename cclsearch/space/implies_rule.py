"""The rule `implies`, by which a framework file states a constraint on any knobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cclsearch.card.model import Card
from cclsearch.core.values import Value
from cclsearch.space.rule import BoolArray, Columns, Rule, register_rule


@register_rule("implies", parameters=("name", "when", "then", "because"))
def _implies(card: Card, options: Mapping[str, Any]) -> Rule:
    """With the values `when`, a configuration needs the values `then`."""
    when = {knob: _listed(values) for knob, values in options["when"].items()}
    then = {knob: _listed(values) for knob, values in options["then"].items()}

    def check(at: Columns) -> BoolArray:
        applies = np.logical_and.reduce([at.equals(knob, values) for knob, values in when.items()])
        holds = np.logical_and.reduce([at.equals(knob, values) for knob, values in then.items()])
        return np.asarray(~applies | holds, dtype=bool)

    condition, demand = _clauses(when), _clauses(then)
    knobs = tuple(dict.fromkeys((*when, *then)))
    because = f": {options['because']}" if options.get("because") else ""
    return Rule(
        str(options["name"]),
        knobs,
        f"{condition} needs {demand}{because}",
        check,
        lambda c: ", ".join(f"{knob} {c[knob]}" for knob in knobs).lower(),
        needs=knobs,
    )


def _listed(values: Any) -> tuple[Value, ...]:
    return tuple(values) if isinstance(values, list) else (values,)


def _clauses(part: Mapping[str, tuple[Value, ...]]) -> str:
    return " and ".join(f"{knob}={'|'.join(str(v).lower() for v in values)}" for knob, values in part.items())
