"""Space rules of serving and inference: what engines refuse about a step's tokens; `docs/rules.md` describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cclsearch.card.model import Card
from cclsearch.space.knobs import rank_degrees
from cclsearch.space.rule import Clause, register_rule


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


@register_rule("inside_tensor_parallelism", "tp", "ep", "attention_dp")
def _inside_tensor_parallelism(card: Card, options: Mapping[str, Any]) -> Clause:
    return (
        "ep and attention_dp divide tp: both are of the tensor-parallel ranks",
        lambda at: (at["tp"] % at["ep"] == 0) & (at["tp"] % at["attention_dp"] == 0),
        lambda c: f"ep {c['ep']} and attention_dp {c['attention_dp']} of tp {c['tp']}",
    )
