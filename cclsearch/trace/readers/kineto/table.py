"""Builds the tables of a Kineto file from all events: rows by process and step, kinds, launches, the run's setup."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from cclsearch.core.text import count_of
from cclsearch.trace.events import (
    DEVICE_WORK,
    NO_MEMORY_POINTS,
    Collective,
    DeviceInfo,
    EventTable,
    Kind,
    LaunchShape,
    MemoryPoints,
    OpShape,
    ProcessGroup,
    Reason,
    Step,
    rows_of_kinds,
)
from cclsearch.trace.names.kinds import MarkerSpan, classify_kernel, read_marker, steps_of_marks
from cclsearch.trace.readers.collectives import collective_from_args, collective_from_name, name_bare_collectives
from cclsearch.trace.readers.columns import Interner, positive_int
from cclsearch.trace.readers.kineto.builder import KinetoBuilder, read_grid, read_shape
from cclsearch.trace.readers.kineto.cpu import apply_cpu_rules
from cclsearch.trace.readers.kineto.scanner import DEVICE_KINDS
from cclsearch.trace.readers.plausibility import (
    LAUNCH,
    Dense,
    Problem,
    Sparse,
    cut_overlaps,
    drop_zero_times,
    has_device_backend,
    take_rows,
    with_problems,
)
from cclsearch.trace.readers.stream import TraceError
from cclsearch.trace.readers.table_builder import (
    mark_incomplete_steps,
    match_launches,
    start_at_zero,
    step_of_launches,
    steps_at,
)
from cclsearch.trace.view import call_both

# A smaller process is a damaged id.
MIN_SHARE = 0.05
"""Smallest share of a process, relative to the operators of the largest."""
MIN_LAUNCHED = 0.95
"""A process that launched less than this share of a device's rows, beside another, did not launch them."""


def split_processes(
    columns: Dense, process: NDArray[np.int16], host_rows: NDArray[np.int64], pids: Sequence[Any]
) -> list[NDArray[np.bool_]]:
    """Return a mask of rows for each process that is a rank; empty if the file has only one.

    `process`: index into `pids` of each row; `host_rows`: see `KinetoBuilder`. Rows of the host belong to their
    process, and rows of a device to the process of that number, or to the one that launched them: a device row's `pid`
    is mostly the device's number. Rows of neither (the profiler's own) belong to every process. Raises TraceError if
    two processes share a device's rows and nothing shows their owner.
    """
    hosts = _host_processes(host_rows)
    if len(hosts) < 2:
        return []
    device_rows = rows_of_kinds(columns["kind"], DEVICE_WORK)
    on_device = rows_of_kinds(columns["kind"], DEVICE_KINDS)
    owner = np.where(np.isin(process, hosts), process, np.int16(-1))
    if len(device_rows):
        lane = process.astype(np.int32) * 65536 + columns["device"]
        lanes = [(int(key), device_rows[lane[device_rows] == key]) for key in np.unique(lane[device_rows])]
        owners = {key: _owner(columns, process, hosts, rows) for key, rows in lanes}
        launching = set(process[(columns["kind"] == Kind.RUNTIME) & (columns["corr"] >= 0)].tolist())
        hosts = [host for host in hosts if host in launching or host in owners.values()]
        if len(hosts) < 2:
            return []
        if set(owners.values()) != set(hosts):
            shown = " and ".join(repr(pids[host]) for host in hosts[:4])
            whose = "nothing tells whose the device's rows are: give one file per process"
            raise TraceError(Reason.MIXED_RUNS, f"rows of the processes {shown}, and {whose}")
        owner[on_device] = [owners.get(key, -1) for key in lane[on_device].tolist()]
        first_device = {host: min(key & 65535 for key, found in owners.items() if found == host) for host in hosts}
        hosts.sort(key=lambda host: first_device[host])
    return [(owner == host) | (owner < 0) for host in hosts]


def _host_processes(host_rows: NDArray[np.int64]) -> list[int]:
    """Return the processes that ran operators or, without operators, those that called the runtime."""
    for counts in (host_rows[:, 0], host_rows[:, 1]):
        if counts.any():
            return [int(number) for number in np.flatnonzero(counts >= MIN_SHARE * counts.max())]
    return []


def _owner(columns: Dense, process: NDArray[np.int16], hosts: Sequence[int], rows: NDArray[np.int64]) -> int:
    """Return the process of these rows of one device, or -1.

    It is the process that the rows name; else, of the processes whose launches precede their rows, the one with the
    latest launches: ids repeat between processes, and a process further ahead launched before these rows too.
    """
    own = int(process[rows[0]])
    if own in hosts:
        return own
    found = [_launch_lags(columns, process == host, rows) for host in hosts]
    most = max(len(lags) for lags in found)
    least = max(MIN_LAUNCHED * most, 1)
    possible = [(float(lags.mean()), host) for lags, host in zip(found, hosts, strict=True) if len(lags) >= least]
    return min(possible)[1] if possible else -1


def _launch_lags(columns: Dense, is_of_process: NDArray[np.bool_], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the time from launch to start of the device rows that a launch of the process with their id precedes."""
    launches = np.flatnonzero(is_of_process & (columns["kind"] == Kind.RUNTIME))
    both = np.concatenate([launches, rows])
    _, launch, _ = match_launches(columns["kind"][both], columns["corr"][both])
    lags = columns["ts_ns"][rows] - columns["ts_ns"][both][launch]
    return np.asarray(lags[(launch >= 0) & (lags >= 0)])


DEVICE_SOURCE = "gpu_annotation"
"""`step_source` if only the device's timeline has markers."""
_HOST_KINDS = (Kind.CPU_OP, Kind.ANNOTATION)


def find_steps(columns: dict[str, Any], names: Sequence[str]) -> tuple[str, tuple[Step, ...], NDArray[np.int32]]:
    """Return the source of the step markers, the steps by start, and the step in which each row starts (-1: none).

    Host rows mark the steps; if none does, their copies on the device's timeline (`gpu_user_annotation`).
    """
    numbers = {name: number for number, name in enumerate(names) if read_marker(name) is not None}
    if not numbers:
        return "", (), steps_at((), columns["ts_ns"])

    def marks_on(kinds: tuple[Kind, ...], wanted: frozenset[str]) -> list[MarkerSpan]:
        is_marker = np.zeros(len(names), bool)
        is_marker[[numbers[name] for name in wanted]] = True
        rows = np.flatnonzero(is_marker.take(columns["name_id"]))
        rows = rows[rows_of_kinds(columns["kind"][rows], kinds)]
        order = np.lexsort((-columns["dur_ns"][rows], columns["ts_ns"][rows]))
        starts, ends = columns["ts_ns"][rows], columns["ts_ns"][rows] + columns["dur_ns"][rows]
        return [
            MarkerSpan(names[int(columns["name_id"][rows[i]])], int(starts[i]), int(ends[i])) for i in order.tolist()
        ]

    source, steps = steps_of_marks(numbers, lambda wanted: marks_on(_HOST_KINDS, wanted))
    if not steps:
        _, steps = steps_of_marks(numbers, lambda wanted: marks_on((Kind.DEVICE_ANNOTATION,), wanted))
        source = DEVICE_SOURCE if steps else ""
    return source, steps, steps_at(steps, columns["ts_ns"])


def attribute_rows(
    columns: dict[str, Any],
    names: Sequence[str],
    steps: Sequence[Step],
    source: str,
    step_id: NDArray[np.int32],
    device_rows: NDArray[np.int64],
    launch: NDArray[np.int32],
) -> NDArray[np.int32]:
    """Return `step_id` of every row: host rows by their start (as given), device rows by their launch.

    A device row without a launch record belongs to the step whose annotation covers it on its own stream. If only the
    device's timeline has markers, the row's own start decides.
    """
    if source == DEVICE_SOURCE:
        step_id[rows_of_kinds(columns["kind"], (Kind.RUNTIME, *_HOST_KINDS))] = -1
        return step_id
    step_of_launches(step_id, steps, device_rows, launch)
    bare = device_rows[launch < 0]
    numbers = {name: number for number, name in enumerate(names)}
    shown = {numbers[step.name]: i for i, step in enumerate(steps) if step.name in numbers}
    annotations = rows_of_kinds(columns["kind"], (Kind.DEVICE_ANNOTATION,))
    if not len(bare) or not len(annotations) or len(shown) < len(steps):  # a name that repeats names no step
        return step_id
    for row in annotations[np.isin(columns["name_id"][annotations], list(shown))].tolist():
        start = columns["ts_ns"][row]
        covered = (columns["ts_ns"][bare] >= start) & (columns["ts_ns"][bare] <= start + columns["dur_ns"][row])
        covered &= (columns["stream"][bare] == columns["stream"][row]) & (
            columns["device"][bare] == columns["device"][row]
        )
        step_id[bare[covered]] = shown[int(columns["name_id"][row])]
    return step_id


Decoded = TypeVar("Decoded", LaunchShape, OpShape)

_MAX_WORLD = 1_000_000
# A time after 1973; uptimes and profiler clocks are smaller.
_UNIX_NS = 10**17
"""Nanoseconds from which a time counts as Unix time."""


def build_tables(builder: KinetoBuilder, *, source: str, is_complete: bool) -> tuple[EventTable, ...]:
    """Return the table of each process in the builder, with step and launch of each row; almost every file has one.

    The file states the rank of one process at most: with several, no table has a rank, and none has the allocator's
    reports, which do not name their process.
    """
    columns, sparse = builder.rows.finish_columns(), builder.rows.finish_sparse()
    sparse["ext_of_op"], sparse["ext_of_device"] = builder.ext_of_op.finish(), builder.ext_of_device.finish()
    memory = builder.memory_points()
    masks = []
    if len(builder.processes) > 1:
        masks = split_processes(columns, builder.process.finish(), builder.host_rows, list(builder.processes))
    if not masks:
        return (_build_table(builder, columns, sparse, memory, source=source, is_complete=is_complete),)
    parts = [take_rows(mask, columns, sparse) for mask in masks]
    tables = [_build_table(builder, *part, NO_MEMORY_POINTS, source=source, is_complete=is_complete) for part in parts]
    world = tables[0].world_size if (tables[0].world_size or 0) >= len(tables) else None
    return tuple(replace(table, rank=-1, world_size=world) for table in tables)


def _build_table(
    builder: KinetoBuilder, columns: Dense, sparse: Sparse, memory: MemoryPoints, *, source: str, is_complete: bool
) -> EventTable:
    metadata = builder.reader.metadata
    columns, sparse, problems = drop_zero_times(columns, sparse, -1000 * (builder.base_us or 0))
    shift = start_at_zero(columns)
    names = tuple(builder.rows.names)
    groups = read_groups(metadata)
    with_args = sparse.pop("coll_id", None)

    def describe_rows() -> tuple[tuple[str, tuple[Step, ...], NDArray[np.int32]], dict[str, Any]]:
        """Return the steps, and the references of rows; a kernel that gets another kind stays on the device."""
        found = find_steps(columns, names)
        classes, collectives, sparse["coll_id"] = classify_kernels(columns, names, with_args, builder, groups)
        join_ops(sparse)
        sparse["grid_id"], grids = merge_equal(sparse.pop("grid_id", None), map(read_grid, builder.rows.grids))
        sparse["shape_id"], shapes = merge_equal(sparse.pop("shape_id", None), map(read_shape, builder.rows.shapes))
        return found, {"name_class": classes, "collectives": collectives, "grids": grids, "shapes": shapes}

    def find_launches() -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]:
        """The device rows, the launch of each, and the rows of calls that launch a kernel."""
        device_rows, launch, calls = match_launches(columns["kind"], columns["corr"])
        return device_rows, launch, _rows_named(columns, names, calls, LAUNCH)

    (device_rows, launch, launches), ((source_of_steps, steps, by_start), facts) = call_both(
        builder.threads, find_launches, describe_rows
    )
    sparse["launch"] = (device_rows.astype(np.int32), launch)
    columns["step_id"] = attribute_rows(columns, names, steps, source_of_steps, by_start, device_rows, launch)
    base_us = (builder.base_us or 0) + builder.reader.time_offset_us
    base_ns = base_us * 1000 + shift + (positive_int(metadata.get("baseTimeNanoseconds")) or 0)
    run = describe_run(metadata, groups, columns, device_rows, base_ns)
    if run["accelerator"] == "cpu" and has_device_backend(columns, names):
        run["accelerator"] = "gpu"
    problems += cut_overlaps(columns, device_rows) + _list_faults(builder, is_complete=is_complete)
    steps = mark_incomplete_steps(steps, columns["step_id"], launch, launches)
    table = EventTable(
        **columns,
        names=names,
        **facts,
        threads=tuple(str(builder.thread_names.get(tid, tid)) for _, tid in builder.rows.threads),
        steps=steps,
        step_source=source_of_steps,
        memory=MemoryPoints(memory.ts_ns - shift, memory.allocated_bytes, memory.reserved_bytes, memory.device),
        sparse={name: column for name, column in sparse.items() if len(column[0])},
        source=source,
        **run,
    )
    table = apply_cpu_rules(table) if table.accelerator == "cpu" else name_bare_collectives(table)
    return with_problems(table, device_rows, *problems)


def _list_faults(builder: KinetoBuilder, *, is_complete: bool) -> tuple[Problem, ...]:
    num_bad = builder.num_bad + builder.reader.num_bad
    bad = f"{count_of(num_bad, 'event')} with a broken time, name or category"
    faults = {Reason.UNREADABLE: num_bad and bad, Reason.TRACE_TRUNCATED: not is_complete and "the file is cut off"}
    return tuple((reason, text) for reason, text in faults.items() if text)


def classify_kernels(
    columns: dict[str, Any],
    names: Sequence[str],
    with_args: tuple[NDArray[np.int32], NDArray[np.int32]] | None,
    builder: KinetoBuilder,
    groups: dict[str, ProcessGroup],
) -> tuple[NDArray[np.uint8], tuple[Collective, ...], tuple[NDArray[np.int32], NDArray[np.int32]]]:
    """Return class of each name, distinct collectives and `coll_id`; kernels that communicate or copy get that kind."""
    kind, name_id = columns["kind"], columns["name_id"]
    kernels = np.flatnonzero(kind == Kind.COMPUTE)
    classes = np.zeros(len(names), np.uint8)
    kind_of_name = np.full(len(names), Kind.COMPUTE, np.uint8)
    for number in np.flatnonzero(np.bincount(name_id[kernels])).tolist():
        kind_of_name[number], classes[number] = classify_kernel(names[number])
    collectives = [
        collective_from_args(builder.collective_args[key], names[key[0]], groups) for key in builder.rows.collectives
    ]
    rows, numbers = with_args if with_args is not None else (np.zeros(0, np.int32), np.zeros(0, np.int32))
    is_kernel = kind[rows] == Kind.COMPUTE
    rows, numbers = rows[is_kernel], numbers[is_kernel]
    kind[rows] = Kind.COMM
    rest = kernels[kind[kernels] == Kind.COMPUTE]
    kind[rest] = kind_of_name[name_id[rest]]
    bare = rest[kind[rest] == Kind.COMM]
    by_name = {int(number): len(collectives) + n for n, number in enumerate(np.unique(name_id[bare]))}
    collectives += [collective_from_name(names[number]) for number in by_name]
    bare_numbers = np.array([by_name[int(number)] for number in name_id[bare]], np.int32)
    coll_id = (np.concatenate([rows, bare.astype(np.int32)]), np.concatenate([numbers, bare_numbers]))
    return classes, tuple(collectives), coll_id


def join_ops(sparse: Sparse) -> None:
    """Put `op` in place of the external ids: for each device row the operator with shapes and the same id."""
    none = (np.zeros(0, np.int32), np.zeros(0, np.int64))
    (op_rows, op_ids), (rows, ids) = sparse.pop("ext_of_op", none), sparse.pop("ext_of_device", none)
    if not len(op_ids) or not len(ids):
        return
    order = np.argsort(op_ids, kind="stable")
    index = np.searchsorted(op_ids[order], ids).clip(0, len(op_ids) - 1)
    found = op_rows[order[index]]
    same = op_ids[order[index]] == ids
    sparse["op"] = (rows[same], found[same])


def merge_equal(
    column: tuple[NDArray[np.int32], NDArray[np.int32]] | None, values: Iterable[Decoded | None]
) -> tuple[tuple[NDArray[np.int32], NDArray[np.int32]], tuple[Decoded, ...]]:
    """Return the column as numbers of distinct values, and the values; a row whose value is None has no number.

    The numbers on input are of the values' text, which has several spellings of one value.
    """
    distinct = Interner()
    numbers = np.array([-1 if value is None else distinct[value] for value in values], np.int32)
    if column is None:
        return (np.zeros(0, np.int32), np.zeros(0, np.int32)), ()
    found = numbers[column[1]]
    return (column[0][found >= 0], found[found >= 0]), tuple(distinct)


def read_groups(metadata: dict[str, Any]) -> dict[str, ProcessGroup]:
    """Return the process groups of `distributedInfo`, by name."""
    info = metadata.get("distributedInfo")
    configs = info.get("pg_config") if isinstance(info, dict) else None
    groups = {}
    for config in configs if isinstance(configs, list) else []:
        if not isinstance(config, dict):
            continue
        name = str(config.get("pg_name", ""))
        ranks = config.get("ranks")
        ranks = ranks if isinstance(ranks, list) else []
        members = tuple(r for r in ranks if isinstance(r, int) and 0 <= r < _MAX_WORLD)
        groups[name] = ProcessGroup(
            name,
            str(config.get("pg_desc", "")),
            members,
            positive_int(config.get("pg_size"), _MAX_WORLD + 1) or len(members) or None,
        )
    return groups


def describe_run(
    metadata: dict[str, Any],
    groups: dict[str, ProcessGroup],
    columns: dict[str, Any],
    device_rows: NDArray[np.int64],
    base_ns: int,
) -> dict[str, Any]:
    """Return rank, world size, groups, devices, host and clock; those that the file does not state are left out."""
    info = metadata.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    rank = info.get("rank")
    ordinals = np.flatnonzero(np.bincount(columns["device"][device_rows] + np.int32(1))[1:]).tolist()
    listed = metadata.get("deviceProperties")
    listed = [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
    has_gpu = bool(len(device_rows)) or bool(listed) or bool((columns["kind"] == Kind.RUNTIME).any())
    return {
        "rank": rank if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < 2**31 else -1,
        "world_size": positive_int(info.get("world_size"), _MAX_WORLD + 1),
        "backend": str(info.get("backend", "")),
        "groups": tuple(groups.values()),
        "devices": tuple(read_device(ordinal, listed) for ordinal in ordinals),
        "accelerator": "gpu" if has_gpu else "cpu",
        "host": str(metadata.get("host_name", "")),
        "base_ns": base_ns,
        "clock": "unix" if base_ns > _UNIX_NS else "trace",
    }


def read_device(ordinal: int, listed: list[dict[str, Any]]) -> DeviceInfo:
    """Return the device's entry in `deviceProperties`; only the ordinal without one."""
    item = next((item for item in listed if item.get("id") == ordinal), None)
    if item is None:
        return DeviceInfo(ordinal)
    return DeviceInfo(
        ordinal,
        name=str(item.get("name", "")),
        num_sms=positive_int(item.get("numSms")),
        memory_bytes=positive_int(item.get("totalGlobalMem")),
        max_threads_per_sm=positive_int(item.get("maxThreadsPerMultiprocessor")),
        registers_per_sm=positive_int(item.get("regsPerMultiprocessor")),
        shared_memory_per_sm_bytes=positive_int(
            item.get("sharedMemPerMultiprocessor", item.get("maxSharedMemoryPerMultiProcessor"))
        ),
    )


def _rows_named(
    columns: dict[str, Any], names: Sequence[str], rows: NDArray[np.int64], pattern: re.Pattern[str]
) -> NDArray[np.int64]:
    """Return the rows whose name matches."""
    name_id = columns["name_id"][rows]
    wanted = np.zeros(len(names), bool)
    for number in np.flatnonzero(np.bincount(name_id)).tolist():
        wanted[number] = bool(pattern.search(names[number]))
    return np.asarray(rows[wanted[name_id]])
