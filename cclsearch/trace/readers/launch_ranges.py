"""Identifies collectives with an ambiguous kernel name (`SendRecv`) by the host range that launched them."""

from __future__ import annotations

import re
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from cclsearch.trace.events import CollectiveKind, EventTable, Kind
from cclsearch.trace.names.kinds import classify_collective
from cclsearch.trace.readers.columns import Interner

HOST_CALL = re.compile(r"^(nccl|rccl):|^(c10d|_c10d_functional)::")
_VAGUE = (CollectiveKind.UNKNOWN, CollectiveKind.SEND_RECV)


Ranges = tuple[np.ndarray, np.ndarray, list[CollectiveKind]]  # type: ignore[type-arg]


def name_bare_collectives(table: EventTable) -> EventTable:
    """Return the table with ambiguous collectives replaced by the kind of their range, such as `nccl:all_to_all`."""
    if "coll_id" not in table.sparse or not any(call.kind in _VAGUE for call in table.collectives):
        return table
    rows, numbers = table.sparse["coll_id"]
    vague = np.array([call.kind in _VAGUE for call in table.collectives], bool)
    launch = table.launch[rows]
    todo = np.flatnonzero(vague[numbers] & (launch >= 0))
    ranges = _host_calls(table)
    if not len(todo) or not ranges:
        return table
    distinct = Interner({call: number for number, call in enumerate(table.collectives)})
    numbers = numbers.copy()
    for index in todo:
        row = int(launch[index])
        kind = _innermost(ranges.get(int(table.stream[row])), int(table.ts_ns[row]))
        if kind is not None and kind not in _VAGUE:
            numbers[index] = distinct[replace(table.collectives[int(numbers[index])], kind=kind)]
    sparse = {**table.sparse, "coll_id": (rows, numbers)}
    return replace(table, collectives=tuple(distinct), sparse=MappingProxyType(sparse))


def _host_calls(table: EventTable) -> dict[int, Ranges]:
    """Return for each thread starts, ends and kinds of the ranges of collective calls, by start."""
    rows = table.rows_named(HOST_CALL, Kind.ANNOTATION, Kind.CPU_OP)
    kinds = {int(number): classify_collective(table.names[number]) for number in np.unique(table.name_id[rows])}
    rows = rows[[kinds[int(number)] not in _VAGUE for number in table.name_id[rows]]] if len(rows) else rows
    found = {}
    for thread in np.unique(table.stream[rows]):
        own = rows[table.stream[rows] == thread]
        found[int(thread)] = (table.ts_ns[own], table.end_ns[own], [kinds[int(n)] for n in table.name_id[own]])
    return found


def _innermost(ranges: Ranges | None, time_ns: int) -> CollectiveKind | None:
    if ranges is None:
        return None
    starts, ends, kinds = ranges
    last = int(np.searchsorted(starts, time_ns, side="right"))
    for index in range(last - 1, max(last - 9, -1), -1):
        if ends[index] >= time_ns:
            return kinds[index]
    return None
