"""Runs a search in the terminal: live table, signals, final summary. Used by `run`, `resume`, `sweep`, `watch`."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from cclsearch.cli import EXIT_DEFECT, EXIT_FAILED, EXIT_OK, EXIT_SHARED_CAUSE
from cclsearch.core.errors import UserError
from cclsearch.core.terminal import can_redraw, print_wrapped
from cclsearch.loop import drive
from cclsearch.loop.jobs import StopSignal
from cclsearch.loop.loop import find_budget
from cclsearch.loop.session import Changes, Session
from cclsearch.record.event import EndKind, Event
from cclsearch.record.state import RunState
from cclsearch.record.writer import RunWriter, Watcher
from cclsearch.report.figures import find_figure
from cclsearch.report.summary import summarize_as_json, summarize_run
from cclsearch.report.terminal import watch_json, watch_lines
from cclsearch.run.catalog import name_run
from cclsearch.run.folder import resume_command
from cclsearch.run.spec import RunSpec
from cclsearch.tracking.webhook import choose_webhook


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


SPECIAL = {EndKind.JUDGING_ERRORS: EXIT_DEFECT, EndKind.SHARED_CAUSE: EXIT_SHARED_CAUSE}
"""End of a search -> its exit code."""


def drive_in_terminal(folder: Path, args: argparse.Namespace, changes: Changes | None = None) -> int:
    """Run or continue the search in `folder`; returns 0 with a best configuration, 1 without one, 70 for our own error,
    3 if several configurations ended for the same reason and no trial was admitted.
    """
    stop, webhook = StopSignal(leave_jobs=args.on_interrupt == "leave"), choose_webhook(args.notify)

    @contextlib.contextmanager
    def show(writer: RunWriter, session: Session) -> Iterator[None]:
        if changes and changes.wanted and writer.state.growth and not (args.json or args.quiet):
            print_wrapped(f"search space: {writer.state.growth.text}")
        with _showing(writer, session, args):
            yield

    how = f"run `ccl-search resume {name_run(folder, args.runs)}`"
    with drive.tell_chat(webhook, folder, _tell):
        with listen_for_stop(stop):
            spec, state = drive.drive_search(
                folder, stop=stop, around=show, continued=how, changes=changes, log_to=args.log_to, tell=_tell
            )
        with drive.explain_write_errors(folder, how):
            if args.json:
                print(summarize_as_json(spec, state, folder))
            else:
                print("" if args.quiet else "\n", end="")
                print_end(spec, state, folder, runs=args.runs)
    usual = EXIT_OK if state.best else EXIT_FAILED
    return SPECIAL.get(state.stopped.kind, usual) if state.stopped else usual


def _tell(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _showing(writer: RunWriter, session: Session, args: argparse.Namespace) -> Iterator[None]:
    """Show the search as it runs; a UserError that ends it says how to continue."""
    total = find_budget(writer, session)
    if not (args.json or args.quiet):
        for line in session.spec.banner:
            print_wrapped(f"note: {line}")
    with contextlib.ExitStack() as stack:
        if args.json and not args.quiet:
            writer.watch(stop_when_unread(watch_json(), session.stop))
        elif not args.quiet:
            live = can_redraw()
            lines = watch_lines(total, find_figure(session.spec), max_attempts=session.spec.limits.max_attempts)
            shown: Watcher = stack.enter_context(show_table(writer, session, total)) if live else lines
            writer.watch(stop_when_unread(shown, session.stop))
        try:
            yield
        except UserError as error:
            name = name_run(writer.folder, args.runs)
            ways = f"continue with `ccl-search resume {name}`, or cancel its jobs with `ccl-search clean {name}`"
            raise UserError(f"{error}; the search stopped, every finished trial is kept: {ways}") from None


@contextlib.contextmanager
def listen_for_stop(stop: StopSignal) -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP request a clean stop; a second Ctrl-C interrupts at once."""

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        name = signal.Signals(number).name
        with contextlib.suppress(OSError):  # `print` may not be called again while it runs, as a handler may
            os.write(2, f"\n{name}: stopping the search; Ctrl-C ends it at once\n".encode())
        stop.request(f"stopped by {name}", EndKind.SIGNAL)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
