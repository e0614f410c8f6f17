"""Reading traces: tables of each format, finding files, damaged files, and the cache."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trace_writer as write
from paths import TESTS

from cclsearch.core.text import one_line
from cclsearch.trace.events import DEVICE_WORK, CollectiveKind, EventTable, Kind, Reason
from cclsearch.trace.files.cache import cache_path
from cclsearch.trace.names.kernels import ComputeClass
from cclsearch.trace.read import read_traces


def read_one_table(path: Path) -> EventTable:
    found = read_traces(path, use_cache=False)
    assert len(found.tables) == 1, found.message
    return next(iter(found.tables.values()))


def durations_us(table: EventTable, *kinds: Kind) -> list[float]:
    return [float(n) / 1000 for n in table.dur_ns[table.rows_of(*kinds)]]


def test_a_gpu_trace_gives_kinds_collectives_steps_and_launches(tmp_path):
    table = read_one_table(write.write_kineto(tmp_path / "rank0_trace.json"))
    assert durations_us(table, Kind.COMPUTE) == [400.0] * 3
    assert durations_us(table, Kind.COMM) == [300.0] * 3
    assert durations_us(table, Kind.MEMCPY) == [50.0] * 3
    kernel, comm, copy = (int(table.rows_of(kind, step=1)[0]) for kind in (Kind.COMPUTE, Kind.COMM, Kind.MEMCPY))
    call = table.collectives[table.coll_id[comm]]
    assert (call.kind, call.in_bytes, call.group_ranks) == (CollectiveKind.ALL_REDUCE, 2 << 20, (0, 1))
    assert table.name_class[table.name_id[kernel]] == ComputeClass.GEMM
    assert table.names[table.name_id[table.launch[kernel]]] == "cudaLaunchKernel"
    assert table.shapes[table.shape_id[table.op[kernel]]].dims == ((64, 32), (32, 16))
    assert table.grids[table.grid_id[kernel]].blocks == 216
    assert table.blocks_per_sm[kernel] == 2.0
    assert np.isnan(table.blocks_per_sm[comm])
    assert table.bytes[copy] == 4096
    assert [step.number for step in table.steps] == [5, 6, 7]
    assert table.devices[0].num_sms == 108
    assert table.clock == "unix"


def test_device_rows_belong_to_the_step_of_their_launch_not_of_their_own_time(tmp_path):
    late = write.kineto_document(write.gpu_events(lag_us=1500.0))
    table = read_one_table(write.write_kineto(tmp_path / "trace.json", late))
    rows = table.rows_of(Kind.COMPUTE)
    assert table.step_id[rows].tolist() == [0, 1, 2]
    assert table.ts_ns[rows[0]] > table.steps[1].start_ns


def test_kernels_without_a_launch_record_belong_to_no_step(tmp_path):
    backlog = write.span("kernel", "leftover", 1001.0, 20.0, device=0, stream=7, correlation=3)
    document = write.kineto_document([backlog, *write.gpu_events()])
    table = read_one_table(write.write_kineto(tmp_path / "trace.json", document))
    row = next(int(r) for r in table.rows_of(Kind.COMPUTE) if table.names[table.name_id[r]] == "leftover")
    assert (table.step_id[row], table.launch[row]) == (-1, -1)


def test_a_step_whose_kernels_are_cut_off_by_the_window_is_incomplete(tmp_path):
    events = [e for e in write.gpu_events() if not (e["cat"] in ("kernel", "gpu_memcpy") and e["ts"] > 3000)]
    table = read_one_table(write.write_kineto(tmp_path / "trace.json", write.kineto_document(events)))
    assert [step.complete for step in table.steps] == [True, True, False]


@pytest.mark.parametrize("layout", ["kineto", "one line", "compact", "indented", "bare list"])
def test_every_layout_of_json_gives_the_same_table(tmp_path, layout):
    document = write.kineto_document(write.gpu_events(steps=40))
    text = {
        "kineto": lambda: write.layout_kineto(document),
        "one line": lambda: json.dumps(document),
        "compact": lambda: json.dumps(document, separators=(",", ":")),
        "indented": lambda: json.dumps(document, indent=4),
        "bare list": lambda: json.dumps(document["traceEvents"]),
    }[layout]()
    table = read_one_table(write.write_kineto(tmp_path / "trace.json.gz", text=text))
    expected = read_one_table(write.write_kineto(tmp_path / "other" / "trace.json", document))
    assert np.array_equal(table.ts_ns, expected.ts_ns)
    assert np.array_equal(table.step_id, expected.step_id)
    assert table.names == expected.names


def test_unix_microseconds_keep_their_nanoseconds(tmp_path):
    """A float64 has a resolution of 0.25 us there; the digits in the file are exact."""
    events = [
        write.span("cpu_op", "first", 0, 1, tid=1),
        write.span("kernel", "second", 0, 1, device=0, stream=7, correlation=1),
    ]
    text = write.layout_kineto(write.kineto_document(events, base_ns=0)).replace('"dur": 1', '"dur": 50.013')
    text = text.replace('"ts": 0', '"ts": 1712195495519703.772', 1).replace('"ts": 0', '"ts": 1712195495519761.133', 1)
    table = read_one_table(write.write_kineto(tmp_path / "trace.json", text=text))
    assert table.ts_ns.tolist() == [0, 57_361]
    assert table.dur_ns.tolist() == [50_013] * 2
    assert table.base_ns == 1712195495519703772


def test_categories_of_2021_are_known(tmp_path):
    events = [
        write.span("Operator", "ProfilerStep#3", 1000, 500),
        write.span("Runtime", "cudaLaunchKernel", 1010, 5, correlation=9),
        write.span("Kernel", "volta_sgemm_64x64_nt", 1100, 50, device=0, stream=7, correlation=9),
        write.span("Memset", "Memset (Device)", 1200, 5, device=0, stream=7, correlation=10, bytes=16),
    ]
    table = read_one_table(write.write_kineto(tmp_path / "trace.json", write.kineto_document(events)))
    assert durations_us(table, *DEVICE_WORK) == [50.0, 5.0]
    assert [step.number for step in table.steps] == [3]


def test_numbers_as_strings_and_nan_in_unused_fields_are_accepted(tmp_path):
    text = write.layout_kineto(write.kineto_document(write.gpu_events()))
    text = text.replace('"stream": 7', '"stream": "0x7"').replace('"bytes": 4096', '"bytes": "4096", "bandwidth": NaN')
    found = read_traces(write.write_kineto(tmp_path / "trace.json", text=text), use_cache=False)
    table = found.tables[0]
    assert found.status == "ok"
    assert set(table.stream[table.rows_of(Kind.COMPUTE)].tolist()) == {7}
    assert table.bytes[table.rows_of(Kind.MEMCPY)].tolist() == [4096] * 3


def test_an_event_without_a_time_is_left_out_and_reported(tmp_path):
    text = write.layout_kineto(write.kineto_document(write.gpu_events())).replace('"dur": 400.0', '"dur": NaN', 1)
    found = read_traces(write.write_kineto(tmp_path / "trace.json", text=text), use_cache=False)
    assert found.status == "partial"
    assert Reason.UNREADABLE in found.reasons
    assert durations_us(found.tables[0], Kind.COMPUTE) == [400.0] * 2


def test_a_cpu_trace_distinguishes_reduce_scatter_and_excludes_collectives_from_compute(tmp_path):
    document = write.kineto_document(write.cpu_events(), world=1, gpu=False)
    document["distributedInfo"].update(world_size=4, backend="gloo")
    document["distributedInfo"]["pg_config"][0].update(pg_size=4, ranks=[0, 1, 2, 3])
    table = read_traces(write.write_kineto(tmp_path / "trace.json", document), use_cache=False).tables[0]
    calls = [table.collectives[table.coll_id[row]] for row in table.rows_of(Kind.COMM, step=0)]
    assert [call.kind for call in calls] == [CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER]
    assert (calls[1].in_bytes, calls[1].out_bytes) == (16384, 4096)
    assert table.accelerator == "cpu"
    # the third operator waits from the start of its c10d operator (50 us) to the end of the call (160 us)
    assert durations_us(table, Kind.COMPUTE)[:3] == [300.0, 50.0, 40.0]


def test_an_ambiguous_kernel_gets_the_kind_of_the_call_that_launched_it(tmp_path):
    events = [
        write.span("user_annotation", "nccl:all_to_all", 1000, 100),
        write.span("cuda_runtime", "cudaLaunchKernelExC", 1010, 5, correlation=1),
        write.span("kernel", "ncclKernel_SendRecv_RING", 1200, 9, device=0, stream=2, correlation=1),
    ]
    table = read_one_table(write.write_kineto(tmp_path / "trace.json", write.kineto_document(events)))
    row = table.rows_of(Kind.COMM)[0]
    assert table.collectives[table.coll_id[row]].kind == CollectiveKind.ALL_TO_ALL


def test_tpu_planes_become_one_table_per_chip_with_pairs_joined(tmp_path):
    path = tmp_path / "plugins" / "profile" / "2026_01_01" / "host.xplane.pb"
    path.parent.mkdir(parents=True)
    path.write_bytes(write.tpu_space(chips=2))
    found = read_traces(tmp_path, use_cache=False)
    assert (found.status, found.ranks) == ("ok", (0, 1))
    table = found.tables[1]
    comm = table.rows_of(Kind.COMM)
    call = table.collectives[table.coll_id[comm[0]]]
    assert table.dur_ns[comm].tolist() == [300_000] * 3
    assert (call.kind, call.in_bytes, call.group_ranks) == (CollectiveKind.ALL_REDUCE, 1 << 20, (0, 1))
    assert durations_us(table, Kind.MEMCPY) == [100.0] * 3
    assert len(table.rows_of(Kind.COMPUTE)) == 6
    assert (table.step_source, len(table.steps)) == ("steps_line", 3)
    assert table.devices[0].peak_flops == 197e12
    assert (table.accelerator, table.host) == ("tpu", "tpu-host")


def test_chips_of_two_tpu_hosts_get_different_ranks(tmp_path):
    for host in ("worker0", "worker1"):
        (tmp_path / f"{host}.xplane.pb").write_bytes(write.tpu_space(chips=2))
    assert read_traces(tmp_path, use_cache=False).ranks == (0, 1, 2, 3)


def test_a_truncated_xspace_gives_its_complete_planes(tmp_path):
    data = write.tpu_space(chips=4)
    (tmp_path / "host.xplane.pb").write_bytes(data[: len(data) * 6 // 10])
    found = read_traces(tmp_path, use_cache=False)
    assert (found.status, found.reason, len(found.tables)) == ("partial", Reason.TRACE_TRUNCATED, 2)


def test_an_nsys_export_gives_one_table_per_process(tmp_path):
    found = read_traces(write.write_nsys(tmp_path / "report.sqlite"), use_cache=False)
    assert (found.status, found.ranks) == ("ok", (0, 1))
    table = found.tables[1]
    assert durations_us(table, Kind.COMPUTE) == [400.0] * 3
    assert table.blocks_per_sm[table.rows_of(Kind.COMPUTE)].tolist() == [2.0] * 3
    assert (table.step_source, [step.number for step in table.steps]) == ("nvtx", [0, 1, 2])
    assert table.step_id[table.rows_of(Kind.COMM)].tolist() == [0, 1, 2]
    row = table.rows_of(Kind.COMM)[0]
    assert table.collectives[table.coll_id[row]].kind == CollectiveKind.ALL_TO_ALL


KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
HIDDEN = f"ALTER TABLE {KERNELS} RENAME TO hidden"


@pytest.mark.parametrize(
    ("statements", "status"),
    [
        ([f"UPDATE {KERNELS} SET start = 'abc', end = x'00ff'"], "partial"),
        ([f"UPDATE {KERNELS} SET end = start - 1"], "partial"),
        ([f"UPDATE {KERNELS} SET start = 1e308 WHERE rowid = 1"], "partial"),
        (["UPDATE StringIds SET value = printf('%.*c', 20000000, 'x')"], "not_available"),
        (["CREATE TRIGGER t AFTER INSERT ON StringIds BEGIN DELETE FROM StringIds; END"], "ok"),
        ([HIDDEN, f"CREATE VIEW {KERNELS} AS SELECT *, writefile('owned', 'x') FROM hidden"], "not_available"),
        ([HIDDEN, f"CREATE VIEW {KERNELS} AS SELECT *, load_extension('owned') FROM hidden"], "not_available"),
        (
            [
                HIDDEN,
                f"CREATE VIEW {KERNELS} AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
                " SELECT hidden.* FROM hidden, n",
            ],
            "not_available",
        ),
    ],
)
def test_a_hostile_nsys_export_runs_nothing_and_rows_that_cannot_be_are_named(
    tmp_path, monkeypatch, statements, status
):
    monkeypatch.chdir(tmp_path)
    path = write.write_nsys(tmp_path / "report.sqlite")
    with contextlib.closing(sqlite3.connect(path)) as db:
        for statement in statements:
            db.execute(statement)
        db.commit()
    found = read_traces(path, use_cache=False)
    assert (found.status, not (tmp_path / "owned").exists()) == (status, True)
    assert ("report.sqlite" in found.message) == (status != "ok")


@pytest.mark.parametrize(
    ("statement", "message"),
    [("DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL", ""), ("BEGIN EXCLUSIVE", "locked")],
)
def test_an_nsys_export_without_its_kernel_table_or_that_is_locked_is_unreadable(tmp_path, statement, message):
    path = write.write_nsys(tmp_path / "report.sqlite")
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(statement)
        found = read_traces(path, use_cache=False)
    assert (found.status, found.reason) == ("not_available", Reason.UNREADABLE)
    assert message in found.message


def write_ranks(folder: Path, names: list[str], *, world: int = 4, **document: Any) -> None:
    for rank, name in enumerate(names):
        if name:
            write.write_kineto(
                folder / name, write.kineto_document(write.gpu_events(), rank=rank, world=world, **document)
            )


@pytest.mark.parametrize(
    "names",
    [
        [f"profile_trace/iteration_10/rank{rank}_trace.json" for rank in range(4)],
        [f"host{rank}_123.1700000000000.pt.trace.json.gz" for rank in range(4)],
        [f"tb/rank-{rank}/trace.json" for rank in range(4)],
    ],
)
def test_files_are_found_by_the_names_of_all_frameworks(tmp_path, names):
    write_ranks(tmp_path, names)
    (tmp_path / "result.json").write_text('{"status": "ok"}')
    (tmp_path / "stdout.log").write_text("rank 0")
    found = read_traces(tmp_path, use_cache=False)
    assert (found.status, found.ranks) == ("ok", (0, 1, 2, 3))


def test_the_last_of_several_iterations_is_read(tmp_path):
    for iteration in (9, 10):
        names = [f"iteration_{iteration}/rank{rank}_trace.json" for rank in range(4)]
        write_ranks(tmp_path, names, base_ns=(1_700_000_000 + iteration) * 10**9)
    found = read_traces(tmp_path, use_cache=False)
    assert {table.source.split("/")[0] for table in found.tables.values()} == {"iteration_10"}


def test_a_rank_with_several_devices_says_that_they_are_not_separated(tmp_path):
    events = write.gpu_events()
    more = [{**e, "args": {**e["args"], "device": 1}} for e in events if "device" in e["args"]]
    write.write_kineto(tmp_path / "rank0.json", write.kineto_document([*events, *more]))
    found = read_traces(tmp_path, use_cache=False)
    assert found.message == "rank0.json: one rank with 2 devices, which count as busy while any of them is"


def test_missing_ranks_are_named(tmp_path):
    write_ranks(tmp_path, ["rank0.json", "", "rank2.json", ""])
    found = read_traces(tmp_path, use_cache=False)
    assert (found.status, found.reason, found.missing_ranks) == ("partial", Reason.RANKS_MISSING, (1, 3))


def mix_worlds(folder: Path) -> None:
    write_ranks(folder, ["rank0.json", "rank1.json"], world=2)
    write_ranks(folder, ["", "", "rank2.json"], world=4)


def mix_same_rank(folder: Path) -> None:
    write_ranks(folder, ["a/rank0.json", "a/rank1.json"], world=2)
    write_ranks(folder, ["b/rank0.json"], world=2)


def mix_days(folder: Path) -> None:
    write_ranks(folder, ["rank0.json"], world=2)
    write_ranks(folder, ["", "rank1.json"], world=2, base_ns=1_700_086_400 * 10**9)


@pytest.mark.parametrize("mix", [mix_worlds, mix_same_rank, mix_days])
def test_traces_of_two_runs_are_not_mixed(tmp_path, mix):
    mix(tmp_path)
    found = read_traces(tmp_path, use_cache=False)
    assert (found.status, found.reason, found.tables) == ("not_available", Reason.MIXED_RUNS, {})


def write_apart(folder: Path, gap_us: float, *, same_host: bool = True, reduce: bool = True) -> None:
    """Write two ranks of three steps (3 ms); the second begins `gap_us` after the first ends."""
    for rank in range(2):
        events = write.gpu_events(start_us=1000.0 + rank * (3000.0 + gap_us))
        if not reduce:
            events = [event for event in events if "nccl" not in event["name"]]
        document = write.kineto_document(events, rank=rank, world=2)
        document["host_name"] = "node0" if same_host else f"node{rank}"
        write.write_kineto(folder / f"rank{rank}.json", document)


def test_ranks_with_the_same_collectives_on_one_clock_must_overlap_in_time(tmp_path):
    write_apart(tmp_path / "apart", 64e6)
    found = read_traces(tmp_path / "apart", use_cache=False)
    assert (found.status, found.reason, found.tables) == ("not_available", Reason.MIXED_RUNS, {})
    assert "64 s after" in found.message


@pytest.mark.parametrize("case", [{"gap_us": -1000.0}, {"same_host": False}, {"reduce": False}])
def test_ranks_without_a_common_clock_or_collective_may_be_far_apart(tmp_path, case):
    write_apart(tmp_path, **{"gap_us": 64e6, **case})
    assert "mixed_runs" not in read_traces(tmp_path, use_cache=False).reasons


BOMB = gzip.compress(b'{"traceEvents": [') + 75 * gzip.compress(b" " * (4 << 20), 9)


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("notes.txt", b"hello", Reason.NO_TRACE_FILES),
        ("config.json", b'{"tp": 2}', Reason.NO_TRACE_FILES),
        ("results.csv", b'{"schema": "1.0", "fields": []}', Reason.NO_TRACE_FILES),
        ("trace.json", b"", Reason.UNREADABLE),
        ("trace.json", b'{"traceEvents": {}}', Reason.UNREADABLE),
        ("trace.json", '{"traceEvents": []}'.encode("utf-16"), Reason.UNREADABLE),
        ("trace.json.gz", b"\x1f\x8b\x08\x00rubbish", Reason.UNREADABLE),
        ("trace.json.gz", BOMB, Reason.TOO_LARGE),
        ("host.xplane.pb", b"not a protocol buffer", Reason.UNREADABLE),
        ("host.xplane.pb", b"", Reason.UNREADABLE),
        ("report.sqlite", b"SQLite format 3\0 but no more", Reason.UNREADABLE),
        ("report.nsys-rep", b"binary", Reason.FORMAT_UNSUPPORTED),
    ],
)
def test_a_file_that_is_not_a_trace_gets_a_reason(tmp_path, name, data, reason):
    (tmp_path / name).write_bytes(data)
    found = read_traces(tmp_path, use_cache=False)
    assert (found.status, found.reason, found.tables) == ("not_available", reason, {})
    assert found.message


def test_a_deeply_nested_event_is_left_out(tmp_path):
    text = write.layout_kineto(write.kineto_document(write.gpu_events()))
    deep = "[" * 50_000 + "]" * 50_000
    text = text.replace('"args": {"device"', '"args": {"x": ' + deep + ', "device"', 1)
    found = read_traces(write.write_kineto(tmp_path / "trace.json", text=text), use_cache=False)
    assert found.status in ("ok", "partial")
    assert len(found.tables[0].rows_of(Kind.COMM)) == 3


def test_the_cache_gives_the_same_table_until_the_trace_changes(tmp_path):
    path = write.write_kineto(tmp_path / "rank0.json")
    fresh = read_traces(tmp_path).tables[0]
    assert cache_path(path).exists()
    again = read_traces(tmp_path).tables[0]
    assert isinstance(again.ts_ns.base, np.memmap)
    for name in ("ts_ns", "kind", "step_id", "launch", "coll_id", "bytes"):
        assert np.array_equal(getattr(again, name), getattr(fresh, name))
    for name in (
        "names",
        "collectives",
        "steps",
        "devices",
        "backend",
        "groups",
        "shapes",
        "grids",
        "base_ns",
        "source",
    ):
        assert getattr(again, name) == getattr(fresh, name)
    write.write_kineto(path, write.kineto_document(write.gpu_events(steps=5)))
    assert len(read_traces(tmp_path).tables[0].steps) == 5


def test_a_damaged_or_hostile_cache_is_ignored(tmp_path):
    path = write.write_kineto(tmp_path / "rank0.json")
    expected = read_traces(tmp_path).tables[0]
    kept = cache_path(path)
    data = kept.read_bytes()
    row_reference = data.replace(expected.name_id.astype("<i4").tobytes(), (expected.name_id + 10_000).tobytes())
    for hostile in (b"", data[:-100], data[:40] + b"x" + data[41:], b"\x80\x04pickle", row_reference):
        kept.write_bytes(hostile)
        table = read_traces(tmp_path).tables[0]
        assert np.array_equal(table.name_id, expected.name_id)


def test_recorded_traces_are_read_completely(tmp_path):
    folder = TESTS / "recorded"
    shutil.copytree(folder, tmp_path / "recorded")
    gloo = read_traces(tmp_path / "recorded" / "gloo-ddp2", use_cache=False)
    assert (gloo.status, gloo.ranks) == ("ok", (0, 1))
    assert all(len(table.rows_of(Kind.COMM)) for table in gloo.tables.values())
    space = read_traces(tmp_path / "recorded" / "jax-cpu2", use_cache=False)
    assert (space.status, space.ranks) == ("ok", (0, 1))
    as_json = read_traces(next((tmp_path / "recorded" / "jax-cpu2").rglob("*.trace.json.gz")), use_cache=False)
    for rank, table in space.tables.items():
        other = as_json.tables[rank]
        assert table.step_source == other.step_source == "step_num"
        assert np.array_equal(table.dur_ns[table.rows_of(*DEVICE_WORK)], other.dur_ns[other.rows_of(*DEVICE_WORK)])


def test_a_name_that_is_not_utf_8_and_a_link_that_may_not_be_followed_are_reported_or_left_out(tmp_path, monkeypatch):
    with open(os.fsencode(tmp_path) + b"/rank0\xff.json", "w"):
        pass  # an empty file: the reader names it
    (tmp_path / "rank1.json").write_text("{}")
    real = os.stat

    def stat(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if str(path).endswith("rank1.json"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(os, "stat", stat)
    traces = read_traces(tmp_path)
    assert "rank0?.json" in one_line(traces.message).encode().decode()
    assert "rank1" not in traces.message
