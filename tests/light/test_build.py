"""Building a space: applied rules, rejected input, and the verdicts on choices and rules."""

from __future__ import annotations

from typing import Any

import pytest
from test_space import change_card

from cclsearch.card.load import load_card
from cclsearch.card.model import KnobDeclaration
from cclsearch.core.errors import UserError
from cclsearch.space import build
from cclsearch.space.build import RuleVerdict, build_space, explain_config, require_known_knobs, resolve_knobs
from cclsearch.space.framework import Framework
from cclsearch.space.framework_knob import FrameworkKnob
from cclsearch.space.parse import parse_knob

FOUR = dict.fromkeys(("num_heads", "num_kv_heads", "num_layers", "num_accelerators", "accelerators_per_node"), 4)
CARD = change_card(load_card("wl2"), **FOUR, global_batch_size=8)
ALL_AT_WHOLE = {"num_accelerators", "accumulation_whole"}


def own(*rules: Any, use_fewer: bool = False, **choices: tuple[Any, ...]) -> Framework:
    """A framework with these knobs."""
    knobs = tuple(
        FrameworkKnob(name=name, choices=values, description=f"its {name}") for name, values in choices.items()
    )
    return Framework(name="mine", knobs=knobs, rules=rules, use_fewer=use_fewer)


def verdict(framework: Framework, config: dict[str, Any], rule: str) -> RuleVerdict:
    return next(v for v in explain_config(CARD, framework, config) if v.rule == rule)


def test_a_rule_is_applied_once_its_last_knob_is_enumerated():
    space = build_space(CARD, own(tp=(1, 2, 4), dp=(1, 2, 4)))
    assert [tuple(space.config(row).values()) for row in range(len(space))] == [(1, 4), (2, 2), (4, 1)]
    assert space.num_raw == 9


def test_rules_about_missing_knobs_are_left_out_except_those_of_the_work():
    space = build_space(CARD, own("micro_batches_cover_stages", micro_batch_size=(1, 2), pp=(4,)))
    assert set(space.rules) == {*ALL_AT_WHOLE, "pp_at_most_layers", "micro_batches_cover_stages"}
    needs_all = {"rule": "implies", "name": "odd", "when": {"kernel": "a"}, "then": {"fused": True}}
    lacking = build_space(CARD, own(needs_all, tp=(4,), kernel=("a", "b")))
    assert set(lacking.rules) == {*ALL_AT_WHOLE, "tp_divides_heads", "tp_divides_kv_heads"}
    having = build_space(CARD, own(needs_all, tp=(4,), kernel=("a", "b"), fused=(True, False)))
    assert "odd" in having.rules
    assert len(having) == 3


def test_the_order_is_that_of_the_knobs_and_of_their_choices():
    space = build_space(CARD, own(kernel=("b", "a"), tp=(4, 1), dp=(1, 4)))
    found = [tuple(space.config(row).values()) for row in range(len(space))]
    assert found == [("b", 4, 1), ("b", 1, 4), ("a", 4, 1), ("a", 1, 4)]


def test_a_description_is_the_users_or_the_frameworks():
    algorithm = FrameworkKnob(name="nccl_algo", choices=("Ring",), description="how NCCL reduces")
    framework = own(tp=(1, 2, 4)).model_copy(update={"optional_knobs": (algorithm,)})
    given = {"tp": 4, "nccl_algo": "Tree", "new": 1}
    declared = [KnobDeclaration(name=name, choices=(choice,)) for name, choice in given.items()]
    assert [k.description for k in resolve_knobs(CARD, framework, declared)] == ["its tp", "how NCCL reduces", ""]
    described = [knob.model_copy(update={"description": "as I say"}) for knob in declared]
    assert {knob.description for knob in resolve_knobs(CARD, framework, described)} == {"as I say"}


def test_duplicate_choices_count_once_and_true_is_not_one():
    odd = KnobDeclaration(name="odd", choices=(1, 2, 1, True, True))
    found = resolve_knobs(CARD, own(tp=(4,)), [odd])[1].choices
    assert [(type(choice), choice) for choice in found] == [(int, 1), (int, 2), (bool, True)]


@pytest.mark.parametrize(
    ("text", "least"),
    [("tp=0", 1), ("dp=0", 1), ("pp=0", 1), ("ep=0", 1), ("micro_batch_size=0", 1), ("virtual_pipeline=0", 1),
     ("zero_stage=-1", 0), ("tp=1000001", 1), ("tp=2.5", 1), ("tp=true", 1), ("tp=many", 1)],
)  # fmt: skip
def test_counted_knobs_need_whole_numbers_from_their_minimum_to_a_million(text, least):
    with pytest.raises(UserError, match=f"takes whole numbers from {least} to 1000000, not "):
        resolve_knobs(CARD, own(kernel=("a",)), [parse_knob(text)])
    name = text.partition("=")[0]
    knobs = resolve_knobs(CARD, own(kernel=("a",)), [parse_knob(f"{name}={least},1000000")])
    assert knobs[1].choices == (least, 1_000_000)


def test_a_space_may_be_as_large_as_the_limit_but_not_larger(monkeypatch):
    monkeypatch.setattr(build, "MAX_ROWS", 12)
    knobs = {"tp": (4,), "a": (1, 2, 3, 4), "b": (1, 2, 3)}
    assert len(build_space(CARD, own(**knobs))) == 12
    message = r"too large to enumerate \(16 combinations at knob 'b', at most 12\): give that knob fewer choices"
    with pytest.raises(UserError, match=message):
        build_space(CARD, own(**knobs | {"b": (1, 2, 3, 4)}))


def test_a_knob_may_have_as_many_choices_as_its_codes_can_count():
    assert len(build_space(CARD, own(tp=(4,), wide=tuple(range(32_767))))) == 32_767
    with pytest.raises(UserError, match="too large to enumerate"):
        build_space(CARD, own(tp=(4,), wide=tuple(range(32_768))))


def test_a_model_without_any_knob_of_the_framework_has_an_empty_space():
    framework = Framework(name="mine", knobs=(FrameworkKnob(name="ep", choices=(1, 2), moe_only=True),))
    with pytest.raises(UserError, match=r"the search space of .* is empty"):
        build_space(CARD, framework)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"tp": (1,), "dp": (2,), "kernel": ("a",)},
         "this rule rejects every combination: num_accelerators (tp x dp x pp is 4, the number of accelerators)"),
        # 3 does not divide heads, KV heads and the 4 accelerators: each of the three rules rejects it
        ({"tp": (3,), "dp": (1, 4)},
         "these rules together reject every combination: num_accelerators (tp x dp x pp is 4, the number of"
         " accelerators); tp_divides_heads (tp divides the 4 attention heads);"
         " tp_divides_kv_heads (tp divides the 4 KV heads)"),
    ],
)  # fmt: skip
def test_an_empty_space_names_the_rules_that_cause_it(choices, message):
    with pytest.raises(UserError) as caught:
        build_space(CARD, own(**choices))
    assert str(caught.value).endswith(f"is empty: {message}")


def test_fewer_accelerators_are_used_if_the_framework_or_the_user_allows_it():
    choices = {"tp": (1, 2, 4, 8)}
    assert build_space(CARD, own(**choices)).column("tp").tolist() == [4]
    assert build_space(CARD, own(**choices), use_fewer=True).column("tp").tolist() == [1, 2, 4]
    assert build_space(CARD, own(use_fewer=True, **choices)).column("tp").tolist() == [1, 2, 4]
    verdicts = explain_config(CARD, own(**choices), {"tp": 2}, use_fewer=True)
    assert all(v.ok for v in verdicts)


TWO = own(tp=(1, 2, 4), fused=(False, True), zero_stage=(0, 1))


@pytest.mark.parametrize(
    ("config", "ok", "detail"),
    [
        ({"tp": 4, "fused": True, "zero_stage": 0}, True, "every value is a choice of its knob"),
        ({"tp": 4}, None, "not given: fused, zero_stage"),
        ({"tp": 3, "fused": True}, False, "tp=3 is not one of 1, 2, 4"),
        ({"tp": 3, "fused": 1}, False, "tp=3 is not one of 1, 2, 4; fused=1 is not one of false, true"),
        ({"tp": True, "fused": True, "zero_stage": 0}, False, "tp=True is not one of 1, 2, 4"),
    ],
)
def test_the_first_verdict_is_about_the_choices(config, ok, detail):
    first = explain_config(CARD, TWO, config)[0]
    assert (first.rule, first.ok, first.detail) == ("choices", ok, detail)


@pytest.mark.parametrize(
    ("rule", "config", "ok", "detail"),
    [
        ("num_accelerators", {"zero_stage": 0}, None, "unknown without tp, dp"),
        ("num_accelerators", {"tp": 4, "dp": 1}, True, "tp 4 x dp 1 x pp 1 is 4 of 4 accelerators"),
        ("num_accelerators", {"tp": 2, "dp": 1}, False, "tp 2 x dp 1 x pp 1 is 2 of 4 accelerators"),
        ("num_accelerators", {"tp": 0, "dp": 1}, False, "tp must be a whole number of at least 1"),
        ("num_accelerators", {"tp": 4.0, "dp": 1}, False, "tp must be a whole number of at least 1"),
        ("zero_stage_needs_dp", {"zero_stage": -1, "dp": 1}, False, "zero_stage must be a whole number of at least 0"),
        ("zero_stage_needs_dp", {"zero_stage": 1, "dp": 1}, False, "zero_stage 1 with dp 1"),
        ("sequence_parallel_divides_sequence", {"tp": 4, "sequence_parallel": "maybe"}, False,
         "one of tp, sequence_parallel is text, not a number or truth value"),
    ],
)  # fmt: skip
def test_a_rule_is_checked_on_the_given_knobs(rule, config, ok, detail):
    framework = own("sequence_parallel_divides_sequence", tp=(1, 4), dp=(1,), zero_stage=(0, 1),
                    sequence_parallel=(False, True))  # fmt: skip
    found = verdict(framework, config, rule)
    assert (found.ok, found.detail) == (ok, detail)
    assert found.summary


def test_a_knob_of_a_profile_is_known_like_those_of_framework_and_card():
    framework = own(tp=(4,))
    site = KnobDeclaration(name="site_knob", choices=(1, 2))
    require_known_knobs([site], CARD, framework, others=[site])
    with pytest.raises(UserError, match=r"framework 'mine' has no knob 'site_knob'; known: tp$"):
        require_known_knobs([site], CARD, framework)
    named = CARD.model_copy(update={"knobs": (site,)})
    require_known_knobs([site], named, framework)
