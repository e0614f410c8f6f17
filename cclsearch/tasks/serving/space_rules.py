"""Space rules of serving and inference: engines' limits on a step's tokens; `docs/rules.md` describes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from cclsearch.card.hardware import PRECISION_BITS
from cclsearch.card.model import Card
from cclsearch.space.knobs import rank_degrees
from cclsearch.space.rule import BoolArray, Clause, Columns, Counts, register_rule
from cclsearch.tasks.serving.closed_form.replica import find_served


@register_rule("step_holds_every_sequence", "max_num_batched_tokens", "max_num_seqs")
def _step_holds_every_sequence(card: Card, options: Mapping[str, Any]) -> Clause:
    return (
        "max_num_batched_tokens is at least max_num_seqs: a step computes a token of each sequence",
        lambda at: at["max_num_batched_tokens"] >= at["max_num_seqs"],
        lambda c: f"max_num_batched_tokens {c['max_num_batched_tokens']} for max_num_seqs {c['max_num_seqs']}",
    )


@register_rule(
    "step_holds_a_request", "chunked_prefill", "max_num_batched_tokens", parameters={"of": list, "spare_tokens": int}
)
def _step_holds_a_request(card: Card, options: Mapping[str, Any]) -> Clause | None:
    """`of`: what the step must hold (prompt and answer if not given), and `spare_tokens` more."""
    names = options.get("of", ["input_len", "output_len"])
    if not all(isinstance(card.work.get(name), int) for name in names) or card.work.get("lengths", "fixed") != "fixed":
        return None
    longest = sum(card.number(name) for name in names) + options.get("spare_tokens", 0)
    return (
        f"without chunked_prefill, max_num_batched_tokens is at least {longest}: {' + '.join(names)} of a request",
        lambda at: (at["chunked_prefill"] == 1) | (at["max_num_batched_tokens"] >= longest),
        lambda c: f"max_num_batched_tokens {c['max_num_batched_tokens']} for a request of {longest}",
    )


@register_rule("blocks_divide_prefill_chunk", "block_size", "prefill_chunk", needs=("block_size", "prefill_chunk"))
def _blocks_divide_prefill_chunk(card: Card, options: Mapping[str, Any]) -> Clause:
    return (
        "block_size divides prefill_chunk",
        lambda at: at["prefill_chunk"] % at["block_size"] == 0,
        lambda c: f"prefill_chunk {c['prefill_chunk']} in blocks of {c['block_size']}",
    )


@register_rule("one_machine", rank_degrees, needs=())
def _one_machine(card: Card, options: Mapping[str, Any]) -> Clause | None:
    most = card.hardware.accelerators_per_node
    if card.hardware.num_accelerators <= most:
        return None
    return (
        f"a server has at most {most} accelerators, those of one machine",
        lambda at: at.product(rank_degrees()) <= most,
        lambda c: f"{c.product(rank_degrees())} accelerators of {most} on one machine",
    )


@register_rule("nodes_alike", rank_degrees, needs=(), parameters={"spreads_replicas": bool, "whole_stages": bool})
def _nodes_alike(card: Card, options: Mapping[str, Any]) -> Clause | None:
    """`spreads_replicas: true` if one server may have its replicas (`dp`) on several machines, `whole_stages: true` if
    a machine must have whole pipeline stages, or a stage whole machines."""
    most, spreads = card.hardware.accelerators_per_node, bool(options.get("spreads_replicas"))
    any_stages = not options.get("whole_stages")
    if card.hardware.num_accelerators <= most:
        return None

    def check(at: Columns) -> BoolArray:
        ranks, replica = at.product(rank_degrees()), at["tp"] * at["pp"]
        nodes = -(-ranks // most)
        local = np.maximum(ranks // nodes, 1)
        fits = (ranks % nodes == 0) & ((local % replica == 0) | (replica % local == 0))
        fits &= any_stages | (at["pp"] % nodes == 0) | (nodes % at["pp"] == 0)
        fits &= spreads | (replica == ranks)
        return np.asarray((nodes == 1) | fits)

    def explain(c: Counts) -> str:
        ranks = c.product(rank_degrees())
        return f"tp {c['tp']} x pp {c['pp']} of {ranks} accelerators on {-(-ranks // most)} machines"

    words = f"a server on several machines of {most} accelerators has as many on each, whole replicas or a part of one"
    words += "" if any_stages else ", whole stages or a part of one"
    return words + ("" if spreads else ", and has one replica"), check, explain


_ROLES = ("prefill", "decode")
_SIZES = ("prefill_gpus_per_worker", "decode_gpus_per_worker")


@register_rule("workers_add_up", "devices", "prefill_workers", "decode_workers", *_SIZES)
def _workers_add_up(card: Card, options: Mapping[str, Any]) -> Clause:
    return (
        "devices is prefill_workers x prefill_gpus_per_worker + decode_workers x decode_gpus_per_worker",
        lambda at: at["devices"] == at["prefill_workers"] * at[_SIZES[0]] + at["decode_workers"] * at[_SIZES[1]],
        lambda c: (
            f"{c['prefill_workers']} x {c[_SIZES[0]]} + {c['decode_workers']} x {c[_SIZES[1]]}"
            f" accelerators of {c['devices']}"
        ),
    )


@register_rule("workers_fit_machines", "prefill_workers", "decode_workers", *_SIZES)
def _workers_fit_machines(card: Card, options: Mapping[str, Any]) -> Clause:
    """Place workers as `launchers/serving_apart.py` does: large servers first, each on the first machine with room."""
    most = card.hardware.accelerators_per_node

    def check(at: Columns) -> BoolArray:
        front, back = at[_SIZES[0]], at[_SIZES[1]]
        is_first = front >= back
        large, small = np.where(is_first, front, back), np.where(is_first, back, front)
        num_large = np.where(is_first, at["prefill_workers"], at["decode_workers"])
        num_small = np.where(is_first, at["decode_workers"], at["prefill_workers"])
        a_machine, machines = most // large, -(-(num_large * large + num_small * small) // most)
        full, rest = np.divmod(num_large, np.maximum(a_machine, 1))
        room = full * ((most - a_machine * large) // small) + (rest > 0) * ((most - rest * large) // small)
        room += (machines - full - (rest > 0)) * (most // small)
        return np.asarray((a_machine > 0) & (full + (rest > 0) <= machines) & (num_small <= room))

    def explain(c: Counts) -> str:
        sizes = " and ".join(
            f"{c[f'{role}_workers']} servers of {c[size]}" for role, size in zip(_ROLES, _SIZES, strict=True)
        )
        return f"{sizes} on machines of {most} accelerators"

    return (
        f"each server is on one machine of {most} accelerators, and no more machines than devices need",
        check,
        explain,
    )


@register_rule("workers_divide_heads", *_SIZES)
def _workers_divide_heads(card: Card, options: Mapping[str, Any]) -> Clause:
    words, is_split = _split_heads(card)
    return (
        f"prefill_gpus_per_worker and decode_gpus_per_worker {words}",
        lambda at: is_split(at[_SIZES[0]]) & is_split(at[_SIZES[1]]),
        lambda c: f"the heads on {c[_SIZES[0]]} and {c[_SIZES[1]]} accelerators",
    )


def _split_heads(card: Card) -> tuple[str, Callable[[Any], Any]]:
    """Return what ranks that share one attention layer must satisfy, in words and as a check of their number.

    Engines give each rank whole heads of keys and values, or so many ranks one head. Latent keys belong to every rank.
    """
    arch = find_served(card).arch
    heads, kv = arch.num_heads, 1 if arch.kv_lora_rank is not None else arch.num_kv_heads
    words = f"divide the {heads} attention heads, and divide the {kv} KV heads or are a multiple of them"
    return words, lambda ranks: (heads % ranks == 0) & ((kv % ranks == 0) | (ranks % kv == 0))


def _attention_ranks(at: Any) -> Any:
    return np.where(at["dp_attention"] == 1, 1, np.maximum(at["tp"] // at["attention_dp"], 1))


@register_rule("attention_ranks_divide_heads", "tp", "attention_dp", "dp_attention")
def _attention_ranks_divide_heads(card: Card, options: Mapping[str, Any]) -> Clause:
    words, is_split = _split_heads(card)
    return (
        f"the ranks of one attention layer (tp, or tp / attention_dp, or 1 with dp_attention) {words}",
        lambda at: np.asarray(is_split(_attention_ranks(at))),
        lambda c: f"{card.arch.num_heads} heads, {card.arch.num_kv_heads} KV heads on {_attention_ranks(c)} ranks",
    )


Ranks = Callable[[Any], Any]
"""Knobs, of one configuration or as columns -> ranks that share a part of the model."""


@register_rule(
    "shards_hold_whole_blocks", "tp", "dp", "ep", "expert_parallel", "attention_dp", "dp_attention",
    parameters={"experts_over_dp": bool},
)  # fmt: skip
def _shards_hold_whole_blocks(card: Card, options: Mapping[str, Any]) -> Clause | None:
    """`experts_over_dp: true` if without expert parallelism tp x dp ranks share each expert, else tp / ep."""

    def expert_ranks(at: Any) -> Any:
        ranks = at["tp"] * at["dp"] if options.get("experts_over_dp") else np.maximum(at["tp"] // at["ep"], 1)
        return np.where(at["expert_parallel"] == 1, 1, ranks)

    return _hold_whole_blocks(card, (_attention_ranks, lambda at: at["tp"], expert_ranks))


@register_rule("workers_hold_whole_blocks", *_SIZES, "expert_parallel")
def _workers_hold_whole_blocks(card: Card, options: Mapping[str, Any]) -> Clause | None:
    def read(size: str) -> tuple[Ranks, Ranks, Ranks]:
        def ranks(at: Any) -> Any:
            return at[size]

        return ranks, ranks, lambda at: np.where(at["expert_parallel"] == 1, 1, at[size])

    return _hold_whole_blocks(card, *map(read, _SIZES))


def _hold_whole_blocks(card: Card, *layouts: tuple[Ranks, Ranks, Ranks]) -> Clause | None:
    """Each layout has the ranks of attention, of feed-forward layers and of an expert."""
    block, arch = card.weight_block, find_served(card).arch
    if not block:
        return None
    parts: list[tuple[str, int, Ranks]] = []
    for attention, linear, expert in layouts:
        parts.append(("attention output", arch.num_heads * (arch.v_head_dim or arch.head_dim), attention))
        if PRECISION_BITS.get(card.precision) == 8 and arch.kv_lora_rank is None:  # square blocks cut columns too
            keys = arch.num_kv_heads * arch.head_dim
            parts.append(("keys", keys, partial(_key_ranks, attention, arch.num_kv_heads)))
        if arch.moe is None or arch.moe.num_dense_layers:
            parts.append(("feed-forward", arch.intermediate_size, linear))
        if arch.moe is not None:
            parts.append(("expert", arch.moe.expert_intermediate_size, expert))
    return (
        f"each rank's share of a weight is whole quantization blocks of {block}",
        lambda at: np.logical_and.reduce([width % (block * ranks(at)) == 0 for _, width, ranks in parts]),
        lambda c: ", ".join(f"{name} {width} / {ranks(c)} = {width / ranks(c):g}" for name, width, ranks in parts),
    )


def _key_ranks(attention: Ranks, kv_heads: int, at: Any) -> Any:
    return np.minimum(attention(at), kv_heads)


@register_rule("dcp_shares_kv_heads", "dcp", "tp")
def _dcp_shares_kv_heads(card: Card, options: Mapping[str, Any]) -> Clause:
    arch = find_served(card).arch
    kv = 1 if arch.kv_lora_rank is not None else arch.num_kv_heads
    return (
        f"dcp divides tp and the {arch.num_heads // kv} query heads of a KV head, and is at most tp / {kv}",
        lambda at: (
            (at["dcp"] == 1)
            | (at["tp"] % at["dcp"] == 0) & (at["dcp"] <= at["tp"] // kv) & (arch.num_heads // kv % at["dcp"] == 0)
        ),
        lambda c: f"dcp {c['dcp']} with tp {c['tp']}",
    )


@register_rule("inside_tensor_parallelism", "tp", "ep", "attention_dp")
def _inside_tensor_parallelism(card: Card, options: Mapping[str, Any]) -> Clause:
    return (
        "ep and attention_dp divide tp: both are of the tensor-parallel ranks",
        lambda at: (at["tp"] % at["ep"] == 0) & (at["tp"] % at["attention_dp"] == 0),
        lambda c: f"ep {c['ep']} and attention_dp {c['attention_dp']} of tp {c['tp']}",
    )
