"""`ccl-search ask` and `tell`: searches whose trials a script measures."""

from __future__ import annotations

import json
from typing import Any

import pytest

import cclsearch
from cclsearch.run.folder import load_run

CARD = "tiny"
MEMORY = "CUDA out of memory. Tried to allocate 2 GiB"


def measure(config: dict[str, Any]) -> float:
    if config["dp"] == 2:
        raise RuntimeError(MEMORY)
    return 0.2 + 0.1 * config["dp"] + 0.01 * config["micro_batch_size"]


def play(cli, name: str, *begin: str) -> None:
    asked = cli.json(["ask", "--workload", CARD, "--name", name, *begin])
    while asked["trial"] is not None:
        words = ["tell", name, str(asked["trial"])]
        fails = asked["config"]["dp"] == 2
        result = ["--failed", f"RuntimeError: {MEMORY}"] if fails else ["--value", str(measure(asked["config"]))]
        assert cli.json([*words, *result])["result"].endswith("out_of_memory" if fails else "caller-measured")
        is_last = load_run(cclsearch.open_run(name).folder).state.num_spent == 6
        asked = cli.json(["ask", name], code=1 if is_last else 0)
    assert asked["why"] == "the budget is used up"


def test_a_script_that_asks_and_tells_searches_as_a_function_does(project, cli):
    search = cclsearch.search(CARD, measure, budget=6, name="called")
    play(cli, "told", "--budget", "6")
    told = cclsearch.open_run("told")
    assert told.best == search.best
    assert told.provenance == "caller-measured"
    columns = [name for name in search.to_frame() if name.startswith(("config.", "state", "metric."))]
    assert told.to_frame()[columns].equals(search.to_frame()[columns])
    assert cli.json(["ask", "told", "--budget", "7"])["trial"] == 7
    stopped = told.run.state.stopped
    assert stopped is not None
    assert stopped.reason == "it waits for `ccl-search tell told 7`"
    assert "continue: ccl-search ask told" in cli.out(["status", "told"])


def test_a_search_of_a_function_continues_by_asking_and_the_other_way(project, cli):
    cclsearch.search(CARD, measure, budget=2, name="x")
    asked = cli.json(["ask", "x", "--budget", "4"])
    assert asked["trial"] == 3
    result = cclsearch.resume("x", measure)
    assert len(result.to_frame()) == 4
    assert result.to_frame()["metric.step_time_s"].notna().sum() >= 2


def test_several_trials_are_open_at_a_time_and_any_may_be_told_first(project, cli):
    first = cli.json(["ask", "-w", CARD, "--name", "x", "--parallel", "2"])
    second = cli.json(["ask", "x"])
    assert first["config"] != second["config"]
    text = cli.err(["ask", "x"])
    assert "trial 1: " in text
    assert "trial 2: " in text
    assert cli.json(["tell", "x", "2", "--metric", "step_time_s=0.5"])["best"] == 2
    assert cli.json(["tell", "x", "1", "--metric", "step_time_s=0.4", "--metric", "peak_memory_gib=3"])["best"] == 1
    assert load_run(project / "runs" / "x").state.num_unfinished == 0


def test_what_was_measured_without_being_asked_for_is_told(project, cli):
    cli.json(["ask", "-w", CARD, "--name", "x"])
    space = cclsearch.build_space(CARD)
    config = ",".join(f"{k}={v}" for k, v in space.config(5).items()).lower()
    assert cli.json(["tell", "x", "--config", config, "--value", "0.3"])["best"] == 2
    trial = load_run(project / "runs" / "x").state.trials[2]
    assert trial.proposer == "told"
    assert trial.config == space.config(5)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["tell", "x", "2", "--value", "1"], "trial 2 of x is not open"),
        (["tell", "x", "1"], "it must be step_time_s"),
        (["tell", "x", "1", "--value", "nan"], "--value"),
        (["tell", "x", "1", "--metric", "step_time_s=fast"], "not a measurement"),
        (["tell", "x", "1", "--metric", "mfu=0.4"], "it must be step_time_s"),
        (["tell", "x", "--value", "1"], "name either the trial"),
        (["tell", "x", "--config", "dp=3", "--value", "1"], "dp"),
        (["tell", "x", "--config", "dp=2", "--value", "1"], "of the search space match"),
        (["ask", "x", "-w", CARD], "are frozen"),
        (["ask", "y"], "there is no run 'y'"),
        (["ask"], "nothing is named"),
        (["resume", "x"], "or `ccl-search ask x`"),
        (["ask", "replayed"], "run by the launcher 'replay'"),
        (["tell", "replayed", "1", "--value", "1"], "run by the launcher 'replay'"),
    ],
)
def test_wrong_words_are_one_line_and_change_nothing(words, problem, project, cli):
    cli.json(["ask", "-w", CARD, "--name", "x"])
    cli.out(["run", "-w", "wl2", "--launcher", "replay", "--budget", "1", "--name", "replayed", "--quiet"])
    ledger = project / "runs" / "x" / "ledger.jsonl"
    before = ledger.read_bytes()
    text = cli.err(words)
    assert problem in text
    assert text.count("\n") == 1
    assert ledger.read_bytes() == before
    assert json.loads(before.splitlines()[0])["event"] == "search_started"
