"""Numbers and features of a card that a framework file may name: `divisors_of: layers`, `cannot: {experts: ...}`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from cclsearch.card.model import Card, ModelArch
from cclsearch.card.task import TASKS, list_declared
from cclsearch.core.errors import UserError

NUMBERS: dict[str, Callable[[Card], int]] = {
    "accelerators": lambda card: card.hardware.num_accelerators,
    "accelerators_per_node": lambda card: min(card.hardware.accelerators_per_node, card.hardware.num_accelerators),
    "experts": lambda card: card.arch.moe.num_experts if card.arch.moe else 1,
    "layers": lambda card: card.arch.num_layers,
    "heads": lambda card: card.arch.num_heads,
}
"""Numbers of every card; a task has further ones (`Task.numbers`)."""


def find_number(card: Card, name: str) -> int:
    """The card's number of that name; raises UserError that lists the known ones."""
    numbers: dict[str, Callable[[Card], int]] = {**NUMBERS, **TASKS.get(card.task).numbers}
    if name not in numbers:
        raise UserError(f"{card.name}: a {card.task} workload has no number {name!r}; known: {', '.join(numbers)}")
    return numbers[name](card)


def check_number(name: str) -> str:
    """The name; raises ValueError that lists the known ones if no task has a number of that name."""
    known = NUMBERS.keys() | list_declared({name} - NUMBERS.keys(), lambda task: task.numbers)
    if name not in known:
        raise ValueError(f"there is no number {name!r}; known: {', '.join(sorted(known))}")
    return name


def list_divisors(number: int) -> list[int]:
    """Every divisor of a number, in ascending order."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]


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
