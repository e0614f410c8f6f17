"""Proposes given configurations first, then asks another strategy: the start of a warm-started search."""

from __future__ import annotations

from collections.abc import Sequence

from cclsearch.core.values import Config
from cclsearch.propose.base import Proposal, Proposer, ProposerEvent, SearchView
from cclsearch.propose.observations import observed_rows

EARLIER = "earlier"
"""Proposer name of these trials in the ledger."""


class EnqueuedProposer(Proposer):
    """Proposes the untried configurations of `first`, then calls the proposer `then`.

    It reads the earlier proposals from the view alone, so it continues correctly after a kill.
    """

    def __init__(self, first: Sequence[Config], then: Proposer) -> None:
        self.name = then.name
        self._first = tuple(first)
        self._then = then

    def propose(self, view: SearchView, count: int) -> Sequence[Proposal]:
        """Return the given configurations in order; once all are proposed, the other strategy's proposals."""
        rows = {config: view.space.row(config) for config in self._first}
        tried = {*observed_rows(view.observations)}  # one that was not admitted too: the others of the queue come first
        untried = [c for c, row in rows.items() if row is not None and row not in tried and not view.taken_N[row]]
        if untried:
            why = "among the best of earlier searches; measured again"
            return [Proposal(config, EARLIER, why) for config in untried[:count]]
        return self._then.propose(view, count)

    def take_events(self) -> Sequence[ProposerEvent]:
        """Return the other strategy's events."""
        return self._then.take_events()

    def close(self) -> None:
        """Close the other strategy."""
        self._then.close()

    def ending(self) -> str | None:
        """Return the other strategy's reason to end the search, or None."""
        return self._then.ending()
