"""A search that can run: its parts, built from the frozen inputs of the run folder, and its first ledger events."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cclsearch.core.errors import UserError
from cclsearch.core.values import Config, Provenance
from cclsearch.core.version import __version__
from cclsearch.evaluation.comparison import TrialComparison, make_comparison
from cclsearch.evaluation.evaluate import TrialEvaluator
from cclsearch.evaluation.trial_input import make_input
from cclsearch.launch.base import WorkloadUser
from cclsearch.launch.in_process import InProcessLauncher, Measure
from cclsearch.launch.profile import make_launcher
from cclsearch.loop.early_stop import find_stop_above
from cclsearch.loop.growth import require_growth
from cclsearch.loop.jobs import JobRunner, StopSignal
from cclsearch.loop.memory_filter import HeldBack, hold_back
from cclsearch.loop.proposer import make_proposer
from cclsearch.loop.unknown_trials import UnknownPolicy, find_adoptable, find_unknown_trials, record_adopted
from cclsearch.plan.subject import locate_recording
from cclsearch.plan.warm_start import load_warm_start
from cclsearch.plan.workload import hash_space
from cclsearch.propose.base import Observation, Proposer
from cclsearch.record.event import ConfigsHeldBack, SearchResumed, SearchStarted
from cclsearch.record.state import RunState
from cclsearch.record.writer import RunWriter
from cclsearch.recording.load import load_recording
from cclsearch.recording.table import find_table
from cclsearch.run.folder import load_run
from cclsearch.run.log_masking import LogMasker
from cclsearch.run.spec import SPEC_FILE, RunSpec, hash_file, read_spec
from cclsearch.space.build import build_space
from cclsearch.space.framework import load_framework
from cclsearch.space.table import Space
from cclsearch.tasks.base import task_of
from cclsearch.trace.kernel_classes import load_classes
from cclsearch.tracking.targets import LogTarget, open_targets


class TrialLimit(Protocol):
    """Decides whether a further trial may start."""

    ending: str | None

    def allows(self, state: RunState, config: Config) -> bool:
        """Return whether a trial of that configuration may start; once one may not, none may."""


@dataclass(frozen=True)
class Session:
    """All that the search loop needs; `open_session` builds it."""

    spec: RunSpec
    space: Space
    proposer: Proposer
    jobs: JobRunner
    comparison: TrialComparison | None = None
    """Compares the trials with each other; None if nothing is measured or compared."""
    masker: LogMasker | None = None
    """Masks the logs of ended trials beside the search; None unless trials are measured."""
    prior: tuple[Observation, ...] = ()
    held_back: HeldBack = field(default_factory=HeldBack)
    stop: StopSignal = field(default_factory=StopSignal)
    now_s: Callable[[], float] = time.time
    tell: Callable[[str], None] = lambda text: None
    """Shows the user one line that no event of the ledger says."""
    log_to: tuple[LogTarget, ...] = ()
    """Trackers that follow the ledger."""
    max_trials: int | None = None
    """Trials in total that this session may spend, if that is less than the search's budget."""
    node_hours: TrialLimit | None = None
    """The limit in node-hours; None without one."""


def open_session(
    folder: Path, *, stop: StopSignal | None = None, measure: Measure | None = None, log_to: Sequence[str] = ()
) -> Session:
    """Return the parts of the search in a run folder; raises UserError if its inputs have changed since it began.

    `measure` is the caller's function that measures trials, for a run that was started with one; `log_to` names
    trackers besides those that the run was started with.
    """
    run = load_run(folder)
    spec = locate_recording(run.spec)
    if run.state.growth is not None:
        require_growth(read_spec(folder), run.state.growth)
    space = rebuild_space(spec)
    comparison = make_comparison(spec)
    stop = stop or StopSignal()
    load_classes()  # a malformed table of the project must stop the search here, not its first trace
    masker = LogMasker(folder) if spec.provenance is Provenance.MEASURED else None
    launcher = make_launcher(spec.profile, framework=spec.framework, run_dir=folder)
    if isinstance(launcher, WorkloadUser):
        launcher.use_workload(spec.card, space)
    if isinstance(launcher, InProcessLauncher):
        launcher.use_function(measure, spec.run_id)
    return Session(
        spec=spec,
        space=space,
        proposer=make_proposer(spec, folder, stop.is_set),
        jobs=JobRunner(
            spec,
            launcher,
            evaluate=TrialEvaluator(spec, comparison, masker),
            make_input=lambda trial: make_input(spec, trial),
            find_stop_above=lambda state, trial: find_stop_above(spec, space, state, trial),
        ),
        comparison=comparison,
        masker=masker,
        prior=load_warm_start(spec),
        held_back=hold_back(spec, space),
        stop=stop,
        log_to=open_targets((*spec.log_to, *log_to)),
    )


def rebuild_space(spec: RunSpec) -> Space:
    """Return the search space; raises UserError if it differs from the one that the search began with."""
    task_of(spec.card)  # first: without its package the framework file names unknown rules and numbers
    spec = locate_recording(spec)
    if spec.recording is not None:
        if hash_file(find_table(spec.recording.folder)) != spec.recording.sha256:
            raise UserError(f"the recording {str(spec.recording.folder)!r} has changed since the search began")
        space = load_recording(spec.recording.folder).space
    else:
        space = build_space(spec.card, load_framework(spec.framework), extra_knobs=spec.knobs, use_fewer=spec.use_fewer)
    if hash_space(space) != spec.space_sha256:
        raise UserError(
            f"the search space of {spec.card.name} has changed since the search began (another framework file or engine"
            " version): start a new search with `--learn-from` this one"
        )
    return space


def begin_or_resume(
    writer: RunWriter,
    session: Session,
    *,
    budget: int = 0,
    confirm: int = 0,
    keep_going: bool = False,
    stop_early: bool = False,
    unknown: UnknownPolicy | None = None,
    max_node_hours: float | None = None,
) -> None:
    """Record the start of the search, or its resumption with a higher budget or more confirmations.

    With `keep_going`, trials that end for the same reason no longer end a resumed search; with `stop_early`, it ends
    once nothing is likely to win.
    Raises UserError, before anything runs, if trial folders are unknown to the ledger and `unknown` does not say what
    becomes of them.
    """
    found = find_unknown_trials(writer.folder, writer.state)
    if found and unknown is None:
        raise found.refuse()
    adopted = find_adoptable(found, session.spec, session.space) if unknown is UnknownPolicy.ADOPT else {}
    left = tuple(sorted(set(found.trials) - set(adopted)))
    is_new = not writer.state.has_begun
    if is_new:
        _begin(writer, session)
    if found or not is_new:
        changed = SearchResumed(
            engine_version=__version__,
            budget=max(budget, writer.state.budget_raised_to, session.spec.limits.budget),
            confirm=max(confirm, writer.state.confirm_raised_to),
            keep_going=keep_going,
            stop_early=stop_early,
            max_node_hours=max_node_hours,
            left_trials=left,
        )
        _resume(writer, session, changed, confirms=bool(confirm))
    record_adopted(writer, adopted, time.time())


def _begin(writer: RunWriter, session: Session) -> None:
    now_s, spec = time.time(), session.spec
    sha256 = hash_file(writer.folder / SPEC_FILE)
    writer.record(SearchStarted(time_s=now_s, run_id=spec.run_id, engine_version=__version__, spec_sha256=sha256))
    if session.held_back.rows:
        held_back = session.held_back
        writer.record(ConfigsHeldBack(num_configs=len(held_back.rows), text=held_back.reason, time_s=now_s))


def _resume(writer: RunWriter, session: Session, changed: SearchResumed, *, confirms: bool) -> None:
    state, spec = writer.state, session.spec
    if state.spec_sha256 not in ("", hash_file(writer.folder / SPEC_FILE)):  # empty if the first line cannot be read
        raise UserError(f"{str(writer.folder / SPEC_FILE)!r} was edited after the search began; its inputs are frozen")
    if confirms and not spec.provenance.is_repeatable:
        raise UserError(f"--confirm: a {spec.provenance.value} figure cannot be confirmed by another run")
    writer.record(changed.at(time.time()))
