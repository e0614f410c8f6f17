"""`ccl-search recording`: list recordings, or check a table of measurements before a search uses it."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from cclsearch.cli import EXIT_OK, EXIT_USAGE
from cclsearch.core.content import list_recordings
from cclsearch.core.errors import UserError
from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import count_of, plain
from cclsearch.plan.target import find_recording
from cclsearch.recording.examine import Examined, examine_recording
from cclsearch.tasks.base import task_of

MAX_PROBLEMS = 30


def run(args: argparse.Namespace) -> int:
    """Print the names, or what a search would use of one; exit code 2 with one line per problem."""
    if args.action == "list":
        if args.recording is not None:
            raise UserError("`recording list` takes no folder; `recording check` does")
        print(json.dumps(list_recordings()) if args.json else "\n".join(list_recordings()))
        return EXIT_OK
    if args.recording is None:
        raise UserError("`recording check` needs a folder with card.yaml and trials.csv, or the name of a recording")
    path = Path(args.recording).expanduser()
    examined = examine_recording(path if path.exists() else find_recording(args.recording))
    if args.json:
        print(json.dumps(_as_json(examined)))
    elif examined.recording is not None:
        _print(examined, args.recording)
    for problem in () if args.json else examined.problems[:MAX_PROBLEMS]:
        print(f"ccl-search: {plain(redact(problem))}", file=sys.stderr)
    if len(examined.problems) > MAX_PROBLEMS and not args.json:
        print(f"ccl-search: {len(examined.problems) - MAX_PROBLEMS} more problems", file=sys.stderr)
    return EXIT_USAGE if examined.problems else EXIT_OK


def _as_json(examined: Examined) -> dict[str, object]:
    return {
        "folder": str(examined.folder),
        "problems": examined.problems,
        "rows": dict(examined.statuses),
        "knobs": dict(examined.knobs),
        "metrics": dict(examined.metrics),
        "notes": examined.notes,
    }


def _print(examined: Examined, given: str) -> None:
    recording = examined.recording
    assert recording is not None
    card, hardware = recording.card, recording.card.hardware
    statuses = ", ".join(f"{number} {status}" for status, number in examined.statuses)
    print(f"{recording.name}: {count_of(len(recording.rows), 'configuration')} ({statuses})")
    work = f"{card.family or card.task}, {task_of(card).describe_work(card)}"
    print(f"  card     {work}, {hardware.num_accelerators} x {hardware.accelerator}, {card.framework}")
    for name, values in examined.knobs:
        print(f"  knob     {name:<26} {values}")
    for name, number in examined.metrics:
        print(f"  metric   {name:<26} in {count_of(number, 'row')}")
    best, metric = recording.rows[recording.best_row], recording.primary
    print(f"  best     {best.config}: {metric.words} {recording.best_value:g} {metric.unit or ''}".rstrip())
    for note in examined.notes:
        print(f"note: {plain(redact(note))}")
    print(
        f"next: ccl-search run --recording {shlex.quote(given)}    ccl-search run ... --learn-from {shlex.quote(given)}"
    )
