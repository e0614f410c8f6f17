"""The search loop: ask the proposer, run its proposals as jobs, record what finishes, until the budget is spent."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cclsearch.core.errors import UserError
from cclsearch.core.secrets.redact import redact
from cclsearch.evaluation.control import correct_observations, propose_control
from cclsearch.launch.base import StartWarner
from cclsearch.loop.session import Session, add_wanted, open_levers
from cclsearch.loop.shared_cause import explain_end, find_shared_cause
from cclsearch.propose.base import Proposal, SearchView
from cclsearch.propose.events import BUSY_MACHINE, Note
from cclsearch.propose.observations import observed_rows
from cclsearch.record.event import EndKind, ProposalRefused, Purpose, SearchEnded, SearchStopped, TrialProposed
from cclsearch.record.state import RunState
from cclsearch.record.trial import Trial, TrialState, find_state
from cclsearch.record.writer import RunWriter
from cclsearch.run.trial_folder import JUDGING_ERROR_FILE
from cclsearch.scoring.objective import Objective
from cclsearch.space.table import RowSet, mask_rows
from cclsearch.stats.noise import estimate_noise, pick_finalists
from cclsearch.stats.pareto import find_pareto_front
from cclsearch.study.view import StudyView
from cclsearch.tracking.base import TrackingView

# The user must look at the cluster: a failed trial costs no budget, so the search would not end by itself.
MAX_CONSECUTIVE_INFRASTRUCTURE_FAILURES = 3
"""Consecutive trials with infrastructure failures after which the search stops."""
# An error of this program, not of a trial: the next trials would be wasted too.
MAX_CONSECUTIVE_JUDGING_ERRORS = 3
"""Consecutive trials with judging errors after which the search stops."""


# Our choice: 9 of 15 trials find the layout, and 6 are left for levers (`benchmarks/experts.md`).
LAYOUT_SHARE, MIN_LAYOUT_TRIALS = 0.6, 6
"""Share of the budget, and least number of trials, that a search spends before it opens levers."""


def run_search(writer: RunWriter, session: Session) -> None:
    """Run or continue a search until it ends or is stopped; every step is on disk before the next begins."""
    if session.masker is not None:
        session.masker.add_ended(writer.state)
    study = StudyView(
        writer.folder,
        session.spec,
        session.space.knobs,
        lambda problem: session.tell(f"{problem}; the search continues without it"),
    )
    study.open(writer.state)
    tracking = TrackingView(writer.folder, session.spec, session.log_to, session.tell)
    tracking.open(writer.state)
    try:
        with writer.watching(study.watch), writer.watching(tracking.watch):
            _run(writer, session)
    finally:
        tracking.close(writer.state)
    study.close(writer.state)
    if session.masker is not None:
        session.masker.add_ended(writer.state)
        was_stopped = session.stop.is_set()
        session.masker.finish(
            writer.lock.refresh,
            tell=session.tell,
            is_stopped=lambda: session.stop.is_set() and not was_stopped,  # a second Ctrl-C raises KeyboardInterrupt
        )


def _run(writer: RunWriter, session: Session) -> None:
    jobs = session.jobs
    try:
        jobs.adopt(writer)
        _warn_at_start(writer, session)
        _compare(writer, session)
        hours = session.spec.limits.max_hours
        deadline_s = math.inf if hours is None else time.monotonic() + hours * 3600
        _measure_baseline(writer, session, deadline_s)
        session, ending = _search(writer, session, deadline_s)
        if ending is not None:
            _confirm(writer, session, deadline_s)
            _decide(writer, session, deadline_s)
    except UserError as error:
        jobs.detach()
        _record_refusal(writer, session, error)
        raise
    except BaseException:
        jobs.detach()
        raise
    session.proposer.close()
    record_proposer_events(writer, session)
    if ending is None or session.stop.is_set():
        has_jobs = session.stop.kind is not EndKind.SHARED_CAUSE  # it waits for all jobs
        jobs.shut_down(writer, session.stop)
        _compare(writer, session)
        stopped = SearchStopped(kind=session.stop.kind, reason=session.stop.describe(has_jobs=has_jobs))
        writer.record(stopped.at(session.now_s()))
        return
    jobs.detach()
    best = writer.state.best
    writer.record(ending.model_copy(update={"best_trial": best.number if best else None}).at(session.now_s()))


def _warn_at_start(writer: RunWriter, session: Session) -> None:
    """Record every disturbance of the measurements that the launcher finds before the first trial of this process."""
    launcher = session.jobs.launcher
    if isinstance(launcher, StartWarner) and not writer.state.num_unfinished:
        warning = launcher.warn_at_start()
        if warning is not None:
            writer.record(Note(topic=BUSY_MACHINE, text=warning).at(session.now_s()))


def _record_refusal(writer: RunWriter, session: Session, error: UserError) -> None:
    """Record why the search stopped, unless this process can no longer write here."""
    stopped = SearchStopped(kind=EndKind.REFUSED, reason=redact(str(error)))
    with contextlib.suppress(UserError, OSError):
        writer.record(stopped.at(session.now_s()))


def find_budget(writer: RunWriter, session: Session) -> int:
    """Return the number of trials that the search may spend in total."""
    whole = max(session.spec.limits.budget, writer.state.budget_raised_to)
    return whole if session.max_trials is None else min(whole, session.max_trials)


def view_search(writer: RunWriter, session: Session, *, budget_left: int) -> SearchView:
    """Return the proposer's view of the search at this point."""
    space = session.space
    observations = writer.state.trials.observe(space)
    without_result = (*writer.state.infrastructure_failures, *writer.state.unjudged)
    lost = {space.row(trial.config) for trial in without_result}
    unfinished = [(trial.number, space.row(trial.config)) for trial in writer.state.unfinished]
    running = {row for _, row in unfinished}
    seen_N = np.zeros(len(space), dtype=bool)
    seen_N[observed_rows(observations)] = True
    held_back_N = mask_rows(session.held_back.rows, len(space)) & ~seen_N
    held_back_N[[row for row in lost if row is not None and not seen_N[row]]] = True
    held_back_N[[row for row in running if row is not None]] = False
    return SearchView(
        card=session.spec.card,
        space=space,
        observations=correct_observations(observations, session.spec, writer.state),
        pending=frozenset(row for row in running if row is not None and not seen_N[row]),
        held_back=RowSet(held_back_N),
        pending_trials=tuple(sorted((n, row) for n, row in unfinished if row is not None and not seen_N[row])),
        budget_left=budget_left,
        seed=session.spec.seed,
        target=session.spec.objective,
        prior=session.prior,
        earlier=session.spec.earlier,
        events=tuple(writer.state.reported),
        can_repeat=session.spec.provenance.is_repeatable,
        ends_without_chance=session.spec.limits.stop_early or writer.state.stops_early,
        next_trial=writer.next_trial,
    )


def record_proposer_events(writer: RunWriter, session: Session) -> None:
    """Record the events of the proposer itself, such as an LLM's turns."""
    for event in session.proposer.take_events():
        writer.record(event.at(session.now_s()))


def _must_stop(writer: RunWriter, session: Session, deadline_s: float) -> bool:
    """Request a stop if time, allocation or infrastructure do not allow another trial; return whether one is set."""
    state, stop = writer.state, session.stop
    if time.monotonic() >= deadline_s:
        stop.request(f"the limit of {session.spec.limits.max_hours:g} hours was reached", EndKind.TIME_LIMIT)
    elif state.has_allocation_ended:
        stop.request("the allocation has ended or is about to end; resume in a new one", EndKind.ALLOCATION_ENDED)
    elif state.num_consecutive_infrastructure_failures >= MAX_CONSECUTIVE_INFRASTRUCTURE_FAILURES:
        stop.request(
            f"{state.num_consecutive_infrastructure_failures} consecutive infrastructure failures:"
            f" fix the cause (see `ccl-search status {session.spec.run_id}`), then resume",
            EndKind.INFRASTRUCTURE_FAILURES,
        )
    elif state.num_consecutive_judging_errors >= MAX_CONSECUTIVE_JUDGING_ERRORS:
        stop.request(
            f"{state.num_consecutive_judging_errors} trials in a row could not be judged, which is an error of"
            f" ccl-search: please report it with {JUDGING_ERROR_FILE} of trial {state.unjudged[-1].number}; a version"
            f" without it judges them by `ccl-search admit {session.spec.run_id} --write`",
            EndKind.JUDGING_ERRORS,
        )
    elif not state.num_unfinished and (cause := find_shared_cause(session.spec, state)):
        stop.request(explain_end(cause, writer, session.spec), EndKind.SHARED_CAUSE)
    return stop.is_set()


def _search(writer: RunWriter, session: Session, deadline_s: float) -> tuple[Session, SearchEnded | None]:
    """Run trials until no more may be proposed; returns the session, whose space may have grown, and why it ended.

    None if it was stopped.
    """
    while not _must_stop(writer, session, deadline_s):
        at_trial = max(MIN_LAYOUT_TRIALS, math.ceil(LAYOUT_SHARE * find_budget(writer, session)))
        session = open_levers(writer, add_wanted(writer, session), at_trial=at_trial)
        ended = _fill_slots(writer, session)
        if writer.state.wanted is not None:
            continue
        if writer.state.unfinished:
            _collect(writer, session)
        elif ended is not None:
            is_spent = ended.kind in {EndKind.BUDGET_USED, EndKind.NODE_HOURS}
            grown = session if is_spent else open_levers(writer, session, at_trial=1)
            if len(grown.space) == len(session.space):
                return session, ended
            session = grown
    return session, None


def _collect(writer: RunWriter, session: Session) -> None:
    """Record finished trials, and their effects on other trials."""
    session.jobs.collect_finished(writer, session.stop)
    _compare(writer, session)


def _compare(writer: RunWriter, session: Session) -> None:
    if session.comparison is not None:
        session.comparison.revise(writer, session.now_s)


def _start_reference(writer: RunWriter, session: Session) -> bool:
    """Propose a reference trial if trials disagree and nothing has decided yet; returns whether one was proposed."""
    if session.comparison is None or not session.comparison.is_undecided(writer.state):
        return False
    found = session.comparison.propose_reference(writer.state, view_search(writer, session, budget_left=0))
    return found is not None and _record_if_allowed(writer, session, found[0], Purpose.REFERENCE, recomputes=found[1])


def _start_recomputation(writer: RunWriter, session: Session) -> bool:
    """Propose to compute the timed window of the best trial again; returns whether that was proposed."""
    best = writer.state.best
    if best is None or session.comparison is None or session.spec.objective.is_multi:
        return False
    proposal = session.comparison.propose_recomputation(writer.state, view_search(writer, session, budget_left=0), best)
    return proposal is not None and _record_if_allowed(
        writer, session, proposal, Purpose.REFERENCE, recomputes=best.number
    )


def _start_control(writer: RunWriter, session: Session) -> bool:
    """Propose a control if the window of the cluster has changed, or it is time; returns whether one was proposed."""
    proposal = propose_control(session.spec, writer.state)
    return proposal is not None and _record_if_allowed(writer, session, proposal, Purpose.CONTROL)


def _measure_baseline(writer: RunWriter, session: Session, deadline_s: float) -> None:
    """Run the user's baseline until it has a result or a failure of its own; it costs no budget."""
    config = session.spec.baseline
    while config is not None and not _must_stop(writer, session, deadline_s):
        own = writer.state.own_baseline
        is_lost = own is not None and own.outcome is not None and find_state(own.outcome) is TrialState.LOST
        if own is None or is_lost:
            text = "the configuration to compare with (--baseline)"
            if not _record_if_allowed(writer, session, Proposal(config, "baseline", text), Purpose.BASELINE):
                return
        elif own.outcome is not None:
            return
        session.jobs.start_waiting(writer)
        _collect(writer, session)


def _decide(writer: RunWriter, session: Session, deadline_s: float) -> None:
    """Run reference trials until it is decided which trials did the card's work, or no useful reference is left.

    Last, the timed window of the best trial is computed again; a best trial that is refused gives way to the next.
    """
    while not _must_stop(writer, session, deadline_s):
        session.jobs.start_waiting(writer)
        is_running = bool(writer.state.unfinished)
        if not is_running and not _start_reference(writer, session) and not _start_recomputation(writer, session):
            _compare(writer, session)
            return
        session.jobs.start_waiting(writer)
        _collect(writer, session)


def _fill_slots(writer: RunWriter, session: Session) -> SearchEnded | None:
    """Start trials until all slots are used; returns why no further trial will follow, or None if one may."""
    while not session.stop.is_set() and not writer.state.has_allocation_ended:
        session.jobs.start_waiting(writer)
        left = find_budget(writer, session) - writer.state.num_spent
        slots = session.jobs.free_slots(writer)
        if slots <= 0 or find_shared_cause(session.spec, writer.state):
            return None  # what still runs decides whether the search ends
        if _start_reference(writer, session) or _start_control(writer, session):
            continue
        if session.node_hours is not None and session.node_hours.ending:
            return SearchEnded(kind=EndKind.NODE_HOURS, reason=session.node_hours.ending)
        if left <= 0:
            return SearchEnded(kind=EndKind.BUDGET_USED, reason="the budget is used up")
        view = view_search(writer, session, budget_left=left)
        taken_N = view.taken_N.copy()
        if taken_N.all():
            text = "every configuration of the search space was tried or held back"
            return SearchEnded(kind=EndKind.SPACE_EXHAUSTED, reason=text)
        proposals = session.proposer.propose(view, min(slots, left))
        record_proposer_events(writer, session)
        if session.stop.is_set():
            return None  # what proposes was interrupted
        num_accepted = accept_proposals(writer, session, proposals[: min(slots, left)], taken_N)
        if writer.state.wanted is not None:
            return None  # the space grows first
        if not num_accepted and (session.node_hours is None or not session.node_hours.ending):
            return _explain_end(session)
    return None


def _explain_end(session: Session) -> SearchEnded:
    reason = session.proposer.ending()
    kind = EndKind.PROPOSER_ENDED if reason else EndKind.NO_PROPOSAL
    return SearchEnded(kind=kind, reason=reason or "the strategy has no further proposal")


def accept_proposals(
    writer: RunWriter, session: Session, proposals: Sequence[Proposal], taken_N: NDArray[np.bool_]
) -> int:
    """Record valid new proposals, and an event for each other one; returns how many were valid."""
    accepted = 0
    for proposal in proposals:
        row = session.space.row(proposal.config)
        is_repeat = proposal.is_repeat and _may_repeat(writer, session, proposal)
        if row is None or (taken_N[row] and not is_repeat):
            why = "not in the search space" if row is None else "tried already, or running"
            text = f"{proposal.proposer} proposed {proposal.config}: {why}"
            refused = ProposalRefused(proposer=proposal.proposer, config=proposal.config, text=text)
            writer.record(refused.at(session.now_s()))
            continue
        purpose = Purpose.REPEAT if is_repeat else Purpose.SEARCH
        if not _record_if_allowed(writer, session, proposal, purpose):
            break
        taken_N[row] = True
        accepted += 1
    return accepted


def _may_repeat(writer: RunWriter, session: Session, proposal: Proposal) -> bool:
    """Return whether a configuration may be measured again: it has a result of a real run, and none runs now."""
    state, config = writer.state, proposal.config
    is_running = any(trial.config == config for trial in state.unfinished)
    return session.spec.provenance.is_repeatable and bool(state.runs_of(config)) and not is_running


def _record_if_allowed(
    writer: RunWriter, session: Session, proposal: Proposal, purpose: Purpose, *, recomputes: int | None = None
) -> bool:
    """Record the proposal of a trial, unless too few node-hours are left for it; returns whether it was recorded."""
    if session.node_hours is not None and not session.node_hours.allows(writer.state, proposal.config):
        return False
    proposed = TrialProposed(
        trial=writer.next_trial,
        config=proposal.config,
        proposer=proposal.proposer,
        rationale=proposal.rationale,
        expects=proposal.expects,
        turn=proposal.turn,
        purpose=purpose,
        recomputes=recomputes,
    )
    writer.record(proposed.at(session.now_s()))
    return True


def _confirm(writer: RunWriter, session: Session, deadline_s: float) -> None:
    """Run the finalists once more, the best first; confirmations cost no budget."""
    wanted = max(session.spec.limits.confirm, writer.state.confirm_raised_to)
    if not wanted or not session.spec.provenance.is_repeatable:
        return
    for trial in choose_finalists(writer.state, wanted, session.spec.objective):
        if not any(run.purpose is Purpose.CONFIRMATION for run in writer.state.runs_of(trial.config)):
            text = f"repeats the configuration of trial {trial.number}"
            _record_if_allowed(writer, session, Proposal(trial.config, "confirmation", text), Purpose.CONFIRMATION)
    while writer.state.unfinished and not _must_stop(writer, session, deadline_s):
        session.jobs.start_waiting(writer)
        _collect(writer, session)


def choose_finalists(state: RunState, count: int, objective: Objective) -> list[Trial]:
    """Return first runs of up to `count` configurations, the most promising first.

    With one metric: the best, and those that tie with it within the noise. With several: the Pareto front, spread along
    it.
    """
    if objective.is_multi:
        return _choose_on_front(state, count, objective)
    runs = state.losses_by_config()
    noise = estimate_noise(list(runs.values())).widened(state.window_errors)
    return [state.runs_of(config)[0] for config in pick_finalists(runs, noise, count)]


def _choose_on_front(state: RunState, count: int, objective: Objective) -> list[Trial]:
    trials = [state.trials[number] for number in state.losses_by_trial()]
    values_NM = np.array([objective.values(trial.outcome.metrics) for trial in trials if trial.outcome])
    if not len(values_NM):
        return []
    on_front = np.flatnonzero(find_pareto_front(values_NM))
    ordered = on_front[np.argsort(values_NM[on_front, 0], kind="stable")]
    chosen = ordered[np.unique(np.linspace(0, len(ordered) - 1, min(count, len(ordered))).round().astype(int))]
    return [trials[n] for n in chosen]
