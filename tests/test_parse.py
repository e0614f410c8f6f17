"""Configurations and knobs as users type them."""

from __future__ import annotations

from typing import Any

import pytest

from cclsearch.core.errors import UserError
from cclsearch.space.parse import complete_config, parse_assignments, parse_knob
from cclsearch.space.table import Knob, Space, space_from_rows

TP, FUSED, FIXED = Knob("tp", (1, 2)), Knob("fused", (False, True)), Knob("pp", (3,))
CHECKPOINTS = Knob("activation_checkpointing", ("none", "full"))


def one_row(*knobs: Knob) -> Space:
    return space_from_rows(knobs, [{knob.name: knob.choices[0] for knob in knobs}])


def test_only_a_knob_without_a_choice_may_be_left_out() -> None:
    assert complete_config(parse_assignments("tp=2", (TP, FIXED)), one_row(TP, FIXED)) == {"tp": 2, "pp": 3}
    with pytest.raises(UserError, match="must also give tp"):
        complete_config(parse_assignments("pp=3", (TP, FIXED)), one_row(TP, FIXED))


@pytest.mark.parametrize(
    ("value", "choice"), [(True, True), (False, False), (1, True), (0, False), (1.0, True), (0.0, False)]
)
def test_one_and_zero_are_accepted_for_booleans(value: Any, choice: bool) -> None:
    config = complete_config({"fused": value}, one_row(FUSED))
    assert config["fused"] is choice


@pytest.mark.parametrize("value", [2, -1, 0.5, "perhaps", "1"])
def test_other_values_are_not_accepted_for_booleans(value: Any) -> None:
    with pytest.raises(UserError, match="fused must be one of false, true, not"):
        complete_config({"fused": value}, one_row(FUSED))


def test_a_boolean_is_not_a_number_among_numeric_choices() -> None:
    with pytest.raises(UserError, match="tp must be one of 1, 2, not true"):
        complete_config({"tp": True}, one_row(TP))
    mixed = Knob("mixed", (True, "auto"))
    with pytest.raises(UserError, match="mixed must be one of true, auto, not 1"):
        complete_config({"mixed": 1}, one_row(mixed))


def test_a_boolean_is_accepted_for_activation_checkpointing() -> None:
    for value, word in ((True, "full"), (False, "none")):
        assert complete_config({"activation_checkpointing": value}, one_row(CHECKPOINTS))[CHECKPOINTS.name] == word
    with pytest.raises(UserError, match="must be one of none, full, not 1"):
        complete_config({"activation_checkpointing": 1}, one_row(CHECKPOINTS))
    selective = Knob("activation_checkpointing", ("none", "selective"))
    with pytest.raises(UserError, match="must be one of none, selective, not true"):
        complete_config({"activation_checkpointing": True}, one_row(selective))


@pytest.mark.parametrize(
    ("text", "value"),
    [("fused=True", True), ("fused=false", False), ("fused=on", True), ("fused=NO", False), ("ac=full", "full"),
     ("tp = 2", 2), ("tp='2'", 2), ("tp=+2", 2), ("tp=1e3", 1000.0), ("tp=.5", 0.5), ("tp=2.", 2), ("tp=1e", "1e")],
)  # fmt: skip
def test_text_is_read_as_the_matching_choice(text: str, value: Any) -> None:
    [(_, read)] = parse_assignments(text, (TP, FUSED, CHECKPOINTS)).items()
    assert (type(read), read) == (type(value), value)


@pytest.mark.parametrize(
    ("words", "value"), [(("true", "TRUE", "yes", "Yes", "on"), True), (("false", "FALSE", "no", "No", "off"), False)]
)
def test_booleans_have_several_spellings(words: tuple[str, ...], value: bool) -> None:
    for word in words:
        assert parse_knob(f"odd={word}").choices == (value,)
        assert parse_assignments(f"fused={word}", (FUSED,))["fused"] is value


@pytest.mark.parametrize(
    ("word", "value"), [("9" * 18, int("9" * 18)), ("9" * 19, float("9" * 19)), ("9" * 31, "9" * 31)]
)
def test_too_many_digits_are_not_a_whole_number(word: str, value: Any) -> None:
    assert parse_assignments(f"tp={word}", (TP,))["tp"] == value


@pytest.mark.parametrize("text", ["tp", "=1", "tp=", "TP=1", "1p=2", "tp=,", "t-p=1"])
def test_text_that_is_not_a_knob_with_choices_is_rejected(text: str) -> None:
    with pytest.raises(UserError, match="a knob is written NAME=CHOICE,CHOICE"):
        parse_knob(text)


def test_a_knob_is_read_with_its_short_name_and_typed_choices() -> None:
    knob = parse_knob(" ac = none, 'full' ,1,0.5,true,")
    assert knob.name == "activation_checkpointing"
    assert [(type(c), c) for c in knob.choices] == [
        (str, "none"),
        (str, "full"),
        (int, 1),
        (float, 0.5),
        (bool, True),
    ]


def test_a_short_name_that_is_also_a_knob_means_the_knob() -> None:
    ac = Knob("ac", (1, 2))
    assert parse_assignments("ac=2 activation_checkpointing=full", (ac, CHECKPOINTS)) == {
        "ac": 2,
        "activation_checkpointing": "full",
    }


def test_names_with_a_common_prefix_are_distinguished() -> None:
    knobs = (Knob("sp", (1, 2)), Knob("spread", (1, 2)), Knob("s", (1, 2)))
    assert parse_assignments("s=1 sp=2,spread =1", knobs) == {"s": 1, "sp": 2, "spread": 1}
