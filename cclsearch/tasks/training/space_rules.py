"""Space rules of training: batch and sequence, ZeRO, sequence parallelism and virtual pipelines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cclsearch.card.model import Card
from cclsearch.space.degree_rules import register_divides
from cclsearch.space.knobs import stated_knobs
from cclsearch.space.rule import Clause, register_rule


@register_rule("accumulation_whole", "dp", "micro_batch_size", needs=())
def _accumulation_whole(card: Card, options: Mapping[str, Any]) -> Clause:
    batch = card.number("global_batch_size")
    return (
        f"gradient accumulation, global batch {batch} / (dp x micro_batch_size), is a whole number of at least 1",
        lambda at: batch % (at["dp"] * at["micro_batch_size"]) == 0,
        lambda c: (
            f"global batch {batch} / (dp {c['dp']} x micro_batch_size {c['micro_batch_size']}) is "
            f"{batch / (c['dp'] * c['micro_batch_size']):g}"
        ),
    )


@register_rule("micro_batches_cover_stages", "pp", "dp", "micro_batch_size")
def _micro_batches_cover_stages(card: Card, options: Mapping[str, Any]) -> Clause:
    batch = card.number("global_batch_size")
    return (
        "a pipeline has at least as many micro-batches as stages",
        lambda at: (at["pp"] == 1) | (batch >= at["pp"] * at["dp"] * at["micro_batch_size"]),
        lambda c: f"{batch / (c['dp'] * c['micro_batch_size']):g} micro-batches for pp {c['pp']}",
    )


# for frameworks whose tensor parallelism always shards the sequence too
register_divides("tp_divides_sequence", "tp", lambda card: card.number("seq_len"), "tokens of a sequence")


@register_rule("cp_divides_sequence", "cp", "tp", parameters=("tp", "block"))
def _cp_divides_sequence(card: Card, options: Mapping[str, Any]) -> Clause:
    """Two chunks of a sequence per rank balance a causal mask.

    `tp: true` if tensor-parallel ranks shard a chunk too, `block: N` if a rank's tokens are a multiple of N.
    """
    length, block = card.number("seq_len"), int(options.get("block", 1))
    degrees = ["cp", "tp"] if options.get("tp") else ["cp"]
    return (
        f"with cp above 1, 2 x {' x '.join(degrees)} divides the {length} tokens of a sequence"
        + (f", and so does {block} x cp" if block > 1 else ""),
        lambda at: (at["cp"] == 1) | ((length % (2 * at.product(degrees)) == 0) & (length % (block * at["cp"]) == 0)),
        lambda c: (
            f"{length} tokens / (2 x {c.describe(degrees)}) = {length / (2 * c.product(degrees)):g}"
            + (f", / ({block} x cp {c['cp']}) = {length / (block * c['cp']):g}" if block > 1 else "")
        ),
    )


@register_rule("moe_tp_divides_tokens", "tp", "micro_batch_size")
def _moe_tp_divides_tokens(card: Card, options: Mapping[str, Any]) -> Clause | None:
    length = card.number("seq_len")
    if card.arch.moe is None:
        return None
    return (
        "in a mixture of experts tp divides the tokens of a micro-batch",
        lambda at: (at["micro_batch_size"] * length) % at["tp"] == 0,
        lambda c: f"{c['micro_batch_size']} sequences of {length} tokens with tp {c['tp']}",
    )


@register_rule("zero_needs_accelerators", "zero_stage")
def _zero_needs_accelerators(card: Card, options: Mapping[str, Any]) -> Clause | None:
    if card.hardware.chip.kind != "cpu":
        return None
    return (
        "the framework shards on accelerators only: zero_stage is 0 on CPUs",
        lambda at: at["zero_stage"] == 0,
        lambda c: f"zero_stage {c['zero_stage']} on CPUs",
    )


@register_rule("zero_needs_dp", "zero_stage", "dp", "cp", parameters=("least",))
def _zero_needs_dp(card: Card, options: Mapping[str, Any]) -> Clause:
    least = int(options.get("least", 1))
    shards = " x ".join(stated_knobs(("dp", "cp"), options.get("knobs", ())))
    return (
        f"zero_stage of {least} or more needs {shards} above 1: otherwise it changes nothing and equals stage"
        f" {least - 1}",
        lambda at: (at["zero_stage"] < least) | (at["dp"] * at["cp"] > 1),
        lambda c: f"zero_stage {c['zero_stage']} with {c.describe(('dp', 'cp'))}",
    )


@register_rule("zero_limited_by_pp", "zero_stage", "pp", parameters=("most",))
def _zero_limited_by_pp(card: Card, options: Mapping[str, Any]) -> Clause:
    most = int(options.get("most", 1))
    return (
        f"with pp above 1 zero_stage is at most {most}",
        lambda at: (at["pp"] == 1) | (at["zero_stage"] <= most),
        lambda c: f"zero_stage {c['zero_stage']} with pp {c['pp']}",
    )


@register_rule("replicas_hold_every_expert", "ep", "zero_stage", "tp", needs=("ep", "zero_stage", "tp"))
def _replicas_hold_every_expert(card: Card, options: Mapping[str, Any]) -> Clause:
    """torchtitan's sparse mesh is dp_shard x tp ranks, `efsdp = dp_shard * tp // ep` (parallel_dims.py)."""
    return (
        "at zero_stage 0 ep divides tp: experts are never spread over the dp ranks that replicate the model",
        lambda at: (at["zero_stage"] > 0) | (at["tp"] % at["ep"] == 0),
        lambda c: f"zero_stage {c['zero_stage']} with ep {c['ep']} and tp {c['tp']}",
    )


@register_rule("sequence_parallel_needs_tp", "sequence_parallel", "tp")
def _sequence_parallel_needs_tp(card: Card, options: Mapping[str, Any]) -> Clause:
    return (
        "sequence_parallel needs tp above 1: otherwise it changes nothing",
        lambda at: (at["sequence_parallel"] == 0) | (at["tp"] > 1),
        lambda c: f"sequence_parallel {bool(c['sequence_parallel'])} with tp {c['tp']}".lower(),
    )


@register_rule("sequence_parallel_divides_sequence", "sequence_parallel", "tp", "cp")
def _sequence_parallel_divides_sequence(card: Card, options: Mapping[str, Any]) -> Clause:
    length = card.number("seq_len")
    shares = " x ".join(stated_knobs(("tp", "cp"), options.get("knobs", ())))
    return (
        f"with sequence_parallel {shares} divides the sequence of {length}",
        lambda at: (at["sequence_parallel"] == 0) | (length % (at["tp"] * at["cp"]) == 0),
        lambda c: f"sequence of {length} with {c.describe(('tp', 'cp'))}",
    )


@register_rule("moe_tp_needs_sequence_parallel", "sequence_parallel", "tp")
def _moe_tp_needs_sequence_parallel(card: Card, options: Mapping[str, Any]) -> Clause | None:
    if card.arch.moe is None:
        return None
    return (
        "a mixture of experts with tp above 1 needs sequence_parallel",
        lambda at: (at["tp"] == 1) | (at["sequence_parallel"] == 1),
        lambda c: f"sequence_parallel {bool(c['sequence_parallel'])} with tp {c['tp']}".lower(),
    )


@register_rule("virtual_pipeline_needs_pp", "virtual_pipeline", "pp", parameters=("least_pp",))
def _virtual_pipeline_needs_pp(card: Card, options: Mapping[str, Any]) -> Clause:
    least = int(options.get("least_pp", 2))
    return (
        f"virtual_pipeline above 1 needs pp of at least {least}",
        lambda at: (at["virtual_pipeline"] == 1) | (at["pp"] >= least),
        lambda c: f"virtual_pipeline {c['virtual_pipeline']} with pp {c['pp']}",
    )


@register_rule("virtual_pipeline_divides_layers", "virtual_pipeline", "pp")
def _virtual_pipeline_divides_layers(card: Card, options: Mapping[str, Any]) -> Clause:
    layers = card.arch.num_layers
    return (
        f"pp x virtual_pipeline divides the {layers} layers",
        lambda at: (at["virtual_pipeline"] == 1) | (layers % (at["pp"] * at["virtual_pipeline"]) == 0),
        lambda c: (
            f"{layers} layers / (pp {c['pp']} x virtual_pipeline {c['virtual_pipeline']}) = "
            f"{layers / (c['pp'] * c['virtual_pipeline']):g} per chunk"
        ),
    )


@register_rule("virtual_pipeline_micro_batches", "virtual_pipeline", "pp", "dp", "micro_batch_size")
def _virtual_pipeline_micro_batches(card: Card, options: Mapping[str, Any]) -> Clause:
    batch = card.number("global_batch_size")
    return (
        "with virtual_pipeline above 1 the micro-batches are a multiple of pp",
        lambda at: (at["virtual_pipeline"] == 1) | (batch % at.product(("dp", "micro_batch_size", "pp")) == 0),
        lambda c: (
            f"{batch / (c['dp'] * c['micro_batch_size']):g} micro-batches "
            f"with pp {c['pp']} and virtual_pipeline {c['virtual_pipeline']}"
        ),
    )
