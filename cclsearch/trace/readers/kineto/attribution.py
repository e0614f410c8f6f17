"""Assigns the rows of a Kineto file to its processes (a file may have those of all ranks of a node) and to steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cclsearch.trace.events import DEVICE_WORK, Kind, Reason, Step, rows_of_kinds
from cclsearch.trace.names.step_markers import MarkerSpan, read_marker, steps_of_marks
from cclsearch.trace.readers.kineto.scanner import DEVICE_KINDS
from cclsearch.trace.readers.plausibility import Dense
from cclsearch.trace.readers.stream import TraceError
from cclsearch.trace.readers.table_builder import match_launches, step_of_launches, steps_at

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
