"""The admission gate: an honest run is admitted, and each known way to win without the work is rejected."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest

from cclsearch.card.arch import count_parameters, flops_per_token
from cclsearch.card.model import Card, Hardware, ModelArch, Phase
from cclsearch.core.values import Config, Provenance
from cclsearch.launch.contract import RunStatus, TimedWindow
from cclsearch.scoring.admission import admit, check_timed_window
from cclsearch.scoring.evaluate import evaluate_evidence
from cclsearch.scoring.evidence import Evidence, TracedCollective, TracedProducts, TracedRank, TraceEvidence
from cclsearch.scoring.objective import load_objective
from cclsearch.scoring.outcome import AttemptWindow, Outcome, Verdict
from cclsearch.tasks.training.admission import ADMISSION_RULES
from cclsearch.tasks.training.contract import TrainingInput, TrainingResult
from cclsearch.tasks.training.task import TrainingTask
from cclsearch.tasks.training.time_rules import check_step_times

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
    task="training",
    phase=Phase.TRAINING,
    family="llama-3.1-8b",
    model=ARCH,
    work={"global_batch_size": 32, "seq_len": 1024},
    precision="bf16",
    hardware=Hardware(accelerator="a100-40", num_accelerators=16, accelerators_per_node=4, memory_gib=40),
    framework="megatron",
)
PAYLOAD = TrainingInput(
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
    nonce="n1",
)
RESULT = TrainingResult(
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
    precision="bf16",
)
PARAMETERS = count_parameters(ARCH)
STEP_FLOPS = flops_per_token(ARCH, 1024) * 32 * 1024
TRACE = TraceEvidence(
    ranks=tuple(range(16)),
    step_time_s=1.15,
    products=TracedProducts(
        flops=1.2 * STEP_FLOPS, seen_s=12.0, hidden_s=0.0, compute_s=16.0, seconds_by_precision={"bf16": 12.0}
    ),
    collectives=(
        TracedCollective(kind="all_reduce", axis="mesh_dp", group_size=4, calls=16, elements=4 * PARAMETERS),
        TracedCollective(kind="all_reduce", axis="mesh_tp", group_size=2, calls=16 * 8 * 64, elements=1e9),
        TracedCollective(kind="send_recv", group_size=2, calls=256),
    ),
    origins={rank: TracedRank(nonces=("n1",), digest=f"d{rank}") for rank in range(16)},
    backend="nccl",
    format="kineto on gpu",
)


def judge(
    result: TrainingResult,
    objective: str = "step_time",
    *,
    provenance: Provenance = Provenance.MEASURED,
    trace: TraceEvidence | None = TRACE,
    baseline: dict[str, float] | None = None,
) -> Outcome:
    evidence = Evidence(PAYLOAD, result, CARD, provenance, trace)
    return evaluate_evidence(evidence, TrainingTask(), load_objective(objective), baseline=baseline)


def products(share: float, hidden: float | None = 0.0) -> TracedProducts:
    """That share of the model's FLOPs seen, and at most `hidden` of it in kernels without shapes (None: unknown)."""
    return TracedProducts(
        flops=share * STEP_FLOPS,
        seen_s=4.0,
        hidden_s=0.0 if hidden == 0.0 else 8.0,
        compute_s=16.0,
        hidden_flops=None if hidden is None else hidden * STEP_FLOPS,
    )


def make_evidence(result: dict[str, Any] | None = None, trace: dict[str, Any] | None = None, **fields: Any) -> Evidence:
    changed = RESULT.model_copy(update=result or {})
    traces = TRACE.model_copy(update=trace or {})
    evidence = {"payload": PAYLOAD, "card": CARD, "provenance": Provenance.MEASURED, "trace": traces} | fields
    found = Evidence(result=changed, **evidence)
    metrics, spread = TrainingTask().measure(found)
    return dataclasses.replace(found, metrics=metrics, spread=spread)


def violated_rules(evidence: Evidence) -> dict[str, str]:
    admission = admit(evidence, ADMISSION_RULES)
    broken = {verdict.rule: verdict.detail for verdict in admission.verdicts if verdict.ok is False}
    assert admission.admitted == (not broken)
    return broken


def verdict_of(evidence: Evidence, rule: str) -> Verdict:
    """The verdict of that rule."""
    return next(verdict for verdict in admit(evidence, ADMISSION_RULES).verdicts if verdict.rule == rule)


def test_an_honest_run_is_admitted_by_every_checkable_rule():
    admission = admit(make_evidence(), ADMISSION_RULES)
    assert admission.admitted
    assert {v.rule for v in admission.verdicts if v.ok is None} == {"timed_window", "unedited"}


TRICKS: dict[str, tuple[dict[str, Any], dict[str, Any], set[str]]] = {
    "the published trick: the global batch shrinks to dp x micro-batch": (
        {"global_batch_size": 4, "step_times_s": (0.125, 0.126, 0.124, 0.125, 0.127)},
        {"step_time_s": 0.13},
        {"work"},
    ),
    "the same, declared as if nothing had happened": (
        {"step_times_s": (0.35, 0.36, 0.34, 0.353, 0.35)},
        {"step_time_s": 0.36, "products": products(0.15)},
        {"traced_work"},
    ),
    "more work in the traces than the model has": ({}, {"products": products(3.0, hidden=0.9)}, {"traced_work"}),
    "the same, on traces without FLOPs": (
        {"step_times_s": (0.125, 0.126, 0.124, 0.125, 0.127)},
        {"step_time_s": 0.13, "products": None},
        {"possible"},
    ),
    "the batch is not declared": ({"global_batch_size": None}, {}, {"work"}),
    "the sequence is shortened": ({"seq_len": 512}, {}, {"work"}),
    "layers are left out": ({"num_layers": 16}, {}, {"work"}),
    "the model is smaller than it says": ({"num_params": count_parameters(ARCH) // 2}, {}, {"work"}),
    "fewer ranks ran": ({"world_size": 8}, {}, {"world_size"}),
    "fewer steps were timed": ({"step_times_s": (1.0, 1.0)}, {}, {"steps"}),
    "warm-up was left out": ({"warmup_steps": 0}, {}, {"warmup"}),
    "warm-up was counted": ({"step_times_s": (9.0, 1.01, 0.98, 1.0, 1.02)}, {}, {"warmup"}),
    "the steps disagree": ({"step_times_s": (1.01, 1.9, 0.6, 1.4, 0.8)}, {}, {"spread"}),
    "a rank left no trace": ({}, {"ranks": tuple(range(15))}, {"ranks_traced"}),
    "the declared time is not the traced one": ({}, {"step_time_s": 4.0}, {"trace_time"}),
    "the traced steps are quicker than the timed": ({}, {"step_time_s": 0.2}, {"trace_time"}),
    "the model does not train": ({"losses": (11.9, float("nan"))}, {}, {"training_loss"}),
    "another accelerator": ({"devices": ("NVIDIA H100 80GB HBM3",) * 16}, {}, {"devices"}),
    "a bigger sister of the accelerator": ({"devices": ("NVIDIA A100-SXM4-80GB",) * 16}, {}, {"devices"}),
    "an unknown accelerator": ({"devices": ("Wonder 9000",) * 16}, {}, {"devices"}),
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
def test_each_trick_is_rejected_by_its_rule(trick):
    result, trace, rules = TRICKS[trick]
    assert set(violated_rules(make_evidence(result, trace))) == rules


def test_a_changed_payload_is_rejected():
    smaller = PAYLOAD.model_copy(update={"global_batch_size": 4, "gradient_accumulation": 1})
    detail = violated_rules(make_evidence(payload=smaller))["work"]
    assert "global batch (requested) is 4, but 32 in the card" in detail
    assert "dp 4 x micro-batch 1 x accumulation 1 is a global batch of 4, but 32 in the card" in detail


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "was known only when it opened"),
        ({"digest": "other"}, "are others than those that it closed with"),
        ({"seconds": None}, "was not closed"),
        ({"seconds": -0.01}, "was closed before the search gave its nonce"),
        (None, "opened 0 timed windows of 1"),
    ],
)
def test_a_timed_window_is_opened_and_closed_with_what_was_computed_in_it(changes, words):
    evidence = make_evidence()
    (digest,) = evidence.result.list_digests(evidence.payload)
    seconds = sum(evidence.result.step_times_s)
    window = TimedWindow(nonce="a", seconds=seconds, digest=digest).model_copy(update=changes or {})
    attempt = AttemptWindow(started_s=0, ended_s=1e4, elapsed_s=1e4, timed=() if changes is None else (window,))
    payload = evidence.payload.model_copy(update={"opens_window": True})
    verdict = check_timed_window(replace(evidence, attempt=attempt, payload=payload))
    assert verdict.ok is (changes == {})
    assert words in verdict.detail


def test_a_window_that_no_search_saw_refuses_nothing():
    evidence = make_evidence()
    payload = evidence.payload.model_copy(update={"opens_window": True})
    attempt = AttemptWindow(started_s=0, ended_s=1e4, elapsed_s=1e4, timed=(TimedWindow(),))
    assert check_timed_window(replace(evidence, attempt=attempt, payload=payload)).ok is None


def test_step_times_are_compared_with_the_window_that_the_search_saw_not_with_the_reported_one():
    evidence = make_evidence()
    total_s = sum(evidence.result.step_times_s)
    result = evidence.result.model_copy(update={"timed_window_s": total_s})
    for seconds, is_ok in ((total_s * 1.015, True), (total_s * 1.03 + 0.05, False)):
        window = TimedWindow(nonce="a", seconds=seconds)
        attempt = AttemptWindow(started_s=0, ended_s=1e4, elapsed_s=1e4, timed=(window,))
        assert check_step_times(replace(evidence, attempt=attempt, result=result)).ok is is_ok


HONEST: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "kernels without shapes may have the rest of the FLOPs": ({}, {"products": products(0.1, hidden=0.9)}),
    "padding of the vocabulary is not another model": ({"num_params": int(count_parameters(ARCH) * 1.01)}, {}),
    "load on cores that the ranks leave idle": ({"foreign_cpu_cores": 60.0, "logical_cores": 64}, {}),
}


@pytest.mark.parametrize("work", HONEST)
def test_what_explains_itself_excludes_no_run(work):
    result, trace = HONEST[work]
    assert violated_rules(make_evidence(result, trace)) == {}


ONE_HOST = {"hosts": ("me",) * 16, "logical_cores": 16}
NO_HOSTS = {"hosts": (), "logical_cores": 64}
UNEVEN = {"hosts": ("a",) + ("b",) * 6 + ("c",) * 5 + ("d",) * 4, "logical_cores": 8}


@pytest.mark.parametrize(
    ("result", "allowed", "too_many", "begin", "end"),
    [
        (ONE_HOST, 1.0, 3.0, "other processes use 3.00 of 16 cores, and the ranks need all 16", "Stop them on me"),
        # more ranks than cores leave no core idle
        (ONE_HOST | {"logical_cores": 2}, 0.1, 0.5, "other processes use 0.50 of 2 cores", ""),
        # without host names, 16 ranks on 64 cores leave 48 idle; 49.6 busy cores take 1.6 of the 16, a tenth
        (NO_HOSTS, 49.6, 50.5, "other processes use 50.50 of 64 cores, and the ranks need 16: 2.50 cores taken", ""),
        # the host with the most ranks counts: 6 of 16 on 8 cores leave 2 idle; 3.5 busy cores take 1.5 of 6
        (UNEVEN, 2.5, 3.5, "other processes use 3.50 of 8 cores", "1.50 cores taken from the ranks. Stop them on a"),
    ],
)
def test_load_that_takes_cores_from_the_ranks_excludes_a_run(result, allowed, too_many, begin, end):
    assert violated_rules(make_evidence({**result, "foreign_cpu_cores": allowed})) == {}
    detail = violated_rules(make_evidence({**result, "foreign_cpu_cores": too_many}))["load"]
    assert detail.startswith(begin)
    assert end in detail


def test_a_verdict_about_load_names_the_processes_and_the_fix():
    listed = {**ONE_HOST, "foreign_cpu_cores": 3.0, "extra": {"foreign_processes": "make 2.9 cores"}}
    assert violated_rules(make_evidence(listed))["load"].endswith(". Stop them on me (make 2.9 cores)")


def test_a_recording_is_admitted_without_traces():
    recorded = TrainingResult(
        status=RunStatus.OK, world_size=16, global_batch_size=32, seq_len=1024, step_times_s=(1.0,), recorded=True
    )
    outcome = judge(recorded, provenance=Provenance.RECORDED, trace=None)
    assert outcome.is_ranked
    assert outcome.loss == 1.0
    assert any("recorded: looked up, no job ran" in v.detail for v in outcome.admission.verdicts)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("step_times_s", "ok", "detail"),
    [
        ((9.0, 1.0, 1.0), False, "took 9.0 x the others"),
        ((9.0, 1.0), True, ""),
        # the others took 1 and 3 s: the first took twice their median of 2 s
        ((4.0, 1.0, 3.0), True, ""),
        ((4.1, 1.0, 3.0), False, "took 2.0 x the others"),
    ],
)
def test_three_timed_steps_are_needed_to_detect_a_warm_up_step(step_times_s, ok, detail):
    verdict = verdict_of(make_evidence({"step_times_s": step_times_s}), "warmup")
    assert verdict.ok is ok
    assert detail in verdict.detail


def test_one_step_has_no_spread_and_a_recording_has_no_steps():
    assert verdict_of(make_evidence({"step_times_s": (1.0,)}), "spread").ok is None
    recorded = make_evidence(
        {"recorded": True, "step_times_s": (1.0,), "warmup_steps": 0}, provenance=Provenance.RECORDED
    )
    verdicts = {
        rule: verdict_of(recorded, rule).ok for rule in ("provenance", "steps", "warmup", "ranks_traced", "load")
    }
    assert verdicts == {"provenance": True, "steps": None, "warmup": None, "ranks_traced": None, "load": None}


def test_an_undeclared_world_size_is_rejected_for_measured_runs():
    silent = {"world_size": None}
    assert "did not declare its world size" in violated_rules(make_evidence(silent))["world_size"]
    recorded = make_evidence({**silent, "recorded": True}, provenance=Provenance.RECORDED)
    assert verdict_of(recorded, "world_size").ok is None


def test_traces_are_required_only_if_steps_were_profiled():
    none, one = (PAYLOAD.model_copy(update={"profiled_steps": n}) for n in (0, 1))
    assert verdict_of(make_evidence(payload=none, trace={"ranks": ()}), "ranks_traced").ok is None
    assert verdict_of(make_evidence(payload=one, trace={"ranks": ()}), "ranks_traced").ok is False


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        (range(1, 16), "0"),
        (range(8, 16), "0, 1, 2, 3, 4, 5, 6, 7"),
        (range(9, 16), "0, 1, 2, 3, 4, 5, 6, 7 and 1 more"),
        (range(0), "0, 1, 2, 3, 4, 5, 6, 7 and 8 more; the run script writes one of each rank to trace/ (docs/"),
    ],
)
def test_up_to_eight_ranks_without_a_trace_are_named(ranks, named):
    detail = verdict_of(make_evidence(trace={"ranks": tuple(ranks)}), "ranks_traced").detail
    assert detail.startswith(f"no readable trace of rank {named}")
    assert ("more" in detail) == ("more" in named)


def on_accelerator(name: str) -> Card:
    return CARD.model_copy(update={"hardware": CARD.hardware.model_copy(update={"accelerator": name})})


@pytest.mark.parametrize(
    ("card", "devices", "ok", "message"),
    [
        (CARD, ("NVIDIA A100-SXM4-40GB",), True, "NVIDIA A100-SXM4-40GB"),
        (CARD, ("NVIDIA A100X",), None, "unknown devices: 'NVIDIA A100X'"),
        (CARD, ("NVIDIA A100X", "Wonder 9000"), False, "the inputs name a100-40, but it ran on"),
        (CARD, (), None, "neither the run script nor the traces name the devices"),
        (on_accelerator("cpu"), ("AMD EPYC 7763 64-Core Processor",), True, "AMD EPYC"),
        (on_accelerator("cpu"), ("NVIDIA H100 80GB HBM3",), False, "'NVIDIA H100 80GB HBM3' is h100"),
        (on_accelerator("wonder-9000"), ("Wonder 9000",), None, "accelerator 'wonder-9000' is unknown"),
    ],
)
def test_device_names_are_compared_with_the_accelerator_of_the_inputs(card, devices, ok, message):
    verdict = verdict_of(make_evidence({"devices": devices}, card=card), "devices")
    assert verdict.ok is ok
    assert message in verdict.detail


@pytest.mark.parametrize("unknown", ["foreign_cpu_cores", "logical_cores"])
def test_unknown_load_does_not_exclude_a_run(unknown):
    assert verdict_of(make_evidence({unknown: None}), "load").ok is None


def test_only_a_reported_training_loss_can_be_invalid():
    assert verdict_of(make_evidence({"losses": ()}), "training_loss").ok is None
    assert verdict_of(make_evidence({"losses": (2.5, 2.25)}), "training_loss").detail == "2.5000 at the first step"


def test_traces_without_a_step_time_or_flops_give_no_verdict():
    silent = {"step_time_s": None, "products": None}
    assert {verdict_of(make_evidence(trace=silent), rule).ok for rule in ("trace_time", "traced_work")} == {None}
    uncovered = {"products": products(0.5, hidden=None)}
    assert "their rate is unknown" in verdict_of(make_evidence(trace=uncovered), "traced_work").detail


def test_undeclared_work_excludes_a_run_and_is_noted_for_a_recording():
    silent = {"global_batch_size": None, "seq_len": None, "num_layers": None, "num_params": None}
    assert violated_rules(make_evidence(silent))["work"] == (
        "the run script did not declare its global batch and sequence length"
    )
    recorded = make_evidence({**silent, "recorded": True}, provenance=Provenance.RECORDED)
    verdict = verdict_of(recorded, "work")
    assert (verdict.ok, verdict.detail) == (None, "recorded: not declared: global batch, sequence length")
    halfway = verdict_of(make_evidence({"num_layers": None}), "work")
    assert (halfway.ok, halfway.detail) == (True, "32 sequences of 1024 tokens per step; not declared: layers")


def test_micro_batch_times_dp_times_accumulation_is_the_global_batch():
    # dp 4 x micro-batch 2 x accumulation 8 = 64
    doubled = PAYLOAD.model_copy(update={"config": Config(tp=2, dp=4, pp=2, micro_batch_size=2)})
    assert "is a global batch of 64, but 32 in the card" in violated_rules(make_evidence(payload=doubled))["work"]
    unknown = PAYLOAD.model_copy(update={"config": Config(tp=2, dp=4, pp=2)})
    assert violated_rules(make_evidence(payload=unknown)) == {}
