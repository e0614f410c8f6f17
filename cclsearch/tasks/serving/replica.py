"""The columns of a space that the cost of a serving engine's step depends on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cclsearch.card.model import PRECISION, Card
from cclsearch.core.values import Value
from cclsearch.space.table import Space
from cclsearch.tasks.machine import read_machine
from cclsearch.tasks.serving.engines import find_engine_times
from cclsearch.tasks.serving.served_model import FOUR_BITS

Array = NDArray[np.float64]

BITS = ((4.5, ("nvfp4",)), (4.25, ("fp4", "int4", "awq", "gptq")), (8.0, ("fp8", "int8", "w8a8")))
"""Bits of a weight in formats whose names contain these words, with the scales of their blocks: 8 bits for 16 weights
(NVFP4), 8 for 32 (Open Compute Project 2023, microscaling formats), 32 for 128 (AWQ, GPTQ)."""
DEFAULT_SEQUENCES, DEFAULT_TOKENS = 256, 2048
"""`max_num_seqs` and `max_num_batched_tokens` of a space without them, as vLLM's documentation has them for servers."""


AGGREGATED = {name: name for name in ("tp", "dp", "ep", "dp_attention")}
"""Knobs of servers that prefill and decode."""


@dataclass(frozen=True, eq=False)
class Replica:
    """The columns of a space that a step depends on; (N,) each."""

    tp: Array
    pp: Array
    dp: Array
    ep: Array
    accelerators: Array
    attention_ranks: Array
    """Ranks that share one attention layer: 1 with data-parallel attention."""
    sequences: Array
    """Sequences that a step computes at most."""
    tokens: Array
    """Tokens that a step computes at most."""
    weight_bytes: Array
    """Bytes of a weight."""
    cache_bytes: Array
    """Bytes of a number of the KV cache."""
    flops_per_s: Array
    engine_time: Array
    """Time of everything beside another engine's, 1 if not known."""
    batch_bucket: Array
    """A step computes a multiple of so many sequences: static graphs are compiled for those only."""
    context_bucket: Array
    """It reads keys and values for a multiple of so many tokens of each."""
    reserves: Array
    """1 if each place of a sequence has the memory of a whole request at all times, else 0."""

    def take(self, rows: NDArray[np.int64]) -> Replica:
        """Return the columns of these rows."""
        return Replica(**{name: getattr(self, name)[rows] for name in self.__dataclass_fields__})


def read_replica(card: Card, space: Space, layout: Mapping[str, str] = AGGREGATED) -> Replica:
    """Return the columns of a space; an absent knob has the value of a server that is started without it.

    `layout` has the names of its knobs, so that workers which only prefill or only decode can be read too.
    """

    def column(name: str, read: Callable[[Value], float], default: float) -> Array:
        knob = space.find(name)
        if knob is None:
            return np.full(len(space), default)
        values = np.array([read(choice) for choice in knob.choices], dtype=np.float64)
        return values[space.codes_NK[:, space.knobs.index(knob)]]

    def number(name: str, default: float = 1.0) -> Array:
        return np.maximum(column(name, lambda value: _read_number(value, default), default), 1.0)

    tp, is_split = number(layout["tp"]), column(layout["dp_attention"], _is_on, 0.0) > 0
    chosen = space.find(PRECISION)
    names = {card.precision, *(() if chosen is None else map(str, chosen.choices))}
    rates = {name: _find_rate(card, name) for name in names}
    share = read_machine(card).gemm_share
    precision = column(PRECISION, lambda value: _bytes_of(str(value), 2.0), _bytes_of(card.precision, 2.0))
    quantized = column("quantization", lambda value: _bytes_of(str(value), 0.0), 0.0)
    weight_bytes = np.where(quantized > 0, quantized, precision)
    attention_ranks = np.where(is_split, 1.0, np.maximum(tp / number("attention_dp"), 1.0))
    half = _bytes_of("fp32", 4.0) if card.precision == "fp32" else 2.0
    replicas = number(layout["dp"])
    step = "max_num_batched_tokens" if space.has("max_num_batched_tokens") else "prefill_chunk"
    is_whole = column("expert_parallel", _is_on, 0.0) > 0  # as vLLM has it: over all ranks of all replicas
    return Replica(
        tp=tp,
        pp=number("pp"),
        dp=replicas,
        ep=np.where(is_whole, tp * replicas, number(layout["ep"])),
        accelerators=np.maximum(space.num_accelerators_N.astype(np.float64), 1.0),
        attention_ranks=attention_ranks,
        sequences=number("max_num_seqs", DEFAULT_SEQUENCES) * tp / attention_ranks,  # of each rank with its own
        tokens=number(step, DEFAULT_TOKENS),
        weight_bytes=weight_bytes,
        cache_bytes=column("kv_cache_dtype", lambda value: _bytes_of(str(value), half), half),
        flops_per_s=share * column(PRECISION, lambda value: rates[str(value)], rates[card.precision]),
        engine_time=find_engine_times(card, space),
        batch_bucket=number("batch_bucket"),
        context_bucket=number("context_bucket"),
        reserves=column("reserve_kv_cache", _is_on, 0.0),
    )


def _find_rate(card: Card, precision: str) -> float:
    """Return the FLOP/s of linear layers with weights in that precision.

    A device without units for 4 bits computes with them in 16: kernels widen the weights as they read them (vLLM's
    documentation, quantization: MXFP4 and weights of 4 bits on Hopper).
    """
    widened = _bytes_of(precision, 2.0) <= FOUR_BITS and "fp4" not in card.hardware.chip.peak_flops
    return read_machine(card.model_copy(update={"precision": "bf16" if widened else precision})).flops_per_s


def _read_number(value: Value, default: float) -> float:
    try:
        return float(value)
    except ValueError:
        return default


def _is_on(value: Value) -> float:
    return float(str(value).lower() in ("true", "1", "yes", "on"))


def _bytes_of(name: str, default: float) -> float:
    """Return the bytes of a number in that precision, `default` if the name is none (`auto`, `none`)."""
    lowered = name.lower()
    for bits, words in BITS:
        if any(word in lowered for word in words):
            return bits / 8
    known = {"bf16": 2.0, "bfloat16": 2.0, "fp16": 2.0, "float16": 2.0, "half": 2.0, "fp32": 4.0, "float32": 4.0}
    return known.get(lowered, default)
