"""The card's model in transformers' `config.json`: of the family that has its norms, biases, windows and experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common import IllegalConfig

FAMILIES = {
    "llama": "Llama",
    "mixtral": "Mixtral",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "glm4_moe": "Glm4Moe",
    "deepseek_v3": "DeepseekV3",
}
"""Type of a model -> the beginning of its classes' names (`LlamaForCausalLM`), by which engines choose their own."""


def describe_shape(arch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `config.json` that the card's model decides; IllegalConfig if no family has its layers."""
    if not arch["gated_mlp"]:
        raise IllegalConfig("gated_mlp must be true: the families of this run script are gated (SwiGLU)")
    kind = {"intermediate_size": arch["intermediate_size"], **_describe_family(arch)}
    if window := arch.get("sliding_window"):
        kind |= _describe_windows(arch["num_layers"], arch.get("windowed_layers") or arch["num_layers"], window)
    return {
        **kind,
        "vocab_size": arch["vocab_size"],
        "hidden_size": arch["hidden_size"],
        "num_hidden_layers": arch["num_layers"],
        "num_attention_heads": arch["num_heads"],
        "num_key_value_heads": arch["num_kv_heads"],
        "head_dim": arch.get("qk_rope_head_dim") or arch["head_dim"],
        "tie_word_embeddings": arch["tied_embeddings"],
    }


def _describe_family(arch: Mapping[str, Any]) -> dict[str, Any]:
    moe, norm, bias = arch.get("moe"), bool(arch.get("qk_norm")), bool(arch.get("qkv_bias"))
    latent, windowed = arch.get("kv_lora_rank"), bool(arch.get("sliding_window"))
    if not moe and not latent:
        plain = "mistral" if windowed else "llama"
        return {"model_type": "qwen3", "attention_bias": bias} if norm else {"model_type": "qwen2" if bias else plain}
    if moe and not latent and not (moe["num_shared_experts"] or moe["num_dense_layers"] or bias):
        routed = {"num_experts": moe["num_experts"], "moe_intermediate_size": moe["expert_intermediate_size"]}
        if not norm:
            routed = {"num_local_experts": moe["num_experts"], "intermediate_size": moe["expert_intermediate_size"]}
        balance = {"output_router_logits": True} if arch.get("router_balance") == "aux_loss" else {}
        family = {"model_type": "qwen3_moe", "norm_topk_prob": True} if norm else {"model_type": "mixtral"}
        return {**family, **routed, **balance, "num_experts_per_tok": moe["top_k"]}
    groups = {"n_group": 1, "topk_group": 1, "attention_bias": bias}
    experts = {
        "first_k_dense_replace": moe["num_dense_layers"] if moe else arch["num_layers"],
        "n_routed_experts": moe["num_experts"] if moe else 1,
        "num_experts_per_tok": moe["top_k"] if moe else 1,
        "n_shared_experts": moe["num_shared_experts"] if moe else 0,
        "moe_intermediate_size": moe["expert_intermediate_size"] if moe else 1,
    }
    if not latent:
        return {"model_type": "glm4_moe", "use_qk_norm": norm, **groups, **experts}
    ranks = {name: arch.get(name) for name in ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "v_head_dim")}
    nope = {"qk_nope_head_dim": arch["head_dim"] - arch["qk_rope_head_dim"]}
    return {"model_type": "deepseek_v3", **ranks, **nope, **groups, **experts}


def _describe_windows(layers: int, windowed: int, window: int) -> dict[str, Any]:
    """Return the fields of windows, with the layers that attend to all tokens spread evenly."""
    full = layers - windowed
    kinds = ["full" if (i + 1) * full // layers > i * full // layers else "sliding" for i in range(layers)]
    several = {"layer_types": [f"{kind}_attention" for kind in kinds], "use_sliding_window": True} if full else {}
    return {"sliding_window": window, **several}
