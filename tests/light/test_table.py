"""The search space as columns: types, rows and configurations, and knobs that a space does not have."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cclsearch.core.values import Config
from cclsearch.space.numbers import LIMITS
from cclsearch.space.rule import RULES, Columns
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


def test_spaces_and_their_parts_are_frozen():
    from cclsearch.card.load import load_card

    space = space_from_rows(KNOBS, ROWS)
    rule = RULES["pp_at_most_layers"](load_card("wl2"), {})
    for value in (space, space.knobs[0], rule, LIMITS["experts"]):
        with pytest.raises(dataclasses.FrozenInstanceError):
            value.name = "other"  # type: ignore[union-attr, misc]
    assert space in {space}, "spaces are compared by identity, not by content"
    assert space != Space(space.knobs, space.codes_NK, num_raw=3)
