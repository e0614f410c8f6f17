"""Documentation: commands work, links lead somewhere, pictures are of real runs."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

from cclsearch.cli import COMMANDS, main
from cclsearch.plugins import METRICS
from cclsearch.run.folder import load_run

PAGES = sorted((ROOT / "docs").glob("*.md"))


def test_the_site_builds_and_its_links_work(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "site" / "tutorial" / "index.html").is_file()


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *[f"benchmarks/{p.name}" for p in (ROOT / "benchmarks").glob("*.md")]]
)
def test_links_of_pages_outside_the_site_work(page):
    text = (ROOT / page).read_text()
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []


def commands_of(page: Path) -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL)
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]


def test_every_command_of_the_tutorial_works(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    commands = commands_of(ROOT / "docs" / "tutorial.md")
    assert len(commands) > 10
    for command in commands:
        words = shlex.split(command)
        if words[0] == "cd":
            monkeypatch.chdir(Path.cwd() / words[1])
            continue
        assert words[0] == "ccl-search"
        code = main(words[1:])
        shown = capsys.readouterr()
        allowed = {0, 1} if words[1] in ("doctor", "space") else {0}
        assert code in allowed, f"{command}: exit code {code}: {shown.err or shown.out[-500:]}"


def blocks_of(page: str, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


def test_the_example_files_of_the_pages_work(project, capsys):
    card = blocks_of("your-model.md", "yaml")[0]
    [hardware] = blocks_of("accelerators.md", "yaml")
    [objective] = blocks_of("your-objective.md", "yaml")
    for name, text in {
        "workloads/mine.yaml": card,
        "workloads/chip.yaml": card.replace("nvidia_h100", "my_chip").replace("memory_gb: 80", "memory_gb: 24"),
        "hardware.yaml": hardware,
        "objectives/roomy.yaml": objective,
    }.items():
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text(text)
    assert main(["predict", "--workload", "mine", "--top", "1"]) == 0
    assert main(["predict", "--workload", "chip", "--top", "1"]) == 0
    assert "an accelerator has 24 GiB" in capsys.readouterr().out
    replay = ["run", "--workload", "wl2", "--launcher", "replay", "--budget", "1"]
    assert main([*replay, "--objective", "roomy:headroom=0.1"]) == 0


def test_the_example_metrics_measure_a_trace(monkeypatch, capsys):
    before = METRICS.names()
    assert METRICS.entries(), "all are imported, since a module that registers its metrics here only loses them"
    monkeypatch.setattr(METRICS, "_entries", dict(METRICS._entries))
    for block in blocks_of("your-metric.md", "python"):
        exec(compile(block, "your-metric.md", "exec"), {})
    names = sorted(set(METRICS.names()) - set(before))
    assert names == ["longest_kernel", "slowest_group"]
    trace = str(ROOT / "tests" / "recorded" / "gloo-ddp2")
    assert main(["score", trace, "--json", *(word for name in names for word in ("--metric", name))]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [found[name]["status"] for name in names] == ["ok", "ok"]
    assert all(found[name]["value"] > 0 for name in names)


def test_the_example_optuna_study_proposes_a_valid_configuration():
    [block] = blocks_of("how-it-works.md", "python")
    made: dict[str, Any] = {}
    exec(compile(block, "how-it-works.md", "exec"), made)
    [trial] = made["study"].trials
    assert trial.value == 1.25
    assert made["space"].row(trial.params) is not None


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_every_command_in_a_page_exists(page):
    named = set(re.findall(r"(?m)(?:`|^\$ |^)ccl-search ([a-z][a-z-]+)\b", page.read_text()))
    assert sorted(named - set(COMMANDS)) == []


def test_the_changelog_names_every_command():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert [name for name in COMMANDS if f"`{name}" not in text] == []


def test_the_page_of_benchmarks_names_every_script():
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    named = set(re.findall(r"`([a-z_]+)`", (ROOT / "benchmarks" / "README.md").read_text()))
    parts = {name for name in scripts if name.startswith("gpu_")} | {"live_searches"}
    assert sorted(scripts - parts - named) == []


PICTURES = sorted((ROOT / "docs" / "pictures").iterdir())


def test_the_first_minute_says_what_the_demo_finds(tmp_path):
    pytest.importorskip("playwright")
    script = runpy.run_path(str(ROOT / "docs" / "make_pictures.py"))
    (tmp_path / "ccl-search.yaml").write_text("{}\n")
    run, recording = script["search"](tmp_path), script["load_recording"](script["RECORDING"])
    figures = script["measure_first_minute"](run, recording)
    readme = (ROOT / "README.md").read_text()
    assert [sentence for sentence in figures.sentences() if sentence not in readme] == []
    drawn = script["draw_first_minute"](run, recording)
    assert f"{figures.usual_s / figures.found_s:.2f}x faster than the usual default" in drawn
    assert (ROOT / "docs" / "pictures" / "first-minute.svg").read_text() == drawn, "make screenshots draws it again"


def test_pictures_are_small_and_load_nothing():
    assert {path.name: path.stat().st_size for path in PICTURES if path.stat().st_size > 200_000} == {}
    for path in PICTURES:
        if path.suffix == ".svg":
            outside = re.findall(r"(?:href|src|url\()\W*(https?://[^\"')\s]+)", path.read_text())
            assert outside == [], path.name


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
