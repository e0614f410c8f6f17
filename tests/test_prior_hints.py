"""What a proposer says it has learnt moves the surrogate while little is measured, and gives way to trials."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cclsearch.propose.base import Observation, ProposerEvent, SearchView
from cclsearch.propose.bayes.prior_hints import LEVELS, PARTS, collect_hints, format_hints, parse_hints
from cclsearch.propose.bayes.surrogate import fit_posterior
from cclsearch.recording.load import load_recording

RECORDING = load_recording(Path(__file__).parent.parent / "workloads" / "recordings" / "nanotron-8b-2n")


def told(num_seen: int = 0, **beliefs: str) -> tuple[ProposerEvent, ...]:
    return (ProposerEvent("llm_turn", "turn 1", {"beliefs": format_hints(beliefs, num_seen)}),)


def view_with(remarks: tuple[ProposerEvent, ...], num_trials: int = 0) -> SearchView:
    """A search that has read that many of the fastest rows."""
    rows = sorted((r for r in RECORDING.rows if r.step_time_s), key=lambda row: row.step_time_s or 0)[:num_trials]
    seen = tuple(
        Observation(
            trial=n, config=r.config, row=RECORDING.space.row(r.config), loss=r.step_time_s, step_time_s=r.step_time_s
        )
        for n, r in enumerate(rows, start=1)
    )
    return SearchView(RECORDING.card, RECORDING.space, seen, frozenset(), 15, seed=0, remarks=remarks)


def shift_of_pipelines(num_trials: int, level: str) -> float:
    """By how much more (in log units) pipelined rows are expected to take than others, told so over not told."""
    before, after = (fit_posterior(view_with(remarks, num_trials)) for remarks in ((), told(pipeline=level)))
    assert before is not None
    assert after is not None
    change = after.log_time_m - before.log_time_m
    pipelined = np.array([int(RECORDING.space.config(int(row))["pp"]) > 1 for row in before.rows_m])
    return float(change[pipelined].mean() - change[~pipelined].mean())


def test_a_slow_pipeline_makes_pipelined_rows_look_slower_and_a_fast_one_faster() -> None:
    assert shift_of_pipelines(0, "much_slower") > 0.05
    assert shift_of_pipelines(0, "much_faster") < -0.01
    assert shift_of_pipelines(0, "as_predicted") == pytest.approx(0, abs=1e-9)


def test_trials_outweigh_what_was_said() -> None:
    assert abs(shift_of_pipelines(12, "much_slower")) < 0.5 * shift_of_pipelines(0, "much_slower")


def test_of_each_part_the_latest_word_counts() -> None:
    remarks = (
        *told(pipeline="slower", optimizer="faster"),
        ProposerEvent("arbiter", "moved"),
        *told(pipeline="as_predicted"),
    )
    held = collect_hints(view_with(remarks))
    assert {part: hint.level for part, hint in held.items()} == {
        "pipeline": "as_predicted",
        "optimizer": "faster",
    }


def test_a_belief_fades_unless_it_is_said_again() -> None:
    old, fresh = told(pipeline="slower"), told(6, pipeline="slower")
    assert collect_hints(view_with(old, 6))["pipeline"].weight == pytest.approx(0.25)
    assert collect_hints(view_with((*old, *fresh), 6))["pipeline"].weight == 1.0


def test_only_known_parts_and_levels_are_taken() -> None:
    every = [{"part": part, "is": level} for part in PARTS for level in LEVELS]
    assert set(parse_hints(every)) == set(PARTS)
    for wrong in (None, "slow", [1], [{"part": "pipeline"}], [{"part": ["pipeline"], "is": "slower"}], {"part": "dp"}):
        assert parse_hints(wrong) == {}
