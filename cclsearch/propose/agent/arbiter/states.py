"""The arbiter's states and moves, read from and written to the ledger's events, and as lines for people.

    seeds ----> llm <----> fallback        llm, fallback ----> off (until a resume)        llm ----> finished

seeds     the first trials: the best prediction, a safe default
llm       the LLM decides, and sees the surrogate's predictions
fallback  the surrogate explores for `explore` trials, then the LLM returns with the new evidence
off       the LLM cannot return in this session (wrong key, a limit reached): the surrogate continues alone
finished  the LLM asked to end the search, and no configuration could plausibly beat the best
"""

from __future__ import annotations

from collections.abc import Sequence

from cclsearch.core.text import count_of, one_line
from cclsearch.propose.agent.memory.history import past_turns, total_cost
from cclsearch.propose.base import ReportedEvent, SearchView
from cclsearch.propose.events import ArbiterMove, ArbiterPhase, ArbiterState

ALLOWED = {
    ArbiterPhase.SEEDS: {ArbiterPhase.LLM, ArbiterPhase.OFF, ArbiterPhase.FALLBACK},
    ArbiterPhase.LLM: {ArbiterPhase.FALLBACK, ArbiterPhase.OFF, ArbiterPhase.FINISHED},
    ArbiterPhase.FALLBACK: {ArbiterPhase.LLM, ArbiterPhase.OFF},
    ArbiterPhase.OFF: {ArbiterPhase.LLM},
    ArbiterPhase.FINISHED: {ArbiterPhase.LLM, ArbiterPhase.FALLBACK, ArbiterPhase.OFF},
}
"""Phase -> phases that may follow."""
# A later session with the key ignores it.
NO_KEY = "no key"
"""The cause of `off` in a session without a key."""
PROVIDER = "provider"
"""The cause of `fallback` while the LLM's server does not answer, and of `off` if it stays so."""
MAX_MOVES_SHOWN = 30


def read_state(view: SearchView, *, with_llm: bool = True) -> ArbiterState:
    """The state after the last move in the ledger; seeds before the first move.

    `with_llm` says whether an LLM takes part now: a search that began without a key can be resumed with one.
    """
    for event in reversed(view.events):
        if isinstance(event, ArbiterMove) and not (with_llm and event.after.cause == NO_KEY):
            return event.after
    return ArbiterState(ArbiterPhase.SEEDS, 1)


def write_move(before: ArbiterState, after: ArbiterState) -> ArbiterMove:
    """Return the event of a move, for the ledger; raises ValueError if `ALLOWED` forbids the move, which is a bug."""
    if after.phase not in ALLOWED[before.phase]:
        raise ValueError(f"the arbiter cannot move from {before.phase.value} to {after.phase.value}")
    return ArbiterMove(before=before.phase, after=after, text=after.describe())


def next_trial(view: SearchView) -> int:
    """Number of the next trial: the search's count, or one more than the last observation."""
    return view.next_trial or max((o.trial for o in view.observations), default=0) + 1


def format_moves(events: Sequence[ReportedEvent]) -> list[str]:
    """Lines with the moves, oldest first, and the cost of the LLM; empty if no LLM took part."""
    moves = [one_line(event.text) for event in events if isinstance(event, ArbiterMove)]
    lines = [f"arbiter: {text}" for text in moves[-MAX_MOVES_SHOWN:]]
    if len(moves) > MAX_MOVES_SHOWN:
        lines.insert(0, f"arbiter: ({len(moves) - MAX_MOVES_SHOWN} earlier moves are in the ledger)")
    turns, cost = past_turns(events), total_cost(events)
    return [*lines, f"LLM: {count_of(len(turns), 'turn')}, {cost.describe()}"] if turns or cost.requests else lines
