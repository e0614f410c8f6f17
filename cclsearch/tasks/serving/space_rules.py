"""Space rules of serving and inference: engines' limits on a step's tokens; `docs/rules.md` describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cclsearch.card.model import Card
from cclsearch.space.knobs import rank_degrees
from cclsearch.space.rule import BoolArray, Clause, Columns, Counts, register_rule


@register_rule("step_holds_every_sequence", "max_num_batched_tokens", "max_num_seqs")
def _step_holds_every_sequence(card: Card, options: Mapping[str, Any]) -> Clause:
    return (
        "max_num_batched_tokens is at least max_num_seqs: a step computes a token of each sequence",
        lambda at: at["max_num_batched_tokens"] >= at["max_num_seqs"],
        lambda c: f"max_num_batched_tokens {c['max_num_batched_tokens']} for max_num_seqs {c['max_num_seqs']}",
    )


@register_rule("step_holds_a_request", "chunked_prefill", "max_num_batched_tokens")
def _step_holds_a_request(card: Card, options: Mapping[str, Any]) -> Clause | None:
    given = [card.work.get("input_len"), card.work.get("output_len")]
    if not all(isinstance(each, int) for each in given) or card.work.get("lengths", "fixed") != "fixed":
        return None
    longest = card.number("input_len") + card.number("output_len")
    return (
        f"without chunked_prefill, max_num_batched_tokens is at least {longest}, the tokens of a request",
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
    heads = card.arch.num_heads
    return (
        f"prefill_gpus_per_worker and decode_gpus_per_worker divide the {heads} attention heads",
        lambda at: (heads % at[_SIZES[0]] == 0) & (heads % at[_SIZES[1]] == 0),
        lambda c: f"{heads} attention heads on {c[_SIZES[0]]} and {c[_SIZES[1]]} accelerators",
    )


@register_rule("inside_tensor_parallelism", "tp", "ep", "attention_dp")
def _inside_tensor_parallelism(card: Card, options: Mapping[str, Any]) -> Clause:
    return (
        "ep and attention_dp divide tp: both are of the tensor-parallel ranks",
        lambda at: (at["tp"] % at["ep"] == 0) & (at["tp"] % at["attention_dp"] == 0),
        lambda c: f"ep {c['ep']} and attention_dp {c['attention_dp']} of tp {c['tp']}",
    )
