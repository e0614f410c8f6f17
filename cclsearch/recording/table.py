"""The table of a recorded landscape: knobs, rows, and the loads that each configuration was measured at.

Every column left of `status`, except `grad_accum`, is a knob, unless the task names it as a load (`Task.loads`): rows
that differ in their load only are of one trial. Columns right of `status` are metrics, by their names or by those that
published tables give them (`Task.columns`).
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from cclsearch.card.fields import look_up
from cclsearch.card.load import read_task
from cclsearch.card.task import TASKS
from cclsearch.core.errors import UserError
from cclsearch.core.metrics import METRICS, NUM_ACCELERATORS, PEAK_MEMORY, MetricInfo
from cclsearch.core.numbers import parse_number
from cclsearch.core.text import one_line
from cclsearch.core.values import Config, Value
from cclsearch.space.knobs import meaning_of, rank_degrees
from cclsearch.space.table import MAX_CHOICES, Knob, count_ranks

DERIVED = "grad_accum"
# The first that exists is read.
TABLES = ("trials.csv", "landscape.csv")
"""Names of the table."""
REPLICAS, SPLIT = "dp", "devices"
"""Knobs for accelerators that a table counts but that its degrees of parallelism do not explain."""


class RowStatus(StrEnum):
    """End of the run of a recorded configuration."""

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
    loads: tuple[dict[str, float], ...] = ()
    """The metrics of each load, the least first, if there are loads; `metrics` are of the best by primary metric."""


def find_table(folder: Path) -> Path:
    """The folder's table, the first of `TABLES` that is a file; one that is missing if none is."""
    found = next((folder / name for name in TABLES if os.path.isfile(folder / name)), None)
    return found or folder / TABLES[0]


def find_task(data: Mapping[str, Any], folder: Path) -> Any:
    """The task of a recording: as its card states, else the one that the table's loads belong to.

    A card that names only its phase may be of a batch or of requests that arrive over time: its table tells.
    """
    task = TASKS.get(read_task(data, str(folder / "card.yaml")))
    workload = data.get("workload")
    stated = workload if isinstance(workload, dict) else {}
    if "task" in stated or not task.loads:
        return task
    work = stated.get("data")
    header = {*_read_lines(find_table(folder))[0], *(work if isinstance(work, dict) else ())}
    likely = (task, *(other for name in TASKS.names() if (other := TASKS.get(name)).loads and other is not task))
    return next((each for each in likely if header & set(each.loads)), likely[-1])


def _stop(problem: str) -> None:
    raise UserError(problem)


Table = tuple[tuple[Knob, ...], tuple[RecordedRow, ...], tuple[str, ...]]
"""Knobs with their choices, rows, and notes."""
Columns = dict[str, list[Value]]


def read_table(path: Path, task: Any, data: Mapping[str, Any], refuse: Callable[[str], None] = _stop) -> Table:
    """The knobs and rows of a table; each wrong cell or row is given to `refuse`, which may collect them.

    `data` is the card. Raises UserError if the file cannot be read at all.
    """
    header, *body = _read_lines(path)
    header = name_columns(header, task)
    check_header(path, header, task)
    left = header[: header.index("status")]
    header = [SPLIT if name == NUM_ACCELERATORS and name in left else name for name in header]
    if not body:
        raise UserError(f"{path}: needs at least one measured row; there is none")
    for line, cells in enumerate(body, start=2):
        if len(cells) != len(header):
            refuse(f"{path} row {line}: must have {len(header)} cells; it has {len(cells)}")
    body = [[*cells, *[""] * len(header)][: len(header)] for cells in body]
    left = [name for name in header[: header.index("status")] if name != DERIVED]
    _spell_ranks(header, body)
    columns = {
        name: _parse_column(path, name, [line[header.index(name)] for line in body], refuse)
        for name in left
        if name not in task.loads
    }
    table = [dict(zip(header, line, strict=True)) for line in body]
    _count_accelerators(columns, table, data)
    metrics = find_metrics(header[header.index("status") + 1 :], task)
    given = {name: task.loads[name] for name in left if name in task.loads}
    rows = []
    for n, cell in enumerate(table):
        try:
            row = _read_row(path, n, cell, columns, task.primary, metrics, given)
            rows.append(_complete_row(path, n, row, task, data))
        except UserError as error:
            refuse(str(error))
    kept, notes = _keep_better(rows, task.primary_metric, tuple(given.values()))
    choices = [sorted(set(values), key=lambda value: (isinstance(value, str), value)) for values in columns.values()]
    for name, distinct in zip(columns, choices, strict=True):
        if len(distinct) > MAX_CHOICES:
            refuse(f"{path}: knob {name!r} has {len(distinct)} different values; at most {MAX_CHOICES} work")
    return tuple(map(Knob, columns, map(tuple, choices))), tuple(kept), notes


def _spell_ranks(header: Sequence[str], body: Sequence[list[str]]) -> None:
    """Replace `true` in a column `ep`, as vLLM's switch has it, by all ranks of a stage; `false` is 1."""
    if "ep" not in header[: header.index("status")]:
        return
    for line in body:
        cell = dict(zip(header, line, strict=True))
        stated = _number(cell.get(NUM_ACCELERATORS, ""))
        if cell["ep"].lower() in ("true", "false"):
            degrees = [_number(cell.get(name, "")) or 1 for name in ("tp", "dp", "pp")]
            ranks = (stated / degrees[2] if stated else degrees[0] * degrees[1]) if cell["ep"].lower() == "true" else 1
            line[header.index("ep")] = f"{ranks:g}"


def _read_lines(path: Path) -> list[list[str]]:
    """The lines of a table, the column names first; raises UserError if it has none."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            table = [[cell.strip() for cell in line] for line in csv.reader(lines)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: must be a CSV table in UTF-8; {one_line(str(error))}") from error
    table = [line for line in table if any(line)]
    if not table:
        raise UserError(f"{path}: must begin with a line of column names; the file is empty")
    return table


def name_columns(header: Sequence[str], task: Any) -> list[str]:
    """The columns by the names of the task's metrics; a column keeps its name if another has that one already."""
    names: list[str] = []
    for name in header:
        ours = task.columns.get(name, name)
        names.append(name if ours in header or ours in names else ours)
    return names


def _count_accelerators(columns: Columns, cells: Sequence[Mapping[str, str]], data: Mapping[str, Any]) -> None:
    """Multiply the degrees of parallelism up to the accelerators that the table counts.

    The missing factor is a number of replicas, or an unknown split. Degrees of data-parallel attention that
    tensor-parallel ranks count already get another name.
    """
    degrees = [name for name in rank_degrees() if name in columns and all(isinstance(v, int) for v in columns[name])]
    have = [math.prod(int(columns[name][n]) for name in degrees) for n in range(len(cells))]  # type: ignore[arg-type]
    total = look_up(data, "workload.hardware.xpu_spec.total_count")
    if REPLICAS in degrees and "dp_attention" in columns and isinstance(total, int) and max(have) > total:
        columns["attention_dp"] = columns.pop(REPLICAS)
        return
    want = [_number(cell.get(NUM_ACCELERATORS, "")) for cell in cells]
    missing = [int(w / h) if w and w % h == 0 else 0 for w, h in zip(want, have, strict=True)]
    if all(missing) and max(missing) > 1 and REPLICAS not in columns:
        columns[REPLICAS if degrees else SPLIT] = list(missing)


def find_metrics(names: Sequence[str], task: Any) -> dict[str, bool]:
    """The columns that are metrics -> whether every value of theirs is above 0."""
    known = {PEAK_MEMORY: True, NUM_ACCELERATORS: True}
    known |= {m.name: m.is_positive or m.name == task.primary for m in task.metrics}
    return {name: known.get(name, False) for name in names if name in known or METRICS.find(name) is not None}


def check_header(path: Path, header: Sequence[str], task: Any) -> None:
    """Raise UserError if a table of these columns cannot be a recording."""
    for needed, others in (("status", ()), (task.primary, task.primary_from)):
        if needed not in header and not set(others) & set(header):
            raise UserError(f"{path}: needs a column {needed!r}; it has {', '.join(map(repr, header))}")
    if len(set(header)) != len(header):
        raise UserError(f"{path}: column names must be unique; it has {', '.join(map(repr, header))}")
    if not set(header[: header.index("status")]) - {DERIVED, *task.loads}:
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
        return parse_number(cell)
    except ValueError:
        return None


def _read_row(
    path: Path,
    n: int,
    cell: Mapping[str, str],
    columns: Mapping[str, Sequence[Value]],
    primary: str,
    metrics: Mapping[str, bool],
    given: Mapping[str, str],
) -> RecordedRow:
    try:
        status = RowStatus(cell["status"].lower())
    except ValueError:
        known = ", ".join(RowStatus)
        raise UserError(f"{path} row {n + 2}: status must be one of {known}; it is {cell['status']!r}") from None
    is_ok = status is RowStatus.OK
    found = {name: _number(cell[name]) for name in metrics if is_ok or name != primary}
    measured = {name: v for name, v in found.items() if v is not None and (v > 0 or not metrics[name])}
    for column, metric in given.items():
        value = _number(cell[column])
        if value is None or value <= 0:
            raise UserError(f"{path} row {n + 2}: {column} must be a number above 0; it is {cell[column]!r}")
        measured[metric] = value
    if is_ok and primary in metrics and primary not in measured:
        raise UserError(
            f"{path} row {n + 2}: {primary} must be a number above 0 if status is ok; it is {cell[primary]!r}"
        )
    return RecordedRow(Config({name: values[n] for name, values in columns.items()}), status, measured)


def _complete_row(path: Path, n: int, row: RecordedRow, task: Any, data: Mapping[str, Any]) -> RecordedRow:
    """Complete a row with the metrics that follow from its own; raises UserError if the primary one does not."""
    if row.status is not RowStatus.OK:
        return row
    try:
        accelerators = row.metrics.get(NUM_ACCELERATORS) or count_ranks(row.config)
    except ValueError:
        return row  # a degree that is not a number is refused when the search space is built
    metrics = task.complete_recorded(data, row.metrics, accelerators)
    if task.primary not in metrics:
        needed = " or ".join(task.primary_from)
        raise UserError(f"{path} row {n + 2}: has no {task.primary}, and nothing that it follows from ({needed})")
    return replace(row, metrics=metrics)


def _keep_better(
    rows: Sequence[RecordedRow], primary: MetricInfo, loads: Sequence[str]
) -> tuple[list[RecordedRow], tuple[str, ...]]:
    """One row for each configuration: the better of two at the same load, with every load that it was measured at."""
    kept: dict[tuple[Config, tuple[float, ...]], RecordedRow] = {}
    for row in rows:
        key = row.config, tuple(row.metrics[load] for load in loads)
        if is_better(row, kept.setdefault(key, row), primary):
            kept[key] = row
    dropped = len(rows) - len(kept)
    note = (f"{dropped} duplicate rows dropped: the best row of each configuration is kept",) if dropped else ()
    if not loads:
        return list(kept.values()), note
    trials: dict[Config, list[RecordedRow]] = {}
    for _, row in sorted(kept.items(), key=lambda item: item[0][1]):
        trials.setdefault(row.config, []).append(row)
    found = []
    for config in dict.fromkeys(row.config for row in rows):
        own = trials[config]
        best = next((row for row in own if not any(is_better(other, row, primary) for other in own)), own[0])
        measured = tuple(row.metrics for row in own if row.status is RowStatus.OK)
        found.append(replace(best, loads=measured))
    return found, note


def is_better(row: RecordedRow, other: RecordedRow, primary: MetricInfo) -> bool:
    """Whether a row has a better primary metric than the other; a failed row has none."""
    ours, theirs = (each.metrics.get(primary.name) for each in (row, other))
    return ours is not None and (theirs is None or primary.sign * ours < primary.sign * theirs)
