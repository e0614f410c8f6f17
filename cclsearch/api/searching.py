"""Search from Python: on a launcher as the command line does, or with a function of the caller that measures."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from cclsearch.api.inputs import CardSource, Knobs, as_path, load_card, read_knobs
from cclsearch.api.result import SearchResult
from cclsearch.core.errors import UserError
from cclsearch.core.values import Value
from cclsearch.core.yaml_file import validate_mapping
from cclsearch.launch.in_process import InProcessLauncher, Measure
from cclsearch.loop.drive import drive_search, start_run
from cclsearch.loop.jobs import StopSignal
from cclsearch.loop.loop import find_budget
from cclsearch.loop.session import Changes, Session
from cclsearch.plan.plan import plan_search
from cclsearch.plan.request import SearchRequest
from cclsearch.record.event import EndKind, SearchStopped
from cclsearch.record.writer import RunWriter
from cclsearch.report.figures import find_figure
from cclsearch.report.terminal import watch_lines
from cclsearch.run import catalog
from cclsearch.run.folder import load_run
from cclsearch.run.spec import SearchLimits
from cclsearch.scoring.objective import Objective


def search(
    card: CardSource,
    measure: Measure | None = None,
    *,
    budget: int = 15,
    parallel: int = 1,
    objective: str | Objective | None = None,
    constraints: Sequence[str] = (),
    knobs: Knobs | None = None,
    use_fewer: bool = False,
    framework: str | None = None,
    launcher: str | None = None,
    recording: str | None = None,
    sampler: str | None = None,
    baseline: Mapping[str, Value] | None = None,
    log_to: Sequence[str] = (),
    learn_from: Sequence[str | os.PathLike[str]] | None = (),
    confirm: int = 0,
    max_hours: float | None = None,
    keep_going: bool = False,
    seed: int = 0,
    name: str | None = None,
    runs_folder: str | os.PathLike[str] | None = None,
    verbose: bool = False,
) -> SearchResult:
    """Search for the fastest configuration of a card; returns the result when the search has ended.

    `measure(config)` returns the seconds of a step (in general: the primary metric of the card's task), or metrics by
    name with that one. `parallel` calls run at a time, in threads. Without it, trials run where `launcher` says, as
    with `ccl-search run`. Raises UserError before anything runs if the search cannot work.
    """
    if measure is not None:
        _require_function(measure)
        if launcher is not None or recording is not None:
            where = f"launcher {launcher!r}" if launcher is not None else f"recording {recording!r}"
            raise UserError(f"measure and {where} exclude each other: your function measures in this process")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise UserError(f"seed must be a whole number from 0 to {2**32 - 1}, not {seed!r}")
    limits = {"budget": budget, "parallel": parallel, "confirm": confirm, "max_hours": max_hours}
    allowed = validate_mapping(SearchLimits, {**limits, "keep_going": keep_going}, "search")
    loaded = load_card(card)
    runs = as_path(runs_folder)
    request = SearchRequest(
        workload=loaded.name,
        card=loaded,
        limits=allowed,
        threads=parallel if measure is not None else None,
        launcher=launcher,
        recording=recording,
        framework=framework,
        objective=objective,
        constraints=tuple(constraints),
        sampler=sampler,
        seed=seed,
        use_fewer=use_fewer,
        learn_from=tuple(str(catalog.find_run(os.fspath(each), runs)) for each in learn_from or ()),
        earlier_runs=() if learn_from is None else tuple(str(folder) for folder in catalog.list_runs(runs)),
        baseline=baseline,
        log_to=tuple(log_to),
        knobs=read_knobs(knobs),
        run_id=name,
    )
    plan = plan_search(request)
    return _continue(start_run(plan.spec, catalog.runs_folder(runs)), measure, verbose=verbose)


def resume(
    run: str | os.PathLike[str] | SearchResult = "last",
    measure: Measure | None = None,
    *,
    budget: int | None = None,
    runs_folder: str | os.PathLike[str] | None = None,
    verbose: bool = False,
) -> SearchResult:
    """Continue a search that was stopped or killed, with a higher `budget` if one is given; no trial runs twice.

    A search with a function needs it again: `measure`.
    """
    if measure is not None:
        _require_function(measure)
    folder = run.folder if isinstance(run, SearchResult) else catalog.find_run(os.fspath(run), as_path(runs_folder))
    loaded = load_run(folder)
    if measure is not None and loaded.spec.profile.launcher != InProcessLauncher.name:
        raise UserError(f"{folder.name} does not measure with a function: leave measure out")
    total = max(loaded.spec.limits.budget, loaded.state.budget_raised_to)
    if budget is not None and budget < total:
        raise UserError(f"budget {budget}: the search has a budget of {total} trials, which can only be raised")
    return _continue(folder, measure, budget=budget or 0, verbose=verbose)


def _require_function(measure: object) -> None:
    if not callable(measure):
        raise UserError(f"measure must be a function of a configuration, not {measure!r}")


def _continue(folder: Path, measure: Measure | None, *, budget: int = 0, verbose: bool) -> SearchResult:
    stop = StopSignal(leave_jobs=measure is not None)  # a call cannot be ended: its result is read by `resume`

    @contextlib.contextmanager
    def around(writer: RunWriter, session: Session) -> Iterator[None]:
        if verbose:
            total, figure = find_budget(writer, session), find_figure(session.spec)
            writer.watch(watch_lines(total, figure, max_attempts=session.spec.limits.max_attempts))
        with _interruptible(writer, session, measure):
            yield

    how = f"call {_resume_call(folder, measure)}"
    drive_search(folder, stop=stop, around=around, continued=how, changes=Changes(budget=budget), measure=measure)
    return SearchResult(folder)


def _resume_call(folder: Path, measure: Measure | None) -> str:
    return f"cclsearch.resume({folder.name!r}{', measure' if measure else ''})"


@contextlib.contextmanager
def _interruptible(writer: RunWriter, session: Session, measure: Measure | None) -> Iterator[None]:
    """Let Ctrl-C interrupt the function, or stop the engine between two steps; KeyboardInterrupt says how to resume.

    In a thread other than the main one no Ctrl-C arrives, so nothing is changed.
    """
    launcher, stop = session.jobs.launcher, session.stop
    kept = f"every finished trial is kept; continue with {_resume_call(writer.folder, measure)}"

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.is_set() or (isinstance(launcher, InProcessLauncher) and launcher.is_measuring):
            raise KeyboardInterrupt
        stop.request("stopped by SIGINT", EndKind.SIGNAL)

    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, ask) if is_main else None
    try:
        yield
        if stop.kind is EndKind.SIGNAL:
            raise KeyboardInterrupt
    except KeyboardInterrupt as error:
        if writer.state.stopped is None:
            writer.record(SearchStopped(kind=EndKind.SIGNAL, reason="interrupted", time_s=time.time()))
        error.add_note(kept)
        raise
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before)
