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
from dataclasses import dataclass
from enum import StrEnum

from cclsearch.core.text import one_line
from cclsearch.propose.agent.history import MOVE_TOPIC, past_turns, total_cost
from cclsearch.propose.base import ProposerEvent, SearchView


class ArbiterPhase(StrEnum):
    """Which proposer decides; see the figure above."""

    SEEDS = "seeds"
    LLM = "llm"
    FALLBACK = "fallback"
    OFF = "off"
    FINISHED = "finished"


ALLOWED = {
    ArbiterPhase.SEEDS: {ArbiterPhase.LLM, ArbiterPhase.OFF, ArbiterPhase.FALLBACK},
    ArbiterPhase.LLM: {ArbiterPhase.FALLBACK, ArbiterPhase.OFF, ArbiterPhase.FINISHED},
    ArbiterPhase.FALLBACK: {ArbiterPhase.LLM, ArbiterPhase.OFF},
    ArbiterPhase.OFF: {ArbiterPhase.LLM},
    ArbiterPhase.FINISHED: {ArbiterPhase.LLM, ArbiterPhase.FALLBACK, ArbiterPhase.OFF},
}
"""Phase -> phases that may follow."""
NO_KEY = "no key"
"""The cause of `off` in a session without a key, which a later session with the key ignores."""
MAX_MOVES_SHOWN = 30


@dataclass(frozen=True)
class ArbiterState:
    """The arbiter's phase, since when, and why."""

    phase: ArbiterPhase
    since_trial: int
    """First trial that this phase proposes."""
    cause: str = ""
    reason: str = ""
    """In words, for `status`."""
    explore: int = 0
    """In `fallback`: number of trials before the LLM returns."""
    stalls: int = 0
    """How often in a row the LLM was suspended without a success in between."""

    def describe(self) -> str:
        """`fallback since trial 7: two proposals in a row were duplicates`."""
        phase = {ArbiterPhase.OFF: "LLM off", ArbiterPhase.SEEDS: "seeds"}.get(self.phase, self.phase.value)
        return f"{phase} since trial {self.since_trial}" + (f": {self.reason}" if self.reason else "")


def read_state(view: SearchView, *, with_llm: bool = True) -> ArbiterState:
    """The state after the last move in the ledger; seeds before the first move.

    `with_llm` says whether an LLM takes part now: a search that began without a key can be resumed with one.
    """
    for event in reversed(view.events):
        if event.topic == MOVE_TOPIC:
            data = event.data
            if with_llm and data.get("cause") == NO_KEY:
                continue
            return ArbiterState(
                phase=ArbiterPhase(str(data["phase"])),
                since_trial=_int(data.get("since_trial")),
                cause=str(data.get("cause") or ""),
                reason=str(data.get("reason") or ""),
                explore=_int(data.get("explore")),
                stalls=_int(data.get("stalls")),
            )
    return ArbiterState(ArbiterPhase.SEEDS, 1)


def write_move(before: ArbiterState, after: ArbiterState) -> ProposerEvent:
    """The event of a move, for the ledger; raises ValueError if `ALLOWED` forbids the move, which is a bug."""
    if after.phase not in ALLOWED[before.phase]:
        raise ValueError(f"the arbiter cannot move from {before.phase.value} to {after.phase.value}")
    data = {
        "from": before.phase.value,
        "phase": after.phase.value,
        "since_trial": after.since_trial,
        "cause": after.cause,
        "reason": after.reason,
        "explore": after.explore,
        "stalls": after.stalls,
    }
    return ProposerEvent(MOVE_TOPIC, after.describe(), data)


def next_trial(view: SearchView) -> int:
    """Number of the next trial: the search's count, or one more than the last observation."""
    return view.next_trial or max((o.trial for o in view.observations), default=0) + 1


def format_moves(events: Sequence[ProposerEvent]) -> list[str]:
    """Lines with the moves, oldest first, and the cost of the LLM; empty if no LLM took part."""
    moves = [one_line(event.text) for event in events if event.topic == MOVE_TOPIC]
    lines = [f"arbiter: {text}" for text in moves[-MAX_MOVES_SHOWN:]]
    if len(moves) > MAX_MOVES_SHOWN:
        lines.insert(0, f"arbiter: ({len(moves) - MAX_MOVES_SHOWN} earlier moves are in the ledger)")
    turns = past_turns(events)
    return [*lines, f"LLM: {len(turns)} turns, {total_cost(turns).describe()}"] if turns else lines


def _int(value: object) -> int:
    return int(value) if isinstance(value, int | float) else 0
