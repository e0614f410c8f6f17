"""Space rules of serving and inference: what engines refuse about a step's tokens; `docs/rules.md` describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cclsearch.card.model import Card
from cclsearch.space.rule import Clause, register_rule


@register_rule("step_holds_every_sequence", "max_num_batched_tokens", "max_num_seqs")
def _step_holds_every_sequence(card: Card, options: Mapping[str, Any]) -> Clause:
    return (
        "max_num_batched_tokens is at least max_num_seqs: a step computes a token of each sequence",
        lambda at: at["max_num_batched_tokens"] >= at["max_num_seqs"],
        lambda c: f"max_num_batched_tokens {c['max_num_batched_tokens']} for max_num_seqs {c['max_num_seqs']}",
    )
