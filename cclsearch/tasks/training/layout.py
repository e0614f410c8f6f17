"""Reads the numbers that a prediction needs from a space, one column each, whatever the space calls its knobs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cclsearch.card.model import Card
from cclsearch.space.table import Space

Array = NDArray[np.float64]

_ZERO_KNOBS = ("zero_stage", "fsdp_level", "zero", "data_parallel_sharding")
_SHARDING_SWITCHES = ("fsdp", "distributed_optimizer")
_RECOMPUTE_KNOBS = ("activation_checkpointing", "recompute", "remat", "activation_recompute")
_VIRTUAL_KNOBS = ("virtual_pipeline", "virtual_stages", "vpp", "virtual_pipeline_size", "interleaved_stages")
_FULL = {"full", "true", "yes", "on", "1", "all", "uniform", "block", "every-layer", "every_layer"}
_PARTIAL = {"selective", "partial", "minimal", "attention", "save_dot_except_mlp", "half"}
_FUSED_ATTENTION = ("flash", "sdpa", "xformers", "memory_efficient", "cudnn", "splash")
_FUSED_NORMS = ("rms", "norm")
_FLASH_VERSION = re.compile(r"flash[a-z_ -]*?v?(\d)")
_FLASH_SLOWNESS = {"1": 2.0, "2": 1.0, "3": 0.6}
"""Version -> time relative to version 2: Dao 2023 (2x faster than version 1), Shah et al. 2024 (1.5x to 2x faster)."""
_PLAIN_ATTENTION = ("torch", "eager", "math", "naive", "unfused", "plain", "dot_product", "fused")


@dataclass(frozen=True, eq=False)
class Layout:
    """N configurations as columns, each (N,) float64."""

    tp: Array
    dp: Array
    pp: Array
    ep: Array
    micro_batch: Array
    accumulation: Array
    """Gradient accumulation: micro-batches per optimizer step and data-parallel rank."""
    zero: Array
    """ZeRO stage: 0 replicated, 1 optimizer states sharded, 2 gradients too, 3 weights too."""
    declares_sharding: bool
    """Whether the space has a knob for it; without one, a framework may still shard."""
    recompute: Array
    """Share of each layer's activations that is recomputed, 0 to 1."""
    sequence_parallel: Array
    declares_sequence_parallel: bool
    """Whether the space has a knob for it; without one, a framework may still split the sequence."""
    virtual: Array
    """Model chunks per pipeline rank (1 without interleaving)."""
    plain_attention: Array
    """Whether the attention matrix is written to memory: 1, 0, or 0.1 if unknown."""
    attention_slowness: Array
    """Time of the attention kernels relative to FlashAttention-2."""
    unfused_norms: Array
    """Whether norms run as several eager kernels: 1 if another choice names a fused norm and this one does not."""

    def __len__(self) -> int:
        return len(self.tp)

    def slice(self, block: slice) -> Layout:
        """Return the layout of these rows."""
        columns: dict[str, Any] = {n: value[block] for n, value in vars(self).items() if isinstance(value, np.ndarray)}
        return replace(self, **columns)


def read_layout(card: Card, space: Space) -> Layout:
    """Return the columns of a space; an absent knob has its neutral value (degree 1, no sharding, no recomputation)."""

    def number(name: str, default: float = 1.0) -> Array:
        return np.maximum(_numbers(space, name, default), 1.0)

    dp, micro_batch = number("dp"), number("micro_batch_size")
    accumulation = np.maximum(card.number("global_batch_size") / (dp * micro_batch), 1.0)
    return Layout(
        tp=number("tp"),
        dp=dp,
        pp=number("pp"),
        ep=number("ep"),
        micro_batch=micro_batch,
        accumulation=accumulation,
        zero=_zero(space),
        declares_sharding=any(space.has(name) for name in (*_ZERO_KNOBS, *_SHARDING_SWITCHES)),
        recompute=_recompute(space),
        sequence_parallel=_switch(space, "sequence_parallel"),
        declares_sequence_parallel=space.has("sequence_parallel"),
        virtual=np.maximum(_first_numbers(space, _VIRTUAL_KNOBS, 1.0), 1.0),
        plain_attention=_by_kernel_choice(space, _plain_attention, 0.1),
        attention_slowness=_by_kernel_choice(space, _flash_slowness, 1.0),
        unfused_norms=_unfused_norms(space),
    )


def _numbers(space: Space, name: str, default: float) -> Array:
    """(N,) values of a numeric knob; `default` if it is absent or not a number."""
    for knob_index, knob in enumerate(space.knobs):
        if knob.name == name:
            values = [_as_number(choice, default) for choice in knob.choices]
            return np.array(values, dtype=np.float64)[space.codes_NK[:, knob_index]]
    return np.full(len(space), default)


def _as_number(choice: object, default: float) -> float:
    try:
        return float(choice)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return default


def _first_numbers(space: Space, names: tuple[str, ...], default: float) -> Array:
    for name in names:
        if space.has(name):
            return _numbers(space, name, default)
    return np.full(len(space), default)


def _by_choice(space: Space, name: str, read: dict[str, float], default: float) -> Array:
    for knob_index, knob in enumerate(space.knobs):
        if knob.name == name:
            values = [read.get(str(choice).lower(), default) for choice in knob.choices]
            return np.array(values, dtype=np.float64)[space.codes_NK[:, knob_index]]
    return np.full(len(space), default)


def _switch(space: Space, name: str) -> Array:
    return _by_choice(space, name, dict.fromkeys(_FULL, 1.0), 0.0)


def _zero(space: Space) -> Array:
    for name in _ZERO_KNOBS:
        if space.has(name):
            return np.clip(_numbers(space, name, 0.0), 0.0, 3.0)
    if space.has("fsdp"):
        return 3.0 * _switch(space, "fsdp")
    if space.has("distributed_optimizer"):
        return _switch(space, "distributed_optimizer")
    return np.zeros(len(space))


def _recompute(space: Space) -> Array:
    shares = dict.fromkeys(_FULL, 1.0) | dict.fromkeys(_PARTIAL, 0.3)
    for name in _RECOMPUTE_KNOBS:
        if space.has(name):
            return _by_choice(space, name, shares, 0.0)
    return np.zeros(len(space))


def _kernel_knob(space: Space) -> int | None:
    """Return the index of the knob about kernels or attention; None if there is none."""
    for knob_index, knob in enumerate(space.knobs):
        if "kernel" in knob.name or "attention" in knob.name.replace("activation", ""):
            return knob_index
    return None


def _by_kernel_choice(space: Space, read: Callable[[str], float], default: float) -> Array:
    """(N,) `read` of that knob's choices, in lower case; `default` if there is no such knob."""
    index = _kernel_knob(space)
    if index is None:
        return np.full(len(space), default)
    values = [read(str(choice).lower()) for choice in space.knobs[index].choices]
    return np.array(values, dtype=np.float64)[space.codes_NK[:, index]]


def _unfused_norms(space: Space) -> Array:
    """(N,) 1 for choices that do not name a fused norm, if another choice of the knob does."""
    named = _by_kernel_choice(space, lambda choice: float(any(part in choice for part in _FUSED_NORMS)), 0.0)
    return 1.0 - named if named.any() else named


def _flash_slowness(choice: str) -> float:
    version = _FLASH_VERSION.search(choice)
    return _FLASH_SLOWNESS.get(version[1], 1.0) if version else 1.0


def _plain_attention(choice: str) -> float:
    if any(part in choice for part in _FUSED_ATTENTION):
        return 0.0
    return 1.0 if any(part in choice for part in _PLAIN_ATTENTION) else 0.1
