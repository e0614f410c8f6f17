"""The meaning of each knob, in one table (`knobs.yaml`) for space, prediction, agent, command line and report.

A plugin adds its own knobs, degrees of parallelism included:

    from cclsearch.space.knobs import KnobMeaning, register_knob

    register_knob(KnobMeaning("kv_blocks", "blocks of the KV cache", unit="blocks", minimum=1))
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from functools import cache
from pathlib import Path

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from cclsearch.core.values import Value
from cclsearch.core.yaml_file import read_yaml


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class KnobMeaning:
    """Meaning of a knob in every framework that has it; a knob without an entry is free."""

    name: str
    words: str = ""
    """For people."""
    unit: str = ""
    neutral: Value = 1
    """Value of a configuration that does not have the knob."""
    minimum: int | None = None
    """Minimum of a knob whose choices are whole numbers; None for other knobs."""
    needs: tuple[str, ...] = ()
    """Degrees of parallelism; the knob has no effect if all of them are 1."""
    inert_when: dict[str, tuple[Value, ...]] | None = None
    """Knob -> values of it: the knob has no effect if all of them have one of theirs."""
    order: tuple[str, ...] = ()
    """Values that are text, in ascending order; numbers are always ordered."""
    aliases: tuple[str, ...] = ()
    """Names of the knob in other frameworks and in published policies."""
    short: tuple[str, ...] = ()
    """Short names that users type."""
    label: str = ""
    """Name in narrow columns and labels of charts; the name itself if empty."""
    splits: str = ""
    """Kind of a degree of parallelism (`tensor` in `tensor_parallel_size`); empty for another knob."""
    multiplies_ranks: bool = False
    """Whether the number of ranks is a multiple of this degree."""
    is_stated: bool = False
    """Whether sentences about ranks name this degree even if a space does not have it (it is 1 then)."""


KNOBS: dict[str, KnobMeaning] = {}
"""Name -> meaning, in the order in which sentences name the degrees of parallelism."""
SHORT: dict[str, str] = {}
"""Short name that users type -> knob."""
_ALIASES: dict[str, str] = {}
_DEGREE = re.compile(
    r"(?:ici_|dcn_)?(?P<kind>[a-z]+?)_?(?:model_?)?parallel(?:ism)?(?:_(?:size|degree|world_size|dim))?"
    r"|(?P<name>[a-z]+)_(?:size|degree|dim|world_size)"
)
"""`tensor_parallel`, `tensor_model_parallel_size`, `pipeline_parallel_degree`, `tp_size`, ..."""


def register_knob(meaning: KnobMeaning) -> KnobMeaning:
    """Add a knob to the table; raises ValueError if it, or another knob, has one of its names already."""
    spellings = [meaning.name, *meaning.short, *meaning.aliases]
    if KNOBS.get(meaning.name, meaning) != meaning:
        raise ValueError(f"knob {meaning.name!r} is registered twice")
    for spelling in spellings:
        if _ALIASES.get(spelling, meaning.name) != meaning.name:
            raise ValueError(f"{spelling!r} is already a name of knob {_ALIASES[spelling]!r}")
    KNOBS[meaning.name] = meaning
    SHORT.update(dict.fromkeys(meaning.short, meaning.name))
    _ALIASES.update(dict.fromkeys(spellings, meaning.name))
    for listing in (list_degrees, rank_degrees):
        listing.cache_clear()
    return meaning


def meaning_of(name: str) -> KnobMeaning:
    """Return the meaning of the knob of exactly that name; a free knob's if the table does not have it."""
    return KNOBS[name] if name in KNOBS else KnobMeaning(name)


def canonical_name(name: str) -> str:
    """The knob that a name or alias means; the name itself if the table does not have it."""
    if name in _ALIASES:
        return _ALIASES[name]
    spelled = _DEGREE.fullmatch(name)
    if spelled is None:
        return name
    degrees = (knob for knob in KNOBS.values() if knob.splits)
    return next((d.name for d in degrees if d.splits == spelled["kind"] or d.name == spelled["name"]), name)


@cache
def list_degrees() -> tuple[str, ...]:
    """The degrees of parallelism."""
    return tuple(knob.name for knob in KNOBS.values() if knob.splits)


@cache
def rank_degrees() -> tuple[str, ...]:
    """The degrees whose product is the number of ranks."""
    return tuple(knob.name for knob in KNOBS.values() if knob.multiplies_ranks)


def named_degrees(present: Container[str]) -> tuple[str, ...]:
    """Return the rank degrees of a space with these knobs: its own if any and none is always stated, else all."""
    own = tuple(degree for degree in rank_degrees() if degree in present)
    return own if own and not any(meaning_of(degree).is_stated for degree in own) else rank_degrees()


def stated_knobs(knobs: Iterable[str], present: Container[str]) -> list[str]:
    """Return the knobs that a sentence names: a degree that few frameworks have only if it is in `present`."""
    return [knob for knob in knobs if knob in present or meaning_of(knob).is_stated or not meaning_of(knob).splits]


for _name, _fields in read_yaml(Path(__file__).with_name("knobs.yaml")).items():
    register_knob(KnobMeaning(_name, **_fields))
