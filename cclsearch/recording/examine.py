"""Find every fault of a table of measurements, or describe what a search would use of it."""

from __future__ import annotations

import csv
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from cclsearch.card.load import inspect_mapping
from cclsearch.card.task import TASKS
from cclsearch.core.errors import UserError
from cclsearch.core.metrics import METRICS
from cclsearch.core.text import guess_name
from cclsearch.core.values import format_knob_value
from cclsearch.core.yaml_file import read_yaml
from cclsearch.recording.defaults import complete_card
from cclsearch.recording.load import Recording, load_recording
from cclsearch.recording.table import (
    DERIVED,
    TABLES,
    RecordedRow,
    find_metrics,
    find_table,
    find_task,
    name_columns,
    read_table,
)

CARD = "card.yaml"


@dataclass(frozen=True)
class Examined:
    """A recording, or the problems that keep it from being one."""

    folder: Path
    problems: tuple[str, ...]
    """One line each, with file, row and what is expected; empty if it can be replayed."""
    recording: Recording | None = None
    statuses: tuple[tuple[str, int], ...] = ()
    """Status -> number of rows."""
    knobs: tuple[tuple[str, str], ...] = ()
    """Knob -> its values."""
    metrics: tuple[tuple[str, int], ...] = ()
    """Metric -> number of rows that have it."""
    notes: tuple[str, ...] = ()
    """Unused columns, and the recording's own notes."""


def examine_recording(path: Path) -> Examined:
    """Examine the recording at a folder, or at one of its two files; never raises for its faults."""
    folder = path if os.path.isdir(path) else path.parent
    if not os.path.isdir(path) and path.name not in (CARD, *TABLES):
        named = f"{str(path)!r} must be a folder with {CARD} and {TABLES[0]}, or one of them"
        return Examined(folder, (f"{named}: rename the table to trials.csv and write card.yaml beside it",))
    missing = tuple(f"{file} is missing" for file in (folder / CARD, find_table(folder)) if not os.path.isfile(file))
    problems: list[str] = list(missing)
    rows = _check_table(folder, problems) if not missing else ()
    if not missing:
        _check_card(folder, rows, problems)
    if not problems:
        try:
            return _describe(load_recording(folder))
        except UserError as error:
            problems.append(str(error))
    return Examined(folder, tuple(dict.fromkeys(problems)))


def _check_table(folder: Path, problems: list[str]) -> tuple[RecordedRow, ...]:
    try:
        data = read_yaml(folder / "card.yaml")
        rows = read_table(find_table(folder), find_task(data, folder), data, problems.append)[1]
        return () if problems else rows
    except UserError as error:
        problems.append(str(error))
    return ()


def _check_card(folder: Path, rows: tuple[RecordedRow, ...], problems: list[str]) -> None:
    """Add every problem of the card; a replay's defaults fill in the same fields as for a replay."""
    path = folder / "card.yaml"
    try:
        data = read_yaml(path)
        completed, _ = complete_card(data, rows, path, find_task(data, folder))
        report = inspect_mapping(completed, folder.name, str(path))
        problems += [f"{path}: {problem}" for problem in report.blocking]
    except UserError as error:
        problems.append(str(error))


def _describe(recording: Recording) -> Examined:
    space, rows = recording.space, recording.rows
    counts = Counter(name for row in rows for name in row.metrics)
    knobs = ((knob.name, ", ".join(map(format_knob_value, knob.choices))) for knob in space.knobs)
    return Examined(
        recording.folder,
        (),
        recording,
        tuple(Counter(row.status.value for row in rows).items()),
        tuple(knobs),
        tuple(counts.items()),
        (*_note_columns(recording), *recording.notes, *recording.card.remarks),
    )


def _note_columns(recording: Recording) -> list[str]:
    """One line for each column right of `status` that no search uses."""
    with find_table(recording.folder).open(newline="", encoding="utf-8-sig") as lines:
        header = [cell.strip() for cell in next(csv.reader(lines))]
    task = TASKS.get(recording.card.task)
    header = name_columns(header, task)
    right = header[header.index("status") + 1 :]
    known = [metric.name for metric in task.metrics] + METRICS.names()
    unused = [name for name in right if name not in find_metrics(right, task) and name not in {DERIVED, "seed"}]
    return [f"column {name!r} is not used: no metric has this name{guess_name(name, known)}" for name in unused]
