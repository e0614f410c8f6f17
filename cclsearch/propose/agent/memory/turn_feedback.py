"""Read the lessons that the model sends with a decision: insight, beliefs, doubts, and withdrawals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import one_line
from cclsearch.propose.agent.memory.history import past_turns
from cclsearch.propose.base import SearchView
from cclsearch.propose.bayes.prior_hints import parse_doubts, parse_hints
from cclsearch.propose.events import DecisionKind, LlmTurn, find_withdrawn

MAX_NAMED = 5
"""Beliefs, trials or turns that a line about ignored ones names."""


def read_lessons(arguments: Mapping[str, Any], view: SearchView) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return what the model has learned, and why beliefs, doubts and withdrawals are not taken, a line each kind.

    The insight is for its later turns, the beliefs are for the surrogate.
    """
    turns = past_turns(view.events)
    insight, beliefs, doubts, withdraws = (
        arguments.get(name) for name in ("insight", "beliefs", "doubts", "withdraws")
    )
    said = {turn.turn for turn in turns if turn.insight or turn.beliefs}
    open_turns = said - set(find_withdrawn(view.events))
    named = withdraws if isinstance(withdraws, list) else []
    lessons = {
        "insight": one_line(redact(insight), 400) if isinstance(insight, str) else "",
        "beliefs": parse_hints(beliefs, view),
        "doubts": parse_doubts(doubts, view),
        "withdraws": tuple(dict.fromkeys(n for n in named if isinstance(n, int) and n in open_turns)),
    }
    parts = [item.get("part") if isinstance(item, Mapping) else item for item in _list(beliefs)]
    known = [*lessons["doubts"], *(number for turn in turns for number in turn.doubts)]
    ignored = {
        "beliefs not taken, their part, value or size is not known": [
            p for p in parts if p not in [*lessons["beliefs"]]
        ],
        "trials not doubted, they may not be, or no further one": [n for n in _list(doubts) if n not in known],
        "turns not withdrawn, they left no insight or belief": [n for n in _list(withdraws) if n not in [*said]],
    }
    return lessons, tuple(f"{why}: {_name_some(items)}" for why, items in ignored.items() if items)


def _list(given: object) -> list[object]:
    return given if isinstance(given, list) else [given] if given else []


def _name_some(items: list[object]) -> str:
    named = [one_line(redact(str(item)), 40) for item in items[:MAX_NAMED]]
    return ", ".join(named) + (f" and {len(items) - MAX_NAMED} more" if len(items) > MAX_NAMED else "")


def changes_figures(lessons: Mapping[str, Any]) -> bool:
    """Whether the surrogate predicts otherwise with these lessons; an insight is for the model alone."""
    return any(value for name, value in lessons.items() if name != "insight")


def add_lessons(view: SearchView, lessons: Mapping[str, Any]) -> SearchView:
    """The view as the next turn sees it once a turn with these lessons is in the ledger."""
    number = max((turn.turn for turn in past_turns(view.events)), default=0) + 1
    turn = LlmTurn(turn=number, decision=DecisionKind.REVISE, num_seen=len(view.observations), **lessons)
    return replace(view, events=(*view.events, turn))
