"""Growth of the search space during a search: recorded in the ledger, and the same after a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from recorded_runs import search, write_recording
from scripted_launcher import ScriptedLauncher, ran
from scripted_search import open_search

from cclsearch.core.errors import UserError
from cclsearch.plan.workload import hash_space
from cclsearch.record.event import SpaceGrown
from cclsearch.record.writer import RunWriter
from cclsearch.run.folder import load_run
from cclsearch.search.loop import run_search
from cclsearch.search.session import begin_or_resume, grow_space, open_session, rebuild_space


def test_a_search_continues_over_the_grown_space_and_so_does_a_resume(project: Path) -> None:
    launcher = ScriptedLauncher(ran)
    folder, session = open_search(project, launcher)
    size = len(session.space)
    with RunWriter(folder) as writer:
        begin_or_resume(writer, session)
        run_search(writer, session)
        session = grow_space(writer, session, {"zero_stage": [2]}, why="stage 2 may be faster")
        session = grow_space(writer, session, {"overlap": [True, False]})
    assert len(session.space) > size
    run = load_run(folder)
    events = [event for event in run.state.reported if isinstance(event, SpaceGrown)]
    assert [event.text for event in events] == ["stage 2 may be faster", ""]
    assert events[1].choices["zero_stage"] == (0, 1, 2), "each event names everything that has grown"
    assert (run.spec.space_size, run.spec.space_sha256) == (len(session.space), hash_space(session.space))
    assert hash_space(rebuild_space(run.spec)) == hash_space(session.space)
    resumed = open_session(folder)
    assert hash_space(resumed.space) == hash_space(session.space)
    with RunWriter(folder) as writer:
        observed = writer.state.trials.observe(resumed.space)
    assert len(observed) == 4
    assert [o.row for o in observed] == [None] * 4, "they ran before the knob `overlap` existed"


def test_observations_get_their_rows_of_the_grown_space(project: Path) -> None:
    folder, session = open_search(project, ScriptedLauncher(ran))
    with RunWriter(folder) as writer:
        begin_or_resume(writer, session)
        run_search(writer, session)
        grown = grow_space(writer, session, {"zero_stage": [2]})
        before = [o.row for o in writer.state.trials.observe(session.space)]
        after = writer.state.trials.observe(grown.space)
        assert [grown.space.config(o.row or 0) for o in after] == [o.config for o in after]
        assert before != [o.row for o in after], "the rows have moved"
        run_search(writer, replace(grown, max_trials=8))
        assert len(writer.state.trials) == 4, "the budget is used up"
        begin_or_resume(writer, grown, budget=8)
        run_search(writer, grown)
        assert len({trial.config for trial in writer.state.trials.values()}) == 8


def test_a_recording_cannot_grow(project: Path) -> None:
    run = search(write_recording(project / "toy"), "r", budget=2)
    with RunWriter(run.folder) as writer, pytest.raises(UserError, match="no choices can be added"):
        grow_space(writer, open_session(run.folder), {"tp": [64]})


@pytest.mark.parametrize("choices", [{}, {"zero_stage": [0]}, {"micro_batch_size": [7]}])
def test_choices_that_add_no_configuration_are_no_growth(project: Path, choices: dict[str, list[int]]) -> None:
    folder, session = open_search(project, ScriptedLauncher(ran))
    with RunWriter(folder) as writer:
        begin_or_resume(writer, session)
        with pytest.raises(UserError, match="would stay as it is: no configuration with these choices"):
            grow_space(writer, session, choices)
        assert writer.state.growth is None
