"""Arithmetic over an objective's parameters: values, and rejected expressions."""

from __future__ import annotations

import pytest

from cclsearch.core.errors import UserError
from cclsearch.scoring.declaration import evaluate, parameter_names


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3.0),
        (" 1 - weight ", 0.75),
        ("2 + 3 * 4", 14.0),
        ("(2 + 3) * 4", 20.0),
        ("price / 3600", 0.5),
        ("-weight + 1", 0.75),
        ("8 / 4 / 2", 1.0),
        ("weight" + " " * 194, 0.25),
    ],
)
def test_an_expression_has_its_arithmetic_value(text, value):
    assert evaluate(text, {"weight": 0.25, "price": 1800.0}, "file") == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1" * 201, "at most 200 characters; this one has 201"),
        ("1 +", "is not arithmetic over parameters"),
        ("2 ** 3", "only numbers, parameters"),
        ("2 % 3", "only numbers, parameters"),
        ("not 1", "only numbers, parameters"),
        ("+1", "only numbers, parameters"),
        ("True", "only numbers, parameters"),
        ("'word'", "only numbers, parameters"),
        ("__import__('os')", "only numbers, parameters"),
        ("1 / 0", "has no finite value"),
        ("1e308 * 10", "has no finite value"),
        ("price", "there is no parameter 'price'; known: weight"),
    ],
)
def test_anything_else_is_rejected_with_its_location(text, message):
    with pytest.raises(UserError, match="file: ") as caught:
        evaluate(text, {"weight": 0.25}, "file")
    assert message in str(caught.value)


def test_an_error_without_parameters_lists_none():
    with pytest.raises(UserError, match="there is no parameter 'price'; known: none"):
        evaluate("price", {}, "file")


def test_parameter_names_are_found_without_values():
    assert parameter_names("a * (b + 1) - a", "file") == {"a", "b"}
    assert parameter_names("2", "file") == frozenset()
