"""Given configurations first, then whatever another strategy proposes: how a search starts from earlier bests."""

from __future__ import annotations

from collections.abc import Sequence

from cclsearch.core.values import Config
from cclsearch.propose.base import Closable, EventSource, Proposal, Proposer, ProposerEvent, SearchView

EARLIER = "earlier"


class EnqueuedProposer:
    """Proposes `first` (members of the space that were not tried yet), then asks `then`.

    What was proposed is told from the view alone, so it goes on rightly after a kill.
    """

    def __init__(self, first: Sequence[Config], then: Proposer) -> None:
        self.name = then.name
        self._first = tuple(first)
        self._then = then

    def propose(self, view: SearchView, count: int) -> Sequence[Proposal]:
        """The given configurations in their order; with none of them left, the other strategy's proposals."""
        taken = {o.row for o in view.observations if o.row is not None} | view.closed
        rows = {config: view.space.row(config) for config in self._first}
        waiting = [config for config, row in rows.items() if row is not None and row not in taken]
        if waiting:
            why = "among the best of earlier searches: measured again, not assumed"
            return [Proposal(config, EARLIER, why) for config in waiting[:count]]
        return self._then.propose(view, count)

    def take_events(self) -> Sequence[ProposerEvent]:
        """The other strategy's remarks."""
        return self._then.take_events() if isinstance(self._then, EventSource) else ()

    def close(self) -> None:
        """The other strategy's end."""
        if isinstance(self._then, Closable):
            self._then.close()

    def ending(self) -> str | None:
        """The other strategy's wish to end."""
        return self._then.ending() if isinstance(self._then, EventSource) else None
