"""Configurations as a model writes and reads them: schema, parsing, compact rows, and nearest valid ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from cclsearch.core.text import one_line
from cclsearch.core.values import Config, Value
from cclsearch.space.table import Knob, Space

MAX_HEADER_BYTES = 400
MAX_SCHEMA_BYTES = 8000
"""Bytes of a configuration's schema; in a longer one, the knobs with the most choices get a range instead of a list."""


def free_knobs(space: Space) -> tuple[Knob, ...]:
    """Knobs with more than one choice; the others are filled in."""
    return tuple(knob for knob in space.knobs if len(knob.choices) > 1)


def describe_inert(space: Space) -> list[str]:
    """Return the knobs that change nothing, with the values of others for which they do not, one line each."""
    lines = []
    for inert in space.inert:
        knob = space.knobs[inert.column]
        others = [(space.knobs[column], positions) for column, positions in inert.when]
        with_values = [
            f"{other.name}={'|'.join(_format_value(other.choices[n]) for n in positions)}"
            for other, positions in others
        ]
        if all(positions for _, positions in others):
            lines.append(f"with {' '.join(with_values)}, {knob.name} changes nothing: its values count as one")
    return lines


def config_schema(space: Space) -> dict[str, Any]:
    """JSON schema of one configuration: every free knob with its choices, and no other property."""
    knobs = free_knobs(space)
    properties: dict[str, Any] = {knob.name: {"enum": list(knob.choices)} for knob in knobs}
    size = len(json.dumps(properties, ensure_ascii=False).encode())
    for knob in sorted(knobs, key=lambda knob: -len(knob.choices)):
        if size <= MAX_SCHEMA_BYTES:
            break
        before, after = properties[knob.name], _range_schema(knob)
        size -= len(json.dumps(before, ensure_ascii=False).encode()) - len(json.dumps(after).encode())
        properties[knob.name] = after
    required = [knob.name for knob in knobs]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _range_schema(knob: Knob) -> dict[str, Any]:
    """Return the schema of a knob whose list of choices is too long."""
    numbers = [choice for choice in knob.choices if isinstance(choice, int | float) and not isinstance(choice, bool)]
    if len(numbers) < len(knob.choices):
        return {}
    return {"type": "number", "minimum": min(numbers), "maximum": max(numbers)}


def read_value(knob: Knob, value: object) -> Value | None:
    """The choice that was meant (`4`, `4.0` and `"4"` mean 4; `1` never means true); None if there is none."""
    for choice in knob.choices:
        if type(choice) is type(value) and choice == value:
            return choice
    if isinstance(value, float) and not isinstance(value, bool):
        return next((c for c in knob.choices if type(c) is int and c == value), None)
    if isinstance(value, int) and not isinstance(value, bool):
        return next((c for c in knob.choices if type(c) is float and c == value), None)
    if isinstance(value, str):
        return next((c for c in knob.choices if str(c).lower() == value.strip().lower()), None)
    return None


class CallError(Exception):
    """A call of the model that is refused: the reason, and a short name of the mistake."""

    def __init__(self, text: str, fault: str = "malformed") -> None:
        super().__init__(text)
        self.fault = fault


def read_config(space: Space, raw: object) -> Config:
    """Return the configuration, which may be outside the search space; raises CallError."""
    if not isinstance(raw, Mapping):
        raise CallError(f"a configuration must be an object of knobs; got {one_line(repr(raw), 80)}")
    unknown = [one_line(str(name), 40) for name in raw if not any(knob.name == name for knob in space.knobs)]
    if unknown:
        raise CallError(f"unknown knob {unknown[0]!r}; the knobs are {', '.join(k.name for k in free_knobs(space))}")
    values: dict[str, Value] = {}
    for knob in space.knobs:
        if knob.name not in raw:
            if len(knob.choices) > 1:
                raise CallError(f"knob {knob.name!r} is missing")
            values[knob.name] = knob.choices[0]
            continue
        value = read_value(knob, raw[knob.name])
        if value is None:
            choices = ", ".join(_format_value(choice) for choice in knob.choices)
            raise CallError(f"{knob.name} must be one of {choices}; got {one_line(repr(raw[knob.name]), 60)}")
        values[knob.name] = value
    return Config(values)


def format_header(space: Space) -> str:
    """Column names of compact rows; if they are longer than the rows themselves, a reference to the section KNOBS."""
    names = " ".join(knob.name for knob in free_knobs(space))
    return names if len(names.encode()) <= MAX_HEADER_BYTES else "(the knobs in the order of KNOBS)"


def format_row(space: Space, config: Mapping[str, Value]) -> str:
    """A configuration's values in the order of `format_header`."""
    values = (config.get(knob.name, knob.neutral) for knob in free_knobs(space))
    return " ".join("?" if value is None else _format_value(value) for value in values)


def format_config(space: Space, config: Mapping[str, Value]) -> str:
    """`tp=2 dp=4`: the free knobs with their names."""
    return " ".join(
        f"{knob.name}={_format_value(config[knob.name])}" for knob in free_knobs(space) if knob.name in config
    )


def nearest_rows(space: Space, config: Mapping[str, Value], rows: Iterable[int], count: int = 3) -> list[int]:
    """The rows, of those given, that differ from the configuration in the fewest knobs; ties keep their order."""
    candidates = np.fromiter(rows, dtype=np.int64)
    if not len(candidates):
        return []
    differing = np.zeros(len(candidates), dtype=np.int64)
    for k, knob in enumerate(space.knobs):
        if knob.name in config and config[knob.name] in knob.choices:
            code = next(i for i, c in enumerate(knob.choices) if c == config[knob.name])
            differing += space.codes_NK[candidates, k] != code
    return [int(row) for row in candidates[np.argsort(differing, kind="stable")[:count]]]


def _format_value(value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value if value and not any(c.isspace() or c in "\"'\\" for c in value) else json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
