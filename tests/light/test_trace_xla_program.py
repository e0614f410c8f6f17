"""XLA's traces and programs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import trace_writer as write
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import TESTS

from cclsearch.evaluation.traced_products import read_products
from cclsearch.trace.events import Collective, CollectiveKind, Kind
from cclsearch.trace.read import open_trace, read_traces
from cclsearch.trace.readers.protobuf_wire import MalformedMessage
from cclsearch.trace.readers.xla.collectives import describe_collective, read_groups
from cclsearch.trace.readers.xla.planes import ProgramBytes
from cclsearch.trace.readers.xla.program import Program, WindowDim, count_positions
from cclsearch.trace.score import score_view

ROWS, WIDTH = 8192, 4096
FIRST, SECOND = 2 * 64 * 32 * 16, 2 * 64 * 16 * 8
"""FLOP of the products of `write.two_products`."""


def score_bytes(folder: Path, space: bytes, name: str = "gemm_tflops") -> Any:
    (folder / "host.xplane.pb").write_bytes(space)
    return score_view(open_trace(folder), [name]).metrics[name]


def costs_by_name(folder: Path, space: bytes) -> dict[str, float]:
    """Return the FLOP of one run of each kernel with a cost; a kernel may have several."""
    (folder / "host.xplane.pb").write_bytes(space)
    table = read_traces(folder, use_cache=False).tables[0]
    found: dict[str, float] = defaultdict(float)
    for number, cost in table.op_costs.items():
        found[table.names[number]] += cost.flops or 0.0
    return dict(found)


def test_flops_of_a_training_step_on_an_h200_are_those_of_its_five_products(tmp_path):
    """Two layers without biases (benchmarks/gpu_jax.py): forward 2, weights 2, hidden layer 1; in a CUDA graph."""
    shutil.copy(TESTS / "recorded" / "jax-h200" / "host.xplane.pb", tmp_path)
    view = open_trace(tmp_path)
    rate = score_view(view, ["gemm_tflops"]).metrics["gemm_tflops"]
    assert rate.status == "ok"
    assert rate.inputs["flops"] == rate.n_steps * 5 * 2 * ROWS * WIDTH * WIDTH
    assert rate.inputs["coverage"] == 1.0
    assert 500 < (rate.value or 0) < 989, "below the peak of the device, which the trace names"
    table = view.ranks[0].table
    assert table.devices[0].name == "NVIDIA H200"
    assert {cost.precision for cost in table.op_costs.values()} == {"bf16"}
    share = score_view(view, ["compute_bound_frac"]).metrics["compute_bound_frac"]
    assert [operation["bound"] for operation in share.inputs["operations"]] == ["compute"] * 3  # kernels by name


def test_flops_and_precision_of_a_cpu_trace_are_those_of_its_shapes(tmp_path):
    """Two devices with half of [16,64] x [64,32] each, and the gradient of the weights (tests/record_traces.py)."""
    shutil.copytree(TESTS / "recorded" / "jax-cpu2", tmp_path / "trace")
    view = open_trace(tmp_path / "trace")
    rate = score_view(view, ["gemm_tflops"]).metrics["gemm_tflops"]
    assert rate.inputs["flops"] == 2 * rate.n_steps * 2 * (2 * 8 * 64 * 32)
    products = read_products(view, "fp32")
    assert set(products.seconds_by_precision) == {"fp32"}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the programs of `jax_programs.py`."""
    pytest.importorskip("jax")
    folder = tmp_path_factory.mktemp("programs")
    script = TESTS / "jax_programs.py"
    subprocess.run([sys.executable, str(script), str(folder)], env={**os.environ, "JAX_PLATFORMS": "cpu"}, check=True)
    return folder


STRIDED = 2.0 * (2 * 15 * 15 * 24) * (3 * 3 * 16)
"""2 x outputs x inputs of each."""


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("product", 2.0 * 64 * 96 * 32),
        ("batched", 2.0 * 2 * 4 * 40 * 24 * 16),
        ("convolution", STRIDED),
        ("gradients", 3 * STRIDED),
        ("grouped", 2.0 * (2 * 27 * 27 * 24) * (3 * 3 * 4)),
        ("recomputed", 5 * 2.0 * 32 * 48 * 48),
    ],
)
def test_flops_of_programs_that_jax_compiles_are_those_of_the_shapes(compiled, name, flops):
    data = write.field(1, (compiled / f"{name}.hlo").read_bytes())
    program = Program(ProgramBytes(data, (0, len(data))))
    called = {number for one in program.instructions.values() for number in one.called}
    (entry,) = set(program.computations) - called
    costs = [cost for one in program.computations[entry] if (cost := program.cost_of(one.name))]
    assert sum(cost.flops or 0.0 for cost in costs) == flops
    assert {cost.precision for cost in costs} == {"fp32"}


@given(
    size=st.integers(1, 9),
    out=st.integers(1, 9),
    window=st.builds(
        WindowDim, st.integers(1, 6), st.integers(1, 4), st.integers(-3, 4), st.integers(1, 3), st.integers(1, 4)
    ),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_positions_of_a_window_are_those_that_meet_an_element(size, out, window):
    met = 0
    for begin in range(0, out * window.stride, window.stride):
        for offset in range(0, window.size * window.window_dilation, window.window_dilation):
            at = begin + offset - window.padding_low
            met += 0 <= at <= (size - 1) * window.base_dilation and at % window.base_dilation == 0
    encoded = window._replace(padding_low=window.padding_low % 2**64)  # as a varint
    assert count_positions(encoded, size, out) == met


def library_call(target: str, dims: dict[int, tuple[int, ...]], config: dict[str, Any]) -> Program:
    """Return a program with a library call: operands 1 to 3, result 4."""
    inside = [write.instruction(at, f"p{at}", "parameter", dims[at]) for at in (1, 2, 3)]
    call = write.instruction(4, "call.1", "custom-call", dims[4], [1, 2, 3], target=target, config=config)
    data = write.program({1: [*inside, call]})
    return Program(ProgramBytes(data, (0, len(data))))


@pytest.mark.parametrize(("target", "products"), [("__cudnn$fmhaSoftmax", 2), ("__cudnn$fmhaSoftmaxBackward", 5)])
def test_fused_attention_of_cudnn_counts_two_products_and_five_in_the_backward_pass(target, products):
    """Configuration as JAX writes it (`fused_attention_stablehlo.py`): scores of (batch, heads, queries, keys)."""
    query, keys = (2, 128, 8, 64), (2, 256, 2, 64)
    scores = {"dimensions": ["2", "8", "128", "256"]}
    config = {"cudnn_fmha_backend_config": {"intermediate_tensor_shape": scores}}
    found = library_call(target, {1: query, 2: keys, 3: keys, 4: query}, config).cost_of("call.1")
    assert found.flops == products * 2.0 * 2 * 8 * 128 * 256 * 64


@pytest.mark.parametrize("config", [{}, {"gemm_backend_config": {}}, {"gemm_backend_config": []}])
def test_a_library_call_without_its_configuration_has_no_flops(config):
    dims = {1: (4, 8), 2: (8, 2), 3: (1,), 4: (4, 2)}
    assert library_call("__cublas$gemm", dims, config).cost_of("call.1") is None


def test_an_operation_counts_once_however_many_kernels_it_launches(tmp_path):
    kernels = [
        ("nvjet_sm90_splitK_NNT", "custom-call.1"),
        ("cublasLt::splitKreduce_kernel", "custom-call.1"),
        ("loop_tanh_fusion", "loop_tanh_fusion"),
        ("nvjet_sm90_NNT", "custom-call.2"),
    ]
    rate = score_bytes(tmp_path, write.jax_gpu_space(write.two_products(), kernels))
    assert rate.inputs["flops"] == pytest.approx(rate.n_steps * (FIRST + SECOND))
    assert rate.inputs["kernel_s"] == pytest.approx(rate.n_steps * 300e-6)


GRAPH = [
    ("nvjet_a", "command_buffer"),
    ("loop_tanh_fusion", "command_buffer"),
    ("nvjet_b", "command_buffer"),
    ("loop_add_fusion_1", "command_buffer"),
]


def test_library_kernels_of_a_graph_follow_the_order_of_the_program(tmp_path):
    assert costs_by_name(tmp_path, write.jax_gpu_space(write.two_products(), GRAPH)) == {
        "nvjet_a": FIRST,
        "nvjet_b": SECOND,
    }


@pytest.mark.parametrize("ops", [("graph", "graph"), ("custom-call.1", "custom-call.2")])
def test_one_kernel_may_run_products_of_different_shapes(tmp_path, ops):
    kernels = [("nvjet_a", ops[0]), ("loop_tanh_fusion", "graph"), ("nvjet_a", ops[1])]
    rate = score_bytes(tmp_path, write.jax_gpu_space(write.two_products(), kernels))
    assert rate.inputs["flops"] == rate.n_steps * (FIRST + SECOND)


def test_two_graphs_of_a_program_and_an_operation_outside_them_share_its_calls(tmp_path):
    kernels = [(name, f"command_buffer_{at // 2}") for at, (name, _) in enumerate(GRAPH)]
    split = costs_by_name(tmp_path, write.jax_gpu_space(write.two_products(), kernels))
    assert split == {"nvjet_a": FIRST, "nvjet_b": SECOND}
    alone = [("nvjet_a", "custom-call.1"), *GRAPH[1:]]
    assert costs_by_name(tmp_path, write.jax_gpu_space(write.two_products(), alone)) == split


def test_flops_of_a_graph_whose_calls_launch_several_kernels_are_shared_by_all_of_them(tmp_path):
    kernels = [GRAPH[0], ("cublasLt::splitKreduce_kernel", "command_buffer"), *GRAPH[1:]]
    rate = score_bytes(tmp_path, write.jax_gpu_space(write.two_products(), kernels))
    assert rate.inputs["flops"] == pytest.approx(rate.n_steps * (FIRST + SECOND))
    assert rate.inputs["coverage"] == 1.0


@pytest.mark.parametrize(
    "kernels",
    [
        [GRAPH[0], GRAPH[1]],  # one library kernel where the program has two calls
        [("nvjet_a", "command_buffer"), ("nvjet_b", "command_buffer")],  # nothing says which computation it is
        [(name, "another") for name, _ in GRAPH[:1]],
    ],
)
def test_a_graph_that_does_not_fit_the_program_has_no_flops(tmp_path, kernels):
    rate = score_bytes(tmp_path, write.jax_gpu_space(write.two_products(), kernels))
    assert (rate.value, rate.reason) == (None, "no_shapes")


def loop_program(other_call: bool = False) -> bytes:
    """A program whose loop body has the first product, and whose entry has the second, behind the loop."""
    body = [
        write.instruction(11, "p0", "parameter", [64, 32]),
        write.instruction(12, "p1", "parameter", [32, 16]),
        write.library_product(13, "custom-call.1", [64, 16], [11, 12]),
        write.instruction(14, "loop_tanh_fusion", "fusion", [64, 16], [13], calls=2),
    ]
    entry = [
        write.instruction(1, "p2", "parameter", [64, 16]),
        write.instruction(2, "p3", "parameter", [16, 8]),
        write.instruction(3, "while.1", "while", [64, 16], [1], calls=3),
        write.library_product(4, "custom-call.2", [64, 8], [3, 2]),
        write.instruction(5, "loop_add_fusion.1", "fusion", [64, 8], [4], calls=2),
    ]
    if other_call:
        entry.append(write.instruction(6, "custom-call.3", "custom-call", [64, 8], [5], target="my_kernel"))
    return write.program({2: [write.instruction(20, "tanh.1", "tanh", [64, 16])], 3: body, 1: entry})


@pytest.mark.parametrize("other_call", [False, True])
def test_a_graph_in_a_loop_counts_each_time_it_is_launched(tmp_path, other_call):
    inside = [("nvjet_a", "command_buffer"), ("loop_tanh_fusion", "command_buffer")]
    after = [("nvjet_b", "command_buffer_1"), ("loop_add_fusion_1", "command_buffer_1")]
    space = write.jax_gpu_space(loop_program(other_call), [*inside, *inside, *after])
    assert costs_by_name(tmp_path, space) == {"nvjet_a": FIRST, "nvjet_b": SECOND}
    rate = score_bytes(tmp_path, space)
    assert rate.inputs["flops"] == rate.n_steps * (2 * FIRST + SECOND)


def test_a_graph_of_a_loop_and_what_follows_it_has_no_flops(tmp_path):
    """How often each of its computations ran is not known."""
    inside = [("nvjet_a", "command_buffer"), ("loop_tanh_fusion", "command_buffer")]
    after = [("nvjet_b", "command_buffer"), ("loop_add_fusion_1", "command_buffer")]
    rate = score_bytes(tmp_path, write.jax_gpu_space(loop_program(), [*inside, *inside, *after]))
    assert (rate.value, rate.reason) == (None, "no_shapes")


def test_a_call_of_unknown_cost_among_the_products_leaves_the_rest_of_their_graph_unknown(tmp_path):
    """Three library kernels for one product and one unknown call: any of them may be the product's."""
    after = [(name, "command_buffer_1") for name in ("nvjet_b", "nvjet_c", "nvjet_d", "loop_add_fusion_1")]
    rate = score_bytes(tmp_path, write.jax_gpu_space(loop_program(other_call=True), after))
    assert (rate.value, rate.reason) == (None, "no_shapes")


@pytest.mark.parametrize(
    "hlo",
    [b"", b"\x0a\xff", write.two_products()[:-3], write.field(1, b"\x1a\x05\x12\x09abc"), b"\x0a\x02\x18\x07"],
)
def test_a_damaged_program_leaves_the_trace_without_flops(tmp_path, hlo):
    (tmp_path / "host.xplane.pb").write_bytes(write.jax_gpu_space(hlo, GRAPH))
    found = read_traces(tmp_path, use_cache=False)
    assert found.status == "ok"
    assert not found.tables[0].op_costs


@given(st.lists(st.tuples(st.integers(0, 10**6), st.binary(max_size=3)), min_size=1, max_size=6))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_damaged_programs_have_finite_costs_or_none(damages):
    data = bytearray(write.two_products())
    for at, piece in damages:
        data[at % len(data) : at % len(data) + len(piece)] = piece
    try:
        program = Program(ProgramBytes(bytes(data), (0, len(data))))
    except MalformedMessage:
        return
    for name in program.instructions:
        cost = program.cost_of(name)
        assert cost is None or 0 < (cost.flops or 0) < 1e30


def test_a_program_that_calls_itself_ends(tmp_path):
    inside = [write.instruction(1, "loop_tanh_fusion", "fusion", [4], calls=1)]
    data = write.program({1: inside})
    assert Program(ProgramBytes(data, (0, len(data)))).cost_of("loop_tanh_fusion") is None


def test_costs_survive_the_cache(tmp_path):
    (tmp_path / "host.xplane.pb").write_bytes(write.jax_gpu_space(write.two_products(), GRAPH))
    first, second = (read_traces(tmp_path).tables[0] for _ in range(2))
    assert dict(first.op_costs) == dict(second.op_costs)
    assert json.dumps(sorted(cost.precision or "" for cost in second.op_costs.values())) == '["bf16", "bf16"]'


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
def test_replica_groups_of_both_forms(text, groups):
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
def test_inconsistent_groups_give_at_most_a_size(text, size):
    assert read_groups(text)[1] == size


@pytest.mark.parametrize("form", ["{{0,1},{2,3}}", "[2,2]<=[4]"])
def test_a_device_is_in_the_group_that_holds_it(form):
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
def test_bytes_of_a_collective(text, in_bytes, out_bytes):
    call = describe(f"{text}, replica_groups={{{{0,1,2,3}}}}")
    assert (call.in_bytes, call.out_bytes) == (in_bytes, out_bytes)


def test_a_separate_shape_gives_the_results_and_the_text_the_number_of_operands():
    text = "%all-gather-start.1 = (f32[8], f32[32]) all-gather-start(f32[8] %a), replica_groups={{0,1,2,3}}"
    call = describe(text, shape_with_layout="(f32[8]{0}, f32[32]{0})")
    assert (call.kind, call.in_bytes, call.out_bytes) == (CollectiveKind.ALL_GATHER, 32, 128)
    bare = describe_collective("all-reduce.1", {"shape_with_layout": "(f32[1000]{0}, f32[3000]{0})"})
    assert bare.message_bytes == 16000


def test_each_chip_of_a_file_gets_its_own_group(tmp_path):
    (tmp_path / "host.xplane.pb").write_bytes(write.tpu_space(chips=4, groups="{{0,1},{2,3}}"))
    found = read_traces(tmp_path, use_cache=False)
    calls = [table.collectives[table.coll_id[table.rows_of(Kind.COMM)[0]]] for table in found.tables.values()]
    assert [call.group_ranks for call in calls] == [(0, 1), (0, 1), (2, 3), (2, 3)]
