"""Read the lessons that the model sends with a decision: insight, corrections, doubts, and withdrawals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import one_line
from cclsearch.propose.agent.memory.history import past_turns
from cclsearch.propose.base import SearchView
from cclsearch.propose.bayes.corrections import (
    MAX_ACTIVE,
    MAX_FACTOR,
    CorrectionError,
    find_shifts,
    parse_crashes,
    parse_doubts,
    read_numbers,
)
from cclsearch.propose.events import Correction, DecisionKind, LlmTurn, find_withdrawn

MAX_NAMED = 5
"""Trials or turns that a line about ignored ones names."""


def read_lessons(arguments: Mapping[str, Any], view: SearchView) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return what the model has learned, and why corrections, doubts and withdrawals are not taken, in lines.

    The insight is for its later turns, the corrections are for the surrogate.
    """
    turns = past_turns(view.events)
    insight = arguments.get("insight")
    said = {turn.turn for turn in turns if turn.insight or turn.corrections}
    open_turns, named = said - set(find_withdrawn(view.events)), read_numbers(arguments.get("withdraws"))
    corrections, problems = read_corrections(arguments, view)
    lessons = {
        "insight": one_line(redact(insight), 400) if isinstance(insight, str) else "",
        "corrections": corrections,
        "doubts": parse_doubts(arguments.get("doubts"), view),
        "memory_crashes": parse_crashes(arguments.get("memory_crashes"), view),
        "withdraws": tuple(n for n in dict.fromkeys(named) if n in open_turns),
    }
    known = [*lessons["doubts"], *(number for turn in turns for number in turn.doubts)]
    ignored = {
        "trials not doubted, they may not be, or no further one": _others(arguments.get("doubts"), known),
        "not crashes of unknown cause": _others(arguments.get("memory_crashes"), lessons["memory_crashes"]),
        "turns not withdrawn, they left no insight or correction": _others(arguments.get("withdraws"), said),
    }
    return lessons, (*problems, *(f"{why}: {_name_some(items)}" for why, items in ignored.items() if items))


def read_corrections(arguments: Mapping[str, Any], view: SearchView) -> tuple[tuple[Correction, ...], list[str]]:
    """Return the corrections that can be applied, and why others cannot; a program runs once for this."""
    wanted: list[tuple[object, Correction | None]] = []
    for item in _list(arguments.get("corrections")):
        part, factor = (item.get("part"), item.get("factor")) if isinstance(item, Mapping) else (None, None)
        is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
        is_read = isinstance(part, str) and is_number and 1 / MAX_FACTOR <= (factor or 0) <= MAX_FACTOR
        wanted.append((item, Correction(part=redact(str(part))[:200], factor=float(factor)) if is_read else None))  # type: ignore[arg-type]
    if isinstance(program := arguments.get("program"), str):
        # The turn record keeps it redacted, so it runs redacted.
        wanted.append(("program", Correction(program=redact(program))))
    found, problems, predictor = [], [], view.predictor
    for item, correction in wanted[:MAX_ACTIVE]:
        try:
            if correction is None:
                raise CorrectionError(f"give part and factor, {1 / MAX_FACTOR:g} to {MAX_FACTOR:g}")
            find_shifts(view, predictor, correction)
            found.append(correction)
        except CorrectionError as error:
            name = correction.describe() if correction else one_line(redact(str(item)), 60)
            problems.append(f"correction not taken, {name}: {error}")
    if len(wanted) > MAX_ACTIVE:
        problems.append(f"{len(wanted) - MAX_ACTIVE} corrections not taken: at most {MAX_ACTIVE}")
    return tuple(found), problems


def _others(given: object, known: Iterable[object]) -> list[object]:
    known = list(known)
    return [item for item in _list(given) if item not in known]


def _list(given: object) -> list[object]:
    return given if isinstance(given, list) else [given] if given else []


def _name_some(items: list[object]) -> str:
    named = [one_line(redact(str(item)), 40) for item in items[:MAX_NAMED]]
    return ", ".join(named) + (f" and {len(items) - MAX_NAMED} more" if len(items) > MAX_NAMED else "")


def suppose(view: SearchView, lessons: Mapping[str, Any]) -> SearchView:
    """The view in which these corrections are certain, and these doubts and causes of crashes are said."""
    number = max((turn.turn for turn in past_turns(view.events)), default=0) + 1
    said = {name: lessons[name] for name in ("doubts", "memory_crashes")}
    turn = LlmTurn(turn=number, decision=DecisionKind.REVISE, num_seen=len(view.observations), **said)
    return replace(view, events=(*view.events, turn), supposed=lessons["corrections"])
