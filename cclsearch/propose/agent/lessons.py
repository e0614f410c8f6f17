"""What the model has learned and sends with a decision: insight, beliefs, doubts, and what it withdraws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cclsearch.core.redact import redact
from cclsearch.core.text import one_line
from cclsearch.propose.agent.history import past_turns
from cclsearch.propose.base import SearchView
from cclsearch.propose.bayes.prior_hints import parse_doubts, parse_hints
from cclsearch.propose.events import DecisionKind, LlmTurn, find_withdrawn


def read_lessons(arguments: Mapping[str, Any], view: SearchView) -> dict[str, Any]:
    """What the model has learned: the insight, for its later turns, and the beliefs, for the surrogate."""
    insight = arguments.get("insight")
    text = one_line(redact(insight), 400) if isinstance(insight, str) else ""
    beliefs, doubts = parse_hints(arguments.get("beliefs"), view), parse_doubts(arguments.get("doubts"), view)
    said = {turn.turn for turn in past_turns(view.events) if turn.insight or turn.beliefs}
    given, open_turns = arguments.get("withdraws"), said - set(find_withdrawn(view.events))
    named = [n for n in given if isinstance(n, int) and n in open_turns] if isinstance(given, list) else []
    withdraws = tuple(dict.fromkeys(named))
    return {"insight": text, "beliefs": beliefs, "doubts": doubts, "withdraws": withdraws}


def changes_figures(lessons: Mapping[str, Any]) -> bool:
    """Whether the surrogate predicts otherwise with these lessons: an insight is for the model alone."""
    return any(value for name, value in lessons.items() if name != "insight")


def add_lessons(view: SearchView, lessons: Mapping[str, Any]) -> SearchView:
    """The view as the next turn sees it once a turn with these lessons is in the ledger."""
    number = max((turn.turn for turn in past_turns(view.events)), default=0) + 1
    turn = LlmTurn(turn=number, decision=DecisionKind.REVISE, num_seen=len(view.observations), **lessons)
    return replace(view, events=(*view.events, turn))
