"""Constraints that no configuration satisfies: the closest one is named with its distance, wherever a best would be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from paths import ROOT

from cclsearch.cli import main
from cclsearch.nightly.compare import describe_unranked
from cclsearch.nightly.history import read_night
from cclsearch.run.closest import find_closest
from cclsearch.run.folder import load_run
from cclsearch.scoring.objective import choose_objective

RECORDING = ROOT / "benchmarks" / "landscapes" / "nanotron-8b-2n"


def search(*options: str, constraints: tuple[str, ...], name: str = "r") -> int:
    given = [word for text in constraints for word in ("--constraint", text)]
    arguments = ["run", "-w", "wl2", "--recording", str(RECORDING), "--budget", "6", "--name", name]
    return main([*arguments, *given, *options])


def test_the_closest_configuration_takes_the_place_of_the_best(
    project: Path, capsys: pytest.CaptureFixture[str], cli
) -> None:
    search("--quiet", constraints=("peak_memory_gib <= 10",))
    run = load_run(project / "runs" / "r")
    assert [str(constraint) for constraint in run.spec.objective.constraints] == ["peak_memory_gib <= 10 GiB"]
    memory = {t.number: t.outcome.metrics["peak_memory_gib"] for t in run.state.trials.values() if t.outcome}
    least = min(memory.values())
    number = next(n for n, used in memory.items() if used == least)
    text = (
        f"no configuration tried satisfies peak_memory_gib <= 10 GiB; closest: trial {number} with {least:.4g} GiB,"
        f" {least / 10 - 1:.0%} over"
    )
    assert text in capsys.readouterr().out
    best = cli.json(["best", "r", "--json"], 1)
    assert (best["trial"], best["closest"]["trial"], best["closest"]["text"]) == (None, number, text)
    assert best["closest"]["violation"] == pytest.approx(least / 10 - 1)
    assert best["closest"]["peak_memory_gib"] == least
    assert describe_unranked(read_night(run)).endswith(text)
    assert main(["report", "r"]) == 0
    pages = list((project / "runs" / "r").rglob("*.html"))
    assert any("no configuration tried satisfies" in page.read_text(encoding="utf-8") for page in pages)


def test_the_summary_event_names_the_closest_only_without_a_best(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, limit, is_met in (("tight", "10", False), ("loose", "79", True)):
        search("--json", constraints=(f"peak_memory_gib <= {limit}",), name=name)
        events = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
        summary = next(event for event in events if event["event"] == "summary")
        assert ("closest" in summary, summary["best"] is not None) == (not is_met, is_met)


def test_of_several_constraints_only_the_violated_ones_count(project: Path) -> None:
    wanted = ("peak_memory_gib <= 79", "tokens_per_s >= 1e6", "mfu >= 0.9")
    search("--quiet", constraints=wanted)
    run = load_run(project / "runs" / "r")
    found = find_closest(run.spec.objective, run.state)
    assert found is not None
    assert found.trial.outcome is not None
    misses = found.text.partition("; closest: ")[2]
    assert "peak_memory_gib" not in misses
    assert misses.count("under") == 2
    assert f"mfu {found.trial.outcome.metrics['mfu']:.4g} fraction, " in misses
    others = [t.outcome.violation for t in run.state.trials.values() if t.outcome and t.outcome.violation]
    assert found.violation == min(others)


def test_without_constraints_or_with_a_ranked_trial_nothing_is_closest(project: Path) -> None:
    search("--quiet", constraints=("peak_memory_gib <= 79",))
    run = load_run(project / "runs" / "r")
    assert find_closest(run.spec.objective, run.state) is None
    unconstrained = choose_objective(None, (), task="training")
    assert find_closest(unconstrained, run.state) is None
