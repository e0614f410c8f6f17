"""What `space` and `predict` speak about: a workload, a recording, or the inputs of a run."""

from __future__ import annotations

import json
import shutil

import pytest
from paths import ROOT

from cclsearch.cli import main

RECORDING = ROOT / "workloads" / "recordings" / "nanotron-8b-2n"
WINNER = "tp=1,pp=4,dp=4,zero_stage=1,micro_batch_size=1"


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main([*words, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_space_and_predict_are_about_the_recording_that_is_named(project, capsys):
    shutil.copytree(RECORDING, project / "own")
    for name in ("nanotron-8b-2n", "own"):
        space = answer(capsys, "space", "--recording", name)
        assert (space["framework"], space["legal"], space["rules"]) == ("nanotron", 114, [])
        explained = answer(capsys, "space", "explain", "--recording", name, "--config", WINNER)
        assert explained["verdicts"][0]["detail"].startswith("measured: step time 8.99 s")  # type: ignore[index]
        predicted = answer(capsys, "predict", "--recording", name, "--config", WINNER)
        assert predicted["legal"] == 114


def test_a_configuration_that_was_not_measured_is_no_part_of_the_space(cli):
    rejected = ["space", "explain", "--recording", "nanotron-8b-2n", "--config", "tp=16,dp=1,pp=1,zero_stage=1"]
    assert "was not measured; with tp=16 dp=1 pp=1 there are zero_stage=0" in cli.out(rejected, 1)


def test_a_run_gives_its_frozen_card_space_and_framework(project, capsys, cli):
    shutil.copytree(RECORDING, project / "own")
    assert main(["run", "-w", "wl2", "--recording", "own", "--budget", "2", "--name", "first", "--quiet"]) == 0
    capsys.readouterr()
    assert answer(capsys, "space", "--run", "first") == answer(capsys, "space", "--recording", "own")
    assert "run first (nanotron): 114 measured configurations" in cli.out(["space", "--run", "last"])
    assert main(["predict", "--run", "first", "--runs", "runs", "--top", "1"]) == 0


def test_the_knobs_of_a_run_that_measures_are_those_it_was_started_with(project, capsys, monkeypatch):
    from cclsearch.plan.plan import plan_search
    from cclsearch.plan.request import SearchRequest
    from cclsearch.run.folder import create_run
    from cclsearch.run.spec import SearchLimits
    from cclsearch.space.parse import parse_knob

    knobs = (parse_knob("tp=1,2"),)
    plan = plan_search(SearchRequest("tiny", SearchLimits(budget=1), knobs=knobs, run_id="cpu", sets=("seq_len=64",)))
    create_run(plan.spec, project / "runs")
    found = answer(capsys, "space", "--run", "cpu")
    assert found["legal"] == len(plan.space)
    assert main(["predict", "--run", "cpu", "--top", "1"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("space", "give --workload NAME, --recording NAME, or --run RUN"),
        ("predict --recording nanotron-8b-2n --set seq_len=8", "--set: --recording has a card and a space of its own"),
        ("space --recording nanotron-8b-2n --workload wl2", "--workload: --recording"),
        ("space --recording nanotron-8b-2 ", "did you mean 'nanotron-8b-2n'?"),
        ("space --run nowhere", "there are no runs in"),
        ("run -w wl2 --launcher replay --set batch_size=33", "was measured with batch_size 256 (not 33)"),
        ("run -w wl2 --launcher replay --set framework=torchtitan", "with framework nanotron (not torchtitan)"),
        ("run -w wl2 --launcher replay --overlay wl3", "nanotron-8b-2n"),
        ("sweep -w wl2 --launcher replay --set num_layers=3", "with num_layers 32 (not 3)"),
    ],
)
def test_what_a_recording_cannot_honour_is_refused_in_one_line(words, message, project, cli):
    error = cli.err(words.split())
    assert message in error
    assert error.count("\n") == 1
    assert not (project / "runs").exists()


def test_settings_that_agree_with_the_recording_are_accepted(project):
    same = [
        "--set",
        "batch_size=256",
        "--set",
        "accelerator=h100",
        "--set",
        "memory_gb=80",
        "--set",
        "description=mine",
    ]
    assert main(["run", "-w", "wl2", "--launcher", "replay", "--dry-run", *same]) == 0
