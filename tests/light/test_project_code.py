"""Python code of a project without a package: metrics of trials and traces. Each command is a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from command_line import run_command
from paths import ROOT

from cclsearch.cli import main
from cclsearch.core.trust import trust_project

TRACE = ROOT / "tests" / "recorded" / "gloo-ddp2"
SAID = (ROOT / "docs" / "extending.md").read_text()
MONEY = re.search(r"```python\n# metrics/money.py\n(.*?)```", SAID, re.DOTALL)
KERNEL = re.search(r"```python\n# metrics/mine.py\n(.*?)```", (ROOT / "docs" / "your-metric.md").read_text(), re.DOTALL)


def call(project: Path, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = run_command(*words, cwd=project, environment={"PYTHONPATH": str(ROOT)})
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture
def money(project: Path) -> Path:
    """A project with the file that the documentation shows."""
    (project / "metrics").mkdir()
    (project / "metrics" / "money.py").write_text(MONEY[1])
    return project


def test_a_search_ranks_by_a_metric_of_the_projects_code(money):
    call(money, "run", "-w", "wl2", "-b", "5", "--objective", "usd_per_mtoken", "--name", "one", "--quiet")
    trials = [json.loads(path.read_text())["metrics"] for path in sorted(money.glob("runs/one/trials/*/metrics.json"))]
    assert len(trials) == 5
    for trial in trials:
        tokens_per_hour = trial["tokens_per_s"] * 3600
        rent = 2.5 * trial["num_accelerators"]
        assert trial["usd_per_mtoken"] == pytest.approx(rent / (tokens_per_hour / 1e6))
    best = json.loads(call(money, "best", "one", "--json").stdout)
    assert best["objective_figure"]["value"] == min(trial["usd_per_mtoken"] for trial in trials)
    assert best["objective_figure"]["unit"] == "USD/Mtoken"
    bound = sorted(trial["usd_per_mtoken"] for trial in trials)[0] * 0.5
    call(money, "run", "-w", "wl2", "-b", "3", "--constraint", f"usd_per_mtoken <= {bound}", "--name", "two", code=1)
    assert "closest" in call(money, "status", "two").stdout


def test_a_file_of_the_project_defines_a_metric_of_traces(project):
    (project / "metrics").mkdir()
    (project / "metrics" / "mine.py").write_text(KERNEL[1])
    found = json.loads(call(project, "score", str(TRACE), "--metric", "longest_kernel", "--json").stdout)
    assert "longest_kernel" in json.dumps(found)
    assert "longest_kernel" in call(project, "score", "--list").stdout


def test_an_untrusted_file_does_not_run_and_one_line_says_how_it_may(money):
    (money / "metrics" / "money.py").write_text(f"open({str(money / 'RAN')!r}, 'w').close()\n")
    (money / "objectives").mkdir()
    (money / "objectives" / "money.py").write_text(f"open({str(money / 'RAN')!r}, 'w').close()\n")
    (money / "ccl-search.yaml").write_text("{}\n")
    for words in (["score", str(TRACE)], ["run", "-w", "wl2", "-b", "1", "--quiet"], ["doctor"], ["policy", "list"]):
        done = run_command(*words, cwd=money)
        assert not (money / "RAN").exists(), words
    refused = call(money, "run", "-w", "wl2", "--objective", "usd_per_mtoken", code=2).stderr
    assert f"metrics/money.py was left out: it is code of {str(money)!r}, which is not trusted" in refused
    assert f"ccl-search trust {money}" in refused
    assert done.returncode == 0


def test_code_that_fails_is_one_line_or_a_note(money):
    (money / "metrics" / "worse.py").write_text("raise SystemExit('gone')\n")
    (money / "metrics" / "half.py").write_text(
        "from cclsearch.scoring.trial_metric import trial_metric\n\n"
        "@trial_metric('half', unit='s', better='lower')\n"
        "def measure(metrics, config, card):\n"
        "    return metrics['step_time_s'] / 2 if config['pp'] > 1 else metrics['nothing']\n\n"
        "@trial_metric('endless', unit='s', better='lower')\n"
        "def count(metrics, config, card):\n"
        "    return float('inf')\n"
    )
    done = call(money, "run", "-w", "wl2", "-b", "4", "--name", "one", "--quiet")
    assert done.stderr.count("metrics/worse.py is left out: SystemExit: gone") == 1
    notes = [event["outcome"]["notes"] for event in read(money / "runs" / "one") if event["event"] == "trial_finished"]
    assert all("endless was left out: it is inf" in text for text in notes)
    refused = call(money, "run", "-w", "wl2", "--objective", "endless", code=2).stderr
    assert "has no endless (endless was left out: it is inf)" in refused
    assert "Traceback" not in refused
    assert "metrics/worse.py" in call(money, "doctor").stdout


def read(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_bytes().splitlines() if line]


KINDS = [
    ("launcher", "launchers", "slurm-generic", ".yaml"),
    ("card", "workloads", "wl5", ".yaml"),
    ("objective", "objectives", "cost", ".yaml"),
    ("policy", "policies", "dense", ".py"),
]


@pytest.mark.parametrize(("command", "folder", "shipped", "suffix"), KINDS)
def test_what_ships_is_listed_shown_and_copied(project, command, folder, shipped, suffix, capsys, cli):
    text = (ROOT / folder / f"{shipped}{suffix}").read_text()
    assert command == "card" or cli.out([command, "show", shipped]) == text
    assert main([command, "copy", shipped, "mine"]) == 0
    copy = project / folder / f"mine{suffix}"
    assert copy.read_text() == text
    assert str(copy) in capsys.readouterr().out
    assert "exists already" in cli.err([command, "copy", shipped, "mine"])
    items = {item["name"]: item for item in cli.json([command, "list", "--json"])}
    assert items["mine"]["description"] == items[shipped]["description"] != ""
    assert (items["mine"]["is_shipped"], items[shipped]["is_shipped"]) == (False, True)
    copy.write_text("{broken: [\n")
    assert "mine" in cli.out([command, "list"])
    assert main([command, "show", "mine"]) == 2
    assert main([command, "copy", "mine", "other"]) == 2
    assert not (project / folder / f"other{suffix}").exists()


def test_a_link_to_code_elsewhere_is_not_the_projects(money, tmp_path):
    elsewhere = tmp_path / "elsewhere" / "metrics"
    elsewhere.mkdir(parents=True)
    (elsewhere / "evil.py").write_text(f"open({str(tmp_path / 'RAN')!r}, 'w').close()\n")
    (money / "metrics" / "evil.py").symlink_to(elsewhere / "evil.py")
    assert "evil.py is left out" in call(money, "run", "-w", "wl2", "-b", "1", "--quiet").stderr
    assert not (tmp_path / "RAN").exists()
    trust_project(elsewhere.parent)
    call(money, "run", "-w", "wl2", "-b", "1", "--quiet")
    assert (tmp_path / "RAN").exists()
