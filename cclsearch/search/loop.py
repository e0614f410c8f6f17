"""The search loop: ask who proposes, put jobs in flight, take what lands into the ledger, until the budget is spent."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cclsearch.core.values import Provenance
from cclsearch.propose.base import Closable, EventSource, Observation, Proposal, Proposer, ProposerEvent, SearchView
from cclsearch.record.event import Note, Purpose, SearchEnded, SearchStopped, TrialProposed
from cclsearch.record.observe import Observer
from cclsearch.record.trial import Trial
from cclsearch.record.writer import RunWriter
from cclsearch.run.spec import RunSpec
from cclsearch.score.objective import Objective
from cclsearch.search.jobs import JobRunner, StopSignal
from cclsearch.space.table import Space

MAX_LOST_IN_A_ROW = 3
"""Trials lost one after another to the infrastructure before the search stops to be looked at."""


@dataclass(frozen=True)
class Parts:
    """What a search is made of; built by `cclsearch.search.session`."""

    spec: RunSpec
    space: Space
    proposer: Proposer
    jobs: JobRunner
    observer: Observer
    prior: tuple[Observation, ...] = ()
    held_back: frozenset[int] = frozenset()
    """Rows that the memory model says cannot fit: never launched."""
    stop: StopSignal = field(default_factory=StopSignal)
    now_s: Callable[[], float] = time.time
    most_trials: int | None = None
    """Trials in all that this session may spend, where that is less than the search's budget."""


def run_search(writer: RunWriter, parts: Parts) -> None:
    """Run, or go on with, an open book's search until it ends or is stopped; each step is on disk before the next."""
    jobs = parts.jobs
    try:
        jobs.adopt(writer)
        deadline_s = find_deadline(parts)
        reason = _search(writer, parts, deadline_s)
        if reason is not None:
            _confirm(writer, parts, deadline_s)
    except BaseException:
        jobs.detach()
        raise
    if isinstance(parts.proposer, Closable):
        parts.proposer.close()
        take_events(writer, parts)
    if reason is None or parts.stop.is_set():
        jobs.shut_down(writer, parts.stop)
        writer.record(SearchStopped(time_s=parts.now_s(), reason=parts.stop.describe()))
        return
    jobs.detach()
    best = writer.state.best
    writer.record(SearchEnded(time_s=parts.now_s(), reason=reason, best_trial=best.number if best else None))


def find_deadline(parts: Parts) -> float:
    """When this session's time is up, by the clock that nobody sets (`time.monotonic`); infinite without a limit."""
    hours = parts.spec.limits.max_hours
    return math.inf if hours is None else time.monotonic() + hours * 3600


def _must_stop(writer: RunWriter, parts: Parts, deadline_s: float) -> bool:
    """Whether the search is to be stopped; asks for it where time, allocation or infrastructure are at their end."""
    state = writer.state
    if time.monotonic() >= deadline_s:
        parts.stop.request(f"the {parts.spec.limits.max_hours:g} hours allowed are used up")
    elif state.is_allocation_over:
        parts.stop.request("the allocation has ended, or too little of it is left: resume in a new one")
    elif state.num_lost_in_a_row >= MAX_LOST_IN_A_ROW:
        lost = state.num_lost_in_a_row
        why = f"`ccl-search status {parts.spec.run_id}` says why"
        parts.stop.request(f"the infrastructure failed {lost} trials in a row: {why}; mend it")
    return parts.stop.is_set()


def _search(writer: RunWriter, parts: Parts, deadline_s: float) -> str | None:
    """The search proper; returns why it ended, None where it was stopped."""
    while not _must_stop(writer, parts, deadline_s):
        ended = _fill(writer, parts)
        if not writer.state.unfinished:
            return ended
        parts.jobs.collect_finished(writer, parts.stop)
    return None


def _fill(writer: RunWriter, parts: Parts) -> str | None:
    """Start as many trials as there is room for; returns why no more will come, None where more may."""
    while not parts.stop.is_set() and not writer.state.is_allocation_over:
        parts.jobs.start_waiting(writer)
        left = find_budget(writer, parts) - writer.state.num_spent
        slots = parts.jobs.free_slots(writer)
        if slots <= 0:
            return None
        if left <= 0:
            return "the budget is used up"
        view = view_search(writer, parts, budget_left=left)
        taken_N = view.taken_N.copy()
        if taken_N.all():
            return "every configuration of the space was tried, or cannot fit"
        proposals = parts.proposer.propose(view, min(slots, left))
        take_events(writer, parts)
        if not _accept(writer, parts, proposals, taken_N=taken_N, most=min(slots, left)):
            return _ending(parts)
    return None


def _ending(parts: Parts) -> str:
    ending = parts.proposer.ending() if isinstance(parts.proposer, EventSource) else None
    return ending or "nothing is left that may be proposed"


def _accept(
    writer: RunWriter, parts: Parts, proposals: Sequence[Proposal], *, taken_N: NDArray[np.bool_], most: int
) -> int:
    """Enter legal new proposals into the ledger, drop the rest with a note; returns how many were entered."""
    accepted = 0
    for proposal in proposals[:most]:
        row = parts.space.row(proposal.config)
        if row is None or taken_N[row]:
            why = "it is no member of the legal set" if row is None else "it was tried or runs already"
            text = f"{proposal.proposer} proposed {proposal.config}: {why}"
            writer.record(Note(time_s=parts.now_s(), topic="refused", text=text))
            continue
        taken_N[row] = True
        accepted += 1
        _enter(writer, parts, proposal, Purpose.SEARCH)
    return accepted


def _enter(writer: RunWriter, parts: Parts, proposal: Proposal, purpose: Purpose) -> None:
    writer.record(
        TrialProposed(
            time_s=parts.now_s(),
            trial=len(writer.state.trials) + 1,
            config=proposal.config,
            proposer=proposal.proposer,
            rationale=proposal.rationale,
            expects=proposal.expects,
            turn=proposal.turn,
            purpose=purpose,
        )
    )


def view_search(writer: RunWriter, parts: Parts, *, budget_left: int) -> SearchView:
    """What a proposer may know now."""
    observations = parts.observer.observe(writer.state)
    lost = {parts.space.row(trial.config) for trial in writer.state.lost}
    flying = {parts.space.row(trial.config) for trial in writer.state.unfinished}
    seen_N = np.zeros(len(parts.space), dtype=bool)
    seen_N[observations.rows] = True
    held_back = (lost | parts.held_back) - flying
    return SearchView(
        card=parts.spec.card,
        space=parts.space,
        observations=observations,
        pending=frozenset(row for row in flying if row is not None and not seen_N[row]),
        held_back=frozenset(row for row in held_back if row is not None and not seen_N[row]),
        budget_left=budget_left,
        seed=parts.spec.seed,
        objective=parts.spec.objective.name,
        prior=parts.prior,
        remarks=tuple(ProposerEvent(note.topic, note.text, note.data) for note in writer.state.notes),
        next_trial=len(writer.state.trials) + 1,
    )


def _confirm(writer: RunWriter, parts: Parts, deadline_s: float) -> None:
    """Run the finalists again, the best first; each run is new, and none of them costs budget."""
    wanted = max(parts.spec.limits.confirm, writer.state.confirm_raised_to)
    if not wanted or parts.spec.provenance is not Provenance.MEASURED:
        return
    for trial in finalists(writer, wanted, parts.spec.objective):
        if not any(run.purpose is Purpose.CONFIRMATION for run in writer.state.runs_of(trial.config)):
            text = f"runs the configuration of trial {trial.number} again"
            _enter(writer, parts, Proposal(trial.config, "confirmation", text), Purpose.CONFIRMATION)
    while writer.state.unfinished and not _must_stop(writer, parts, deadline_s):
        parts.jobs.start_waiting(writer)
        parts.jobs.collect_finished(writer, parts.stop)


def finalists(writer: RunWriter, count: int, objective: Objective) -> list[Trial]:
    """First runs of the configurations worth another run: the best, and those that cannot be told from it; over several
    metrics those of the front, spread along it."""
    if objective.is_multi:
        return _front(writer, count, objective)
    from cclsearch.stats.noise import estimate_noise, pick_finalists

    runs = writer.state.losses_by_config()
    noise = estimate_noise(list(runs.values()))
    return [writer.state.runs_of(config)[0] for config in pick_finalists(runs, noise, count)]


def _front(writer: RunWriter, count: int, objective: Objective) -> list[Trial]:
    """First ranked runs of configurations that no other beats in every metric, its ends first."""
    from cclsearch.stats.pareto import find_pareto_front

    trials = [writer.state.trials[number] for number in writer.state.losses_by_trial()]
    values_NM = np.array([objective.values(trial.outcome.metrics) for trial in trials if trial.outcome])
    if not len(values_NM):
        return []
    on_front = np.flatnonzero(find_pareto_front(values_NM))
    ordered = on_front[np.argsort(values_NM[on_front, 0], kind="stable")]
    chosen = ordered[np.unique(np.linspace(0, len(ordered) - 1, min(count, len(ordered))).round().astype(int))]
    return [trials[n] for n in chosen]


def find_budget(writer: RunWriter, parts: Parts) -> int:
    """Trials in all that the search may spend."""
    whole = max(parts.spec.limits.budget, writer.state.budget_raised_to)
    return whole if parts.most_trials is None else min(whole, parts.most_trials)


def take_events(writer: RunWriter, parts: Parts) -> None:
    """Put what the proposer has to say into the ledger."""
    if isinstance(parts.proposer, EventSource):
        for event in parts.proposer.take_events():
            writer.record(Note(time_s=parts.now_s(), topic=event.topic, text=event.text, data=dict(event.data)))
