"""Drives a search from the terminal: watchers, signals, the summary at the end. `run`, `resume` and `sweep` use it."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from cclsearch.cli import EXIT_FAILED, EXIT_OK
from cclsearch.core.errors import UserError
from cclsearch.core.text import plain
from cclsearch.propose.base import ProposerEvent
from cclsearch.record.event import Event, Note
from cclsearch.record.state import RunState
from cclsearch.record.writer import RunWriter, Watcher
from cclsearch.report.summary import summarize_run
from cclsearch.report.terminal import LiveTable, watch_json, watch_lines
from cclsearch.run.catalog import name_run
from cclsearch.run.spec import RunSpec
from cclsearch.search.jobs import StopSignal
from cclsearch.search.loop import find_budget, run_search
from cclsearch.search.session import Session, begin_or_resume, open_session


def drive_search(
    folder: Path, args: argparse.Namespace, *, budget: int = 0, confirm: int = 0, remarks: Sequence[ProposerEvent] = ()
) -> int:
    """Run or go on with the search in `folder`; returns 0 with a best configuration, 1 without one.

    `remarks` are what the user changed for the rest of the search: the ledger keeps them.
    """
    stop = StopSignal(leave_jobs=args.on_interrupt == "leave")
    with listen_for_stop(stop):
        session = open_session(folder, stop=stop)
        with RunWriter(folder) as writer, tell_unwritable(folder, args.runs):
            begin_or_resume(writer, session, budget=budget, confirm=confirm)
            for remark in remarks:
                writer.record(Note(time_s=time.time(), topic=remark.topic, text=remark.text, data=dict(remark.data)))
            _search(writer, session, args)
            state = writer.state
    with tell_unwritable(folder, args.runs):
        _tell_end(session.spec, state, folder, args)
        return EXIT_OK if state.best else EXIT_FAILED


def _tell_end(spec: RunSpec, state: RunState, folder: Path, args: argparse.Namespace) -> None:
    if args.json:
        from cclsearch.report.summary import summarize_as_json

        print(summarize_as_json(spec, state, folder))
    else:
        if not args.quiet:
            print()
        print_end(spec, state, folder, runs=args.runs)


def _search(writer: RunWriter, session: Session, args: argparse.Namespace) -> None:
    total = find_budget(writer, session)
    if not (args.json or args.quiet):
        for line in session.spec.banner:
            print(f"note: {plain(line)}", flush=True)
    with contextlib.ExitStack() as stack:
        if args.json and not args.quiet:
            writer.watch(stop_unread(watch_json(), session.stop))
        elif not args.quiet:
            live = sys.stdout.isatty()
            shown = stack.enter_context(_table(session.spec, total)) if live else watch_lines(total)
            writer.watch(stop_unread(shown, session.stop))
        try:
            run_search(writer, session)
        except UserError as error:
            name = name_run(writer.folder, args.runs)
            ways = f"`ccl-search resume {name}` goes on, `ccl-search clean {name}` removes jobs that it left"
            raise UserError(f"{error}; the search stopped and kept all it had: {ways}") from None


@contextlib.contextmanager
def tell_unwritable(folder: Path, runs: Path | None) -> Iterator[None]:
    """Around what writes a run's ledger: an OSError in it is a UserError that says what is kept and how to go on."""
    try:
        yield
    except BrokenPipeError:
        raise  # whoever read the output is gone: no fault of the disk
    except OSError as error:
        raise UserError(
            f"cannot go on writing {str(folder)!r}: {error.strerror or error}; every finished trial is kept:"
            f" make room, then `ccl-search resume {name_run(folder, runs)}`"
        ) from None


def stop_unread(watch: Watcher, stop: StopSignal) -> Watcher:
    """The same watcher, which asks for a clean stop once whoever read the output is gone (`ccl-search run | head`)."""

    def guarded(event: Event, state: RunState) -> None:
        try:
            watch(event, state)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            stop.request("nobody reads the output any more")

    return guarded


def _table(spec: RunSpec, total: int) -> LiveTable:
    from rich.console import Console

    mark = "" if spec.provenance == "measured" else f" ({spec.provenance.value})"
    return LiveTable(Console(), budget=total, title=f"{spec.run_id}: {spec.card.name}, {spec.objective.name}{mark}")


@contextlib.contextmanager
def listen_for_stop(stop: StopSignal) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP ask for a clean stop; a second Ctrl-C breaks off at once."""

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.request(f"stopped by {signal.Signals(number).name}")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def print_end(spec: RunSpec, state: RunState, folder: Path, *, runs: Path | None = None) -> None:
    """The result, and what to type next."""
    name = name_run(folder, runs)
    ending = state.ended.reason if state.ended else (state.stopped.reason if state.stopped else "")
    if ending:
        print(f"ended: {ending}")
    for line in summarize_run(spec, state, folder).lines:
        print(plain(line))
    if state.stopped and not state.ended:
        print(f"go on:    ccl-search resume {name}")
    elif state.best is None:
        print(f"go on:    ccl-search resume {name} --budget {state.num_spent + spec.limits.budget}")
    else:
        print(f"see more: ccl-search best {name}    ccl-search report {name}")
