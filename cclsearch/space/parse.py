"""Parse configurations and knobs as users type them: `tp=2,dp=4 micro_batch_size=1`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cclsearch.card.model import KnobDeclaration
from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line
from cclsearch.core.values import Value, format_knob_value, same_value
from cclsearch.space.build import check_knob_names
from cclsearch.space.knobs import SHORT
from cclsearch.space.table import Knob

_NAME = re.compile(r"^[a-z][a-z0-9_]{0,40}$")
_OPENED = re.compile(r"^[A-Za-z][A-Za-z0-9_]{0,79}$", re.ASCII)
"""Also the name of a variable."""
_INTEGER = re.compile(r"^[+-]?\d{1,18}$")
_DECIMAL = re.compile(r"^[+-]?(\d{1,30}\.\d*|\.\d+|\d{1,30})([eE][+-]?\d{1,3})?$")
_TRUTH_VALUES = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False}


def parse_assignments(text: str, knobs: Sequence[Knob]) -> dict[str, Value]:
    """The assignments in the text with typed values; knobs may be missing and values need not be choices."""
    known = {knob.name: knob for knob in knobs}
    given: dict[str, Value] = {}
    for part in _split(text, knobs):
        name, equals, value = part.partition("=")
        name, value = name.strip(), value.strip().strip("\"'")
        if not equals or not name or not value:
            raise UserError(f"a configuration is written like tp=2,dp=4, not {one_line(part, 80)!r}")
        name = name if name in known else SHORT.get(name, name)
        check_knob_names([name], knobs)
        if name in given:
            raise UserError(f"knob {name!r} is given twice")
        given[name] = _match(value, known[name])
    if not given:
        raise UserError("a configuration is written like tp=2,dp=4; none was given")
    return given


def parse_knob(text: str) -> KnobDeclaration:
    """A knob with its choices from `NAME=CHOICE,CHOICE`; raises UserError if it is not of that form."""
    name, equals, values = text.partition("=")
    name = SHORT.get(name.strip(), name.strip())
    choices = tuple(read_value(value.strip().strip("\"'")) for value in values.split(",") if value.strip())
    if not equals or not _NAME.match(name) or not choices:
        raise UserError(f"a knob is written NAME=CHOICE,CHOICE (for example tp=1,2,4), not {one_line(text, 80)!r}")
    return KnobDeclaration(name=name, choices=choices)


def parse_knobs(texts: Sequence[str]) -> tuple[KnobDeclaration, ...]:
    """The knobs of several texts `NAME=CHOICE,CHOICE`; a knob that is given again also has the choices given before."""
    knobs: dict[str, KnobDeclaration] = {}
    for knob in map(parse_knob, texts):
        earlier = knobs[knob.name].choices if knob.name in knobs else ()
        knobs[knob.name] = knob.model_copy(update={"choices": (*earlier, *knob.choices)})
    return tuple(knobs.values())


def parse_wanted(texts: Sequence[str]) -> dict[str, tuple[Value, ...]]:
    """What to add to a search space, from texts `NAME=VALUE,VALUE`; a name may also be that of a variable or flag.

    Values stay texts: what may be added says which of them are numbers or truth values (`opening.read_values`).
    """
    wanted: dict[str, tuple[Value, ...]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        name = SHORT.get(name.strip(), name.strip())
        given = tuple(value.strip().strip("\"'") for value in values.split(",") if value.strip())
        if not equals or not _OPENED.match(name) or not given:
            raise UserError(f"write NAME=VALUE,VALUE (for example threads=2,4), not {one_line(text, 80)!r}")
        wanted[name] = (*wanted.get(name, ()), *given)
    return wanted


def _split(text: str, knobs: Sequence[Knob]) -> list[str]:
    """Split at commas and blanks, but only before an assignment: a value may contain either."""
    names = "|".join(re.escape(name) for name in sorted({k.name for k in knobs} | set(SHORT)))
    parts = re.split(rf"(?:^|[,;\s]+)(?=(?:{names})\s*=|[A-Za-z_][\w-]*=)", one_line(text, 10_000))
    return [part.strip(" ,;") for part in parts if part.strip(" ,;")]


def _match(text: str, knob: Knob) -> Value:
    """The choice with that text; else the value that the text denotes.

    `1` and `0` are accepted for a truth value, and a truth value for activation checkpointing `none` or `full`.
    """
    for choice in knob.choices:
        if format_knob_value(choice) == text:
            return choice
    value = read_value(text)
    found = _find_choice(value, knob)
    return value if found is None else found


def _find_choice(value: Value, knob: Knob) -> Value | None:
    for choice in knob.choices:
        if same_value(choice, value):
            return choice
    if isinstance(value, bool) and {"none", "full"} <= set(knob.choices):
        return "full" if value else "none"
    truths = [c for c in knob.choices if isinstance(c, bool)]
    if len(truths) == len(knob.choices) and not isinstance(value, str) and value in (0, 1):
        return next((c for c in truths if c == bool(value)), None)
    return None


def read_value(text: str) -> Value:
    """The number or truth value that a text denotes, or the text."""
    if text.lower() in _TRUTH_VALUES:
        return _TRUTH_VALUES[text.lower()]
    if _INTEGER.match(text):
        return int(text)
    return float(text) if _DECIMAL.match(text) else text
