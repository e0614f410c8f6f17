"""How many copies of a configuration fit under a power limit; and the energy of servers."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_search import run_session
from test_energy import counting, powercap  # noqa: F401  a fixture
from test_serving import ANSWERED, evidence_of, make_card
from test_serving_live import LAUNCHERS, run_script
from test_summary import open_measured

from cclsearch.cli import main
from cclsearch.core.errors import UserError
from cclsearch.loop.loop import run_search
from cclsearch.loop.session import begin_or_resume
from cclsearch.plugins import TASKS
from cclsearch.record.writer import RunWriter
from cclsearch.report.power import POWER, describe_power_limit


def test_more_copies_of_a_slower_configuration_can_do_more_under_a_power_limit(project):
    folder, session = open_measured(project, (1.0, 2.0), budget=2)
    with RunWriter(folder) as writer:
        begin_or_resume(writer, session)
        run_search(writer, session)
        spec, state = session.spec, writer.state
        with pytest.raises(UserError, match="no ranked trial has power_w: their run script recorded no energy"):
            describe_power_limit(spec, state, 1e4)
        for number, power_w, rate in ((1, 1000.0, 400.0), (2, 400.0, 200.0)):
            outcome = state.trials[number].outcome
            outcome.metrics.update({POWER: power_w, "tokens_per_s": rate})
        lines = describe_power_limit(spec, state, 2000.0)
        alone = describe_power_limit(spec, state, 1100.0)
        with pytest.raises(UserError, match="399 W are less than every ranked trial's power; the least is 400 W"):
            describe_power_limit(spec, state, 399.0)
    assert lines[0] == "2000 W are enough for 2 of trial 1 (1000 W each): 800 tokens/s together"
    assert lines[1].startswith("2000 W are enough for 5 of trial 2 (400 W each): 1000 tokens/s together: more than")
    as_much = "1100 W are enough for 1 of trial 1 (1000 W each): 400 tokens/s together"
    assert alone == [as_much], "as much as 2 of trial 2"


def test_the_command_refuses_a_run_without_power_in_one_line(project, cli):
    folder, session = open_measured(project, (1.0,), budget=1)
    run_session(folder, session)
    assert cli.err(["best", str(folder), "--power-limit", "40000"]).count("\n") == 1
    assert main(["best", str(folder), "--power-limit", "-1"]) == 2


def test_power_and_energy_per_token_are_of_the_load_that_counts(tmp_path):
    stated = {"concurrency": 2, "metrics": {"energy_j": 60.0, "power_w": 1.0}}
    evidence = evidence_of(make_card(num_requests=4), tmp_path, ANSWERED, loads=[stated])
    metrics, _ = TASKS.get("serving").measure(evidence)
    assert metrics["energy_j"] == 60.0
    assert metrics["power_w"] == pytest.approx(60.0), "60 J in a window of 1 s, and not what the script states"
    assert metrics["energy_j_per_mtoken"] == pytest.approx(60.0 / 12 * 1e6)


def test_a_server_reports_the_energy_of_the_processors_for_each_load(
    tmp_path,
    powercap,  # noqa: F811
    monkeypatch,
):
    monkeypatch.setenv("CCL_POWERCAP", str(powercap))
    slow = [{"arrival_s": 0.15 * n, "input_tokens": 12, "output_tokens": 4} for n in range(8)]
    given: dict[str, Any] = {"requests": slow, "arrival": "constant", "concurrency": None}
    folder = tmp_path / "job"
    folder.mkdir()
    with counting(powercap):
        result = run_script(folder, LAUNCHERS / "cpu_serving.py", **given)
    [load] = result["loads"]
    assert load["metrics"]["energy_j"] == pytest.approx(20.0 * load["window_s"], rel=0.1)
