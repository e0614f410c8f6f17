"""What a framework file says of how the framework trains changes what is predicted before any trial."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_prediction import make_space

from cclsearch import predict
from cclsearch.card.load import load_card
from cclsearch.card.model import Card
from cclsearch.core.errors import UserError
from cclsearch.plan.plan import plan_search
from cclsearch.plan.request import SearchRequest
from cclsearch.plan.subject import Asked, find_subject
from cclsearch.run.spec import SearchLimits
from cclsearch.space.framework import find_behaviour, load_framework
from cclsearch.tasks.machine import read_machine
from cclsearch.tasks.training.layer_time import slow_gemm
from cclsearch.tasks.training.layout import read_layout
from cclsearch.tasks.training.memory import memory_parts
from cclsearch.tasks.training.prediction import make_predictor
from cclsearch.tasks.training.time import MULTIPLIERS, TimeParts, split_time, time_parts

ROWS: list[dict[str, object]] = [
    {"tp": 2, "dp": 4, "pp": 1, "micro_batch_size": 1, "zero_stage": 1},
    {"tp": 2, "dp": 1, "pp": 4, "micro_batch_size": 1, "zero_stage": 0},
]
FILE = """knobs:
  - {name: tp, choices: [1, 2]}
behaviour:
"""


def card_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, behaviour: str) -> Card:
    folder = tmp_path / "launchers"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.framework.yaml").write_text(FILE + behaviour)
    monkeypatch.setenv("CCL_SEARCH_PATH", str(tmp_path))
    return load_card("wl2").model_copy(update={"framework": name})


def plan_card(way: dict[str, object]) -> Card:
    request = SearchRequest("wl2", SearchLimits(budget=1), launcher="simulate", use_fewer=True, **way)
    return plan_search(request).spec.card


def test_a_chosen_framework_predicts_as_the_framework_of_the_card(tmp_path, monkeypatch):
    card_of(tmp_path, monkeypatch, "split-one", "  sequence_parallel: true\n")
    ways = [{"framework": "split-one"}, {"sets": ["framework=split-one"]}, {"framework": "megatron"}]
    asked = [find_subject(Asked(workload="wl2", **way)).card for way in ways]
    planned = [plan_card(way) for way in ways]
    for chosen, named, own in (asked, planned):
        assert chosen.framework == named.framework == "split-one"
        assert own == named.model_copy(update={"framework": own.framework})
        assert parts_of(chosen).replicated[0] == parts_of(named).replicated[0] == 0 < parts_of(own).replicated[0]
    one = [
        predict(load_card("wl2", sets=way.get("sets", ())), framework=way.get("framework"), use_fewer=True)
        for way in ways[:2]
    ]
    assert one[0].equals(one[1])


def parts_of(card: Card) -> TimeParts:
    return time_parts(card, read_layout(card, make_space(ROWS)), read_machine(card))


def seconds(card: Card, part: str) -> np.ndarray:
    return split_time(parts_of(card), np.zeros(len(MULTIPLIERS)))[part]


def test_an_even_pipeline_waits_for_the_output_projection_and_a_balanced_one_does_not(tmp_path, monkeypatch):
    unknown = load_card("wl2").model_copy(update={"framework": "unheard-of"})
    even = card_of(tmp_path, monkeypatch, "even-one", "  pipeline_split: even\n")
    balanced = card_of(tmp_path, monkeypatch, "balanced-one", "  pipeline_split: balanced\n")
    one_stage, four_stages = np.transpose([seconds(card, "vocabulary") for card in (even, unknown, balanced)])
    assert len(set(one_stage)) == 1
    assert four_stages[0] > four_stages[1] > four_stages[2] >= 0
    # 32 layers and an output projection of 2.4: nine layers on each of the first three stages, five on the last one
    assert (parts_of(balanced).balanced_first[1] * 8, parts_of(balanced).balanced_last[1] * 8) == (9, 5)


def test_a_stated_sequence_split_takes_the_place_of_an_unknown_one(tmp_path, monkeypatch):
    unknown = load_card("wl2").model_copy(update={"framework": "unheard-of"})
    split = card_of(tmp_path, monkeypatch, "split-one", "  sequence_parallel: true\n")
    whole = card_of(tmp_path, monkeypatch, "whole-one", "  sequence_parallel: false\n")
    assert parts_of(unknown).replicated[0] > 0 == parts_of(split).replicated[0]
    assert parts_of(split).elementwise == pytest.approx(parts_of(unknown).elementwise)
    assert parts_of(whole).elementwise == pytest.approx(parts_of(unknown).elementwise + parts_of(unknown).replicated)
    knob = make_space([{"tp": 2, "dp": 4, "sequence_parallel": value} for value in (False, True)])
    assert sorted(read_layout(split, knob).sequence_parallel) == [0, 1]


def test_gradients_that_are_reduced_after_the_backward_pass_hide_behind_nothing(tmp_path, monkeypatch):
    unknown = load_card("wl2").model_copy(update={"framework": "unheard-of"})
    late = card_of(tmp_path, monkeypatch, "late-one", "  overlapped_zero_stages: [0]\n")
    assert parts_of(unknown).dp_window.tolist() == [1, 1]
    assert parts_of(late).dp_window.tolist() == [0, 1]
    exposed, before = seconds(late, "data parallel"), seconds(unknown, "data parallel")
    assert exposed[0] == pytest.approx(parts_of(late).dp[0] + parts_of(late).dp_exposed_floor[0])
    assert exposed[0] > before[0] > 0 == exposed[1]


def test_what_a_framework_always_shards_is_not_left_open(tmp_path, monkeypatch):
    unknown = load_card("wl2").model_copy(update={"framework": "unheard-of"})
    card = card_of(tmp_path, monkeypatch, "sharding-one", "  zero_stage: 1\n")
    space = make_space([{"dp": dp, "micro_batch_size": 1} for dp in (1, 8)])
    stated, left_open = (memory_parts(one, read_layout(one, space), read_machine(one)) for one in (card, unknown))
    assert stated.optimizer[0] == pytest.approx(8 * stated.optimizer[1])
    assert stated.unsharded.tolist() == [0, 0] != left_open.unsharded.tolist()
    knob = make_space([{"dp": 8, "micro_batch_size": 1, "zero_stage": stage} for stage in (0, 3)])
    assert sorted(read_layout(card, knob).zero) == [0, 3], "a knob counts more"


def test_stated_bytes_of_gradients_are_the_only_hypothesis_about_them(tmp_path, monkeypatch):
    unknown = load_card("wl2").model_copy(update={"framework": "unheard-of"})
    card = card_of(tmp_path, monkeypatch, "small-one", "  gradient_bytes: 2\n")
    space = make_space([{"dp": dp, "micro_batch_size": 1} for dp in (1, 8)])
    found = {}
    for name, one in (("stated", card), ("open", unknown)):
        memory = make_predictor(one, space).memory
        found[name] = [float(np.exp(log)) for log, _ in memory.undeclared["gradients"]]
    assert found["open"] == pytest.approx([1.0, 0.5]), "4 or 2 bytes of the 4 that count before calibration"
    assert found["stated"] == pytest.approx([0.5])


def test_what_nobody_knows_of_a_framework_stays_open(tmp_path, monkeypatch):
    assert find_behaviour("").pipeline_split is None
    assert find_behaviour("nanotron").pipeline_split == "balanced"
    card = card_of(tmp_path, monkeypatch, "wrong-one", "  pipeline_split: odd\n")
    assert find_behaviour(card.framework).pipeline_split is None
    with pytest.raises(UserError, match=r"wrong-one.framework.yaml.*pipeline_split"):
        load_framework(card.framework)


def test_products_are_slower_the_fewer_values_and_the_shorter_sums_they_have():
    rows = np.array([1024.0, 4096.0, 16384.0])
    whole, halved = slow_gemm(rows, 4096, np.full(3, 4096.0)), slow_gemm(rows, 4096, np.full(3, 2048.0))
    assert np.all(np.diff(whole) < 0)
    assert np.all(halved > whole)
    assert slow_gemm(np.array([1e6]), 65536, np.array([65536.0])) == pytest.approx(1, abs=0.01)


def test_a_separate_activation_function_keeps_one_tensor_more_and_a_compiled_loss_fewer_logits(tmp_path, monkeypatch):
    def parts(pointwise: str, **config: object) -> tuple[float, float]:
        card = card_of(tmp_path, monkeypatch, f"one-{pointwise}", f"  pointwise: {pointwise}\n")
        space = make_space([{"tp": 1, "dp": 8, "pp": 1, "micro_batch_size": 1, **config}])
        made = memory_parts(card, read_layout(card, space), read_machine(card))
        return float(made.held[0] + made.kept[0]), float(made.logits[0])

    (eager, logits), (fused, same), (_, compiled) = (parts(kind) for kind in ("fused_norms", "fused", "compiled"))
    # wl2: 32 layers, 1024 tokens, 14336 wide, 2 bytes
    assert eager - fused == pytest.approx(32 * 1024 * 14336 * 2 / 2**30)
    assert parts("eager")[0] - eager == pytest.approx(32 * 1024 * 4096 * 16 / 2**30), "norms keep 8 bytes each"
    assert parts("eager", compile=True)[0] == pytest.approx(fused)
    assert logits == same == pytest.approx(3 * compiled)


def test_tensor_parallel_ranks_and_shards_of_weights_need_buffers_that_tokens_and_layers_fill():
    card = load_card("wl2")

    def working(**config: object) -> float:
        space = make_space([{"tp": 1, "dp": 8, "pp": 1, "micro_batch_size": 1, "zero_stage": 1, **config}])
        return float(memory_parts(card, read_layout(card, space), read_machine(card)).working[0])

    assert working() == 0
    assert working(tp=8, dp=1) == pytest.approx(1024 * 4096 * 8 * 7 / 8 / 2**30)
    assert working(zero_stage=3) == pytest.approx(8 * 8.03e9 / 32 / 2**30, rel=0.01)
    full = working(activation_checkpointing="full")
    assert full > 0
    assert working(activation_checkpointing="offload") == full


def test_selective_recomputation_drops_and_repeats_what_the_framework_says(tmp_path, monkeypatch):
    def columns(behaviour: str) -> tuple[list[float], list[float]]:
        card = card_of(tmp_path, monkeypatch, f"one{len(behaviour)}", behaviour)
        kinds = ("none", "selective", "full")
        rows = [{"tp": 1, "dp": 8, "micro_batch_size": 1, "activation_checkpointing": kind} for kind in kinds]
        layout = read_layout(card, make_space(rows))
        return layout.recompute.tolist(), layout.repeated.round(9).tolist()

    assert columns("  pipeline_split: even\n") == ([0, 0.4, 1], [0, 0.1, 1])
    assert columns("  selective: [0.6, 0.5]\n") == ([0, 0.6, 1], [0, 0.5, 1])
    card_of(tmp_path, monkeypatch, "wrong", "  selective: [0.6, 1.5]\n")
    with pytest.raises(UserError, match="selective"):
        load_framework("wrong")
