"""The columns of a space that the cost of a serving engine's step depends on, and the model as servers run it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cclsearch.card.arch import flops_per_token
from cclsearch.card.catalogue import find_by_name
from cclsearch.card.model import FRAMEWORK_KNOBS, PRECISION, Card, ModelArch
from cclsearch.core.errors import UserError
from cclsearch.core.values import Value
from cclsearch.core.yaml_file import read_yaml
from cclsearch.space.table import Space
from cclsearch.stats.columns import read_choices
from cclsearch.tasks.machine import read_machine

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

    def held_tokens(self, tokens: Array | float) -> Array:
        """Return the tokens of a sequence whose keys and values a layer keeps, as the mean over layers."""
        share = self.windowed_layers / self.arch.num_layers
        return np.asarray((1 - share) * tokens + share * np.minimum(tokens, self.window))


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


@cache
def load_figures() -> dict[str, Any]:
    """Return what predictions know of servers before any trial."""
    return read_yaml(Path(__file__).with_name("servers.yaml"))


def find_engine(name: str) -> dict[str, Any]:
    """Return the figures of an engine, or those of an unknown one."""
    key = re.sub("[^a-z0-9]", "", name.lower())
    return next(each for each in load_figures()["engines"] if any(word in key for word in each["names"]))


def find_vendor(accelerator: str) -> dict[str, float]:
    """Return the factors of the shares of bandwidth and of matrix products that an accelerator's vendor has."""
    known = (each for each in load_figures()["vendors"] if re.search(each["accelerators"], accelerator.lower()))
    return next(known, {"memory": 1.0, "products": 1.0, "host": 1.0})


def find_defaults(card: Card, engine: str) -> dict[str, Any]:
    """Return the defaults of a server on the card's accelerators."""
    chip = card.hardware.chip
    return next(
        each
        for each in load_figures()["defaults"]
        if each["engine"] in engine.lower()
        and each.get("kind", chip.kind) == chip.kind
        and each.get("accelerators", "") in chip.name
        and card.hardware.memory_gib >= each.get("min_gib", 0)
    )


def read_engines(card: Card, space: Space, read: Callable[[str], float]) -> Array:
    """(N,) a number that follows from the name of each configuration's engine."""
    knob = next((space.find(name) for name in FRAMEWORK_KNOBS if space.has(name)), None)
    return read_choices(space, knob, lambda choice: read(str(choice)), read(card.framework))


def name_engines(card: Card, space: Space) -> list[str]:
    """The engine of each configuration: the value of the knob that names it, else the card's framework."""
    knob = next((name for name in FRAMEWORK_KNOBS if space.has(name)), None)
    return [card.framework] * len(space) if knob is None else list(map(str, space.column(knob)))


Array = NDArray[np.float64]

# With the scales of the blocks: 8 bits for 16 weights (NVFP4), 8 for 32 (Open Compute Project 2023, microscaling
# formats), 32 for 128 (AWQ, GPTQ).
BITS = ((4.5, ("nvfp4",)), (4.25, ("fp4", "int4", "awq", "gptq")), (8.0, ("fp8", "int8", "w8a8")))
"""Bits of a weight in formats whose names contain these words."""
# From vLLM's documentation.
DEFAULT_BLOCK = 16
"""Tokens of a block."""
SMALL_SERVER = "cpu-serving"
"""The engine whose scheduler is `launchers/cpu_serving_scheduler.py`."""
# SGLang leaves about as much; vLLM 0.32.0 takes 0.92.
MEMORY_FRACTION = 0.9
"""Share of the device's memory that a server takes."""
DRAFTED = 4
"""Tokens that are guessed for a step, as the run scripts have it (`launchers/vllm_serve.py`)."""
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
    reads: Array
    """Share of the bandwidth that reads of weights reach beside those of 16 bits."""
    engine_time: Array
    """Time of everything relative to another engine's, 1 if unknown."""
    request_s: Array
    """Seconds from a request to its place in a step."""
    layer_s: Array
    """Seconds to launch a layer without a captured graph."""
    graphs: Array
    """Sequences of the largest step with a captured graph."""
    batch_bucket: Array
    """A step computes a multiple of so many sequences: static graphs are compiled for those only."""
    context_bucket: Array
    """It reads keys and values for a multiple of so many tokens of each."""
    reserves: Array
    """1 if each place of a sequence has the memory of a whole request at all times, else 0."""
    block_size: Array
    """Tokens of a block of the KV cache."""
    cached: Array
    """First tokens of each prompt that are in the cache of prefixes."""
    checked: Array
    """Tokens that a step computes of each sequence: the next one and the guesses."""
    gain: Array
    """Tokens that it has of each in the mean afterwards."""
    cache_gib: Array
    """GiB of the KV cache of an accelerator; 0 if it gets the memory that the rest of the server leaves."""
    memory_share: Array
    """Share of an accelerator's memory that the server takes."""
    limits_all: Array
    """1 if weights and engine must fit in that share, else 0: TensorRT-LLM's is of what they leave."""
    is_chunked: Array
    """1 if a step may compute a part of a prompt, else 0."""
    is_alone: Array
    """1 if prompts have steps of their own, before any answer continues, else 0."""
    restarts: Array
    """1 if a request that lost its blocks may start again in the same step, else 0."""


@dataclass(frozen=True)
class _Reader:
    """The columns of a space's knobs and engines, (N,) each."""

    card: Card
    space: Space

    def column(self, name: str, read: Callable[[Value], float], default: float) -> Array:
        return read_choices(self.space, self.space.find(name), read, default)

    def number(self, name: str, default: float = 1.0) -> Array:
        return np.maximum(self.column(name, lambda value: _read_number(value, default), default), 1.0)

    def switch(self, name: str) -> Array:
        return self.column(name, _is_on, 0.0)

    def engine(self, read: Callable[[str], float]) -> Array:
        return read_engines(self.card, self.space, lambda name: float(read(name)))

    def stated(self, knob: str, name: str, least: float = 0.0) -> Array:
        """Return the knob, else the engine's default and at least `least`."""
        own = self.column(knob, lambda value: _read_number(value, np.nan), np.nan)
        default = np.maximum(self.engine(lambda engine: find_defaults(self.card, engine)[name]), least)
        return np.asarray(np.where(np.isnan(own), default, np.maximum(own, 1.0)))

    def weights(self) -> dict[str, Array]:
        """Return the columns that follow from the precision of the weights."""
        card, quantized = self.card, self.column("quantization", lambda value: _bytes_of(str(value), 0.0), 0.0)
        knob = self.space.find(PRECISION)
        rates = {n: _find_rate(card, n) for n in {card.precision, *(() if knob is None else map(str, knob.choices))}}

        def of_precision(read: Callable[[str], float]) -> Array:
            return self.column(PRECISION, lambda value: read(str(value)), read(card.precision))

        reads = self.column("quantization", _share_reads, 1.0)
        return {
            "weight_bytes": np.where(quantized > 0, quantized, of_precision(lambda name: _bytes_of(name, 2.0))),
            "flops_per_s": of_precision(rates.__getitem__),
            "reads": np.where(quantized > 0, reads, of_precision(_share_reads)),
        }


def read_replica(card: Card, space: Space, layout: Mapping[str, str] = AGGREGATED) -> Replica:
    """Return the columns of a space; an absent knob has the value of a server that starts without it.

    `layout` has the names of its knobs, so that workers which only prefill or only decode can be read too.
    """
    at = _Reader(card, space)
    tp, is_split = at.number(layout["tp"]), at.switch(layout["dp_attention"]) > 0
    if layout is AGGREGATED and not space.has("tp"):
        tp = np.where(at.engine(lambda name: find_engine(name)["by_layers"]) > 0, 1.0, at.number("devices"))
    attention_ranks = np.where(is_split, 1.0, np.maximum(tp / at.number("attention_dp"), 1.0))
    half = _bytes_of("fp32", 4.0) if card.precision == "fp32" else 2.0
    replicas, block_size = at.number(layout["dp"]), at.number("block_size", DEFAULT_BLOCK)
    off = ("none", "false", "0", "off")
    checked, gain = _read_speculation(card, at.column("speculative", lambda v: float(str(v).lower() not in off), 0.0))
    is_chunked = at.column("chunked_prefill", _is_on, np.nan)
    by_default = at.engine(lambda name: find_defaults(card, name)["chunked"])
    is_chunked = np.where(np.isnan(is_chunked), by_default, is_chunked)
    # published benchmarks raise the default to the requests at once
    most = max(card.work.as_int("max_concurrency", 0), card.work.as_int("concurrency", 0))
    step = "max_num_batched_tokens" if space.has("max_num_batched_tokens") else "prefill_chunk"
    is_whole = at.switch("expert_parallel") > 0  # as vLLM has it: over all ranks of all replicas
    return Replica(
        tp=tp,
        pp=at.number("pp"),
        dp=replicas,
        ep=np.where(is_whole, tp * replicas, at.number(layout["ep"])),
        accelerators=np.maximum(space.num_accelerators_N.astype(np.float64), 1.0),
        attention_ranks=attention_ranks,
        sequences=at.stated("max_num_seqs", "sequences", most) * tp / attention_ranks,  # of each rank with its own
        tokens=at.stated(step, "tokens"),
        cache_bytes=at.column("kv_cache_dtype", lambda value: _bytes_of(str(value), half), half),
        engine_time=at.engine(lambda name: find_engine(name)["time"]),
        request_s=at.engine(lambda name: find_engine(name)["request_s"]),
        layer_s=at.engine(lambda name: find_engine(name)["layer_s"]),
        graphs=at.stated("max_graph_size", "graphs") * (1 - at.switch("enforce_eager")),
        batch_bucket=at.number("batch_bucket"),
        context_bucket=at.number("context_bucket"),
        reserves=at.switch("reserve_kv_cache"),
        block_size=block_size,
        cached=_count_cached(card, block_size, at.switch("prefix_caching")),
        checked=checked,
        gain=gain,
        cache_gib=at.column("kv_cache_mib", float, 0.0) / 1024 + at.column("kv_cache_gib", float, 0.0),
        memory_share=at.column("memory_fraction", lambda value: _read_number(value, MEMORY_FRACTION), MEMORY_FRACTION),
        limits_all=space.has("memory_fraction") * at.engine(lambda name: "tr" not in name.lower()),
        is_chunked=is_chunked,
        is_alone=_find_alone(at, is_chunked),
        restarts=is_chunked * at.engine(lambda name: name == SMALL_SERVER),
        **at.weights(),
    )


def _count_cached(card: Card, block_size: Array, is_on: Array) -> Array:
    """Return the whole blocks of first tokens that all prompts share, where a cache of prefixes keeps them.

    Requests that warm up have the same first tokens, and at least one token is computed always.
    """
    shared = min(card.work.as_int("shared_prefix_tokens", 0), max(card.work.as_int("input_len", 1) - 1, 0))
    return np.asarray(np.floor(shared / block_size) * block_size * is_on)


def _read_speculation(card: Card, is_on: Array) -> tuple[Array, Array]:
    """Return the tokens that a step computes of a sequence, and the tokens that the sequence has gained after it.

    The share of right guesses depends on the texts, so the card states it; without that, nothing changes. Guesses by
    n-grams of the prompt cost no further model.
    """
    accepted = min(max(float(card.work.get("accepted_tokens_per_step", 1.0)), 1.0), 1.0 + DRAFTED)
    is_known = is_on * (accepted > 1.0)
    return 1.0 + DRAFTED * is_known, 1.0 + (accepted - 1.0) * is_known


def _find_alone(at: _Reader, is_chunked: Array) -> Array:
    """Return where prompts have steps of their own (by the schedulers of SGLang and of the small CPU server)."""
    is_sglang = at.engine(lambda name: "sglang" in name.lower()) * (1 - at.switch("mixed_chunk"))
    return np.maximum(is_sglang, at.engine(lambda name: name == SMALL_SERVER) * (1 - is_chunked))


def _find_rate(card: Card, precision: str) -> float:
    """Return the FLOP/s that linear layers with weights in that precision reach.

    Integers of 4 bits are widened to 16 as they are read, and so are all 4 bits on a device without units for them
    (vLLM's documentation, quantization).
    """
    four = _bytes_of(precision, 2.0) <= FOUR_BITS
    widened = four and ("fp4" not in card.hardware.chip.peak_flops or _is_integer(precision))
    bits = 16 if widened else 4 if four else round(8 * _bytes_of(precision, 2.0))
    machine = read_machine(card.model_copy(update={"precision": "bf16" if widened else precision}))
    share = load_figures()["products"][str(bits)] * machine.gemm_share
    return float(machine.flops_per_s * share * find_vendor(card.hardware.accelerator)["products"])


def _share_reads(precision: Value) -> float:
    return float(load_figures()["integer_reads"]) if _is_integer(str(precision)) else 1.0


def _is_integer(precision: str) -> bool:
    return any(word in precision.lower() for word in ("int4", "awq", "gptq"))


def _read_number(value: Value, default: float) -> float:
    try:
        return float(value)
    except ValueError:
        return default


def _is_on(value: Value) -> float:
    return float(str(value).lower() in ("true", "1", "yes", "on"))


def check_physics(card: Card) -> None:
    """Raise UserError for a limit on the time per token below the time in which all accelerators together read what one
    token needs of the weights, in the smallest precision that the card allows.
    """
    chip, arch = card.hardware.chip, card.model
    if arch is None or chip.nominal or chip.kind == "cpu" or card.recording is not None:
        return
    size = min(_bytes_of(name, 2.0) for name in (card.precision, *card.alternative_precisions))
    read_s = flops_per_token(arch, 1) / 6 * size / (chip.hbm_bytes_per_s * card.hardware.num_accelerators)
    least_s = read_s / max(1.0, float(card.work.get("accepted_tokens_per_step", 1.0)))
    for key, most in card.work.items():
        name = key.removeprefix("at_most.")
        if name != key and name.startswith("tpot_") and float(most) < least_s:
            raise UserError(
                f"{card.name}: {name} <= {float(most):g} s cannot be kept: {card.hardware.num_accelerators}"
                f" {card.hardware.accelerator} read the weights of a token in {least_s:.2g} s at best; raise the limit"
            )


def _bytes_of(name: str, default: float) -> float:
    """Return the bytes of a number in that precision, `default` if the name is none (`auto`, `none`)."""
    lowered = name.lower()
    for bits, words in BITS:
        if any(word in lowered for word in words):
            return bits / 8
    known = {"bf16": 2.0, "bfloat16": 2.0, "fp16": 2.0, "float16": 2.0, "half": 2.0, "fp32": 4.0, "float32": 4.0}
    return known.get(lowered, default)
