"""One search with honest trials and tricks that really train: the tricks are refused by their rules, none wins."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest
from paths import ROOT

from cclsearch.run.folder import load_run

EXPECTED = {
    "half_sequence+no_reduction": {"traced_work", "traced_layout"},
    "bf16+rehearsed_half": {"precision", "step_times"},
    "trace_with_new_times": {"trace_origin"},
}
"""Tricks of one trial -> rules that refuse it."""


@pytest.fixture
def cheats(monkeypatch) -> ModuleType:
    """Return tests/cheats/play.py as a module."""
    spec = importlib.util.spec_from_file_location("cheats_play", ROOT / "tests" / "cheats" / "play.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    monkeypatch.setenv("CCL_SEARCH_PATH", str(ROOT / "tests" / "cheats"))
    spec.loader.exec_module(module)
    return module


def test_every_trick_says_what_it_does(cheats):
    tricks = cheats.read_tricks()
    assert len(tricks) >= 150
    assert {trick for name in EXPECTED for trick in name.split("+")} <= set(tricks)
    assert [name for name, words in tricks.items() if not words.endswith(".")] == []


def test_tricks_are_refused_by_their_rules_and_honest_trials_are_admitted(cheats, tmp_path):
    folder = cheats.run_cheats(cheats.list_entries(list(EXPECTED), cheats.HONEST[:2]), tmp_path)
    rows = cheats.read_rows(folder)
    refused_by = {row.trick: row.refused_by for row in rows if row.trick != "honest"}
    assert {trick: refused_by[trick] for trick, rules in EXPECTED.items() if not rules <= set(refused_by[trick])} == {}
    honest = [row for row in rows if row.trick == "honest"]
    load = {"spread", "trace_time", "warmup"}  # other work on the machine that runs the tests
    assert [row for row in honest if set(row.refused_by) - load] == []
    best = load_run(folder).state.best
    assert best is None or best.number in {row.number for row in honest}
    edited = cheats.edit_result(folder, honest[0].number)
    assert "unedited" in edited.refused_by


def test_answers_kept_of_an_unlogged_pass_and_halved_times_are_refused(cheats, tmp_path):
    tricks = ["times_halved", "unlogged_pass_once_the_window_is_open"]
    entries = [("honest", {}), *((trick, {}) for trick in tricks)]
    rows = cheats.read_rows(cheats.run_cheats(entries, tmp_path, task="serving"))
    assert {row.trick: "window" in row.refused_by for row in rows} == {"honest": False, **dict.fromkeys(tricks, True)}
