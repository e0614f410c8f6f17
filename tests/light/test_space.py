"""The search space: enumeration and explanation agree, and each rule rejects exactly what it should."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cclsearch.card.load import load_card
from cclsearch.card.model import Card, KnobDeclaration
from cclsearch.core.content import list_frameworks
from cclsearch.core.errors import UserError
from cclsearch.core.values import Config
from cclsearch.plugins import TASKS
from cclsearch.space.build import build_space, explain_config, require_known_knobs, resolve_knobs
from cclsearch.space.degree_rules import fit_degrees
from cclsearch.space.framework import Framework, load_framework
from cclsearch.space.framework_knob import FrameworkKnob
from cclsearch.space.numbers import list_divisors
from cclsearch.space.parse import parse_assignments, parse_knob
from cclsearch.space.rule import RULES, RuleKind
from cclsearch.space.table import Space

SHIPPED = [f"wl{i}" for i in range(1, 8)] + ["tiny", "tiny-moe", "tiny-jax"]


def change_card(card: Card, **changes: Any) -> Card:
    """The card with some fields replaced, also those of its architecture or hardware."""
    hardware = {k: v for k, v in changes.items() if k in type(card.hardware).model_fields}
    arch = {k: v for k, v in changes.items() if k in type(card.arch).model_fields}
    work = {k: v for k, v in changes.items() if k in card.work}
    own = {k: v for k, v in changes.items() if k not in hardware and k not in arch and k not in work}
    return card.model_copy(
        update={
            "hardware": card.hardware.model_copy(update=hardware),
            "model": card.arch.model_copy(update=arch),
            "work": Config({**card.work, **work}),
            **own,
        }
    )


def rejecting(card: Card, framework: Framework, config: dict[str, Any], *knobs: KnobDeclaration) -> set[str]:
    """Names of the rules that reject a configuration."""
    return {verdict.rule for verdict in explain_config(card, framework, config, knobs) if verdict.ok is False}


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_workload_has_a_space_with_the_required_knobs(name):
    card = load_card(name)
    space = build_space(card, load_framework(card.framework))
    assert len(space) >= 20
    for knob in ("tp", "dp", "micro_batch_size", "activation_checkpointing"):
        assert space.has(knob)
    assert space.has("ep") == (card.arch.moe is not None)
    assert len({tuple(row) for row in space.codes_NK.tolist()}) == len(space)


def test_the_configuration_of_the_paper_is_in_the_space_of_wl7():
    card = load_card("wl7")
    space = build_space(card, load_framework(card.framework))
    layout = {"tp": 4, "dp": 8, "pp": 8, "ep": 32, "micro_batch_size": 1, "virtual_pipeline": 1}
    assert space.row({**layout, "activation_checkpointing": "full", "zero_stage": 3}) is not None


@pytest.mark.parametrize("name", [name for name in SHIPPED if load_card(name).framework == "torchtitan"])
def test_the_expert_mesh_of_torchtitan_is_whole_for_every_configuration(name):
    card = load_card(name)
    space = build_space(card, load_framework("torchtitan"))
    tp, dp = space.column("tp").astype(int), space.column("dp").astype(int)
    ep = space.column("ep").astype(int) if space.has("ep") else 1
    shard = np.where(space.column("zero_stage").astype(int) == 0, 1, dp)
    efsdp = shard * tp // ep  # torchtitan 0.3.0, distributed/parallel_dims.py
    assert (efsdp >= 1).all()
    assert (efsdp * ep * (dp // shard) == dp * tp).all()


@st.composite
def cards(draw: st.DrawFn) -> Card:
    """Small cards of any shape: the enumeration of all raw combinations stays below a few hundred."""
    is_moe = draw(st.booleans())
    base = load_card("tiny-moe" if is_moe else "tiny")
    heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    changes: dict[str, Any] = {
        "num_heads": heads,
        "num_kv_heads": draw(st.sampled_from(list_divisors(heads))),
        "num_layers": draw(st.integers(1, 6)),
        "hidden_size": draw(st.sampled_from([6, 8, 12])),
        "global_batch_size": draw(st.sampled_from([1, 2, 4, 6])),
        "seq_len": draw(st.sampled_from([6, 8])),
        "num_accelerators": draw(st.sampled_from([1, 2, 3, 4, 6])),
        "accelerators_per_node": draw(st.sampled_from([1, 2, 4])),
    }
    if is_moe and base.arch.moe is not None:
        changes["moe"] = base.arch.moe.model_copy(update={"num_experts": draw(st.sampled_from([2, 3, 4]))})
    changes["torus"] = draw(st.sampled_from([None, (changes["num_accelerators"],)]))
    return change_card(base, **changes)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(card=cards(), name=st.sampled_from(["cpu", "jax-cpu", "megatron", "torchtitan", "maxtext"]))
def test_enumeration_and_explanation_agree_on_every_raw_combination(card, name):
    framework = load_framework(name)
    knobs = resolve_knobs(card, framework)
    try:
        space: Space | None = build_space(card, framework)
    except UserError:
        space = None
    legal = {tuple(row) for row in space.codes_NK.tolist()} if space else set()
    raw = list(itertools.product(*(range(len(knob.choices)) for knob in knobs)))
    assert space is None or space.num_raw == len(raw)
    for codes in raw[:: max(1, len(raw) // 150)]:
        config = {knob.name: knob.choices[code] for knob, code in zip(knobs, codes, strict=True)}
        verdicts = explain_config(card, framework, config)
        assert all(verdict.ok is not None for verdict in verdicts)
        assert all(verdict.ok for verdict in verdicts) == (codes in legal), (config, verdicts)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(card=cards(), data=st.data())
def test_a_configuration_survives_a_round_trip_through_text(card, data):
    try:
        space = build_space(card, load_framework("torchtitan"), use_fewer=True)
    except UserError:
        return
    config = space.config(data.draw(st.integers(0, len(space) - 1)))
    for text in (str(config), ",".join(str(config).split()), ", ".join(reversed(str(config).split()))):
        parsed = parse_assignments(text, space.knobs)
        assert parsed == config
        assert {k: type(v) for k, v in parsed.items()} == {k: type(v) for k, v in config.items()}
    assert space.row(parsed) is not None


def test_every_configuration_keeps_the_work_and_the_accelerators():
    for name in SHIPPED:
        card = load_card(name)
        framework = load_framework(card.framework)
        space = build_space(card, framework)
        used, batch = space.num_accelerators_N, space.column("dp") * space.column("micro_batch_size")
        assert (card.number("global_batch_size") % batch == 0).all()
        assert (used <= card.hardware.num_accelerators).all()
        assert framework.use_fewer or (used == card.hardware.num_accelerators).all()
        tp, kv = space.column("tp"), card.arch.num_kv_heads
        assert ((kv % tp == 0) | (tp % kv == 0)).all()


WL2 = {"tp": 2, "dp": 4, "pp": 2, "micro_batch_size": 1, "activation_checkpointing": "none"}
MEGATRON = {**WL2, "sequence_parallel": False, "zero_stage": 0, "virtual_pipeline": 1}
TITAN = {**WL2, "zero_stage": 0, "virtual_pipeline": 1}
NANOTRON = {"tp": 2, "dp": 4, "pp": 2, "micro_batch_size": 1, "zero_stage": 0}
HF = {"dp": 4, "micro_batch_size": 1, "activation_checkpointing": "none", "compile": False, "optimizer": "adamw_torch",
      "zero_stage": 0}  # fmt: skip
VLLM = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 32, "prefix_caching": False,
        "async_scheduling": False}  # fmt: skip
SERVER = {"tp": 4, "pp": 1, "dp": 1, "max_num_seqs": 64, "max_num_batched_tokens": 2048, "prefix_caching": True,
          "memory_fraction": 0.9, "kv_cache_dtype": "auto"}  # fmt: skip
SGLANG = {"tp": 4, "pp": 1, "dp": 1, "ep": 1, "attention_dp": 1, "max_num_seqs": 64, "prefill_chunk": 2048,
          "prefix_caching": True, "kv_cache_dtype": "auto"}  # fmt: skip
APART = {"devices": 8, "prefill_workers": 2, "prefill_gpus_per_worker": 2, "decode_workers": 2,
         "decode_gpus_per_worker": 2, "max_num_seqs": 64, "max_num_batched_tokens": 2048, "memory_fraction": 0.9,
         "kv_cache_dtype": "auto"}  # fmt: skip
APART_SGLANG = {"prefill_chunk": 2048, **{name: APART[name] for name in list(APART)[:6]}, "kv_cache_dtype": "auto"}
TRTLLM = {"tp": 4, "pp": 1, "max_num_seqs": 64, "max_num_batched_tokens": 2048, "prefix_caching": True,
          "kv_cache_dtype": "auto"}  # fmt: skip
PHI = {"num_heads": 40, "num_kv_heads": 10}
FP8 = {"precision": "fp8", "weight_block": 128, "intermediate_size": 8192}
GROUPS = {"precision": "awq", "weight_block": 128, "intermediate_size": 78 * 128}
EIGHT = {"num_accelerators": 8, "accelerators_per_node": 8}
CHUNKS = KnobDeclaration(name="chunked_prefill", choices=(True, False))
BLOCKS = KnobDeclaration(name="block_size", choices=(1, 32))
PREFILL = KnobDeclaration(name="prefill_chunk", choices=(2048, 2064))
TOKENS = KnobDeclaration(name="max_num_batched_tokens", choices=(512, 2048))
SEQUENCES = KnobDeclaration(name="max_num_seqs", choices=(8, 128))
VIRTUAL = KnobDeclaration(name="virtual_pipeline", choices=(1, 2, 3, 4))
CONTEXT = KnobDeclaration(name="cp", choices=(1, 2, 4))
REPLICAS = KnobDeclaration(name="dp_replicate", choices=(1, 2, 3, 4))
OVERLAP = KnobDeclaration(name="overlap_grad_reduce", choices=(False, True))
JAX = {"tp": 1, "dp": 4, "ep": 1, "micro_batch_size": 1, "activation_checkpointing": "none"}


CPU = {"tp": 2, "dp": 2, "pp": 1, "ep": 1, "micro_batch_size": 1, "activation_checkpointing": "none", "zero_stage": 0}
ODD_EXPERTS = {"cpu": {"num_shared_experts": 1, "expert_intermediate_size": 126},
               "jax-cpu": {"expert_intermediate_size": 126}}  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "workload", "framework", "changes", "good", "bad", "knobs"),
    [
        ("num_accelerators", "wl2", "megatron", {}, MEGATRON, {"dp": 2}, ()),
        ("tp_divides_heads", "wl2", "torchtitan", {"num_heads": 6, "num_kv_heads": 1}, {**TITAN, "tp": 1, "dp": 8},
         {"tp": 4, "dp": 2}, ()),
        ("tp_divides_kv_heads", "wl2", "torchtitan", {"num_kv_heads": 2}, TITAN, {"tp": 4, "dp": 2}, ()),
        ("pp_at_most_layers", "wl2", "torchtitan", {"num_layers": 2}, TITAN, {"pp": 4, "dp": 2}, ()),
        ("accumulation_whole", "wl2", "torchtitan", {}, {**TITAN, "dp": 8, "pp": 1}, {"micro_batch_size": 8}, ()),
        ("tp_divides_widths", "wl2", "megatron", {"intermediate_size": 14338}, MEGATRON, {"tp": 4, "dp": 2}, ()),
        ("tp_divides_widths", "wl2", "megatron", {"hidden_size": 4098}, MEGATRON, {"tp": 4, "dp": 2}, ()),
        ("tp_divides_widths", "tiny-moe", "cpu", {}, CPU, {"tp": 4, "dp": 1}, ()),
        ("tp_divides_widths", "tiny-jax", "jax-cpu", {}, {**JAX, "tp": 2, "dp": 2}, {"tp": 4, "dp": 1}, ()),
        ("moe_tp_divides_tokens", "tiny-moe", "cpu", {"seq_len": 127}, {**CPU, "micro_batch_size": 2},
         {"micro_batch_size": 1}, ()),
        ("micro_batches_cover_stages", "wl2", "nanotron", {}, {**NANOTRON, "pp": 4, "dp": 2, "micro_batch_size": 4},
         {"pp": 8, "dp": 1, "micro_batch_size": 8}, ()),
        ("zero_stage_needs_dp", "wl2", "torchtitan", {}, {**TITAN, "zero_stage": 3}, {"dp": 1, "pp": 8}, ()),
        ("zero_needs_accelerators", "tiny", "hf-trainer", {}, HF, {"zero_stage": 2}, ()),
        ("step_holds_every_sequence", "tiny-serving", "vllm-cpu", {}, VLLM, {"max_num_seqs": 128}, (SEQUENCES,)),
        ("step_holds_a_request", "wl1-inference", "vllm", {}, {**SERVER, "chunked_prefill": False},
         {"max_num_batched_tokens": 512}, (CHUNKS, TOKENS)),
        ("workers_add_up", "wl1-inference", "vllm-disagg", EIGHT, APART, {"decode_workers": 3}, ()),
        ("blocks_divide_prefill_chunk", "wl3-inference", "sglang", {}, {**SGLANG, "block_size": 32},
         {"prefill_chunk": 2064}, (BLOCKS, PREFILL)),
        ("workers_fit_machines", "wl1-inference", "vllm-disagg", {**EIGHT, "accelerators_per_node": 2}, APART,
         {"prefill_workers": 1, "prefill_gpus_per_worker": 4}, ()),
        ("workers_divide_heads", "wl1-inference", "vllm-disagg", {**EIGHT, "num_heads": 6, "num_kv_heads": 2}, APART,
         {"prefill_workers": 1, "prefill_gpus_per_worker": 4}, ()),
        ("attention_ranks_divide_heads", "wl1-inference", "vllm", PHI, {**SERVER, "tp": 2, "dp": 2},
         {"tp": 4, "dp": 1}, ()),
        ("attention_ranks_divide_heads", "wl3-inference", "sglang", PHI, {**SGLANG, "attention_dp": 2},
         {"attention_dp": 1}, ()),
        ("shards_hold_whole_blocks", "wl3-inference", "vllm", FP8, {**SERVER, "expert_parallel": True},
         {"expert_parallel": False}, ()),
        ("shards_hold_whole_blocks", "wl3-inference", "vllm", FP8,
         {**SERVER, "tp": 1, "dp": 4, "expert_parallel": True}, {"expert_parallel": False}, ()),
        ("shards_hold_whole_blocks", "wl3-inference", "sglang", FP8, {**SGLANG, "ep": 2}, {"ep": 1}, ()),
        ("shards_hold_whole_blocks", "wl1-inference", "vllm", GROUPS, {**SERVER, "tp": 2, "dp": 2},
         {"tp": 4, "dp": 1}, ()),
        ("workers_hold_whole_blocks", "wl1-inference", "sglang-disagg", {**GROUPS, **EIGHT},
         APART_SGLANG, {"prefill_workers": 1, "prefill_gpus_per_worker": 4}, ()),
        ("dcp_shares_kv_heads", "wl1-inference", "vllm", {"num_heads": 32, "num_kv_heads": 2}, {**SERVER, "dcp": 2},
         {"dcp": 4}, (KnobDeclaration(name="dcp", choices=(1, 2, 4)),)),
        ("expert_parallel_needs_experts", "wl1-inference", "vllm", {}, {**SERVER, "expert_parallel": False},
         {"expert_parallel": True}, (KnobDeclaration(name="expert_parallel", choices=(False, True)),)),
        ("step_holds_a_request", "wl1-inference", "trtllm", {}, {**TRTLLM, "chunked_prefill": True},
         {"chunked_prefill": False, "max_num_batched_tokens": 512}, (TOKENS,)),
        ("inside_tensor_parallelism", "wl3-inference", "sglang", {}, {**SGLANG, "ep": 2},
         {"tp": 2, "pp": 2, "ep": 4}, ()),
        ("inside_tensor_parallelism", "wl3-inference", "sglang", {}, {**SGLANG, "attention_dp": 4},
         {"tp": 2, "pp": 2}, ()),
        ("tp_divides_sequence", "wl2", "torchtitan", {"seq_len": 1022}, TITAN, {"tp": 4, "dp": 2}, ()),
        ("tied_embeddings_need_one_stage", "wl1", "torchtitan", {}, {**TITAN, "dp": 8, "pp": 1},
         {"dp": 4, "pp": 2}, ()),
        ("shards_hold_every_expert", "wl6", "torchtitan", {"num_accelerators": 16, "seq_len": 1024},
         {**TITAN, "ep": 4, "zero_stage": 2},
         {"zero_stage": 0}, ()),
        ("sequence_parallel_needs_tp", "wl2", "megatron", {}, {**MEGATRON, "sequence_parallel": True},
         {"tp": 1, "dp": 8}, ()),
        ("sequence_parallel_divides_sequence", "wl2", "megatron", {"seq_len": 1023}, MEGATRON,
         {"sequence_parallel": True}, ()),
        ("moe_tp_needs_sequence_parallel", "wl3", "megatron", {}, {**MEGATRON, "ep": 2, "sequence_parallel": True},
         {"sequence_parallel": False}, ()),
        ("ep_divides_experts", "wl3", "megatron", {},
         {**MEGATRON, "ep": 2, "sequence_parallel": True}, {"ep": 8}, ()),
        ("ep_inside_stage", "wl3", "megatron", {}, {**MEGATRON, "ep": 8, "sequence_parallel": True}, {"ep": 16}, ()),
        ("ep_divides_dp", "tiny-jax", "jax-cpu", {}, {**JAX, "ep": 4}, {"dp": 2, "tp": 2}, ()),
        ("virtual_pipeline_needs_pp", "wl2", "megatron", {}, {**MEGATRON, "virtual_pipeline": 2},
         {"pp": 1, "dp": 8}, (VIRTUAL,)),
        ("virtual_pipeline_at_most_layers", "wl2", "megatron", {"num_layers": 5}, {**MEGATRON, "virtual_pipeline": 3},
         {"virtual_pipeline": 4}, (VIRTUAL,)),
        ("virtual_pipeline_micro_batches", "wl2", "megatron", {"global_batch_size": 20},
         {**MEGATRON, "virtual_pipeline": 1}, {"virtual_pipeline": 2}, (VIRTUAL,)),
        ("cp_divides_sequence", "wl2", "megatron", {"seq_len": 1028}, {**MEGATRON, "dp": 2, "cp": 2},
         {"dp": 1, "cp": 4}, (CONTEXT,)),
        ("cp_divides_sequence", "wl2", "torchtitan", {"seq_len": 1024 + 256},
         {**TITAN, "dp": 4, "tp": 1, "cp": 2, "zero_stage": 2}, {"dp": 2, "cp": 4}, (CONTEXT,)),
        ("cp_shards_weights", "wl2", "torchtitan", {}, {**TITAN, "dp": 2, "cp": 2, "zero_stage": 3},
         {"zero_stage": 0}, (CONTEXT,)),
        ("overlap_grad_reduce_needs_dp", "wl2", "megatron", {}, {**MEGATRON, "overlap_grad_reduce": True},
         {"dp": 1, "pp": 8}, (OVERLAP,)),
        ("dp_replicate_divides_dp", "wl2", "torchtitan", {}, {**TITAN, "zero_stage": 3, "dp_replicate": 2},
         {"dp_replicate": 3}, (REPLICAS,)),
        ("dp_replicate_below_dp", "wl2", "torchtitan", {}, {**TITAN, "zero_stage": 3, "dp_replicate": 2},
         {"dp_replicate": 4}, (REPLICAS,)),
        ("replicas_of_shards", "wl2", "torchtitan", {}, {**TITAN, "zero_stage": 3, "dp_replicate": 2},
         {"zero_stage": 0}, (REPLICAS,)),
        ("degrees_on_torus", "wl2", "maxtext", {"torus": (4, 4)},
         {"tp": 4, "dp": 4, "micro_batch_size": 1, "activation_checkpointing": "none", "zero_stage": 0},
         {"tp": 8, "dp": 2}, ()),
        ("host_order_needs_links", "tiny", "cpu", {},
         {"tp": 1, "dp": 4, "pp": 1, "micro_batch_size": 1, "activation_checkpointing": "none", "zero_stage": 0,
          "host_order": "given"},
         {"host_order": "links"}, (KnobDeclaration(name="host_order", choices=("given", "links")),)),
        ("device_order_needs_links", "wl2", "megatron", {}, {**MEGATRON, "device_order": "given"},
         {"device_order": "links"}, (KnobDeclaration(name="device_order", choices=("given", "links")),)),
        ("stage_layers_fit", "wl2", "megatron", {}, {**MEGATRON, "stage_layers": "20-12"},
         {"stage_layers": "20-13"}, (KnobDeclaration(name="stage_layers", choices=("20-12", "20-13")),)),
    ],
)  # fmt: skip
def test_each_rule_rejects_its_case_and_explains_it(rule, workload, framework, changes, good, bad, knobs):
    card, frame = change_card(load_card(workload), **changes), load_framework(framework)
    if rule == "tp_divides_widths" and card.arch.moe:
        card = change_card(card, moe=card.arch.moe.model_copy(update=ODD_EXPERTS[framework]))
    if rule == "shards_hold_whole_blocks" and card.arch.moe:
        card = change_card(card, moe=card.arch.moe.model_copy(update={"expert_intermediate_size": 768}))
    if rule == "ep_divides_experts" and card.arch.moe:
        card = change_card(card, moe=card.arch.moe.model_copy(update={"num_experts": 12}))
        knobs = (KnobDeclaration(name="ep", choices=(1, 2, 8)),)
    assert rejecting(card, frame, good, *knobs) == set()
    also = {"tp_divides_kv_heads"} if rule == "tp_divides_heads" else set()
    assert rejecting(card, frame, {**good, **bad}, *knobs) == {rule} | also
    verdict = next(v for v in explain_config(card, frame, {**good, **bad}, knobs) if v.rule == rule)
    assert verdict.summary
    assert any(str(value).lower() in verdict.detail.lower() for value in {**good, **bad}.values())
    space = build_space(card, frame, knobs)
    assert space.row(Config({knob.name: {**good}[knob.name] for knob in space.knobs})) is not None
    row = space.row({**good, **bad})
    assert row is None or (verdict.kind is RuleKind.SAME and space.config(row) != {**good, **bad})


def test_values_that_change_the_numbers_need_the_cards_leave():
    card, frame = load_card("wl1-inference"), load_framework("vllm")
    assert set(build_space(card, frame).column("kv_cache_dtype")) == {"auto"}
    allowed = change_card(card, alternative_precisions=("kv_cache_dtype=fp8",))
    assert set(build_space(allowed, frame).column("kv_cache_dtype")) == {"auto", "fp8"}
    assert allowed.precisions == ("bf16",)
    with pytest.raises(UserError, match=r"kv_cache_dtype.* cannot be fp8.*alternative_precisions=.kv_cache_dtype=fp8"):
        build_space(card, frame, (KnobDeclaration(name="kv_cache_dtype", choices=("auto", "fp8")),))


def test_zero_may_be_limited_under_a_pipeline():
    frame = load_framework("torchtitan").model_copy(update={"rules": ({"rule": "zero_limited_by_pp", "most": 2},)})
    card = load_card("wl2")
    assert rejecting(card, frame, {**TITAN, "zero_stage": 2}) == set()
    assert rejecting(card, frame, {**TITAN, "zero_stage": 3}) == {"zero_limited_by_pp"}
    assert rejecting(card, frame, {**TITAN, "zero_stage": 3, "pp": 1, "dp": 8}) == set()


@pytest.mark.parametrize("name", ["trtllm", "vllm-tpu"])
def test_one_machine_bounds_a_server_that_may_leave_accelerators_idle(name):
    card = change_card(load_card("wl1-inference"), num_accelerators=8)
    space = build_space(card, load_framework(name), use_fewer=True)
    assert "one_machine" in space.rules
    assert set(space.num_accelerators_N) == {1, 2, 4}, "of 8 accelerators, 4 are on a machine"


def test_a_server_over_several_machines_fills_them_alike():
    """vLLM spreads replicas over machines, SGLang only parts of one replica: whole stages, or parts of a stage."""
    card = change_card(load_card("wl1-inference"), num_accelerators=16)
    degrees = [KnobDeclaration(name=name, choices=(1, 2, 3, 4, 8, 16)) for name in ("tp", "pp", "dp")]
    found = {}
    for name in ("vllm", "sglang"):
        space = build_space(card, load_framework(name), extra_knobs=degrees, use_fewer=True)
        assert "nodes_alike" in space.rules
        columns = zip(*(space.column(degree).tolist() for degree in ("tp", "pp", "dp")), strict=True)
        found[name] = {(tp, pp, dp) for tp, pp, dp in columns}
    assert {(8, 1, 2), (4, 1, 4), (2, 1, 8), (8, 2, 1), (4, 1, 3), (2, 3, 1), (1, 3, 2)} <= found["vllm"]
    assert not {(2, 1, 3), (1, 2, 3)} & found["vllm"], "3 accelerators on each of 2 machines for replicas of 2"
    assert not {dp for tp, pp, dp in found["sglang"] if tp * pp * dp > 4} - {1}
    assert {(16, 1, 1), (8, 2, 1), (4, 4, 1), (2, 8, 1)} <= found["sglang"]
    assert (2, 3, 1) not in found["sglang"], "3 stages on 2 machines"


def test_every_rule_is_used_by_the_tests_above():
    source = Path(__file__).read_text(encoding="utf-8")
    tested = (*RULES, "zero_stage_needs_dp", "sequence_parallel_needs_tp", "virtual_pipeline_needs_pp")
    assert [rule for rule in tested if rule not in source and rule not in ("implies", "divides")] == []
    assert set(TASKS.get("training").rules) <= set(RULES)


def test_degrees_take_whole_axes_of_the_torus():
    assert fit_degrees((2, 4)) == {(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 4, 1), (4, 2, 1), (2, 1, 4), (4, 1, 2),
                                   (1, 2, 4), (1, 4, 2)}  # fmt: skip
    card = change_card(load_card("wl2"), torus=(4, 4))
    space = build_space(card, load_framework("maxtext"))
    assert set(space.column("tp").tolist()) == {1, 4}, "16 heads a chip group would leave half a KV head"


def test_fewer_accelerators_only_if_requested():
    card, frame = load_card("wl2"), load_framework("megatron")
    exact, fewer = build_space(card, frame), build_space(card, frame, use_fewer=True)
    assert set(exact.num_accelerators_N.tolist()) == {16}
    assert set(fewer.num_accelerators_N.tolist()) == {1, 2, 4, 8, 16}
    whole = change_card(card, num_layers=27)
    assert set(build_space(whole, frame).num_accelerators_N.tolist()) == {16}
    assert {3, 6, 9, 12} < set(build_space(whole, frame, use_fewer=True).num_accelerators_N.tolist())
    assert set(build_space(load_card("tiny"), load_framework("cpu")).num_accelerators_N.tolist()) == {1, 2, 4}


def test_extra_knobs_limit_and_add():
    card, frame = load_card("wl2"), load_framework("megatron")
    limited = build_space(card, frame, [parse_knob("tp=2,4"), parse_knob("nccl_algo=Ring,Tree")])
    assert set(limited.column("tp").tolist()) == {2, 4}
    assert set(limited.column("nccl_algo").tolist()) == {"Ring", "Tree"}
    declared = card.model_copy(update={"knobs": (parse_knob("compile=true,false"),)})
    assert len(build_space(declared, frame)) == 2 * len(build_space(card, frame))


def test_an_unknown_knob_is_rejected_with_the_list():
    card, frame = load_card("wl2"), load_framework("megatron")
    with pytest.raises(UserError, match=r"no knob 'warp'; known: .*nccl_algo.*tp"):
        require_known_knobs([parse_knob("warp=1,2")], card, frame)
    require_known_knobs([parse_knob("nccl_algo=Ring")], card, frame)
    with pytest.raises(UserError, match="no knob 'warp'"):
        explain_config(card, frame, {"warp": 1})


@pytest.mark.parametrize("text", ["tp=a,b", "tp=0,1", "tp=true", "tp=1.5", "dp=-4", "micro_batch_size=9999999"])
def test_choices_that_rules_cannot_compute_with_are_rejected(text):
    with pytest.raises(UserError, match="takes whole numbers"):
        build_space(load_card("wl2"), load_framework("megatron"), [parse_knob(text)])


def test_an_empty_space_of_a_shipped_workload_names_the_rules():
    card = change_card(load_card("wl2"), num_layers=7, num_heads=7, num_kv_heads=7, global_batch_size=1)
    with pytest.raises(UserError) as caught:
        build_space(card, load_framework("megatron"))
    assert "accumulation_whole" in str(caught.value) or "num_accelerators" in str(caught.value)
    with pytest.raises(UserError, match="this rule rejects every combination: num_accelerators"):
        build_space(
            load_card("wl2"), load_framework("megatron"), [parse_knob("tp=1"), parse_knob("dp=1"), parse_knob("pp=2")]
        )


def test_only_training_is_searched_and_huge_spaces_are_rejected():
    card, frame = load_card("wl2"), load_framework("megatron")
    with pytest.raises(
        UserError, match="wl2 cannot run under megatron: its task is inference, and the run script does"
    ):
        build_space(card.model_copy(update={"task": "inference"}), frame)
    wide = [KnobDeclaration(name=f"k{i}", choices=tuple(range(1000))) for i in range(3)]
    with pytest.raises(UserError, match="too large to enumerate"):
        build_space(card, frame, wide)


def test_values_of_the_wrong_type_are_explained():
    card, frame = load_card("wl2"), load_framework("megatron")
    for value in ("many", 0, -3, 10**40, 2.5, float("nan"), True):
        assert rejecting(card, frame, {**MEGATRON, "tp": value}) >= {"choices"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "written like tp=2,dp=4"),
        ("tp", "written like tp=2,dp=4"),
        ("tp=", "written like tp=2,dp=4"),
        ("tp=2,tp=4", "'tp' is given twice"),
        ("warp=9,tp=2", "no knob 'warp'"),
    ],
)
def test_a_wrong_configuration_text_is_one_clear_error(text, message):
    space = build_space(load_card("wl2"), load_framework("megatron"))
    with pytest.raises(UserError, match=message):
        parse_assignments(text, space.knobs)


def test_short_names_booleans_and_blanks_are_parsed():
    space = build_space(load_card("wl2"), load_framework("megatron"))
    expected = {**MEGATRON, "sequence_parallel": True, "zero_stage": 1, "activation_checkpointing": "full"}
    del expected["virtual_pipeline"]
    for text in ("tp=2,dp=4,pp=2,mbs=1,ac=full,sp=true,zero=1", "tp=2 dp=4  pp=2;mbs=1, ac='full' sp=True zero=1"):
        assert parse_assignments(text, space.knobs) == expected
    typed = parse_assignments("tp=2,dp=4,pp=2,mbs=1,ac=yes,sp=1,zero=1", space.knobs)
    assert typed == expected
    assert typed["sequence_parallel"] is True


def test_values_may_contain_blanks_and_commas():
    knob = KnobDeclaration(name="kernel", choices=("flash attention, RMS", "torch"))
    space = build_space(load_card("wl2"), load_framework("torchtitan"), [knob])
    config = {**TITAN, "kernel": "flash attention, RMS"}
    assert parse_assignments("kernel=flash attention, RMS, " + str(Config(TITAN)), space.knobs) == config


TINY_KNOBS = resolve_knobs(load_card("tiny"), load_framework("cpu"))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=st.text(max_size=60))
def test_any_text_is_a_configuration_or_one_error(text):
    try:
        given_values = parse_assignments(text, TINY_KNOBS)
    except UserError:
        return
    assert set(given_values) <= {knob.name for knob in TINY_KNOBS}


def test_knob_choices_are_computed_from_the_card():
    card = load_card("wl7")
    knob = FrameworkKnob.model_validate({"name": "ep", "choices": {"divisors_of": "experts", "most": 20}})
    assert knob.resolve(card).choices == (1, 2, 4, 5, 8, 10, 16, 20)
    assert list_divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]
    assert [list_divisors(number) for number in (1, 2, 6, 12)] == [[1], [1, 2], [1, 2, 3, 6], [1, 2, 3, 4, 6, 12]]
    assert knob.resolve(load_card("wl2")).choices == (1,), "a model without experts"
    assert "megatron" in list_frameworks()
