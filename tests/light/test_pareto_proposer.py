"""The `pareto` strategy on a joined recording: it finds the Pareto front early, repeats nothing, takes any metrics."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from recorded_runs import write_recording

from cclsearch.core.values import Failure, FailureKind, Stage
from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.bayes.pareto_proposer import ParetoProposer, split_by_size
from cclsearch.recording.join import find_family, join_recordings
from cclsearch.recording.load import Recording, load_recording
from cclsearch.scoring.objective import load_objective


@pytest.fixture
def joined(tmp_path: Path) -> Recording:
    for size in (4, 8, 16):
        write_recording(tmp_path / "r" / f"toy-{size}", size)
    return load_recording(join_recordings(find_family(tmp_path / "r" / "toy-4"), tmp_path / "joined"))


def view_of(recording: Recording, rows: list[int], pending: frozenset[int] = frozenset()) -> SearchView:
    return SearchView(
        card=recording.card,
        space=recording.space,
        observations=tuple(observe(recording, row, n) for n, row in enumerate(rows, 1)),
        pending=pending,
        budget_left=27 - len(rows),
        seed=0,
        target=load_objective("pareto"),
    )


def observe(recording: Recording, row: int, trial: int) -> Observation:
    measured = recording.rows[row]
    if measured.metrics.get("step_time_s") is None:
        failure = Failure(stage=Stage.RUN, kind=FailureKind.OUT_OF_MEMORY, message="recorded as oom")
        return Observation(trial=trial, config=measured.config, row=row, loss=None, failure=failure)
    metrics = {
        "step_time_s": measured.metrics.get("step_time_s"),
        "num_accelerators": float(recording.space.num_accelerators_N[row]),
    }
    time_s = measured.metrics.get("step_time_s")
    return Observation(trial, measured.config, row, time_s, metrics=measured.metrics | metrics)


def ask(recording: Recording, proposer: ParetoProposer, count: int) -> list[int]:
    rows: list[int] = []
    while len(rows) < count and (proposals := proposer.propose(view_of(recording, rows), 1)):
        row = recording.space.row(proposals[0].config)
        assert row is not None
        rows.append(row)
    return rows


def test_the_pareto_front_is_found_in_two_thirds_of_the_rows_without_repeats(joined: Recording) -> None:
    rows = ask(joined, ParetoProposer(), 18)
    assert len(set(rows)) == len(rows) == 18
    found = {int(joined.space.num_accelerators_N[row]): np.inf for row in rows}
    for row in rows:
        size = int(joined.space.num_accelerators_N[row])
        found[size] = min(found[size], joined.rows[row].metrics.get("step_time_s") or np.inf)
    assert found == {4: 4.0, 8: 2.0, 16: 1.0}


def test_it_proposes_until_every_row_was_tried(joined: Recording) -> None:
    assert sorted(ask(joined, ParetoProposer(), 99)) == list(range(27))


def test_a_batch_is_deterministic_distinct_and_not_running(joined: Recording) -> None:
    pending = frozenset({0, 9})
    view = view_of(joined, [4, 13], pending)
    first, again = ParetoProposer().propose(view, 5), ParetoProposer().propose(view, 5)
    assert [p.config for p in first] == [p.config for p in again]
    rows = [joined.space.row(p.config) for p in first]
    assert len(set(rows)) == 5
    assert not set(rows) & {0, 9, 4, 13}
    assert all(p.proposer == "pareto" and p.rationale and p.expects.metrics["step_time_s"] for p in first)


def test_a_proposer_used_on_another_space_does_not_mix_them(joined: Recording, tmp_path: Path) -> None:
    proposer = ParetoProposer()
    ask(joined, proposer, 2)
    family = find_family(tmp_path / "r" / "toy-4")
    smaller = load_recording(join_recordings(family[:2], tmp_path / "joined"))
    assert all(smaller.space.row(p.config) is not None for p in proposer.propose(view_of(smaller, []), 3))


def test_other_metrics_form_a_pareto_front_too(joined: Recording) -> None:
    proposer = ParetoProposer([("step_time_s", "minimize"), ("peak_memory_gib", "minimize")])
    rows = ask(joined, proposer, 4)
    assert len(set(rows)) == 4


def test_the_parts_by_size_cover_the_space(joined: Recording) -> None:
    sizes = split_by_size(joined.space)
    assert [size.num_accelerators for size in sizes] == [4, 8, 16]
    assert sorted(row for size in sizes for row in size.row_of) == list(range(27))
    assert [size.width for size in sizes] == pytest.approx([1.0, 1.0, 1.0])
    for size in sizes:
        for row, here in size.row_of.items():
            assert size.space.config(here) == joined.space.config(row)
