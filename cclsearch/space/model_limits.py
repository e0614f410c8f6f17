"""Model features that a framework's run script may be unable to build: the closed list that framework files use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cclsearch.card.model import ModelArch

_PLACE = "workload.model.model_arch"


@dataclass(frozen=True)
class ModelLimit:
    """One feature that a model may have."""

    field: str
    """Path of the card's field."""
    read: Callable[[ModelArch], str | None]
    """The field's value if a model has the feature, else None."""


def _read_head_dim(arch: ModelArch) -> str | None:
    width = arch.num_heads * arch.head_dim
    if width == arch.hidden_size:
        return None
    return f"{arch.head_dim}, and num_heads x head_dim is {width}, not the hidden size of {arch.hidden_size}"


def _read_shared_experts(arch: ModelArch) -> str | None:
    return str(arch.moe.num_shared_experts) if arch.moe and arch.moe.num_shared_experts else None


def _read_dense_layers(arch: ModelArch) -> str | None:
    return f"{arch.moe.num_dense_layers} before the experts" if arch.moe and arch.moe.num_dense_layers else None


LIMITS: dict[str, ModelLimit] = {
    "experts": ModelLimit(f"{_PLACE}.num_experts", lambda arch: str(arch.moe.num_experts) if arch.moe else None),
    "shared_experts": ModelLimit(f"{_PLACE}.num_shared_experts", _read_shared_experts),
    "dense_layers": ModelLimit(f"{_PLACE}.num_dense_layers", _read_dense_layers),
    "free_head_dim": ModelLimit(f"{_PLACE}.head_dim", _read_head_dim),
    "grouped_query": ModelLimit(
        f"{_PLACE}.num_kv_heads",
        lambda arch: f"{arch.num_kv_heads} for {arch.num_heads} heads" if arch.num_kv_heads < arch.num_heads else None,
    ),
    "ungated_mlp": ModelLimit(f"{_PLACE}.gated_mlp", lambda arch: None if arch.gated_mlp else "false"),
    "tied_embeddings": ModelLimit(f"{_PLACE}.tied_embeddings", lambda arch: "true" if arch.tied_embeddings else None),
}
"""Name in `cannot:` of a framework file -> the card's field, and how to detect the feature in a model."""
