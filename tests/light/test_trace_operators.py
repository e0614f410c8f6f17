"""Device time by operator, the difference of two traces, unknown kernels, and cards with only some fields."""

from __future__ import annotations

import json

import pytest
from test_trace_score import score, write_run
from trace_measures import measure, step_timeline
from trace_tables import Timeline, make_set

from cclsearch.core.errors import UserError
from cclsearch.trace.answers.operators import build_operator_tree, comparable_family, compare_traces, list_unclassified
from cclsearch.trace.answers.score_request import load_scoring_card
from cclsearch.trace.answers.text_report import format_changes, format_operators, format_unclassified
from cclsearch.trace.events import EventTable, Kind, Reason
from cclsearch.trace.metric import MetricResult, Status
from cclsearch.trace.names.kernels import VARIABLE, ComputeClass
from cclsearch.trace.view import TraceView


def nested_timeline(*, product_us: float = 30) -> Timeline:
    """`block` calls `aten::linear`, which calls `aten::mm`; then `aten::relu` alone; then a kernel of no operator."""
    timeline = Timeline()
    for name, start, duration in (
        ("block #3", 0, 50),
        ("aten::linear", 5, 30),
        ("aten::mm", 10, 20),
        ("aten::relu", 60, 10),
    ):
        kind = Kind.ANNOTATION if name.startswith("block") else Kind.CPU_OP
        timeline.add(kind, start, duration, name, device=-1, stream=0)
    for launched, start, duration, name in (
        (15, 100, product_us, "nvjet_tst_64x16_v_bz"),
        (32, 140, 5, "splitKreduce_kernel"),
        (65, 150, 10, "relu_kernel"),
        (80, 170, 5, "mystery"),
    ):
        launch = timeline.add(Kind.RUNTIME, launched, 2, "cudaLaunchKernel", device=-1, stream=0)
        known = ComputeClass.OTHER if name == "mystery" else ComputeClass.GEMM
        timeline.kernel(start, duration, name, launch=launch, name_class=known)
    return timeline


def view(table: EventTable) -> TraceView:
    return TraceView(make_set([table]))


def test_device_time_is_counted_for_every_operator_around_the_launch():
    tree = build_operator_tree(view(nested_timeline().table()))
    assert {node.path: (node.seconds, node.own_s, node.num_kernels) for node in tree.nodes} == {
        ("block",): (pytest.approx(35e-6), 0, 2),
        ("block", "aten::linear"): (pytest.approx(35e-6), pytest.approx(5e-6), 2),
        ("block", "aten::linear", "aten::mm"): (pytest.approx(30e-6), pytest.approx(30e-6), 1),
        ("aten::relu",): (pytest.approx(10e-6), pytest.approx(10e-6), 1),
    }
    assert (tree.total_s, tree.coverage) == (pytest.approx(50e-6), pytest.approx(0.9))
    assert [len(node.path) for node in tree.nodes] == [1, 2, 3, 1]


def test_tables_of_a_trace_without_steps_say_that_they_cover_the_file():
    first, second = view(nested_timeline().table()), view(nested_timeline(product_us=75).table())
    whole = "over the whole file (no step markers)"
    assert f"time {whole}, mean" in format_operators(build_operator_tree(first))
    assert f"time {whole}, mean" in format_unclassified(list_unclassified(first), first.covered)
    text = format_changes(compare_traces(first, second), [first.covered, second.covered])
    assert f"time {whole}, mean" in text
    assert "cover 90.0% of it in the first trace and 94.7% in the second" in text


def test_markers_of_steps_are_no_operators_and_operators_of_a_cpu_no_kernels(tmp_path):
    timeline = nested_timeline()
    timeline.add(Kind.ANNOTATION, 0, 90, "step[DECODE bs=32]", device=-1, stream=0)
    assert build_operator_tree(view(timeline.table())).nodes[0].path == ("block",)
    cpu = Timeline()
    cpu.add(Kind.COMPUTE, 0, 10, "aten::mystery", device=-1, stream=0)
    assert list_unclassified(view(cpu.table(accelerator="cpu"))) == ()
    assert list_unclassified(view(cpu.table()))[0].name == "aten::mystery"


def test_an_operator_of_another_thread_encloses_nothing():
    timeline = Timeline()
    timeline.add(Kind.CPU_OP, 0, 100, "aten::mm", device=-1, stream=1)
    launch = timeline.add(Kind.RUNTIME, 10, 2, "cudaLaunchKernel", device=-1, stream=0)
    timeline.kernel(20, 10, launch=launch)
    assert build_operator_tree(view(timeline.table())).coverage == 0


def test_the_difference_of_two_traces_names_families_and_operators():
    changes = compare_traces(view(nested_timeline().table()), view(nested_timeline(product_us=60).table()))
    for by, name in (("families", "nvjet_tst_*_v_bz"), ("operators", "aten::mm")):
        first = changes[by][0]
        assert (first.name, first.change_s, first.share) == (name, pytest.approx(30e-6), pytest.approx(1))
        assert all(change.change_s == 0 for change in changes[by][1:])


def test_shares_of_the_change_count_increases_and_decreases():
    before, after = Timeline(), Timeline()
    before.kernel(0, 30, "old")
    after.kernel(0, 10, "new")
    changes = compare_traces(view(before.table()), view(after.table()))["families"]
    assert [(c.name, c.share) for c in changes] == [("old", pytest.approx(-0.75)), ("new", pytest.approx(0.25))]


@pytest.mark.parametrize(
    ("kernel", "family"),
    [
        ("_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1_swiglu", "_matmul_ogs_NNT_bf16xbf16xmxfp4_*_swiglu"),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_MT32x32x256_MI16x16x1_SN", "Cijk_Alik_Bljk_BBS_BH_Bias"),
        ("void f<128, 4>(int)", "f"),
    ],
)
def test_families_of_different_tiles_are_compared(kernel, family):
    assert comparable_family(kernel).replace("__", "_") == family


def test_unknown_kernels_are_listed_with_their_time():
    (unknown,) = list_unclassified(view(nested_timeline().table()))
    assert (unknown.name, unknown.seconds, unknown.share) == ("mystery", pytest.approx(5e-6), pytest.approx(0.1))


def test_the_command_prints_tables_and_data(tmp_path, capsys):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", period_us=1500)
    code, text, _ = score(capsys, str(a), str(b), "--diff")
    assert code == 0
    assert "families: no difference" in text
    _, out, _ = score(capsys, str(a), str(b), "--diff", "--json")
    assert {entry["name"] for entry in json.loads(out)["difference"]["families"]} >= {"sm90_gemm"}
    _, out, _ = score(capsys, str(a), "--operators", "--unclassified", "--json")
    data = json.loads(out)
    assert data["unclassified"] == []
    assert data["operators"]["coverage"] == 0
    _, text, _ = score(capsys, str(a), "--operators", "--unclassified")
    assert "no launch is recorded inside an operator" in text
    assert "every compute kernel has a class" in text


def test_lines_of_a_file_are_used_for_one_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    table = tmp_path / "mine.csv"
    table.write_text("class,pattern\nother,^sm90_gemm\n", encoding="utf-8")
    folder = write_run(tmp_path / "a")
    _, out, _ = score(capsys, str(folder), "--unclassified", "--json", "--kernel-classes", str(table))
    assert [entry["name"] for entry in json.loads(out)["unclassified"]] == ["sm90_gemm"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{a}", "--diff"], "--diff compares two traces"),
        (["{a}", "--kernel-classes", "none.csv"], "cannot be read"),
        (["{a}", "--set", "nonsense=1"], "a card has no field 'nonsense'"),
        (["{a}", "--set", "num_params"], "--set must be FIELD=VALUE"),
    ],
)
def test_mistakes_are_one_line(arguments, message, tmp_path, capsys):
    folder = write_run(tmp_path / "a")
    code, _, err = score(capsys, *(argument.format(a=folder) for argument in arguments))
    assert code == 2
    assert message in err


def mfu(*sets: str) -> MetricResult:
    return measure([step_timeline().table()], "mfu", card=load_scoring_card(None, sets=sets))


def test_a_number_of_parameters_is_enough_for_the_model_flops():
    found = mfu("num_params=1e6", "batch_size=2", "seq_len=100", "precision=bf16")
    assert found.value == pytest.approx(6e6 * 200 / 100e-6 / 989.4e12)
    assert (found.status, found.reason) == (Status.PARTIAL, Reason.CARD_MISSING_FIELD)
    assert "without attention" in found.detail


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (("num_params=1e6", "batch_size=2", "seq_len=100"), "--set precision="),
        (("num_params=1e6", "seq_len=100", "precision=bf16"), "--set batch_size="),
        (("batch_size=2", "seq_len=100", "precision=bf16"), "--set num_params="),
        (("num_experts=8", "num_params=1e6", "batch_size=2", "seq_len=9", "precision=bf16"), "without experts"),
    ],
)
def test_a_missing_field_is_named_with_its_setting(sets, says):
    found = mfu(*sets)
    assert (found.value, found.reason) == (None, Reason.CARD_MISSING_FIELD)
    assert says in found.detail


def test_a_metric_needs_no_field_of_another():
    card = load_scoring_card(None, sets=("batch_size=2", "seq_len=100"))
    table = step_timeline().table()
    assert measure([table], "tokens_per_s", card=card).status is Status.OK
    for name in ("comm_time", "exposed_comm_frac", "trace_step_time", "bus_bw", "memory_bound_frac"):
        with_card, without = measure([table], name, card=card), measure([table], name)
        assert (with_card.value, with_card.reason) == (without.value, without.reason), name


def test_a_card_with_a_part_of_the_template_is_used(tmp_path):
    file = tmp_path / "theirs.yaml"
    file.write_text(
        "workload:\n  model: {phase: training, precision: bf16, model_arch: {num_params: 8000000, num_layers: 4}}\n"
        "  data: {batch_size: 4, seq_len: 128}\n",
        encoding="utf-8",
    )
    card = load_scoring_card(str(file))
    assert measure([step_timeline().table()], "tokens_per_s", card=card).value == pytest.approx(512 / 100e-6)
    assert measure([step_timeline().table()], "ttft", card=card).reason is Reason.PHASE_MISMATCH
    assert measure([step_timeline().table()], "mfu", card=card).value == pytest.approx(
        6 * 8e6 * 512 / 100e-6 / 989.4e12
    )


def test_a_file_that_is_no_card_is_refused(tmp_path):
    file = tmp_path / "suite.yaml"
    file.write_text("name: suite\n", encoding="utf-8")
    with pytest.raises(UserError, match="is not a workload card"):
        load_scoring_card(str(file))
