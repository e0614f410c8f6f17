"""The bench reads each row once, reports every documented figure, and refuses bad folders in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from paths import ROOT

from cclsearch.cli import main
from cclsearch.loop.bench import replay_search, run_bench
from cclsearch.propose.base import Proposal, Proposer
from cclsearch.recording.load import load_recording

LANDSCAPES = ROOT / "benchmarks" / "landscapes"


@pytest.fixture
def two(tmp_path) -> Path:
    for name in ("nanotron-8b-2n", "vtrain-h1024-l12-g8-b8"):
        shutil.copytree(LANDSCAPES / name, tmp_path / "landscapes" / name)
    return tmp_path / "landscapes"


def test_the_json_contains_every_figure(two, tmp_path, capsys):
    out = tmp_path / "figures.json"
    arguments = ["bench", str(two), "--seeds", "1", "--samplers", "surrogate,random", "--json", str(out)]
    assert main([*arguments, "--workers", "1"]) == 0
    figures = json.loads(out.read_text(encoding="utf-8"))
    assert set(figures["samplers"]) == {"surrogate", "random"}
    for strategy in figures["samplers"].values():
        for summary in (strategy, *strategy["landscapes"].values()):
            for statistic in ("gmean", "median", "p90", "worst"):
                assert list(summary["best_over_optimum"][statistic]) == ["1", "3", "5", "10", "15"]
                assert min(summary["best_over_optimum"][statistic].values()) >= 1
            assert set(summary["within_1pct"]) == set(summary["within_5pct"]) == {"1", "3", "5", "10", "15"}
            assert 0 <= summary["failed_share"] <= 1
            assert summary["duplicate_share"] == 0
            assert summary["engine_s_per_trial"] > 0
    found = figures["samplers"]["surrogate"]["best_over_optimum"]["gmean"]
    assert found["15"] <= found["5"] <= found["1"]
    assert found["15"] <= 1.05
    assert "recorded measurements" in capsys.readouterr().out


def test_landscapes_of_one_name_are_labeled_by_their_paths(two, tmp_path, capsys):
    for folder, source in (("a", "nanotron-8b-2n"), ("b", "vtrain-h1024-l12-g8-b8")):
        shutil.copytree(two / source, tmp_path / "many" / folder / "same")
    shutil.copytree(two / "nanotron-8b-2n", tmp_path / "many" / "c" / "alone")
    figures = run_bench(tmp_path / "many", samplers=["random"], seeds=1, budget=2, workers=1)
    assert figures["landscapes"] == ["a/same", "b/same", "alone"]
    first, second, third = (figures["samplers"]["random"]["landscapes"][name] for name in figures["landscapes"])
    assert first["num_searches"] == second["num_searches"] == 1
    assert first["best_over_optimum"] == third["best_over_optimum"] != second["best_over_optimum"]
    assert main(["bench", str(tmp_path / "many"), "--samplers", "random", "--seeds", "1", "--budget", "2"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line in figures["landscapes"]] == [
        "a/same",
        "b/same",
        "alone",
    ]


class RepeatingProposer(Proposer):
    """Proposes the first row repeatedly, and once a configuration outside the table."""

    name = "stubborn"

    def propose(self, view, count):
        config = view.space.config(0)
        if len(view.observations) == 2:
            config = type(config)({**config, "tp": 3})
        return [Proposal(config, self.name)]


def test_a_repeated_or_unknown_row_counts_as_a_failure():
    recording = load_recording(LANDSCAPES / "vtrain-h1024-l12-g8-b8")
    search = replay_search(recording, RepeatingProposer(), seed=0, budget=5)
    assert search.num_duplicates == 3
    assert search.num_failed == 4
    assert search.num_trials == 5
    assert len(set(search.best_over_optimum)) == 1


def test_a_table_smaller_than_the_budget_is_searched_completely():
    recording = load_recording(LANDSCAPES / "vtrain-h1024-l12-g8-b8")
    figures = run_bench(LANDSCAPES / "vtrain-h1024-l12-g8-b8", samplers=["random"], seeds=2, budget=20, workers=1)
    assert figures["samplers"]["random"]["best_over_optimum"]["worst"]["20"] == 1
    assert len(recording.rows) == 17


def test_bad_folders_and_options_exit_with_2(two, tmp_path, cli):
    table = two / "nanotron-8b-2n" / "trials.csv"
    table.write_text(table.read_text(encoding="utf-8").replace(",ok,", ",good,", 1), encoding="utf-8")
    (two / "vtrain-h1024-l12-g8-b8" / "card.yaml").write_text("workload: [", encoding="utf-8")
    for arguments, message in (
        ([str(two)], "status must be one of"),
        ([str(tmp_path / "nowhere")], "there is no folder"),
        ([str(LANDSCAPES), "--seeds", "0"], "--seeds"),
        ([str(LANDSCAPES), "--samplers", "oracle"], "there is no sampler 'oracle'"),
        ([str(LANDSCAPES), "--json", str(tmp_path / "a" / "b.json")], "does not exist"),
    ):
        errors = cli.err(["bench", *arguments])
        assert message in errors
        assert "Traceback" not in errors
    lines = cli.err(["bench", str(two)]).strip().splitlines()
    assert len(lines) == 2, "one line for each landscape that cannot be read"


def test_two_processes_give_the_same_figures_as_one():
    folder = LANDSCAPES / "nanotron-1b-1n"
    alone = run_bench(folder, samplers=["surrogate"], seeds=4, budget=4, workers=1)
    together = run_bench(folder, samplers=["surrogate"], seeds=4, budget=4, workers=2)
    for figures in (alone, together):
        figures["samplers"]["surrogate"].pop("engine_s_per_trial")
        for summary in figures["samplers"]["surrogate"]["landscapes"].values():
            summary.pop("engine_s_per_trial")
    assert alone == together
