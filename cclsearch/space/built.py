"""The model that a framework trains: the card's, without the features that its run script does not build."""

from __future__ import annotations

from collections.abc import Collection

from cclsearch.card.arch import flops_per_token
from cclsearch.card.model import FEATURES, Card, ModelArch, Phase
from cclsearch.core.errors import UserError

# Norms read and write their input forward and backward, in five passes of 2 bytes; the sum of a bias' gradient is one.
_PASSES, _BYTES = 5.0, 2.0
_RATE_SHARE = 0.5
"""Share of the peak rate that matrix products reach, relative to which a feature's time is stated."""


def fit_model(card: Card, framework: str, builds: Collection[str]) -> Card:
    """Return the card with the model that trials train, and one note on what differs from the card's.

    `builds` names features, or one with its value (`router_balance=bias`) or for some models (`sliding_window:dense`).
    Engines that serve load the model's files.
    """
    if card.model is None or card.task != Phase.TRAINING:
        return card
    arch, left_out = card.model, []
    if arch.lora_rank and "lora_rank" not in builds:
        raise UserError(f"{card.name}: {framework} cannot train adapters (lora_rank): use --framework hf-trainer")
    for name in arch.features:
        value = getattr(arch, name)
        ways = {name, f"{name}={value}", f"{name}:{'experts' if arch.moe else 'dense'}"}
        if ways.intersection(builds) or value == "none":
            continue
        what = f"no {FEATURES[name]}{f' ({value})' if isinstance(value, str) else ''}"
        left_out.append(f"{what}, {_describe_cost(card, arch, arch.without(name))}")
        arch = arch.without(name)
    if not left_out:
        return card
    note = f"differs from the card's model under {framework}: {'; '.join(left_out)}"
    return card.model_copy(update={"model": arch, "notes": (*card.notes, note)})


def _describe_cost(card: Card, arch: ModelArch, without: ModelArch) -> str:
    """Say how much longer or shorter a step is, by the closed form of a token's work."""
    more = _seconds(card, without) / _seconds(card, arch) - 1
    if "router_balance" in {*arch.features} - {*without.features}:
        return "effect unknown"
    how_much = f"about {abs(more):.0%} {'more' if more > 0 else 'less'} time"
    return f"{how_much if abs(more) >= 0.005 else 'under 1% of the time'}, predicted"


def _seconds(card: Card, arch: ModelArch) -> float:
    """Seconds of a token's matrix products, and of its norms and biases."""
    chip, seq_len = card.hardware.chip, card.number("seq_len")
    heads = (arch.num_heads + arch.num_kv_heads) * arch.head_dim
    norms = (4 if arch.post_norms else 2) * arch.hidden_size + heads * arch.qk_norm
    biased = (heads + arch.num_kv_heads * arch.head_dim) * (arch.qkv_bias or arch.linear_bias)
    biased += (2 * arch.hidden_size + arch.intermediate_size) * arch.linear_bias
    moved = _BYTES * arch.num_layers * (_PASSES * norms + biased) / (chip.memory_gb_per_s * 1e9)
    return flops_per_token(arch, seq_len) / (_RATE_SHARE * chip.rate_for(card.precision)[1]) + moved
