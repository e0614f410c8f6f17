"""The recorded example run in the repository stays small, readable and free of the machine that made it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from paths import ROOT

from cclsearch.cli import main
from cclsearch.run.folder import load_run

EXAMPLE = ROOT / "runs" / "example-wl2"
OF_A_MACHINE = re.compile(r"(?<![\w.])/(home|root|tmp|work|Users|scratch|mnt)/")


def kept_files() -> list[Path]:
    """Every file of the example that is committed."""
    written = {"report.html", "charts", "lock"}
    return [p for p in EXAMPLE.rglob("*") if p.is_file() and not written & set(p.relative_to(EXAMPLE).parts)]


@pytest.fixture
def example(project: Path) -> Path:
    """The example in the runs folder of a project."""
    shutil.copytree(EXAMPLE, project / "runs" / EXAMPLE.name, ignore=shutil.ignore_patterns("report.html", "charts"))
    return project


def test_the_example_is_small_and_names_no_machine():
    files = kept_files()
    assert {"search.yaml", "ledger.jsonl"} <= {path.name for path in files}
    assert sum(path.stat().st_size for path in files) < 100_000
    assert [str(path) for path in files if OF_A_MACHINE.search(path.read_text())] == []


def test_every_command_that_reads_a_run_reads_the_example(example, capsys, cli):
    assert "example-wl2  ended; 5 of 5 trials admitted; best 9.548 s (recorded)" in cli.out(["status"])
    for command in ("status", "best", "show 5", "admit", "report --no-png", "export", "space --run", "predict --run"):
        name, *more = command.split()
        words = [name, *more, "example-wl2"] if more[:1] == ["--run"] else [name, "example-wl2", *more]
        assert main(words) == 0, command
    shown = capsys.readouterr().out
    assert "2.56x faster than the first ranked trial" in shown
    page = (example / "runs" / "example-wl2" / "report.html").read_text()
    assert "9.55" in page
    assert "recorded" in page


def test_the_example_can_be_continued(example, capsys):
    assert main(["resume", "example-wl2", "--budget", "6", "--quiet"]) == 0
    assert len(load_run(example / "runs" / "example-wl2").state.trials.observe()) == 6
