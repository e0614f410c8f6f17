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


def _limit_experts(field: str, after: str = "") -> ModelLimit:
    """The feature of a model whose experts have this number above 0."""

    def read(arch: ModelArch) -> str | None:
        number = getattr(arch.moe, field, 0)
        return f"{number}{after}" if number else None

    return ModelLimit(f"{_PLACE}.{field}", read)


LIMITS: dict[str, ModelLimit] = {
    "experts": _limit_experts("num_experts"),
    "shared_experts": _limit_experts("num_shared_experts"),
    "dense_layers": _limit_experts("num_dense_layers", " before the experts"),
    "free_head_dim": ModelLimit(f"{_PLACE}.head_dim", _read_head_dim),
    "grouped_query": ModelLimit(
        f"{_PLACE}.num_kv_heads",
        lambda arch: f"{arch.num_kv_heads} for {arch.num_heads} heads" if arch.num_kv_heads < arch.num_heads else None,
    ),
    "ungated_mlp": ModelLimit(f"{_PLACE}.gated_mlp", lambda arch: None if arch.gated_mlp else "false"),
    "tied_embeddings": ModelLimit(f"{_PLACE}.tied_embeddings", lambda arch: "true" if arch.tied_embeddings else None),
}
"""Name in `cannot:` of a framework file -> the card's field, and how to detect the feature in a model."""
