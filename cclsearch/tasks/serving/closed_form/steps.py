"""One step of a serving engine in closed form: what prefill and decode cost on one replica, before calibration.

Decode reads all weights that its tokens use and the keys and values of every sequence, so it is bound by memory unless
the batch is large; prefill computes (Pope et al. 2022, sections 2 and 3; Yuan et al. 2024, roofline of LLM inference).
With uniform routing, b tokens that choose k of E experts use E (1 - (1 - k/E)^b) of them. Tensor parallelism sums
activations twice a layer by all-reduce (Narayanan et al. 2021, section 3), expert parallelism exchanges tokens twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cclsearch.card.arch import count_parts, score_width
from cclsearch.card.model import Card, ModelArch, MoEArch
from cclsearch.stats.calibration import Prior
from cclsearch.stats.kernel import KernelShape
from cclsearch.tasks.machine import Machine, read_machine
from cclsearch.tasks.serving.closed_form.replica import (
    UNQUANTIZED,
    Array,
    Replica,
    ServedModel,
    find_served,
    find_vendor,
    other_weight_bytes,
)

MULTIPLIERS = ("scale", "weights", "kv_cache", "prefill", "collectives", "engine", "request")
"""Multipliers that calibration may change, in the order of every vector of log multipliers."""
SHARES = ("prefill", "weights", "kv_cache", "collectives", "engine")
"""The parts that the cost of a token is the sum of."""
# Our choice; vLLM's steps of tiny models take more.
ENGINE_STEP_S = 2e-3
"""Seconds in which an engine plans a step, before calibration."""
SEQUENCE_S = 2e-5
"""Further seconds per sequence of a step: sampling and streaming its token (our choice). Ranks that attend to separate
sequences do that separately.
"""
# Launch, and waiting for the slowest rank; chosen on measured servers (benchmarks/serving.md), as the next number.
COLLECTIVE_S = 1.6e-5
"""Seconds of a collective of few bytes besides the latency of its links."""
MEMORY_SHARE = 0.85
"""Share of the data-sheet bandwidth that reads of weights reach."""
NARROW = 68.0
"""Columns of an expert's share that cost as much as they hold: narrow products read slowly."""
MOE_LAUNCHES = 1.8
"""Launches that experts add to a layer, relative to those of a dense one."""
MOE_LAYER_S = 1e-5
"""Seconds of routing in a layer with experts, and of the kernels that it adds."""
# Answers of equal length end together; chosen on measured servers, as the next number.
TOGETHER = 0.19
"""Share of the requests of a closed loop that arrive together."""
HANDOVER_S = 0.15
"""Seconds from a prompt that another worker prefilled to its place in a step, besides moving its keys and values."""
# Trials calibrate the multipliers; nothing is fitted.
PRIOR = Prior(
    mean_P=np.zeros(len(MULTIPLIERS)),
    sd_P=np.array([0.4, 0.4, 0.5, 0.5, 0.8, 0.8, 1.0]),
    shape=KernelShape(0.15, 1.5, 0.1, 0.15),
    noise=0.03,
    dof=4.0,
)
"""Our choice: published predictions without any trial err by 13 % (TPOT) to 46 % (TTFT) in the median, ours by more."""
TPOT, TTFT = "tpot_mean_s", "ttft_mean_s"
# They are known better than the metric of `PRIOR`: the largest evidence of measured servers, and about the same with
# each model left out (benchmarks/serving.md).
LOAD_PRIORS = {
    TPOT: replace(PRIOR, sd_P=np.array([0.1, 0.1, 0.15, 0.15, 0.25, 0.4, 1.0]), shape=KernelShape(0.2, 1.5, 0.03, 0.2)),
    TTFT: replace(PRIOR, shape=KernelShape(0.4, 1.5, 0.03, 0.2), noise=0.12),
}
"""Priors of the latencies at one load."""


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
    """Workers that only prefill, whose costs `prefill...` has then; 0 if every replica prefills its own prompts."""
    prefill_share: Array
    """Share of the accelerators that they have."""
    clients: Array
    """Requests at once, over everything."""
    request: Array
    """The way of a request to a step."""
    transfer: Array
    """Moving the keys and values of a prompt from the worker that prefilled it."""
    ttft_lean: Array
    """Log by which another prediction moves the time to the first token (`kernel_tables`)."""
    tpot_lean: Array
    """The same of the time per token."""


ADDED = ("prefillers", "prefill_share", "transfer", "ttft_lean", "tpot_lean")
"""Additions to the parts of a load, by workers that only prefill and by other predictions."""


@dataclass(frozen=True, eq=False)
class StepCosts:
    """Costs that tokens add to a step, before multipliers; (N,) arrays, or numbers of all rows."""

    at: Replica
    model: ServedModel
    machine: Machine
    host: float
    """Factor of the times that the host takes."""
    moe_layers: int
    attention: float
    """Parameters of attention that a token is multiplied by."""
    computed: Array
    """All parameters that a token is multiplied by."""
    dense_s: Array
    """Seconds to read the weights that every token uses."""
    shared_s: Array
    """Seconds to read the shared experts."""
    experts_s: Array
    """Seconds to read all experts, by one rank."""
    key_s: Array
    """Seconds to read the keys and values of one held token."""
    score_s: Array
    """Seconds to compute the scores of one new token with one held token."""
    waits: Array
    """Number of waits for one prompt: replicas that share experts step together."""

    def read_experts(self, tokens: Array | float) -> Array:
        """Return the seconds to read the experts that so many tokens use."""
        moe = self.model.arch.moe
        if moe is None:
            return np.zeros(len(self.at.tp))
        routed = np.asarray(tokens * np.ones(len(self.at.tp)))
        return np.asarray(self.shared_s + self.experts_s * _share_experts(self.at, moe, routed))

    def multiply(self, tokens: Array | float) -> Array:
        """Return the seconds to multiply so many tokens by every weight that they use."""
        return np.asarray(2.0 * tokens * self.computed / self.at.tp / self.at.flops_per_s)

    def score_prompt(self, pairs: Array | float) -> Array:
        """Return the seconds of attention over so many pairs of a token and one that it sees, by all ranks."""
        arch = self.model.arch
        return np.asarray(4.0 * pairs * score_width(arch) * arch.num_layers / self.at.tp / self.at.flops_per_s)

    def attend_alone(self, tokens: Array | float, scores_s: Array) -> Array:
        """Return the further seconds of prompts that the ranks of one attention layer compute alone."""
        linear_s = 2.0 * self.attention * tokens / self.at.tp / self.at.flops_per_s
        return np.asarray((linear_s + scores_s) * (self.at.tp / self.at.attention_ranks - 1.0))

    def plan(self, sequences: Array, own: Array) -> Array:
        """Return the seconds that an engine takes for a step of so many sequences, `own` of them on each rank."""
        planned = self.host * (ENGINE_STEP_S + SEQUENCE_S * own + self.moe_layers * MOE_LAYER_S)
        return np.asarray(planned + (sequences > self.at.graphs) * self.launch(1.0))

    def launch(self, steps: Array | float) -> Array:
        """Return the seconds to launch the layers of so many steps without captured graphs."""
        layers = self.model.arch.num_layers + MOE_LAUNCHES * self.moe_layers
        return np.asarray(self.host * steps * layers * self.at.layer_s / self.at.pp)

    def communicate(self, tokens: Array | float) -> Array:
        """Return the seconds of a step's collectives for so many tokens."""
        arch, machine = self.model.arch, self.machine
        chosen = np.inf if arch.moe is None else float(arch.moe.top_k)
        summed = _sum_activations(self.at, machine, arch.num_layers, tokens * 2.0 * arch.hidden_size, chosen)
        if arch.moe is None:
            return summed
        sent = 2.0 * arch.hidden_size * np.minimum(arch.moe.top_k, np.maximum(self.at.ep, self.at.tp))
        return summed + _exchange_tokens(self.at, machine, self.moe_layers, tokens * sent)


def read_costs(card: Card, at: Replica) -> StepCosts:
    """Return the costs that tokens add to a step of each row."""
    model, machine = find_served(card), read_machine(card)
    arch, counts = model.arch, count_parts(model.arch)
    layers = arch.num_layers
    vendor = find_vendor(card.hardware.accelerator)
    bandwidth = machine.hbm_bytes_s * MEMORY_SHARE * vendor["memory"]
    head, mlp = counts.head + counts.embedding * arch.tied_embeddings, counts.dense_layers * counts.dense_mlp
    plain = other_weight_bytes(arch, at.weight_bytes)
    # the output projection is not quantized
    dense = (counts.attention * layers / at.attention_ranks + mlp / at.tp) * plain + head / at.tp * np.maximum(
        plain, UNQUANTIZED
    )
    computed = np.full(len(at.tp), float(counts.attention * layers + mlp + head))
    shared, experts, moe_layers = np.zeros(len(at.tp)), np.zeros(len(at.tp)), 0
    if arch.moe is not None:
        moe_layers = counts.moe_layers
        shared = moe_layers * counts.shared_experts / at.tp * plain
        experts = moe_layers * counts.experts * at.weight_bytes
        computed = computed + moe_layers * (counts.active_experts + counts.shared_experts)
    # each new token meets all that is held; latent keys are met as they are kept, by every head (absorbed weights)
    met = 2.0 * (score_width(arch) if arch.kv_lora_rank is None else arch.num_heads * cached_numbers(arch))
    return StepCosts(
        at=at,
        model=model,
        machine=machine,
        host=vendor["host"],
        moe_layers=moe_layers,
        attention=float(counts.attention * layers),
        computed=computed,
        dense_s=dense / bandwidth / at.reads,
        shared_s=shared / bandwidth / at.reads,
        experts_s=experts / bandwidth / at.reads * _find_narrow(arch, at),
        key_s=cached_numbers(arch) * layers * at.cache_bytes / cache_ranks(arch, at) / bandwidth,
        score_s=2.0 * met * layers / at.attention_ranks / at.flops_per_s,
        # a prompt of one is waited for by all, unless theirs come at once
        waits=np.where(at.ep > at.tp, TOGETHER + (1 - TOGETHER) * at.dp, 1.0),
    )


def compute_load(card: Card, at: Replica, concurrency: Array | float, input_len: float, output_len: float) -> LoadParts:
    """Return the parts of a closed loop of so many clients, or of a batch of so many requests."""
    costs = read_costs(card, at)
    model, replicas = costs.model, at.dp
    clients = np.maximum(concurrency / replicas, 1.0)
    batch = np.minimum(clients, at.sequences)
    group = pad(np.maximum(batch / at.pp, 1.0), at.batch_bucket)  # the stages work on different groups of sequences
    routed = group * np.where(at.ep > at.tp, replicas, 1.0)
    held = pad(np.full(len(at.tp), model.held_tokens(input_len + output_len / 2)), at.context_bucket)
    own = group * at.attention_ranks / at.tp  # with data-parallel attention each rank has a part of the sequences
    # half of the attention matrix is masked: input_len / 2 keys per token, two products
    given = input_len - at.cached
    scores = costs.score_prompt(given * model.held_tokens(input_len / 2) * (1 + at.cached / input_len))
    prompt = costs.multiply(given) + scores
    steps = np.ceil(given / at.tokens)
    reads = steps * (costs.dense_s + costs.read_experts(np.minimum(given, at.tokens)))
    slow, group_tokens = at.engine_time, group * at.checked
    each = slow / at.gain  # of a step, for each token of a sequence
    return LoadParts(
        batch=batch,
        waiting=clients - batch,
        replicas=replicas,
        accelerators=at.accelerators,
        weights=each * (costs.dense_s + costs.read_experts(routed * at.checked)),
        kv_cache=each * own * held * costs.key_s,
        products=each * (costs.multiply(group_tokens) + own * at.checked * held * costs.score_s),
        collectives=each * costs.communicate(group_tokens),
        engine=each * costs.plan(group, own),
        prefill=slow * costs.waits * np.maximum(prompt, reads) / at.pp,
        prefill_alone=slow * np.maximum(prompt + costs.attend_alone(given, scores), reads),
        prefill_collectives=slow * costs.waits * costs.communicate(given) / at.pp,
        prefill_engine=slow * costs.waits * costs.launch(steps),
        answer=np.full(len(at.tp), float(output_len)),
        request=costs.host * at.request_s,
        clients=np.broadcast_to(np.asarray(concurrency, dtype=np.float64), at.tp.shape),
        **dict.fromkeys(ADDED, np.zeros(len(at.tp))),
    )


def _find_narrow(arch: ModelArch, at: Replica) -> Array:
    """(N,) factor of the time to read experts that tensor-parallel ranks cut into narrow parts."""
    shares = np.maximum(at.tp / at.ep, 1.0)
    return np.asarray(1.0 + (shares - 1.0) * NARROW / (arch.moe.expert_intermediate_size if arch.moe else 1.0))


def _share_experts(at: Replica, moe: MoEArch, tokens: Array) -> Array:
    """Return the share of all experts that the rank with most of them reads for so many tokens."""
    ranks = np.maximum(at.ep, at.tp)
    own = moe.num_experts / ranks
    share = 1 - (1 - moe.top_k / moe.num_experts) ** tokens
    most = np.minimum(_find_most(share * own, at.ep), own) / own
    return np.asarray(np.where(at.ep > 1, most, share) / ranks)


def pad(number: Array, bucket: Array) -> Array:
    """Return the next multiple of the bucket; the number itself, which is a mean, if the bucket is 1."""
    return np.asarray(np.where(bucket > 1, np.ceil(number / bucket) * bucket, number))


def _find_most(mean: Array, ranks: Array) -> Array:
    """Return about how many items the fullest rank gets if they fall on ranks by chance with that mean (Gaussian)."""
    return np.asarray(mean + np.sqrt(2.0 * mean * np.log(np.maximum(ranks, 1.0))))


def _exchange_tokens(at: Replica, machine: Machine, layers: int, num_bytes: Array) -> Array:
    """Return the seconds that tokens take to their experts and back, if replicas share the experts."""
    inside = at.ep <= machine.node
    bandwidth = np.where(inside, machine.up_bytes_s, machine.out_bytes_s)
    latency = np.where(inside, machine.up_latency_s, machine.out_latency_s) + COLLECTIVE_S
    return np.asarray((at.ep > at.tp) * 2.0 * layers * (latency + num_bytes * (1.0 - 1.0 / at.ep) / bandwidth))


def cached_numbers(arch: ModelArch) -> float:
    """Return the numbers that the cache keeps of a token in one layer: keys and values, or a latent of both."""
    if arch.kv_lora_rank is not None:
        return float(arch.kv_lora_rank + (arch.qk_rope_head_dim or 0))
    return 2.0 * arch.num_kv_heads * arch.head_dim


def cache_ranks(arch: ModelArch, at: Replica) -> Array:
    """(N,) ranks that divide the cache of a sequence: each keeps whole heads, or the latent of all of them."""
    return np.minimum(at.attention_ranks, 1.0 if arch.kv_lora_rank is not None else arch.num_kv_heads)


def _sum_activations(at: Replica, machine: Machine, layers: int, num_bytes: Array | float, chosen: float) -> Array:
    """Return the seconds of a step's two collectives a layer over the tensor-parallel ranks, and of its transfers.

    Both are all-reduces, unless each rank attends to separate sequences: then the ranks gather tokens before the
    experts and sum them into their ranks after them, or send them only to their chosen experts, by the cheaper way.
    """
    inside = at.tp <= machine.node
    bandwidth = np.where(inside, machine.up_bytes_s, machine.out_bytes_s)
    latency = np.where(inside, machine.up_latency_s, machine.out_latency_s) + COLLECTIVE_S
    others = (at.tp - 1) / at.tp
    routed = np.where(at.ep > 1, np.minimum(chosen, at.ep) / at.tp, np.inf)
    share = np.where(at.attention_ranks < at.tp, np.minimum(others, routed), 2.0 * others)
    seconds = share * num_bytes / bandwidth + latency
    return 2.0 * layers * (at.tp > 1) * seconds + (at.pp - 1) * (num_bytes / bandwidth + latency)
