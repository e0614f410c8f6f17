"""The least memory with which a server starts: weights, the keys and values of one request, and the engine itself.

An engine takes a share of the device at any need, so a trial's peak does not show its need; whether it started does.
Weights and latent keys are divided as parallelism does it (Narayanan et al. 2021, section 3; vLLM and TensorRT-LLM
replicate the keys of latent attention on every tensor-parallel rank).
"""

from __future__ import annotations

import numpy as np

from cclsearch.card.arch import count_parts
from cclsearch.card.model import Card
from cclsearch.core.metrics import Direction, MetricInfo
from cclsearch.stats.calibration import Prior, RowModel
from cclsearch.stats.closed_form import ClosedForm, MemoryForm, Rows
from cclsearch.stats.kernel import KernelShape
from cclsearch.tasks.serving.closed_form.disaggregation import Deployment
from cclsearch.tasks.serving.closed_form.replica import UNQUANTIZED, Array, Replica, find_served, other_weight_bytes
from cclsearch.tasks.serving.closed_form.steps import cache_ranks, cached_numbers

MIN_MEMORY = MetricInfo(
    name="least_memory_gib",
    unit="GiB",
    direction=Direction.MINIMIZE,
    source="result",
    label="least memory",
    is_positive=True,
)
GIB = float(2**30)
PARTS = ("weights", "kv_cache", "engine", "unused")
"""`unused`: what a server leaves of the device by its `memory_fraction`, for so large a server."""
ENGINE_GIB = 1.0
"""GiB of a process with its libraries and captured graphs (our choice)."""
# Our choice; engines leave 5 to 10 % by default.
USABLE = 0.97
"""Share of the device's memory that one process can have."""
PRIOR = Prior(
    mean_P=np.zeros(len(PARTS)),
    sd_P=np.array([0.02, 0.3, 0.5, 0.02]),
    shape=KernelShape(0.02, 1.5, 0.01, 0.02),
    noise=0.02,
    dof=4.0,
)
"""Our choice: weights are counted, the rest is small beside them."""


def find_least_memory(card: Card, at: Replica, tokens: float) -> dict[str, Array]:
    """Return part -> (N,) GiB of the fullest accelerator, for weights, one request of so many tokens and the engine."""
    model = find_served(card)
    arch, counts = model.arch, count_parts(model.arch)
    plain = other_weight_bytes(arch, at.weight_bytes)
    outside = np.maximum(plain, UNQUANTIZED) * (counts.embedding * (not arch.tied_embeddings) + counts.head)
    tied = np.maximum(plain, UNQUANTIZED) * counts.embedding * arch.tied_embeddings
    layers = counts.attention * arch.num_layers / at.attention_ranks + counts.dense_layers * counts.dense_mlp / at.tp
    weights = layers * plain / at.pp + (outside / np.minimum(at.pp, 2.0) + tied) / at.tp
    if arch.moe is not None:
        shared = counts.shared_experts * plain / at.tp
        weights = weights + counts.moe_layers / at.pp * (
            counts.experts * at.weight_bytes / np.maximum(at.ep, at.tp) + shared
        )
    kept = cached_numbers(arch) * model.held_tokens(tokens) * arch.num_layers
    cache = kept / at.pp * at.cache_bytes / cache_ranks(arch, at)
    cache = cache * np.where(at.reserves > 0, at.sequences * at.attention_ranks / at.tp, 1.0)
    # of a layer at once: what enters and leaves its parts, and the logits of each sequence with their copy in 32 bits
    width = 4 * arch.hidden_size + 3 * arch.intermediate_size / at.tp
    step = 2.0 * at.tokens * width + 6.0 * np.minimum(at.sequences, at.tokens) * arch.vocab_size / at.tp
    need = {"weights": weights / GIB, "kv_cache": cache / GIB, "engine": ENGINE_GIB + step / GIB}
    share = np.minimum(at.memory_share, USABLE)
    return need | {"unused": sum(need.values()) * (USABLE / share - 1) * (at.limits_all > 0)}


def find_deployed_memory(card: Card, at: Deployment, tokens: float) -> dict[str, Array]:
    """Return the same of the fuller of a configuration's two kinds of workers, or of its servers that do both."""
    whole = find_least_memory(card, at.whole, tokens)
    if at.prefill is None or at.decode is None or at.is_apart is None:
        return whole
    prefill, decode = (find_least_memory(card, role, tokens) for role in (at.prefill, at.decode))
    is_fuller = sum(prefill.values()) > sum(decode.values())
    fuller = {name: np.where(is_fuller, prefill[name], decode[name]) for name in PARTS}
    return {name: np.where(at.is_apart, fuller[name], whole[name]) for name in PARTS}


def make_memory_form(card: Card, at: Deployment, tokens: float) -> MemoryForm:
    """Return the closed form of the least memory, and its limit."""
    need = find_deployed_memory(card, at, tokens)

    def log_cost(rows: Rows) -> RowModel:
        each = np.stack([need[name][rows] for name in PARTS])
        return lambda theta: np.asarray(np.log(np.einsum("...p,pn->...n", np.exp(np.asarray(theta)), each)))

    def split(theta_P: Array) -> dict[str, Array]:
        return {name: np.exp(theta_P[p]) * need[name] for p, name in enumerate(PARTS)}

    form = ClosedForm(MIN_MEMORY, PARTS, PRIOR, log_cost, split)
    return MemoryForm(form, float(np.log(USABLE * card.hardware.memory_gib)), is_measured=False, softness=0.02)


def count_cached_tokens(card: Card, at: Replica) -> Array:
    """(N,) most tokens whose keys and values a replica keeps: in the space's memory for the KV cache, else in the
    server's share of the device after weights and engine.
    """
    model, arch = find_served(card), find_served(card).arch
    length = float(card.work.get("input_len", 1024)) + float(card.work.get("output_len", 1024))
    of_layers = cached_numbers(arch) * arch.num_layers / at.pp * at.cache_bytes / cache_ranks(arch, at)
    of_token = of_layers * model.held_tokens(length) / length
    need = find_least_memory(card, at, length)
    left = at.memory_share * card.hardware.memory_gib - need["weights"] - need["engine"]
    gib = np.where(at.cache_gib > 0, at.cache_gib, np.maximum(left, 0.0))
    # each rank with sequences of its own has a cache of its own
    return np.asarray(gib * GIB / of_token * at.tp / at.attention_ranks)
