"""What a report takes from the search space, from Optuna and from traces."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from paths import TESTS
from report_pages import make_trial

from cclsearch.analysis.importance import find_importance
from cclsearch.analysis.report_pages import MAX_OBSERVATIONS, pick_nearest, read_step
from cclsearch.core.values import Config
from cclsearch.propose.observations import Observation
from cclsearch.report.charts import draw_run
from cclsearch.report.gather import gather_run
from cclsearch.run.folder import load_run


def test_a_long_search_is_predicted_from_the_trials_nearest_its_winner() -> None:
    configs = [Config(tp=tp, pp=pp, bucket=n) for n in range(40) for tp in (1, 2, 4) for pp in (1, 2)]
    seen = [Observation(number, config, number, 1.0) for number, config in enumerate(configs, 1)]
    picked = pick_nearest(seen, configs[77])
    assert len(picked) == MAX_OBSERVATIONS
    assert [o.trial for o in picked] == sorted(o.trial for o in picked)
    steps = {o.trial: sum(value != configs[77][knob] for knob, value in o.config.items()) for o in seen}
    taken = {o.trial for o in picked}
    assert max(steps[n] for n in taken) <= min(steps[n] for n in steps if n not in taken)
    assert pick_nearest(seen[:50], configs[77]) == seen[:50]


def test_the_knob_that_decides_is_the_most_important() -> None:
    trials = [make_trial(n, 10.0 / 2 ** (n % 3) + 0.01 * (n % 2)) for n in range(1, 25)]
    trials = [replace(t, config={**t.config, "dp": 1}) for t in trials]
    shares = find_importance(trials)
    assert next(iter(shares)) == "tp"
    assert "dp" not in shares
    assert sum(shares.values()) == pytest.approx(1.0, abs=0.01)
    assert find_importance(trials[:4]) == {}


def test_a_step_of_a_real_run_has_ranks_causes_and_lanes(tmp_path: Path) -> None:
    recorded = TESTS / "recorded"
    shutil.copytree(recorded / "runs" / "measured", tmp_path / "measured")
    shutil.copytree(recorded / "gloo-ddp2", tmp_path / "measured" / "trials" / "0003" / "trace")
    run = load_run(tmp_path / "measured")
    step = read_step(run)
    assert step is not None
    assert set(step.seconds_by_rank) == {0, 1}
    assert all("compute" in parts for parts in step.seconds_by_rank.values())
    assert {lane.rank for lane in step.lanes if lane.spans_ms} == {0, 1}
    charts = {chart.name: chart for chart in draw_run(replace(gather_run(run), step=step))}
    assert charts["ranks"].title.startswith(f"Trial {step.trial}: one step by rank")
    assert {row["rank"] for row in charts["timeline"].spec["data"]["values"]} == {0, 1}
