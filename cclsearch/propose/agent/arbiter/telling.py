"""The arbiter's moves and the LLM's cost, in lines for people."""

from __future__ import annotations

from collections.abc import Sequence

from cclsearch.core.text import one_line
from cclsearch.propose.agent.history import MOVE_TOPIC, past_turns, total_cost
from cclsearch.propose.base import ProposerEvent

MOST_MOVES = 30


def format_moves(remarks: Sequence[ProposerEvent]) -> list[str]:
    """Who decided from which trial on, and why, oldest first; then what the LLM took. Empty where no LLM took part."""
    moves = [one_line(event.text) for event in remarks if event.topic == MOVE_TOPIC]
    lines = [f"arbiter: {text}" for text in moves[-MOST_MOVES:]]
    if len(moves) > MOST_MOVES:
        lines.insert(0, f"arbiter: ({len(moves) - MOST_MOVES} earlier moves are in the ledger)")
    turns = past_turns(remarks)
    if turns:
        cost = total_cost(turns)
        usd = "price unknown" if cost.usd is None else f"${cost.usd:.4f}"
        about = " (estimated)" if cost.usage.is_estimated else ""
        lines.append(f"LLM: {len(turns)} turns, {cost.usage.total:,} tokens{about}, {usd}, {cost.seconds:.1f} s")
    return lines
