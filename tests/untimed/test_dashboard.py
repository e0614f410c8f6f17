"""`ccl-search dashboard`: optuna-dashboard on the study of a run, on this machine only."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from paths import ROOT

from cclsearch.cli import main

LANDSCAPE = ROOT / "benchmarks" / "landscapes" / "nanotron-8b-4n"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ccl-search.yaml").write_text("{}\n")
    run = ["run", "--recording", str(LANDSCAPE), "--sampler", "random", "-b", "6", "--name", "r", "--quiet"]
    assert main(run) == 0
    return tmp_path


@pytest.mark.parametrize("study", ["kept", "missing", "cut off"])
def test_the_dashboard_shows_every_trial_and_ends_on_ctrl_c(study, project):
    file, ledger = project / "runs/r/study.log", (project / "runs/r/ledger.jsonl").read_bytes()
    if study == "missing":
        file.unlink()
    elif study == "cut off":
        file.write_bytes(file.read_bytes()[:-40])
    command = [sys.executable, "-m", "cclsearch", "dashboard", "r", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = server.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found, line
        studies = json.load(urllib.request.urlopen(f"{found[0]}/api/studies", timeout=30))["study_summaries"]
        assert [one["study_name"] for one in studies] == ["r (recorded)"]
        shown = json.load(urllib.request.urlopen(f"{found[0]}/api/studies/0?after=0", timeout=30))
        assert len(shown["trials"]) == 6
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=30) == 0
    finally:
        server.kill()
    assert (project / "runs/r/ledger.jsonl").read_bytes() == ledger


def test_what_keeps_the_dashboard_from_starting_is_one_line(monkeypatch, cli):
    assert "port 70000 cannot be used" in cli.err(["dashboard", "r", "--port", "70000"])
    assert "nope" in cli.err(["dashboard", "nope"])
    monkeypatch.setitem(sys.modules, "optuna_dashboard", None)
    assert "optuna-dashboard is not installed: run `pip install" in cli.err(["dashboard", "r"])
    shutil.rmtree("runs/r")
