"""The strategy `default`, the fallback of searches with an LLM: maximizes the acquisition over the surrogate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from cclsearch.card.model import Card
from cclsearch.propose.base import PROPOSERS, Note, Proposal, Proposer, ProposerEvent, ProposerRole, SearchView
from cclsearch.propose.bayes.acquisition import choose_batch, failure_penalty, has_nothing_feasible
from cclsearch.propose.bayes.candidates import direct_term
from cclsearch.propose.bayes.outlook import Repeat, find_outlook, find_repeat, make_note
from cclsearch.propose.bayes.prediction import describe_expected
from cclsearch.propose.bayes.surrogate import CandidatePosterior, fit_posterior
from cclsearch.space.table import Space
from cclsearch.stats.closed_form import Predictor
from cclsearch.stats.one_thread import on_one_thread


@PROPOSERS.register("default")
class DefaultProposer(Proposer):
    """Calibrates the closed forms on the trials and proposes the configuration of the highest utility."""

    name = "default"
    role = ProposerRole.PART

    def __init__(self, predict: Callable[[Card, Space], Predictor] | None = None) -> None:
        self._predict = predict
        self._notes: list[Note] = []
        self._ending: str | None = None

    @on_one_thread
    def propose(self, view: SearchView, count: int) -> Sequence[Proposal]:
        """Return the `count` configurations of the highest utility, as one batch; none if nothing is feasible.

        The first may be one to measure again (`find_repeat`). None either if no configuration is likely to win and the
        search is to end then.
        """
        self._ending = None
        predictor = self._predict(view.card, view.space) if self._predict else view.predictor
        posterior = fit_posterior(view, predictor)
        if posterior is None or has_nothing_feasible(posterior):
            return ()
        outlook = find_outlook(view, posterior)
        if outlook is not None and view.ends_without_chance:
            self._ending = outlook
            return ()
        if outlook is not None and (note := make_note(view, outlook)) is not None:
            self._notes.append(note)
        repeat = find_repeat(view, posterior, outlook)
        again = [] if repeat is None else [self._propose_repeat(view, repeat)]
        chosen = choose_batch(posterior, count - len(again), failure_penalty(view), is_won=outlook is not None)
        return again + [self._propose_row(view, posterior, m, improvement) for m, improvement in chosen]

    def take_events(self) -> Sequence[ProposerEvent]:
        """See `Proposer`."""
        notes, self._notes = self._notes, []
        return notes

    def ending(self) -> str | None:
        """See `Proposer`."""
        return self._ending

    def _propose_repeat(self, view: SearchView, repeat: Repeat) -> Proposal:
        return Proposal(view.space.config(repeat.row), self.name, repeat.why, is_repeat=True)

    def _propose_row(self, view: SearchView, posterior: CandidatePosterior, m: int, improvement: float) -> Proposal:
        expects = posterior.expected_outcome(m)
        success = f"success probability {posterior.p_success_m[m]:.0%}"
        rationale = ", ".join(filter(None, (describe_expected(posterior, m), success)))
        if view.objective.constraints:
            rationale += f" ({posterior.p_valid_m[m]:.0%} with the constraints)"
        if posterior.best is not None and direct_term(posterior.models):
            rationale += f", expected improvement {-math.expm1(-improvement):.1%} of the best so far"
        return Proposal(view.space.config(int(posterior.rows_m[m])), self.name, rationale, expects)
