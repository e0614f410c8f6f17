"""Runs a search in the terminal: live output, signals, the final summary. Used by `run`, `resume` and `sweep`."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from cclsearch.cli import EXIT_DEFECT, EXIT_FAILED, EXIT_OK, EXIT_SHARED_CAUSE
from cclsearch.core.errors import UserError
from cclsearch.core.terminal import can_redraw, print_wrapped
from cclsearch.propose.events import LlmLimitsSet
from cclsearch.record.event import EndKind, Event
from cclsearch.record.state import RunState
from cclsearch.record.writer import RunWriter, Watcher
from cclsearch.report.objective_figure import find_figure
from cclsearch.report.summary import summarize_as_json, summarize_run
from cclsearch.report.terminal import watch_json, watch_lines
from cclsearch.run.catalog import name_run
from cclsearch.run.folder import resume_command
from cclsearch.run.spec import RunSpec
from cclsearch.search.grow import grow_space
from cclsearch.search.growth import Wanted
from cclsearch.search.jobs import StopSignal
from cclsearch.search.loop import find_budget, run_search
from cclsearch.search.node_hours import keep_node_hours
from cclsearch.search.session import Session, begin_or_resume, open_session
from cclsearch.search.unknown_trials import UnknownPolicy


def drive_search(
    folder: Path,
    args: argparse.Namespace,
    *,
    budget: int = 0,
    confirm: int = 0,
    max_node_hours: float | None = None,
    events: Sequence[LlmLimitsSet] = (),
    unknown: UnknownPolicy | None = None,
    wanted: Wanted | None = None,
) -> int:
    """Run or continue the search in `folder`; returns 0 with a best configuration, 1 without one, 70 for our own error,
    3 if several configurations ended for the same reason and no trial was admitted.

    `events` record what the user changed for the rest of the search, such as limits on the LLM; `unknown` is what
    becomes of trials that the ledger does not contain; `wanted` is added to the search space first.
    """
    stop = StopSignal(leave_jobs=args.on_interrupt == "leave")
    with listen_for_stop(stop):
        session = replace(open_session(folder, stop=stop, log_to=args.log_to), tell=_tell)
        with RunWriter(folder) as writer, explain_write_errors(folder, args.runs):
            begin_or_resume(
                writer,
                session,
                budget=budget,
                confirm=confirm,
                keep_going=args.keep_going,
                stop_early=args.stop_early,
                unknown=unknown,
                max_node_hours=max_node_hours,
            )
            for event in events:
                writer.record(event.at(time.time()))
            if wanted:
                session = grow_space(writer, session, wanted, why="asked for by `resume --extend-knob`")
                if writer.state.growth and not (args.json or args.quiet):
                    print_wrapped(f"search space: {writer.state.growth.text}")
            _search(writer, session, args)
            state = writer.state
    with explain_write_errors(folder, args.runs):
        _print_result(session.spec, state, folder, args)
        if state.stopped and state.stopped.kind is EndKind.JUDGING_ERRORS:
            return EXIT_DEFECT
        if state.stopped and state.stopped.kind is EndKind.SHARED_CAUSE:
            return EXIT_SHARED_CAUSE
        return EXIT_OK if state.best else EXIT_FAILED


def _tell(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)


def _print_result(spec: RunSpec, state: RunState, folder: Path, args: argparse.Namespace) -> None:
    if args.json:
        print(summarize_as_json(spec, state, folder))
    else:
        if not args.quiet:
            print()
        print_end(spec, state, folder, runs=args.runs)


def _search(writer: RunWriter, session: Session, args: argparse.Namespace) -> None:
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
            shown: Watcher = stack.enter_context(_table(writer, session, total)) if live else lines
            writer.watch(stop_when_unread(shown, session.stop))
        try:
            with keep_node_hours(writer, session) as limited:
                run_search(writer, limited)
        except UserError as error:
            name = name_run(writer.folder, args.runs)
            ways = f"continue with `ccl-search resume {name}`, or cancel its jobs with `ccl-search clean {name}`"
            raise UserError(f"{error}; the search stopped, every finished trial is kept: {ways}") from None


@contextlib.contextmanager
def explain_write_errors(folder: Path, runs: Path | None) -> Iterator[None]:
    """Turn an OSError while writing a run into a UserError that says what is kept and how to continue."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader of the output has gone, which is not an error of the disk
    except OSError as error:
        place = error.filename if isinstance(error.filename, str) else folder
        raise UserError(
            f"cannot write to {str(place)!r}: {error.strerror or error}; every finished trial is kept."
            f" Fix that, then run `ccl-search resume {name_run(folder, runs)}`"
        ) from None


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
def _table(writer: RunWriter, session: Session, total: int) -> Iterator[Watcher]:
    from rich.console import Console

    from cclsearch.report.live import live_screen
    from cclsearch.report.progress import NodeHourCount, list_varied_knobs, observe_progress

    spec, folder, node_hours = session.spec, writer.folder, NodeHourCount(session.spec)
    knobs = list_varied_knobs(session.space)
    with live_screen(Console(), session.jobs.describe_status) as show:

        def watch(event: Event | None, state: RunState) -> None:
            used = node_hours.count(state)
            progress = observe_progress(
                spec, state, folder, knobs=knobs, node_hours=used, is_running=True, budget=total
            )
            show(progress)

        watch(None, writer.state)
        yield watch


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


def print_end(spec: RunSpec, state: RunState, folder: Path, *, runs: Path | None = None) -> None:
    """Print the result, and the next command."""
    name = name_run(folder, runs)
    if state.ended:
        print_wrapped(f"ended: {state.ended.reason}")
    elif state.stopped:
        print_wrapped(f"stopped: {state.stopped.reason.removeprefix('stopped by ')}")
    for line in summarize_run(spec, state, folder).lines:
        print_wrapped(line)
    if (state.stopped and not state.ended) or state.best is None:
        print(f"continue: {resume_command(spec, state, name)}")
    else:
        print(f"details:  ccl-search best {name}    ccl-search report {name}")
