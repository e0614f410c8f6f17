"""Build the search space of a card under a framework: enumerate it vectorized, and explain it rule by rule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cclsearch.card.model import PRECISION, Card, KnobDeclaration
from cclsearch.card.task import TASKS
from cclsearch.core.errors import UserError
from cclsearch.core.text import guess_name, one_line
from cclsearch.core.values import Config, Model, Value, format_knob_value, same_value
from cclsearch.space.framework import Framework
from cclsearch.space.framework_knob import FrameworkKnob
from cclsearch.space.knobs import meaning_of
from cclsearch.space.rule import Columns, Rule, RuleKind
from cclsearch.space.table import MAX_CHOICES, Knob, Space
from cclsearch.space.variables import find_variable

MAX_ROWS = 20_000_000
"""Number of combinations in memory while enumerating; a larger space needs fewer choices."""
MAX_CHANGED = 2
"""Levers in which a configuration may differ from a base at once."""
MAX_COUNT = 1_000_000
"""Maximum of a knob whose choices are whole numbers."""


class RuleVerdict(Model):
    """Result of one rule for one configuration."""

    rule: str
    ok: bool | None
    """None if a knob that the rule uses was not given."""
    detail: str
    """The numbers of this configuration."""
    summary: str = ""
    """Requirement on every configuration, in one sentence."""
    kind: RuleKind = RuleKind.REFUSED
    source: str = ""
    """File and function of the framework that refuses such a configuration."""


def build_space(
    card: Card,
    framework: Framework,
    extra_knobs: Sequence[KnobDeclaration] = (),
    use_fewer: bool = False,
    bases: Sequence[Config] = (),
) -> Space:
    """The search space, in the order of the knobs and their choices.

    `extra_knobs` (of a profile or the user) add a knob, or replace the choices of one. `use_fewer` allows
    configurations that leave accelerators idle; a framework may allow it too. Opened levers vary near `bases` only, so
    that their combinations are added, not multiplied. Raises UserError if the space is empty (with the rules that cause
    it, or the part of the model that the framework cannot build), and if there are too many combinations for memory.
    """
    if TASKS.find(card.task) is None:
        raise UserError(
            f"{card.name} is a workload of task {card.task!r}, which cannot be searched; known tasks:"
            f" {', '.join(TASKS.names())}"
        )
    framework.require_buildable(card)
    knobs = resolve_knobs(card, framework, extra_knobs, use_fewer)
    rules = framework.make_rules(card, knobs, use_fewer=use_fewer)
    if bases:
        levers = {knob.name for knob in framework.levers}
        knobs = tuple(replace(k, is_lever=k.neutral is not None and k.name in levers) for k in knobs)
    codes_NK = _enumerate([replace(k, choices=k.choices[:1]) if k.is_lever else k for k in knobs], rules)
    if bases:
        codes_NK = np.concatenate([codes_NK, _vary_levers(knobs, bases, rules)])
    if len(codes_NK) == 0:
        raise UserError(_explain_empty(card, knobs, rules))
    num_raw = math.prod(len(knob.choices) for knob in knobs)
    return Space(knobs, codes_NK, num_raw=num_raw, rules=tuple(rule.name for rule in rules))


def explain_config(
    card: Card,
    framework: Framework,
    config: Mapping[str, Value],
    extra_knobs: Sequence[KnobDeclaration] = (),
    use_fewer: bool = False,
) -> tuple[RuleVerdict, ...]:
    """The verdict of every rule on one configuration; it is in the search space if all are ok.

    The first verdict is about the choices. Raises UserError for a knob that the space does not have.
    """
    knobs = resolve_knobs(card, framework, extra_knobs, use_fewer)
    check_knob_names(config, knobs)
    rules = framework.make_rules(card, knobs, use_fewer=use_fewer)
    return (_check_choices_of(knobs, config), *(_apply_rule(rule, knobs, config) for rule in rules))


def resolve_knobs(
    card: Card, framework: Framework, extra_knobs: Sequence[KnobDeclaration] = (), use_fewer: bool = False
) -> tuple[Knob, ...]:
    """Return the knobs of a space: the framework's, then knobs that the card and `extra_knobs` add or replace."""
    declared_by_framework = [knob for knob in framework.knobs if knob.is_offered(card)]
    knobs = {k.name: k.resolve(card, use_fewer=use_fewer) for k in declared_by_framework}
    if len(card.precisions) > 1:
        knobs[PRECISION] = Knob(PRECISION, card.precisions, meaning_of(PRECISION).words)
    for declared in (*card.knobs, *extra_knobs):
        current = knobs.get(declared.name)
        optional = framework.find_optional(declared.name)
        variable = find_variable(declared.name)
        known = current.description if current else optional.description if optional else ""
        words = meaning_of(declared.name).words or (variable.what if variable else "")
        distinct = {(isinstance(choice, bool), choice): choice for choice in declared.choices}
        description = declared.description or known or words
        knobs[declared.name] = Knob(declared.name, tuple(distinct.values()), description, declared.neutral)
    numeric = {knob.name: knob for knob in framework.all_knobs if knob.numerics}
    for knob in knobs.values():
        _check_choices(card, knob, numeric.get(knob.name))
    found = tuple(knobs.values())
    return tuple(replace(knob, inert_when=framework.find_inert(knob.name, found)) for knob in found)


def _check_choices(card: Card, knob: Knob, numeric: FrameworkKnob | None) -> None:
    """Raise UserError for a choice that is not a number (rules do arithmetic with these knobs) or is other work."""
    minimum = meaning_of(knob.name).minimum
    for choice in knob.choices:
        if not _is_count(choice, minimum):
            raise UserError(f"knob {knob.name!r} takes whole numbers from {minimum} to {MAX_COUNT}, not {choice!r}")
    if numeric is not None:
        allowed = numeric.resolve(card).choices
        if others := [format_knob_value(choice) for choice in knob.choices if choice not in allowed]:
            raise UserError(
                f"knob {knob.name!r} cannot be {', '.join(others)}: it changes the numbers, which are part of the work"
                f" (to allow it: --set alternative_precisions=[{knob.name}={others[0]}], or that field of the card)"
            )
    others = [format_knob_value(choice) for choice in knob.choices if choice not in card.precisions]
    if knob.name == PRECISION and others:
        raise UserError(
            f"knob {PRECISION!r} cannot be {', '.join(others)}: precision is part of the work, and {card.name} allows"
            f" {' or '.join(card.precisions)} (list others in workload.model.alternative_precisions of the card)"
        )


def require_known_knobs(
    declared: Sequence[KnobDeclaration], card: Card, framework: Framework, others: Sequence[KnobDeclaration] = ()
) -> None:
    """Raises UserError that lists the knobs if a declared knob is not one of the framework, the card or `others`.

    A profile may add knobs that only its cluster uses; a knob of the user that nothing reads is a typing error.
    """
    known: list[Knob | FrameworkKnob | KnobDeclaration] = [*framework.knobs, *framework.optional_knobs]
    start = f"framework {framework.name!r} has"
    # the card decides about a precision, and `resolve_knobs` says so
    names = [knob.name for knob in declared if knob.name != PRECISION]
    for name in names:
        if name in framework.no_knobs:
            raise UserError(f"{start} no knob {name!r}: {one_line(framework.no_knobs[name], 300)}")
    check_knob_names(names, [*known, *card.knobs, *others], start)


def _is_count(value: Value, minimum: int | None) -> bool:
    """Whether it is a whole number within the knob's limits; True for a knob without limits."""
    return minimum is None or (isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= MAX_COUNT)


def check_knob_names(
    names: Iterable[str], knobs: Iterable[Knob | FrameworkKnob | KnobDeclaration], start: str = "there is"
) -> None:
    """Raises UserError that lists the knobs if one of these names is not a knob."""
    known = {knob.name for knob in knobs}
    unknown = [name for name in names if name not in known]
    if unknown:
        guess = guess_name(unknown[0], sorted(known)) if len(unknown) == 1 else ""
        raise UserError(f"{start} no knob {', '.join(map(repr, unknown))}{guess}; known: {', '.join(sorted(known))}")


def _enumerate(knobs: Sequence[Knob], rules: Sequence[Rule]) -> NDArray[np.int16]:
    """(N, K) choice positions. Knobs are added one by one; each rule filters as soon as all its knobs are present."""
    codes: list[NDArray[np.int16]] = []
    size = 1
    names: set[str] = set()
    pending = list(rules)
    present = {knob.name for knob in knobs}
    for knob in knobs:
        count = len(knob.choices)
        if size * count > MAX_ROWS or count > MAX_CHOICES:
            raise UserError(
                f"the space is too large to enumerate ({size * count} combinations at knob {knob.name!r}, at most"
                f" {MAX_ROWS}): give that knob fewer choices"
            )
        codes = [np.repeat(column, count) for column in codes]
        codes.append(np.tile(np.arange(count, dtype=np.int16), size))
        size *= count
        names.add(knob.name)
        ready = [rule for rule in pending if present.intersection(rule.knobs) <= names]
        pending = [rule for rule in pending if rule not in ready]
        for rule in ready:
            used = {k.name: k.column[c] for k, c in zip(knobs, codes, strict=False) if k.name in rule.knobs}
            keep = rule.check(Columns(used, size))
            if not keep.all():
                codes = [column[keep] for column in codes]
                size = len(codes[0])
    return np.stack(codes, axis=1) if codes else np.zeros((0, len(knobs)), dtype=np.int16)


def _vary_levers(knobs: Sequence[Knob], bases: Sequence[Config], rules: Sequence[Rule]) -> NDArray[np.int16]:
    """(N, K) choice positions of the configurations that differ from a base in at most `MAX_CHANGED` levers."""
    columns = [k for k, knob in enumerate(knobs) if knob.is_lever]
    rows: dict[tuple[int, ...], None] = {}
    for base in bases:
        start = [next((n for n, c in enumerate(k.choices) if same_value(c, base.get(k.name, c))), 0) for k in knobs]
        for changed in (c for n in range(MAX_CHANGED + 1) for c in itertools.combinations(columns, n)):
            for codes in itertools.product(*(range(len(knobs[column].choices)) for column in changed)):
                at = dict(zip(changed, codes, strict=True))
                rows[tuple(at.get(column, code) for column, code in enumerate(start))] = None
    codes_NK = np.array([row for row in rows if any(row[k] for k in columns)], dtype=np.int16).reshape(-1, len(knobs))
    values = {knob.name: knob.column[codes_NK[:, k]] for k, knob in enumerate(knobs)}
    keep_N = np.ones(len(codes_NK), dtype=bool)
    for rule in rules:
        used = {name: column for name, column in values.items() if name in rule.knobs}
        keep_N &= rule.check(Columns(used, len(codes_NK)))
    return codes_NK[keep_N]


def _check_choices_of(knobs: Sequence[Knob], config: Mapping[str, Value]) -> RuleVerdict:
    wrong = [
        f"{knob.name}={config[knob.name]} is not one of {', '.join(format_knob_value(c) for c in knob.choices)}"
        for knob in knobs
        if knob.name in config and not any(same_value(config[knob.name], choice) for choice in knob.choices)
    ]
    missing = [knob.name for knob in knobs if knob.name not in config]
    ok, detail = (
        (None, f"not given: {', '.join(missing)}") if missing else (True, "every value is a choice of its knob")
    )
    if wrong:
        ok, detail = False, "; ".join(wrong)
    return RuleVerdict(
        rule="choices", ok=ok, detail=detail, summary="every knob has one of its choices", kind=RuleKind.ASKED
    )


def _apply_rule(rule: Rule, knobs: Sequence[Knob], config: Mapping[str, Value]) -> RuleVerdict:
    ok, detail = _check_config(rule, [knob.name for knob in knobs if knob.name in rule.knobs], config)
    return RuleVerdict(rule=rule.name, ok=ok, detail=detail, summary=rule.summary, kind=rule.kind, source=rule.source)


def _check_config(rule: Rule, used: Sequence[str], config: Mapping[str, Value]) -> tuple[bool | None, str]:
    """Return whether the configuration satisfies the rule on these of its knobs, and the sentence about it."""
    if missing := [name for name in used if name not in config]:
        return None, f"unknown without {', '.join(missing)}"
    least = {name: meaning_of(name).minimum for name in used}
    if uncounted := [name for name, minimum in least.items() if not _is_count(config[name], minimum)]:
        return False, f"{', '.join(uncounted)} must be a whole number of at least {least[uncounted[0]]}"
    try:
        columns = Columns({name: np.array([config[name]], dtype=object) for name in used}, 1)
        return bool(rule.check(columns)[0]), rule.explain(config)
    except (ValueError, OverflowError):
        return False, f"one of {', '.join(used)} is text, not a number or truth value"


def _explain_empty(card: Card, knobs: Sequence[Knob], rules: Sequence[Rule]) -> str:
    """Name each rule without which the space is not empty; if there is none, all rules that reject something."""
    blocking = [rule for rule in rules if len(_enumerate(knobs, [other for other in rules if other is not rule]))]
    if not blocking:
        blocking = [rule for rule in rules if _rejects_any(knobs, rule)]
    reasons = "; ".join(f"{rule.name} ({rule.summary})" for rule in blocking)
    who = "this rule rejects" if len(blocking) == 1 else "these rules together reject"
    return f"the search space of {card.name} is empty: {who} every combination: {reasons}"


def _rejects_any(knobs: Sequence[Knob], rule: Rule) -> bool:
    involved = [knob for knob in knobs if knob.name in rule.knobs]
    return len(_enumerate(involved, [rule])) < math.prod(len(knob.choices) for knob in involved)
