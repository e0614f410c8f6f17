"""CCL-Bench's `tuning_config.yaml`: the dimensions of its `config_space` become knobs with these choices.

`optimization_goal` and other fields are not read: `--objective` says what to optimize.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr, ValidationInfo, field_validator

from cclsearch.card.model import KnobDeclaration
from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line
from cclsearch.core.values import Model, Value
from cclsearch.core.yaml_file import read_yaml, validate_mapping
from cclsearch.space.knobs import canonical_name

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
    """The knobs of a `tuning_config.yaml`; raises UserError with the file and what is wrong. No file: no knobs."""
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
