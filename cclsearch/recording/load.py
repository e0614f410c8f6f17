"""A recorded landscape: a tuning problem with measured configurations, as a card, a space and rows.

Layout: a folder with `card.yaml` (a CCL-Bench v1 card) and a table (`table.py`). The search space is the table's rows:
a configuration that is not in it was not measured.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from cclsearch.card.load import card_from_mapping
from cclsearch.card.model import PRECISION, Card
from cclsearch.card.task import TASKS
from cclsearch.core.errors import UserError
from cclsearch.core.metrics import MetricInfo
from cclsearch.core.text import count_of
from cclsearch.core.values import Value
from cclsearch.core.yaml_file import read_yaml
from cclsearch.recording.defaults import complete_card
from cclsearch.recording.table import RecordedRow, RowStatus, find_table, find_task, is_better, read_table
from cclsearch.space.framework import find_framework
from cclsearch.space.knobs import named_degrees, stated_knobs
from cclsearch.space.table import Knob, Space, count_ranks, space_from_rows


@dataclass(frozen=True, eq=False)
class Recording:
    """A measured landscape. `rows[n]` is the measurement of row n of `space`."""

    name: str
    card: Card
    space: Space
    rows: tuple[RecordedRow, ...]
    notes: tuple[str, ...]
    """Missing fields of the card and the defaults used instead, one line each."""
    folder: Path

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
    table = find_table(folder)
    for path in (folder / "card.yaml", table):
        if not os.path.isfile(path):
            raise UserError(
                f"a recording is a folder with card.yaml and trials.csv; {str(folder)!r} has no {path.name}"
            )
    stamps = tuple(
        (s.st_dev, s.st_ino, s.st_mtime_ns, s.st_size) for s in (table.stat(), (folder / "card.yaml").stat())
    )
    data, task, (knobs, rows, notes) = _read_files(folder, table, stamps)
    card, card_notes = _read_card(folder, data, rows, task)
    knobs, rows, precision_notes = _keep_precisions(card, knobs, rows)
    knobs, rows, equal_notes = _merge_equal(card, knobs, rows, task.primary_metric)
    if not any(row.status is RowStatus.OK for row in rows):
        raise UserError(f"{table}: a recording needs at least one row with status ok; there is none")
    space = space_from_rows(knobs, [row.config for row in rows], _list_loads(rows, task))
    notes = (
        *notes,
        *card_notes,
        *precision_notes,
        *equal_notes,
        *_note_missing_degrees(card, knobs, rows),
        *_note_too_many(card, rows),
    )
    return Recording(folder.resolve().name, card, space, rows, notes, folder)


@lru_cache(maxsize=4)
def _read_files(folder: Path, table: Path, stamps: object) -> tuple[dict[str, Any], Any, Any]:
    """The card's mapping, its task, and the knobs, rows and notes of the table.

    A search looks up its recording up to five times before its first trial; `stamps` tell a changed file.
    """
    data = read_yaml(folder / "card.yaml")
    task = find_task(data, folder)
    return data, task, read_table(table, task, data)


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


def _merge_equal(
    card: Card, knobs: tuple[Knob, ...], rows: tuple[RecordedRow, ...], primary: MetricInfo
) -> tuple[tuple[Knob, ...], tuple[RecordedRow, ...], tuple[str, ...]]:
    """One row for each run: of rows that differ only in knobs without effect, the better one, and a note."""
    framework = find_framework(card.framework)
    if framework is not None:
        knobs = tuple(replace(knob, inert_when=framework.find_inert(knob.name)) for knob in knobs)
    masked_NK = space_from_rows(knobs, [row.config for row in rows]).masked_NK
    kept: dict[bytes, RecordedRow] = {}
    for key, row in zip((codes.tobytes() for codes in masked_NK), rows, strict=True):
        if is_better(row, kept.setdefault(key, row), primary):
            kept[key] = row
    if len(kept) == len(rows):
        return knobs, rows, ()
    first = {id(row) for row in kept.values()}
    dropped = count_of(len(rows) - len(kept), "row")
    note = f"{dropped} dropped: the same run as another row but for knobs without effect"
    return knobs, tuple(row for row in rows if id(row) in first), (note,)


def _list_loads(rows: Sequence[RecordedRow], task: Any) -> list[list[float]]:
    """The loads of each row, nothing if no row has several."""
    names = tuple(task.loads.values())
    loads = [[load[name] for load in row.loads for name in names if name in load] for row in rows]
    return loads if any(len(own) > 1 for own in loads) else []


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
    if find_table(folder).is_file() and (folder / "card.yaml").is_file():
        yield folder
    for path in sorted(below):
        yield from _walk_recordings(path, seen)


def _read_card(
    folder: Path, data: Mapping[str, Any], rows: Sequence[RecordedRow], task: Any
) -> tuple[Card, tuple[str, ...]]:
    path = folder / "card.yaml"
    completed, notes = complete_card(data, rows, path, task)
    try:
        return card_from_mapping(completed, folder.resolve().name), notes
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
