"""What follows for a card that does not state it: its shape, phase, lengths and framework version."""

from __future__ import annotations

from typing import Any

import pytest
from cards import make_card

from cclsearch.card.arch import count_parameters
from cclsearch.card.catalogue import find_by_address, find_by_name, find_like, load_models
from cclsearch.card.load import CardReport, inspect_mapping
from cclsearch.card.model import Card, make_model

LLAMA_8B = {"num_layers": 32, "hidden_size": 4096, "num_kv_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}


def inspect(data: dict[str, Any]) -> CardReport:
    return inspect_mapping(data, "c", "c.yaml")


def load(data: dict[str, Any]) -> Card:
    report = inspect(data)
    assert report.card is not None, report.blocking
    return report.card


def source_of(card: Card, field: str) -> str:
    return next(each.source for each in card.inferred if each.field == field)


@pytest.mark.parametrize(
    ("find", "text", "name"),
    [
        (find_by_name, "LLAMA_3.1_8B", "llama-3.1-8b"),
        (find_by_name, "llama 3.1 8b", "llama-3.1-8b"),
        (find_by_name, "Meta-Llama-3.1-8B-Instruct-FP8", "llama-3.1-8b"),
        (find_by_name, "qwen-3-4b", "qwen3-4b"),
        (find_by_name, "qwen2.5-72b-instruct-awq", "qwen2.5-72b"),
        (find_by_name, "qwen25-72b", "qwen2.5-72b"),
        (find_by_name, "DeepSeek-V2-Lite-Chat", "deepseek-v2-lite"),
        (find_by_name, "opt-1.3b", "opt-1.3b"),
        (find_by_name, "opt-13b", "opt-13b"),
        (find_by_address, "https://huggingface.co/meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        (find_by_address, "https://huggingface.co/mistralai/Mixtral-8x7B-v0.1/tree/main", "mixtral-8x7b"),
        (find_by_address, "huggingface.co/deepseek-ai/DeepSeek-V2-Lite/", "deepseek-v2-lite"),
        (find_by_address, "Qwen/Qwen3-4B", "qwen3-4b"),
        (find_by_address, "https://hf.co/someone/Qwen3-4B-FP8", "qwen3-4b"),
    ],
)
def test_spellings_of_a_name_and_addresses_of_the_hub_find_their_model(find, text, name):
    assert find(text).name == name


@pytest.mark.parametrize("family", ["", "llama", "gpt-5", "my-own-8b", "llama-3.1-9b", "-", "llama-3.18b-x"])
def test_other_names_find_none(family):
    assert find_by_name(family) is None


def test_no_name_of_the_catalogue_finds_another_model():
    wrong = [
        (alias, model.name)
        for model in load_models()
        for alias in (model.name, *model.aliases)
        if (found := find_by_name(alias)) is None or found.name != model.name
    ]
    assert len(load_models()) == 199
    assert wrong == []


def test_the_shapes_of_the_catalogue_have_the_published_parameters():
    off = {
        model.name: round(count_parameters(make_model(model.fields)) / model.num_params - 1, 3)
        for model in load_models()
        if model.num_params
    }
    plain = {name: share for name, share in off.items() if abs(share) <= 0.03}
    assert len(off) - len(plain) <= 9, {name: share for name, share in off.items() if name not in plain}
    assert off["deepseek-v2-lite"] < 0.01
    assert off["llama-3.1-8b"] == off["mixtral-8x7b"] == 0


def test_the_address_decides_over_the_name():
    card = load(make_card("llama", hf_url="https://huggingface.co/meta-llama/Llama-3.1-8B"))
    assert {name: getattr(card.arch, name) for name in LLAMA_8B} == LLAMA_8B
    assert "llama-3.1-8b" in source_of(card, "num_layers")
    assert "by hf_url" in source_of(card, "num_layers")
    other = load(make_card("llama-2-7b", hf_url="https://huggingface.co/meta-llama/Llama-3.1-8B"))
    assert other.arch.num_kv_heads == 8
    assert any("llama-2-7b by model_family" in note and "not used" in note for note in other.notes)


def test_the_cards_own_fields_take_precedence_and_a_difference_is_said():
    card = load(make_card("llama-3.1-8b", {"num_layers": 16}))
    assert (card.arch.num_layers, card.arch.hidden_size) == (16, 4096)
    assert "num_layers" not in {each.field for each in card.inferred}
    assert any("is 16, and 32 in llama-3.1-8b" in note for note in card.notes)


def test_a_model_whose_widths_contradict_the_card_is_not_used():
    report = inspect(make_card("llama-3.1-8b", {"num_layers": 32, "num_heads": 32, "head_dim": 160}))
    assert report.card is None
    assert any("head_dim 128 (not 160): not used" in note for note in report.notes)
    assert {problem.field.rsplit(".")[-1] for problem in report.blocking} >= {"intermediate_size", "vocab_size"}


def test_a_name_that_is_not_in_the_catalogue_is_resolved_by_shape_only():
    shape = {"num_params": 15_700_000_000, "num_layers": 27, "num_heads": 16, "head_dim": 128}
    data = make_card("deepseek-v3-16b", shape)
    data["workload"]["model"]["moe"] = True
    card = load(data)
    assert (card.arch.hidden_size, card.arch.moe.num_experts, card.arch.moe.num_dense_layers) == (2048, 64, 1)
    assert "by shape: num_layers 27" in source_of(card, "hidden_size")
    report = inspect(make_card("deepseek-v3-16b"))
    assert report.card is None
    assert any("'deepseek-v3-16b' is not in the catalogue of models" in note for note in report.notes)


def test_models_of_the_same_layers_are_told_apart_by_their_count():
    """Aya-23 8B has the layers and heads of Llama 3 8B and 0.03 % fewer parameters, in other matrices."""
    shape = {"num_params": 8_030_261_248, "num_layers": 32, "num_heads": 32, "head_dim": 128}
    assert load(make_card("unnamed", shape)).arch.vocab_size == 128256
    assert inspect(make_card("unnamed", shape | {"num_params": 8_029_000_000})).card is None


def test_a_part_of_a_name_needs_the_shape_unless_it_names_one_size():
    assert inspect(make_card("mixtral")).card is None
    stated = {"num_layers": 56, "num_heads": 48}
    data = make_card("mixtral", stated)
    data["workload"]["model"]["moe"] = True
    assert load(data).arch.hidden_size == 6144
    assert load(make_card("deepseek-llama-8b")).arch.hidden_size == 4096
    assert inspect(make_card("qwen-7b-x")).card is None
    assert find_like("the") == []


def test_a_size_in_the_name_that_contradicts_the_address_is_followed():
    """A public card says `deepseek-v2-16b` with the address of DeepSeek-V2, which has 236B."""
    data = make_card("deepseek-v2-16b", hf_url="https://huggingface.co/deepseek-ai/DeepSeek-V2")
    data["workload"]["model"]["moe"] = True
    card = load(data)
    assert card.arch.num_layers == 27
    assert any("is deepseek-v2 by hf_url, which has 235741434880 parameters" in note for note in card.notes)
    report = inspect(make_card("other-16b", hf_url="https://huggingface.co/deepseek-ai/DeepSeek-V2"))
    assert report.card is None


@pytest.mark.parametrize(("family", "stated", "used"), [("deepseek-v2-lite", False, 64), ("qwen3-32b", True, None)])
def test_a_wrong_moe_switch_without_experts_is_corrected(family, stated, used):
    data = make_card(family)
    data["workload"]["model"]["moe"] = stated
    card = load(data)
    assert (card.arch.moe.num_experts if card.arch.moe else None) == used
    assert any(f"moe is {str(stated).lower()}, but {family}" in note for note in card.notes)


def test_a_model_of_the_stated_kind_is_preferred_to_the_address_of_another_kind():
    """A public card of DeepSeek-V2-Lite says `moe: true` and has the address of Qwen3-32B, a dense model."""
    data = make_card("deepseek-v2-lite", hf_url="https://huggingface.co/Qwen/Qwen3-32B")
    data["workload"]["model"]["moe"] = True
    card = load(data)
    assert card.arch.hidden_size == 2048
    assert any("is qwen3-32b by hf_url: not used, but deepseek-v2-lite by model_family" in note for note in card.notes)


def test_batches_of_an_inference_card_that_are_no_number_are_said():
    data = make_card()
    data["workload"]["model"]["phase"] = "inference"
    data["workload"]["data"]["batch_size"] = [1, 2, 4]
    card = load(data)
    assert "global_batch_size" not in card.work
    assert any("batch_size must be a whole number above 0, not [1, 2, 4]: not used" in note for note in card.notes)
    data["workload"]["model"]["phase"] = "training"
    assert inspect(data).card is None


def test_a_count_of_parameters_that_contradicts_the_widths_is_said():
    stated = {**LLAMA_8B, "num_heads": 32, "head_dim": 128}
    assert not any("num_params" in note for note in load(make_card("x", {**stated, "num_params": "8B"})).notes)
    notes = load(make_card("x", {**stated, "num_params": "70B"})).notes
    assert any("is 70000000000, but the widths have 8030261248 parameters (-89%)" in note for note in notes)


def test_memory_and_torus_are_inferred_values_with_a_source():
    data = make_card()
    data["workload"]["hardware"]["xpu_spec"] = {"model": "tpu_v6e", "total_count": 8, "count_per_node": 8}
    card = load(data)
    assert {each.field: each.value for each in card.inferred}["memory_gb"] == 32
    assert source_of(card, "torus") == "the only tpu-v6e slice of 8 chips"
    assert any(remark.startswith("inferred: torus 2x4; source: ") for remark in card.remarks)
    data["workload"]["hardware"]["xpu_spec"]["total_count"] = 6
    odd = load(data)
    assert odd.hardware.torus is None
    assert any("torus is missing" in note for note in odd.notes)


def test_a_hybrid_model_is_not_described_as_a_plain_transformer():
    report = inspect(make_card("nemotron-h-56b"))
    assert report.card is None
    assert any("has layers of another kind" in note for note in report.notes)


def test_widths_follow_from_each_other_if_no_model_is_known():
    arch = {"num_params_embedding": 100 * 1024, "num_layers": 4, "num_heads": 8, "head_dim": 128}
    card = load(make_card("mine", arch | {"num_kv_heads": 8, "intermediate_size": 4096}))
    assert (card.arch.hidden_size, card.arch.vocab_size) == (1024, 100)
    assert source_of(card, "hidden_size") == "num_heads x head_dim"
    missing = inspect(make_card("mine", arch)).blocking
    assert {problem.field.rsplit(".")[-1] for problem in missing} == {"num_kv_heads", "intermediate_size"}


@pytest.mark.parametrize(
    ("granularity", "framework", "phase"),
    [("model_fwd_bwd_pass", "x", "training"), ("model_fwd", "x", "inference"), ("?", "vLLM-0.19.0", "inference")],
)
def test_a_missing_phase_follows_from_granularity_or_framework(granularity, framework, phase):
    data = make_card()
    data["workload"]["model"] |= {"phase": None, "granularity": granularity}
    data["Model-executor"]["framework"]["name"] = framework
    card = load(data)
    assert (card.phase, card.task) == (phase, phase)
    assert "granularity" in source_of(card, "phase") or "framework" in source_of(card, "phase")
    data["workload"]["model"]["granularity"] = None
    data["Model-executor"]["framework"]["name"] = "x"
    assert any(problem.field.endswith("phase") for problem in inspect(data).blocking)


def test_versions_plans_and_the_rest_of_the_template_are_kept():
    data = make_card(hf_url="https://huggingface.co/meta-llama/Llama-3.1-8B", contributor="N/A")
    data["Model-executor"]["communication_library"]["env"]["MY_API_KEY"] = "sk-ant-api03-" + "a1B2" * 12
    card = load(data)
    assert (card.framework, card.framework_version) == ("torchtitan", "0.1.0")
    plan = {"dp": 2, "tp": 4, "pp": 1, "cp": 1, "dp_replicate": 1, "dp_shard": 2, "micro_batch_size": 2}
    assert card.configuration == plan
    kept = card.template
    assert kept["hf_url"] == "https://huggingface.co/meta-llama/Llama-3.1-8B"
    assert kept["workload.hardware.driver_version"] == "cuda_12.4"
    assert kept["Model-executor.protocol_selection.1"] == "p2p"
    assert kept["Model-executor.communication_library.version"] == "2.18.5"
    assert "workload.model.precision" not in kept
    assert "a1B2" not in str(dict(kept))
    assert Card.model_validate_json(card.model_dump_json()) == card


def test_lengths_of_requests_are_work_of_an_inference_card():
    data = make_card()
    data["workload"]["model"]["phase"] = "inference"
    data["workload"]["data"] = {"batch_size": 128, "input_len": 1024, "output_len": 128}
    card = load(data)
    assert card.work == {"batch_size": 128, "seq_len": 1152, "input_len": 1024, "output_len": 128}
    assert source_of(card, "seq_len") == "input_len + output_len"


@pytest.mark.parametrize(("given", "read"), [("8B", 8_000_000_000), ("15.7 billion", 15_700_000_000), (1e9, 10**9)])
def test_counts_of_parameters_may_have_a_unit(given, read):
    stated = {**LLAMA_8B, "num_heads": 32, "head_dim": 128, "num_params": given}
    assert load(make_card("x", stated)).arch.num_params == read
