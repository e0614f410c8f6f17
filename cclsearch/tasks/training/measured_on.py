"""Where the training times were measured that `prior.json` is fitted to; elsewhere a prediction is a guess."""

from __future__ import annotations

from cclsearch.card.model import Card
from cclsearch.core.text import one_line
from cclsearch.space.framework import find_framework

# Of the recorded tables and of the published rows of benchmarks/experts.md.
ACCELERATORS = frozenset(
    {"v100", "a100-40", "a100-80", "h100", "h200", "b200", "b300", "gb200", "gb300", "mi300x", "mi325x", "mi355x"}
    | {"tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7"}
)
FRAMEWORKS = frozenset({"megatron", "nanotron", "torchtitan", "maxtext", "deepspeed", "hf-trainer"})
MAX_ACCELERATORS = 8192


def describe_unlike(card: Card) -> str:
    """Return how the card differs from everything that was measured; empty if it does not."""
    framework = find_framework(card.framework)
    name = one_line(card.framework, 40) if framework is None else framework.name
    size = card.hardware.num_accelerators
    unlike = [
        f"on {card.hardware.accelerator}" * (card.hardware.accelerator not in ACCELERATORS),
        f"with {name or 'this framework'}" * (name not in FRAMEWORKS),
        f"on {size:,} accelerators" * (size > MAX_ACCELERATORS),
    ]
    return " or ".join(filter(None, unlike))
