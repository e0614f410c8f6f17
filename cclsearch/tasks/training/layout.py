"""Reads the numbers that a prediction needs from a space, one column each; a space may call its knobs otherwise.

Spaces name the knobs of fine-tuning differently (`method=lora`, `peft: true`, `base_quantisation=nf4`, `load_in_4bit`,
`liger`), so a word may be in the name of the knob or in its choices.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from cclsearch.card.arch import count_adapters, count_parts
from cclsearch.card.model import PRECISION, Card
from cclsearch.core.values import Value
from cclsearch.space.framework import find_behaviour, find_levers, has_knob
from cclsearch.space.knobs import meaning_of
from cclsearch.space.table import RECORDED_RULES, Knob, Space
from cclsearch.stats.columns import read_choices
from cclsearch.tasks.training.stages import EVEN, SPLIT_KNOB

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
_BASES = {"nf4": FOUR_BIT_BYTES, "int8": EIGHT_BIT_BYTES}
# LoRA of rank 16 to 64 on all linear layers has 0.5 to 2 %.
ADAPTER_SHARE = 0.01
"""Parameters of adapters as a share of the base's, if the card does not state their rank."""
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


Array = NDArray[np.float64]

_FULL = {"full", "true", "yes", "on", "1", "all", "uniform", "block", "every-layer", "every_layer", "offload"}
_PARTIAL = {"selective", "partial", "minimal", "attention", "save_dot_except_mlp", "half"}
# Tensors that are cheap to compute take much memory (Korthikanti et al. 2022, section 5: 2 to 4 % more time).
PARTIAL_SHARE, PARTIAL_COST = 0.4, 0.1
"""Share of the activations that selective recomputation drops, and of the forward pass that it repeats."""
_FUSED_ATTENTION = ("flash", "sdpa", "xformers", "memory_efficient", "cudnn", "splash")
# Counted: 64 bytes per value (scaling, mask, softmax in 4 bytes with its casts, dropout, two products) to 32 (softmax
# with scaling and mask in one kernel, dropout, two products).
EAGER_MATRIX = 2.0
"""Traffic of the attention matrix in eager kernels relative to a fused softmax, forward and backward."""
# In torch: the log softmax, its gradient and that of the logits, 4 bytes each; XLA keeps the logits and their gradient.
KEPT_LOGIT_BYTES, COMPILED_LOGIT_BYTES = 12.0, 4.0
_FUSED_NORMS = ("rms", "norm")
_FLASH_VERSION = re.compile(r"flash[a-z_ -]*?v?(\d)")
# Dao 2023 (2x faster than version 1), Shah et al. 2024 (1.5x to 2x faster).
_FLASH_SLOWNESS = {"1": 2.0, "2": 1.0, "3": 0.6}
"""Version -> time relative to version 2."""
# Megatron-LM's default order and torch's device meshes, of which ours have the relevant part.
MESH = ("tp", "cp", "dp", "pp")
"""The degrees in the order of ranks, innermost first, without a knob `rank_order`."""
HOST_ORDERS = {"links": 1.0, "ranks": 2.0}
_PLAIN_ATTENTION = ("torch", "eager", "math", "naive", "unfused", "plain", "dot_product", "fused")


@dataclass(frozen=True, eq=False)
class Layout:
    """N configurations as columns, each (N,) float64."""

    tp: Array
    dp: Array
    pp: Array
    cp: Array
    ep: Array
    micro_batch: Array
    accumulation: Array
    """Gradient accumulation: micro-batches per optimizer step and data-parallel rank."""
    zero: Array
    """ZeRO stage: 0 replicated, 1 optimizer states sharded, 2 gradients too, 3 weights too."""
    declares_sharding: bool
    """Whether the space has a knob for it, or the framework declares it; else a framework may still shard."""
    gradient_bytes: int | None
    """Bytes per parameter of the gradients, if the framework says it."""
    replicated: Array
    """Replicas of the sharded weights among dp (HSDP): each is sharded over `sharding` ranks."""
    recompute: Array
    """Share of each layer's activations that is recomputed, 0 to 1."""
    offloads: Array
    """Whether the inputs of recomputed layers wait in the host's memory, 1 or 0."""
    declares_recomputation: bool
    """Whether the space or the framework's own knobs declare it; else a framework may still recompute."""
    repeated: Array
    """Share of each layer's forward pass that this repeats, 0 to 1."""
    sequence_parallel: Array
    declares_sequence_parallel: bool
    """Whether the space has a knob for it, or the framework declares it; else a framework may still split the sequence.
    """
    virtual: Array
    """Model chunks per pipeline rank (1 without interleaving)."""
    plain_attention: Array
    """Whether the attention matrix goes to memory: 1, 0, or 0.1 if unknown."""
    kept_matrix: Array
    """Whether it stays there until the backward pass: 1 or 0."""
    matrix_traffic: Array
    """Bytes that move for the attention matrix relative to a fused softmax, if it is written to memory."""
    attention_slowness: Array
    """Time of the attention kernels relative to FlashAttention-2."""
    eager: Array
    """Whether the activation function and the product after it are kernels of their own, which keep one tensor more:
    1 or 0."""
    eager_norms: Array
    """Whether a framework's norms and rotary embeddings are kernels for each operator: 1 or 0."""
    logit_bytes: float
    """Bytes per logit that the loss keeps at once."""
    unfused_norms: Array
    """Whether norms run as several eager kernels: 1 if another choice names a fused norm and this one does not."""
    even_split: Array
    """Whether the framework gives all pipeline stages the same number of layers: 1, 0 (balanced by their work) or NaN.
    """
    overlaps: Array
    """Whether the last backward pass reduces gradients meanwhile, 1 or 0; 1 if the framework does not declare it."""
    blocks: bool
    """Whether messages between pipeline stages delay all nodes; also if the framework does not declare it."""
    frozen: Array
    """Whether only adapters are trained (LoRA), 1 or 0: base weights have neither gradients nor optimizer states."""
    base_bytes: Array
    """Bytes per base weight where it is quantised, else 0: only frozen ones are."""
    adapter_share: float
    """Parameters of adapters as a share of the base's."""
    fused_loss: Array
    """Whether output projection and loss are one kernel, which never keeps all logits in memory: 1 or 0."""
    precision: Array
    """Position in the card's `precisions`; 0 is its own."""
    order: Array
    """Position in `orders`."""
    orders: tuple[tuple[str, ...], ...]
    """Orders of the degrees over ranks, innermost first."""
    hosts: Array
    """Units in an order that suits measured links: 0 none, 1 the nodes, 2 all ranks."""
    devices: Array
    """Whether the devices inside nodes are ordered for the configuration, 1 or 0."""
    split: Array
    """Position in `splits`."""
    splits: tuple[str, ...]
    """Choices of how the layers are split into pipeline stages (`stages.py`)."""
    stage_layers: Array
    """Layers of the pipeline stage that is looked at: of the fullest one with an even split."""
    stage_ends: Array
    """Embedding and output projection on that stage: 0, 1 or 2."""

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def replicas(self) -> Array:
        """Ranks with the same part of the weights, which reduce gradients and shard states: dp x cp."""
        return self.dp * self.cp

    @property
    def sharding(self) -> Array:
        """Ranks that share one replica of ZeRO's shards: all replicas without HSDP."""
        return np.maximum(self.replicas / self.replicated, 1.0)

    @property
    def ranks(self) -> Array:
        return self.tp * self.dp * self.pp * self.cp


def read_layout(card: Card, space: Space) -> Layout:
    """Return the columns of a space; an absent knob has its neutral value (degree 1, no sharding, no recomputation)."""

    def number(name: str) -> Array:
        return np.maximum(_by_choice(space, name, _as_number), 1.0)

    dp, micro_batch = number("dp"), number("micro_batch_size")
    accumulation = np.maximum(card.number("global_batch_size") / (dp * micro_batch), 1.0)
    order_knob, split_knob = space.find("rank_order"), space.find(SPLIT_KNOB)
    orders = (MESH,) if order_knob is None else tuple(read_order(choice) for choice in order_knob.choices)
    splits = (EVEN,) if split_knob is None else tuple(map(str, split_knob.choices))
    pp, behaviour = number("pp"), find_behaviour(card.framework)
    has_sharding_knob = any(space.find(name) is not None for name in ("zero_stage", "fsdp"))
    stages = behaviour.overlapped_zero_stages
    zero = _zero(space) if has_sharding_knob else np.full(len(space), float(behaviour.zero_stage or 0))
    has_sequence_knob = space.find("sequence_parallel") is not None
    splits_sequence = _by_choice(space, "sequence_parallel", _as_switch)
    if not has_sequence_knob:
        splits_sequence = np.full(len(space), float(bool(behaviour.sequence_parallel)))
    eager = 1.0 - _by_choice(space, "compile", _as_switch)
    if space.find("compile") is None and space.rules != RECORDED_RULES and "compile" in find_levers(card.framework):
        eager = np.zeros(len(space))  # a lever: compiled unless a trial says otherwise
    partial_ones = _by_choice(space, "activation_checkpointing", _as_partial) > 0
    dropped, repeated = behaviour.selective or (PARTIAL_SHARE, PARTIAL_COST)
    return Layout(
        tp=number("tp"),
        dp=dp,
        pp=pp,
        cp=number("cp"),
        ep=number("ep"),
        micro_batch=micro_batch,
        accumulation=accumulation,
        zero=zero,
        declares_sharding=has_sharding_knob or behaviour.zero_stage is not None,
        gradient_bytes=behaviour.gradient_bytes,
        replicated=np.minimum(number("dp_replicate"), dp),
        recompute=np.where(partial_ones, dropped, _by_choice(space, "activation_checkpointing", _as_recomputed)),
        offloads=_by_choice(space, "activation_checkpointing", lambda choice, _: float(choice == "offload")),
        declares_recomputation=space.find("activation_checkpointing") is not None
        or has_knob(card.framework, "activation_checkpointing"),
        repeated=np.where(partial_ones, repeated, _by_choice(space, "activation_checkpointing", _as_repeated)),
        sequence_parallel=splits_sequence,
        declares_sequence_parallel=has_sequence_knob or behaviour.sequence_parallel is not None,
        virtual=number("virtual_pipeline"),
        plain_attention=_by_kernel_choice(space, _plain_attention, 0.1),
        kept_matrix=_by_kernel_choice(space, lambda choice: float(_plain_attention(choice) >= 1.0), 0.0),
        matrix_traffic=_by_kernel_choice(space, _matrix_traffic, 1.0),
        attention_slowness=_by_kernel_choice(space, _flash_slowness, 1.0),
        eager=eager * (behaviour.pointwise in {None, "eager", "fused_norms"}),
        eager_norms=eager * (behaviour.pointwise == "eager"),
        logit_bytes=COMPILED_LOGIT_BYTES if behaviour.pointwise == "compiled" else KEPT_LOGIT_BYTES,
        unfused_norms=_unfused_norms(space),
        even_split=np.full(len(space), {"even": 1.0, "balanced": 0.0}.get(behaviour.pipeline_split or "", np.nan)),
        overlaps=np.ones(len(space)) if stages is None else np.isin(zero, stages).astype(np.float64),
        blocks=behaviour.blocks_between_stages,
        frozen=np.maximum(find_frozen(space), float(card.arch.lora_rank is not None)),
        base_bytes=np.maximum(find_base_bytes(space), _BASES.get(card.arch.base_precision or "", 0.0)),
        adapter_share=count_adapters(card.arch) / count_parts(card.arch).total or ADAPTER_SHARE,
        fused_loss=find_fused_loss(space),
        precision=_by_choice(space, PRECISION, lambda value, _: float(card.precisions.index(str(value)))),
        order=read_choices(space, order_knob, lambda choice: orders.index(read_order(choice))),
        orders=orders,
        hosts=_by_choice(space, "host_order", lambda value, _: HOST_ORDERS.get(str(value), 0.0)),
        devices=_by_choice(space, "device_order", lambda value, _: float(value == "links")),
        split=read_choices(space, split_knob, lambda choice: splits.index(str(choice))),
        splits=splits,
        stage_layers=np.ceil(card.arch.num_layers / pp),
        stage_ends=np.where(pp > 1, 1.0, 2.0),
    )


def _by_choice(space: Space, name: str, read: Callable[[Value, float], float]) -> Array:
    """(N,) `read` of the values of the knob with that meaning, or its neutral value."""
    default = _as_number(meaning_of(name).neutral, 0.0)
    return read_choices(space, space.find(name), lambda choice: read(choice, default), default)


def _by_kernel_choice(space: Space, read: Callable[[str], float], default: float) -> Array:
    """(N,) `read` of the values, in lower case, of the first knob about kernels or attention."""
    about = (k for k in space.knobs if "kernel" in k.name or "attention" in k.name.replace("activation", ""))
    return read_choices(space, next(about, None), lambda choice: read(str(choice).lower()), default)


def read_order(choice: Value) -> tuple[str, ...]:
    """Return the degrees of a choice such as `tp-pp-dp`, innermost first; `MESH` completes it."""
    named = tuple(part for part in str(choice).split("-") if part in MESH)
    # a degree that is not named comes after the one that it follows in `MESH`
    for degree in MESH:
        if degree not in named:
            at = max((named.index(inner) + 1 for inner in MESH[: MESH.index(degree)] if inner in named), default=0)
            named = (*named[:at], degree, *named[at:])
    return named


def _as_number(choice: Value, default: float) -> float:
    try:
        return float(choice)
    except ValueError:
        return default


def _as_switch(choice: Value, default: float) -> float:
    return float(str(choice).lower() in _FULL)


def _as_stage(choice: Value, default: float) -> float:
    """A ZeRO stage, or a switch between stages 0 and 1."""
    return max(_as_number(choice, default), _as_switch(choice, default))


def _as_partial(choice: Value, default: float) -> float:
    return float(str(choice).lower() in _PARTIAL)


def _as_recomputed(choice: Value, default: float) -> float:
    if str(choice).lower() in _PARTIAL:
        return PARTIAL_SHARE
    share = _as_number(choice, default)
    return share if 0 < share < 1 else _as_switch(choice, default)


def _as_repeated(choice: Value, default: float) -> float:
    """Return the share of the forward pass that a choice repeats."""
    # Frameworks recompute first what takes much memory and little time.
    share = _as_recomputed(choice, default)
    cheap, dear = min(share, PARTIAL_SHARE), max(share - PARTIAL_SHARE, 0.0)
    return cheap * PARTIAL_COST / PARTIAL_SHARE + dear * (1 - PARTIAL_COST) / (1 - PARTIAL_SHARE)


def recomputes_layers(choice: Value | None) -> bool:
    """Return whether a choice of activation checkpointing recomputes whole layers."""
    return choice is not None and _as_recomputed(choice, 0.0) >= 1.0


def _zero(space: Space) -> Array:
    if space.find("zero_stage") is None:
        return 3.0 * _by_choice(space, "fsdp", _as_switch)
    return np.clip(_by_choice(space, "zero_stage", _as_stage), 0.0, 3.0)


def _matrix_traffic(choice: str) -> float:
    return 1.0 if "fused" in choice and "unfused" not in choice else EAGER_MATRIX


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
