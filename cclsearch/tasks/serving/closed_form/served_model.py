"""Parts of a served model that its card's shape leaves out: latent and windowed attention, formats of weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cclsearch.card.catalogue import find_by_name
from cclsearch.card.model import Card, ModelArch

UNQUANTIZED = 2.0
"""Bytes of weights that quantized checkpoints leave as they are."""
FOUR_BITS = 0.6
"""Bytes of a weight with 4 bits, and its share of scales, at most."""


@dataclass(frozen=True)
class ServedModel:
    """The model as servers run it."""

    arch: ModelArch
    """The card's shape; latent attention, shared experts and dense layers by the catalogue if the card has none."""
    windowed_layers: int
    """Layers that see the last `window` tokens only."""
    window: int

    def held_tokens(self, tokens: float) -> float:
        """Return the tokens of a sequence whose keys and values a layer keeps, as the mean over layers."""
        share = self.windowed_layers / self.arch.num_layers
        return (1 - share) * tokens + share * min(tokens, self.window)


def find_served(card: Card) -> ServedModel:
    """Return the model of the card, completed by the published model of its name if layers and widths agree."""
    arch = card.arch
    known = find_by_name(card.family) if card.family else None
    stated = {"num_layers": arch.num_layers, "hidden_size": arch.hidden_size, "num_heads": arch.num_heads}
    if known is None or any(known.fields[name] != value for name, value in stated.items()):
        return ServedModel(arch, 0, 0)
    if known.latent and arch.kv_lora_rank is None:
        arch = arch.model_copy(update=dict(known.latent))
    if arch.moe is not None:
        fields = ("num_shared_experts", "num_dense_layers")
        missing = {name: known.fields[name] for name in fields if not getattr(arch.moe, name) and name in known.fields}
        arch = arch.model_copy(update={"moe": arch.moe.model_copy(update=missing)})
    return ServedModel(arch, known.windowed_layers, known.window)


def other_weight_bytes(arch: ModelArch, weight_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the bytes of a weight outside of the experts.

    4-bit checkpoints of mixtures of experts quantize the experts alone (OpenAI 2025, gpt-oss model card, section 2.1;
    NVIDIA's card of DeepSeek-R1-FP4).
    """
    if arch.moe is None:
        return weight_bytes
    return np.where(weight_bytes <= FOUR_BITS, UNQUANTIZED, weight_bytes)
