"""The arbiter's states and moves, read from and written to the ledger's remarks.

    seeds ----> llm <----> fallback        llm, fallback ----> off (until a resume)        llm ----> finished

seeds     the first trials: the prediction's best, a safe default
llm       the LLM decides, with the surrogate's view before it
fallback  the surrogate explores for `explore` trials, then the LLM returns with the new evidence
off       the LLM cannot come back in this session (wrong key, a limit reached): the surrogate goes on alone
finished  the LLM wished to end and the arbiter found nothing plausible left
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cclsearch.propose.agent.history import MOVE_TOPIC
from cclsearch.propose.base import ProposerEvent, SearchView


class ArbiterPhase(StrEnum):
    """Who decides."""

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
"""The cause of `off` where no LLM took part: a later session with the key begins as if anew."""


@dataclass(frozen=True)
class State:
    """Where the arbiter stands."""

    phase: ArbiterPhase
    since_trial: int
    """First trial that is proposed in this phase."""
    cause: str = ""
    reason: str = ""
    """In words, for `status`."""
    explore: int = 0
    """In `fallback`: trials before the LLM returns."""
    stalls: int = 0
    """How often the LLM was put aside so far without a success in between."""

    def describe(self) -> str:
        """`fallback since trial 7: two proposals in a row were duplicates`."""
        who = {ArbiterPhase.OFF: "fallback for the rest", ArbiterPhase.SEEDS: "seeds"}.get(self.phase, self.phase.value)
        return f"{who} since trial {self.since_trial}" + (f": {self.reason}" if self.reason else "")


def read_state(view: SearchView, *, with_llm: bool = True) -> State:
    """The state that the ledger's remarks tell of; seeds before the first move.

    `with_llm` says whether there is an LLM now: a search that began without a key gets one by `resume`.
    """
    for event in reversed(view.remarks):
        if event.topic == MOVE_TOPIC:
            data = event.data
            if with_llm and data.get("cause") == NO_KEY:
                continue
            return State(
                phase=ArbiterPhase(str(data["phase"])),
                since_trial=_int(data.get("since_trial")),
                cause=str(data.get("cause") or ""),
                reason=str(data.get("reason") or ""),
                explore=_int(data.get("explore")),
                stalls=_int(data.get("stalls")),
            )
    return State(ArbiterPhase.SEEDS, 1)


def write_move(before: State, after: State) -> ProposerEvent:
    """The remark of a move; a move that the machine does not know is a bug and raises ValueError."""
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
    """Number of the next trial, as the search counts or as the observations let guess."""
    return view.next_trial or max((o.trial for o in view.observations), default=0) + 1


def _int(value: object) -> int:
    return int(value) if isinstance(value, int | float) else 0
