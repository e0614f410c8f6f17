"""Read the state of fine-tuning from knobs, by the field's names: adapters, quantised weights, fused losses.

Spaces name these knobs differently (`method=lora`, `peft: true`, `base_quantisation=nf4`, `load_in_4bit`, `liger`), so
a word may be in the name of the knob or in its choices.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from cclsearch.core.values import Value
from cclsearch.space.table import Knob, Space
from cclsearch.stats.columns import read_choices

ADAPTERS = re.compile(r"(?<![a-z])(q?lora|dora|peft|adapters?)(?![a-z])")
"""LoRA (Hu et al. 2021), QLoRA (Dettmers et al. 2023), DoRA, and the library PEFT."""
BASE_WEIGHTS = re.compile(r"quanti[sz]|load_in|bnb|bitsandbytes|qlora")
FOUR_BITS = re.compile(r"nf4|fp4|int4|gptq|awq|qlora|(?<![0-9])4[ _-]?bit|(?<![0-9])4$")
EIGHT_BITS = re.compile(r"int8|fp8|(?<![0-9])8[ _-]?bit|(?<![0-9])8$")
FUSED_LOSS = re.compile(
    r"liger|cut_?cross_?entropy|fused_?linear_?(ce|cross_?entropy)|chunked_?(loss|ce|cross_?entropy)"
)
# Dettmers et al. 2023, without double quantisation.
FOUR_BIT_BYTES, EIGHT_BIT_BYTES = 0.5 + 0.0625, 1.0 + 0.0625
"""Bytes per weight, with a scale of 4 bytes for each 64."""
_OFF = {"", "0", "none", "no", "off", "false", "full"}


def find_frozen(space: Space) -> NDArray[np.float64]:
    """(N,) 1 where only adapters are trained."""
    return _largest(space, partial(_names, ADAPTERS))


def find_base_bytes(space: Space) -> NDArray[np.float64]:
    """(N,) bytes per weight where the base weights are quantised, else 0."""
    return _largest(space, _read_base_bytes)


def find_fused_loss(space: Space) -> NDArray[np.float64]:
    """(N,) 1 where no kernel writes the logits of a whole micro-batch."""
    return _largest(space, partial(_names, FUSED_LOSS))


def _names(words: re.Pattern[str], knob: Knob, choice: Value) -> bool:
    """Whether a choice names one of the words, or switches on a knob that is named so."""
    said = str(choice).lower()
    return words.search(said) is not None or (said not in _OFF and words.search(knob.name.lower()) is not None)


def _read_base_bytes(knob: Knob, choice: Value) -> float:
    said, name = str(choice).lower(), knob.name.lower()
    about = f"{name} {said}"
    if said in _OFF or not BASE_WEIGHTS.search(about):
        return 0.0
    if FOUR_BITS.search(said) or FOUR_BITS.search(name):
        return FOUR_BIT_BYTES
    return EIGHT_BIT_BYTES if EIGHT_BITS.search(said) or EIGHT_BITS.search(name) else 0.0


def _largest(space: Space, read: Callable[[Knob, Value], float]) -> NDArray[np.float64]:
    """(N,) the largest `read` of a configuration's values, 0 without a knob."""
    found = np.zeros(len(space))
    for knob in space.knobs:
        found = np.maximum(found, read_choices(space, knob, partial(read, knob)))
    return found
