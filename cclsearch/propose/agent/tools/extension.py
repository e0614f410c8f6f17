"""The tool `extend_space`: the model asks for knobs and values that the search space does not have.

The search decides on each request (`SpaceExtender`); this module reads the call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from cclsearch.core.errors import UserError
from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import one_line
from cclsearch.core.values import Model, Value
from cclsearch.propose.agent.tools.configs import CallError
from cclsearch.propose.base import SearchView

TOOL = "extend_space"
GROWN = "space_grown"
"""Label of the event that the search space has grown."""
MAX_ADDED = 4
"""Knobs of one request."""
MAX_LISTED_VALUES = 64
"""Values of one knob that are read at all; fewer may be added."""


class SpaceExtender(Protocol):
    """The search's offer of additions to its space."""

    def offers(self, view: SearchView) -> Sequence[str]:
        """Return the possible additions now, one line each; empty if none."""
        ...

    def check(self, view: SearchView, wanted: Mapping[str, Sequence[Value]]) -> str:
        """Return the additions in one line; raises UserError with each refused value and the reason."""
        ...


class ExtensionRecord(Model):
    """A turn's offer of additions, and the answers to its requests, for a replay."""

    offers: tuple[str, ...] = ()
    answers: dict[str, str] = {}
    """Request -> its additions."""
    refusals: dict[str, str] = {}
    """Request -> why it was refused."""


@dataclass(frozen=True)
class Extension:
    """The tool during one turn; every answer is added to the record."""

    record: ExtensionRecord = field(default_factory=ExtensionRecord)
    check: Callable[[Mapping[str, Sequence[Value]]], str] | None = None
    """`SpaceExtender.check` on the turn's view; None in a replay, which repeats the recorded answers."""

    def request(self, arguments: Mapping[str, Any]) -> tuple[dict[str, tuple[Value, ...]], str, str]:
        """Return a call's request, its reason, and the additions; raises CallError that the model can act on."""
        wanted, record = _read_wanted(arguments.get("add")), self.record
        key = json.dumps(wanted, sort_keys=True)
        if self.check is not None and key not in record.answers:
            try:
                record.answers[key] = self.check(wanted)
            except UserError as error:
                record.refusals[key] = one_line(redact(str(error)), 900)
        if key not in record.answers:
            raise CallError(f"refused: {record.refusals.get(key, 'the search space cannot grow')}", "not added")
        return wanted, one_line(redact(str(arguments.get("why") or "")), 300), record.answers[key]


def make_extension(view: SearchView, extender: SpaceExtender | None) -> Extension:
    """The tool for one turn; without offers, the turn does not have it."""
    if extender is None:
        return Extension()
    return Extension(ExtensionRecord(offers=tuple(extender.offers(view))), partial(extender.check, view))


def count_growths(view: SearchView) -> int:
    """Return how often the search space had grown before this view."""
    return sum(event.label == GROWN for event in view.events)


def extension_schema() -> dict[str, Any]:
    """JSON schema of the tool's arguments."""
    value = {"anyOf": [{"type": "number"}, {"type": "string"}, {"type": "boolean"}]}
    item = {
        "type": "object",
        "properties": {"knob": {"type": "string"}, "values": {"type": "array", "items": value, "minItems": 1}},
        "required": ["knob", "values"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": item, "minItems": 1, "maxItems": MAX_ADDED}


def _read_wanted(raw: object) -> dict[str, tuple[Value, ...]]:
    items = [raw] if isinstance(raw, Mapping) else raw
    if not isinstance(items, list) or not 1 <= len(items) <= MAX_ADDED:
        raise CallError(f"add must be a list of 1 to {MAX_ADDED} objects {{knob, values}}")
    wanted: dict[str, tuple[Value, ...]] = {}
    for item in items:
        name = item.get("knob") if isinstance(item, Mapping) else None
        values = item.get("values") if isinstance(item, Mapping) else None
        if not isinstance(name, str) or not isinstance(values, list) or not 1 <= len(values) <= MAX_LISTED_VALUES:
            raise CallError("each item of add has a knob (its name) and values (a list)")
        if name in wanted or not all(isinstance(value, bool | int | float | str) for value in values):
            raise CallError(f"{one_line(name, 60)!r}: name a knob once, with values that are numbers, texts, booleans")
        wanted[name] = tuple(values)
    return wanted
