"""Rules of training about ZeRO, sequence parallelism and virtual pipelines, and `implies`: both sides of each."""

from __future__ import annotations

from typing import Any

import pytest
from test_degree_rules import DENSE, MIXED, apply_rule, make

from cclsearch.space.rule import RULES, Rule

IMPLIES = make(
    "implies",
    name="fast_needs",
    when={"speed": "fast", "tp": [1, 2]},
    then={"dp": [2, 4], "fused": True},
    because="it does",
)


@pytest.mark.parametrize(
    ("rule", "config", "ok", "sentence"),
    [
        (make("zero_needs_dp"), {"zero_stage": 0, "dp": 1}, True, "zero_stage 0 with dp 1"),
        (make("zero_needs_dp"), {"zero_stage": 1, "dp": 1}, False, "zero_stage 1 with dp 1"),
        (make("zero_needs_dp"), {"zero_stage": 1, "dp": 2}, True, "zero_stage 1 with dp 2"),
        (make("zero_needs_dp"), {"dp": 1}, True, "zero_stage 0 with dp 1"),
        (make("zero_needs_dp"), {"zero_stage": 1, "dp": 1, "cp": 2}, True, "zero_stage 1 with dp 1 x cp 2"),
        (make("zero_needs_dp"), {"zero_stage": 1, "dp": 1, "cp": 1}, False, "zero_stage 1 with dp 1 x cp 1"),
        (make("zero_needs_dp", least=2), {"zero_stage": 1, "dp": 1}, True, "zero_stage 1 with dp 1"),
        (make("zero_needs_dp", least=2), {"zero_stage": 2, "dp": 1}, False, "zero_stage 2 with dp 1"),
        (make("zero_limited_by_pp"), {"zero_stage": 1, "pp": 2}, True, "zero_stage 1 with pp 2"),
        (make("zero_limited_by_pp"), {"zero_stage": 2, "pp": 2}, False, "zero_stage 2 with pp 2"),
        (make("zero_limited_by_pp"), {"zero_stage": 2}, True, "zero_stage 2 with pp 1"),
        (make("zero_limited_by_pp", most=2), {"zero_stage": 2, "pp": 2}, True, "zero_stage 2 with pp 2"),
        (make("replicas_hold_every_expert"), {"zero_stage": 0, "ep": 2, "tp": 4}, True,
         "zero_stage 0 with ep 2 and tp 4"),
        (make("replicas_hold_every_expert"), {"zero_stage": 0, "ep": 4, "tp": 2}, False,
         "zero_stage 0 with ep 4 and tp 2"),
        (make("replicas_hold_every_expert"), {"zero_stage": 1, "ep": 4, "tp": 2}, True,
         "zero_stage 1 with ep 4 and tp 2"),
        (make("sequence_parallel_needs_tp"), {"sequence_parallel": True, "tp": 1}, False,
         "sequence_parallel true with tp 1"),
        (make("sequence_parallel_needs_tp"), {"sequence_parallel": True, "tp": 2}, True,
         "sequence_parallel true with tp 2"),
        (make("sequence_parallel_needs_tp"), {"tp": 1}, True, "sequence_parallel false with tp 1"),
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
        (make("virtual_pipeline_needs_pp"), {"virtual_pipeline": 2, "pp": 1}, False, "virtual_pipeline 2 with pp 1"),
        (make("virtual_pipeline_needs_pp"), {"virtual_pipeline": 2, "pp": 2}, True, "virtual_pipeline 2 with pp 2"),
        (make("virtual_pipeline_needs_pp"), {"virtual_pipeline": 1, "pp": 1}, True, "virtual_pipeline 1 with pp 1"),
        (make("virtual_pipeline_needs_pp", least_pp=3), {"virtual_pipeline": 2, "pp": 2}, False,
         "virtual_pipeline 2 with pp 2"),
        (make("virtual_pipeline_needs_pp", least_pp=3), {"virtual_pipeline": 2, "pp": 3}, True,
         "virtual_pipeline 2 with pp 3"),
        (make("virtual_pipeline_divides_layers"), {"virtual_pipeline": 3, "pp": 2}, True,
         "12 layers / (pp 2 x virtual_pipeline 3) = 2 per chunk"),
        (make("virtual_pipeline_divides_layers"), {"virtual_pipeline": 2, "pp": 4}, False,
         "12 layers / (pp 4 x virtual_pipeline 2) = 1.5 per chunk"),
        (make("virtual_pipeline_divides_layers"), {"virtual_pipeline": 1, "pp": 8}, True,
         "12 layers / (pp 8 x virtual_pipeline 1) = 1.5 per chunk"),
        (make("virtual_pipeline_micro_batches"),
         {"virtual_pipeline": 2, "pp": 4, "dp": 3, "micro_batch_size": 2}, True,
         "4 micro-batches with pp 4 and virtual_pipeline 2"),
        (make("virtual_pipeline_micro_batches"),
         {"virtual_pipeline": 2, "pp": 8, "dp": 3, "micro_batch_size": 2}, False,
         "4 micro-batches with pp 8 and virtual_pipeline 2"),
        (make("virtual_pipeline_micro_batches"),
         {"virtual_pipeline": 1, "pp": 8, "dp": 3, "micro_batch_size": 2}, True,
         "4 micro-batches with pp 8 and virtual_pipeline 1"),
        (IMPLIES, {"speed": "fast", "tp": 1, "dp": 2, "fused": True}, True, "speed fast, tp 1, dp 2, fused true"),
        (IMPLIES, {"speed": "fast", "tp": 1, "dp": 1, "fused": True}, False, "speed fast, tp 1, dp 1, fused true"),
        (IMPLIES, {"speed": "fast", "tp": 2, "dp": 4, "fused": False}, False, "speed fast, tp 2, dp 4, fused false"),
        (IMPLIES, {"speed": "fast", "tp": 2, "dp": 4, "fused": 1}, False, "speed fast, tp 2, dp 4, fused 1"),
        (IMPLIES, {"speed": "slow", "tp": 1, "dp": 1, "fused": False}, True, "speed slow, tp 1, dp 1, fused false"),
        (IMPLIES, {"speed": "fast", "tp": 4, "dp": 1, "fused": False}, True, "speed fast, tp 4, dp 1, fused false"),
    ],
)  # fmt: skip
def test_a_rule_checks_and_explains_with_numbers(rule: Rule, config: dict[str, Any], ok: bool, sentence: str) -> None:
    assert apply_rule(rule, config) == (ok, sentence)


@pytest.mark.parametrize(
    ("rule", "summary"),
    [
        (make("zero_needs_dp"),
         "zero_stage of 1 or more needs dp above 1: otherwise it changes nothing and equals stage 0"),
        (make("zero_needs_dp", least=2),
         "zero_stage of 2 or more needs dp above 1: otherwise it changes nothing and equals stage 1"),
        (make("zero_limited_by_pp"), "with pp above 1 zero_stage is at most 1"),
        (make("virtual_pipeline_needs_pp"), "virtual_pipeline above 1 needs pp of at least 2"),
        (IMPLIES, "speed=fast and tp=1|2 needs dp=2|4 and fused=true: it does"),
        (make("implies", name="bare", when={"tp": 1}, then={"dp": 1}), "tp=1 needs dp=1"),
    ],
)  # fmt: skip
def test_the_summary_of_a_rule_says_what_is_required(rule: Rule, summary: str) -> None:
    assert rule.summary == summary


def test_rules_that_need_all_knobs_are_left_out_if_one_is_missing() -> None:
    assert IMPLIES.needs == IMPLIES.knobs == ("speed", "tp", "dp", "fused")
    assert make("replicas_hold_every_expert").needs == ("ep", "zero_stage", "tp")
    assert make("zero_needs_dp").needs == ("zero_stage",), "the degrees are 1 in a space without them"
    assert RULES["moe_tp_needs_sequence_parallel"](DENSE, {}) is None
