"""The shape of the card's model in transformers' `config.json`: a Llama, or a Mixtral if it has experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common import IllegalConfig


def describe_shape(arch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `config.json` that the card's model decides; IllegalConfig if it is neither of them."""
    moe = arch.get("moe")
    if not arch["gated_mlp"]:
        raise IllegalConfig("gated_mlp must be true: Llama and Mixtral are gated (SwiGLU)")
    if moe and (moe["num_shared_experts"] or moe["num_dense_layers"]):
        raise IllegalConfig("num_shared_experts and num_dense_layers must be 0: Mixtral has neither")
    kind: dict[str, Any] = {"model_type": "llama", "intermediate_size": arch["intermediate_size"]}
    if moe:
        kind = {
            "model_type": "mixtral",
            "intermediate_size": moe["expert_intermediate_size"],
            "num_local_experts": moe["num_experts"],
            "num_experts_per_tok": moe["top_k"],
        }
    return {
        **kind,
        "vocab_size": arch["vocab_size"],
        "hidden_size": arch["hidden_size"],
        "num_hidden_layers": arch["num_layers"],
        "num_attention_heads": arch["num_heads"],
        "num_key_value_heads": arch["num_kv_heads"],
        "head_dim": arch["head_dim"],
        "tie_word_embeddings": arch["tied_embeddings"],
    }
