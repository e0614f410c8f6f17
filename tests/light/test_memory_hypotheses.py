"""Recomputation that a space does not declare: a hypothesis about memory, which trials decide."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cclsearch.card.load import load_card
from cclsearch.card.model import Card
from cclsearch.core.values import Config, Failure, FailureKind, Stage, Value
from cclsearch.propose.base import Observation
from cclsearch.propose.bayes.feasibility import Feasibility, fit_feasibility
from cclsearch.space.framework import has_knob
from cclsearch.space.table import Knob, Space, space_from_rows
from cclsearch.stats.closed_form import predictor_of
from cclsearch.tasks.machine import read_machine
from cclsearch.tasks.training.layout import read_layout
from cclsearch.tasks.training.memory import MULTIPLIERS, combine_memory, memory_parts, split_memory

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


def test_two_measured_peaks_predict_the_next_micro_batch(card: Card) -> None:
    space = make_space()
    before, _ = predict(fit(card, space, {}), space, 16)
    assert before > 1.5 * MEASURED_GIB[16], "as much as without recomputation counts, too"
    gib, p_fits = predict(fit(card, space, {size: MEASURED_GIB[size] for size in (4, 8)}), space, 16)
    assert gib == pytest.approx(MEASURED_GIB[16], rel=0.1)
    assert p_fits > 0.9


def test_peaks_without_recomputation_keep_the_other_hypothesis(card: Card) -> None:
    space = make_space()
    form = predictor_of(card, space).memory
    assert form is not None
    kept = np.exp(form.form.log_cost(np.arange(len(space)))(form.form.prior.mean_P))
    at = {size: float(kept[row_of(space, size)]) for size in (1, 2, 4)}
    gib, _ = predict(fit(card, space, {1: at[1], 2: at[2]}), space, 4)
    assert gib == pytest.approx(at[4], rel=0.1)


def test_what_ran_against_the_prediction_makes_recomputation_likely(card: Card) -> None:
    space = make_space()
    _, before = predict(fit(card, space, {}), space, 8)
    _, after = predict(fit(card, space, {4: MEASURED_GIB[4]}), space, 8)
    _, failed = predict(fit(card, space, {}, failed=(2,)), space, 4)
    assert before < 0.6 < after
    assert failed < predict(fit(card, space, {}), space, 4)[1]


def test_a_declared_knob_or_the_frameworks_own_leaves_nothing_open(card: Card) -> None:
    space = make_space()
    declared = make_space(activation_checkpointing="none")
    for leaves_open, at in ((True, space), (False, declared)):
        form = predictor_of(card, at).memory
        assert form is not None
        assert ("kept" in form.undeclared) is leaves_open
    assert has_knob("torchtitan", "activation_checkpointing")
    assert has_knob("nanotron", "activation_checkpointing"), "one that only comes on request, too"
    assert not has_knob("", "activation_checkpointing")
    assert not has_knob("some-trainer", "activation_checkpointing")


def test_the_ends_of_the_open_form_are_those_that_a_space_declares(card: Card) -> None:
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
