"""Hints of a proposer move the surrogate while little is measured, and trials override them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cclsearch.propose.base import Observation, ReportedEvent, SearchView
from cclsearch.propose.bayes.prior_hints import LEVELS, collect_hints, parse_hints
from cclsearch.propose.bayes.surrogate import fit_posterior
from cclsearch.propose.events import LlmTurn, Note
from cclsearch.recording.load import load_recording
from cclsearch.tasks.training.prediction import HINT_PARTS

RECORDING = load_recording(Path(__file__).parent.parent / "workloads" / "recordings" / "nanotron-8b-2n")


def hint_events(num_seen: int = 0, **hints: str) -> tuple[ReportedEvent, ...]:
    return (LlmTurn(turn=1, beliefs=hints, num_seen=num_seen),)


def view_with(events: tuple[ReportedEvent, ...], num_trials: int = 0) -> SearchView:
    """Return the view of a search that has measured this many of the fastest rows."""
    rows = sorted(
        (r for r in RECORDING.rows if r.metrics.get("step_time_s")), key=lambda row: row.metrics.get("step_time_s") or 0
    )[:num_trials]
    seen = tuple(
        Observation(
            trial=n,
            config=r.config,
            row=RECORDING.space.row(r.config),
            loss=r.metrics.get("step_time_s"),
            metrics=r.metrics,
        )
        for n, r in enumerate(rows, start=1)
    )
    return SearchView(RECORDING.card, RECORDING.space, seen, frozenset(), 15, seed=0, events=events)


def pipeline_shift(num_trials: int, level: str) -> float:
    """Return the effect of the hint on the expected log time of pipelined rows, minus that on the other rows."""
    before, after = (fit_posterior(view_with(events, num_trials)) for events in ((), hint_events(pipeline=level)))
    assert before is not None
    assert after is not None
    change = after.log_cost_m - before.log_cost_m
    pipelined = np.array([int(RECORDING.space.config(int(row))["pp"]) > 1 for row in before.rows_m])
    return float(change[pipelined].mean() - change[~pipelined].mean())


def test_a_pipeline_hint_shifts_the_expected_time_of_pipelined_rows() -> None:
    assert pipeline_shift(0, "much_slower") > 0.05
    assert pipeline_shift(0, "much_faster") < -0.01
    assert pipeline_shift(0, "as_predicted") == pytest.approx(0, abs=1e-9)


def test_trials_outweigh_a_hint() -> None:
    assert abs(pipeline_shift(12, "much_slower")) < 0.5 * pipeline_shift(0, "much_slower")


def test_the_latest_hint_of_each_part_counts() -> None:
    events = (
        *hint_events(pipeline="slower", optimizer="faster"),
        Note(topic="test", text="moved"),
        *hint_events(pipeline="as_predicted"),
    )
    hints = collect_hints(view_with(events))
    assert {part: hint.level for part, hint in hints.items()} == {
        "pipeline": "as_predicted",
        "optimizer": "faster",
    }


def test_a_hint_decays_unless_it_is_repeated() -> None:
    old, fresh = hint_events(pipeline="slower"), hint_events(6, pipeline="slower")
    assert collect_hints(view_with(old, 6))["pipeline"].weight == pytest.approx(0.25)
    assert collect_hints(view_with((*old, *fresh), 6))["pipeline"].weight == 1.0


def test_only_known_parts_and_levels_are_accepted() -> None:
    every = [{"part": part, "is": level} for part in HINT_PARTS for level in LEVELS]
    assert set(parse_hints(every, HINT_PARTS)) == set(HINT_PARTS)
    for wrong in (None, "slow", [1], [{"part": "pipeline"}], [{"part": ["pipeline"], "is": "slower"}], {"part": "dp"}):
        assert parse_hints(wrong, HINT_PARTS) == {}
