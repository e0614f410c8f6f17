"""Chakra execution traces as input: our own export reads back; nodes without times are counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_trace_chakra import training_tables
from trace_tables import make_set

from cclsearch.plugins import METRICS
from cclsearch.trace.diagnosis.causes import median_window
from cclsearch.trace.events import CollectiveKind, EventTable, Kind, Reason
from cclsearch.trace.export.chakra import export_chakra
from cclsearch.trace.export.protobuf import bytes_field, delimited, present_uint_field, text_field, uint_field
from cclsearch.trace.read import read_traces
from cclsearch.trace.view import TraceView

METADATA = delimited(text_field(1, "0.0.4"))


def node(number: int, kind: int, start_us: int, duration_us: int, *attributes: tuple[str, int, int | str]) -> bytes:
    """Return a node; attributes are (name, field of the type, value)."""
    body = uint_field(1, number) + text_field(2, f"node {number}") + uint_field(3, kind)
    body += uint_field(6, start_us) + uint_field(7, duration_us)
    for name, place, value in attributes:
        value = bytes_field(place, value.encode()) if isinstance(value, str) else present_uint_field(place, value)
        body += bytes_field(10, text_field(1, name) + value)
    return delimited(body)


def describe(table: EventTable, rows: np.ndarray) -> list[tuple[object, ...]]:
    calls = [table.collectives[number] if number >= 0 else None for number in table.coll_id[rows].tolist()]
    first = int(table.ts_ns[rows[0]])
    return [
        (
            int(table.kind[row]),
            table.names[table.name_id[row]],
            (int(table.ts_ns[row]) - first) // 1000,
            int(table.dur_ns[row]),
            int(table.bytes[row]),
            call and (call.kind, call.message_bytes, call.peer),
        )
        for row, call in zip(rows.tolist(), calls, strict=True)
    ]


def test_our_own_export_reads_back(tmp_path: Path) -> None:
    trace = TraceView(make_set(training_tables()))
    export_chakra(trace, tmp_path)
    found = read_traces(tmp_path)
    assert (found.status, sorted(found.tables), found.world_size) == ("ok", [0, 1], 2)
    for rank, view in trace.ranks.items():
        start, end = median_window(view)
        rows = view.device_rows
        rows = rows[(view.table.ts_ns[rows] >= start) & (view.table.ts_ns[rows] < end)]
        table = found.tables[rank]
        assert describe(table, table.rows_of(*Kind)) == describe(view.table, rows)
        assert table.format == "chakra"


def test_a_linked_trace_has_host_and_device_rows(tmp_path: Path) -> None:
    on_host, on_device = ("is_cpu_op", 27, 1), ("is_cpu_op", 27, 0)
    call = (("comm_type", 9, 0), ("comm_size", 9, 4096), ("pg_name", 29, "3"), on_device, ("stream", 7, 20))
    data = (
        METADATA
        + node(1, 4, 10, 5, on_host)
        + node(2, 4, 20, 5, on_device, ("stream", 9, 7))
        + node(3, 7, 30, 9, *call)
    )
    (tmp_path / "rank3.et").write_bytes(data)
    found = read_traces(tmp_path)
    table = found.tables[3]
    assert table.kind.tolist() == [Kind.COMPUTE, Kind.COMM, Kind.CPU_OP]
    assert (table.ts_ns.tolist(), table.dur_ns.tolist()) == ([10_000, 20_000, 0], [5_000, 9_000, 5_000])
    assert table.stream[:2].tolist() == [7, 20]
    (one,) = table.collectives
    assert (one.kind, one.in_bytes, one.out_bytes, one.group) == (CollectiveKind.ALL_REDUCE, 4096, None, "3")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (METADATA, Reason.NO_GPU_EVENTS),
        (b"", Reason.UNREADABLE),
        (b"no protocol buffer at all", Reason.UNREADABLE),
        (METADATA + node(1, 4, 2**63, 5), Reason.UNREADABLE),
        (METADATA + node(1, 4, 7, 5)[:-2], Reason.TRACE_TRUNCATED),
    ],
)
def test_without_times_or_nodes_there_is_a_reason(tmp_path: Path, data: bytes, reason: Reason) -> None:
    (tmp_path / "chakra.0.et").write_bytes(data)
    found = read_traces(tmp_path)
    assert (found.status, found.reasons) == ("not_available", (reason,))


def test_a_file_cut_inside_a_node_is_partial(tmp_path: Path) -> None:
    (tmp_path / "chakra.0.et").write_bytes(METADATA + node(1, 4, 7, 5) + node(2, 4, 12, 5)[:-3])
    found = read_traces(tmp_path)
    assert (found.status, found.reasons, len(found.tables[0])) == ("partial", (Reason.TRACE_TRUNCATED,), 1)


@pytest.mark.parametrize("duration_us", [0, 5])
def test_without_start_times_nodes_and_bytes_are_counted(tmp_path: Path, duration_us: int) -> None:
    call = (("comm_type", 9, 0), ("comm_size", 9, 4096), ("involved_ranks", 29, "0,1,2,3"))
    nodes = [node(1, 4, 0, duration_us), node(2, 7, 0, duration_us, *call), node(3, 4, 0, duration_us)]
    (tmp_path / "chakra.0.et").write_bytes(METADATA + b"".join(nodes))
    trace = TraceView(read_traces(tmp_path))
    results = {name: METRICS.get(name)(trace) for name in ("op_calls", "comm_calls", "comm_volume", "op_flops")}
    assert {name: result.value for name, result in results.items()} == {
        "op_calls": 2,
        "comm_calls": 1,
        "comm_volume": 4096 * 2 * 3 / 4,
        "op_flops": None,
    }
    assert METRICS.get("comm_time")(trace).reason == Reason.NO_TIMES


def test_computation_alone_without_start_times_is_counted(tmp_path: Path) -> None:
    on_host = ("is_cpu_op", 27, 1)
    (tmp_path / "chakra.0.et").write_bytes(METADATA + node(1, 4, 0, 5, on_host) + node(2, 4, 0, 7, on_host))
    assert METRICS.get("op_calls")(TraceView(read_traces(tmp_path))).value == 2
