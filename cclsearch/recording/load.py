"""A recorded landscape: a tuning problem with measured configurations, as a card, a space and rows.

Layout: a folder with `card.yaml` (a CCL-Bench v1 card) and `trials.csv`. Every column of `trials.csv` left of `status`,
except `grad_accum`, is a knob; the search space is the rows, and a configuration not in the table was not measured.
A column right of it that is named like a metric, of the card's task or of the traces, has measurements.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from cclsearch.card.load import card_from_mapping, read_task
from cclsearch.card.model import PRECISION, Card
from cclsearch.core.errors import UserError
from cclsearch.core.metrics import PEAK_MEMORY, MetricInfo
from cclsearch.core.text import one_line
from cclsearch.core.values import Config, Value
from cclsearch.core.yaml_file import read_yaml
from cclsearch.plugins import METRICS, TASKS
from cclsearch.recording.defaults import complete_card
from cclsearch.space.knobs import meaning_of, named_degrees, stated_knobs
from cclsearch.space.table import MAX_CHOICES, Knob, Space, count_ranks, space_from_rows

DERIVED = "grad_accum"


class RowStatus(StrEnum):
    """How the run of a recorded configuration ended."""

    OK = "ok"
    OOM = "oom"
    FAILED = "failed"
    """Crashed or out of memory; the source does not say which."""


@dataclass(frozen=True)
class RecordedRow:
    """One measured configuration."""

    config: Config
    status: RowStatus
    metrics: dict[str, float]
    """Measured metrics by name; with the task's primary metric only if the status is `ok`."""


@dataclass(frozen=True, eq=False)
class Recording:
    """A measured landscape. `rows[n]` is the measurement of row n of `space`."""

    name: str
    card: Card
    space: Space
    rows: tuple[RecordedRow, ...]
    notes: tuple[str, ...] = ()
    """Missing fields of the card and the defaults used instead, one line each."""
    folder: Path | None = None

    @cached_property
    def primary(self) -> MetricInfo:
        """The primary metric of the card's task; every row with status `ok` has it."""
        metric: MetricInfo = TASKS.get(self.card.task).primary_metric
        return metric

    @cached_property
    def values(self) -> tuple[float | None, ...]:
        """The primary metric of each row; None if its status is not `ok`."""
        return tuple(row.metrics.get(self.primary.name) for row in self.rows)

    @cached_property
    def best_row(self) -> int:
        """Row of the best configuration in the table by the primary metric."""
        return min((self.primary.sign * value, row) for row, value in enumerate(self.values) if value is not None)[1]

    @property
    def best_value(self) -> float:
        """The primary metric of the best configuration in the table."""
        return self.rows[self.best_row].metrics[self.primary.name]

    def look_up(self, config: Mapping[str, Value]) -> RecordedRow | None:
        """The row of this configuration; None if it is not in the table."""
        row = self.space.row(config)
        return None if row is None else self.rows[row]


def load_recording(folder: Path | str) -> Recording:
    """The landscape in that folder.

    Of a configuration with several rows the best is kept. Raises UserError that names the file (and the row of an
    invalid cell) if a file is missing or no row has the primary metric of the card's task.
    """
    folder = Path(folder)
    for name in ("card.yaml", "trials.csv"):
        if not os.path.isfile(folder / name):
            raise UserError(f"a recording is a folder with card.yaml and trials.csv; {str(folder)!r} has no {name}")
    data = read_yaml(folder / "card.yaml")
    task = read_task(data, str(folder / "card.yaml"))
    knobs, rows, notes = read_table(folder / "trials.csv", TASKS.get(task))
    card, card_notes = _read_card(folder, data, rows)
    knobs, rows, precision_notes = _keep_precisions(card, knobs, rows)
    if not any(row.status is RowStatus.OK for row in rows):
        raise UserError(f"{folder / 'trials.csv'}: a recording needs at least one row with status ok; there is none")
    space = space_from_rows(knobs, [row.config for row in rows])
    notes = (
        *notes,
        *card_notes,
        *precision_notes,
        *_note_missing_degrees(card, knobs, rows),
        *_note_too_many(card, rows),
    )
    return Recording(folder.resolve().name, card, space, rows, notes, folder)


def _keep_precisions(
    card: Card, knobs: tuple[Knob, ...], rows: tuple[RecordedRow, ...]
) -> tuple[tuple[Knob, ...], tuple[RecordedRow, ...], tuple[str, ...]]:
    """Leave out rows in a precision that a model's card does not list: they did other work."""
    kept = tuple(row for row in rows if row.config.get(PRECISION, card.precision) in card.precisions)
    if card.model is None or len(kept) == len(rows):
        return knobs, rows, ()
    knobs = tuple(
        replace(k, choices=tuple(c for c in k.choices if k.name != PRECISION or c in card.precisions)) for k in knobs
    )
    note = (
        f"{len(rows) - len(kept)} of {len(rows)} rows left out: their precision is not {' or '.join(card.precisions)}"
        " (list others in workload.model.alternative_precisions of the card)"
    )
    return knobs, kept, (note,)


def _note_missing_degrees(card: Card, knobs: Sequence[Knob], rows: Sequence[RecordedRow]) -> tuple[str, ...]:
    """A note if a degree has no column and the ranks do not match the card: the column's name may be misspelled."""
    names = [knob.name for knob in knobs]
    missing = [degree for degree in stated_knobs(named_degrees(names), ()) if degree not in names]
    wanted = card.hardware.num_accelerators
    short = sum(count_ranks(row.config) != wanted for row in rows)
    if not missing or not short or "num_accelerators" not in TASKS.get(card.task).rules:
        return ()
    return (
        f"trials.csv has no column {' or '.join(missing)} (its knobs are {', '.join(names)}), so {short} of"
        f" {len(rows)} rows do not use the {wanted} accelerators of its card: is a column name misspelled?",
    )


def _note_too_many(card: Card, rows: Sequence[RecordedRow]) -> tuple[str, ...]:
    """A note if degrees multiply to more accelerators than the card has: those rows ran elsewhere, or are misread."""
    most = card.hardware.num_accelerators
    beyond = [row.config for row in rows if count_ranks(row.config) > most]
    if not beyond or "num_accelerators" not in TASKS.get(card.task).rules:
        return ()
    return (
        f"{len(beyond)} of {len(rows)} rows use more than the {most} accelerators of the card, such as {beyond[0]}"
        f" ({count_ranks(beyond[0])}): correct the rows, or the card's total_count",
    )


def find_recordings(folder: Path | str) -> list[Path]:
    """Every folder at or below `folder` that has both files, sorted; raises UserError if there is none."""
    root = Path(folder)
    if not os.path.isdir(root):
        raise UserError(f"there is no folder {str(root)!r} with recorded landscapes")
    found = sorted(_walk_recordings(root, set()))
    if not found:
        raise UserError(f"{str(root)!r} has no landscape: no folder at or below it has both card.yaml and trials.csv")
    return found


def _walk_recordings(folder: Path, seen: set[tuple[int, int]]) -> Iterator[Path]:
    """Yield the folders with both files, each once; links to folders are followed, also those that form a cycle."""
    try:
        status = folder.stat()
        below = [path for path in folder.iterdir() if path.is_dir()]
    except OSError:
        return
    if (status.st_dev, status.st_ino) in seen:
        return
    seen.add((status.st_dev, status.st_ino))
    if all((folder / name).is_file() for name in ("trials.csv", "card.yaml")):
        yield folder
    for path in sorted(below):
        yield from _walk_recordings(path, seen)


def _stop(problem: str) -> None:
    raise UserError(problem)


Table = tuple[tuple[Knob, ...], tuple[RecordedRow, ...], tuple[str, ...]]
"""Knobs with their choices, rows, and notes."""


def read_table(path: Path, task: Any, refuse: Callable[[str], None] = _stop) -> Table:
    """The knobs and rows of `trials.csv`; each wrong cell or row is given to `refuse`, which may collect them.

    Raises UserError if the file cannot be read at all.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            table = [[cell.strip() for cell in line] for line in csv.reader(lines)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: must be a CSV table in UTF-8; {one_line(str(error))}") from error
    table = [line for line in table if any(line)]
    if not table:
        raise UserError(f"{path}: must begin with a line of column names; the file is empty")
    header, *body = table
    check_header(path, header, task.primary)
    if not body:
        raise UserError(f"{path}: needs at least one measured row; there is none")
    for line, cells in enumerate(body, start=2):
        if len(cells) != len(header):
            refuse(f"{path} row {line}: must have {len(header)} cells; it has {len(cells)}")
    body = [[*cells, *[""] * len(header)][: len(header)] for cells in body]
    names = [name for name in header[: header.index("status")] if name != DERIVED]
    columns = {name: _parse_column(path, name, [line[header.index(name)] for line in body], refuse) for name in names}
    metrics = find_metrics(header[header.index("status") + 1 :], task)
    rows = []
    for n, cells in enumerate(body):
        try:
            rows.append(_read_row(path, n, dict(zip(header, cells, strict=True)), columns, task.primary, metrics))
        except UserError as error:
            refuse(str(error))
    kept, notes = _keep_better(rows, task.primary_metric)
    choices = [sorted(set(columns[name]), key=lambda value: (isinstance(value, str), value)) for name in names]
    for name, distinct in zip(names, choices, strict=True):
        if len(distinct) > MAX_CHOICES:
            refuse(f"{path}: knob {name!r} has {len(distinct)} different values; at most {MAX_CHOICES} work")
    knobs = tuple(map(Knob, names, map(tuple, choices)))
    return knobs, tuple(kept), notes


def find_metrics(names: Sequence[str], task: Any) -> dict[str, bool]:
    """The columns that are metrics -> whether every value of theirs is above 0."""
    known = {PEAK_MEMORY: True} | {m.name: m.is_positive or m.name == task.primary for m in task.metrics}
    return {name: known.get(name, False) for name in names if name in known or METRICS.find(name) is not None}


def check_header(path: Path, header: Sequence[str], primary: str) -> None:
    """Raise UserError if a table of these columns cannot be a recording."""
    for needed in ("status", primary):
        if needed not in header:
            raise UserError(f"{path}: needs a column {needed!r}; it has {', '.join(map(repr, header))}")
    if len(set(header)) != len(header):
        raise UserError(f"{path}: column names must be unique; it has {', '.join(map(repr, header))}")
    if not [name for name in header[: header.index("status")] if name != DERIVED]:
        raise UserError(f"{path}: needs at least one knob column left of 'status'; there is none")


def _parse_column(path: Path, name: str, cells: Sequence[str], refuse: Callable[[str], None]) -> list[Value]:
    """Cells of one knob as one type: whole numbers, numbers, true/false, or text."""
    if {cell.lower() for cell in cells} <= {"true", "false"}:
        return [cell.lower() == "true" for cell in cells]
    numbers = [_number(cell) for cell in cells]
    whole = [int(number) for number in numbers if number is not None and number.is_integer()]
    meaning = meaning_of(name)
    if meaning.minimum is not None and not meaning.needs:
        for line, (cell, number) in enumerate(zip(cells, numbers, strict=True), start=2):
            if number is None or not number.is_integer() or number < meaning.minimum:
                wanted = f"a whole number of at least {meaning.minimum}"
                refuse(f"{path} row {line}: {name} must be {wanted}; it is {one_line(cell, 40)!r}")
    if len(whole) == len(cells):
        return list(whole)
    known = [number for number in numbers if number is not None]
    return list(known) if len(known) == len(cells) else list(cells)


def _number(cell: str) -> float | None:
    try:
        number = float(cell)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _read_row(
    path: Path,
    n: int,
    cell: Mapping[str, str],
    columns: Mapping[str, Sequence[Value]],
    primary: str,
    metrics: Mapping[str, bool],
) -> RecordedRow:
    try:
        status = RowStatus(cell["status"].lower())
    except ValueError:
        known = ", ".join(RowStatus)
        raise UserError(f"{path} row {n + 2}: status must be one of {known}; it is {cell['status']!r}") from None
    is_ok = status is RowStatus.OK
    found = {name: _number(cell[name]) for name in metrics if is_ok or name != primary}
    measured = {name: v for name, v in found.items() if v is not None and (v > 0 or not metrics[name])}
    if is_ok and primary not in measured:
        raise UserError(
            f"{path} row {n + 2}: {primary} must be a number above 0 if status is ok; it is {cell[primary]!r}"
        )
    return RecordedRow(Config({name: values[n] for name, values in columns.items()}), status, measured)


def _keep_better(rows: Sequence[RecordedRow], primary: MetricInfo) -> tuple[list[RecordedRow], tuple[str, ...]]:
    kept: dict[Config, RecordedRow] = {}
    for row in rows:
        ours, theirs = (r.metrics.get(primary.name) for r in (row, kept.setdefault(row.config, row)))
        if ours is not None and (theirs is None or primary.sign * ours < primary.sign * theirs):
            kept[row.config] = row
    dropped = len(rows) - len(kept)
    note = f"{dropped} duplicate rows dropped: the best row of each configuration is kept"
    return list(kept.values()), (note,) if dropped else ()


def _read_card(folder: Path, data: Mapping[str, Any], rows: Sequence[RecordedRow]) -> tuple[Card, tuple[str, ...]]:
    path = folder / "card.yaml"
    completed, notes = complete_card(data, [row.config for row in rows], path)
    try:
        return card_from_mapping(completed, folder.resolve().name), notes
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
