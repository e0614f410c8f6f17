"""Searches of version 0.1.0 continue with the present version, and edited evidence is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from expected_runs import BY_KIND, TENSOR4, copy_with_needs, layout, tiny
from recorded_versions import (
    call,
    copy_project,
    copy_run,
    count_finishes,
    format_config,
    read_ledger,
)


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
    stages = {name: found["config"]["pp"] for name, found in best.items()}
    assert stages == {"cold": 4, "warm": 1}, "the recorded run's pipelines were far slower than predicted"


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
