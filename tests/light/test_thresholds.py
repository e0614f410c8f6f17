"""Thresholds of admission, and precisions."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from paths import ROOT
from pydantic import ValidationError
from test_admission import ARCH, CARD, PAYLOAD, make_evidence, products, verdict_of

from cclsearch.card.arch import count_parameters, flops_per_token, tokens_per_step
from cclsearch.card.load import load_card
from cclsearch.card.model import Card, MoEArch
from cclsearch.core.errors import UserError
from cclsearch.recording.load import load_recording
from cclsearch.scoring.admission import Thresholds
from cclsearch.scoring.evidence import Evidence
from cclsearch.space.build import build_space
from cclsearch.space.framework import load_framework
from cclsearch.space.parse import parse_knob
from cclsearch.stats.closed_form import predict_space
from cclsearch.tasks.training import admission, trace_rules
from cclsearch.tasks.training.task import TrainingTask
from cclsearch.tasks.training.thresholds import TrainingThresholds

ON_CPU = {"memory_kind": "rss"}
FEW_STEPS_REQUESTED = {"payload": PAYLOAD.model_copy(update={"timed_steps": 1, "warmup_steps": 0})}
CROWDED = {"hosts": ("me",) * 20, "logical_cores": 20}


def first_step(ratio: float, **result: Any) -> Evidence:
    """A run whose first timed step took that many times the others."""
    return make_evidence({"step_times_s": (ratio, 1.0, 1.0, 1.0, 1.0), **result})


def last_step(ratio: float, **result: Any) -> Evidence:
    """A run whose last timed step took that many times the others."""
    return make_evidence({"step_times_s": (1.0, 1.0, 1.0, 1.0, ratio), **result})


def window(seconds: float, **result: Any) -> Evidence:
    """A run whose timed steps took 5 s, in a window of so many seconds."""
    return make_evidence({"step_times_s": (1.0, 1.0, 1.01, 0.99, 1.0), "timed_window_s": seconds, **result})


def spread(fraction: float, **result: Any) -> Evidence:
    return dataclasses.replace(make_evidence(result), spread=fraction)


def steps(count: int) -> Evidence:
    return make_evidence({"step_times_s": (1.0,) * count}, **FEW_STEPS_REQUESTED)


def warmup(count: int) -> Evidence:
    return make_evidence({"warmup_steps": count}, **FEW_STEPS_REQUESTED)


def parameters(fraction: float) -> Evidence:
    return make_evidence({"num_params": round(count_parameters(ARCH) * fraction)})


def traced_flops(fraction: float, hidden: float = 0.0, **products_: Any) -> Evidence:
    seen = products(fraction, hidden).model_copy(update=products_)
    return make_evidence(trace={"products": seen})


def traced_time(seconds: float, **result: Any) -> Evidence:
    """A run whose timed steps took a second each."""
    return make_evidence({"step_times_s": (1.0,) * 5, **result}, {"step_time_s": seconds})


def waiting_host(seconds: float) -> Evidence:
    """A run whose steps take a second timed and four traced, of which the device waits so long for the host."""
    trace = {"step_time_s": 4.0, "seconds_by_cause": {"host_idle": seconds, "compute": 4.0 - seconds}}
    return make_evidence({"step_times_s": (1.0,) * 5}, trace)


def used_peak(mfu: float) -> Evidence:
    return dataclasses.replace(make_evidence(), metrics={"mfu": mfu})


def foreign_cores(cores: float, **result: Any) -> Evidence:
    """Load of other processes with 20 ranks on the 20 cores of one host."""
    return make_evidence({**CROWDED, "foreign_cpu_cores": cores, **result})


@pytest.mark.parametrize(
    ("rule", "kept", "broken"),
    [
        ("steps", steps(3), steps(2)),
        ("warmup", warmup(1), warmup(0)),
        ("warmup", first_step(2.0), first_step(2.01)),
        ("warmup", first_step(4.0, **ON_CPU), first_step(4.01, **ON_CPU)),
        ("spread", spread(0.15), spread(0.151)),
        ("spread", spread(0.5, **ON_CPU), spread(0.501, **ON_CPU)),
        ("spread", last_step(4.2), last_step(4.3)),
        ("spread", last_step(9.0, **ON_CPU), last_step(9.1, **ON_CPU)),
        ("step_times", window(6.35), window(6.36)),
        ("step_times", window(5.35, **ON_CPU), window(5.36, **ON_CPU)),
        ("work", parameters(0.981), parameters(0.979)),
        ("work", parameters(1.149), parameters(1.151)),
        ("traced_work", traced_flops(0.95), traced_flops(0.949)),
        ("traced_work", traced_flops(0.75, by_shapes=False), traced_flops(0.749, by_shapes=False)),
        ("traced_work", traced_flops(2.0), traced_flops(2.01)),
        ("traced_work", traced_flops(0.7, hidden=0.25), traced_flops(0.7, hidden=0.249)),
        ("trace_time", traced_time(0.6), traced_time(0.599)),
        ("trace_time", traced_time(0.1, **ON_CPU), traced_time(0.099, **ON_CPU)),
        ("trace_time", traced_time(2.5), traced_time(2.51)),
        ("trace_time", traced_time(6.0, **ON_CPU), traced_time(6.01, **ON_CPU)),
        ("trace_time", waiting_host(3.0), waiting_host(2.99)),
        ("possible", used_peak(1.0), used_peak(1.01)),
        ("load", foreign_cores(3.0), foreign_cores(3.1)),
        ("load", foreign_cores(5.0, **ON_CPU), foreign_cores(5.1, **ON_CPU)),
    ],
)
def test_a_run_at_the_threshold_is_admitted_and_one_beyond_it_is_not(rule, kept, broken):
    assert verdict_of(kept, rule).ok is not False
    assert verdict_of(broken, rule).ok is False


@pytest.mark.parametrize(("factor", "is_kept"), [(2.0, True), (2.01, False)])
def test_the_most_work_of_a_mixture_of_experts_is_that_of_every_expert_on_every_token(factor, is_kept):
    """JAX on CPU devices computes all experts and weights them (launchers/jax_cpu_model.py)."""
    moe = MoEArch(num_experts=16, top_k=2, expert_intermediate_size=512, num_shared_experts=0, num_dense_layers=0)
    arch = ARCH.model_copy(update={"moe": moe})
    all_used = arch.model_copy(update={"moe": moe.model_copy(update={"top_k": moe.num_experts})})
    card = Card.model_validate({**CARD.model_dump(), "model": arch.model_dump()})
    flops = factor * flops_per_token(all_used, card.number("seq_len")) * tokens_per_step(card)
    seen = products(1.0).model_copy(update={"flops": flops})
    verdict = verdict_of(make_evidence(card=card, trace={"products": seen}), "traced_work")
    assert verdict.ok is is_kept, verdict.detail


def test_flops_at_the_threshold_are_enough_whatever_is_hidden():
    assert verdict_of(traced_flops(0.95, hidden=5.0), "traced_work").ok is True


def test_thresholds_without_tolerance_admit_exact_values(monkeypatch):
    exact = make_evidence(trace={"products": products(1.0)})
    assert verdict_of(exact, "work").ok is True
    strict = TrainingThresholds(params_below=0, params_above=0, traced_flops_below=0, traced_flops_above=0)
    monkeypatch.setattr(admission, "DEFAULT", strict)
    monkeypatch.setattr(trace_rules, "DEFAULT", strict)
    assert verdict_of(exact, "work").ok is True
    assert verdict_of(exact, "traced_work").ok is True


@pytest.mark.parametrize(
    ("field", "least", "refused"),
    [
        ("min_timed_steps", 1, 0),
        ("min_warmup_steps", 0, -1),
        ("max_spread", 0.001, 0),
        ("max_spread_cpu", 0.001, 0),
        ("max_first_step", 1.001, 1),
        ("max_first_step_cpu", 1.001, 1),
        ("params_below", 0, -0.001),
        ("params_above", 0, -0.001),
        ("traced_flops_below", 0, -0.001),
        ("traced_flops_above", 0, -0.001),
        ("traced_costs_below", 0, -0.001),
        ("attended_below", 0, -0.001),
        ("max_hidden_share", 0, -0.001),
        ("min_recomputed", 0, -0.001),
        ("min_recomputed", 1, 1.001),
        ("max_narrower_share", 0, -0.001),
        ("min_reduced_share", 0, -0.001),
        ("max_quantum", 0.001, 0),
        ("max_clock_difference_s", 0, -0.001),
        ("min_traced_time", 0.001, 0),
        ("min_traced_time_cpu", 0.001, 0),
        ("max_traced_time", 1.001, 1),
        ("max_traced_time_cpu", 1.001, 1),
        ("max_mfu", 0.001, 0),
        ("max_foreign_share", 0.001, 0),
        ("max_foreign_share_cpu", 0.001, 0),
    ],
)
def test_a_threshold_that_no_run_could_meet_is_rejected(field, least, refused):
    model = Thresholds if field in Thresholds.model_fields else TrainingThresholds
    assert getattr(model(**{field: least}), field) == least
    with pytest.raises(ValidationError):
        model(**{field: refused})


def test_a_cpu_is_recognized_by_the_card_or_by_the_kind_of_memory():
    on_cpu = CARD.model_copy(update={"hardware": CARD.hardware.model_copy(update={"accelerator": "cpu"})})
    assert make_evidence(card=on_cpu).is_on_cpu
    assert make_evidence(ON_CPU).is_on_cpu
    assert not make_evidence().is_on_cpu


ALTERNATIVE = "alternative_precisions=[bf16]"


def test_a_card_without_alternatives_has_one_precision_in_every_trial():
    card = load_card("wl2")
    assert card.precisions == ("bf16",)
    assert not build_space(card, load_framework("megatron")).has("precision")
    assert card.for_trial({"tp": 1}) is card


@pytest.mark.parametrize("knob", ["precision=bf16,fp16", "precision=fp8"])
def test_a_knob_cannot_change_the_precision_that_the_card_fixes(knob):
    with pytest.raises(UserError, match=r"precision is part of the work, and wl2 allows bf16 \(list others in"):
        build_space(load_card("wl2"), load_framework("megatron"), [parse_knob(knob)])


def test_the_command_line_narrows_listed_precisions_and_refuses_others(project, cli):
    fixed = ["space", "--workload", "wl2", "--knob", "precision=fp16"]
    assert "precision is part of the work, and wl2 allows bf16" in cli.err(fixed)
    assert "precision" in cli.out([*fixed, "--set", "alternative_precisions=[fp16]"])


def test_listed_alternatives_double_the_space_and_can_be_narrowed():
    plain, frame = load_card("wl2"), load_framework("megatron")
    card = load_card("wl2", sets=("alternative_precisions=[fp16]",))
    space = build_space(card, frame)
    assert len(space) == 2 * len(build_space(plain, frame))
    assert set(space.column("precision").tolist()) == {"bf16", "fp16"}
    narrowed = build_space(card, frame, [parse_knob("precision=fp16")])
    assert set(narrowed.column("precision").tolist()) == {"fp16"}
    assert (card.for_trial({"precision": "fp16"}).precision, card.for_trial({"tp": 1}).precision) == ("fp16", "bf16")


def test_a_framework_must_support_every_listed_precision():
    card = load_card("wl2", sets=("alternative_precisions=[fp16]",))
    with pytest.raises(UserError, match=r"workload\.model\.alternative_precisions must be one of .*, not 'fp16'"):
        build_space(card, load_framework("torchtitan"))


def test_each_precision_is_predicted_as_a_card_of_it_alone():
    frame = load_framework("megatron")
    both = load_card("wl2", sets=("alternative_precisions=[fp32]",))
    space = build_space(both, frame)
    prediction = predict_space(both, space)
    for precision in ("bf16", "fp32"):
        alone = load_card("wl2", sets=(f"workload.model.precision={precision}",))
        expected = predict_space(alone, build_space(alone, frame))
        rows = space.matching({"precision": precision})
        assert prediction.value_N[rows].tolist() == pytest.approx(expected.value_N.tolist())
        assert prediction.memory_gib_N[rows].tolist() == pytest.approx(expected.memory_gib_N.tolist())
        assert sum(prediction.parts.values())[rows].tolist() == pytest.approx(expected.value_N.tolist())


def test_a_recording_keeps_the_rows_in_precisions_that_its_card_lists(tmp_path):
    source = ROOT / "workloads" / "recordings" / "nanotron-8b-2n"
    card = (source / "card.yaml").read_text()
    header, *rows = (source / "trials.csv").read_text().splitlines()
    odd = ["fp16" if n % 3 == 0 else "bf16" for n in range(len(rows))]
    table = [f"precision,{header}", *(f"{precision},{row}" for precision, row in zip(odd, rows, strict=True))]
    (tmp_path / "trials.csv").write_text("\n".join(table) + "\n")
    (tmp_path / "card.yaml").write_text(card)
    fixed = load_recording(tmp_path)
    assert (len(fixed.rows), set(fixed.space.column("precision"))) == (odd.count("bf16"), {"bf16"})
    assert any(f"{odd.count('fp16')} of {len(rows)} rows left out" in note for note in fixed.notes)
    listed = card.replace("precision: bf16", "precision: bf16\n    alternative_precisions: [fp16]")
    assert listed != card
    (tmp_path / "card.yaml").write_text(listed)
    both = load_recording(tmp_path)
    assert (len(both.rows), set(both.space.column("precision"))) == (len(rows), {"bf16", "fp16"})


@pytest.mark.parametrize("given", ["fp8", "[]", "[[bf16]]"])
def test_alternatives_must_be_a_list_of_dtypes(given):
    notes = "alternative_precisions must be a list such as"
    with pytest.raises(UserError, match=notes):
        load_card("wl2", sets=(f"workload.model.alternative_precisions={given}",))


def test_a_trial_that_its_profiler_slows_says_so():
    slowed = dataclasses.replace(waiting_host(3.0), metrics={"step_time_s": 1.0})
    sentence = "its traced steps take 4.0 times the timed ones"
    assert any(sentence in text for text in TrainingTask().diagnose(slowed).sentences)
    assert TrainingTask().diagnose(dataclasses.replace(slowed, metrics={"step_time_s": 3.0})).sentences == ()
