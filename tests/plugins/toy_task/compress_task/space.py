"""What the knobs mean, and a rule of the space."""

from __future__ import annotations

from typing import Any

from cclsearch.card.model import Card
from cclsearch.space.knobs import KnobMeaning, register_knob
from cclsearch.space.rule import Clause, register_rule

MIN_CHUNKS = 8
"""Chunks per worker: with fewer, workers wait for the slowest."""

register_knob(KnobMeaning("workers", "threads that compress chunks", "threads", minimum=1))
register_knob(KnobMeaning("chunk_kib", "bytes that are compressed at once", "KiB", minimum=1, label="chunk"))
register_knob(KnobMeaning("level", "effort of the compressor: 1 is the fastest, 9 compresses most", minimum=1))


@register_rule("chunks_cover_workers", "chunk_kib", "workers")
def chunks_cover_workers(card: Card, options: Any) -> Clause:
    """What is required, the check of whole columns, and the sentence about one configuration."""
    total_kib = card.number("total_mib") * 1024
    return (
        f"every worker gets at least {MIN_CHUNKS} chunks of the {total_kib} KiB",
        lambda at: at["chunk_kib"] * at["workers"] * MIN_CHUNKS <= total_kib,
        lambda config: f"{total_kib / config['chunk_kib']:g} chunks for {config['workers']} workers",
    )
