"""Runs of version 0.1.0 open, resume and report with the present version, through the command line only.

The expected figures are those that 0.1.0 printed of its runs. `recorded_versions.py` describes the fixtures.
"""

from __future__ import annotations

import csv
import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from recorded_versions import (
    RECORDED,
    call,
    call_in_subprocess,
    copy_project,
    copy_run,
    count_finishes,
    format_config,
    read_ledger,
)

from cclsearch.propose.events import ArbiterMove, LlmTurn
from cclsearch.run.folder import load_run

TRACES = Path(__file__).parent / "recorded" / "gloo-ddp2"


def layout(tp: int, pp: int, dp: int, zero: int, micro: int) -> dict[str, Any]:
    """Return a configuration of the recorded 8B model."""
    return {"tp": tp, "pp": pp, "dp": dp, "zero_stage": zero, "micro_batch_size": micro}


def tiny(dp: int, micro: int) -> dict[str, Any]:
    """Return a configuration of `tiny`, in the order of its knobs."""
    more = {"activation_checkpointing": "none", "zero_stage": 0}
    return {"tp": 1, "dp": dp, "pp": 1, "micro_batch_size": micro, **more}


@dataclass(frozen=True)
class ExpectedRun:
    """The expected contents of a recorded run."""

    kind: str
    best: dict[str, Any]
    trial: int
    """The number of the best trial."""
    step_time_s: float
    shown: str
    """The step time of the best trial, in seconds, as the text output shows it."""
    num_trials: int
    first: dict[str, Any]
    """The configuration of trial 1."""
    standing: str = "ended"
    provenance: str = "recorded"
    num_accelerators: int = 16
    not_admitted: tuple[int, ...] = ()
    unfinished: tuple[int, ...] = ()
    needs: tuple[str, ...] = field(default=())
    """Other fixtures to which the run refers."""


JAX = {"tp": 1, "dp": 2, "ep": 1, "micro_batch_size": 8, "activation_checkpointing": "none"}
START = layout(1, 2, 8, 1, 1)
WIDE = layout(2, 1, 64, 1, 1)
PIPE8 = layout(1, 8, 2, 0, 1)
TENSOR4 = layout(4, 1, 4, 0, 2)
MEASURED = {"provenance": "measured"}
RUNS = [
    ExpectedRun("replayed", TENSOR4, 5, 9.5477, "9.548", 5, START),
    ExpectedRun("stopped", PIPE8, 3, 9.92659, "9.927", 4, START, standing="stopped", unfinished=(4,)),
    ExpectedRun("killed", layout(1, 4, 4, 1, 1), 2, 8.99, "8.99", 4, START, standing="killed", unfinished=(3, 4)),
    ExpectedRun("hybrid", TENSOR4, 5, 9.5477, "9.548", 6, START),
    ExpectedRun("policy", layout(2, 1, 8, 1, 1), 2, 9.31587, "9.316", 4, START, not_admitted=(3,)),
    ExpectedRun("llm-alone", PIPE8, 3, 9.92659, "9.927", 4, START),
    ExpectedRun("learned", TENSOR4, 3, 9.5477, "9.548", 3, PIPE8, needs=("replayed",)),
    ExpectedRun(
        *("swept", layout(4, 1, 128, 0, 2), 9, 0.66053, "0.6605", 10, WIDE),
        num_accelerators=512,
        not_admitted=(3,),
        needs=("recordings",),
    ),
    ExpectedRun(
        *("front", layout(4, 1, 128, 1, 2), 4, 1.28504, "1.285", 8, WIDE),
        num_accelerators=512,
        not_admitted=(3,),
        needs=("recordings",),
    ),
    ExpectedRun("measured", tiny(2, 4), 2, 0.097716915, "0.09772", 3, tiny(2, 8), num_accelerators=2, **MEASURED),
    ExpectedRun("on-slurm", tiny(1, 16), 1, 0.173563291, "0.1736", 2, tiny(1, 16), num_accelerators=1, **MEASURED),
    ExpectedRun("on-tpu", JAX, 1, 0.321479321, "0.3215", 1, JAX, num_accelerators=2, **MEASURED),
]
BY_KIND = {expected.kind: expected for expected in RUNS}
each_run = pytest.mark.parametrize("expected", RUNS, ids=lambda expected: expected.kind)


def copy_with_needs(project: Path, expected: ExpectedRun) -> Path:
    """Copy the run, and the fixtures to which it refers, into the project."""
    for kind in expected.needs:
        copy_run(project, kind)
    return copy_run(project, expected.kind)


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


@pytest.mark.parametrize(
    ("kind", "budget"),
    [("replayed", 6), ("learned", 4), ("swept", 11), ("front", 9), ("hybrid", 7), ("policy", 5)],
)
def test_an_ended_replay_continues_with_a_larger_budget(kind: str, budget: int, project: Path) -> None:
    expected = BY_KIND[kind]
    run = copy_with_needs(project, expected)
    before = (run / "ledger.jsonl").read_bytes()
    call("resume", kind, "--budget", str(budget), "--quiet")
    assert (run / "ledger.jsonl").read_bytes().startswith(before)
    status = call("status", kind, "--json").json
    assert (status["standing"], status["budget"], status["spent"]) == ("ended", budget, budget)
    configs = [json.dumps(trial["config"]) for trial in status["trials"]]
    assert len(set(configs)) == len(configs) == budget
    assert count_finishes(run) == dict.fromkeys(range(1, budget + 1), 1)
    trials = {trial["trial"]: trial["config"] for trial in status["trials"]}
    assert (trials[1], trials[expected.trial]) == (expected.first, expected.best)


@pytest.mark.parametrize("kind", ["hybrid", "stopped"])
def test_a_resumed_ledger_continues_in_the_present_version(kind: str, project: Path) -> None:
    run = copy_run(project, kind)
    num_old = len(read_ledger(run))
    assert {"crc"} & set().union(*read_ledger(run)) == set()
    call("resume", kind, "--budget", "9", "--quiet")
    new = read_ledger(run)[num_old:]
    assert [event["event"] for event in new[:2]] == ["ledger_upgraded", "search_resumed"]
    assert all(list(event)[-1] == "crc" for event in new)
    assert [event["event"] for event in new].count("ledger_upgraded") == 1
    path = run / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines, lines[0]]))
    err = call("status", kind).err
    assert f"1 line is not used, all others are: line {len(lines) + 1} " in err, "no line without a checksum may follow"


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


def test_a_replay_resumes_after_the_shipped_recordings_have_moved(project: Path) -> None:
    run = copy_run(project, "replayed", shipped=project / "site-packages" / "cclsearch" / "_content")
    assert call("best", "replayed", "--json").json["config"] == TENSOR4
    call("resume", "replayed", "--budget", "6", "--quiet")
    assert count_finishes(run) == dict.fromkeys(range(1, 7), 1)


@pytest.mark.parametrize("kind", ["stopped", "killed"])
def test_an_interrupted_search_resumes_and_runs_nothing_twice(kind: str, project: Path) -> None:
    expected = BY_KIND[kind]
    run = copy_with_needs(project, expected)
    assert set(count_finishes(run)) == set(range(1, expected.num_trials + 1)) - set(expected.unfinished)
    proposed = {event["trial"]: event["config"] for event in read_ledger(run) if event["event"] == "trial_proposed"}
    call("resume", kind, "--quiet")
    status = call("status", kind, "--json").json
    assert (status["standing"], status["spent"]) == ("ended", 8)
    configs = {trial["trial"]: trial["config"] for trial in status["trials"]}
    assert {number: configs[number] for number in proposed} == proposed
    assert len({json.dumps(config) for config in configs.values()}) == 8
    assert count_finishes(run) == dict.fromkeys(range(1, 9), 1)
    assert not (run / "lock").exists()


def test_an_edited_input_is_still_refused(project: Path) -> None:
    run = copy_with_needs(project, BY_KIND["replayed"])
    spec = run / "search.yaml"
    spec.write_text(spec.read_text().replace("seed: 0", "seed: 1"))
    call("resume", "replayed", "--budget", "6", code=2)
    assert not call("admit", "replayed", "--json", code=1).json["inputs_unchanged"]
    assert len(count_finishes(run)) == 5


def test_an_edited_result_is_still_refused(project: Path) -> None:
    run = copy_with_needs(project, BY_KIND["replayed"])
    result = run / "trials" / "0005" / "result.json"
    result.write_text(result.read_text().replace("9.5477", "1.5477"))
    admissions = {trial["trial"]: trial for trial in call("admit", "replayed", "--json", code=1).json["trials"]}
    assert admissions[5]["admitted_in_ledger"]
    assert not admissions[5]["admitted"]
    assert all(admissions[number]["admitted"] for number in (1, 2, 3, 4))


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


@pytest.mark.parametrize(
    ("kind", "decided"),
    [
        ("hybrid", [(2, 4, 2, 0, 1), (1, 8, 2, 0, 1), (2, 8, 1, 0, 1), (4, 1, 4, 0, 2), (2, 2, 4, 0, 1)]),
        ("llm-alone", [(1, 2, 8, 1, 1), (2, 4, 2, 0, 1), (1, 8, 2, 0, 1), (2, 8, 1, 0, 1)]),
        ("policy", [(2, 1, 8, 1, 1), (2, 1, 8, 0, 1)]),
    ],
)
def test_replayed_llm_turns_give_the_same_decisions(kind: str, decided: list[tuple[int, ...]], project: Path) -> None:
    copy_run(project, kind)
    turns = [json.loads(line) for line in call("replay-turns", kind, "--json").out.splitlines()]
    assert [turn["turn"] for turn in turns] == list(range(1, len(decided) + 1))
    assert all(turn["same"] for turn in turns)
    for turn, config in zip(turns, decided, strict=True):
        assert format_config(layout(*config)) in turn["decision"]
        assert format_config(layout(*config)) in turn["again"]


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


def test_the_next_night_compares_with_the_recorded_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = copy_project("night", tmp_path / "night")
    monkeypatch.chdir(project)
    nights = project / "runs" / "nights" / "nightly"
    summary = call("nightly", "nightly.yaml", "--once", "--json").json
    jobs = {job["job"]: job for job in summary["jobs"]}
    assert set(jobs) == {"two-nodes", "throughput"}
    assert {job["nights_before"] for job in jobs.values()} == {1}
    assert {job["resumed"] for job in jobs.values()} == {False}
    assert jobs["two-nodes"]["trials"] == 5
    assert jobs["two-nodes"]["worse"] == []
    assert jobs["two-nodes"]["verdict"] in {"unchanged", "improved"}
    again = call("show", jobs["two-nodes"]["run"], "1", "--json").json
    assert (again["proposer"], again["config"]) == ("earlier", TENSOR4)
    assert again["outcome"]["metrics"]["step_time_s"] == pytest.approx(9.5477)
    assert sorted(path.name for path in nights.glob("*/")) == ["20251122-082831", summary["night"]]
    first = call("best", "nightly-20251122-082831-two-nodes", "--json").json
    assert (first["trial"], first["config"]) == (5, TENSOR4)


def test_a_new_search_learns_from_a_recorded_run(project: Path) -> None:
    copy_with_needs(project, BY_KIND["replayed"])
    command = ["run", "--workload", "wl2", "--budget", "1", "--quiet", "--name"]
    call(*command, "warm", "--learn-from", "replayed")
    call(*command, "cold")
    best = {name: call("best", name, "--json").json for name in ("warm", "cold")}
    assert best["cold"]["config"] == START
    assert best["warm"]["step_time_s"] < 0.5 * best["cold"]["step_time_s"]


def test_report_all_ranks_runs_of_all_kinds(project: Path) -> None:
    for kind in ("replayed", "policy"):
        copy_with_needs(project, BY_KIND[kind])
    call("report", "--all", "--no-png", "--out", "ranking.html")
    page = Path("ranking.html").read_text(encoding="utf-8")
    assert all(format_config(BY_KIND[kind].best) in page for kind in ("replayed", "policy"))


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a user's project of version 0.1.0 with its own card, profile, objective, run script and plugin package."""
    folder = copy_project("own", tmp_path / "own")
    monkeypatch.chdir(folder)
    return folder


CHOSEN = {"tp": 2, "dp": 1, "micro_batch_size": 2, "overlap": False}


def test_a_run_of_a_user_project_opens_with_its_settings_and_plugin(own: Path) -> None:
    best = call("best", "own", "--json").json
    assert (best["trial"], best["config"], best["objective"]) == (1, CHOSEN, "roomy")
    assert best["step_time_s"] == pytest.approx(0.21)
    admissions = call_in_subprocess("admit", "own", "--json", plugin=own / "plugin").json
    assert [trial["admitted"] for trial in admissions["trials"]] == [True, True, False, False]
    assert [trial["admitted_in_ledger"] for trial in admissions["trials"]] == [True, True, False, False]
    first, failed = (call("show", "own", number, "--json").json for number in ("1", "4"))
    assert (first["attempts"], len(first["repeats"])) == (2, 1)
    assert first["outcome"]["metrics"]["longest_kernel"] == pytest.approx(0.105)
    assert first["outcome"]["metrics"]["noise_db"] == 32
    assert failed["outcome"]["failure"]["kind"] == "out_of_memory"
    assert "25 of 24 GiB" in failed["outcome"]["failure"]["message"]


def test_a_run_of_a_user_project_resumes_with_its_own_files(own: Path) -> None:
    call_in_subprocess("resume", "own", "--budget", "6", "--quiet", plugin=own / "plugin")
    status = call("status", "own", "--json").json
    assert (status["standing"], status["spent"]) == ("ended", 6)
    assert count_finishes(own / "searches" / "own") == dict.fromkeys(range(1, 7), 1)
    for number in (5, 6):
        trial = call("show", "own", str(number), "--json").json
        config, outcome = trial["config"], trial["outcome"]
        if config["tp"] == 1 and config["micro_batch_size"] == 4:
            assert outcome["failure"]["kind"] == "out_of_memory"
            continue
        step_s = 0.1 * config["tp"] + 0.02 / config["micro_batch_size"] + 0.01 * (not config["overlap"])
        assert outcome["metrics"]["step_time_s"] == pytest.approx(step_s)
        assert outcome["metrics"]["longest_kernel"] == pytest.approx(step_s / 2)
        assert outcome["metrics"]["noise_db"] == 30 + config["micro_batch_size"]


def test_a_user_project_starts_a_new_search_from_its_own_files(own: Path) -> None:
    profile = own / "launchers" / "here.yaml"  # its script only claims times, and 0.1 s is longer than it runs
    profile.write_text(profile.read_text().replace("MINE_BASE_S: 0.1", "MINE_BASE_S: 0.01"))
    knobs = ("tp=1", "micro_batch_size=2", "overlap=true")
    limited = [word for knob in knobs for word in ("--knob", knob)]
    new = ["run", "--workload", "my-model", *limited, "--budget", "1", "--name", "new", "--quiet"]
    call_in_subprocess(*new, plugin=own / "plugin")
    assert (own / "searches" / "new" / "ledger.jsonl").is_file()
    best = call("best", "new", "--json").json
    assert (best["objective"], best["provenance"]) == ("roomy", "measured")
    assert best["config"] == {"tp": 1, "dp": 2, "micro_batch_size": 2, "overlap": True}
    assert best["step_time_s"] == pytest.approx(0.02)
    with gzip.open(own / "searches" / "new" / "trials" / "0001" / "trace" / "rank1.json.gz") as file:
        assert json.load(file)["distributedInfo"]["rank"] == 1


def test_content_of_a_user_project_is_found_by_name(own: Path) -> None:
    space = call("space", "--workload", "my-model", "--json").json
    assert (space["framework"], space["legal"]) == ("mine", 6)
    planned = call_in_subprocess("run", "--workload", "my-model", "--dry-run", "--json", plugin=own / "plugin").json
    assert planned["space"] == 12, "the profile adds a knob of two choices"
    assert "MINE_BASE_S=0.1" in planned["job_script"]
    assert call("policy", "test", "wide", "--workload", "my-model").code == 0


def test_a_metric_of_an_installed_package_is_computed(own: Path) -> None:
    command = ["score", str(TRACES), "--metric", "longest_kernel", "--metric", "slowest_group", "--json"]
    found = call_in_subprocess(*command, plugin=own / "plugin").json
    assert {(metric["status"], metric["unit"], metric["n_ranks"]) for metric in found.values()} == {("ok", "s", 2)}
    assert found["longest_kernel"]["value"] == pytest.approx(0.000137804)
    assert found["slowest_group"]["value"] == pytest.approx(0.006599688)
    call_in_subprocess(*command, plugin=own / "launchers", code=2)


@pytest.mark.serial
def test_confirming_a_measured_run_trains_the_same_model(project: Path) -> None:
    pytest.importorskip("torch")
    run = copy_with_needs(project, BY_KIND["measured"])
    call("resume", "measured", "--confirm", "2", "--quiet")
    assert count_finishes(run) == {1: 1, 2: 1, 3: 1, 4: 1}
    fourth = call("show", "measured", "4", "--json").json
    assert (fourth["purpose"], fourth["config"]) == ("confirmation", tiny(2, 8))
    assert fourth["outcome"]["failure"] is None
    first, again = (json.loads((run / "trials" / n / "result.json").read_text()) for n in ("0001", "0004"))
    earlier = first["losses"]  # version 1 kept the first losses only
    assert len(earlier) == 4
    assert again["losses"][:4] == pytest.approx(earlier, rel=1e-3)
    assert again["num_params"] == first["num_params"]
