"""Run a search in its folder, or continue it, for `run`, `resume`, `sweep` and the Python API."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cclsearch.core.errors import UserError
from cclsearch.core.secrets.redact import redact
from cclsearch.launch.base import StartRefuser
from cclsearch.launch.in_process import Measure
from cclsearch.launch.profile import make_launcher
from cclsearch.loop.jobs import StopSignal
from cclsearch.loop.loop import run_search
from cclsearch.loop.meter import keep_node_hours
from cclsearch.loop.session import Changes, Session, begin_or_resume, grow_space, open_session
from cclsearch.record.state import RunState
from cclsearch.record.writer import RunWriter
from cclsearch.report.summary import summarize_run
from cclsearch.run.folder import create_run, load_run
from cclsearch.run.spec import RunSpec
from cclsearch.tracking.webhook import send_webhook

Around = Callable[[RunWriter, Session], contextlib.AbstractContextManager[None]]
"""Context manager around the trials of a search, such as a table on a terminal."""


def drive_search(
    folder: Path,
    *,
    stop: StopSignal,
    around: Around,
    continued: str,
    changes: Changes | None = None,
    measure: Measure | None = None,
    log_to: Sequence[str] = (),
    tell: Callable[[str], None] = lambda text: None,
) -> tuple[RunSpec, RunState]:
    """Run or continue the search in `folder` until it ends or `stop` is set; returns its inputs and its state.

    Raises UserError before it can begin. `continued` says how to continue if its folder cannot be written. `measure` is
    the caller's function that measures trials, `log_to` the trackers it writes to, and `tell` takes notes about the
    search.
    """
    changes = changes or Changes()
    session = replace(open_session(folder, stop=stop, measure=measure, log_to=log_to), tell=tell)
    with RunWriter(folder) as writer, explain_write_errors(folder, continued):
        begin_or_resume(writer, session, changes)
        for event in changes.events:
            writer.record(event.at(time.time()))
        if changes.wanted:
            session = grow_space(writer, session, changes.wanted, why="asked for by `resume --extend-knob`")
        with around(writer, session), keep_node_hours(writer, session) as limited:
            run_search(writer, limited)
        return session.spec, writer.state


@contextlib.contextmanager
def tell_chat(webhook: str | None, folder: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Post to a chat how the search in `folder` ended or failed; `tell` takes a note if posting fails.

    `webhook` is the environment variable with the URL, which `choose_webhook` checked; None posts nothing.
    """
    if webhook is None:
        yield
        return
    name = f"ccl-search {folder.name}"
    try:
        yield
    except UserError as error:
        _post(webhook, f"{name}: {error}", tell)
        raise
    run = load_run(folder)
    end = run.state.ended or run.state.stopped
    # The last line is a path of this machine: it is of no use in a chat.
    *lines, _evidence = summarize_run(run.spec, run.state, folder)
    head = f"{name} ({run.spec.workload}): {end.reason if end else run.status}"
    _post(webhook, "\n".join([head, *lines]), tell)


def _post(webhook: str, text: str, tell: Callable[[str], None]) -> None:
    problem = send_webhook(webhook, redact(text))
    if problem is not None:
        tell(problem)


@contextlib.contextmanager
def explain_write_errors(folder: Path, continued: str) -> Iterator[None]:
    """Turn an OSError while writing a run into a UserError with the files that remain and the way to continue."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader of the output has gone, which is not an error of the disk
    except OSError as error:
        place = error.filename if isinstance(error.filename, str) else folder
        raise UserError(
            f"cannot write to {str(place)!r}: {error.strerror or error}; every finished trial is kept."
            f" Fix that, then {continued}"
        ) from None


def start_run(spec: RunSpec, runs_folder: Path, *, extra_files: Mapping[str, str] | None = None) -> Path:
    """Create the run's folder with its frozen inputs; raises UserError, and creates nothing, if no job could start."""
    launcher = make_launcher(spec.profile, framework=spec.framework)
    if isinstance(launcher, StartRefuser):
        launcher.refuse_at_start()
    return create_run(spec, runs_folder, extra_files=extra_files)
