"""`ccl-search recording`: list recordings, or check a table of measurements before a search uses it."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path

from cclsearch.cli import EXIT_OK, EXIT_USAGE
from cclsearch.cli.output import complain, show
from cclsearch.core.content import list_recordings
from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import count_of, plain
from cclsearch.plan.target import find_recording
from cclsearch.recording.examine import Examined, examine_recording
from cclsearch.recording.load import Recording
from cclsearch.tasks.base import task_of

MAX_PROBLEMS = 30


def run(args: argparse.Namespace) -> int:
    """Print the names, or a search's use of one; exit code 2 with one line per problem."""
    if args.action == "list":
        show(list_recordings(), list_recordings(), as_json=args.json)
        return EXIT_OK
    path = Path(args.recording).expanduser()
    examined = examine_recording(path if path.exists() else find_recording(args.recording))
    data = {name: getattr(examined, name) for name in ("problems", "notes")}
    data |= {"rows": dict(examined.statuses), "knobs": dict(examined.knobs), "metrics": dict(examined.metrics)}
    lines = _describe(examined, examined.recording, args.recording) if examined.recording is not None else ()
    show({"folder": str(examined.folder), **data}, lines, as_json=args.json)
    for problem in () if args.json else examined.problems[:MAX_PROBLEMS]:
        complain(plain(problem))
    if len(examined.problems) > MAX_PROBLEMS and not args.json:
        complain(f"{len(examined.problems) - MAX_PROBLEMS} more problems")
    return EXIT_USAGE if examined.problems else EXIT_OK


def _describe(examined: Examined, recording: Recording, given: str) -> Iterator[str]:
    card, hardware = recording.card, recording.card.hardware
    statuses = ", ".join(f"{number} {status}" for status, number in examined.statuses)
    yield f"{recording.name}: {count_of(len(recording.rows), 'configuration')} ({statuses})"
    work = f"{card.family or card.task}, {task_of(card).describe_work(card)}"
    yield f"  card     {work}, {hardware.num_accelerators} x {hardware.accelerator}, {card.framework}"
    for name, values in examined.knobs:
        yield f"  knob     {name:<26} {values}"
    for name, number in examined.metrics:
        yield f"  metric   {name:<26} in {count_of(number, 'row')}"
    best, metric = recording.rows[recording.best_row], recording.primary
    yield f"  best     {best.config}: {metric.words} {recording.best_value:g} {metric.unit or ''}".rstrip()
    for note in examined.notes:
        yield f"note: {redact(note)}"
    name = shlex.quote(given)
    yield f"next: ccl-search run --recording {name}    ccl-search run ... --learn-from {name}"
