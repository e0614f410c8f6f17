"""What stands in for the arbiter where an LLM was asked for and its key is not there."""

from __future__ import annotations

from collections.abc import Sequence

from cclsearch.propose.agent.arbiter.states import NO_KEY, ArbiterPhase, State, next_trial, read_state, write_move
from cclsearch.propose.base import Proposal, Proposer, ProposerEvent, SearchView


class NoLlmProposer:
    """The fallback alone; says why, once. A later `resume` with the key brings the LLM in."""

    def __init__(self, fallback: Proposer, reason: str) -> None:
        self.name = fallback.name
        self._fallback = fallback
        self._reason = reason
        self._remarks: list[ProposerEvent] = []
        self._said = False

    def propose(self, view: SearchView, count: int) -> Sequence[Proposal]:
        """What the fallback proposes."""
        before = read_state(view, with_llm=False)
        if not self._said and before.phase is not ArbiterPhase.OFF:
            after = State(ArbiterPhase.OFF, next_trial(view), NO_KEY, self._reason)
            self._remarks.append(write_move(before, after))
        self._said = True
        return self._fallback.propose(view, count)

    def take_events(self) -> Sequence[ProposerEvent]:
        """See `EventSource`."""
        remarks, self._remarks = self._remarks, []
        return remarks

    def ending(self) -> str | None:
        """See `EventSource`."""
        return None
