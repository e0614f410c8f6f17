"""Tables of public traces. `CCL_CONFORMANCE_TRACES` names their folder."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from real_traces import FOLDER, needs_traces

from cclsearch.trace.events import DEVICE_WORK, CollectiveKind, EventTable, Kind, TraceSet
from cclsearch.trace.read import read_traces

pytestmark = needs_traces


@cache
def read(name: str) -> TraceSet:
    return read_traces(Path(FOLDER) / name, use_cache=False)


def first_starts_us(table: EventTable) -> list[float]:
    starts = [int(table.ts_ns[table.rows_of(*DEVICE_WORK, step=number)[0]]) for number in range(len(table.steps))]
    return [start / 1000 for start in starts]


def as_float64_us(table: EventTable, *kinds: Kind) -> float:
    """Total of the union in microseconds, computed on absolute float64 microseconds as json.load gives them."""
    rows = table.rows_of(*kinds)
    start = (table.base_ns + table.ts_ns[rows]).astype(object)
    starts = np.array([float(time // 1000) + time % 1000 / 1000 for time in start])
    ends = starts + table.dur_ns[rows] / 1000
    reach = np.maximum.accumulate(ends)
    gaps = starts[1:] - reach[:-1]
    return float(reach[-1] - starts[0] - gaps[gaps > 0].sum())


@pytest.mark.parametrize(
    ("name", "ranks", "world"),
    [
        ("dlrm-8xV100", 8, 8),
        ("resnet-ddp-a100", 1, 2),
        ("async-v100", 1, 1),
        ("vllm-b200", 1, 8),
        ("resnet-mi300", 1, 8),
        ("gloo-fsdp4", 4, 4),
        ("tpu-v6e-4", 4, None),
        ("jax-cpu4", 4, None),
        ("nsys-h100-2gpu", 2, None),
        ("nsys-a2a-2gpu", 2, None),
    ],
)
def test_every_rank_is_read_completely(name, ranks, world):
    found = read(name)
    assert found.ranks == tuple(range(ranks))
    assert found.world_size == world
    assert all(table.status == "complete" for table in found.tables.values())


@pytest.mark.parametrize(
    ("name", "periods_us"),
    [
        ("resnet-ddp-a100", [222055, 219732]),
        ("async-v100", [97664, 95737, 95571, 95664]),
        ("resnet-mi300", [18980, 18983]),
    ],
)
def test_gpu_periods_follow_launches(name, periods_us):
    starts = first_starts_us(read(name).tables[0])
    assert [round(later - earlier) for earlier, later in pairwise(starts)] == periods_us


def test_backlog_of_an_earlier_step_belongs_to_no_step():
    table = read("resnet-mi300").tables[0]
    rows = table.rows_of(*DEVICE_WORK)
    backlog = table.dur_ns[rows[table.step_id[rows] < 0]].sum() / table.dur_ns[rows].sum()
    assert f"{backlog:.0%}" == "32%"


def test_printed_values_of_a_trace_in_unix_microseconds_carry_float64_rounding():
    """Exact union of compute: 468153.602 us; the same events as float64 microseconds (0.25 us apart): 468173.25."""
    table = read("async-v100").tables[0]
    assert round(as_float64_us(table, Kind.COMPUTE)) == 468173
    assert as_float64_us(table, *DEVICE_WORK) == 472462.5


def test_a_reduce_scatter_that_gloo_runs_as_all_reduce_is_identified_by_its_operator():
    for table in read("gloo-fsdp4").tables.values():
        kinds = [table.collectives[number].kind for number in table.coll_id[table.rows_of(Kind.COMM)]]
        assert kinds.count(CollectiveKind.REDUCE_SCATTER) == 12
        assert kinds.count(CollectiveKind.ALL_GATHER) == 20
        assert kinds.count(CollectiveKind.ALL_REDUCE) == 2


def test_symmetric_memory_all_reduce_is_communication():
    table = read("vllm-b200").tables[0]
    assert round(table.dur_ns[table.rows_of(Kind.COMM)].sum() / 1000) == 2142


def test_seconds_by_operation_of_a_tpu_chip():
    table = read("tpu-v6e-4").tables[0]
    seconds: dict[str, float] = {}
    for row in table.rows_of(*DEVICE_WORK):
        name = table.names[table.name_id[row]].split(".")[0]
        seconds[name] = seconds.get(name, 0.0) + float(table.dur_ns[row]) / 1e9
    assert round(seconds["all-reduce"], 3) == 0.365
    assert round(seconds["broadcast_add_fusion"], 3) == 2.367
    assert round(seconds["copy-done"], 2) == 76.05
    call = table.collectives[table.coll_id[table.rows_of(Kind.COMM)[0]]]
    assert call.in_bytes == 5_368_709_120


def test_xspace_and_json_of_jax_give_the_same_rows():
    from_json = read_traces(Path(FOLDER) / "jax-cpu4" / "host0.trace.json.gz", use_cache=False)
    for rank, table in read("jax-cpu4").tables.items():
        other = from_json.tables[rank]
        rows, others = table.rows_of(*DEVICE_WORK), other.rows_of(*DEVICE_WORK)
        assert np.array_equal(table.dur_ns[rows], other.dur_ns[others])
        assert np.array_equal(table.step_id[rows], other.step_id[others])


def test_ranks_of_an_nsight_export_are_processes_and_all_to_all_is_identified_by_its_launch():
    for table in read("nsys-a2a-2gpu").tables.values():
        kinds = {table.collectives[number].kind for number in table.coll_id[table.rows_of(Kind.COMM)]}
        assert CollectiveKind.ALL_TO_ALL in kinds
