"""Rules of training about ZeRO, sequence parallelism and pipelines, `implies`, and knobs without effect: both sides."""

from __future__ import annotations

import pytest
from test_degree_rules import DENSE, MIXED, apply_rule, make
from test_space import change_card

from cclsearch.space.rule import RULES, RuleKind, make_effect_rules

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


@pytest.mark.parametrize(
    ("rule", "config", "ok", "sentence"),
    [
        (EFFECT["zero_stage"], {"zero_stage": 0, "dp": 1, "cp": 1}, True, "zero_stage 0 with dp 1 x cp 1"),
        (EFFECT["zero_stage"], {"zero_stage": 1, "dp": 1, "cp": 1}, False, "zero_stage 1 with dp 1 x cp 1"),
        (EFFECT["zero_stage"], {"zero_stage": 1, "dp": 2, "cp": 1}, True, "zero_stage 1 with dp 2 x cp 1"),
        (EFFECT["zero_stage"], {"zero_stage": 1, "dp": 1, "cp": 2}, True, "zero_stage 1 with dp 1 x cp 2"),
        (make_effect_rules({"zero_stage": (2, 3), "dp": (1, 2)})[0], {"zero_stage": 2, "dp": 1}, True,
         "zero_stage 2 with dp 1"),
        (make_effect_rules({"zero_stage": (2, 3), "dp": (1, 2)})[0], {"zero_stage": 3, "dp": 1}, False,
         "zero_stage 3 with dp 1"),
        (make("zero_limited_by_pp"), {"zero_stage": 1, "pp": 2}, True, "zero_stage 1 with pp 2"),
        (make("zero_limited_by_pp"), {"zero_stage": 2, "pp": 2}, False, "zero_stage 2 with pp 2"),
        (make("zero_limited_by_pp"), {"zero_stage": 2}, True, "zero_stage 2 with pp 1"),
        (make("zero_limited_by_pp", most=2), {"zero_stage": 2, "pp": 2}, True, "zero_stage 2 with pp 2"),
        (make("shards_hold_every_expert"), {"zero_stage": 0, "ep": 2, "tp": 4, "dp": 2}, True,
         "zero_stage 0 with ep 2 and dp 2 x tp 4"),
        (make("shards_hold_every_expert"), {"zero_stage": 0, "ep": 4, "tp": 2, "dp": 2}, False,
         "zero_stage 0 with ep 4 and dp 2 x tp 2"),
        (make("shards_hold_every_expert"), {"zero_stage": 2, "ep": 4, "tp": 2, "dp": 2}, True,
         "zero_stage 2 with ep 4 and dp 2 x tp 2"),
        (make("shards_hold_every_expert"), {"zero_stage": 2, "ep": 4, "tp": 2, "dp": 2, "dp_replicate": 2}, False,
         "zero_stage 2 with ep 4 and dp 2 x tp 2"),
        (make("dp_replicate_divides_dp"), {"dp": 8, "dp_replicate": 2}, True, "dp 8 / dp_replicate 2 = 4"),
        (make("dp_replicate_divides_dp"), {"dp": 8, "dp_replicate": 3}, False, "dp 8 / dp_replicate 3 = 2.66667"),
        (make("dp_replicate_below_dp"), {"dp": 8, "dp_replicate": 4}, True, "dp_replicate 4 of dp 8"),
        (make("dp_replicate_below_dp"), {"dp": 8, "dp_replicate": 8}, False, "dp_replicate 8 of dp 8"),
        (make("dp_replicate_below_dp"), {"dp": 8, "dp_replicate": 8, "cp": 2}, True, "dp_replicate 8 of dp 8 x cp 2"),
        (make("dp_replicate_below_dp"), {"dp": 1, "dp_replicate": 1}, True, "dp_replicate 1 of dp 1"),
        (EFFECT["sequence_parallel"], {"sequence_parallel": True, "tp": 1}, False, "sequence_parallel true with tp 1"),
        (EFFECT["sequence_parallel"], {"sequence_parallel": True, "tp": 2}, True, "sequence_parallel true with tp 2"),
        (EFFECT["sequence_parallel"], {"sequence_parallel": False, "tp": 1}, True,
         "sequence_parallel false with tp 1"),
        (make("sequence_parallel_divides_sequence"), {"sequence_parallel": True, "tp": 5}, True,
         "sequence of 20 with tp 5"),
        (make("sequence_parallel_divides_sequence"), {"sequence_parallel": True, "tp": 8}, False,
         "sequence of 20 with tp 8"),
        (make("sequence_parallel_divides_sequence"), {"sequence_parallel": True, "tp": 2, "cp": 5}, True,
         "sequence of 20 with tp 2 x cp 5"),
        (make("sequence_parallel_divides_sequence"), {"sequence_parallel": True, "tp": 4, "cp": 10}, False,
         "sequence of 20 with tp 4 x cp 10"),
        (make("sequence_parallel_divides_sequence"), {"sequence_parallel": False, "tp": 8}, True,
         "sequence of 20 with tp 8"),
        (make("moe_tp_needs_sequence_parallel", MIXED), {"sequence_parallel": False, "tp": 1}, True,
         "sequence_parallel false with tp 1"),
        (make("moe_tp_needs_sequence_parallel", MIXED), {"sequence_parallel": False, "tp": 2}, False,
         "sequence_parallel false with tp 2"),
        (make("moe_tp_needs_sequence_parallel", MIXED), {"sequence_parallel": True, "tp": 2}, True,
         "sequence_parallel true with tp 2"),
        (EFFECT["virtual_pipeline"], {"virtual_pipeline": 2, "pp": 1}, False, "virtual_pipeline 2 with pp 1"),
        (EFFECT["virtual_pipeline"], {"virtual_pipeline": 2, "pp": 2}, True, "virtual_pipeline 2 with pp 2"),
        (make("virtual_pipeline_at_most_layers"), {"virtual_pipeline": 3, "pp": 4}, True,
         "12 layers / (pp 4 x virtual_pipeline 3) = 1 per chunk"),
        (make("virtual_pipeline_at_most_layers"), {"virtual_pipeline": 3, "pp": 5}, False,
         "12 layers / (pp 5 x virtual_pipeline 3) = 0.8 per chunk"),
        (make("virtual_pipeline_micro_batches"),
         {"virtual_pipeline": 2, "pp": 4, "dp": 3, "micro_batch_size": 2}, True,
         "4 micro-batches with pp 4 and virtual_pipeline 2"),
        (make("virtual_pipeline_micro_batches"),
         {"virtual_pipeline": 2, "pp": 8, "dp": 3, "micro_batch_size": 2}, False,
         "4 micro-batches with pp 8 and virtual_pipeline 2"),
        (make("virtual_pipeline_micro_batches"),
         {"virtual_pipeline": 1, "pp": 8, "dp": 3, "micro_batch_size": 2}, True,
         "4 micro-batches with pp 8 and virtual_pipeline 1"),
        (make("virtual_pipeline_micro_batches", rounds=True),
         {"virtual_pipeline": 2, "pp": 8, "dp": 3, "micro_batch_size": 2}, True,
         "4 micro-batches with pp 8 and virtual_pipeline 2"),
        (make("virtual_pipeline_micro_batches", rounds=True),
         {"virtual_pipeline": 2, "pp": 5, "dp": 2, "micro_batch_size": 1}, True,
         "12 micro-batches with pp 5 and virtual_pipeline 2"),
        (make("virtual_pipeline_micro_batches", rounds=True),
         {"virtual_pipeline": 2, "pp": 2, "dp": 1, "micro_batch_size": 8}, True,
         "3 micro-batches with pp 2 and virtual_pipeline 2"),
        (make("virtual_pipeline_micro_batches", ODD, rounds=True),
         {"virtual_pipeline": 2, "pp": 2, "dp": 1, "micro_batch_size": 1}, False,
         "5 micro-batches with pp 2 and virtual_pipeline 2"),
        (IMPLIES, {"speed": "fast", "tp": 1, "dp": 2, "fused": True}, True, "speed fast, tp 1, dp 2, fused true"),
        (IMPLIES, {"speed": "fast", "tp": 1, "dp": 1, "fused": True}, False, "speed fast, tp 1, dp 1, fused true"),
        (IMPLIES, {"speed": "fast", "tp": 2, "dp": 4, "fused": False}, False, "speed fast, tp 2, dp 4, fused false"),
        (IMPLIES, {"speed": "fast", "tp": 2, "dp": 4, "fused": 1}, False, "speed fast, tp 2, dp 4, fused 1"),
        (IMPLIES, {"speed": "slow", "tp": 1, "dp": 1, "fused": False}, True, "speed slow, tp 1, dp 1, fused false"),
        (IMPLIES, {"speed": "fast", "tp": 4, "dp": 1, "fused": False}, True, "speed fast, tp 4, dp 1, fused false"),
    ],
)  # fmt: skip
def test_a_rule_checks_and_explains_with_numbers(rule, config, ok, sentence):
    assert apply_rule(rule, config) == (ok, sentence)


@pytest.mark.parametrize(
    ("rule", "summary"),
    [
        (EFFECT["zero_stage"],
         "with dp x cp of 1, zero_stage changes nothing: every other value is the same as zero_stage=0"),
        (EFFECT["sequence_parallel"],
         "with tp of 1, sequence_parallel changes nothing: every other value is the same as sequence_parallel=false"),
        (make("zero_limited_by_pp"), "with pp above 1 zero_stage is at most 1"),
        (IMPLIES, "speed=fast and tp=1|2 needs dp=2|4 and fused=true: it does"),
        (make("implies", name="bare", when={"tp": 1}, then={"dp": 1}), "tp=1 needs dp=1"),
    ],
)  # fmt: skip
def test_the_summary_of_a_rule_says_what_is_required(rule, summary):
    assert rule.summary == summary


def test_rules_that_need_all_knobs_are_left_out_if_one_is_missing():
    assert IMPLIES.needs == IMPLIES.knobs == ("speed", "tp", "dp", "fused")
    assert make("shards_hold_every_expert").needs == ("ep", "zero_stage", "tp")
    assert make("dp_replicate_below_dp").needs == ("dp_replicate",), "the degrees are 1 in a space without them"
    assert RULES["moe_tp_needs_sequence_parallel"](DENSE, {}) is None


def test_a_knob_without_effect_has_one_value_and_the_rule_says_that_it_is_the_same():
    assert [rule.name for rule in EFFECT.values()] == [
        "zero_stage_needs_dp", "sequence_parallel_needs_tp", "virtual_pipeline_needs_pp",
    ]  # fmt: skip
    assert {rule.kind for rule in EFFECT.values()} == {RuleKind.SAME}
    assert make_effect_rules({"zero_stage": (1,), "dp": (1, 2)}) == [], "one value needs no rule"
    assert make_effect_rules({"zero_stage": (0, 1), "tp": (1, 2)}) == [], "a space that does not say what dp is"
    assert IMPLIES.kind is RuleKind.REFUSED
    assert make("implies", name="bare", when={"tp": 1}, then={"dp": 1}, same=True).kind is RuleKind.SAME
