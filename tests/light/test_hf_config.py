"""Cards from a Hugging Face config.json: families, their defaults, and files that are not one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from cclsearch.card.hf_config import make_hf_card, read_hf_model
from cclsearch.card.load import card_from_mapping, inspect_mapping
from cclsearch.cli import main
from cclsearch.core.errors import UserError

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
MIXTRAL = LLAMA | {"model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
}
DEEPSEEK_V2_LITE = LLAMA | {
    "model_type": "deepseek_v2",
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 102400,
}
QWEN2 = LLAMA | {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
QWEN3_5 = LLAMA | {  # the shape of Qwen3.5-27B
    "model_type": "qwen3_5_text",
    "head_dim": 256,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
    "num_attention_heads": 24,
    "num_hidden_layers": 64,
    "num_key_value_heads": 4,
    "vocab_size": 248320,
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257}


def write(folder: Path, config: object) -> Path:
    path = folder / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config), "utf-8")
    return path


PUBLISHED = (
    (LLAMA, 8_030_261_248),
    (MIXTRAL, 46_702_792_704),
    (QWEN3_MOE, 30_532_122_624),
    (DEEPSEEK_V2_LITE, 15_706_484_224),
)


@pytest.mark.parametrize(("config", "published"), PUBLISHED, ids=[c["model_type"] for c, _ in PUBLISHED])
def test_a_config_has_the_parameters_that_its_publisher_states(tmp_path, config, published):
    arch = make_hf_card(write(tmp_path, config))["workload"]["model"]["model_arch"]
    assert arch["num_params"] == pytest.approx(published, rel=0.006)


def test_a_card_of_a_folder_loads_once_hardware_and_data_are_filled_in(tmp_path):
    write(tmp_path, MIXTRAL | {"_name_or_path": "mistralai/Mixtral-8x7B-v0.1"})
    data = make_hf_card(tmp_path)
    assert data["workload"]["model"]["model_family"] == "Mixtral-8x7B-v0.1"
    empty = {problem.field.rsplit(".", 1)[-1] for problem in inspect_mapping(data, "c", "c").blocking}
    assert empty == {"batch_size", "seq_len", "model", "total_count", "count_per_node"}
    data["workload"]["data"] = {"batch_size": 8, "seq_len": 1024}
    data["workload"]["hardware"]["xpu_spec"] = {"model": "h100", "memory_gb": 80, "total_count": 8, "count_per_node": 8}
    card = card_from_mapping(data, "c")
    assert (card.arch.moe.num_experts, card.arch.moe.top_k, card.arch.moe.expert_intermediate_size) == (8, 2, 14336)
    assert [inferred.field for inferred in card.inferred] == ["scale_up_gbps"], "all but the links"


def test_defaults_of_families_without_those_settings(tmp_path):
    arch = make_hf_card(write(tmp_path, GPT2))["workload"]["model"]["model_arch"]
    assert (arch["intermediate_size"], arch["num_kv_heads"], arch["head_dim"]) == (3072, 12, 64)
    assert (arch["tied_embeddings"], arch["gated_mlp"]) == (True, False)
    nested = {"model_type": "llama4", "text_config": LLAMA | {"model_type": "llama4_text", "intermediate_size": 8192}}
    nested["text_config"] |= {"num_local_experts": 16, "num_experts_per_tok": 1, "intermediate_size_mlp": 16384}
    arch = make_hf_card(write(tmp_path, nested))["workload"]["model"]["model_arch"]
    assert (arch["intermediate_size"], arch["expert_intermediate_size"], arch["num_shared_experts"]) == (16384, 8192, 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "must be an object of settings, not list"),
        ("[" * 100_000, "is not JSON"),
        (LLAMA | {"model_type": "mamba2"}, "model_type 'mamba2' has layers of state-space models"),
        (LLAMA | {"model_type": "lama"}, "model_type 'lama' is not known (did you mean 'llama'?)"),
        (QWEN3_5, "`model_family: qwen3.5-27b` takes its shape from the catalogue of models"),
        (QWEN3_5 | {"model_type": "qwen3"}, "48 of 64 layers are linear_attention: a card has no such field"),
        (LLAMA | {"num_hybrid_things": 3}, "num_hybrid_things 3 may change the layers, and a card has no field for it"),
        (LLAMA | {"num_hidden_layers": 10**6}, "has 1000000 layers, more than 10000"),
        (QWEN2 | {"layer_types": ["full_attention"]}, "layer_types has 1 values for 32 layers"),
        (QWEN3_MOE | {"mlp_layer_types": ["dense"] * 9}, "mlp_layer_types has 9 values for 48 layers"),
        (LLAMA | {"intermediate_size": [1, 2]}, "intermediate_size must be a whole number, not [1, 2]"),
        (LLAMA | {"num_attention_heads": 96, "head_dim": None}, "has no head_dim"),
        (DEEPSEEK_V2_LITE | {"qk_nope_head_dim": None}, "has kv_lora_rank, but not qk_nope_head_dim"),
        (QWEN3_MOE | {"shared_expert_intermediate_size": 1000}, "a shared expert of width 1000, no multiple of"),
        (LLAMA | {"model_type": None}, "model_type 'None' is not known"),
        (LLAMA | {"hidden_size": None}, "has no hidden_size"),
        (LLAMA | {"hidden_size": "wide"}, "hidden_size must be a whole number, not 'wide'"),
        (LLAMA | {"num_hidden_layers": 10**30}, "num_hidden_layers must be a whole number"),
        (MIXTRAL | {"num_local_experts": None}, "has no num_local_experts"),
    ],
)
def test_what_is_not_a_known_config_is_one_line(tmp_path, config, message):
    with pytest.raises(UserError) as caught:
        make_hf_card(write(tmp_path, config))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (QWEN3_MOE, {"qk_norm": True, "router_balance": "aux_loss", "qkv_bias": None, "num_dense_layers": None}),
        (QWEN3_MOE | {"mlp_only_layers": [0, 5, 7]}, {"num_dense_layers": 3}),
        (QWEN3_MOE | {"decoder_sparse_step": 2}, {"num_dense_layers": 24}),
        (DEEPSEEK_V2_LITE | {"num_nextn_predict_layers": 1}, {"kv_lora_rank": 512, "head_dim": 192, "mtp_layers": 1}),
        (DEEPSEEK_V2_LITE | {"moe_layer_freq": [0] * 2 + [1] * 25}, {"num_dense_layers": 2}),
        (QWEN2, {"qkv_bias": True, "sliding_window": None}),
        (
            QWEN2 | {"use_sliding_window": True, "max_window_layers": 20},
            {"sliding_window": 4096, "windowed_layers": 12},
        ),
        (
            QWEN2 | {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 3 + ["full_attention"] * 29},
            {"windowed_layers": 3},
        ),
        (LLAMA | {"model_type": "gemma3_text", "sliding_window": 512}, {"windowed_layers": 27, "post_norms": True}),
        (
            LLAMA | {"model_type": "exaone4", "sliding_window_pattern": "LLLG", "sliding_window": 9},
            {"windowed_layers": 24},
        ),
        (LLAMA | {"attention_bias": True}, {"qkv_bias": True, "qk_norm": None}),
    ],
)
def test_settings_that_change_the_layers_are_read(tmp_path, config, expected):
    arch = read_hf_model(write(tmp_path, config))["model_arch"]
    assert {name: arch.get(name) for name in expected} == expected


def test_the_command_prints_or_writes_the_card(tmp_path, cli):
    write(tmp_path, QWEN3_MOE)
    printed = yaml.safe_load(cli.out(["card", "from-hf", str(tmp_path)]))
    assert printed["workload"]["model"]["model_arch"]["num_experts"] == 128
    out = tmp_path / "mine.yaml"
    assert main(["card", "from-hf", str(tmp_path), "--out", str(out)]) == 0
    assert yaml.safe_load(out.read_text("utf-8")) == printed
    assert "exists already" in cli.err(["card", "from-hf", str(tmp_path), "--out", str(out)])
    assert main(["card", "from-hf", str(tmp_path / "none")]) == 2
    assert main(["space", "--workload", str(out)]) == 2
    assert "states no hardware and no batch_size and no seq_len: give" in cli.out(["card", "check", str(out)])


INT4 = {"weights": {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group"}}
FLOAT8 = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None}}


@pytest.mark.parametrize(
    ("quantization", "precision", "block"),
    [
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "mxfp4", 0),
        ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, "fp8", 128),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}, "awq", 128),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False}, "gptq", 64),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, "nvfp4", 16),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8", 0),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": FLOAT8}}, "fp8", 0),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": FLOAT8, "group_1": INT4}}, "int4", 32),
    ],
)
def test_a_quantized_checkpoint_says_its_precision_and_blocks(tmp_path, quantization, precision, block):
    model = read_hf_model(write(tmp_path, LLAMA | {"quantization_config": quantization}))
    assert (model["precision"], model["weight_block"]) == (precision, block)
    with pytest.raises(UserError, match=r"quantization_config .*tq1_0.* is not known"):
        read_hf_model(write(tmp_path, LLAMA | {"quantization_config": {"quant_method": "tq1_0"}}))


def test_a_published_checkpoint_has_the_blocks_of_its_name():
    def blocks(name: str, precision: str) -> int:
        model = {"phase": "inference", "model_family": name, "precision": precision}
        hardware = {"xpu_spec": {"model": "nvidia_h100", "memory_gb": 80, "total_count": 8, "count_per_node": 8}}
        workload = {"model": model, "data": {"batch_size": 1, "input_len": 8, "output_len": 8}, "hardware": hardware}
        return card_from_mapping({"workload": workload}, "c").weight_block

    assert blocks("Qwen/Qwen3-30B-A3B-FP8", "fp8") == blocks("deepseek-ai/DeepSeek-R1", "fp8") == 128
    assert blocks("Qwen/Qwen3-32B-AWQ", "awq") == 128
    assert blocks("Qwen/Qwen3-32B", "fp8") == blocks("Qwen/Qwen3-30B-A3B-FP8", "bf16") == 0
    assert blocks("openai/gpt-oss-120b", "mxfp4") == 0
