"""Describes a collective (operation, group, sizes) from Kineto's arguments, from a range, or from its kernel's name."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from cclsearch.trace.events import Collective, CollectiveKind, EventTable, Kind, ProcessGroup
from cclsearch.trace.names.kinds import bytes_per_element, classify_collective
from cclsearch.trace.readers.columns import Interner


def collective_from_args(args: dict[str, Any], kernel: str, groups: dict[str, ProcessGroup]) -> Collective:
    """Return the collective that a kernel's arguments describe (`Collective name`, `In msg nelems`, ...)."""
    name = str(args.get("Collective name") or "")
    kind = classify_collective(name) if name else CollectiveKind.UNKNOWN
    if kind == CollectiveKind.UNKNOWN:
        kind = classify_collective(kernel)
    dtype = args.get("dtype")
    size = bytes_per_element(dtype if isinstance(dtype, str) else None)
    in_nelems, out_nelems = _count(args.get("In msg nelems")), _count(args.get("Out msg nelems"))
    group = _text(args.get("Process Group Name"))
    known = groups.get(group or "")
    ranks = tuple(_numbers(args.get("Process Group Ranks"))) or (known.ranks if known else ())
    return Collective(
        kind=kind,
        group=group,
        group_desc=_text(args.get("Process Group Description")) or (known.desc if known else None),
        group_ranks=ranks or None,
        group_size=_count(args.get("Group size")) or (len(ranks) or None),
        dtype=_text(dtype),
        in_nelems=in_nelems,
        out_nelems=out_nelems,
        in_bytes=None if size is None or in_nelems is None else size * in_nelems,
        out_bytes=None if size is None or out_nelems is None else size * out_nelems,
        in_splits=tuple(_numbers(args.get("In split size"))),
        out_splits=tuple(_numbers(args.get("Out split size"))),
        peer=_peer(kind, args),
        has_args=bool(name) and in_nelems is not None,
    )


def _peer(kind: CollectiveKind, args: dict[str, Any]) -> int | None:
    key = {CollectiveKind.SEND: "Dst Rank", CollectiveKind.RECV: "Src Rank"}.get(kind)
    return _count(args.get(key)) if key else None


def collective_of_backend(
    kind: CollectiveKind, nelems: int | None, dtype: str | None, group: ProcessGroup | None, axis: str | None = None
) -> Collective:
    """Return the collective of a backend's range (`gloo:all_reduce`), whose tensor is its input.

    `group`: None if it is not known; `axis`: name of the group's mesh axis.
    """
    size, width, received = group.size if group else None, bytes_per_element(dtype), nelems
    if nelems is not None and kind is CollectiveKind.ALL_GATHER:
        received = nelems * size if size is not None else None
    elif nelems is not None and kind is CollectiveKind.REDUCE_SCATTER:
        received = nelems // size if size is not None else None
    return Collective(
        kind,
        group=group.name if group else None,
        group_desc=axis or (group.desc if group else None),
        group_ranks=group.ranks or None if group else None,
        group_size=size,
        dtype=dtype,
        in_nelems=nelems,
        out_nelems=received,
        in_bytes=None if nelems is None or width is None else nelems * width,
        out_bytes=None if received is None or width is None else received * width,
        has_args=nelems is not None,
    )


def collective_from_name(kernel: str) -> Collective:
    """Return the collective that a kernel's name implies, without group and sizes."""
    return Collective(kind=classify_collective(kernel))


def _count(value: Any) -> int | None:
    if isinstance(value, bool) or value is None:
        return None
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if 0 <= number < 2**62 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _numbers(value: Any) -> list[int]:
    """Parse `"[0, 1, 2]"` or the list itself; a list that the profiler truncated (`..., 7]`) gives nothing."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return []
    if not isinstance(value, list):
        return []
    numbers = [_count(item) for item in value]
    return [n for n in numbers if n is not None] if None not in numbers else []


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
