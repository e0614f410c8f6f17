"""Shows a search on a terminal while it runs, as a table, and its result at the end."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from cclsearch.core.terminal import print_wrapped
from cclsearch.loop.jobs import StopSignal
from cclsearch.loop.session import Session
from cclsearch.record.event import EndKind, Event
from cclsearch.record.state import RunState
from cclsearch.record.writer import RunWriter, Watcher
from cclsearch.report.summary import summarize_run
from cclsearch.run.catalog import name_run
from cclsearch.run.folder import resume_command
from cclsearch.run.spec import RunSpec


def stop_when_unread(watch: Watcher, stop: StopSignal) -> Watcher:
    """Return the watcher, requesting a clean stop when the reader of its output has gone (`ccl-search run | head`)."""

    def guarded(event: Event, state: RunState) -> None:
        try:
            watch(event, state)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            stop.request("the reader of the output has gone", EndKind.OUTPUT_CLOSED)

    return guarded


@contextlib.contextmanager
def show_table(writer: RunWriter, session: Session, total: int) -> Iterator[Watcher]:
    """Draw the table at each event; yields what takes the events."""
    from rich.console import Console

    from cclsearch.report.progress import ProgressObserver, list_varied_knobs, live_screen

    observer, knobs = ProgressObserver(session.spec, writer.folder, budget=total), list_varied_knobs(session.space)
    with live_screen(Console(), session.jobs.describe_status) as show:

        def watch(event: Event | None, state: RunState) -> None:
            show(observer.observe(state, knobs, is_running=True))

        watch(None, writer.state)
        yield watch


def print_end(spec: RunSpec, state: RunState, folder: Path, *, runs: Path | None = None) -> None:
    """Print the result, and the next command."""
    name = name_run(folder, runs)
    if state.ended:
        print_wrapped(f"ended: {state.ended.reason}")
    elif state.stopped:
        print_wrapped(f"stopped: {state.stopped.reason.removeprefix('stopped by ')}")
    for line in summarize_run(spec, state, folder):
        print_wrapped(line)
    if (state.stopped and not state.ended) or state.best is None:
        print(f"continue: {resume_command(spec, state, name)}")
    else:
        print(f"details:  ccl-search best {name}    ccl-search report {name}")
