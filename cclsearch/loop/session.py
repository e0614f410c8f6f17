"""A search that can run: its parts, built from the frozen inputs of the run folder, and its first ledger events."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line
from cclsearch.core.values import Config, Provenance
from cclsearch.core.version import __version__
from cclsearch.evaluation.comparison import TrialComparison, make_comparison
from cclsearch.evaluation.evaluate import TrialEvaluator
from cclsearch.evaluation.trial_input import make_input
from cclsearch.launch.base import WorkloadUser
from cclsearch.launch.in_process import InProcessLauncher, Measure
from cclsearch.launch.profile import make_launcher
from cclsearch.loop.early_stop import find_stop_above
from cclsearch.loop.growth import MAX_GROWTHS, GrownSpace, Wanted, level_of, plan_growth, plan_levers, require_growth
from cclsearch.loop.jobs import JobRunner, StopSignal
from cclsearch.loop.unknown_trials import UnknownPolicy, find_adoptable, find_unknown_trials, record_adopted
from cclsearch.plan.subject import locate_recording
from cclsearch.plan.warm_start import load_warm_start
from cclsearch.plan.workload import hash_space
from cclsearch.propose.base import PROPOSERS, Observation, Proposer, ProposerContext
from cclsearch.propose.enqueued import EnqueuedProposer
from cclsearch.propose.events import NOT_ADDED, LlmLimitsSet, Note
from cclsearch.propose.study.choose import make_sampler
from cclsearch.record.event import ConfigsHeldBack, SearchResumed, SearchStarted
from cclsearch.record.state import RunState
from cclsearch.record.writer import RunWriter
from cclsearch.recording.load import load_recording
from cclsearch.recording.table import find_table
from cclsearch.run.folder import grow_spec, load_run
from cclsearch.run.log_masking import LogMasker
from cclsearch.run.spec import SAMPLER, SPEC_FILE, RunSpec, hash_file, read_spec
from cclsearch.space.build import build_space
from cclsearch.space.framework import load_framework
from cclsearch.space.opening import Extend
from cclsearch.space.table import RowSet, Space
from cclsearch.tasks.base import task_of
from cclsearch.trace.names.kernels import load_classes
from cclsearch.tracking.base import LogTarget, open_targets

NUM_BASES = 2
"""Best configurations near which levers are opened at once."""
MIN_FIT_PROBABILITY = 0.005
"""Below this probability to fit into memory, a configuration is not launched."""


@dataclass(frozen=True)
class HeldBack:
    """Rows of the search space that are not launched, and why."""

    rows: Set[int] = frozenset()
    reason: str = ""


class TrialLimit(Protocol):
    """Decides whether a further trial may start."""

    ending: str | None

    def allows(self, state: RunState, config: Config) -> bool:
        """Return whether a trial of that configuration may start; once one may not, none may."""


@dataclass(frozen=True)
class Session:
    """Inputs and parts of the search loop; `open_session` builds it."""

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
            opens_window=getattr(launcher, "shares_files", False) and load_framework(spec.framework).opens_window,
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
        space = build_space(spec.card, load_framework(spec.framework), spec.knobs, spec.use_fewer, spec.bases)
    if hash_space(space) != spec.space_sha256:
        raise UserError(
            f"the search space of {spec.card.name} has changed since the search began (another framework file or engine"
            " version): start a new search with `--learn-from` this one"
        )
    return space


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The user's changes for the rest of a search; by default none."""

    budget: int = 0
    """Trials in all, if above the present number."""
    confirm: int = 0
    """Finalists that run once more."""
    keep_going: bool = False
    """Whether trials that end for the same reason no longer end the search."""
    stop_early: bool = False
    """Whether the search ends once nothing is likely to win."""
    max_node_hours: float | None = None
    events: Sequence[LlmLimitsSet] = ()
    """Events to record first, such as limits on the LLM."""
    unknown: UnknownPolicy | None = None
    """Treatment of trials that the ledger does not contain."""
    wanted: Wanted = field(default_factory=dict)
    """Additions to the search space, made first."""


def begin_or_resume(writer: RunWriter, session: Session, changes: Changes | None = None) -> None:
    """Record the start of the search, or its resumption with what the user changes.

    Raises UserError, before anything runs, if trial folders are unknown to the ledger and `changes` does not decide
    about them.
    """
    changes, found = changes or Changes(), find_unknown_trials(writer.folder, writer.state)
    if found and changes.unknown is None:
        raise found.refuse()
    adopted = find_adoptable(found, session.spec, session.space) if changes.unknown is UnknownPolicy.ADOPT else {}
    is_new = not writer.state.has_begun
    if is_new:
        _begin(writer, session)
    if found or not is_new:
        _resume(writer, session, changes, tuple(sorted(set(found.trials) - set(adopted))))
    record_adopted(writer, adopted, time.time())


def _begin(writer: RunWriter, session: Session) -> None:
    now_s, spec = time.time(), session.spec
    sha256 = hash_file(writer.folder / SPEC_FILE)
    writer.record(SearchStarted(time_s=now_s, run_id=spec.run_id, engine_version=__version__, spec_sha256=sha256))
    if session.held_back.rows:
        held_back = session.held_back
        writer.record(ConfigsHeldBack(num_configs=len(held_back.rows), text=held_back.reason, time_s=now_s))


def _resume(writer: RunWriter, session: Session, changes: Changes, left_trials: tuple[int, ...]) -> None:
    state, spec = writer.state, session.spec
    if state.spec_sha256 not in ("", hash_file(writer.folder / SPEC_FILE)):  # empty if the first line cannot be read
        raise UserError(f"{str(writer.folder / SPEC_FILE)!r} was edited after the search began; its inputs are frozen")
    if changes.confirm and not spec.provenance.is_repeatable:
        raise UserError(f"--confirm: a {spec.provenance.value} figure cannot be confirmed by another run")
    resumed = SearchResumed(
        engine_version=__version__,
        budget=max(changes.budget, state.budget_raised_to, spec.limits.budget),
        confirm=max(changes.confirm, state.confirm_raised_to),
        keep_going=changes.keep_going,
        stop_early=changes.stop_early,
        max_node_hours=changes.max_node_hours,
        left_trials=left_trials,
    )
    writer.record(resumed.at(time.time()))


def make_proposer(spec: RunSpec, folder: Path, is_stopped: Callable[[], bool] = lambda: False) -> Proposer:
    """Return the proposer: enqueued configurations first, then the sampler, or the strategy that chooses LLM or
    sampler.

    Long work, such as a turn of the LLM, ends as soon as `is_stopped`.
    """
    if spec.strategy == SAMPLER:
        proposer = make_offline_proposer(spec, is_stopped)
    else:
        from cclsearch.loop.llm_agent import make_llm_context

        context = ProposerContext(
            make_sampler=lambda: make_offline_proposer(spec, is_stopped),
            parallel=spec.limits.parallel,
            is_stopped=is_stopped,
            llm=make_llm_context(spec, folder),
        )
        proposer = PROPOSERS.get(spec.strategy).from_context(context)
    return EnqueuedProposer(spec.first, proposer) if spec.first else proposer


def make_offline_proposer(spec: RunSpec, is_stopped: Callable[[], bool] = lambda: False) -> Proposer:
    """Return the proposer that asks the study's sampler: for `--dry-run`, and as fallback of a search with an LLM."""
    return make_sampler(spec.sampler, ProposerContext(parallel=spec.limits.parallel, is_stopped=is_stopped))


def hold_back(spec: RunSpec, space: Space) -> HeldBack:
    """Return the rows that almost certainly do not fit into memory; none if no row can fit."""
    # Reading a row of a recording costs nothing, so none of its rows is held back.
    if spec.recording is not None:
        return HeldBack()
    from cclsearch.stats.closed_form import predict_space

    prediction = predict_space(spec.card, space)
    if prediction is None:
        return HeldBack()
    oversized_N = prediction.fits_N < MIN_FIT_PROBABILITY
    if oversized_N.all() or not oversized_N.any():
        return HeldBack()
    rows, memory_gib_N = RowSet(oversized_N), prediction.memory_gib_N
    least = int(np.argmin(np.where(oversized_N, memory_gib_N, np.inf)))
    most = int(np.argmax(np.where(oversized_N, memory_gib_N, -np.inf)))
    reason = (
        f"{len(rows)} of {len(space)} configurations are held back: the memory model gives each less than"
        f" {MIN_FIT_PROBABILITY:.1%} probability to fit into {spec.card.hardware.memory_gib:g} GiB; predicted need:"
        f" {memory_gib_N[least]:.3g} GiB ({space.config(least)}) to {memory_gib_N[most]:.3g} GiB ({space.config(most)})"
    )
    return HeldBack(rows, reason)


def add_wanted(writer: RunWriter, session: Session) -> Session:
    """Return the session with the additions that the LLM's last turn asks for; a note explains a refusal."""
    # The turn is in the ledger before, so that a kill in between loses nothing.
    turn = writer.state.wanted
    if turn is None:
        return session
    try:
        return grow_space(writer, session, turn.adds, why=turn.why, level=level_of(session.spec))
    except UserError as error:
        text = one_line(f"what turn {turn.turn} asks for is not added: {error}", 500)
        writer.record(Note(topic=NOT_ADDED, text=text).at(session.now_s()))
        return session


def check_growth(folder: Path, state: RunState, wanted: Wanted) -> None:
    """Raise UserError if the search in that folder cannot have these values; nothing is recorded."""
    plan_growth(read_spec(folder), state.growth, state.num_growths, wanted, level=Extend.LISTED)


def grow_space(
    writer: RunWriter, session: Session, wanted: Wanted, *, why: str = "", level: Extend = Extend.LISTED
) -> Session:
    """Record that these values were added to the search space; returns the session over the grown space.

    Trials that ran before a knob was added have its neutral value. Raises UserError if the search reads a recording,
    if something may not be added, or if no configuration would be.
    """
    original, state = read_spec(writer.folder), writer.state
    return _grow(writer, session, plan_growth(original, state.growth, state.num_growths, wanted, level=level, why=why))


def open_levers(writer: RunWriter, session: Session, *, at_trial: int) -> Session:
    """Return the session with levers opened near the best configurations, from that trial on, if they are not yet."""
    state, spec = writer.state, session.spec
    has_levers = spec.limits.levers and spec.recording is None and load_framework(spec.framework).levers
    if not has_levers or state.best is None or state.num_spent < at_trial or state.num_growths >= MAX_GROWTHS:
        return session
    losses = state.losses_by_config()
    best = sorted(losses, key=lambda config: min(losses[config]))[:NUM_BASES]
    try:
        return (
            session
            if best[0] in spec.bases
            else _grow(writer, session, plan_levers(read_spec(writer.folder), state.growth, best))
        )
    except UserError:  # none is left, or the space would be too large
        limits = spec.limits.model_copy(update={"levers": False})
        return replace(session, spec=spec.model_copy(update={"limits": limits}))


def _grow(writer: RunWriter, session: Session, grown: GrownSpace) -> Session:
    writer.record(grown.event.at(session.now_s()))
    spec = grow_spec(session.spec, grown.event)
    if isinstance(session.jobs.launcher, WorkloadUser):
        session.jobs.launcher.use_workload(spec.card, grown.space)
    return replace(session, spec=spec, space=grown.space, held_back=hold_back(spec, grown.space))
