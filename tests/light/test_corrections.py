"""Corrections of an LLM as hypotheses of the surrogate, its doubts, and hypotheses about memory."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paths import ROOT

from cclsearch.card.load import load_card
from cclsearch.card.model import Card
from cclsearch.core.values import Config, Failure, FailureKind, Stage, Value
from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.bayes.corrections import (
    START,
    CorrectionError,
    collect_corrections,
    find_doubted,
    find_memory_crashes,
    find_shifts,
    parse_crashes,
    parse_doubts,
)
from cclsearch.propose.bayes.feasibility import Feasibility, fit_feasibility
from cclsearch.propose.bayes.mixture import weigh_labels
from cclsearch.propose.bayes.surrogate import fit_posterior
from cclsearch.propose.events import Correction, LlmTurn
from cclsearch.recording.load import load_recording
from cclsearch.space.framework import has_knob
from cclsearch.space.table import Knob, Space, space_from_rows
from cclsearch.stats.closed_form import predictor_of
from cclsearch.tasks.machine import read_machine
from cclsearch.tasks.training.layout import read_layout
from cclsearch.tasks.training.memory import MULTIPLIERS, combine_memory, memory_parts, split_memory

RECORDING = load_recording(ROOT / "workloads" / "recordings" / "nanotron-8b-2n")


def view_with(*turns: LlmTurn, num_trials: int = 0) -> SearchView:
    """Return the view of a search that has measured this many of the fastest rows."""
    ran = [(row.metrics["step_time_s"], row) for row in RECORDING.rows if row.metrics.get("step_time_s")]
    seen = tuple(
        Observation(n, row.config, RECORDING.space.row(row.config), time_s, metrics=row.metrics)
        for n, (time_s, row) in enumerate(sorted(ran, key=lambda pair: pair[0])[:num_trials], start=1)
    )
    return SearchView(RECORDING.card, RECORDING.space, seen, frozenset(), 15, seed=0, events=turns)


def say(*corrections: Correction, last_seen: int = 0, **more: Any) -> LlmTurn:
    return LlmTurn(turn=1, corrections=corrections, num_seen=last_seen, last_seen=last_seen, **more)


PIPELINED = RECORDING.space.column("pp") > 1
SLOW_PIPELINE = """
def correct(config, parts, card):
    if config["pp"] > 1:
        parts["time"] = {name: 1.6 * part for name, part in parts["time"].items()}
    return parts
"""
FAST_PIPELINE = SLOW_PIPELINE.replace("1.6", "0.6")


def slow_pipelines(rows: Sequence[int]) -> list[Observation]:
    """Trials on a machine that is as the closed form says, but pipelines take 1.6 times as long."""
    plain = predictor_of(RECORDING.card, RECORDING.space).forms["step_time_s"].predict(len(RECORDING.space))[0]
    time_s = [float(np.exp(plain[row])) * (1.6 if PIPELINED[row] else 1.0) for row in rows]
    return [
        Observation(n, RECORDING.space.config(row), row, time, metrics={"step_time_s": time})
        for n, (row, time) in enumerate(zip(rows, time_s, strict=True), 1)
    ]


def weigh(view: SearchView) -> float:
    """Return the weight of the corrections of the step time."""
    posterior = fit_posterior(view)
    assert posterior is not None
    return sum(weigh_labels(posterior.models.primary.shares).values())


FIRST, LATER = np.flatnonzero(~PIPELINED)[:2].tolist(), np.flatnonzero(PIPELINED)[:12:4].tolist()


@pytest.mark.parametrize(("program", "least", "most"), [(SLOW_PIPELINE, 0.6, 1.0), (FAST_PIPELINE, 0.0, 0.01)])
def test_trials_after_a_correction_raise_the_weight_of_a_true_one_and_end_a_false_one(program, least, most):
    view = view_with(say(Correction(program=program), last_seen=2))
    weights = [weigh(replace(view, observations=tuple(slow_pipelines([*FIRST, *LATER][:n])))) for n in (2, 3, 5)]
    assert weights[0] == pytest.approx(START, abs=0.02), "its author had seen these"
    assert least <= weights[2] <= most
    assert (weights[1] > weights[0]) == (least > 0)


def test_trials_that_the_author_had_seen_only_count_against_a_correction():
    seen = tuple(slow_pipelines([*FIRST, *LATER]))
    true, false = (
        weigh(replace(view_with(say(Correction(program=text), last_seen=5)), observations=seen))
        for text in (SLOW_PIPELINE, FAST_PIPELINE)
    )
    assert true == pytest.approx(START, abs=1e-6)
    assert false < 0.01


@pytest.mark.parametrize("again", [LATER[1:], FIRST, LATER[:1]], ids=["others", "the same once more", "a pipeline"])
def test_a_program_that_knows_the_measured_values_by_heart_earns_nothing(again):
    seen = slow_pipelines([*FIRST, LATER[0]])
    known = {json.dumps(dict(o.config), sort_keys=True): o.loss for o in seen}
    by_heart = f"""
KNOWN = {known!r}
def correct(config, parts, card):
    value = KNOWN.get({json.dumps(list(seen[0].config))!r} and key(config))
    if value is not None:
        parts["time"] = {{"all": value}}
    elif config["tp"] == 16:
        parts["time"]["gemm"] *= 1.0001
    return parts
def key(config):
    import json
    return json.dumps(config, sort_keys=True)
"""
    view = view_with(say(Correction(program=by_heart), last_seen=3))
    later = [replace(o, trial=n) for n, o in enumerate(slow_pipelines(again), 4)]
    assert weigh(replace(view, observations=(*seen, *later))) <= START + 1e-6


def test_a_correction_that_changes_nothing_untried_is_refused_with_the_reason():
    view, seen = view_with(), tuple(slow_pipelines(FIRST))
    by_heart = "def correct(config, parts, card):\n    if config['pp'] == 1 and config == "
    by_heart += f"{dict(seen[0].config)!r}:\n        parts['time'] = {{'all': 1.0}}\n    return parts\n"
    cases = {
        "return parts": "no configuration without a trial",
        "return parts['x']": "KeyError",
        "return {'time': {'a': float('nan')}, 'memory': {'a': 1.0}}": "number above 0",
        "return {'time': {'a': 10**400}, 'memory': {'a': 1}}": "number above 0",
        "while True: pass": "time limit",
    }
    programs = {f"def correct(config, parts, card):\n    {body}\n": why for body, why in cases.items()}
    for program, why in {**programs, by_heart: "no configuration without a trial", "x = 1": "no function"}.items():
        with pytest.raises(CorrectionError, match=why):
            find_shifts(replace(view, observations=seen), view.predictor, Correction(program=program))


def test_a_simple_correction_moves_what_it_names_and_nothing_else():
    view = view_with()
    of_zero = RECORDING.space.column("zero_stage") == 0
    has_effect = of_zero & (RECORDING.space.column("dp") > 1)  # with dp=1, zero_stage changes nothing
    for part, moved in (("zero_stage=0", has_effect), ("all", of_zero | True), ("pipeline_bubble", PIPELINED)):
        time_N, memory_N = find_shifts(view, view.predictor, Correction(part=part, factor=2.0))
        assert not memory_N.any()
        assert np.array_equal(time_N > 1e-9, moved)
    time_N, memory_N = find_shifts(view, view.predictor, Correction(part="memory:pp=2", factor=0.5))
    assert not time_N.any()
    assert set(np.round(memory_N, 6)) == {0.0, round(math.log(0.5), 6)}
    with pytest.raises(CorrectionError, match="is not a part, nor a value of a knob; the parts are gemm, "):
        find_shifts(view, view.predictor, Correction(part="zero_stage=7", factor=2.0))


def test_several_corrections_count_alone_and_together_and_only_the_latest_ones():
    turns = (say(*(Correction(part=part, factor=2.0) for part in ("gemm", "attention", "optimizer", "all", "pp=2"))),)
    posterior = fit_posterior(view_with(*turns))
    assert posterior is not None
    assert collect_corrections(view_with(*turns))[0].correction.part == "attention"
    sets = [len(variant.labels) for variant, _ in posterior.models.primary.shares if variant]
    assert sets == [1, 1, 1, 1, 4]
    assert 1 - posterior.models.primary.shares[0][1] == pytest.approx(START)
    withdrawn = LlmTurn(turn=2, withdraws=(1,))
    assert collect_corrections(view_with(*turns, withdrawn)) == []


def test_a_supposed_correction_is_certain_and_its_own_prediction_is_the_corrected_closed_form():
    plain = fit_posterior(view_with(num_trials=0))
    supposed = fit_posterior(replace(view_with(), supposed=(Correction(part="all", factor=1.5),)))
    assert plain is not None
    assert supposed is not None
    assert np.exp(supposed.log_cost_m - plain.log_cost_m) == pytest.approx(1.5, rel=1e-6)
    assert supposed.p_fits_m == pytest.approx(plain.p_fits_m)


def test_in_serving_a_correction_moves_its_configurations_and_their_chances():
    recording = load_recording(ROOT / "workloads" / "recordings" / "srv-llama-3-1-70b-h100-1024x1024")
    ran = [(n, row) for n, row in enumerate(recording.rows) if row.loads][:2]
    seen = tuple(
        Observation(t, row.config, n, recording.values[n], metrics=row.metrics, loads=row.loads)
        for t, (n, row) in enumerate(ran, 1)
    )
    view = SearchView(recording.card, recording.space, seen, frozenset(), 9, seed=0)
    plain = fit_posterior(view)
    assert plain is not None
    assert view.predictor.loads is not None
    knob = next(knob for knob in recording.space.knobs if knob.name == "tp")
    value = recording.space.config(int(plain.rows_m[-1]))["tp"]
    correction = Correction(part=f"tp={value}", factor=1.5)
    turn = LlmTurn(turn=1, corrections=(correction,), num_seen=2, last_seen=2)
    has_value = recording.space.column("tp")[plain.rows_m] == value
    assert len(knob.choices) > 1
    assert has_value.any()
    for changed, least in ((replace(view, events=(turn,)), 1.02), (replace(view, supposed=(correction,)), 1.2)):
        moved = fit_posterior(changed)
        assert moved is not None
        slower = np.exp(moved.log_cost_m - plain.log_cost_m)
        assert slower[has_value].min() > least > 1.01 > abs(np.log(slower[~has_value])).max(initial=0) + 0.9


def test_a_crash_that_is_said_to_be_of_memory_lowers_the_chance_of_its_neighbours_to_fit():
    crash = Failure(stage=Stage.RUN, kind=FailureKind.CRASHED, message="exit 1")
    view = view_with(num_trials=3)
    plain = fit_posterior(view)
    assert plain is not None
    row = int(plain.rows_m[np.argmin(np.abs(plain.p_fits_m - 0.6))])
    failed = Observation(4, RECORDING.space.config(row), row, None, failure=crash)
    view = replace(view, observations=(*view.observations, failed))
    assert parse_crashes([1, 4, True, "4"], view) == (4,)
    fits = []
    for said in ({"doubts": (4,)}, {}, {"memory_crashes": (4,)}):
        posterior = fit_posterior(replace(view, events=(LlmTurn(turn=1, **said),)))
        assert posterior is not None
        fits.append(posterior.models.feasibility.predict(np.array([row]))[1][0])
    assert fits[0] > fits[1] > fits[2]
    assert find_memory_crashes(replace(view, events=(LlmTurn(turn=1, doubts=(4,), memory_crashes=(4,)),))) == set()


@pytest.mark.parametrize(("num_trials", "factor"), [(3, 2.0), (6, 1.5), (4, 0.5)])
def test_a_doubted_trial_teaches_almost_nothing(num_trials, factor):
    """The fastest row gets a wrong time. If it is doubted, the others are predicted as if it had not run."""
    plain = view_with(num_trials=num_trials)
    first, *others = plain.observations
    wrong = factor * (first.loss or 0.0)
    bad = replace(first, loss=wrong, metrics={**first.metrics, "step_time_s": wrong})
    spoiled = replace(plain, observations=(bad, *others))
    doubted = replace(spoiled, events=(LlmTurn(turn=1, doubts=(first.trial,), num_seen=num_trials),))
    assert find_doubted(doubted) == {first.trial}
    without, misled, warned = (
        dict(zip(fit.rows_m.tolist(), fit.log_cost_m.tolist(), strict=True))
        for view in (replace(plain, observations=tuple(others)), spoiled, doubted)
        if (fit := fit_posterior(view)) is not None
    )
    off_by = [np.median([abs(fit[row] - without[row]) for row in misled]) for fit in (misled, warned)]
    assert off_by[1] < 0.4 * off_by[0]


def test_one_trial_in_five_may_be_doubted_and_a_second_run_settles_it():
    view = view_with(num_trials=10)
    assert parse_doubts([3, 3, 99, True, "4", 5, 6], view) == (3, 5)
    assert parse_doubts("3", view) == ()
    after = replace(view, events=(LlmTurn(turn=1, doubts=(3, 5)),))
    assert parse_doubts([6], after) == ()
    again = replace(view.observations[2], trial=11, is_confirmation=True)
    assert find_doubted(replace(after, observations=(*view.observations, again))) == {5}


def test_a_crash_may_be_doubted_only_if_its_cause_is_not_known():
    view = view_with(num_trials=3)
    crashed, oom = (
        Failure(stage=Stage.RUN, kind=kind, message="") for kind in (FailureKind.CRASHED, FailureKind.OUT_OF_MEMORY)
    )
    failed = [replace(view.observations[n], loss=None, failure=f) for n, f in enumerate((crashed, oom))]
    after = replace(view, observations=(*failed, view.observations[2]))
    assert parse_doubts([2], after) == ()
    assert parse_doubts([1], after) == (1,)


FINE_TUNING = """
version: 1
description: fine-tuning of an 8B model with adapters on 2 A100 of 80 GB
workload:
  model:
    phase: training
    moe: false
    model_family: llama3-8B
    precision: bf16
    model_arch: {num_params: 8030261248, num_layers: 32, num_heads: 32, num_kv_heads: 8, head_dim: 128,
                 hidden_size: 4096, intermediate_size: 14336, vocab_size: 128256, tied_embeddings: false}
  data: {batch_size: 128, seq_len: 4096}
  hardware:
    network_topo: {bandwidth_gbps: [0, 2400]}
    xpu_spec: {type: GPU, model: nvidia_a100, memory_gb: 80, total_count: 2, count_per_node: 8}
Model-executor: {framework: {name: some-trainer}}
"""
MEASURED_GIB = {4: 21.64, 8: 35.03, 16: 62.38}
"""Micro-batch -> peak: IBM fms-acceleration, reference benchmarks on A100 80GB (Apache-2.0), QLoRA with fused kernels
and Liger on 2 GPUs; layers are recomputed."""
OUT_OF_MEMORY = Failure(stage=Stage.RUN, kind=FailureKind.OUT_OF_MEMORY, message="out of memory")


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Card:
    path: Path = tmp_path_factory.mktemp("cards") / "tuning.yaml"
    path.write_text(FINE_TUNING)
    return load_card(str(path))


def make_space(**more: str) -> Space:
    fixed: dict[str, Value] = {"dp": 2, "method": "lora", "quantised_base": "nf4", "loss": "liger", **more}
    rows = [Config({**fixed, "micro_batch_size": size}) for size in (1, 2, 4, 8, 16, 32)]
    return space_from_rows([Knob(name, tuple(dict.fromkeys(row[name] for row in rows))) for name in rows[0]], rows)


def row_of(space: Space, micro_batch: int) -> int:
    return next(n for n in range(len(space)) if space.config(n)["micro_batch_size"] == micro_batch)


def fit(card: Card, space: Space, peaks: dict[int, float], failed: tuple[int, ...] = ()) -> Feasibility:
    seen = [
        Observation(n, space.config(row), row, 1.0, metrics={"step_time_s": 1.0, "peak_memory_gib": gib})
        for n, (row, gib) in enumerate((row_of(space, size), gib) for size, gib in peaks.items())
    ]
    seen += [
        Observation(9 + n, space.config(row), row, None, failure=OUT_OF_MEMORY)
        for n, row in enumerate(row_of(space, size) for size in failed)
    ]
    return fit_feasibility(predictor_of(card, space), seen)


def predict(feasibility: Feasibility, space: Space, micro_batch: int) -> tuple[float, float]:
    gib, p_fits, _ = feasibility.predict(np.array([row_of(space, micro_batch)]))
    return float(gib[0]), float(p_fits[0])


def test_two_measured_peaks_predict_the_next_micro_batch(card):
    space = make_space()
    before, _ = predict(fit(card, space, {}), space, 16)
    assert before > 1.5 * MEASURED_GIB[16], "as much as without recomputation counts, too"
    gib, p_fits = predict(fit(card, space, {size: MEASURED_GIB[size] for size in (4, 8)}), space, 16)
    assert gib == pytest.approx(MEASURED_GIB[16], rel=0.1)
    assert p_fits > 0.9


def test_peaks_without_recomputation_keep_the_other_hypothesis(card):
    space = make_space()
    form = predictor_of(card, space).memory
    kept = np.exp(form.form.log_cost(np.arange(len(space)))(form.form.prior.mean_P))
    at = {size: float(kept[row_of(space, size)]) for size in (1, 2, 4)}
    gib, _ = predict(fit(card, space, {1: at[1], 2: at[2]}), space, 4)
    assert gib == pytest.approx(at[4], rel=0.1)


def test_what_ran_against_the_prediction_makes_recomputation_likely(card):
    space = make_space()
    _, before = predict(fit(card, space, {}), space, 8)
    _, after = predict(fit(card, space, {4: MEASURED_GIB[4]}), space, 8)
    _, failed = predict(fit(card, space, {}, failed=(2,)), space, 4)
    assert before < 0.6 < after
    assert failed < predict(fit(card, space, {}), space, 4)[1]


def test_a_declared_knob_or_the_frameworks_own_leaves_nothing_open(card):
    space = make_space()
    declared = make_space(activation_checkpointing="none")
    for leaves_open, at in ((True, space), (False, declared)):
        form = predictor_of(card, at).memory
        assert ("kept" in form.undeclared) is leaves_open
    assert has_knob("torchtitan", "activation_checkpointing")
    assert has_knob("nanotron", "activation_checkpointing"), "one that only comes on request, too"
    assert not has_knob("", "activation_checkpointing")
    assert not has_knob("some-trainer", "activation_checkpointing")


def test_the_ends_of_the_open_form_are_those_that_a_space_declares(card):
    def gib(log_kept: float, **more: str) -> np.ndarray:
        layout = read_layout(card, make_space(**more))
        log_multipliers = np.zeros(len(MULTIPLIERS))
        log_multipliers[MULTIPLIERS.index("kept")] = log_kept
        parts = memory_parts(card, layout, read_machine(card))
        whole = combine_memory(parts, log_multipliers)
        assert sum(split_memory(parts, log_multipliers).values()) == pytest.approx(whole)
        return np.sort(whole)

    assert gib(0.0) == pytest.approx(gib(0.0, activation_checkpointing="none"))
    assert gib(-40.0) == pytest.approx(gib(0.0, activation_checkpointing="full"))
    assert np.all(gib(-0.5) < gib(0.0))
