"""Additions that a search may make to its space: framework options, listed variables, further numbers of a knob.

Everything else is refused. The same check decides about a request and, when a run is opened again, about the ledger.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cclsearch.card.model import PRECISION, Card
from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line
from cclsearch.core.values import Value, format_knob_value
from cclsearch.space.framework import Framework
from cclsearch.space.framework_knob import Divisors, FrameworkKnob
from cclsearch.space.knobs import canonical_name, meaning_of
from cclsearch.space.parse import read_value
from cclsearch.space.table import Knob
from cclsearch.space.variables import (
    FLAG,
    UNSET,
    VARIABLE,
    find_reviewed,
    load_catalogue,
    open_unlisted,
    refuse_name,
    refuse_shape,
    refuse_threads,
    refuse_unlisted_value,
    refuse_value,
)

MAX_VALUES = 8
"""Values that one request may add to a knob."""
MAX_KNOBS = 6
"""Knobs that a search may gain in all."""
_ENVIRONMENT = re.compile(r"[A-Z][A-Z0-9_]{2,60}", re.ASCII)


class Extend(StrEnum):
    """Level of the LLM's additions to the search space."""

    OFF = "off"
    LISTED = "listed"
    """Options that the framework file declares, variables of the reviewed list, further numbers of a knob."""
    ANY = "any"
    """Also variables and flags of the framework's libraries that no one reviewed, unless their name shows why not."""


@dataclass(frozen=True)
class Opening:
    """A knob that may be added, or gain choices."""

    knob: str
    what: str
    source: str
    neutral: Value | None = None
    """Value of the knob in trials without it; None if the space has the knob."""
    values: tuple[Value, ...] = ()
    least: int | float | None = None
    most: int | float | None = None
    is_listed: bool = True
    cores: int | None = None
    """Cores of a node, if known: no knob counts more threads."""

    def refuse(self, value: Value) -> str:
        """Return why that value may not be added; empty if it may."""
        if not self.is_listed:
            return refuse_unlisted_value(value) or refuse_threads(self.knob, value, self.cores)
        known = refuse_shape(value) or refuse_value(value, self.values, self.least, self.most)
        return known or refuse_threads(self.knob, value, self.cores)

    def describe(self) -> str:
        """The opening in one line: `threads: 2, 4 (now 1): threads of a rank`."""
        texts = [format_knob_value(value) for value in self.values]
        if self.least is not None and self.most is not None:
            texts.append(f"{self.least:.10g} to {self.most:.10g}")
        now = f" (now {format_knob_value(self.neutral)})" if self.neutral is not None else " (further values)"
        return one_line(f"{self.knob}: {', '.join(texts)}{now}: {self.what}", 200)


def find_openings(
    card: Card,
    framework: Framework,
    knobs: Sequence[Knob],
    *,
    closed: Collection[str] = (),
    environment: Collection[str] = (),
) -> dict[str, Opening]:
    """Return knob -> the additions that a space of these knobs may get.

    `closed` are knobs that the user, the profile or the card declared: they left values out on purpose. `environment`
    are the variables that the profile sets.
    """
    present = {knob.name: knob for knob in knobs}
    openings: dict[str, Opening] = {}
    for knob in (*framework.knobs, *framework.optional_knobs):
        if knob.name in closed or knob.name == PRECISION or not knob.suits(card) or knob.env in environment:
            continue
        found = _open_knob(card, knob, present.get(knob.name), framework)
        if found.values or found.least is not None:
            openings[knob.name] = found
    names = {*present, *closed, *openings}
    for name, variable in load_catalogue().variables.items():
        is_used = variable.library in framework.libraries and name not in openings and name not in closed
        chips = load_catalogue().libraries[variable.library].chips
        if not is_used or card.hardware.chip.kind not in chips or variable.env in environment:
            continue
        if any(knob.writes_into(variable.env, variable.flag) for knob in framework.all_knobs if knob.name in names):
            continue
        neutral = None if name in present else UNSET
        known = present[name].choices if name in present else ()
        values = tuple(value for value in variable.values if value not in known)
        if values or variable.least is not None:
            openings[name] = Opening(
                name, variable.what, variable.source, neutral, values, variable.least, variable.most
            )
    return openings


def _open_knob(card: Card, knob: FrameworkKnob, present: Knob | None, framework: Framework) -> Opening:
    """Return the values that a knob of the framework may gain; an opening without values if none."""
    given = knob.resolve(card).choices
    if isinstance(knob.choices, Divisors):  # every divisor, also above `most` of the file
        given = knob.choices.model_copy(update={"most": None}).choices(card, use_fewer=True)
    known = (given[0],) if present is None else present.choices
    cores = card.hardware.host_cores
    least, most = knob.range or (None, None)
    if cores is not None and most is not None and refuse_threads(knob.name, most, cores):
        most = cores
    values = tuple(choice for choice in given if choice not in known and not refuse_threads(knob.name, choice, cores))
    what, source = knob.description or meaning_of(knob.name).words, framework.source or f"{framework.name} file"
    neutral = given[0] if present is None else None
    return Opening(knob.name, what, source, neutral, values, least, most, cores=cores)


def find_opening(
    name: str,
    openings: Mapping[str, Opening],
    framework: Framework,
    knobs: Sequence[Knob],
    *,
    level: Extend,
    environment: Collection[str] = (),
    cores: int | None = None,
) -> Opening:
    """Return the opening for a knob, a variable (`NCCL_ALGO`) or a flag (`--xla_...`); UserError with the reason if
    none. `cores` are those of a node, if known.
    """
    shown, present = one_line(name, 60), {knob.name for knob in knobs}
    listed = find_reviewed(name, is_exact=True) if name.isascii() else ""
    other = canonical_name(name.lower()) if name.isascii() else name
    if known := next((each for each in (name, listed, other) if each in openings), None):
        return openings[known]
    if PRECISION in (name, other):
        raise UserError(f"{shown!r} is precision, which is part of the work: only the card can list alternatives")
    if known := next((each for each in (other, name) if each in present), None):
        raise UserError(f"{shown!r} is the knob {known!r}, which has no further values")
    knob = _name_unlisted(name)
    if knob is None or level is not Extend.ANY:
        listed = ", ".join(openings) or "nothing"
        raise UserError(f"{shown!r} is not in the lists of what may be added; they have: {one_line(listed, 700)}")
    bare = knob.removeprefix(VARIABLE).removeprefix(FLAG)
    if why := refuse_name(bare):
        raise UserError(f"{shown!r} may not be added: {why}")
    target = open_unlisted(knob, framework.libraries)
    if target is None:
        raise UserError(f"{shown!r} is not a variable or flag of a library of {framework.name}")
    if target[0] in environment or any(each.writes_into(*target) for each in framework.all_knobs):
        raise UserError(f"{shown!r} is set by the profile or by another knob already")
    neutral = None if knob in present else UNSET
    return Opening(knob, f"{bare}, which no one reviewed", "its name only", neutral, is_listed=False, cores=cores)


def _name_unlisted(name: str) -> str | None:
    """Name of the knob that opens a variable or flag; None if the name has not the form of one."""
    if name.startswith((VARIABLE, FLAG)) and re.fullmatch(r"[a-z][a-z0-9_]{2,70}", name, re.ASCII):
        return name
    if _ENVIRONMENT.fullmatch(name):
        return VARIABLE + name.lower()
    bare = name.removeprefix("--")
    return FLAG + bare if bare.startswith("xla_") and re.fullmatch(r"[a-z0-9_]{3,60}", bare, re.ASCII) else None


def _match(opening: Opening, value: object) -> object:
    """The known value that is written like this one (`true` for the text `"true"`); else what a text denotes."""
    if not opening.is_listed or not isinstance(value, bool | int | float | str):
        return value
    text = format_knob_value(value).lower()
    known = (*opening.values, *(() if opening.neutral is None else (opening.neutral,)))
    found = next((one for one in known if format_knob_value(one).lower() == text), None)
    if found is not None:
        return found
    return read_value(value) if isinstance(value, str) else value


def read_values(opening: Opening, values: object) -> tuple[Value, ...]:
    """The values of a request, checked; raises UserError that names the first one that may not be added."""
    if not isinstance(values, list | tuple) or not values:
        raise UserError(f"{opening.knob}: give a list of values")
    if len(values) > MAX_VALUES:
        raise UserError(f"{opening.knob}: at most {MAX_VALUES} values at once, not {len(values)}")
    whole = isinstance(opening.least, int) or any(type(value) is int for value in opening.values)
    checked: list[Value] = []
    for given in values:
        value: Any = _match(opening, given)
        if whole and isinstance(value, float) and value.is_integer():
            value = int(value)
        if value == opening.neutral and type(value) is type(opening.neutral):
            continue
        why = opening.refuse(value)
        if why:
            raise UserError(f"{opening.knob} cannot be {one_line(repr(value), 60)}: {why}")
        checked.append(value)
    return tuple(dict.fromkeys(checked))
