"""Searches whose trials are measured elsewhere: `ask` records the next proposal, `tell` what was measured.

They are the searches of `cclsearch.search(card, measure)`: the same launcher, whose results are marked as the caller's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from cclsearch.core.errors import UserError
from cclsearch.launch.base import write_model
from cclsearch.launch.contract import RESULT_FILE, TrialResult
from cclsearch.launch.in_process import ELSEWHERE, InProcessLauncher
from cclsearch.loop.loop import accept_proposals, find_budget, record_proposer_events, view_search
from cclsearch.loop.session import Changes, Session, begin_or_resume, open_session
from cclsearch.propose.base import Proposal
from cclsearch.record.event import EndKind, SearchStopped
from cclsearch.record.trial import Trial
from cclsearch.record.writer import RunWriter
from cclsearch.run.folder import load_run
from cclsearch.space.parse import parse_assignments


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[tuple[RunWriter, Session]]:
    """The search in a folder, which is neither begun nor resumed yet."""
    profile = load_run(folder).spec.profile
    if profile.launcher != InProcessLauncher.name:
        raise UserError(
            f"{folder.name}: its trials run by the launcher {profile.launcher!r}, which measures them itself:"
            " begin a search with `ccl-search ask --workload NAME`, or take results over with `--learn-from`"
        )
    session = open_session(folder, measure=ELSEWHERE)
    with RunWriter(folder) as writer:
        yield writer, session


def ask(folder: Path, budget: int = 0) -> tuple[Trial | None, str]:
    """Propose the next trial, and record it; returns it, or None and why there is none. `budget` raises the budget.

    Raises UserError while as many trials are open as may run at a time.
    """
    with _opened(folder) as (writer, session):
        if session.jobs.free_slots(writer) <= 0:
            texts = "; ".join(f"trial {trial.number}: {trial.config}" for trial in writer.state.unfinished)
            raise UserError(f"{texts}: `ccl-search tell` its result first, or begin a search with `--parallel N`")
        begin_or_resume(writer, session, Changes(budget=budget))
        left = find_budget(writer, session) - writer.state.num_spent
        view = view_search(writer, session, budget_left=max(left, 1))
        is_open = left > 0 and not view.taken_N.all()
        proposals = session.proposer.propose(view, 1) if is_open else ()
        record_proposer_events(writer, session)
        trial = _submit(writer, session, proposals)
        _stop(writer)
        why = "the budget is used up" if left <= 0 else "no configuration is left to propose"
        return trial, session.proposer.ending() or why


def tell(folder: Path, trial: int | str, result: TrialResult) -> Trial:
    """Record the result of a trial that was asked for, or of a configuration of the space; returns the judged trial.

    Raises UserError if that trial is not open, or if that configuration is not one of the space that has not run yet.
    """
    with _opened(folder) as (writer, session):
        if isinstance(trial, str):
            proposal = [_read_proposal(writer, session, trial)]
            begin_or_resume(writer, session)
            found = _submit(writer, session, proposal)
        else:
            found = next((each for each in writer.state.unfinished if each.number == trial), None)
        if found is None or found.handle is None:
            name = folder.name
            raise UserError(f"trial {trial} of {name} is not open: `ccl-search status {name}` lists its trials")
        write_model(session.jobs.handle(writer, found).trial_dir / RESULT_FILE, result)
        if not isinstance(trial, str):
            begin_or_resume(writer, session)
        session.jobs.collect_finished(writer, session.stop)
        _stop(writer)
        return writer.state.trials[found.number]


def _read_proposal(writer: RunWriter, session: Session, text: str) -> Proposal:
    """The configuration of `--config` as a proposal; raises UserError if it cannot be one."""
    rows = np.flatnonzero(session.space.matching(parse_assignments(text, session.space.knobs)))
    if len(rows) != 1:
        raise UserError(f"--config {text}: {len(rows)} configurations of the search space match, and one must")
    if view_search(writer, session, budget_left=1).taken_N[rows[0]]:
        raise UserError(f"--config {text}: this configuration ran already, is open, or cannot fit")
    return Proposal(session.space.config(int(rows[0])), "told", "measured without being asked for")


def _submit(writer: RunWriter, session: Session, proposals: Sequence[Proposal]) -> Trial | None:
    """Record a proposal and its job; returns its trial, or None if it was refused."""
    number = writer.next_trial
    accept_proposals(writer, session, proposals, view_search(writer, session, budget_left=1).taken_N.copy())
    session.jobs.start_waiting(writer, more=1)  # what was measured already takes no slot
    return writer.state.trials.get(number)


def _stop(writer: RunWriter) -> None:
    asked = ", ".join(f"`ccl-search tell {writer.folder.name} {trial.number}`" for trial in writer.state.unfinished)
    reason = f"it waits for {asked or f'`ccl-search ask {writer.folder.name}`'}"
    writer.record(SearchStopped(kind=EndKind.OTHER, reason=reason, time_s=time.time()))
