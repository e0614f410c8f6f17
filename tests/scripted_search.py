"""A search whose launcher is scripted by the test: no trial trains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from scripted_launcher import ScriptedLauncher

from cclsearch.evaluation.evaluate import TrialEvaluator
from cclsearch.evaluation.trial_input import make_input
from cclsearch.loop.jobs import JobRunner
from cclsearch.loop.session import Session, open_session
from cclsearch.plan.plan import plan_search
from cclsearch.plan.request import SearchRequest
from cclsearch.run.folder import create_run
from cclsearch.run.spec import SearchLimits
from cclsearch.scoring.outcome import Admission, Outcome


def open_search(project: Path, launcher: ScriptedLauncher, **limits: int) -> tuple[Path, Session]:
    """Return the folder and session of a search of the `tiny` card over a scripted launcher; nothing trains."""
    request = SearchRequest("tiny", SearchLimits(**{"budget": 4, **limits}), sampler="random", run_id="r")
    plan = plan_search(request)
    spec = plan.spec.model_copy(update={"provenance": launcher.provenance})
    folder = create_run(spec, project / "runs")
    session = open_session(folder)
    jobs = JobRunner(spec, launcher, TrialEvaluator(spec), lambda trial: make_input(spec, trial))
    return folder, replace(session, jobs=jobs, spec=spec)


def admit(outcome: Outcome) -> Outcome:
    """Return the outcome as if every rank had written its trace; other tests cover what admission checks."""
    admission = Admission(admitted=True, verdicts=())
    return outcome.model_copy(update={"admission": admission, "loss": outcome.metrics["step_time_s"]})
