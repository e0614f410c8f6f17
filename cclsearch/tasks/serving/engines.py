"""Times of engines relative to vLLM's, from sources that compare them."""

from __future__ import annotations

import re
from collections.abc import Callable

from cclsearch.card.model import FRAMEWORK_KNOBS, Card
from cclsearch.space.table import Space
from cclsearch.stats.columns import read_choices
from cclsearch.stats.kernel import Array

# From LLM-Inference-Bench (benchmarks/serving.md). llama.cpp is left out: how much slower it is depends on the batch.
ENGINE_TIMES = {"tensorrtllm": 0.82, "trtllm": 0.82, "deepspeedmii": 1.25}
"""Engine -> its time for the same work, relative to vLLM's."""


def find_engine_times(card: Card, space: Space) -> Array:
    """(N,) time of each configuration's engine / vLLM's; 1 for an unknown one."""
    return read_engines(card, space, _find_time)


def read_engines(card: Card, space: Space, read: Callable[[str], float]) -> Array:
    """(N,) a number that follows from the name of each configuration's engine."""
    knob = next((space.find(name) for name in FRAMEWORK_KNOBS if space.has(name)), None)
    return read_choices(space, knob, lambda choice: read(str(choice)), read(card.framework))


def name_engines(card: Card, space: Space) -> list[str]:
    """The engine of each configuration: the value of the knob that names it, else the card's framework."""
    knob = next((name for name in FRAMEWORK_KNOBS if space.has(name)), None)
    return [card.framework] * len(space) if knob is None else list(map(str, space.column(knob)))


def _find_time(engine: str) -> float:
    return ENGINE_TIMES.get(re.sub("[^a-z0-9]", "", engine.lower()), 1.0)
