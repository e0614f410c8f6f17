"""`ccl-search watch RUN`: follow a search from another terminal, read-only; of a finished one, the table."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from cclsearch.cli.drive import print_end
from cclsearch.core.errors import UserError
from cclsearch.core.terminal import can_redraw
from cclsearch.core.text import plain
from cclsearch.loop.session import rebuild_space
from cclsearch.record.event import EVENT, Event
from cclsearch.record.lock import is_locked
from cclsearch.report.figures import find_figure
from cclsearch.report.summary import summarize_as_json
from cclsearch.report.terminal import describe_result
from cclsearch.run.catalog import find_run
from cclsearch.run.folder import Run, RunFollower, Standing, load_run
from cclsearch.run.spec import RunSpec

LOOK_S = 0.5


def run(args: argparse.Namespace) -> None:
    folder = find_run(args.run, args.runs)
    try:
        if args.json:
            _watch_events(folder)
            return
        last = _watch_table(folder) if can_redraw() else _watch_lines(folder)
    except KeyboardInterrupt:
        print("no longer watched; the search was not touched", file=sys.stderr)
        return
    print()
    if last.status is Standing.KILLED:
        print("killed: its process has gone and recorded no end")
    print_end(last.spec, last.state, folder, runs=args.runs)


def _follow(folder: Path, take: Callable[[Event], None] = lambda event: None) -> Iterator[Run]:
    """Yield the run whenever its ledger has changed, and last once it no longer runs; `take` gets each event."""
    follower, seen = RunFollower(folder), -1
    while True:
        loaded = follower.read(take)
        if loaded.is_running and follower.offset != seen:
            seen = follower.offset
            yield loaded
        if not is_locked(folder):
            yield follower.read(take)  # once more: its last events may be newer than what was read
            return
        time.sleep(LOOK_S)


def _watch_table(folder: Path) -> Run:
    from rich.console import Console

    from cclsearch.report.progress import ProgressObserver, live_screen

    last = load_run(folder)
    knobs, observer = _find_knobs(last.spec), ProgressObserver(last.spec, folder)
    with live_screen(Console()) as show:
        for last in _follow(folder):
            columns = knobs or tuple(dict.fromkeys(k for t in last.state.trials.values() for k in t.config))
            show(observer.observe(last.state, columns, is_running=last.is_running))
    return last


def _find_knobs(spec: RunSpec) -> tuple[str, ...]:
    """Return the knobs with several values; none if the search space cannot be built here, as of an older run."""
    from cclsearch.report.progress import list_varied_knobs

    try:
        return list_varied_knobs(rebuild_space(spec))
    except UserError:
        return ()


def _watch_lines(folder: Path) -> Run:
    """Print one line for each trial that has finished."""
    num_shown = 0
    for last in _follow(folder):
        figure, finished = find_figure(last.spec), last.state.trials.finish_order
        for number in finished[num_shown:]:
            print(plain(describe_result(last.state.trials[number], figure)), flush=True)
        num_shown = len(finished)
    return last


def _watch_events(folder: Path) -> None:
    """Print the output of `run --json`: the events so far and each further one, then the summary."""
    *_, last = _follow(folder, lambda event: print(EVENT.dump_json(event).decode(), flush=True))
    print(summarize_as_json(last.spec, last.state, folder))
