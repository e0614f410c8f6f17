"""Rules of search spaces, one by one and on their page."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import yaml
from paths import ROOT
from test_space import change_card

from cclsearch.card.load import load_card
from cclsearch.card.model import Card
from cclsearch.core.content import list_frameworks
from cclsearch.plugins import TASKS
from cclsearch.space import framework  # noqa: F401  importing registers the rules
from cclsearch.space.build import resolve_knobs
from cclsearch.space.framework import load_framework
from cclsearch.space.numbers import NUMBERS
from cclsearch.space.parse import parse_knobs
from cclsearch.space.rule import PARAMETERS, RULES, Columns, Rule, RuleKind, make_effect_rules

DENSE = change_card(
    load_card("wl2"),
    num_heads=12,
    num_kv_heads=6,
    num_layers=12,
    hidden_size=48,
    intermediate_size=96,
    global_batch_size=24,
    seq_len=20,
    num_accelerators=24,
    accelerators_per_node=4,
)
EXPERTS = load_card("wl6").arch.moe
MIXED = change_card(
    DENSE,
    moe=EXPERTS.model_copy(
        update={"num_experts": 12, "num_shared_experts": 2, "expert_intermediate_size": 40, "num_dense_layers": 0}
    ),
)
UNSHARED = change_card(
    MIXED,
    moe=EXPERTS.model_copy(update={"num_experts": 12, "num_shared_experts": 0, "expert_intermediate_size": 40}),
)
TIED = change_card(DENSE, tied_embeddings=True)
SMALL = change_card(DENSE, num_accelerators=2)


def make(rule: str, card: Card = DENSE, **options: Any) -> Rule:
    made = RULES[rule](card, options)
    assert made is not None
    return made


def apply_rule(rule: Rule, config: dict[str, Any]) -> tuple[bool, str]:
    """Whether the rule allows it, and the explanation."""
    columns = Columns({knob: np.array([value], dtype=object) for knob, value in config.items()}, 1)
    return bool(rule.check(columns)[0]), rule.explain(config)


def test_widths_of_experts_are_divided_only_if_the_framework_splits_them():
    ok, sentence = apply_rule(make("tp_divides_widths", MIXED, experts=True), {"tp": 16})
    assert not ok
    assert sentence.endswith("width of the shared experts 80, expert width 40 / tp 16 = 3, 6, 5, 2.5")


def test_a_rule_that_a_model_cannot_violate_is_left_out():
    for name in ("tied_embeddings_need_one_stage", "moe_tp_divides_tokens", "degrees_on_torus"):
        assert RULES[name](DENSE, {}) is None
    assert RULES["moe_tp_needs_sequence_parallel"](DENSE, {}) is None


def test_a_whole_column_is_checked_at_once():
    columns = Columns({"tp": np.array([1, 2, 5, 12]), "dp": np.array([24, 12, 5, 2])}, 4)
    assert make("num_accelerators").check(columns).tolist() == [True, True, False, True]
    assert make("tp_divides_heads").check(columns).tolist() == [True, True, False, True]


IMPLIES = make(
    "implies",
    name="fast_needs",
    when={"speed": "fast", "tp": [1, 2]},
    then={"dp": [2, 4], "fused": True},
    because="it does",
)


EFFECT = {
    rule.knobs[0]: rule
    for rule in make_effect_rules(
        {
            "zero_stage": (0, 1),
            "sequence_parallel": (False, True),
            "virtual_pipeline": (1, 2),
            **dict.fromkeys(("tp", "dp", "pp", "cp"), (1, 2)),
        }
    )
}
ODD = change_card(DENSE, global_batch_size=5)


VARIANTS: dict[str, Rule] = {
    "micro_batches": make("virtual_pipeline_micro_batches"),
    **EFFECT,
    "num_accelerators/fewer": make("num_accelerators", use_fewer=True),
    "widths/shared": make("tp_divides_widths", MIXED),
    "tp_divides_widths/unshared": make("tp_divides_widths", UNSHARED),
    "moe_tp_divides_tokens": make("moe_tp_divides_tokens", MIXED),
    "divides/node": make("divides", name="n", knobs=["tp"], number="accelerators_per_node"),
    "divides/layers": make("divides", name="n", knobs=["tp", "pp"], number="layers"),
    "divides/small": make("divides", SMALL, name="n", knobs=["tp"], number="accelerators_per_node"),
    "tied_embeddings_need_one_stage": make("tied_embeddings_need_one_stage", TIED),
    "micro_batches_cover_stages/short": make("micro_batches_cover_stages", short=1),
    "ep_divides_experts/moe": make("ep_divides_experts", MIXED),
    "cp_divides_sequence/tp": make("cp_divides_sequence", tp=True),
    "cp_divides_sequence/5": make("cp_divides_sequence", block=5),
    "cp_divides_sequence/4": make("cp_divides_sequence", block=4),
    "cp_divides_sequence/tp4": make("cp_divides_sequence", tp=True, block=4),
    "zero_stage/from2": make_effect_rules({"zero_stage": (2, 3), "dp": (1, 2)})[0],
    "zero_limited_by_pp/2": make("zero_limited_by_pp", most=2),
    "moe_tp_needs_sequence_parallel": make("moe_tp_needs_sequence_parallel", MIXED),
    "micro_batches/rounds": make("virtual_pipeline_micro_batches", rounds=True),
    "micro_batches/odd": make("virtual_pipeline_micro_batches", ODD, rounds=True),
    "implies": IMPLIES,
    "degrees_on_torus": make("degrees_on_torus", change_card(DENSE, torus=(2, 4))),
}
"""Rules that need options or another card; the others are made of the card `DENSE` alone."""
CASES = """
num_accelerators | tp=2 dp=3 pp=4 | yes | tp 2 x dp 3 x pp 4 is 24 of 24 accelerators
num_accelerators | tp=2 dp=3 pp=2 | no | tp 2 x dp 3 x pp 2 is 12 of 24 accelerators
num_accelerators | dp=24 | yes | tp 1 x dp 24 x pp 1 is 24 of 24 accelerators
num_accelerators | tp=2 dp=3 pp=2 cp=2 | yes | tp 2 x dp 3 x pp 2 x cp 2 is 24 of 24 accelerators
num_accelerators | tp=2 dp=3 pp=4 cp=2 | no | tp 2 x dp 3 x pp 4 x cp 2 is 48 of 24 accelerators
num_accelerators/fewer | tp=2 dp=3 pp=2 | yes | tp 2 x dp 3 x pp 2 is 12 of 24 accelerators
num_accelerators/fewer | tp=24 | yes | tp 24 x dp 1 x pp 1 is 24 of 24 accelerators
num_accelerators/fewer | tp=25 | no | tp 25 x dp 1 x pp 1 is 25 of 24 accelerators
tp_divides_heads | tp=4 | yes | 12 attention heads / tp 4 = 3
tp_divides_heads | tp=8 | no | 12 attention heads / tp 8 = 1.5
tp_divides_kv_heads | tp=3 | yes | 6 KV heads / tp 3 = 2
tp_divides_kv_heads | tp=4 | no | 6 KV heads / tp 4 = 1.5
tp_divides_sequence | tp=5 | yes | 20 tokens of a sequence / tp 5 = 4
tp_divides_sequence | tp=8 | no | 20 tokens of a sequence / tp 8 = 2.5
tp_divides_widths | tp=16 | yes | hidden size 48, feed-forward width 96 / tp 16 = 3, 6
tp_divides_widths | tp=32 | no | hidden size 48, feed-forward width 96 / tp 32 = 1.5, 3
tp_divides_widths/unshared | tp=24 | yes | hidden size 48, feed-forward width 96 / tp 24 = 2, 4
moe_tp_divides_tokens | tp=8 micro_batch_size=2 | yes | 2 sequences of 20 tokens with tp 8
moe_tp_divides_tokens | tp=8 | no | 1 sequences of 20 tokens with tp 8
divides/node | tp=4 | yes | 4 (accelerators per node) / (tp 4) = 1
divides/layers | tp=3 pp=3 | no | 12 (layers) / (tp 3 x pp 3) = 1.33333
divides/small | tp=4 | no | 2 (accelerators per node) / (tp 4) = 0.5
pp_at_most_layers | pp=12 | yes | pp 12 stages for 12 layers
pp_at_most_layers | pp=13 | no | pp 13 stages for 12 layers
tied_embeddings_need_one_stage | pp=1 | yes | tied embeddings with pp 1
tied_embeddings_need_one_stage | pp=2 | no | tied embeddings with pp 2
accumulation_whole | dp=4 micro_batch_size=3 | yes | global batch 24 / (dp 4 x micro_batch_size 3) is 2
accumulation_whole | dp=4 micro_batch_size=4 | no | global batch 24 / (dp 4 x micro_batch_size 4) is 1.5
accumulation_whole | dp=24 micro_batch_size=2 | no | global batch 24 / (dp 24 x micro_batch_size 2) is 0.5
accumulation_whole | dp=24 | yes | global batch 24 / (dp 24 x micro_batch_size 1) is 1
micro_batches_cover_stages | pp=4 dp=3 micro_batch_size=2 | yes | 4 micro-batches for pp 4
micro_batches_cover_stages | pp=5 dp=3 micro_batch_size=2 | no | 4 micro-batches for pp 5
micro_batches_cover_stages | pp=1 dp=24 micro_batch_size=2 | yes | 0.5 micro-batches for pp 1
micro_batches_cover_stages/short | pp=5 dp=3 micro_batch_size=2 | yes | 4 micro-batches for pp 5
micro_batches_cover_stages/short | pp=6 dp=3 micro_batch_size=2 | no | 4 micro-batches for pp 6
ep_divides_experts | ep=1 | yes | ep 1 for a model without experts
ep_divides_experts | ep=2 | no | ep 2 for a model without experts
ep_divides_experts/moe | ep=4 | yes | 12 experts / ep 4 = 3
ep_divides_experts/moe | ep=8 | no | 12 experts / ep 8 = 1.5
ep_inside_stage | ep=6 tp=2 dp=3 | yes | ep 6 among dp 3 x tp 2 = 6 ranks of a stage
ep_inside_stage | ep=4 tp=2 dp=3 | no | ep 4 among dp 3 x tp 2 = 6 ranks of a stage
ep_inside_stage | ep=8 tp=2 dp=2 cp=2 pp=3 | yes | ep 8 among cp 2 x dp 2 x tp 2 = 8 ranks of a stage
ep_inside_stage | ep=8 tp=2 dp=2 cp=1 pp=2 | no | ep 8 among cp 1 x dp 2 x tp 2 = 4 ranks of a stage
cp_divides_sequence | cp=1 tp=8 | yes | 20 tokens / (2 x cp 1) = 10
cp_divides_sequence | cp=5 tp=8 | yes | 20 tokens / (2 x cp 5) = 2
cp_divides_sequence | cp=4 | no | 20 tokens / (2 x cp 4) = 2.5
cp_divides_sequence/tp | cp=5 tp=2 | yes | 20 tokens / (2 x cp 5 x tp 2) = 1
cp_divides_sequence/tp | cp=5 tp=4 | no | 20 tokens / (2 x cp 5 x tp 4) = 0.5
cp_divides_sequence/5 | cp=2 tp=2 | yes | 20 tokens / (2 x cp 2) = 5, / (5 x cp 2) = 2
cp_divides_sequence/4 | cp=2 | no | 20 tokens / (2 x cp 2) = 5, / (4 x cp 2) = 2.5
cp_divides_sequence/tp4 | cp=5 tp=4 | no | 20 tokens / (2 x cp 5 x tp 4) = 0.5, / (4 x cp 5) = 1
ep_divides_dp | ep=3 dp=6 | yes | ep 3 with dp 6
ep_divides_dp | ep=6 dp=3 | no | ep 6 with dp 3
zero_stage | zero_stage=0 dp=1 cp=1 | yes | zero_stage 0 with dp 1 x cp 1
zero_stage | zero_stage=1 dp=1 cp=1 | no | zero_stage 1 with dp 1 x cp 1
zero_stage | zero_stage=1 dp=2 cp=1 | yes | zero_stage 1 with dp 2 x cp 1
zero_stage | zero_stage=1 dp=1 cp=2 | yes | zero_stage 1 with dp 1 x cp 2
zero_stage/from2 | zero_stage=2 dp=1 | yes | zero_stage 2 with dp 1
zero_stage/from2 | zero_stage=3 dp=1 | no | zero_stage 3 with dp 1
zero_limited_by_pp | zero_stage=1 pp=2 | yes | zero_stage 1 with pp 2
zero_limited_by_pp | zero_stage=2 pp=2 | no | zero_stage 2 with pp 2
zero_limited_by_pp | zero_stage=2 | yes | zero_stage 2 with pp 1
zero_limited_by_pp/2 | zero_stage=2 pp=2 | yes | zero_stage 2 with pp 2
zero_limited_by_pp/2 | zero_stage=3 pp=2 | no | zero_stage 3 with pp 2
shards_hold_every_expert | zero_stage=0 ep=2 tp=4 dp=2 | yes | zero_stage 0 with ep 2 and dp 2 x tp 4
shards_hold_every_expert | zero_stage=0 ep=4 tp=2 dp=2 | no | zero_stage 0 with ep 4 and dp 2 x tp 2
shards_hold_every_expert | zero_stage=2 ep=4 tp=2 dp=2 | yes | zero_stage 2 with ep 4 and dp 2 x tp 2
shards_hold_every_expert | zero_stage=2 ep=4 tp=2 dp=2 dp_replicate=2 | no | zero_stage 2 with ep 4 and dp 2 x tp 2
dp_replicate_divides_dp | dp=8 dp_replicate=2 | yes | dp 8 / dp_replicate 2 = 4
dp_replicate_divides_dp | dp=8 dp_replicate=3 | no | dp 8 / dp_replicate 3 = 2.66667
dp_replicate_below_dp | dp=8 dp_replicate=4 | yes | dp_replicate 4 of dp 8
dp_replicate_below_dp | dp=8 dp_replicate=8 | no | dp_replicate 8 of dp 8
dp_replicate_below_dp | dp=8 dp_replicate=8 cp=2 | yes | dp_replicate 8 of dp 8 x cp 2
dp_replicate_below_dp | dp=1 dp_replicate=1 | yes | dp_replicate 1 of dp 1
sequence_parallel | sequence_parallel=true tp=1 | no | sequence_parallel true with tp 1
sequence_parallel | sequence_parallel=true tp=2 | yes | sequence_parallel true with tp 2
sequence_parallel | sequence_parallel=false tp=1 | yes | sequence_parallel false with tp 1
sequence_parallel_divides_sequence | sequence_parallel=true tp=5 | yes | sequence of 20 with tp 5
sequence_parallel_divides_sequence | sequence_parallel=true tp=8 | no | sequence of 20 with tp 8
sequence_parallel_divides_sequence | sequence_parallel=true tp=2 cp=5 | yes | sequence of 20 with tp 2 x cp 5
sequence_parallel_divides_sequence | sequence_parallel=true tp=4 cp=10 | no | sequence of 20 with tp 4 x cp 10
sequence_parallel_divides_sequence | sequence_parallel=false tp=8 | yes | sequence of 20 with tp 8
moe_tp_needs_sequence_parallel | sequence_parallel=false tp=1 | yes | sequence_parallel false with tp 1
moe_tp_needs_sequence_parallel | sequence_parallel=false tp=2 | no | sequence_parallel false with tp 2
moe_tp_needs_sequence_parallel | sequence_parallel=true tp=2 | yes | sequence_parallel true with tp 2
virtual_pipeline | virtual_pipeline=2 pp=1 | no | virtual_pipeline 2 with pp 1
virtual_pipeline | virtual_pipeline=2 pp=2 | yes | virtual_pipeline 2 with pp 2
virtual_pipeline_at_most_layers | virtual_pipeline=3 pp=4 | yes | 12 layers / (pp 4 x virtual_pipeline 3) = 1 per chunk
virtual_pipeline_at_most_layers | virtual_pipeline=3 pp=5 | no | 12 layers / (pp 5 x virtual_pipeline 3) = 0.8 per chunk
implies | speed=fast tp=1 dp=2 fused=true | yes | speed fast, tp 1, dp 2, fused true
implies | speed=fast tp=1 dp=1 fused=true | no | speed fast, tp 1, dp 1, fused true
implies | speed=fast tp=2 dp=4 fused=false | no | speed fast, tp 2, dp 4, fused false
implies | speed=fast tp=2 dp=4 fused=1 | no | speed fast, tp 2, dp 4, fused 1
implies | speed=slow tp=1 dp=1 fused=false | yes | speed slow, tp 1, dp 1, fused false
implies | speed=fast tp=4 dp=1 fused=false | yes | speed fast, tp 4, dp 1, fused false
widths/shared | tp=16 | yes | hidden size 48, feed-forward width 96, width of the shared experts 80 / tp 16 = 3, 6, 5
micro_batches | virtual_pipeline=2 pp=4 dp=3 micro_batch_size=2 | yes | 4 micro-batches with pp 4 and virtual_pipeline 2
micro_batches | virtual_pipeline=2 pp=8 dp=3 micro_batch_size=2 | no | 4 micro-batches with pp 8 and virtual_pipeline 2
micro_batches | virtual_pipeline=1 pp=8 dp=3 micro_batch_size=2 | yes | 4 micro-batches with pp 8 and virtual_pipeline 1
micro_batches/rounds | virtual_pipeline=2 pp=8 dp=12 | yes | 2 micro-batches with pp 8 and virtual_pipeline 2
micro_batches/rounds | virtual_pipeline=2 pp=5 dp=2 | yes | 12 micro-batches with pp 5 and virtual_pipeline 2
micro_batches/rounds | virtual_pipeline=2 pp=2 dp=8 | yes | 3 micro-batches with pp 2 and virtual_pipeline 2
micro_batches/odd | virtual_pipeline=2 pp=2 dp=1 | no | 5 micro-batches with pp 2 and virtual_pipeline 2
degrees_on_torus | tp=2 dp=4 | yes | tp 2, dp 4, pp 1 on a torus of 2x4
degrees_on_torus | tp=4 dp=1 pp=2 | yes | tp 4, dp 1, pp 2 on a torus of 2x4
degrees_on_torus | tp=2 dp=2 pp=2 | no | tp 2, dp 2, pp 2 on a torus of 2x4
degrees_on_torus | tp=2 | no | tp 2, dp 1, pp 1 on a torus of 2x4
degrees_on_torus | tp=4 cp=2 | yes | tp 4, dp 1, pp 1, cp 2 on a torus of 2x4
"""
"""Rule | configuration | whether it is allowed | explanation."""


@pytest.mark.parametrize("case", CASES.strip().splitlines())
def test_a_rule_checks_and_explains_with_numbers(case):
    name, values, is_allowed, sentence = case.split(" | ")
    config = {knob: yaml.safe_load(value) for knob, value in (pair.split("=") for pair in values.split())}
    rule = VARIANTS[name] if name in VARIANTS else make(name)
    assert apply_rule(rule, config) == (is_allowed == "yes", sentence)


@pytest.mark.parametrize(
    ("rule", "summary"),
    [
        (make("num_accelerators"), "tp x dp x pp is 24, the number of accelerators"),
        (make("num_accelerators", use_fewer=True), "tp x dp x pp is at most 24, the number of accelerators"),
        (make("num_accelerators", knobs={"tp", "cp"}), "tp x dp x pp x cp is 24, the number of accelerators"),
        (make("ep_inside_stage"), "ep divides the dp x tp ranks of a pipeline stage"),
        (make("ep_inside_stage", knobs={"cp"}), "ep divides the cp x dp x tp ranks of a pipeline stage"),
        (make("degrees_on_torus", change_card(DENSE, torus=(4, 4)), knobs={"tp"}),
         "tp, dp and pp each use whole axes of the 4x4 torus"),
        (make("cp_divides_sequence", tp=True, block=4),
         "with cp above 1, 2 x cp x tp divides the 20 tokens of a sequence, and so does 4 x cp"),
        (make("cp_divides_sequence"), "with cp above 1, 2 x cp divides the 20 tokens of a sequence"),
        (make("divides", name="n", knobs=["tp"], number="heads", because="it is"), "tp divides 12 (heads): it is"),
        (make("ep_divides_experts"), "ep is 1: the model has no experts"),
        (make("ep_divides_experts", MIXED), "ep divides the 12 experts"),
        (EFFECT["zero_stage"],
         "with dp x cp of 1, zero_stage changes nothing: every other value is the same as zero_stage=0"),
        (EFFECT["sequence_parallel"],
         "with tp of 1, sequence_parallel changes nothing: every other value is the same as sequence_parallel=false"),
        (make("zero_limited_by_pp"), "with pp above 1 zero_stage is at most 1"),
        (IMPLIES, "speed=fast and tp=1|2 needs dp=2|4 and fused=true: it does"),
        (make("implies", name="bare", when={"tp": 1}, then={"dp": 1}), "tp=1 needs dp=1"),
    ],
)  # fmt: skip
def test_the_summary_of_a_rule_has_the_cards_numbers(rule, summary):
    assert rule.summary == summary


def test_rules_that_need_all_knobs_are_left_out_if_one_is_missing():
    assert IMPLIES.needs == IMPLIES.knobs == ("speed", "tp", "dp", "fused")
    assert make("shards_hold_every_expert").needs == ("ep", "zero_stage", "tp")
    assert make("dp_replicate_below_dp").needs == ("dp_replicate",), "the degrees are 1 in a space without them"


def test_a_knob_without_effect_has_one_value_and_the_rule_says_that_it_is_the_same():
    assert [rule.name for rule in EFFECT.values()] == [
        "zero_stage_needs_dp", "sequence_parallel_needs_tp", "virtual_pipeline_needs_pp",
    ]  # fmt: skip
    assert {rule.kind for rule in EFFECT.values()} == {RuleKind.SAME}
    assert make_effect_rules({"zero_stage": (1,), "dp": (1, 2)}) == [], "one value needs no rule"
    assert make_effect_rules({"zero_stage": (0, 1), "tp": (1, 2)}) == [], "a space that does not say what dp is"
    assert IMPLIES.kind is RuleKind.REFUSED
    assert make("implies", name="bare", when={"tp": 1}, then={"dp": 1}, same=True).kind is RuleKind.SAME


PAGE = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
ROWS = {
    match[1]: (bool(match[2]), re.findall(r"`(\w+)`", match[3]))
    for match in re.finditer(r"^\| `(\w+)`( \*)? \|([^|]*)\|", PAGE, re.MULTILINE)
}


def test_the_page_has_every_rule_with_its_parameters():
    TASKS.names()
    shipped = {name: list(PARAMETERS[name]) for name in RULES}
    assert {name: parameters for name, (_, parameters) in ROWS.items()} == shipped
    assert {name for name, (of_task, _) in ROWS.items() if of_task} == set(TASKS.get("training").rules)


def test_the_page_names_every_kind_and_number():
    kinds = re.findall(r"^\| (\w+) \|", PAGE, re.MULTILINE)
    assert [kind for kind in kinds if kind in set(RuleKind)] == list(RuleKind)
    numbers = PAGE.split("Numbers of a card", 1)[1]
    assert [name for name in (*NUMBERS, *TASKS.get("training").numbers) if f"`{name}`" not in numbers] == []


@pytest.mark.parametrize("name", [name for name in list_frameworks() if "training" in load_framework(name).tasks])
@pytest.mark.parametrize("workload", ["wl1", "wl2", "wl6", "tiny-moe"])
def test_every_refusal_of_a_shipped_framework_has_a_source(name, workload):
    card, loaded = load_card(workload), load_framework(name)
    extra = [f"{k.name}={','.join(map(str, k.resolve(card).choices))}" for k in loaded.list_optional(card)]
    rules = loaded.make_rules(card, resolve_knobs(card, loaded, parse_knobs(extra)), use_fewer=False)
    assert [rule.name for rule in rules if rule.kind is RuleKind.REFUSED and not rule.source] == []
    assert all(re.search(r"\w+\.py|src/|src\\", rule.source) for rule in rules if rule.source)


def test_space_shows_sources_and_optional_knobs(cli):
    shown = cli.out(["space", "--workload", "wl2", "--framework", "torchtitan", "--rules"])
    assert "refused by the framework: torchtitan/models/common/decoder.py" in shown
    assert "the same as another configuration" in shown
    assert "--knob dp_replicate=1,2,4,8,16" in shown
    again = cli.out(["space", "--workload", "wl2", "--framework", "torchtitan", "--knob", "cp=2", "--knob", "cp=4"])
    assert re.search(r"  cp +2, 4 ranks", again), "choices given twice are united"
    assert "--knob cp=" not in again
    assert "torchtitan/models" not in again
