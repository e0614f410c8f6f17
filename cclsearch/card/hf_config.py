"""The model of a workload card from the `config.json` of a Hugging Face model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cclsearch.card.arch import count_parameters
from cclsearch.card.fields import read_number
from cclsearch.card.model import make_model
from cclsearch.core.errors import UserError
from cclsearch.core.job_file import JobFileError, read_job_json
from cclsearch.core.text import one_line

CONFIG_FILE = "config.json"
MAX_BYTES = 4 * 2**20

_DENSE = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "olmo", "olmo2", "olmo3", "granite", "smollm3"),
    *("internlm2", "internlm", "cohere", "glm4", "baichuan", "mimo", "ministral", "hunyuan_v1_dense", "seed_oss"),
    *("exaone4", "helium", "ernie4_5"),
)
_NOT_GATED = ("gpt2", "gpt_neox", "gpt_neo", "gptj", "opt", "phi", "starcoder2", "bloom", "falcon", "apertus", "arcee")
_MOE = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "deepseek", "deepseek_v2", "deepseek_v3", "kimi_k2", "gpt_oss"),
    *("llama4_text", "olmoe", "phimoe", "granitemoe", "glm4_moe", "minimax", "minimax_m2", "ernie4_5_moe"),
    *("flex_olmo", "dots1"),
)
FAMILIES = frozenset((*_DENSE, *_NOT_GATED, "stablelm", *_MOE))
"""Values of `model_type` whose layers the fields of a card describe."""
_NESTED = ("text_config", "language_config", "llm_config")
"""Sections with the language model of a model with vision."""
_NAMES: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "intermediate_size": ("intermediate_size", "ffn_dim", "n_inner"),
    "vocab_size": ("vocab_size",),
}
_EXPERT_NAMES: dict[str, tuple[str, ...]] = {
    "num_experts": ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts"),
    "top_k": ("num_experts_per_tok", "num_experts_per_token", "moe_k"),
    "expert_intermediate_size": ("moe_intermediate_size", "intermediate_size"),
    "num_dense_layers": ("first_k_dense_replace", "moe_layer_start_index"),
}
_TIED_BY_DEFAULT = frozenset(
    ("gemma", "gemma2", "gpt2", "gpt_neo", "opt", "bloom", "falcon", "starcoder2", "cohere", "smollm3")
)


def make_hf_card(path: Path) -> dict[str, Any]:
    """A card with the model of that config.json, or of the folder with it; fields that it does not state are empty."""
    model = read_hf_model(path)
    xpu = dict.fromkeys(("model", "memory_gb", "total_count", "count_per_node"))
    return {
        "version": 1,
        "description": model["model_family"],
        "workload": {
            "model": {"phase": "training", **model},
            "data": dict.fromkeys(("batch_size", "seq_len")),
            "hardware": {"network_topo": {"bandwidth_gbps": None}, "xpu_spec": {"type": "GPU", **xpu}},
        },
        "Model-executor": {"framework": {"name": None}},
    }


def read_hf_model(path: Path) -> dict[str, Any]:
    """The section `workload.model` of a card for a config.json, or for the folder with it.

    Raises UserError that names the file and each missing or unknown field.
    """
    file = path / CONFIG_FILE if path.is_dir() else path
    config = _read_config(file)
    nested: Mapping[str, Any] = next((config[name] for name in _NESTED if isinstance(config.get(name), Mapping)), {})
    config = {**config, **nested}
    family = str(config.get("model_type", "")).strip()
    if family not in FAMILIES:
        raise UserError(
            f"{file}: model_type {one_line(family, 40)!r} is not known; known: {', '.join(sorted(FAMILIES))}."
            " Write the card by hand (docs/your-model.md)"
        )
    arch = _read_shape(config, family, file)
    model = make_model(arch)
    name = str(config.get("_name_or_path") or "") or (file.absolute().parent.name or family)
    dtype = one_line(str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"), 20)
    return {
        "moe": model.moe is not None,
        "model_family": one_line(name.rstrip("/").split("/")[-1], 80),
        "precision": {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(dtype, "bf16"),
        "model_arch": {"num_params": count_parameters(model), **arch},
    }


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = read_job_json(file.resolve(), MAX_BYTES)  # a model's folder may have links to its files
    except OSError as error:
        raise UserError(f"{str(file)!r}: cannot be read: {error.strerror or error}") from None
    except JobFileError as error:
        raise UserError(f"{str(file)!r}: {one_line(str(error), 160)}") from None
    if not isinstance(config, dict):
        raise UserError(f"{str(file)!r}: must be an object of settings, not {type(config).__name__}")
    return config


def _read_shape(config: Mapping[str, Any], family: str, file: Path) -> dict[str, Any]:
    found = {name: _read_count(config, keys, file) for name, keys in _NAMES.items()}
    heads, hidden = found["num_heads"], found["hidden_size"]
    if family == "falcon" and config.get("multi_query") and not config.get("new_decoder_architecture"):
        found["num_kv_heads"] = 1
    found["num_kv_heads"] = found["num_kv_heads"] or heads
    if not found["head_dim"] and heads and hidden:
        found["head_dim"] = hidden // heads
    if config.get("kv_lora_rank"):
        found["head_dim"] = _read_count(config, ("v_head_dim",), file) or found["head_dim"]
        found["num_kv_heads"] = heads
    experts = _read_experts(config, family, file)
    if not found["intermediate_size"]:
        default = 4 * hidden if hidden and family in _NOT_GATED else experts.get("expert_intermediate_size")
        found["intermediate_size"] = default
    if family == "llama4_text" and experts:
        found["intermediate_size"] = _read_count(config, ("intermediate_size_mlp",), file)
    missing = [_NAMES[name][0] for name, value in found.items() if value is None]
    if missing:
        raise UserError(f"{file}: has no {', '.join(missing)}, so it does not say the model's shape")
    tied = config.get("tie_word_embeddings")
    return {
        **found,
        "tied_embeddings": tied if isinstance(tied, bool) else family in _TIED_BY_DEFAULT,
        "gated_mlp": family not in _NOT_GATED,
        **experts,
    }


def _read_experts(config: Mapping[str, Any], family: str, file: Path) -> dict[str, int]:
    """The expert fields; empty for a dense model."""
    if family not in _MOE:
        return {}
    found = {name: _read_count(config, keys, file) for name, keys in _EXPERT_NAMES.items()}
    experts = {name: value for name, value in found.items() if value is not None}
    missing = [_EXPERT_NAMES[name][0] for name in list(_EXPERT_NAMES)[:3] if name not in experts]
    if missing:
        raise UserError(f"{file}: has no {', '.join(missing)}, so it does not describe its experts")
    width = experts["expert_intermediate_size"]
    shared = _read_count(config, ("shared_expert_intermediate_size",), file)
    if family == "llama4_text":
        shared = width
    shared_experts = _read_count(config, ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts"), file)
    experts["num_shared_experts"] = shared // width if shared else shared_experts or 0
    every = _read_count(config, ("interleave_moe_layer_step", "moe_layer_freq", "decoder_sparse_step"), file) or 1
    layers = _read_count(config, _NAMES["num_layers"], file) or 0
    if every > 1:
        experts["num_dense_layers"] = layers - layers // every
    return experts


def _read_count(config: Mapping[str, Any], keys: tuple[str, ...], file: Path) -> int | None:
    """The first of these settings that is given, if it is a whole number of 0 or more; 0 is None."""
    for key in keys:
        value = config.get(key)
        if value is None or value == 0 or isinstance(value, list):
            continue
        number = read_number(value)
        if number is None or not number.is_integer() or number > 1e9:
            raise UserError(f"{file}: {key} must be a whole number, not {one_line(repr(value), 40)}")
        return int(number)
    return None
