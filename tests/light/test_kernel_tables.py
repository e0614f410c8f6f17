"""Measured kernels as a prior of serving predictions, without the tables: those are in `make test-frameworks`."""

from __future__ import annotations

import importlib.util

import pytest

from cclsearch.card.load import load_card
from cclsearch.card.model import Card
from cclsearch.core.errors import UserError
from cclsearch.tasks.serving.closed_form.kernel_tables import require_kernel_tables

ASKED = "kernel_tables=aiconfigurator"
LOAD = ("task=serving", "input_len=1024", "output_len=256", "concurrency=16", "accelerator=nvidia_h100")


def make_card(*sets: str, workload: str = "wl2-inference") -> Card:
    card = load_card(workload, sets=[*LOAD, *sets])
    assert isinstance(card, Card)
    return card


def check_refused(sets: tuple[str, ...], problem: str, workload: str = "wl2-inference") -> None:
    """Assert that the card's tables are refused in one line."""
    with pytest.raises(UserError, match=problem) as refused:
        require_kernel_tables(make_card(*sets, workload=workload))
    assert "\n" not in str(refused.value)


def test_other_tables_are_refused_in_one_line():
    check_refused(("kernel_tables=nvidia",), "kernel_tables must be aiconfigurator; it is 'nvidia'")


def test_without_the_package_the_line_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'ccl-search\[aiconfigurator\]'"):
        require_kernel_tables(make_card(ASKED))
