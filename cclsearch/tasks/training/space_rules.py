"""Space rules of training: batch and sequence, ZeRO and its replicas, sequence parallelism and pipelines.

They state frameworks' refusals; `docs/rules.md` describes them, and framework files name the source of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cclsearch.card.model import Card
from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line
from cclsearch.space.degree_rules import register_divides
from cclsearch.space.knobs import stated_knobs
from cclsearch.space.rule import Clause, Columns, RuleKind, register_rule
from cclsearch.tasks.training.stages import FORMS, SplitChoice, is_legal, read_split


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


@register_rule("micro_batches_cover_stages", "pp", "dp", "micro_batch_size", parameters={"short": int})
def _micro_batches_cover_stages(card: Card, options: Mapping[str, Any]) -> Clause:
    """`short: N` if there may be N micro-batches fewer than stages."""
    batch, short = card.number("global_batch_size"), int(options.get("short", 0))
    return (
        "a pipeline has at least as many micro-batches as stages" + (f" less {short}" if short else ""),
        lambda at: (at["pp"] == 1) | (batch >= (at["pp"] - short) * at["dp"] * at["micro_batch_size"]),
        lambda c: f"{batch / (c['dp'] * c['micro_batch_size']):g} micro-batches for pp {c['pp']}",
    )


# for frameworks whose tensor parallelism always shards the sequence too
register_divides("tp_divides_sequence", "tp", lambda card: card.number("seq_len"), "tokens of a sequence")


@register_rule("cp_divides_sequence", "cp", "tp", parameters={"tp": bool, "block": int})
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


@register_rule("zero_limited_by_pp", "zero_stage", "pp", parameters={"most": int})
def _zero_limited_by_pp(card: Card, options: Mapping[str, Any]) -> Clause:
    most = int(options.get("most", 1))
    return (
        f"with pp above 1 zero_stage is at most {most}",
        lambda at: (at["pp"] == 1) | (at["zero_stage"] <= most),
        lambda c: f"zero_stage {c['zero_stage']} with pp {c['pp']}",
    )


@register_rule(
    "shards_hold_every_expert", "ep", "zero_stage", "dp", "dp_replicate", "cp", "tp", needs=("ep", "zero_stage", "tp")
)
def _shards_hold_every_expert(card: Card, options: Mapping[str, Any]) -> Clause:
    """Rule for frameworks that never spread experts over the dp ranks that replicate the model."""
    present = options.get("knobs", ())
    shards = " x ".join(stated_knobs(("cp", "tp"), present))
    of_dp = "dp / dp_replicate" if "dp_replicate" in present else "dp"
    return (
        f"ep divides the ranks that shard one replica: {shards} at zero_stage 0, else {shards} x {of_dp}",
        lambda at: (_sharding_ranks(at) * at.product(("cp", "tp"))) % at["ep"] == 0,
        lambda c: f"zero_stage {c['zero_stage']} with ep {c['ep']} and {c.describe(('dp', 'cp', 'tp'))}",
    )


def _sharding_ranks(at: Columns) -> NDArray[np.int64]:
    """(N,) data-parallel ranks that share one replica of the weights."""
    return np.where(at["zero_stage"] > 0, at["dp"] // np.minimum(at["dp_replicate"], at["dp"]), 1)


@register_rule("dp_replicate_divides_dp", "dp_replicate", "dp")
def _dp_replicate_divides_dp(card: Card, options: Mapping[str, Any]) -> Clause:
    return (
        "dp_replicate divides dp: the rest of dp shards the weights",
        lambda at: at["dp"] % at["dp_replicate"] == 0,
        lambda c: f"dp {c['dp']} / dp_replicate {c['dp_replicate']} = {c['dp'] / c['dp_replicate']:g}",
    )


@register_rule("dp_replicate_below_dp", "dp_replicate", "dp", "cp", kind=RuleKind.SAME)
def _dp_replicate_below_dp(card: Card, options: Mapping[str, Any]) -> Clause:
    return (
        "dp_replicate above 1 is below dp x cp: if all dp ranks are replicas, it is the same as zero_stage=0",
        lambda at: (at["dp_replicate"] == 1) | (at["dp_replicate"] < at["dp"] * at["cp"]),
        lambda c: f"dp_replicate {c['dp_replicate']} of {c.describe(('dp', 'cp'))}",
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


@register_rule("virtual_pipeline_at_most_layers", "virtual_pipeline", "pp", parameters={"ends": bool})
def _virtual_pipeline_at_most_layers(card: Card, options: Mapping[str, Any]) -> Clause:
    """Rule on virtual stages; with `ends: true` the embedding and the loss may be chunks of their own."""
    layers, ends = card.arch.num_layers, 2 if options.get("ends") else 0
    return (
        f"with virtual_pipeline above 1, pp x virtual_pipeline is at most the {layers} layers"
        + (", embedding and loss" if ends else ""),
        lambda at: (at["virtual_pipeline"] == 1) | (at["pp"] * at["virtual_pipeline"] <= layers + ends),
        lambda c: (
            f"{layers} layers / (pp {c['pp']} x virtual_pipeline {c['virtual_pipeline']}) = "
            f"{layers / (c['pp'] * c['virtual_pipeline']):g} per chunk"
        ),
    )


@register_rule(
    "virtual_pipeline_micro_batches", "virtual_pipeline", "pp", "dp", "micro_batch_size", parameters={"rounds": bool}
)
def _virtual_pipeline_micro_batches(card: Card, options: Mapping[str, Any]) -> Clause:
    """`rounds: true` if micro-batches need only fill whole rounds of pp or more each."""
    batch, rounds = card.number("global_batch_size"), bool(options.get("rounds"))

    def check(at: Columns) -> NDArray[np.bool_]:
        micro_batches = np.maximum(batch // at.product(("dp", "micro_batch_size")), 1)
        divisor = np.maximum(micro_batches // at["pp"], 1) if rounds else at["pp"]
        return np.asarray((at["virtual_pipeline"] == 1) | (micro_batches % divisor == 0))

    what = "are a multiple of their rounds (micro-batches / pp, rounded down)" if rounds else "are a multiple of pp"
    return (
        f"with virtual_pipeline above 1 the micro-batches {what}",
        check,
        lambda c: (
            f"{batch / (c['dp'] * c['micro_batch_size']):g} micro-batches "
            f"with pp {c['pp']} and virtual_pipeline {c['virtual_pipeline']}"
        ),
    )


@register_rule("stage_layers_fit", "stage_layers", "pp", "virtual_pipeline")
def _stage_layers_fit(card: Card, options: Mapping[str, Any]) -> Clause:
    layers = card.arch.num_layers

    def check(at: Columns) -> NDArray[np.bool_]:
        choices = [_read_stages(text) for text in at.texts("stage_layers")]
        stages, single = at["pp"].tolist(), (at["virtual_pipeline"] == 1).tolist()
        return np.array(
            [
                choice == SplitChoice() or (one and is_legal(choice, layers, pp))
                for choice, pp, one in zip(choices, stages, single, strict=True)
            ],
            dtype=bool,
        )

    return (
        f"stage_layers gives each of the pp stages at least one of the {layers} layers, all of them together, without"
        " virtual_pipeline",
        check,
        lambda c: f"stage_layers {c.text('stage_layers')} with {c.describe(('pp', 'virtual_pipeline'), ', ')}",
    )


def _read_stages(text: str) -> SplitChoice:
    choice = read_split(text)
    if choice is None:
        raise UserError(f"stage_layers must be {FORMS}, not {one_line(repr(text), 60)}")
    return choice
