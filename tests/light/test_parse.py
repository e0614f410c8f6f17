"""Configurations and knobs as users type them."""

from __future__ import annotations

from typing import Any

import pytest

from cclsearch.core.errors import UserError
from cclsearch.space.parse import parse_assignments, parse_knob
from cclsearch.space.table import Knob

TP, FUSED, FIXED = Knob("tp", (1, 2)), Knob("fused", (False, True)), Knob("pp", (3,))
CHECKPOINTS = Knob("activation_checkpointing", ("none", "full"))


def read_as(knob: Knob, text: str) -> Any:
    return parse_assignments(f"{knob.name}={text}", (knob,))[knob.name]


def test_knobs_may_be_left_out():
    assert parse_assignments("tp=2", (TP, FIXED)) == {"tp": 2}


@pytest.mark.parametrize(
    ("text", "choice"), [("true", True), ("false", False), ("1", True), ("0", False), ("1.0", True), ("0.0", False)]
)
def test_one_and_zero_are_accepted_for_booleans(text, choice):
    assert read_as(FUSED, text) is choice


@pytest.mark.parametrize(("text", "value"), [("2", 2), ("-1", -1), ("0.5", 0.5), ("perhaps", "perhaps")])
def test_other_values_are_not_accepted_for_booleans(text, value):
    assert (type(read_as(FUSED, text)), read_as(FUSED, text)) == (type(value), value)


def test_a_boolean_is_not_a_number_among_numeric_choices():
    assert read_as(TP, "true") is True
    assert read_as(Knob("mixed", (True, "auto")), "1") == 1
    assert read_as(Knob("mixed", (True, "auto")), "1") is not True


def test_a_boolean_is_accepted_for_activation_checkpointing():
    assert (read_as(CHECKPOINTS, "true"), read_as(CHECKPOINTS, "false")) == ("full", "none")
    assert read_as(CHECKPOINTS, "1") == 1
    assert read_as(Knob("activation_checkpointing", ("none", "selective")), "true") is True


@pytest.mark.parametrize(
    ("text", "value"),
    [("fused=True", True), ("fused=false", False), ("fused=on", True), ("fused=NO", False), ("ac=full", "full"),
     ("tp = 2", 2), ("tp='2'", 2), ("tp=+2", 2), ("tp=1e3", 1000.0), ("tp=.5", 0.5), ("tp=2.", 2), ("tp=1e", "1e")],
)  # fmt: skip
def test_text_is_read_as_the_matching_choice(text, value):
    [(_, read)] = parse_assignments(text, (TP, FUSED, CHECKPOINTS)).items()
    assert (type(read), read) == (type(value), value)


@pytest.mark.parametrize(
    ("words", "value"), [(("true", "TRUE", "yes", "Yes", "on"), True), (("false", "FALSE", "no", "No", "off"), False)]
)
def test_booleans_have_several_spellings(words, value):
    for word in words:
        assert parse_knob(f"odd={word}").choices == (value,)
        assert parse_assignments(f"fused={word}", (FUSED,))["fused"] is value


@pytest.mark.parametrize(
    ("word", "value"), [("9" * 18, int("9" * 18)), ("9" * 19, float("9" * 19)), ("9" * 31, "9" * 31)]
)
def test_too_many_digits_are_not_a_whole_number(word, value):
    assert parse_assignments(f"tp={word}", (TP,))["tp"] == value


@pytest.mark.parametrize("text", ["tp", "=1", "tp=", "TP=1", "1p=2", "tp=,", "t-p=1"])
def test_text_that_is_not_a_knob_with_choices_is_rejected(text):
    with pytest.raises(UserError, match="a knob is written NAME=CHOICE,CHOICE"):
        parse_knob(text)


def test_a_knob_is_read_with_its_short_name_and_typed_choices():
    knob = parse_knob(" ac = none, 'full' ,1,0.5,true,")
    assert knob.name == "activation_checkpointing"
    assert [(type(c), c) for c in knob.choices] == [
        (str, "none"),
        (str, "full"),
        (int, 1),
        (float, 0.5),
        (bool, True),
    ]


def test_a_short_name_that_is_also_a_knob_means_the_knob():
    ac = Knob("ac", (1, 2))
    assert parse_assignments("ac=2 activation_checkpointing=full", (ac, CHECKPOINTS)) == {
        "ac": 2,
        "activation_checkpointing": "full",
    }


def test_names_with_a_common_prefix_are_distinguished():
    knobs = (Knob("sp", (1, 2)), Knob("spread", (1, 2)), Knob("s", (1, 2)))
    assert parse_assignments("s=1 sp=2,spread =1", knobs) == {"s": 1, "sp": 2, "spread": 1}
