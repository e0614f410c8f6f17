"""Builds one device's event table from device rows and host events of an XLA trace."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cclsearch.trace.events import DeviceInfo, EventTable, Kind, OpCost, Step
from cclsearch.trace.readers.columns import Interner
from cclsearch.trace.readers.table_builder import match_launches, steps_at
from cclsearch.trace.readers.xla.collectives import describe_collective
from cclsearch.trace.readers.xla.planes import Plane, Stats, XlaRow, int_or_none
from cclsearch.trace.readers.xla.steps import HostEvents, find_program_steps, find_steps

_DEVICE_NAMES = ("device_type_string", "gpu_device_name", "device_vendor")
"""Statistics of a device's plane that name it, the most exact first."""
_COPY_SIZE = re.compile(r"(?:^|\s)(?:size|num_bytes):(\d{1,18})")


def build_xla_table(
    rows: list[XlaRow], lines: list[str], host: HostEvents, plane: Plane | None, ordinal: int, ordinals: frozenset[int]
) -> EventTable:
    """Return the table of one device (its rows first, then the host's); the caller sets rank, clock and source.

    `ordinals`: the ordinals of all devices of the file.
    """
    both = [*rows, *host.rows(len(lines))]
    base_ns = min(row.start_ps for row in both) // 1000
    names = Interner()
    columns = _read_columns(both, names, base_ns)
    columns["device"] = np.where(np.arange(len(both)) < len(rows), ordinal, -1).astype(np.int16)
    device_rows, launch, _ = match_launches(columns["kind"], columns["corr"])
    source, marks = find_steps(plane, host)
    if not marks:
        matched = zip(device_rows[launch >= 0].tolist(), launch[launch >= 0].tolist(), strict=True)
        launched = [(both[at].start_ps, both[row].duration_ps) for row, at in matched]
        source, marks = "program", find_program_steps(host, launched)
    steps = tuple(
        Step(number, name, round(begin / 1000) - base_ns, round(end / 1000) - base_ns)
        for number, name, begin, end in marks
    )
    step_id = steps_at(steps, columns["ts_ns"])
    if source in ("step_num", "program"):  # marked on the host: the launch decides, if it is recorded
        step_id[device_rows] = np.where(launch >= 0, step_id[launch], step_id[device_rows])
    distinct = Interner()
    sparse = {"launch": (device_rows.astype(np.int32), launch), **_sparse_columns(rows, distinct, ordinal, ordinals)}
    classes, costs = _describe_names(rows, names)
    return EventTable(
        **columns,
        step_id=step_id,
        names=tuple(name for _, name in names),
        name_class=classes,
        collectives=tuple(distinct),
        threads=(*lines, "host"),
        steps=steps,
        step_source=source if steps else "",
        op_costs=MappingProxyType(costs),
        sparse=MappingProxyType({name: column for name, column in sparse.items() if len(column[0])}),
        format="xla",
        devices=(_describe_device(plane, ordinal),),
        base_ns=base_ns,
    )


def _read_columns(rows: Sequence[XlaRow], names: Interner, base_ns: int) -> dict[str, Any]:
    """Return the dense columns except `device` and `step_id`; adds the names to `names`."""
    runs = Interner()
    values = [
        (
            row.start_ps,
            row.duration_ps,
            int(row.kind),
            names[(row.key, row.name)],
            row.line,
            runs[row.run] if row.run != -1 else -1,
        )
        for row in rows
    ]
    start, duration, kinds, name_id, stream, corr = (np.array(column, np.int64) for column in zip(*values, strict=True))
    return {
        "ts_ns": _to_ns(start - base_ns * 1000),
        "dur_ns": _to_ns(duration),
        "kind": kinds.astype(np.uint8),
        "name_id": name_id.astype(np.int32),
        "stream": stream.astype(np.int32),
        "corr": corr.astype(np.int32),
    }


def _to_ns(time_ps: NDArray[np.int64]) -> NDArray[np.int64]:
    return (time_ps + 500) // 1000


def _sparse_columns(
    rows: Sequence[XlaRow], distinct: Interner, ordinal: int, ordinals: frozenset[int]
) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
    calls = [n for n, row in enumerate(rows) if row.kind == Kind.COMM]
    described = [describe_collective(rows[n].name, rows[n].stats or {}, ordinal, ordinals) for n in calls]
    copies = [(n, size) for n, row in enumerate(rows) if (size := _copy_bytes(row)) is not None]
    return {
        "coll_id": (np.array(calls, np.int32), distinct.numbers_of(described, len(calls))),
        "bytes": (np.array([n for n, _ in copies], np.int32), np.array([size for _, size in copies], np.int64)),
    }


def _describe_names(rows: Sequence[XlaRow], names: Interner) -> tuple[NDArray[np.uint8], dict[int, OpCost]]:
    classes = np.zeros(len(names), np.uint8)
    costs: dict[int, OpCost] = {}
    for row in rows:
        number = names[(row.key, row.name)]
        classes[number] = row.compute
        if number not in costs and (cost := row.cost or (_cost_of(row.stats) if row.stats else None)):
            costs[number] = cost
    return classes, costs


def _describe_device(plane: Plane | None, ordinal: int) -> DeviceInfo:
    if plane is None:
        return DeviceInfo(ordinal, "cpu")
    stats = plane.stats
    peak, bandwidth = stats.get("peak_teraflops_per_second"), stats.get("peak_hbm_bw_gigabytes_per_second")
    return DeviceInfo(
        ordinal,
        next((str(stats[key]) for key in _DEVICE_NAMES if stats.get(key)), ""),
        num_sms=int_or_none(stats.get("core_count")),
        memory_bytes=int_or_none(stats.get("memory_size")),
        peak_flops=float(peak) * 1e12 if isinstance(peak, float) and 0 < peak < 1e9 else None,
        peak_memory_gbps=float(bandwidth) if isinstance(bandwidth, float) and 0 < bandwidth < 1e9 else None,
    )


def _cost_of(stats: Stats) -> OpCost | None:
    flops, accessed = _number(stats.get("flops")), _number(stats.get("bytes_accessed"))
    return OpCost(flops, accessed) if flops is not None or accessed is not None else None


def _copy_bytes(row: XlaRow) -> int | None:
    """Return the bytes of a GPU's copy (`size:1024` in its details). A TPU's copies state traffic, not a size."""
    if row.kind not in (Kind.MEMCPY, Kind.MEMSET) or not row.stats:
        return None
    details = row.stats.get("memcpy_details") or row.stats.get("memset_details") or ""
    found = _COPY_SIZE.search(str(details))
    return int(found[1]) if found else None


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if 0 <= number < 1e30 else None
