"""Runs of version 0.1.0 open, resume and report with the present version, through the command line only.

The expected figures are those that 0.1.0 printed of its runs. `recorded_versions.py` describes the fixtures.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from expected_runs import BY_KIND, RUNS, ExpectedRun, copy_with_needs, each_run, layout, tiny
from recorded_versions import (
    RECORDED,
    call,
    copy_run,
    format_config,
)

from cclsearch.propose.events import ArbiterMove, LlmTurn
from cclsearch.run.folder import load_run


def test_every_fixture_is_used() -> None:
    others = {"recordings", "failed", "cut-off", "night", "own"}
    assert {path.name for path in RECORDED.iterdir()} == {expected.kind for expected in RUNS} | others


@each_run
def test_status_gives_the_state_of_the_search(expected: ExpectedRun, project: Path) -> None:
    copy_with_needs(project, expected)
    status = call("status", expected.kind, "--json").json
    assert (status["run"], status["standing"]) == (expected.kind, expected.standing)
    assert [trial["trial"] for trial in status["trials"]] == list(range(1, expected.num_trials + 1))
    assert status["trials"][0]["config"] == expected.first
    assert status["best"]["config"] == expected.best
    text = call("status", expected.kind).out
    assert format_config(expected.best) in text
    assert expected.shown in text
    rows = {row["run"]: row for row in call("status", "--json").json}
    assert rows[expected.kind]["trials"] == expected.num_trials
    assert rows[expected.kind]["best_step_time_s"] == pytest.approx(expected.step_time_s)


@each_run
def test_best_gives_the_best_configuration(expected: ExpectedRun, project: Path) -> None:
    run = copy_with_needs(project, expected)
    best = call("best", expected.kind, "--json").json
    assert (best["trial"], best["config"]) == (expected.trial, expected.best)
    assert best["step_time_s"] == pytest.approx(expected.step_time_s)
    assert best["num_accelerators"] == expected.num_accelerators
    assert best["provenance"] == expected.provenance
    assert Path(best["evidence"]) == run / "trials" / f"{expected.trial:04d}"
    if expected.provenance == "recorded":  # for a measured run, `best` starts the run script to list its options
        text = call("best", expected.kind).out
        assert format_config(expected.best) in text
        assert expected.shown in text


@each_run
def test_show_gives_the_first_and_the_best_trial(expected: ExpectedRun, project: Path) -> None:
    copy_with_needs(project, expected)
    assert call("show", expected.kind, "1", "--json").json["config"] == expected.first
    assert format_config(expected.first) in call("show", expected.kind, "1").out
    shown = call("show", expected.kind, str(expected.trial), "--json").json
    assert shown["config"] == expected.best
    assert shown["outcome"]["metrics"]["step_time_s"] == pytest.approx(expected.step_time_s)
    assert shown["outcome"]["provenance"] == expected.provenance


@each_run
def test_the_report_shows_the_best_configuration(expected: ExpectedRun, project: Path) -> None:
    copy_with_needs(project, expected)
    call("report", expected.kind, "--no-png", "--out", "page.html")
    page = Path("page.html").read_text(encoding="utf-8")
    assert format_config(expected.best) in page
    assert str(expected.step_time_s)[:5] in page  # the page has the full figure in sortable columns
    assert expected.provenance in page


@each_run
def test_admit_gives_the_same_verdicts_as_the_ledger(expected: ExpectedRun, project: Path) -> None:
    copy_with_needs(project, expected)
    admissions = call("admit", expected.kind, "--json").json
    assert admissions["inputs_unchanged"]
    finished = set(range(1, expected.num_trials + 1)) - set(expected.unfinished)
    assert {trial["trial"] for trial in admissions["trials"]} == finished
    now = {trial["trial"] for trial in admissions["trials"] if trial["admitted"]}
    recorded = {trial["trial"] for trial in admissions["trials"] if trial["admitted_in_ledger"]}
    assert now == recorded == finished - set(expected.not_admitted)
    unedited = {
        v["ok"] for t in admissions["trials"] for v in t["verdicts"] if v["rule"] == "unedited" and t["admitted"]
    }
    assert unedited == {True}


@each_run
def test_the_csv_has_a_row_per_trial_and_marks_the_best(expected: ExpectedRun, project: Path) -> None:
    copy_with_needs(project, expected)
    call("export", expected.kind, "--to", "csv", "--out", "table.csv")
    with Path("table.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["trial"]) for row in rows] == list(range(1, expected.num_trials + 1))
    [best] = [row for row in rows if row["is_best"] == "True"]
    assert int(best["trial"]) == expected.trial
    assert {knob: best[f"config.{knob}"] for knob in expected.best} == {k: str(v) for k, v in expected.best.items()}
    assert float(best["metric.step_time_s"]) == pytest.approx(expected.step_time_s)


@pytest.mark.parametrize("kind", ["replayed", "policy", "measured"])
def test_the_optuna_study_has_the_same_trials_and_best(kind: str, project: Path) -> None:
    import optuna

    expected = BY_KIND[kind]
    copy_with_needs(project, expected)
    call("export", kind, "--to", "optuna", "--out", "study.db")
    study = optuna.load_study(study_name=kind, storage="sqlite:///study.db")
    assert len(study.trials) == expected.num_trials
    assert study.best_trial.params == expected.best
    assert study.best_value == pytest.approx(expected.step_time_s)


def test_llm_turns_and_moves_of_version_1_are_read_as_typed_events(project: Path) -> None:
    state = load_run(copy_run(project, "hybrid")).state
    turns = [event for event in state.reported if isinstance(event, LlmTurn)]
    moves = [event for event in state.reported if isinstance(event, ArbiterMove)]
    assert [turn.turn for turn in turns] == [1, 2, 3, 4, 5]
    third = turns[2]
    assert (third.decision, third.cost.usage.input_tokens, third.cost.requests) == ("submit", 2000, 2)
    assert third.submitted[0].config == layout(2, 8, 1, 0, 1)
    assert third.submitted[0].expects.metrics == {"step_time_s": 11.57, "peak_memory_gib": 33.7}
    assert (third.submitted[0].is_own_idea, third.submitted[0].is_overrule) == (False, False)
    assert (moves[0].before, moves[0].after.phase, moves[0].after.since_trial) == ("seeds", "llm", 2)
    assert state.ended is not None
    assert state.ended.kind == "budget_used"


def test_the_texts_of_version_1_get_kinds_once(project: Path) -> None:
    stopped = load_run(copy_run(project, "stopped")).state
    assert stopped.stopped is not None
    assert stopped.stopped.kind == "signal"
    measured = load_run(copy_run(project, "measured")).state
    assert [retry.kind for retry in measured.trials[3].retries] == ["disturbed"]


def test_a_measured_run_keeps_its_confirmation_retry_and_traces(project: Path) -> None:
    run = copy_with_needs(project, BY_KIND["measured"])
    confirmation = call("show", "measured", "3", "--json").json
    assert (confirmation["purpose"], confirmation["attempts"]) == ("confirmation", 2)
    assert len(confirmation["repeats"]) == 1
    best = call("best", "measured", "--json").json
    assert best["confidence"]["runs"] == 2
    assert best["confidence"]["tied"] == [1]
    shown = call("show", "measured", "2", "--json").json["outcome"]
    scored = call("score", str(run / "trials" / "0002" / "trace"), "--all", "--json").json
    assert scored["compute_frac"]["n_ranks"] == 2
    for name in ("compute_frac", "exposed_comm_frac", "idle_frac"):
        assert scored[name]["value"] == pytest.approx(shown["metrics"][name])


def test_a_failure_keeps_its_kind_and_missing_traces_are_noticed(project: Path) -> None:
    copy_run(project, "failed")
    status = call("status", "failed", "--json").json
    assert (status["standing"], status["spent"], status["best"]["trial"]) == ("ended", 2, 2)
    assert status["best"]["config"] == tiny(1, 4)
    failure = call("show", "failed", "1", "--json").json["outcome"]["failure"]
    assert (failure["stage"], failure["kind"], failure["rank"]) == ("run", "out_of_memory", 0)
    assert "out of memory" in call("status", "failed").out
    admissions = {trial["trial"]: trial for trial in call("admit", "failed", "--json", code=1).json["trials"]}
    assert not admissions[1]["admitted_in_ledger"]
    failed_rules = [verdict["rule"] for verdict in admissions[2]["verdicts"] if verdict["ok"] is False]
    assert (admissions[2]["admitted_in_ledger"], failed_rules) == (True, ["ranks_traced"])
    call("export", "failed", "--out", "table.csv")
    with Path("table.csv").open(newline="", encoding="utf-8") as file:
        assert [row["failure_kind"] for row in csv.DictReader(file)] == ["out_of_memory", ""]


def test_a_killed_slurm_search_shows_its_unfinished_trial(project: Path) -> None:
    copy_run(project, "cut-off")
    status = call("status", "cut-off", "--json").json
    assert (status["standing"], status["spent"], status["best"]) == ("killed", 1, None)
    trial = call("show", "cut-off", "1", "--json").json
    assert trial["config"] == {"tp": 2, "dp": 2, "pp": 1, "micro_batch_size": 4}
    assert trial["outcome"] is None
    assert call("best", "cut-off", "--json", code=1).json is None
    call("report", "cut-off", "--no-png", "--out", "page.html")
    page = Path("page.html").read_text(encoding="utf-8")
    assert all(word in page for word in ("cut-off", "random"))


def test_a_sweep_keeps_its_pareto_front_and_its_best_at_each_weight(project: Path) -> None:
    copy_with_needs(project, BY_KIND["swept"])
    front = call("pareto", "swept", "--json").json
    assert front["metrics"] == ["step_time_s", "num_accelerators"]
    assert [point["trial"] for point in front["points"] if point["on_front"]] == [2, 5, 9, 10]
    assert [point["trial"] for point in front["points"] if point["is_knee"]] == [10]
    chosen = {row["weight"]: (row["trial"], round(row["score"], 6)) for row in front["weights"]}
    by_weight = {0.0: (5, 8.0), 0.25: (5, 6.042404), 0.5: (5, 4.084809), 0.75: (5, 2.127213), 1.0: (9, 2.30854)}
    assert chosen == by_weight
    ranges = {point["trial"]: point["weights"] for point in front["points"] if point["weights"]}
    assert ranges == {5: pytest.approx([0, 0.7837051809]), 9: pytest.approx([0.7837051809, 1])}
    call("pareto", "swept", "--no-png", "--out", "drawn")
    assert format_config(layout(1, 4, 4, 1, 1)) in (project / "drawn" / "pareto.html").read_text(encoding="utf-8")


def test_a_run_over_two_metrics_keeps_its_pareto_front(project: Path) -> None:
    copy_with_needs(project, BY_KIND["front"])
    front = call("pareto", "front", "--json").json
    assert [point["trial"] for point in front["points"] if point["on_front"]] == [2, 4, 5, 8]
    assert [point["trial"] for point in front["points"] if point["is_knee"]] == [8]
    assert front["weights"] == []


def test_report_all_ranks_runs_of_all_kinds(project: Path) -> None:
    for kind in ("replayed", "policy"):
        copy_with_needs(project, BY_KIND[kind])
    call("report", "--all", "--no-png", "--out", "ranking.html")
    page = Path("ranking.html").read_text(encoding="utf-8")
    assert all(format_config(BY_KIND[kind].best) in page for kind in ("replayed", "policy"))
