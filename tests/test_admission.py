"""The admission gate: an honest run passes, and each known way to win without doing the work is refused."""

from __future__ import annotations

from typing import Any

import pytest

from cclsearch.card.model import Card, Hardware, ModelArch, Phase
from cclsearch.launch.contract import RunStatus, TrialInput, TrialResult
from cclsearch.predict.arch import count_parameters, flops_per_token
from cclsearch.score.admission import admit
from cclsearch.score.derive import derive_metrics, relative_spread
from cclsearch.score.evidence import Evidence, TraceEvidence
from cclsearch.score.judge import judge_trial
from cclsearch.score.objective import load_objective
from cclsearch.values import Config, FailureKind, Provenance

ARCH = ModelArch(
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
)
CARD = Card(
    name="llama",
    title="Llama-3.1-8B on 16 A100",
    phase=Phase.TRAINING,
    family="llama-3.1-8b",
    arch=ARCH,
    global_batch_size=32,
    seq_len=1024,
    precision="bf16",
    hardware=Hardware(accelerator="a100-40", num_accelerators=16, accelerators_per_node=4, memory_gib=40),
    framework="megatron",
)
PAYLOAD = TrialInput(
    run_id="r",
    trial=1,
    config=Config(tp=2, dp=4, pp=2, micro_batch_size=1),
    arch=ARCH,
    global_batch_size=32,
    seq_len=1024,
    precision="bf16",
    gradient_accumulation=8,
    num_ranks=16,
    ranks_per_node=4,
)
RESULT = TrialResult(
    status=RunStatus.OK,
    world_size=16,
    global_batch_size=32,
    seq_len=1024,
    num_layers=32,
    num_params=count_parameters(ARCH),
    step_times_s=(1.0, 1.01, 0.99, 1.0, 1.02),
    warmup_steps=2,
    peak_memory_bytes=(30 * 2**30,) * 16,
    devices=("NVIDIA A100-SXM4-40GB",) * 16,
    hosts=("a",) * 4 + ("b",) * 4 + ("c",) * 4 + ("d",) * 4,
    foreign_cpu_cores=3.0,
    logical_cores=64,
    losses=(11.9, 11.2),
)
STEP_FLOPS = flops_per_token(ARCH, 1024) * 32 * 1024
TRACE = TraceEvidence(
    ranks=tuple(range(16)),
    step_time_s=1.15,
    flops_per_step=1.2 * STEP_FLOPS,
    flops_coverage=0.8,
)


def judge(result: dict[str, Any] | None = None, trace: dict[str, Any] | None = None, **fields: Any) -> Evidence:
    changed = RESULT.model_copy(update=result or {})
    traces = TRACE.model_copy(update=trace or {})
    evidence = {"payload": PAYLOAD, "card": CARD, "provenance": Provenance.MEASURED, "trace": traces} | fields
    metrics = derive_metrics(evidence["payload"], changed, evidence["card"], evidence["trace"])
    return Evidence(result=changed, metrics=metrics, spread=relative_spread(changed.step_times_s), **evidence)


def broken_rules(evidence: Evidence) -> dict[str, str]:
    admission = admit(evidence)
    broken = {verdict.rule: verdict.detail for verdict in admission.verdicts if verdict.ok is False}
    assert admission.admitted == (not broken)
    return broken


def test_an_honest_run_is_admitted_by_every_rule_that_can_be_told() -> None:
    admission = admit(judge())
    assert admission.admitted
    assert {v.rule for v in admission.verdicts if v.ok is None} == {"unedited"}


TRICKS: dict[str, tuple[dict[str, Any], dict[str, Any], set[str]]] = {
    "the published trick: the global batch shrinks to dp x micro-batch": (
        {"global_batch_size": 4, "step_times_s": (0.125,) * 5},
        {"step_time_s": 0.13},
        {"work"},
    ),
    "the same, declared as if nothing had happened": (
        {"step_times_s": (0.35,) * 5},
        {"step_time_s": 0.36, "flops_per_step": 0.15 * STEP_FLOPS},
        {"traced_work"},
    ),
    "the same, on traces that tell nothing": (
        {"step_times_s": (0.125,) * 5},
        {"step_time_s": 0.13, "flops_per_step": None},
        {"possible"},
    ),
    "the batch is not declared": ({"global_batch_size": None}, {}, {"work"}),
    "the sequence is shortened": ({"seq_len": 512}, {}, {"work"}),
    "layers are left out": ({"num_layers": 16}, {}, {"work"}),
    "the model is smaller than it says": ({"num_params": count_parameters(ARCH) // 2}, {}, {"work"}),
    "fewer ranks ran": ({"world_size": 8}, {}, {"world_size"}),
    "fewer steps were timed": ({"step_times_s": (1.0, 1.0)}, {}, {"steps"}),
    "warm-up was left out": ({"warmup_steps": 0}, {}, {"warmup"}),
    "warm-up was counted": ({"step_times_s": (9.0, 1.0, 1.0, 1.0, 1.0)}, {}, {"warmup"}),
    "the steps disagree": ({"step_times_s": (1.0, 1.9, 0.6, 1.4, 0.8)}, {}, {"spread"}),
    "a rank left no trace": ({}, {"ranks": tuple(range(15))}, {"ranks_traced"}),
    "the declared time is not the traced one": ({}, {"step_time_s": 4.0}, {"trace_time"}),
    "the traced steps are quicker than the timed": ({}, {"step_time_s": 0.2}, {"trace_time"}),
    "the model does not train": ({"losses": (11.9, float("nan"))}, {}, {"training_loss"}),
    "another accelerator": ({"devices": ("NVIDIA H100 80GB HBM3",) * 16}, {}, {"devices"}),
    "a bigger sister of the accelerator": ({"devices": ("NVIDIA A100-SXM4-80GB",) * 16}, {}, {"devices"}),
    "an accelerator nobody has heard of": ({"devices": ("Wonder 9000",) * 16}, {}, {"devices"}),
    "one device among many": (
        {"devices": ("NVIDIA A100-SXM4-40GB",) * 15 + ("NVIDIA H100 80GB HBM3",)},
        {},
        {"devices"},
    ),
    "the traces name another device": ({}, {"devices": ("NVIDIA H100 80GB HBM3",)}, {"devices"}),
    "a recorded figure passed off as measured": ({"recorded": True}, {}, {"provenance"}),
    "a simulated figure passed off as measured": ({"simulated": True}, {}, {"provenance"}),
}


@pytest.mark.parametrize("trick", TRICKS)
def test_a_trick_is_refused_by_the_rule_made_for_it(trick: str) -> None:
    result, trace, rules = TRICKS[trick]
    assert set(broken_rules(judge(result, trace))) == rules


def test_a_payload_that_was_changed_on_its_way_is_refused() -> None:
    smaller = PAYLOAD.model_copy(update={"global_batch_size": 4, "gradient_accumulation": 1})
    detail = broken_rules(judge(payload=smaller))["work"]
    assert "global batch (asked) 4 where the card has 32" in detail
    assert "dp 4 x micro-batch 1 x accumulation 1 makes a global batch of 4" in detail


def test_an_edited_result_is_told_by_its_hash() -> None:
    assert broken_rules(judge(recorded_sha256="a", found_sha256="a")) == {}
    assert "changed after" in broken_rules(judge(recorded_sha256="a", found_sha256="b"))["unedited"]
    assert "gone" in broken_rules(judge(recorded_sha256="a", found_sha256=None))["unedited"]


def test_kernels_that_hide_their_shapes_prove_nothing() -> None:
    hidden = {"flops_per_step": 0.1 * STEP_FLOPS, "flops_coverage": 0.15}
    assert broken_rules(judge(trace=hidden)) == {}
    assert broken_rules(judge(trace=hidden | {"flops_per_step": 3 * STEP_FLOPS})).keys() == {"traced_work"}


def test_padding_of_the_vocabulary_is_no_other_model() -> None:
    assert broken_rules(judge({"num_params": int(count_parameters(ARCH) * 1.01)})) == {}


def test_foreign_load_on_cores_that_the_ranks_leave_idle_does_not_count() -> None:
    quiet = {"foreign_cpu_cores": 60.0, "logical_cores": 64}
    assert broken_rules(judge(quiet)) == {}


def test_foreign_load_that_takes_cores_from_the_ranks_names_itself_and_the_way_out() -> None:
    one_host = {"hosts": ("me",) * 16, "logical_cores": 16, "foreign_cpu_cores": 3.0}
    told = one_host | {"extra": {"foreign_processes": "make 2.9 cores"}}
    detail = broken_rules(judge(told))["load"]
    assert "3.00 cores taken from the ranks" in detail
    assert detail.endswith("stop what else runs on me (make 2.9 cores)")
    assert broken_rules(judge(one_host | {"foreign_cpu_cores": 1.0})) == {}


def test_more_ranks_than_cores_leave_none_idle() -> None:
    crowded = {"hosts": ("me",) * 16, "logical_cores": 2, "foreign_cpu_cores": 0.5}
    assert "load" in broken_rules(judge(crowded))


def test_a_recording_is_admitted_as_one_and_asked_for_no_traces() -> None:
    recorded = TrialResult(
        status=RunStatus.OK, world_size=16, global_batch_size=32, seq_len=1024, step_times_s=(1.0,), recorded=True
    )
    outcome = judge_trial(PAYLOAD, recorded, CARD, load_objective("step_time"), provenance=Provenance.RECORDED)
    assert outcome.is_ranked
    assert outcome.loss == 1.0
    assert any("recorded: looked up, nothing ran" in v.detail for v in outcome.admission.verdicts)  # type: ignore[union-attr]


def test_work_that_differs_is_a_failure_of_its_own_kind_and_keeps_its_figures() -> None:
    shrunk = RESULT.model_copy(update={"global_batch_size": 4, "step_times_s": (0.2,) * 5})
    outcome = judge_trial(
        PAYLOAD, shrunk, CARD, load_objective("step_time"), provenance=Provenance.MEASURED, trace=TRACE
    )
    assert outcome.failure is not None
    assert outcome.failure.kind is FailureKind.WORK_MISMATCH
    assert outcome.loss is None
    assert outcome.metrics["tokens_per_s"] == pytest.approx(4 * 1024 / 0.2)
