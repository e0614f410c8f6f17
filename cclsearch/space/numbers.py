"""Numbers of a card that choices and rules of a framework file may name: `divisors_of: layers`, `number: heads`."""

from __future__ import annotations

import math
from collections.abc import Callable

from cclsearch.card.model import Card
from cclsearch.card.task import TASKS
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
    known = {*NUMBERS, *(number for task in TASKS.names() for number in TASKS.get(task).numbers)}
    if name not in known:
        raise ValueError(f"there is no number {name!r}; known: {', '.join(sorted(known))}")
    return name


def list_divisors(number: int) -> list[int]:
    """Every divisor of a number, in ascending order."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]
