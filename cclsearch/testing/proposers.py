"""The contract of a proposer: its proposals may run, and the same view gives the same proposals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import ClassVar

from cclsearch.core.content import shipped_root
from cclsearch.core.values import Failure, FailureKind, Stage
from cclsearch.propose.base import PROPOSERS, Observation, Proposal, Proposer, ProposerContext, SearchView
from cclsearch.recording.load import Recording, load_recording
from cclsearch.recording.table import RowStatus

_FAILED = Failure(stage=Stage.RUN, kind=FailureKind.OUT_OF_MEMORY, message="recorded as failed")


class ProposerContract:
    """Subclass it, and set `proposer`; the searches are on measurements that ccl-search ships."""

    proposer: ClassVar[str]
    """The registered name."""
    recording: ClassVar[str] = "nanotron-8b-4n"

    def make_proposer(self) -> Proposer:
        """Return a new proposer, as each session of a search makes one."""
        return PROPOSERS.get(self.proposer).from_context(ProposerContext())

    def make_view(self, seen: Sequence[Observation] = (), pending: frozenset[int] = frozenset()) -> SearchView:
        """Return the view of a search with these observations and running rows."""
        recording = _load(self.recording)
        return SearchView(recording.card, recording.space, tuple(seen), pending, 8, 0, next_trial=len(seen) + 1)

    def observe(self, *rows: int) -> list[Observation]:
        """Return the observations of trials of these rows of the recording."""
        return [self._observe(trial, row) for trial, row in enumerate(rows, start=1)]

    def _observe(self, trial: int, row: int) -> Observation:
        recording = _load(self.recording)
        recorded = recording.rows[row]
        if recorded.status is not RowStatus.OK:
            return Observation(trial, recorded.config, row, None, _FAILED)
        loss = recorded.metrics[recording.primary.name]
        return Observation(trial, recorded.config, row, loss, metrics=recorded.metrics)

    def check(self, view: SearchView, proposals: Sequence[Proposal], count: int) -> None:
        """Fail unless each proposal could run now."""
        rows = [view.space.row(proposal.config) for proposal in proposals]
        assert len(rows) <= count, f"{len(rows)} proposals, of at most {count}"
        assert None not in rows, "every proposal is in the search space"
        assert len(set(rows)) == len(rows), "no configuration is proposed twice"
        taken = [row for row in rows if row is not None and view.taken_N[row]]
        again = [p for p in proposals if p.is_repeat]
        assert not taken or again, f"rows {taken} were measured, are running or are held back"
        assert all(proposal.proposer for proposal in proposals), "every proposal names its proposer"

    def test_it_proposes_what_may_run(self) -> None:
        """At the start, beside running trials, and after failures alone."""
        failed = [n for n, row in enumerate(_load(self.recording).rows) if row.status is not RowStatus.OK][:3]
        for seen, pending in (((), ()), (self.observe(0, 5, 9), (1, 2)), (self.observe(*failed), ())):
            view = self.make_view(seen, frozenset(pending))
            for count in (1, 3):
                self.check(view, self.make_proposer().propose(view, count), count)

    def test_the_same_view_gives_the_same_proposals(self) -> None:
        """A search that is killed and resumed continues as if nothing had happened."""
        view = self.make_view(self.observe(0, 5, 9))
        first, again = ([p.config for p in self.make_proposer().propose(view, 2)] for _ in range(2))
        assert first == again

    def test_it_ends_when_nothing_is_left(self) -> None:
        """With every row taken it proposes nothing, and does not raise."""
        view = self.make_view()
        everything = replace(view, held_back=frozenset(range(len(view.space))))
        assert list(self.make_proposer().propose(everything, 1)) == []

    def test_a_whole_search_follows_the_life_cycle(self) -> None:
        """Eight trials, one after another: no row twice, events once, and `close` at the end."""
        proposer, seen = self.make_proposer(), list[int]()
        for _ in range(8):
            view = self.make_view(self.observe(*seen))
            proposals = proposer.propose(view, 1)
            self.check(view, proposals, 1)
            list(proposer.take_events())
            assert list(proposer.take_events()) == [], "an event is given once"
            if not proposals:
                assert proposer.ending() is None or proposer.ending(), "a reason to end is not an empty text"
                break
            row = view.space.row(proposals[0].config)
            assert row is not None
            seen.append(row)
        proposer.close()
        list(proposer.take_events())


@cache
def _load(name: str) -> Recording:
    return load_recording(shipped_root() / "workloads" / "recordings" / name)
