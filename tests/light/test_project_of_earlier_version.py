"""A user's project of version 0.1.0, with its own files and plugin package, works with the present version."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from paths import TESTS
from recorded_versions import (
    call,
    call_in_subprocess,
    copy_project,
    count_finishes,
)

from cclsearch.core.trust import trust_project

TRACES = TESTS / "recorded" / "gloo-ddp2"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a user's project of version 0.1.0 with its own card, profile, objective, run script and plugin package."""
    folder = copy_project("own", tmp_path / "own")
    trust_project(folder)
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
