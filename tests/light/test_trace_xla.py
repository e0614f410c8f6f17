"""Replica groups and sizes of XLA's collectives, parsed from the operation's text."""

from __future__ import annotations

from pathlib import Path

import pytest
import trace_writer as write

from cclsearch.trace.events import Collective, CollectiveKind, Kind
from cclsearch.trace.read import read_traces
from cclsearch.trace.readers.xla_collectives import describe_collective, read_groups

FOUR = frozenset(range(4))


def describe(text: str, device: int = 0, devices: frozenset[int] = FOUR, **stats: str) -> Collective:
    name = text.split(" = ")[0].lstrip("%")
    return describe_collective(name, {"long_name": text, **stats}, device, devices)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("replica_groups={{0,2,1,3}}, to_apply=%add", ((0, 2, 1, 3),)),
        ("replica_groups=[2,2]<=[4]", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("replica_groups=[4,2]<=[2,4]T(1,0), use_global_device_ids=true", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=[4,2]<=[2,2,2]T(2,0,1)", ((0, 2), (4, 6), (1, 3), (5, 7))),
        ("replica_groups={}", ()),
        ("source_target_pairs={{0,1},{1,0}}", ()),
    ],
)
def test_replica_groups_of_both_forms(text: str, groups: tuple[tuple[int, ...], ...]) -> None:
    found, size = read_groups(f"f32[8] all-reduce(f32[8] %x), channel_id=1, {text}")
    assert found == groups
    assert size == (len(groups[0]) if groups else None)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("replica_groups=[2,4]<=[9]", 4),
        ("replica_groups=[2,2]<=[4]T(0,1)", 2),
        ("replica_groups=[2,2]<=[2,2]T(1,1)", 2),
        ("replica_groups=[999999999,999999999]<=[999999999,999999999]", 999999999),
        ("replica_groups=[0,0]<=[0]", None),
        ("replica_groups={{0,1},{2}}", None),
    ],
)
def test_inconsistent_groups_give_at_most_a_size(text: str, size: int | None) -> None:
    assert read_groups(text)[1] == size


@pytest.mark.parametrize("form", ["{{0,1},{2,3}}", "[2,2]<=[4]"])
def test_a_device_is_in_the_group_that_holds_it(form: str) -> None:
    text = f"%all-reduce.1 = f32[10]{{0}} all-reduce(f32[10]{{0}} %x), replica_groups={form}"
    assert [describe(text, device).group_ranks for device in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    elsewhere = describe(text, 0, frozenset({0, 1}))  # a host with two of the four devices: which two is unknown
    assert (elsewhere.group_ranks, elsewhere.group_size, elsewhere.world_size) == (None, 2, 4)
    whole = describe(text.replace(form, "{{0,1,2,3}}"), 0, frozenset({0, 1}))
    assert whole.group_ranks == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("text", "in_bytes", "out_bytes"),
    [
        ("%all-reduce.1 = (f32[1000]{0}, f32[3000]{0}) all-reduce(f32[1000] %a, f32[3000] %b)", 16000, 16000),
        ("%all-reduce.1 = (f32[1000], bf16[10,10]{1,0:T(8,128)(2,1)}) all-reduce(%a, %b)", 4200, 4200),
        ("%all-to-all.1 = (f32[10], f32[10], f32[10], f32[10]) all-to-all(%a, %b, %c, %d)", 160, 160),
        ("%all-gather.1 = (f32[8], /*index=1*/f32[40]) all-gather(f32[2] %a, f32[10] %b)", 48, 192),
        ("%reduce-scatter.1 = f32[8] reduce-scatter(f32[32] %a)", 128, 32),
        ("%all-gather-start.1 = (f32[8], f32[32]) all-gather-start(f32[8] %a)", 32, 128),
        ("%all-gather-start.1 = ((f32[8], f32[2]), (f32[32], f32[8])) all-gather-start(%a, %b)", 40, 160),
        ("%reduce-scatter-start.1 = ((f32[32]), f32[8], u32[]) reduce-scatter-start(f32[32] %a)", 128, 32),
        ("%all-reduce-start.1 = f32[100] all-reduce-start(f32[100] %a)", 400, 400),
        ("%all-reduce-start.1 = (f32[100], f32[300]) all-reduce-start(f32[100] %a, f32[300] %b)", 1600, 1600),
        ("%all-reduce-start.1 = (f32[100], f32[100]) all-reduce-start(f32[100] %a, f32[100] %b)", 800, 800),
        ("%all-reduce-start.1 = (f32[100], f32[100]) all-reduce-start(f32[100] %a)", 400, 400),
        ("%collective-permute-start.1 = (f32[9], f32[9], u32[], u32[]) collective-permute-start(f32[9] %a)", 36, 36),
        ("%send.1 = (f32[9], u32[], token[]) send(f32[9] %a, token[] %t)", 36, 36),
        ("%all-reduce.1 = (f32[10], mystery[10]) all-reduce(%a, %b)", None, None),
        ("%all-reduce.1 = f32[10", None, None),
    ],
)
def test_bytes_of_a_collective(text: str, in_bytes: int | None, out_bytes: int | None) -> None:
    call = describe(f"{text}, replica_groups={{{{0,1,2,3}}}}")
    assert (call.in_bytes, call.out_bytes) == (in_bytes, out_bytes)


def test_a_separate_shape_gives_the_results_and_the_text_the_number_of_operands() -> None:
    text = "%all-gather-start.1 = (f32[8], f32[32]) all-gather-start(f32[8] %a), replica_groups={{0,1,2,3}}"
    call = describe(text, shape_with_layout="(f32[8]{0}, f32[32]{0})")
    assert (call.kind, call.in_bytes, call.out_bytes) == (CollectiveKind.ALL_GATHER, 32, 128)
    bare = describe_collective("all-reduce.1", {"shape_with_layout": "(f32[1000]{0}, f32[3000]{0})"})
    assert bare.message_bytes == 16000


def test_each_chip_of_a_file_gets_its_own_group(tmp_path: Path) -> None:
    (tmp_path / "host.xplane.pb").write_bytes(write.tpu_space(chips=4, groups="{{0,1},{2,3}}"))
    found = read_traces(tmp_path, use_cache=False)
    calls = [table.collectives[table.coll_id[table.rows_of(Kind.COMM)[0]]] for table in found.tables.values()]
    assert [call.group_ranks for call in calls] == [(0, 1), (0, 1), (2, 3), (2, 3)]
