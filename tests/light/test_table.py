"""Tables of configurations, and knobs as they are given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cclsearch.core.errors import UserError
from cclsearch.core.values import Config
from cclsearch.space.parse import parse_assignments, parse_knob
from cclsearch.space.rule import Columns
from cclsearch.space.table import Knob, Space, count_ranks, space_from_rows

KNOBS = (Knob("tp", (1, 2, 4)), Knob("fused", (False, True)), Knob("kernel", ("flash", "torch")))
ROWS = [
    {"tp": 4, "fused": True, "kernel": "torch"},
    {"tp": 1, "fused": False, "kernel": "flash"},
    {"tp": 2, "fused": True, "kernel": "flash"},
]


@pytest.mark.parametrize(
    ("choices", "dtype"),
    [
        ((1, 2), "int64"),
        ((0.5, 2.0), "float64"),
        ((False, True), "bool"),
        (("a", "b"), "object"),
        ((1, "auto"), "object"),
        ((1, True), "object"),
        ((1, 0.5), "object"),
    ],
)
def test_a_column_has_the_type_that_its_choices_share(choices, dtype):
    space = space_from_rows([Knob("k", choices)], [{"k": choices[1]}, {"k": choices[0]}])
    column = space.column("k")
    assert str(column.dtype) == dtype
    assert [(type(v), v) for v in column.tolist()] == [(type(v), v) for v in (choices[1], choices[0])]


def test_a_recording_is_a_space_of_exactly_its_rows():
    space = space_from_rows(KNOBS, ROWS)
    assert (len(space), space.num_raw, space.rules) == (3, 3, ("recorded",))
    for row, config in enumerate(ROWS):
        assert space.config(row) == Config(config)
        assert space.row(config) == row
    assert len(space_from_rows(KNOBS, [])) == 0


@pytest.mark.parametrize(
    "config",
    [
        {"tp": 4, "fused": True},
        {"tp": 4, "fused": True, "kernel": "torch", "pp": 1},
        {"tp": 4, "fused": True, "pp": 1},
        {"tp": 8, "fused": True, "kernel": "torch"},
        {"tp": 4, "fused": 1, "kernel": "torch"},
        {"tp": True, "fused": False, "kernel": "flash"},
        {"tp": 4, "fused": False, "kernel": "torch"},
    ],
)
def test_a_configuration_outside_the_space_has_no_row(config):
    assert space_from_rows(KNOBS, ROWS).row(config) is None


def test_a_degree_without_a_knob_is_one():
    knobs = [Knob("tp", (1, 2)), Knob("dp", (3, 5)), Knob("pp", (1, 7))]
    rows = [{"tp": 2, "dp": 3, "pp": 7}, {"tp": 1, "dp": 5, "pp": 1}]
    assert space_from_rows(knobs, rows).num_accelerators_N.tolist() == [42, 5]
    with_context = space_from_rows([*knobs, Knob("cp", (1, 2))], [{"tp": 2, "dp": 3, "pp": 7, "cp": 2}])
    assert with_context.num_accelerators_N.tolist() == [84]
    assert count_ranks(with_context.config(0)) == 84
    alone = space_from_rows(knobs[:1], [{"tp": 2}])
    assert alone.num_accelerators_N.tolist() == [2]
    assert alone.column("dp").tolist() == [1]
    assert alone.column("kernel", "torch").tolist() == ["torch"]
    assert (alone.has("tp"), alone.has("dp")) == (True, False)


def test_rules_see_a_knob_that_is_missing_at_its_neutral_value():
    columns = Columns({"fused": np.array([True, False])}, 2)
    assert columns["fused"].tolist() == [1, 0]
    assert columns["dp"].tolist() == [1, 1]
    assert columns["zero_stage"].tolist() == [0, 0]
    assert columns["sequence_parallel"].tolist() == [0, 0]
    assert columns.equals("fused", (1, 0)).tolist() == [False, False]
    assert columns.equals("fused", (True,)).tolist() == [True, False]


def test_spaces_are_compared_by_identity_and_not_by_content():
    space = space_from_rows(KNOBS, ROWS)
    assert space in {space}
    assert space != Space(space.knobs, space.codes_NK, num_raw=3)


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
