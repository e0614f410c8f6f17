"""OpenMetrics text of searches, read back by the parser of `prometheus_client`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from paths import ROOT
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from cclsearch.cli import main
from cclsearch.record.lock import FolderLock
from cclsearch.ui.app import make_app
from cclsearch.ui.guard import Permissions

EXAMPLE = ROOT / "runs" / "example-wl2"
NOW = {"one", "two"}


def read(text: str) -> dict[tuple[str, str, str], float]:
    """(metric, run, state or metric) -> value; the parser raises ValueError for text that is not OpenMetrics."""
    return {
        (sample.name, sample.labels["run"], sample.labels.get("state", sample.labels.get("metric", ""))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def runs(project: Path) -> Path:
    for name in sorted(NOW):
        shutil.copytree(EXAMPLE, project / "runs" / name)
        spec = yaml.safe_load((project / "runs" / name / "search.yaml").read_text())
        (project / "runs" / name / "search.yaml").write_text(yaml.safe_dump({**spec, "run_id": name}))
    return project / "runs"


def test_the_figures_are_those_of_status(runs: Path, capsys: pytest.CaptureFixture[str], cli) -> None:
    assert main(["status", "--openmetrics"]) == 0
    figures = read(capsys.readouterr().out)
    best = cli.json(["best", "one", "--json"])
    status = cli.json(["status", "one", "--json"])
    assert {run for _, run, _ in figures} == NOW
    assert figures["ccl_search_trials", "one", "admitted"] == len(status["trials"])
    assert figures["ccl_search_budget_trials", "one", ""] == status["budget"]
    assert figures["ccl_search_spent_trials", "one", ""] == status["spent"]
    assert figures["ccl_search_best", "one", "step_time_s"] == best["step_time_s"]
    assert figures["ccl_search_best_trial", "one", ""] == best["trial"]
    assert figures["ccl_search_running", "one", ""] == 0
    assert main(["status", "two", "--openmetrics"]) == 0
    assert {run for _, run, _ in read(capsys.readouterr().out)} == {"two"}


def test_a_search_that_runs_is_seen_and_a_run_that_cannot_be_read_is_left_out(
    runs: Path, capsys: pytest.CaptureFixture[str], cli
) -> None:
    (runs / "two" / "search.yaml").write_text("{}\n")
    with FolderLock(runs / "one"):
        assert main(["status", "--openmetrics"]) == 0
    shown = capsys.readouterr()
    assert read(shown.out)["ccl_search_running", "one", ""] == 1
    assert "two is left out" in shown.err
    assert "two formats" in cli.err(["status", "--openmetrics", "--json"])


def test_labels_are_one_line_without_secrets(runs: Path, monkeypatch: pytest.MonkeyPatch, cli) -> None:
    secret = "sk-" + "q7" * 20
    monkeypatch.setenv("MY_API_KEY", secret)
    spec = yaml.safe_load((runs / "one" / "search.yaml").read_text())
    hostile = f'x"}} 1\nccl_search_best{{run="fake"}} 0 {secret} \x1b[31m'
    (runs / "one" / "search.yaml").write_text(yaml.safe_dump({**spec, "workload": hostile}))
    text = cli.out(["status", "one", "--openmetrics"])
    assert secret not in text
    assert "\x1b" not in text
    assert {run for _, run, _ in read(text)} == {"one"}


def test_the_web_page_of_figures_has_runs_of_the_last_day(runs: Path) -> None:
    import os

    os.utime(runs / "two" / "ledger.jsonl", (0, 0))
    answer = TestClient(make_app(runs, Permissions()), base_url="http://127.0.0.1:8090").get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert {run for _, run, _ in read(answer.text)} == {"one"}
