"""Beliefs of an LLM as priors, and hypotheses about memory."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from paths import ROOT

from cclsearch.card.load import load_card
from cclsearch.card.model import Card
from cclsearch.core.values import Config, Failure, FailureKind, Stage, Value
from cclsearch.propose.base import Observation, ReportedEvent, SearchView
from cclsearch.propose.bayes.feasibility import Feasibility, fit_feasibility, weigh_combinations
from cclsearch.propose.bayes.prior_hints import (
    LEVELS,
    apply_hints,
    collect_hints,
    find_doubted,
    parse_doubts,
    parse_hints,
)
from cclsearch.propose.bayes.surrogate import fit_posterior
from cclsearch.propose.events import LlmTurn, Note
from cclsearch.propose.warm_start.apply import apply_earlier
from cclsearch.propose.warm_start.knowledge import EarlierKnowledge, LearnedWays
from cclsearch.recording.load import load_recording
from cclsearch.space.framework import has_knob
from cclsearch.space.table import Knob, Space, space_from_rows
from cclsearch.stats.closed_form import Predictor, predictor_of
from cclsearch.tasks.machine import read_machine
from cclsearch.tasks.training.layout import read_layout
from cclsearch.tasks.training.memory import MULTIPLIERS, combine_memory, memory_parts, split_memory
from cclsearch.tasks.training.prediction import HINT_PARTS, MEMORY_HINT_PARTS

RECORDING = load_recording(ROOT / "workloads" / "recordings" / "nanotron-8b-2n")


def hint_events(num_seen: int = 0, **hints: str) -> tuple[ReportedEvent, ...]:
    return (LlmTurn(turn=1, beliefs=hints, num_seen=num_seen),)


def view_with(events: tuple[ReportedEvent, ...], num_trials: int = 0) -> SearchView:
    """Return the view of a search that has measured this many of the fastest rows."""
    ran = [(row.metrics["step_time_s"], row) for row in RECORDING.rows if row.metrics.get("step_time_s")]
    seen = tuple(
        Observation(n, row.config, RECORDING.space.row(row.config), time_s, metrics=row.metrics)
        for n, (time_s, row) in enumerate(sorted(ran, key=lambda pair: pair[0])[:num_trials], start=1)
    )
    return SearchView(RECORDING.card, RECORDING.space, seen, frozenset(), 15, seed=0, events=events)


def pipeline_shift(num_trials: int, level: str) -> float:
    """Return the effect of the hint on the expected log time of pipelined rows, minus that on the other rows."""
    before, after = (fit_posterior(view_with(events, num_trials)) for events in ((), hint_events(pipeline=level)))
    change = after.log_cost_m - before.log_cost_m
    pipelined = np.array([int(RECORDING.space.config(int(row))["pp"]) > 1 for row in before.rows_m])
    return float(change[pipelined].mean() - change[~pipelined].mean())


def test_a_pipeline_hint_shifts_the_expected_time_of_pipelined_rows():
    assert pipeline_shift(0, "much_more") > 0.05
    assert pipeline_shift(0, "much_less") < -0.01
    assert pipeline_shift(0, "as_predicted") == pytest.approx(0, abs=1e-9)


def test_trials_outweigh_a_hint():
    assert abs(pipeline_shift(12, "much_more")) < 0.5 * pipeline_shift(0, "much_more")


def test_the_latest_hint_of_each_part_counts():
    events = (
        *hint_events(pipeline="more", optimizer="less"),
        Note(topic="test", text="moved"),
        *hint_events(pipeline="as_predicted"),
    )
    hints = collect_hints(view_with(events))
    assert {part: hint.level for part, hint in hints.items()} == {
        "pipeline": "as_predicted",
        "optimizer": "less",
    }


def test_a_hint_decays_unless_it_is_repeated():
    old, fresh = hint_events(pipeline="more"), hint_events(6, pipeline="more")
    assert collect_hints(view_with(old, 6))["pipeline"].weight == pytest.approx(0.25)
    assert collect_hints(view_with((*old, *fresh), 6))["pipeline"].weight == 1.0


def test_only_known_parts_and_levels_are_accepted():
    view, known = view_with(()), {*HINT_PARTS, *MEMORY_HINT_PARTS, "zero_stage=0", "micro_batch_size=2"}
    every = [
        {"part": part, "is": level} for part in (*known, "zero_stage=7", "zero_stage", "=", "x=1") for level in LEVELS
    ]
    assert set(parse_hints(every, view)) == known
    for wrong in (None, "slow", [1], [{"part": "pipeline"}], [{"part": ["pipeline"], "is": "more"}], {"part": "dp"}):
        assert parse_hints(wrong, view) == {}


def test_a_belief_about_a_value_moves_its_configurations_and_trials_outweigh_it():
    def shift(num_trials: int, level: str) -> float:
        hints = (LlmTurn(turn=1, beliefs={"zero_stage=0": level}),)
        before, after = (fit_posterior(view_with(events, num_trials)) for events in ((), hints))
        configs = [RECORDING.space.config(int(row)) for row in before.rows_m]
        has_effect = np.array([config["dp"] != 1 for config in configs])  # with dp=1, zero_stage changes nothing
        is_0 = np.array([config["zero_stage"] == 0 for config in configs])
        change = after.log_cost_m - before.log_cost_m
        return float(change[is_0 & has_effect].mean() - change[~is_0 & has_effect].mean())

    assert shift(0, "much_more") == pytest.approx(np.log(2), rel=0.05)
    assert shift(0, "less") < -0.2
    assert abs(shift(12, "much_more")) < 0.1


def test_a_belief_about_memory_moves_the_memory_but_not_the_time():
    before, after = (fit_posterior(view_with(events)) for events in ((), hint_events(activation_memory="much_more")))
    assert np.all(after.memory_gib_m >= before.memory_gib_m)
    assert after.memory_gib_m.sum() > 1.05 * before.memory_gib_m.sum()
    assert np.allclose(after.log_cost_m, before.log_cost_m)


def test_a_belief_changes_odds_of_earlier_searches_as_it_does_those_of_the_shipped_prior():
    view = view_with(hint_events(**{"sequence=sharded": "much_more"}))
    combinations = weigh_combinations(view.predictor, ())
    replicated = [ways for ways in combinations if ("replicated", 0.0) in ways]
    assert 2 * len(replicated) == len(combinations)
    learned = EarlierKnowledge(
        ways=tuple(
            LearnedWays(log_multipliers=dict(ways), probability=(0.9 if ways in replicated else 0.1) / len(replicated))
            for ways in combinations
        )
    )

    def find_odds(predictor: Predictor) -> float:
        """Return the odds that sequences are sharded, before any trial."""
        found = {ways: math.exp(log_prior) for ways, (log_prior, _) in weigh_combinations(predictor, ()).items()}
        return sum(p for ways, p in found.items() if ways not in replicated) / sum(found[ways] for ways in replicated)

    shipped, taken_over = view.predictor, apply_earlier(view.predictor, view.space, learned)
    assert find_odds(taken_over) == pytest.approx(1 / 9)
    factor = find_odds(apply_hints(shipped, view)) / find_odds(shipped)
    assert factor > 10
    assert find_odds(apply_hints(taken_over, view)) / find_odds(taken_over) == pytest.approx(factor)


def test_the_parts_of_a_prediction_with_beliefs_add_up_to_it():
    view = view_with(hint_events(**{"zero_stage=0": "much_more", "pipeline": "less"}))
    form = apply_hints(view.predictor, view).forms["step_time_s"]
    log_cost_N, parts = form.predict(len(view.space))
    rows = np.arange(len(view.space))
    assert np.allclose(form.log_cost(rows)(form.prior.mean_P), log_cost_N)
    assert np.allclose(sum(parts.values()), np.exp(log_cost_N))


@pytest.mark.parametrize(("num_trials", "factor"), [(3, 2.0), (6, 1.5), (4, 0.5)])
def test_a_doubted_trial_teaches_almost_nothing(num_trials, factor):
    """The fastest row gets a wrong time. If it is doubted, the others are predicted as if it had not run."""
    plain = view_with((), num_trials)
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
    view = view_with((), 10)
    assert parse_doubts([3, 3, 99, True, "4", 5, 6], view) == (3, 5)
    assert parse_doubts("3", view) == ()
    after = replace(view, events=(LlmTurn(turn=1, doubts=(3, 5)),))
    assert parse_doubts([6], after) == ()
    again = replace(view.observations[2], trial=11, is_confirmation=True)
    assert find_doubted(replace(after, observations=(*view.observations, again))) == {5}


def test_a_crash_may_be_doubted_only_if_its_cause_is_not_known():
    view = view_with((), 3)
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
