"""One step of a serving engine in closed form: what prefill and decode cost on one replica, before calibration.

Decode reads all weights that its tokens use and the keys and values of every sequence, so it is bound by memory unless
the batch is large; prefill computes (Pope et al. 2022, sections 2 and 3; Yuan et al. 2024, roofline of LLM inference).
With uniform routing, b tokens that choose k of E experts use E (1 - (1 - k/E)^b) of them. Tensor parallelism sums
activations twice a layer by all-reduce (Narayanan et al. 2021, section 3), expert parallelism exchanges tokens twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cclsearch.card.arch import count_parts, score_width
from cclsearch.card.model import PRECISION, Card, ModelArch, MoEArch
from cclsearch.core.values import Value
from cclsearch.space.table import Space
from cclsearch.tasks.machine import Machine, read_machine
from cclsearch.tasks.serving.engines import find_engine_times
from cclsearch.tasks.serving.served_model import FOUR_BITS, UNQUANTIZED, ServedModel, find_served, other_weight_bytes

Array = NDArray[np.float64]

MULTIPLIERS = ("scale", "weights", "kv_cache", "prefill", "collectives", "engine")
"""What calibration may change, in the order of every vector of log multipliers."""
SHARES = ("prefill", "weights", "kv_cache", "collectives", "engine")
"""The parts that the cost of a token is the sum of."""
ENGINE_STEP_S = 2e-3
"""Seconds in which an engine plans a step, before calibration (our choice; vLLM's of tiny models take more)."""
SEQUENCE_S = 2e-5
"""Further seconds per sequence of a step: sampling and streaming its token (our choice). Ranks that attend to sequences
of their own do that apart."""
COLLECTIVE_S = 1.6e-5
"""Seconds of a collective of few bytes besides the latency of its links: launch, and waiting for the slowest rank."""
MEMORY_SHARE = 0.85
"""Share of the data-sheet bandwidth that reads of weights reach. This and the number above were chosen on measured
servers (benchmarks/serving_fit.py)."""
BITS = ((4.5, ("nvfp4",)), (4.25, ("fp4", "int4", "awq", "gptq")), (8.0, ("fp8", "int8", "w8a8")))
"""Bits of a weight in formats whose names contain these words, with the scales of their blocks: 8 bits for 16 weights
(NVFP4), 8 for 32 (Open Compute Project 2023, microscaling formats), 32 for 128 (AWQ, GPTQ)."""
REQUEST_S = 0.05
"""Seconds from a request to its place in a step, before calibration: HTTP, the tokenizer, queues."""
TOGETHER = 0.15
"""Share of the requests of a closed loop that arrive together: answers of equal length end together. This and the
number above were chosen on measured servers (benchmarks/serving_fit.py)."""
HANDOVER_S = 0.15
"""Seconds from a prompt that another worker prefilled to its place in a step, besides moving its keys and values.
Chosen on measured servers (benchmarks/serving_disaggregated.py)."""
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


@dataclass(frozen=True, eq=False)
class LoadParts:
    """Seconds before multipliers at one concurrency; (N,) each. A replica is one engine with all its ranks."""

    batch: Array
    """Sequences that a replica decodes at once, over all its stages."""
    waiting: Array
    """Requests of a replica that wait for a place."""
    replicas: Array
    accelerators: Array
    weights: Array
    """A decode step reads the weights that its tokens use."""
    kv_cache: Array
    """It reads the keys and values of its sequences."""
    products: Array
    """It computes: the larger of this and the two before counts."""
    collectives: Array
    engine: Array
    prefill: Array
    """Computing the prompt of one request, per request when all stages are busy."""
    prefill_alone: Array
    """The same from its first to its last stage."""
    prefill_collectives: Array
    prefill_engine: Array
    answer: Array
    """Tokens of an answer."""
    prefillers: Array
    """Workers that only prefill, to which `prefill...` belongs then; 0 if every replica prefills its own prompts."""
    prefill_share: Array
    """Share of the accelerators that they have."""
    clients: Array
    """Requests at once, over everything."""
    transfer: Array
    """Moving the keys and values of a prompt from the worker that prefilled it."""
    ttft_lean: Array
    """Log by which another prediction moves the time to the first token (`kernel_tables`)."""
    tpot_lean: Array
    """The same of the time per token."""


ADDED = ("prefillers", "prefill_share", "transfer", "ttft_lean", "tpot_lean")
"""What workers that only prefill, and other predictions, add to the parts of a load."""


def compute_load(card: Card, at: Replica, concurrency: Array | float, input_len: float, output_len: float) -> LoadParts:
    """Return the parts of a closed loop of so many clients, or of a batch of so many requests."""
    model, machine = find_served(card), read_machine(card)
    arch, counts = model.arch, count_parts(model.arch)
    replicas = at.dp
    clients = np.maximum(concurrency / replicas, 1.0)
    batch = np.minimum(clients, at.sequences)
    group = _pad(np.maximum(batch / at.pp, 1.0), at.batch_bucket)  # the stages work on different groups of sequences
    routed = group * np.where(at.ep > at.tp, replicas, 1.0)
    layers, bandwidth = arch.num_layers, machine.hbm_bytes_s * MEMORY_SHARE
    head, mlp = counts.head + counts.embedding * arch.tied_embeddings, counts.dense_layers * counts.dense_mlp
    other = mlp + head
    plain = other_weight_bytes(arch, at.weight_bytes)
    # the output projection is not quantized
    dense = (counts.attention * layers / at.attention_ranks + mlp / at.tp) * plain + head / at.tp * np.maximum(
        plain, UNQUANTIZED
    )
    computed = np.full(len(at.tp), float(counts.attention * layers + other))  # parameters that a token is multiplied by
    used = prompt_used = np.zeros(len(at.tp))
    exchange, prompt_exchange = np.zeros(len(at.tp)), np.zeros(len(at.tp))
    # replicas that share experts step together: a prompt of one is waited for by all, unless theirs come at once
    waits = np.where(at.ep > at.tp, TOGETHER + (1 - TOGETHER) * replicas, 1.0)
    if (moe := arch.moe) is not None:
        shared = counts.moe_layers * counts.shared_experts / at.tp * plain
        experts = counts.moe_layers * counts.experts * at.weight_bytes
        used = shared + experts * _share_experts(at, moe, routed)
        prompt_used = shared + experts * _share_experts(at, moe, np.minimum(input_len, at.tokens))
        sent = 2.0 * arch.hidden_size * np.minimum(moe.top_k, np.maximum(at.ep, at.tp))
        exchange = _exchange_tokens(at, machine, counts.moe_layers, group * sent)
        prompt_exchange = _exchange_tokens(at, machine, counts.moe_layers, input_len * sent)
        computed = computed + counts.moe_layers * (counts.active_experts + counts.shared_experts)
    held = _pad(np.full(len(at.tp), model.held_tokens(input_len + output_len / 2)), at.context_bucket)
    cached = 2.0 * kv_numbers(arch) if arch.kv_lora_rank is None else kv_numbers(arch)
    kv_ranks = np.minimum(at.attention_ranks, arch.num_kv_heads if arch.kv_lora_rank is None else 1.0)
    own = group * at.attention_ranks / at.tp  # with data-parallel attention each rank has a part of the sequences
    weights = (dense + used) / bandwidth
    kv_cache = own * held * cached * layers * at.cache_bytes / kv_ranks / bandwidth
    # each new token meets all that is held; latent keys are met as they are kept, by every head (absorbed weights)
    met = arch.num_heads * 2.0 * kv_numbers(arch) if arch.kv_lora_rank else 2.0 * score_width(arch)
    scores = 2.0 * own * held * met * layers / at.attention_ranks
    products = (2.0 * group * computed / at.tp + scores) / at.flops_per_s
    prompt, alone = _compute_prompt(at, model, computed, counts.attention * layers, input_len)
    reads = np.ceil(input_len / at.tokens) * (dense + prompt_used) / bandwidth
    prefill = np.maximum(prompt, reads)
    hidden = 2.0 * arch.hidden_size
    chosen = np.inf if arch.moe is None else float(arch.moe.top_k)
    collectives = _sum_activations(at, machine, layers, group * hidden, chosen) + exchange
    prompt_collectives = _sum_activations(at, machine, layers, input_len * hidden, chosen) + prompt_exchange
    slow = at.engine_time
    return LoadParts(
        batch=batch,
        waiting=clients - batch,
        replicas=replicas,
        accelerators=at.accelerators,
        weights=slow * weights,
        kv_cache=slow * kv_cache,
        products=slow * products,
        collectives=slow * collectives,
        engine=slow * (ENGINE_STEP_S + SEQUENCE_S * own),
        prefill=slow * waits * prefill / at.pp,
        prefill_alone=slow * np.maximum(alone, reads),
        prefill_collectives=slow * waits * prompt_collectives / at.pp,
        prefill_engine=slow * waits * ENGINE_STEP_S * input_len / at.tokens,
        answer=np.full(len(at.tp), float(output_len)),
        clients=np.broadcast_to(np.asarray(concurrency, dtype=np.float64), at.tp.shape),
        **dict.fromkeys(ADDED, np.zeros(len(at.tp))),
    )


def _share_experts(at: Replica, moe: MoEArch, tokens: Array) -> Array:
    """Return the share of all experts that the rank with most of them reads for so many tokens."""
    ranks = np.maximum(at.ep, at.tp)
    own = moe.num_experts / ranks
    share = 1 - (1 - moe.top_k / moe.num_experts) ** tokens
    most = np.minimum(_find_most(share * own, at.ep), own) / own
    return np.asarray(np.where(at.ep > 1, most, share) / ranks)


def _compute_prompt(
    at: Replica, model: ServedModel, computed: Array, attention: float, input_len: float
) -> tuple[Array, Array]:
    """Return the seconds in which a prompt is computed among others, and alone: then by the ranks that share one
    attention layer. `computed` parameters a token is multiplied by, `attention` of them in attention."""
    arch = model.arch
    # half of the attention matrix is masked: input_len / 2 keys per token, two products
    scores = 4.0 * input_len * model.held_tokens(input_len / 2) * score_width(arch) * arch.num_layers
    prompt = (2.0 * computed * input_len + scores) / at.tp / at.flops_per_s
    attending = 2.0 * attention * input_len + scores
    return prompt, prompt + attending * (1.0 / at.attention_ranks - 1.0 / at.tp) / at.flops_per_s


def _pad(number: Array, bucket: Array) -> Array:
    """Return the next multiple of the bucket; the number itself, which is a mean, if the bucket is 1."""
    return np.asarray(np.where(bucket > 1, np.ceil(number / bucket) * bucket, number))


def _find_most(mean: Array, ranks: Array) -> Array:
    """Return about how many the rank with most has of what falls on ranks by chance, with that mean (Gaussian tail)."""
    return np.asarray(mean + np.sqrt(2.0 * mean * np.log(np.maximum(ranks, 1.0))))


def _exchange_tokens(at: Replica, machine: Machine, layers: int, num_bytes: Array) -> Array:
    """Return the seconds in which tokens get to their experts and back, if replicas share the experts."""
    inside = at.ep <= machine.node
    bandwidth = np.where(inside, machine.up_bytes_s, machine.out_bytes_s)
    latency = np.where(inside, machine.up_latency_s, machine.out_latency_s) + COLLECTIVE_S
    return np.asarray((at.ep > at.tp) * 2.0 * layers * (latency + num_bytes * (1.0 - 1.0 / at.ep) / bandwidth))


def kv_numbers(arch: ModelArch) -> float:
    """Return the numbers that a token's keys (or, with latent attention, all of it) have in one layer."""
    if arch.kv_lora_rank is not None:
        return float(arch.kv_lora_rank + (arch.qk_rope_head_dim or 0))
    return float(arch.num_kv_heads * arch.head_dim)


def _sum_activations(at: Replica, machine: Machine, layers: int, num_bytes: Array | float, chosen: float) -> Array:
    """Return the seconds of a step's two collectives a layer over the tensor-parallel ranks, and of its transfers.

    Both are all-reduces, unless each rank attends to sequences of its own: then tokens are gathered before the experts
    and summed into their ranks after them, or go to the experts that they choose alone, whichever takes less.
    """
    inside = at.tp <= machine.node
    bandwidth = np.where(inside, machine.up_bytes_s, machine.out_bytes_s)
    latency = np.where(inside, machine.up_latency_s, machine.out_latency_s) + COLLECTIVE_S
    others = (at.tp - 1) / at.tp
    routed = np.where(at.ep > 1, np.minimum(chosen, at.ep) / at.tp, np.inf)
    share = np.where(at.attention_ranks < at.tp, np.minimum(others, routed), 2.0 * others)
    seconds = share * num_bytes / bandwidth + latency
    return 2.0 * layers * (at.tp > 1) * seconds + (at.pp - 1) * (num_bytes / bandwidth + latency)
