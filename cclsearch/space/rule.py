"""Rules of a search space: each is one vectorized check over columns of knobs and one sentence per configuration.

A rule is built for a card (with the card's numbers) and used in two ways: on whole columns when the space is
enumerated, and on a single configuration when `space explain` shows its verdict. So the two never disagree.
A framework file states further constraints with the rules `implies` and `divides`. `docs/rules.md` describes them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cclsearch.card.model import Card
from cclsearch.core.values import Value, format_knob_value
from cclsearch.space.knobs import meaning_of, stated_knobs

BoolArray = NDArray[np.bool_]
Check = Callable[["Columns"], BoolArray]
Explain = Callable[[Mapping[str, Any]], str]


class Columns:
    """Values of N configurations by knob; a knob that the space does not have gets its neutral value."""

    def __init__(self, values: Mapping[str, NDArray[Any]], size: int) -> None:
        self._values = values
        self.size = size

    def __getitem__(self, knob: str) -> NDArray[np.int64]:
        """(N,) whole numbers; true is 1."""
        if knob in self._values:
            return self._values[knob].astype(np.int64)
        return np.full(self.size, int(meaning_of(knob).neutral), dtype=np.int64)

    def product(self, knobs: Iterable[str]) -> NDArray[np.int64]:
        """(N,) product of these knobs."""
        return math.prod((self[knob] for knob in knobs), start=np.ones(self.size, dtype=np.int64))

    def texts(self, knob: str) -> list[str]:
        """(N,) values as text."""
        return [str(value) for value in self._values[knob].tolist()]

    def equals(self, knob: str, choices: tuple[Value, ...]) -> BoolArray:
        """(N,) whether the knob has one of these values (true is not 1)."""
        values = self._values[knob]
        if values.dtype.kind in "iub":
            alike = [choice for choice in choices if isinstance(choice, bool) == (values.dtype.kind == "b")]
            numbers = [choice for choice in alike if not isinstance(choice, str)]
            return np.isin(values, numbers) if numbers else np.zeros(self.size, dtype=bool)
        hits = (any(same_value(value, choice) for choice in choices) for value in values.tolist())
        return np.fromiter(hits, bool, count=self.size)


class RuleKind(StrEnum):
    """Why configurations that violate a rule are not in the search space. What is only unwise is predicted instead."""

    REFUSED = "refused"
    """The framework, or its run script, refuses them."""
    SAME = "same"
    """They do the same as another configuration, which is in the space."""
    ASKED = "asked"
    """The search does not use them as it was asked for."""


KIND_WORDS = {
    RuleKind.REFUSED: "refused by the framework",
    RuleKind.SAME: "the same as another configuration",
    RuleKind.ASKED: "not asked for by this search",
}


@dataclass(frozen=True)
class Rule:
    """One constraint, bound to a card."""

    name: str
    knobs: tuple[str, ...]
    """The knobs that it uses: it is applied as soon as those are enumerated."""
    summary: str
    """What is required, with the card's numbers."""
    check: Check
    explain: Explain
    """The sentence about one configuration, with its numbers."""
    needs: tuple[str, ...] = ()
    """Knobs without which the rule is left out of a space."""
    kind: RuleKind = RuleKind.REFUSED
    source: str = ""
    """File and function of the framework that refuses it."""


class Counts:
    """The knobs of one configuration as whole numbers; a knob that the space does not have gets its neutral value."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def __getitem__(self, knob: str) -> int:
        return int(self._config.get(knob, meaning_of(knob).neutral))

    def text(self, knob: str) -> str:
        """The value as text."""
        return str(self._config.get(knob, meaning_of(knob).neutral))

    def product(self, knobs: Iterable[str]) -> int:
        """Product of these knobs."""
        return math.prod(self[knob] for knob in knobs)

    def describe(self, knobs: Iterable[str], separator: str = " x ") -> str:
        """`tp 2 x dp 4`: the values of those knobs that a sentence names."""
        return separator.join(f"{knob} {self[knob]}" for knob in stated_knobs(knobs, self._config))


Clause = tuple[str, Check, Callable[[Counts], str]]
"""What a rule requires, with the card's numbers; its check; and its sentence about one configuration."""
Knobs = Callable[[], Iterable[str]]
"""The knobs of a rule that depend on what plugins have registered, such as `rank_degrees`."""
RuleFactory = Callable[[Card, Mapping[str, Any]], Rule | None]
RULES: dict[str, RuleFactory] = {}
"""Name -> factory of the rule from a card and the framework's parameters; it returns None if it does not apply."""
PARAMETERS: dict[str, Mapping[str, type]] = {}
"""Name -> parameters that a framework file may give, with their types. Every rule also has `source`, a text."""


def register_rule(
    name: str,
    *knobs: str | Knobs,
    parameters: Mapping[str, type] | None = None,
    needs: tuple[str, ...] | None = None,
    kind: RuleKind = RuleKind.REFUSED,
) -> Callable[[Callable[..., Clause | Rule | None]], RuleFactory]:
    """Decorator: register a rule on these knobs, with the parameters that a framework file may give it.

    The function gets the card and the options: these parameters, `use_fewer` and `knobs` (names of the space's knobs).
    It returns None if the rule does not apply to the card, and a whole `Rule` if its knobs depend on the options.
    `needs` are the knobs without which a space does not have the rule: the first knob if not given.
    """

    def add(define: Callable[..., Clause | Rule | None]) -> RuleFactory:
        def make(card: Card, options: Mapping[str, Any]) -> Rule | None:
            clause, source = define(card, options), str(options.get("source", ""))
            if clause is None or isinstance(clause, Rule):
                return clause and replace(clause, source=source)
            summary, check, explain = clause
            used = tuple(knob for each in knobs for knob in ([each] if isinstance(each, str) else each()))
            required = used[:1] if needs is None else needs
            return Rule(name, used, summary, check, lambda config: explain(Counts(config)), required, kind, source)

        RULES[name] = make
        PARAMETERS[name] = dict(parameters or {})
        return make

    return add


def same_value(left: Value, right: Value) -> bool:
    """Whether two values are the same choice (true is not 1)."""
    return isinstance(left, bool) == isinstance(right, bool) and left == right


@register_rule("implies", parameters={"name": str, "when": dict, "then": dict, "because": str, "same": bool})
def _implies(card: Card, options: Mapping[str, Any]) -> Rule:
    """With the values `when`, a configuration needs the values `then`; `same: true` if others would change nothing."""
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
        kind=RuleKind.SAME if options.get("same") else RuleKind.REFUSED,
    )


def make_effect_rules(choices: Mapping[str, tuple[Value, ...]]) -> list[Rule]:
    """The rules of kind `same` of a space with these knobs: a knob without effect has one value only.

    A knob has no effect if all degrees that it needs are 1 (`needs` in knobs.yaml).
    """
    return [
        _make_effect_rule(name, values, degrees)
        for name, values in choices.items()
        if len(values) > 1 and (degrees := [degree for degree in meaning_of(name).needs if degree in choices])
    ]


def _make_effect_rule(name: str, values: tuple[Value, ...], degrees: list[str]) -> Rule:
    neutral = meaning_of(name).neutral
    kept = neutral if any(same_value(value, neutral) for value in values) else values[0]
    shown = format_knob_value(kept)
    product = " x ".join(degrees)
    return Rule(
        f"{name}_needs_{degrees[0]}",
        (name, *degrees),
        f"with {product} of 1, {name} changes nothing: every other value is the same as {name}={shown}",
        lambda at: (at.product(degrees) > 1) | at.equals(name, (kept,)),
        lambda c: f"{name} {format_knob_value(c[name])} with {Counts(c).describe(degrees)}",
        needs=(name,),
        kind=RuleKind.SAME,
    )


def _listed(values: Any) -> tuple[Value, ...]:
    return tuple(values) if isinstance(values, list) else (values,)


def _clauses(part: Mapping[str, tuple[Value, ...]]) -> str:
    return " and ".join(f"{knob}={'|'.join(str(v).lower() for v in values)}" for knob, values in part.items())
