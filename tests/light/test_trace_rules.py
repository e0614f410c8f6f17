"""The rules that ask traces and step times: whose traces they are, what was computed and exchanged, what was timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import execution_writer
import numpy as np
import pytest
import trace_writer as write
from test_admission import ARCH, CARD, PARAMETERS, PAYLOAD, STEP_FLOPS, TRACE, make_evidence, products, verdict_of

from cclsearch.core.values import Config
from cclsearch.evaluation.trace_evidence import read_trace_evidence
from cclsearch.scoring.evidence import OtherTrial, TracedCollective, TracedProducts, TracedRank
from cclsearch.scoring.outcome import AttemptWindow
from cclsearch.trace.names.kinds import classify_precision

START_S = 1_795_000_000.0
WINDOW = AttemptWindow(started_s=START_S, ended_s=START_S + 100.0, elapsed_s=100.0)
FULL = {
    "payload": PAYLOAD.model_copy(update={"config": Config({**PAYLOAD.config, "activation_checkpointing": "full"})})
}


def other(number: int, **fields: Any) -> OtherTrial:
    """An earlier ranked trial of the search, whose traced step took 1.15 times the timed one."""
    metrics = {"step_time_s": 1.0 + number / 100, "trace_step_time": 1.15 * (1.0 + number / 100), "gemm_tflops": 100.0}
    return OtherTrial(number, is_earlier=True, is_ranked=True, metrics=metrics | fields)


def judge(rule: str, trace: dict[str, Any] | None = None, **fields: Any) -> tuple[bool | None, str]:
    verdict = verdict_of(make_evidence(fields.pop("result", None), trace, **fields), rule)
    return verdict.ok, verdict.detail


def origins(**changed: Any) -> dict[str, Any]:
    """Evidence in which rank 3's trace has these marks."""
    return {"origins": {**TRACE.origins, 3: TRACE.origins[3].model_copy(update=changed)}}


def test_a_trace_with_the_nonce_of_another_attempt_is_refused():
    assert judge("trace_origin") == (True, "every rank's trace has the attempt's nonce")
    ok, detail = judge("trace_origin", origins(nonces=("n0",)))
    assert (ok, detail) == (
        False,
        "the trace of rank 3 has the nonce of another attempt: it was not written by this one",
    )
    assert judge("trace_origin", origins(nonces=("n0", "n1")))[0] is False


def test_a_trace_without_a_nonce_is_a_warning_for_one_version():
    ok, detail = judge("trace_origin", origins(nonces=()))
    assert ok is None
    assert detail.startswith("no nonce of the attempt (annotation 'ccl-search::<CCL_NONCE>') in the traces of 1 rank")
    assert detail.endswith("version 0.4 will require it")
    earlier = PAYLOAD.model_copy(update={"nonce": ""})
    assert judge("trace_origin", payload=earlier)[0] is None


def test_the_same_content_in_two_traces_is_refused_once():
    ok, detail = judge("trace_origin", origins(digest="d0"))
    assert ok is False
    assert "rank 3 is a copy: its events have the same durations as the trace of rank 0" in detail
    copied = OtherTrial(7, is_earlier=True, is_ranked=True, metrics={}, trace_digests=("d3",))
    assert "a trace of trial 7" in judge("trace_origin", others=(copied,))[1]
    later = OtherTrial(7, is_earlier=False, is_ranked=True, metrics={}, trace_digests=("d3",))
    assert judge("trace_origin", others=(later,))[0] is True


@pytest.mark.parametrize(
    ("span", "ok"),
    [
        ((START_S + 10, START_S + 90), True),
        ((START_S - 599, START_S + 90), True),
        ((START_S - 3600, START_S - 3500), False),
        ((START_S + 10, START_S + 100 + 3600), False),
        ((None, None), True),
    ],
)
def test_the_times_of_a_trace_lie_inside_the_attempt(span, ok):
    marks = origins(start_s=span[0], end_s=span[1])
    assert judge("trace_origin", marks, attempt=WINDOW)[0] is ok


def test_times_are_not_compared_if_the_clock_was_set_meanwhile():
    marks = origins(start_s=START_S - 3600, end_s=START_S - 3500)
    stepped = WINDOW.model_copy(update={"elapsed_s": 20.0})
    assert judge("trace_origin", marks, attempt=stepped)[0] is True


@pytest.mark.parametrize(
    ("times", "found"),
    [
        ((0.7541234567,) * 5, "all 5 step times are equal to the last digit"),
        ((0.8, 0.8, 0.7, 0.8, 0.9), "all step times are multiples of 0.1 s"),
        ((0.5123456789, 0.5223456789, 0.5323456789), "each step takes 0.01 s longer"),
        ((0.754, 0.755, 0.754, 0.754, 0.753), ""),
        ((0.812, 0.812, 0.812, 0.812, 0.812), ""),
        ((0.7541234567, 0.7541234568, 0.7553, 0.7541, 0.7543), ""),
    ],
)
def test_step_times_that_were_not_measured_are_told_by_their_digits(times, found):
    ok, detail = judge("step_times", result={"step_times_s": times})
    assert ok is not bool(found)
    assert detail.startswith(found)


def test_a_result_of_another_trial_has_its_median_to_the_last_digit():
    times = {"step_times_s": (0.7541234567, 0.7512345678, 0.7598765432)}
    same = other(4, step_time_s=0.7541234567)
    assert "equals that of trial 4" in judge("step_times", result=times, others=(same,))[1]
    assert judge("step_times", result=times, others=(other(4),))[0] is True


def test_timed_steps_fit_into_the_time_that_the_attempt_took():
    assert judge("step_times", attempt=WINDOW)[0] is True
    short = AttemptWindow(started_s=START_S, ended_s=START_S + 4.0, elapsed_s=4.0)
    assert judge("step_times", attempt=short) == (False, "the timed steps take 5.02 s, but the attempt took 4 s")


def test_step_times_that_do_not_fill_their_window_are_refused():
    times = (0.5, 0.505, 0.495, 0.5, 0.51)
    assert judge("step_times", result={"step_times_s": times, "timed_window_s": 5.02}) == (
        False,
        "the timed steps take 2.51 s, but their window took 5.02 s by another clock (2.00x; at most 1.25x and 0.1 s"
        " more are allowed): count what runs between steps in their times, or log and save checkpoints outside the"
        " window",
    )
    assert judge("step_times", result={"timed_window_s": 5.03})[1] == "4 different step times in a window of 5.03 s"
    assert judge("step_times")[1].endswith("the run script does not report timed_window_s")


@pytest.mark.parametrize("times", [(0.011, 0.01, 0.0101, 0.0099, 4.9), (0.2, 0.21, 0.19, 2.21, 2.2)])
def test_steps_that_nobody_waited_for_are_refused(times):
    ok, detail = judge("spread", result={"step_times_s": times})
    assert ok is False
    assert detail.endswith("some took the time of others. Wait for the device after each step")


def test_what_cannot_be_seen_counts_at_its_most():
    assert judge("traced_work", {"products": products(0.5, hidden=0.4)})[0] is False
    assert judge("traced_work", {"products": products(0.5, hidden=0.6)})[0] is None
    assert judge("traced_work", {"products": products(0.5)})[0] is False
    assert "50.0% of the compute time" in judge("traced_work", {"products": products(0.5, hidden=0.4)})[1]


def split(weights: float, attention: float, **fields: Any) -> dict[str, Any]:
    """Products with weights and attention, each as a share of what the model needs."""
    needed = 12.0 * 32 * 32 * 128 * 1024 * 32 * 1024
    flops = weights * (STEP_FLOPS - needed) + attention * needed
    found = TracedProducts(flops=flops, batched_flops=attention * needed, seen_s=1.0, hidden_s=0.0, compute_s=2.0)
    return {"products": found.model_copy(update=fields)}


def test_each_part_of_the_work_is_needed():
    assert judge("traced_work", split(1.0, 1.17))[0] is True
    assert "products with weights are 0.94x" in judge("traced_work", split(0.94, 1.9))[1]
    assert "attention is 0.00x" in judge("traced_work", split(1.2, 0.001))[1]


def test_queries_of_attention_are_counted_exactly():
    rows = 32 * 32 * 1024 * 32
    assert judge("traced_work", split(1.0, 1.17, attended_rows=rows))[0] is True
    ok, detail = judge("traced_work", split(1.0, 1.17, attended_rows=rows * 31 / 32))
    assert (ok, "covers 0.97x of the queries" in detail) == (False, True)
    hidden = split(1.0, 1.17, attended_rows=rows / 2, hidden_s=0.5, hidden_flops=0.1)
    assert judge("traced_work", hidden)[0] is True


def test_configured_recomputation_is_needed_too():
    ok, detail = judge("traced_work", {"products": products(1.0)}, **FULL)
    assert (ok, "with the recomputation that the configuration asks for" in detail) == (False, True)
    assert judge("traced_work", {"products": products(1.25)}, **FULL)[0] is True


def test_attention_runs_on_the_micro_batch_of_the_configuration():
    assert judge("traced_work", split(1.0, 1.17, attention_batches=(1,)))[0] is True
    ok, detail = judge("traced_work", split(1.0, 1.17, attention_batches=(2,)))
    assert (ok, "on 2 sequences a call, but a micro-batch has 1" in detail) == (False, True)


@pytest.mark.parametrize(
    ("declared", "seconds", "ok"),
    [
        ("bf16", {"bf16": 9.0, "fp32": 1.0}, True),
        ("bfloat16", {"bf16": 9.0}, True),
        (None, {"bf16": 9.0}, True),
        ("fp32", {"bf16": 9.0}, False),
        ("bf16", {"bf16": 9.0, "fp8": 1.0}, False),
        ("bf16", {"bf16": 99.0, "fp8": 1.0}, True),
        ("bf16", {}, None),
        (None, {}, None),
    ],
)
def test_precision_is_what_was_declared_and_what_the_traces_show(declared, seconds, ok):
    found = products(1.0).model_copy(update={"seconds_by_precision": seconds})
    assert judge("precision", {"products": found}, result={"precision": declared})[0] is ok


def test_tf32_is_not_fp32():
    card = CARD.model_copy(update={"precision": "fp32"})
    found = products(1.0).model_copy(update={"seconds_by_precision": {"tf32": 9.0, "fp32": 1.0}})
    ok, detail = judge("precision", {"products": found}, result={"precision": "fp32"}, card=card)
    assert ok is False
    assert detail == (
        "time of matrix products by precision: 90% tf32, 10% fp32; the card has fp32: name the precision in the card,"
        " or compute in fp32"
    )


def calls(*kept: str, **changed: Any) -> dict[str, Any]:
    """The collectives of these axes only; `changed` replaces fields of the gradient reduction."""
    assert TRACE.collectives is not None
    dp, tp, pp = TRACE.collectives
    found = {"dp": dp.model_copy(update=changed), "tp": tp, "pp": pp}
    return {"collectives": tuple(found[axis] for axis in kept)}


@pytest.mark.parametrize(
    ("kept", "found"),
    [
        (("tp", "pp"), "dp is 4, but the traces have no reduction of gradients"),
        (("dp", "pp"), ""),
        (("dp", "tp"), "pp is 2, but the traces have no transfer between pipeline stages"),
        ((), "dp is 4, but the traces have no reduction of gradients"),
        (("dp", "tp", "pp"), ""),
    ],
)
def test_ranks_exchange_what_their_layout_requires(kept, found):
    ok, detail = judge("traced_layout", calls(*kept))
    assert ok is not bool(found)
    assert detail.startswith(found)


def test_a_trace_without_any_tensor_collective_is_refused():
    config = Config(tp=2, dp=8, micro_batch_size=1)
    payload = PAYLOAD.model_copy(update={"config": config})
    trace = calls("dp", elements=8.0 * PARAMETERS)
    assert judge("traced_layout", trace, payload=payload) == (
        False,
        "tp is 2, but the traces have no collective over the tensor-parallel ranks",
    )


def test_the_gradients_of_all_parameters_are_reduced():
    ok, detail = judge("traced_layout", calls("dp", "tp", "pp", elements=4 * 0.5 * PARAMETERS))
    assert (ok, detail) == (
        False,
        "dp is 4, but the collectives of a traced step reduce the gradients of 50.0% of the parameters only",
    )
    assert judge("traced_layout", calls("dp", "tp", "pp", elements=None))[0] is True


def test_gradients_are_reduced_in_the_cards_precision():
    half = {"precision": "bf16", "elements": 4.0 * PARAMETERS}
    card = CARD.model_copy(update={"precision": "float32"})
    ok, detail = judge("traced_layout", calls("dp", "tp", "pp", **half), card=card)
    assert (ok, detail) == (
        False,
        "dp is 4, but 100.0% of the gradients are rounded to less than the card's float32",
    )
    assert judge("traced_layout", calls("dp", "tp", "pp", **half))[0] is True
    assert judge("traced_layout", calls("dp", "tp", "pp", **half | {"precision": ""}), card=card)[0] is True


def test_what_a_format_does_not_show_is_not_missing():
    assert judge("traced_layout", {"collectives": (), "format": "xla on tpu"})[0] is None
    unmarked = {rank: TracedRank() for rank in range(16)}
    assert judge("traced_layout", {"collectives": (), "origins": unmarked})[0] is None
    unknown = TracedCollective(kind="unknown", calls=4)
    assert judge("traced_layout", {"collectives": (unknown,)})[0] is None
    alone = PAYLOAD.model_copy(update={"config": Config(tp=1, dp=1, micro_batch_size=1)})
    assert judge("traced_layout", payload=alone) == (None, "one rank exchanges nothing")


def test_experts_exchange_tokens():
    moe = ARCH.model_copy(update={"moe": None})
    config = Config(tp=1, dp=16, ep=4, micro_batch_size=1)
    payload = PAYLOAD.model_copy(update={"config": config, "arch": moe})
    reduced = TracedCollective(kind="all_reduce", group_size=16, calls=4, elements=16.0 * PARAMETERS)
    exchange = TracedCollective(kind="all_to_all", group_size=4, calls=4, elements=10.0)
    gather = exchange.model_copy(update={"kind": "all_gather"})
    assert "no exchange of tokens" in judge("traced_layout", {"collectives": (reduced,)}, payload=payload)[1]
    assert judge("traced_layout", {"collectives": (reduced, exchange)}, payload=payload)[0] is True
    assert "not distinguishable" in judge("traced_layout", {"collectives": (reduced, gather)}, payload=payload)[1]


def test_num_params_is_required_of_the_next_version_on():
    ok, detail = judge("work", result={"num_params": None})
    assert ok is None
    assert detail.endswith("the run script does not declare num_params: version 0.4 will require it")


def write_cpu_trace(path: Path, nonce: str, dtype: str = "float") -> None:
    """Two steps: an all-reduce, a matrix product of 64 x 32 x 16, attention, and an operator of another library."""
    events: list[dict[str, Any]] = []
    random = np.random.default_rng(0)
    for step in range(2):
        at = 1000.0 + step * 10_000.0
        events.append(write.span("user_annotation", f"ProfilerStep#{step}", at, 9_000.0))
        events.append(write.span("user_annotation", f"ccl-search::{nonce}", at + 1, 1.0))
        mm = {"Input Dims": [[64, 32], [32, 16]], "Input type": [dtype, dtype]}
        events.append(write.span("cpu_op", "aten::mm", at + 10, 100.0, **mm))
        query = {"Input Dims": [[2, 4, 8, 16]] * 4, "Input type": [dtype] * 4}
        name = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
        events.append(write.span("cpu_op", name, at + 200, 100.0, **query))
        events.append(write.span("cpu_op", "my_library::linear", at + 400, 300.0))
        durations = random.uniform(1.0, 9.0, 40).tolist()
        events += [write.span("cpu_op", "aten::add", at + 1000 + 10 * n, d) for n, d in enumerate(durations)]
        args = {"Input Dims": [[100]], "Input type": ["float"]}
        events.append(write.span("user_annotation", "gloo:all_reduce", at + 3000, 50.0, tid=2, **args))
    document: dict[str, Any] = {
        "schemaVersion": 1,
        "traceEvents": events,
        "baseTimeNanoseconds": int(START_S * 1e9),
        "distributedInfo": {"backend": "gloo", "rank": 0, "world_size": 1},
    }
    write.write_kineto(path, document)


def test_the_facts_are_read_from_a_trace(tmp_path):
    write_cpu_trace(tmp_path / "rank0.json", "abc")
    trace = read_trace_evidence(tmp_path, CARD, PAYLOAD)
    assert trace.products.flops == 2 * 64 * 32 * 16 + 2.5 * 4 * 2 * 4 * 8 * 8 * 16
    assert trace.products.attended_rows == 2 * 4 * 8
    assert trace.products.attention_batches == (2,)
    assert trace.products.hidden_s == pytest.approx(300e-6)
    assert trace.products.seconds_by_precision == pytest.approx({"fp32": 200e-6})
    origin = trace.origins[0]
    assert origin.nonces == ("abc",)
    assert origin.start_s == pytest.approx(START_S + 1e-3)
    assert trace.backend == "gloo"
    assert [call.kind for call in trace.collectives or ()] == ["all_reduce"]


def test_the_hash_of_a_trace_does_not_depend_on_its_nonce_and_times(tmp_path):
    found = []
    for nonce in ("abc", "xyz"):
        write_cpu_trace(tmp_path / nonce / "rank0.json", nonce)
        trace = read_trace_evidence(tmp_path / nonce, CARD, PAYLOAD)
        found.append(trace.origins[0].digest)
    assert found[0] == found[1] != ""


@pytest.mark.parametrize(
    ("kernel", "precision"),
    [
        ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_32x6_nn", "bf16"),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize64x64x8", "tf32"),
        ("ampere_sgemm_128x64_nn", "fp32"),
        ("volta_fp16_s884gemm_fp16_128x64_ldg8_f2f_nn", "fp16"),
        ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n", "fp8"),
        ("Cijk_Ailk_Bljk_BBS_BH_MT128x128x32", "bf16"),
        ("cutlass_80_tensorop_s1688gemm_128x128_16x4", "tf32"),
        ("void at::native::elementwise_kernel", ""),
    ],
)
def test_kernel_names_show_the_precision(kernel, precision):
    assert classify_precision(kernel) == precision


def test_an_execution_trace_proves_nothing_since_it_has_no_times(tmp_path):
    (tmp_path / "et_rank0.json").write_bytes(execution_writer.as_bytes())
    trace = read_trace_evidence(tmp_path, CARD, PAYLOAD)
    assert (trace.ranks, trace.metrics, trace.products, trace.collectives) == ((), {}, None, None)
    assert "without times" in trace.notes[0]
