"""A search whose launcher is scripted by the test: no trial trains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from scripted_launcher import ScriptedLauncher

from cclsearch.evaluation.evaluate import TrialEvaluator
from cclsearch.evaluation.trial_input import make_input
from cclsearch.loop.jobs import JobRunner
from cclsearch.loop.loop import run_search
from cclsearch.loop.session import Session, begin_or_resume, open_session
from cclsearch.plan.plan import plan_search
from cclsearch.plan.request import SearchRequest
from cclsearch.record.state import RunState
from cclsearch.record.writer import RunWriter
from cclsearch.run.folder import create_run, load_run
from cclsearch.run.spec import SearchLimits
from cclsearch.scoring.outcome import Admission, Outcome


def open_search(
    project: Path, launcher: ScriptedLauncher, *, admits: bool = False, **limits: int
) -> tuple[Path, Session]:
    """Return the folder and session of a search of the `tiny` card over a scripted launcher; nothing trains.

    With `admits`, every trial that ran to its end counts as if each rank had written its trace.
    """
    request = SearchRequest("tiny", SearchLimits(**{"budget": 4, **limits}), sampler="random", run_id="r")
    plan = plan_search(request)
    spec = plan.spec.model_copy(update={"provenance": launcher.provenance})
    folder = create_run(spec, project / "runs")
    session = open_session(folder)
    jobs = JobRunner(spec, launcher, TrialEvaluator(spec), lambda trial: make_input(spec, trial))
    session = replace(session, jobs=jobs, spec=spec)
    return folder, admit_all(session) if admits else session


def admit_all(session: Session, **changes: Any) -> Session:
    """Return the session with these changes and an evaluator that admits every trial that ran."""
    spec = changes.get("spec", session.spec)
    evaluate = TrialEvaluator(spec)
    jobs = replace(session.jobs, spec=spec, evaluate=lambda *arguments: admit(evaluate(*arguments)))
    return replace(session, jobs=jobs, **changes)


def run_session(folder: Path, session: Session) -> RunState:
    """Run the search until it ends, and return its state as the ledger has it."""
    with RunWriter(folder) as writer:
        begin_or_resume(writer, session)
        run_search(writer, session)
    return load_run(folder).state


def admit(outcome: Outcome) -> Outcome:
    """Return the outcome as if every rank had written its trace; a failure or an early end stays one."""
    if outcome.failure or outcome.is_pruned:
        return outcome
    admission = Admission(admitted=True, verdicts=())
    return outcome.model_copy(update={"admission": admission, "loss": outcome.metrics["step_time_s"]})
