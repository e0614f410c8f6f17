"""Rules of a search space: each is one vectorized check over columns of knobs and one sentence per configuration.

A rule is built for a card (with the card's numbers) and used in two ways: on whole columns when the space is
enumerated, and on a single configuration when `space explain` shows its verdict. So the two never disagree.
A framework file states further constraints with the rules `implies` and `divides`. `docs/rules.md` describes them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cclsearch.card.model import Card
from cclsearch.core.values import Value, format_knob_value, same_value
from cclsearch.space.inert import InertWhen, read_inert
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
    """Reason why the search space leaves out a configuration. An unwise one is kept; a prediction ranks it."""

    REFUSED = "refused"
    """The framework, or its run script, refuses them."""
    SAME = "same"
    """It does the same as another configuration of the space."""
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
    """Requirement, with the card's numbers."""
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
"""A rule's requirement, with the card's numbers; its check; and its sentence about one configuration."""
Knobs = Callable[[], Iterable[str]]
"""Knobs of a rule that depend on registered plugins, such as `rank_degrees`."""
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
    It returns None if the rule does not apply to the card, and a whole `Rule` if its knobs depend on the options. A
    space without a knob of `needs` (by default the first knob) does not have the rule.
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


@register_rule("implies", parameters={"name": str, "when": dict, "then": dict, "because": str, "same": bool})
def _implies(card: Card, options: Mapping[str, Any]) -> Rule:
    """With the values `when`, a configuration needs the values `then`; `same: true` if others would change nothing."""
    when, then = _list_values(options["when"]), _list_values(options["then"])

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
    """The rules of kind `same` of a space with these knobs: a knob without effect has one value only (`inert.py`)."""
    return [
        _make_effect_rule(name, inert)
        for name, values in choices.items()
        if len(values) > 1
        for inert in read_inert(name, choices)
    ]


def _make_effect_rule(name: str, inert: InertWhen) -> Rule:
    others = [other for other, _ in inert.when]
    shown = format_knob_value(inert.keep)
    if all(meaning_of(other).splits for other in others):
        condition = f"{' x '.join(others)} of 1"
    else:
        condition = _clauses(dict(inert.when))

    def check(at: Columns) -> BoolArray:
        applies = np.logical_and.reduce([at.equals(other, values) for other, values in inert.when])
        return np.asarray(~applies | at.equals(name, (inert.keep,)), dtype=bool)

    return Rule(
        f"{name}_needs_{others[0]}",
        (name, *others),
        f"with {condition}, {name} changes nothing: every other value is the same as {name}={shown}",
        check,
        lambda c: f"{name} {format_knob_value(c[name])} with {_describe_each(c, others)}",
        needs=(name,),
        kind=RuleKind.SAME,
    )


def _describe_each(config: Mapping[str, Any], knobs: Sequence[str]) -> str:
    """`tp 1 x dp 4` of degrees, `activation_checkpointing none` of other knobs."""
    return " x ".join(f"{knob} {format_knob_value(config.get(knob, meaning_of(knob).neutral))}" for knob in knobs)


def find_inert(rules: Sequence[str | Mapping[str, Any]], knob: str) -> tuple[InertWhen, ...]:
    """Return the conditions under which these rules of a framework file leave a knob one value with the same effect."""
    entries = [rule for rule in rules if not isinstance(rule, str) and rule["rule"] == "implies" and rule.get("same")]
    same = [(_list_values(entry["when"]), _list_values(entry["then"])) for entry in entries]
    return tuple(
        InertWhen(tuple(when.items()), then[knob][0])
        for when, then in same
        if list(then) == [knob] and len(then[knob]) == 1
    )


def _list_values(part: Mapping[str, Any]) -> dict[str, tuple[Value, ...]]:
    """Knob -> its values, of `when` or `then` as a framework file has it: one value, or a list."""
    return {knob: tuple(values) if isinstance(values, list) else (values,) for knob, values in part.items()}


def _clauses(part: Mapping[str, tuple[Value, ...]]) -> str:
    return " and ".join(f"{knob}={'|'.join(str(v).lower() for v in values)}" for knob, values in part.items())
