"""Parse configurations and knobs as users type them: `tp=2,dp=4 micro_batch_size=1`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr, ValidationInfo, field_validator

from cclsearch.card.model import KnobDeclaration
from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line
from cclsearch.core.values import Model, Value, format_knob_value, same_value
from cclsearch.core.yaml_file import read_yaml, validate_mapping
from cclsearch.space.build import check_knob_names
from cclsearch.space.knobs import SHORT, canonical_name
from cclsearch.space.table import Knob

_NAME = re.compile(r"^[a-z][a-z0-9_]{0,40}$")
_OPENED = re.compile(r"^[A-Za-z][A-Za-z0-9_]{0,79}$", re.ASCII)
"""Also the name of a variable."""
_INTEGER = re.compile(r"^[+-]?\d{1,18}$", re.ASCII)
_DECIMAL = re.compile(r"^[+-]?(\d{1,30}\.\d*|\.\d+|\d{1,30})([eE][+-]?\d{1,3})?$", re.ASCII)
_TRUTH_VALUES = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False}


def parse_assignments(assigned: str | Mapping[str, Value], knobs: Sequence[Knob]) -> dict[str, Value]:
    """The assignments in the text with typed values; knobs may be missing and values need not be choices."""
    known = {knob.name: knob for knob in knobs}
    given: dict[str, Value] = {}
    for name, value in _split(assigned, knobs) if isinstance(assigned, str) else assigned.items():
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
    name, texts = _split_values(text, _NAME, "a knob is written NAME=CHOICE,CHOICE (for example tp=1,2,4)")
    return KnobDeclaration(name=name, choices=tuple(map(read_value, texts)))


def _split_values(text: str, form: re.Pattern[str], how: str) -> tuple[str, list[str]]:
    """The knob and the values of `NAME=VALUE,VALUE`; UserError that says `how` if it is not of that form."""
    name, _, given = text.partition("=")
    name = SHORT.get(name.strip(), name.strip())
    values = [value.strip().strip("\"'") for value in given.split(",") if value.strip()]
    if not form.match(name) or not values:
        raise UserError(f"{how}, not {one_line(text, 80)!r}")
    return name, values


def parse_knobs(texts: Sequence[str]) -> tuple[KnobDeclaration, ...]:
    """The knobs of several texts `NAME=CHOICE,CHOICE`; a knob that is given again also has the choices given before."""
    knobs: dict[str, KnobDeclaration] = {}
    for knob in map(parse_knob, texts):
        earlier = knobs[knob.name].choices if knob.name in knobs else ()
        knobs[knob.name] = knob.model_copy(update={"choices": (*earlier, *knob.choices)})
    return tuple(knobs.values())


def parse_wanted(texts: Sequence[str]) -> dict[str, tuple[Value, ...]]:
    """Return the additions to a search space from texts `NAME=VALUE,VALUE`; a name may also be a variable or flag.

    Values stay texts: `opening.read_values` decides which of them are numbers or truth values.
    """
    wanted: dict[str, tuple[Value, ...]] = {}
    for text in texts:
        name, given = _split_values(text, _OPENED, "write NAME=VALUE,VALUE (for example threads=2,4)")
        wanted[name] = (*wanted.get(name, ()), *given)
    return wanted


def _split(text: str, knobs: Sequence[Knob]) -> Iterator[tuple[str, str]]:
    """Names and values, split at commas and blanks, but only before an assignment: a value may contain either."""
    names = "|".join(re.escape(name) for name in sorted({k.name for k in knobs} | set(SHORT)))
    parts = re.split(rf"(?:^|[,;\s]+)(?=(?:{names})\s*=|[A-Za-z_][\w-]*=)", one_line(text, 10_000))
    for part in filter(None, (part.strip(" ,;") for part in parts)):
        name, equals, value = part.partition("=")
        name, value = name.strip(), value.strip().strip("\"'")
        if not equals or not name or not value:
            raise UserError(f"a configuration is written like tp=2,dp=4, not {one_line(part, 80)!r}")
        yield name, value


def _match(given: Value, knob: Knob) -> Value:
    """The choice that is written like that value; else the value, or what it denotes if it is a text.

    `1` and `0` are accepted for a truth value, and a truth value for activation checkpointing `none` or `full`.
    """
    for choice in knob.choices:
        if format_knob_value(choice) == format_knob_value(given):
            return choice
    value = read_value(given) if isinstance(given, str) else given
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


TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
MEANINGS: dict[tuple[str, type], dict[Value, dict[str, Value]]] = {
    ("activation_checkpointing", bool): {
        False: {"activation_checkpointing": "none"},
        True: {"activation_checkpointing": "full"},
    },
    ("compile", str): {
        "eager": {"compile": False},
        "inductor": {"compile": True},
        "max-autotune": {"compile": True, "inductor_autotune": "on"},
    },
}
"""Knob and type of its values in these files -> value -> knobs and values here; knobs not named are at `default`."""


class TuningDimension(Model):
    """One dimension of a `config_space`."""

    key: str = Field(pattern=r"^[a-z][a-z0-9_]{0,40}$")
    type: Literal["int", "float", "str", "bool"]
    description: str = ""
    choices: tuple[StrictBool | StrictInt | StrictFloat | StrictStr, ...] = Field(min_length=1, max_length=1000)

    @field_validator("choices")
    @classmethod
    def _check_types(cls, choices: tuple[Value, ...], info: ValidationInfo) -> tuple[Value, ...]:
        kind: str = info.data.get("type", "")  # empty if it is wrong itself
        for choice in choices if kind else ():
            if not isinstance(choice, TYPES[kind]) or isinstance(choice, bool) != (kind == "bool"):
                raise ValueError(f"{choice!r} is not of type {kind}")
        return choices

    def declare(self) -> list[KnobDeclaration]:
        """The knobs of the dimension, usually one; raises ValueError for a value that has no counterpart here."""
        name = canonical_name(self.key)
        values = [_translate(name, choice) for choice in self.choices]
        knobs = {knob: None for value in values for knob in value}
        about = one_line(self.description, 200)
        return [
            KnobDeclaration(
                name=knob,
                choices=tuple(dict.fromkeys(value.get(knob, "default") for value in values)),
                description=about if knob == name else "",
            )
            for knob in knobs
        ]


class TuningConfig(Model):
    """The file; fields other than `config_space` are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    config_space: tuple[TuningDimension, ...] = Field(min_length=1, max_length=100)


def read_tuning_config(path: Path | None) -> tuple[KnobDeclaration, ...]:
    """Return the knobs of a `tuning_config.yaml`, none without a file; raises UserError with the file and its fault."""
    if path is None:
        return ()
    data: dict[str, Any] = read_yaml(path)
    if "config_space" not in data:
        raise UserError(f"{path}: a tuning configuration needs `config_space`: a list of `key`, `type` and `choices`")
    knobs: dict[str, KnobDeclaration] = {}
    for dimension in validate_mapping(TuningConfig, data, str(path)).config_space:
        try:
            declared = dimension.declare()
        except ValueError as error:
            raise UserError(f"{path}: dimension {dimension.key!r}: {error}") from None
        for knob in declared:
            if knob.name in knobs:
                raise UserError(f"{path}: two dimensions are the knob {knob.name!r}")
            knobs[knob.name] = knob
    return tuple(knobs.values())


def _translate(name: str, choice: Value) -> dict[str, Value]:
    meanings = MEANINGS.get((name, type(choice)))
    if meanings is None:
        return {name: choice}
    if choice not in meanings:
        known = ", ".join(map(str, meanings))
        raise ValueError(f"{choice!r} has no counterpart here; known: {known} (remove it from the file)")
    return meanings[choice]


HOLDER = re.compile(r"\{([a-z][a-z0-9_]*)\}")
"""Where a user's own command or file has a knob: `{tp}`."""
_PART = re.compile(r"\\.|'[^']*'|\"(?:\\.|[^\"\\])*\"|[^'\"\\]+", re.DOTALL)
"""Of a line of shell: an escaped character, a quoted text, or what is between these."""
TEMPLATE = "template"
"""What a command calls the trial's filled-in copy of its template."""


def fill_command(text: str, config: Mapping[str, Value], template: str) -> str:
    """Return the user's line of shell with these knobs, each a single word, and the path of the filled-in template."""
    values = {**{name: format_knob_value(value) for name, value in config.items()}, TEMPLATE: template}

    def fill(part: re.Match[str]) -> str:
        quote = part[0][0] if part[0][0] == "'" or (part[0][0] == '"' and not re.search(r"\$\(|`", part[0])) else ""
        own = {name: v if (word := shlex.quote(v)) == v else f"{quote}{word}{quote}" for name, v in values.items()}
        return HOLDER.sub(lambda found: own[canonical_name(found[1])], part[0])

    return _PART.sub(fill, text)
