"""What each knob means: the one table that space, prediction, agent, command line and report read.

A plugin adds its own knobs, degrees of parallelism included:

    from cclsearch.space.knobs import KnobMeaning, register_knob

    register_knob(KnobMeaning("kv_cache_blocks", "blocks of the KV cache", minimum=1, unit="blocks"))
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass

from cclsearch.core.values import Value


@dataclass(frozen=True)
class KnobMeaning:
    """What a knob means in every framework that has it. A knob may also have no entry: then it is free."""

    name: str
    words: str
    """For people."""
    unit: str = ""
    neutral: Value = 1
    """Value of a configuration that does not have the knob."""
    minimum: int | None = None
    """Minimum of a knob whose choices are whole numbers; None for other knobs."""
    needs: tuple[str, ...] = ()
    """Degrees of parallelism; the knob has no effect if all of them are 1."""
    order: tuple[str, ...] = ()
    """Values that are text, in ascending order; numbers are always ordered."""
    aliases: str = ""
    """Names of the knob in other frameworks and in published policies, separated by blanks."""
    short: str = ""
    """Short names that users type, separated by blanks."""
    label: str = ""
    """Name in narrow columns and labels of charts; the name itself if empty."""
    splits: str = ""
    """For a degree of parallelism: its kind (`tensor` in `tensor_parallel_size`)."""
    multiplies_ranks: bool = False
    """Whether the number of ranks is a multiple of this degree."""
    is_stated: bool = False
    """Whether sentences about ranks name this degree even if a space does not have it (it is 1 then)."""


KNOBS: dict[str, KnobMeaning] = {}
"""Name -> meaning, in the order in which sentences name the degrees of parallelism."""
SHORT: dict[str, str] = {}
"""Short name that users type -> knob."""
_ALIASES: dict[str, str] = {}
_DEGREE = re.compile(
    r"(?:ici_|dcn_)?(?P<kind>[a-z]+?)_?(?:model_?)?parallel(?:ism)?(?:_(?:size|degree|world_size|dim))?"
    r"|(?P<name>[a-z]+)_(?:size|degree|dim|world_size)"
)
"""`tensor_parallel`, `tensor_model_parallel_size`, `pipeline_parallel_degree`, `tp_size`, ..."""


def register_knob(meaning: KnobMeaning) -> KnobMeaning:
    """Add a knob to the table; raises ValueError if it, or another knob, has one of its names already."""
    spellings = [meaning.name, *meaning.short.split(), *meaning.aliases.split()]
    if KNOBS.get(meaning.name, meaning) != meaning:
        raise ValueError(f"knob {meaning.name!r} is registered twice")
    for spelling in spellings:
        if _ALIASES.get(spelling, meaning.name) != meaning.name:
            raise ValueError(f"{spelling!r} is already a name of knob {_ALIASES[spelling]!r}")
    KNOBS[meaning.name] = meaning
    SHORT.update(dict.fromkeys(meaning.short.split(), meaning.name))
    _ALIASES.update(dict.fromkeys(spellings, meaning.name))
    return meaning


def meaning_of(name: str) -> KnobMeaning:
    """The meaning of the knob of exactly that name; that of a free knob if the table does not have it."""
    return KNOBS[name] if name in KNOBS else KnobMeaning(name, "")


def canonical_name(name: str) -> str:
    """The knob that a name or alias means; the name itself if the table does not have it."""
    if name in _ALIASES:
        return _ALIASES[name]
    spelled = _DEGREE.fullmatch(name)
    if spelled is None:
        return name
    degrees = (knob for knob in KNOBS.values() if knob.splits)
    return next((d.name for d in degrees if d.splits == spelled["kind"] or d.name == spelled["name"]), name)


def list_degrees() -> tuple[str, ...]:
    """The degrees of parallelism."""
    return tuple(knob.name for knob in KNOBS.values() if knob.splits)


def rank_degrees() -> tuple[str, ...]:
    """The degrees whose product is the number of ranks."""
    return tuple(knob.name for knob in KNOBS.values() if knob.multiplies_ranks)


def stated_knobs(knobs: Iterable[str], present: Container[str]) -> list[str]:
    """Those knobs that a sentence names: not a degree that few frameworks have, unless it is in `present`."""
    return [knob for knob in knobs if knob in present or meaning_of(knob).is_stated or not meaning_of(knob).splits]


def _degree(name: str, kind: str, words: str, *, multiplies: bool = True, stated: bool = True) -> KnobMeaning:
    return KnobMeaning(
        name, words, "ranks", minimum=1, splits=kind, multiplies_ranks=multiplies, is_stated=multiplies and stated
    )


for _meaning in (
    _degree("tp", "tensor", "tensor parallelism: ranks that share every layer"),
    _degree("dp", "data", "data parallelism: replicas that share the global batch"),
    _degree("pp", "pipeline", "pipeline parallelism: stages that share the layers"),
    _degree("cp", "context", "context parallelism: ranks that share every sequence", stated=False),
    # experts are spread over ranks that tp, cp and dp already count
    _degree("ep", "expert", "expert parallelism: ranks that share the experts", multiplies=False),
    KnobMeaning(
        "micro_batch_size",
        "sequences per forward pass and data-parallel rank",
        "sequences",
        minimum=1,
        aliases="microbatch microbatch_size micro_bs micro_batchsize micro_batch_size_per_gpu"
        " train_micro_batch_size_per_gpu micro_batch_per_gpu",
        short="mbs micro_batch",
        label="mb",
    ),
    KnobMeaning(
        "activation_checkpointing",
        "activations that the backward pass recomputes",
        neutral="none",
        order=("none", "minimal", "selective", "full"),
        aliases="recompute remat activation_recompute activation_checkpoint activation_ckpt act_ckpt act_checkpointing"
        " checkpointing gradient_checkpointing recomputation recompute_granularity recompute_activations"
        " activation_recomputation remat_policy ckpt",
        short="ac",
        label="ckpt",
    ),
    KnobMeaning(
        "zero_stage",
        "ZeRO stage: 1 shards optimizer states, 2 gradients too, 3 weights too",
        neutral=0,
        minimum=0,
        needs=("dp", "cp"),
        aliases="fsdp_level data_parallel_sharding zero_level zero_optimization_stage distributed_optimizer"
        " use_distributed_optimizer",
        short="zero",
        label="zero",
    ),
    KnobMeaning("fsdp", "whether weights are sharded (ZeRO stage 3)", neutral=False, needs=("dp", "cp")),
    KnobMeaning(
        "sequence_parallel",
        "whether tensor-parallel ranks share the sequence in norms and dropout",
        neutral=False,
        needs=("tp",),
        aliases="seq_parallel sequence_parallelism use_sequence_parallel",
        short="sp",
        label="sp",
    ),
    KnobMeaning(
        "virtual_pipeline",
        "model chunks per pipeline rank (interleaved 1F1B)",
        "chunks",
        minimum=1,
        needs=("pp",),
        aliases="virtual_stages virtual_pipeline_size interleaved_stages virtual_pp vp virtual_pipeline_stages"
        " virtual_pipeline_model_parallel_size",
        short="vpp",
    ),
    KnobMeaning(
        "overlap_grad_reduce",
        "whether gradients are reduced during the backward pass",
        neutral=False,
        needs=("dp", "cp"),
    ),
    KnobMeaning(
        "compile", "whether layers are compiled", neutral=False, aliases="compile_mode torch_compile use_compile"
    ),
):
    register_knob(_meaning)
