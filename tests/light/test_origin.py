"""A search keeps its command line, without secrets, and the commit of the user's run script; the report shows both."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cclsearch.cli import main
from cclsearch.plan.plan import find_command, find_commit
from cclsearch.report.rows import gather_environment
from cclsearch.run.folder import load_run

FRAMEWORK = """name: mine
script: train.py
runner: process
tasks: [training]
knobs:
  - {name: dp, choices: [1, 2], description: data parallel}
"""


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main"]
    return subprocess.run(["git", "-C", str(folder), *who, *words], capture_output=True, text=True, check=True).stdout


def test_the_commit_of_the_run_script_and_whether_files_differ(project):
    (project / "launchers").mkdir(exist_ok=True)
    (project / "launchers" / "mine.framework.yaml").write_text(FRAMEWORK)
    script = project / "launchers" / "train.py"
    script.write_text("print(1)\n")
    assert find_commit("mine") == ""
    git(project, "init")
    git(project, "commit", "--allow-empty", "-m", "first")
    commit = git(project, "rev-parse", "HEAD").strip()
    assert find_commit("mine") == f"commit {commit}, which does not have train.py"
    git(project, "add", "launchers")
    git(project, "commit", "-m", "script")
    commit = git(project, "rev-parse", "HEAD").strip()
    assert find_commit("mine") == f"commit {commit}, no changes"
    script.write_text("print(2)\n")
    assert find_commit("mine") == f"commit {commit}, with changes"
    assert find_commit("megatron") == ""  # the package's own
    assert find_commit("no such framework") == ""


def test_the_report_has_the_command_line_without_secrets(project, monkeypatch):
    secret = "sk-ant-api03-" + "a1B2c3D4e5F6g7H8" * 4
    monkeypatch.setenv("ANTHROPIC_API_KEY", secret)
    words = ["run", "--workload", "wl2", "--launcher", "replay", "--budget", "1", "--name", "first", "--quiet"]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/ccl-search", *words, f"--note={secret}"])
    assert main(words) == 0
    rows = dict(gather_environment(load_run(project / "runs" / "first")))
    assert rows["command line"].startswith("ccl-search run --workload wl2 --launcher replay --budget 1")
    assert secret not in (project / "runs" / "first" / "search.yaml").read_text()
    assert secret not in rows["command line"]


def test_another_programs_command_line_is_not_kept(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["notebook.py", "--token", "x"])
    assert find_command() == ""
