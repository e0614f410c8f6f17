"""The table of knob meanings: names, aliases, order, what a knob needs, and knobs that a plugin adds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cclsearch.card.load import load_card
from cclsearch.core.content import list_frameworks
from cclsearch.core.errors import UserError
from cclsearch.propose.agent.policy.knob_aliases import find_knob
from cclsearch.report.predicted import shorten_labels
from cclsearch.space import knobs
from cclsearch.space.build import build_space, explain_config
from cclsearch.space.framework import load_framework
from cclsearch.space.knobs import (
    KNOBS,
    KnobMeaning,
    canonical_name,
    list_degrees,
    meaning_of,
    rank_degrees,
    register_knob,
    stated_knobs,
)
from cclsearch.space.parse import parse_knob
from cclsearch.space.rule import RULES, Columns, Counts
from cclsearch.space.table import Knob, Space, count_ranks, space_from_rows
from cclsearch.stats.kernel import read_features
from cclsearch.tasks.training.layout import read_layout

FREE = {
    *("nccl_algo", "nccl_proto", "nccl_min_ctas", "nccl_nvls", "attention", "optimizer", "inductor_autotune"),
    *("xla_collective_fusion", "xla_data_parallel_overlap", "xla_vmem_limit", "pair_seconds"),
}
"""Knobs of shipped frameworks without a meaning of their own: only the run script or a library reads them."""


@pytest.fixture
def table() -> Iterator[None]:
    """The table; knobs that the test adds are taken out again."""
    parts: tuple[dict[str, Any], ...] = (knobs.KNOBS, knobs.SHORT, knobs._ALIASES)
    kept = [dict(part) for part in parts]
    yield
    for part, before in zip(parts, kept, strict=True):
        part.clear()
        list_degrees.cache_clear()
        rank_degrees.cache_clear()
        part.update(before)


def make_space(*rows: dict[str, Any]) -> Space:
    """A space of these rows, whose knobs have the choices that occur in them."""
    choices = {name: tuple(sorted({row[name] for row in rows}, key=str)) for name in rows[0]}
    return space_from_rows([Knob(name, values) for name, values in choices.items()], rows)


@pytest.mark.parametrize("name", list_frameworks())
def test_every_knob_of_a_shipped_framework_has_a_meaning_or_is_free(name):
    framework = load_framework(name)
    declared = [*framework.knobs, *framework.optional_knobs]
    assert {knob.name for knob in declared if knob.name not in KNOBS and not knob.lever} <= FREE
    assert [knob.name for knob in framework.levers if not (knob.description and knob.source)] == []
    assert {knob.name for knob in declared if knob.env and not knob.lever} <= FREE


@pytest.mark.parametrize("meaning", KNOBS.values(), ids=list(KNOBS))
def test_an_entry_is_consistent(meaning):
    assert meaning.words
    assert canonical_name(meaning.name) == meaning.name
    assert {canonical_name(alias) for alias in (*meaning.aliases, *meaning.short)} <= {meaning.name}
    assert set(meaning.needs) <= set(list_degrees())
    assert bool(meaning.splits) == (meaning.unit == "ranks")
    if meaning.minimum is not None:
        assert isinstance(meaning.neutral, int)
        assert meaning.neutral >= meaning.minimum
    if meaning.order:
        assert meaning.neutral == meaning.order[0]


def test_degrees_are_declared_once():
    assert list_degrees() == ("tp", "dp", "pp", "cp", "devices", "ep")
    assert rank_degrees() == ("tp", "dp", "pp", "cp", "devices")
    assert stated_knobs(rank_degrees(), ()) == ["tp", "dp", "pp"]
    assert stated_knobs(rank_degrees(), {"cp"}) == ["tp", "dp", "pp", "cp"]
    assert count_ranks({"tp": 2, "dp": 3, "cp": 5, "ep": 3}) == 30


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("tensor_parallel", "tp"),
        ("tensor_model_parallel_size", "tp"),
        ("ici_tensor_parallelism", "tp"),
        ("tp_size", "tp"),
        ("dcn_data_parallelism", "dp"),
        ("dp_world_size", "dp"),
        ("pipeline_parallel_degree", "pp"),
        ("cp_degree", "cp"),
        ("expert_model_parallel_size", "ep"),
        ("mbs", "micro_batch_size"),
        ("train_micro_batch_size_per_gpu", "micro_batch_size"),
        ("recompute_granularity", "activation_checkpointing"),
        ("zero_optimization_stage", "zero_stage"),
        ("use_distributed_optimizer", "zero_stage"),
        ("virtual_pipeline_model_parallel_size", "virtual_pipeline"),
        ("batch_size", "batch_size"),
        ("expert_tensor_parallel_size", "expert_tensor_parallel_size"),
    ],
)
def test_a_knob_is_found_by_the_names_of_other_frameworks(alias, name):
    assert canonical_name(alias) == name
    space = make_space({name: 1}, {name: 2})
    assert find_knob(space, alias) == find_knob(space, alias.upper().replace("_", "-")) == space.knobs[0]
    other = make_space({alias: 1}, {alias: 2})
    assert other.find(name) == other.knobs[0], "a recording may use the other name"


def test_the_exact_name_comes_before_an_alias():
    space = make_space({"zero": 1, "zero_stage": 2})
    assert space.find("zero_stage") == space.knobs[1]
    assert space.find("tp") is None


def test_a_missing_knob_is_neutral_and_a_free_knob_is_one():
    assert [Columns({}, 1)[name].tolist() for name in ("tp", "cp", "zero_stage", "sequence_parallel", "free")] == [
        *([1], [1], [0], [0], [1]),
    ]
    assert Counts({"cp": 2}).describe(("tp", "cp")) == "tp 1 x cp 2"
    assert Counts({}).describe(("tp", "cp")) == "tp 1"


@pytest.mark.parametrize(
    ("knob", "ordered"),
    [
        (Knob("tp", (4, 1, 2)), (1, 2, 4)),
        (Knob("anything", (0.5, 0.1)), (0.1, 0.5)),
        (Knob("activation_checkpointing", ("full", "none", "selective")), ("none", "selective", "full")),
        (Knob("remat", ("minimal", "full", "none")), ("none", "minimal", "full")),
        (Knob("activation_checkpointing", ("full", "custom")), None),
        (Knob("activation_checkpointing", (False, True)), None),
        (Knob("nccl_algo", ("Tree", "Ring")), None),
        (Knob("mixed", (1, "auto")), None),
    ],
)
def test_numbers_and_declared_text_have_an_order(knob, ordered):
    assert knob.ordered_choices == ordered


def test_an_order_of_text_does_not_change_the_features_of_the_surrogate():
    space = make_space(*({"activation_checkpointing": word} for word in ("none", "selective", "full")))
    assert read_features(space).numbers_ND.shape == (3, 0)
    assert len(set(read_features(space).categories_NC[:, 0].tolist())) == 3


def test_a_knob_without_effect_does_not_distinguish_configurations():
    space = make_space(*({"dp": dp, "cp": cp, "zero_stage": zero} for dp in (1, 2) for cp in (1, 2) for zero in (0, 1)))
    stage = [k.name for k in space.knobs].index("zero_stage")
    codes = read_features(space).categories_NC[:, stage].reshape(2, 2, 2)
    assert codes[0, 0].tolist() == [0, 0], "neither dp nor cp shards anything"
    assert codes[0, 1].tolist() == codes[1, 0].tolist() == codes[1, 1].tolist() == [0, 1]


def test_labels_name_every_degree_and_what_differs():
    configs = [
        {"tp": 2, "cp": 4, "micro_batch_size": 1, "activation_checkpointing": word, "zero_stage": 1, "flag": word}
        for word in ("none", "full")
    ]
    assert shorten_labels(configs) == ["tp=2 cp=4 ckpt=none flag=none", "tp=2 cp=4 ckpt=full flag=full"]


def test_the_prediction_reads_a_recordings_own_names():
    card = load_card("wl2")
    names = make_space({"tensor_parallel_size": 4, "mbs": 2, "distributed_optimizer": True, "recompute": "full"})
    layout = read_layout(card, names)
    assert [layout.tp[0], layout.micro_batch[0], layout.zero[0], layout.recompute[0]] == [4, 2, 1, 1]
    assert layout.declares_sharding
    assert read_layout(card, make_space({"fsdp": True}, {"fsdp": False})).zero.tolist() == [3, 0]


@pytest.mark.usefixtures("table")
def test_a_knob_of_a_plugin_is_known_everywhere():
    register_knob(
        KnobMeaning("kv_blocks", "blocks of the cache", minimum=2, label="kv", aliases=("cache_blocks",), short=("kb",))
    )
    card, framework = load_card("wl2"), load_framework("megatron")
    with pytest.raises(UserError, match="'kv_blocks' takes whole numbers from 2"):
        build_space(card, framework, [parse_knob("kb=1,2")])
    space = build_space(card, framework, [parse_knob("kb=2,4")])
    assert find_knob(space, "cache-blocks") == Knob("kv_blocks", (2, 4), "blocks of the cache")
    assert shorten_labels([{"kv_blocks": 2}, {"kv_blocks": 4}]) == ["kv=2", "kv=4"]


@pytest.mark.usefixtures("table")
def test_a_degree_of_a_plugin_multiplies_the_ranks():
    register_knob(KnobMeaning("xp", "toy", "ranks", minimum=1, splits="extra", multiplies_ranks=True))
    card, framework = load_card("wl2"), load_framework("megatron")
    config = {"tp": 2, "dp": 2, "pp": 2, "xp": 2}
    assert count_ranks(config) == 16
    extra = [parse_knob("xp=1,2")]
    space = build_space(card, framework, extra)
    assert set(space.num_accelerators_N.tolist()) == {16}
    verdicts = {verdict.rule: verdict for verdict in explain_config(card, framework, config, extra)}
    assert verdicts["num_accelerators"].detail == "tp 2 x dp 2 x pp 2 x xp 2 is 16 of 16 accelerators"
    assert verdicts["num_accelerators"].summary == "tp x dp x pp x xp is 16, the number of accelerators"
    assert canonical_name("extra_parallel_size") == "xp"
    rule = RULES["num_accelerators"](card, {"knobs": ("xp", "workers")})
    assert rule.summary == "xp is 16, the number of accelerators", "the space has none of the other degrees"
    assert rule.explain({"xp": 2, "workers": 4}) == "xp 2 is 2 of 16 accelerators"


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    "meaning",
    [
        KnobMeaning("tp", "something else"),
        KnobMeaning("mine", "uses a name of another", aliases=("recompute",)),
        KnobMeaning("mbs", "is a short name of another"),
    ],
)
def test_a_name_means_one_knob(meaning):
    with pytest.raises(ValueError, match=r"registered twice|already a name of knob"):
        register_knob(meaning)
    assert meaning_of("tp").splits == "tensor"
    assert "mine" not in knobs.KNOBS
    assert register_knob(KNOBS["tp"]) == KNOBS["tp"], "a second import of a plugin is no conflict"


def test_the_command_shows_order_and_unit(cli):
    knobs = ["--knob", "ac=full,none", "--knob", "tp=4,1"]
    shown = cli.out(["space", "--workload", "wl2", "--framework", "megatron", *knobs])
    lines = [line.split() for line in shown.splitlines()]
    assert ["activation_checkpointing", "none", "<", "full"] in lines
    assert ["tp", "1,", "4", "ranks"] in lines
