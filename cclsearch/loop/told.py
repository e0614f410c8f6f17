"""Searches whose trials are measured elsewhere: `ask` records the next proposal, `tell` what was measured.

They are the searches of `cclsearch.search(card, measure)`: the same launcher, whose results are marked as the caller's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
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
        asked = ", ".join(f"`ccl-search tell {folder.name} {trial.number}`" for trial in writer.state.unfinished)
        reason = f"it waits for {asked or f'`ccl-search ask {folder.name}`'}"
        writer.record(SearchStopped(kind=EndKind.OTHER, reason=reason, time_s=time.time()))


def ask(folder: Path, budget: int = 0) -> tuple[Trial | None, str]:
    """Propose the next trial, and record it; returns it, or None and why there is none. `budget` raises the budget.

    Raises UserError while as many trials are open as may run at a time.
    """
    with _opened(folder) as (writer, session):
        if session.jobs.free_slots(writer) <= 0:
            texts = "; ".join(f"trial {trial.number}: {trial.config}" for trial in writer.state.unfinished)
            raise UserError(f"{texts}: `ccl-search tell` its result first, or begin a search with `--parallel N`")
        begin_or_resume(writer, session, Changes(budget=budget))
        number, left = writer.next_trial, find_budget(writer, session) - writer.state.num_spent
        if left <= 0:
            return None, "the budget is used up"
        view = view_search(writer, session, budget_left=left)
        proposals = () if view.taken_N.all() else session.proposer.propose(view, 1)
        record_proposer_events(writer, session)
        accept_proposals(writer, session, proposals, view.taken_N.copy())
        session.jobs.start_waiting(writer)
        return writer.state.trials.get(number), session.proposer.ending() or "no configuration is left to propose"


def tell(folder: Path, trial: int | str, result: TrialResult) -> Trial:
    """Record the result of a trial that was asked for, or of a configuration of the space; returns the judged trial.

    Raises UserError if that trial is not open, or if that configuration is not one of the space that has not run yet.
    """
    with _opened(folder) as (writer, session):
        number = writer.next_trial if isinstance(trial, str) else trial
        taken_N = view_search(writer, session, budget_left=1).taken_N.copy()
        proposals = []
        if isinstance(trial, str):
            rows = np.flatnonzero(session.space.matching(parse_assignments(trial, session.space.knobs)))
            if len(rows) != 1 or taken_N[rows[0]]:
                why = "it ran, is open, or cannot fit" if len(rows) == 1 else f"{len(rows)} of the search space match"
                raise UserError(f"--config {trial} must be one configuration that has not run: {why}")
            proposals = [Proposal(session.space.config(int(rows[0])), "told", "measured without being asked for")]
        elif all(each.number != number for each in writer.state.unfinished):
            raise UserError(f"trial {number} of {folder.name} is not open: see `ccl-search status {folder.name}`")
        begin_or_resume(writer, session)
        accept_proposals(writer, session, proposals, taken_N)
        session.jobs.start_waiting(writer, more=1)  # what was measured already takes no slot
        write_model(session.jobs.handle(writer, writer.state.trials[number]).trial_dir / RESULT_FILE, result)
        session.jobs.collect_finished(writer, session.stop)
        return writer.state.trials[number]
