"""A value of an unknown knob that always fails is found from failures and successes, and no longer chosen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from paths import ROOT

from cclsearch.core.values import Failure, FailureKind, Stage
from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.bayes.broken_values import find_broken_values
from cclsearch.propose.bayes.proposer import DefaultProposer
from cclsearch.recording.load import Recording, load_recording
from cclsearch.space.table import Knob, space_from_rows

LANDSCAPE = ROOT / "benchmarks" / "landscapes" / "vtrain-h1024-l12-g8-b8"
CODES = np.array([[a, b] for a in range(3) for b in range(2)], dtype=np.int16)
"""Rows 0 to 5: first knob 0, 0, 1, 1, 2, 2; second knob 0, 1, 0, 1, 0, 1."""


def p_broken(fine: list[int], failed: list[int], other: float = 0.05) -> np.ndarray:
    found = find_broken_values(
        CODES, np.array(fine, dtype=int), np.array(failed, dtype=int), np.full(len(failed), other)
    )
    return found.p_broken(np.arange(len(CODES)))


def test_what_succeeded_is_intact_and_an_untried_value_may_be_broken():
    found = p_broken([0, 3], [])
    assert found[[0, 3]].max() == 0
    assert found[[1, 2]].max() < 0.03 < found[[4, 5]].min()
    assert found[[4, 5]].max() < 0.15


def test_a_value_that_was_found_broken_makes_untried_ones_more_suspect():
    assert p_broken([0, 1], [2, 3])[[4, 5]].min() > p_broken([0, 1], [])[[4, 5]].max()


def test_two_failures_with_one_value_in_common_blame_it_and_not_the_values_that_succeeded():
    found = p_broken([2, 5], [0, 1])
    assert found[[0, 1]].min() > 0.9
    assert found[[2, 3, 4, 5]].max() < 0.1


def test_a_success_clears_a_value_and_then_only_the_pair_can_be_broken():
    before, after = p_broken([], [0, 0]), p_broken([1, 2], [0, 0])
    assert before[1] > 0.3 > after[1]
    assert after[0] > 0.8


def test_failures_that_something_else_explains_blame_no_value():
    assert p_broken([2], [0, 1], other=0.98).max() < 0.3 < p_broken([2], [0, 1], other=0.05).max()


def with_broken_method(kind: FailureKind) -> tuple[Recording, Failure]:
    """Return the table with an unknown knob `method`, first in the space, and how its value `full` fails."""
    recording = load_recording(LANDSCAPE)
    rows = tuple(
        replace(row, config=type(row.config)({"method": method, **row.config}))
        for method in ("full", "partial", "none")
        for row in recording.rows[::3]
    )
    knobs = (Knob("method", ("full", "partial", "none")), *recording.space.knobs)
    space = space_from_rows(knobs, [row.config for row in rows])
    return replace(recording, space=space, rows=rows), Failure(stage=Stage.RUN, kind=kind, message="failed")


@pytest.mark.parametrize("kind", [FailureKind.CRASHED, FailureKind.OUT_OF_MEMORY])
def test_a_search_moves_away_from_a_value_that_always_fails(kind):
    recording, failure = with_broken_method(kind)
    seen: list[Observation] = []
    for trial in range(8):
        view = SearchView(recording.card, recording.space, tuple(seen), frozenset(), 15 - trial, seed=0)
        row = recording.space.row(DefaultProposer().propose(view, 1)[0].config)
        assert row is not None
        config, measured = recording.rows[row].config, recording.rows[row].metrics
        if config["method"] == "full":
            seen.append(Observation(trial, config, row, None, failure=failure))
        else:
            seen.append(Observation(trial, config, row, measured["step_time_s"], metrics=measured))
    methods = [o.config["method"] for o in seen]
    assert methods.count("full") <= 2
