"""`predict --learn-from`: trials of one workload on an accelerator adapt the prediction of another one there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from paths import ROOT

from cclsearch.cli import main
from cclsearch.plan.target import find_recording
from cclsearch.recording.load import load_recording

LANDSCAPES = ROOT / "benchmarks" / "landscapes"


def scale_times(source: Path, folder: Path, factor: float, keep: int) -> Path:
    """Write the first rows that ran of a recording, with its times multiplied, as one of a faster or slower machine."""
    shutil.copytree(source, folder)
    table = next(path for path in (folder / "trials.csv", folder / "landscape.csv") if path.exists())
    header, *rows = (line.split(",") for line in table.read_text().splitlines())
    at, status = header.index("step_time_s"), header.index("status")
    ran = [row for row in rows if row[status] == "ok"][:keep]
    for row in ran:
        row[at] = str(float(row[at]) * factor)
    table.write_text("\n".join(",".join(row) for row in (header, *ran)) + "\n")
    return folder


def predict(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[list[float], dict[str, object]]:
    assert (
        main(["predict", "--recording", str(LANDSCAPES / "nanotron-8b-4n"), "--json", "--top", "30", *arguments]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    configurations = sorted(found["configurations"], key=lambda each: str(each["config"]))
    return [each["step_time_s"] for each in configurations], found


def test_a_slower_machine_is_learned_from_trials_of_another_model(tmp_path, capsys):
    config = ("--config", "tp=2,pp=2")
    before, _ = predict(capsys, *config)
    ratios = {}
    for factor in (1.0, 3.0):
        folder = scale_times(LANDSCAPES / "nanotron-3b-2n", tmp_path / f"x{factor:g}", factor, keep=8)
        after, found = predict(capsys, *config, "--learn-from", str(folder))
        assert len(after) == len(before)
        ratios[factor] = sum(a / b for a, b in zip(after, before, strict=True)) / len(before)
        assert "8 trials" in str(found["notes"])
    assert 1.3 < ratios[3.0] / ratios[1.0] < 3.2, "part of it may be of the model: it is not taken over whole"


def test_a_run_teaches_as_a_recording_does(tmp_path, capsys):
    source, runs = str(LANDSCAPES / "nanotron-3b-2n"), str(tmp_path / "runs")
    assert main(["run", "--recording", source, "--budget", "5", "--name", "first", "--runs", runs]) == 0
    capsys.readouterr()
    before, _ = predict(capsys)
    after, found = predict(capsys, "--learn-from", "first", "--runs", runs)
    assert after != before
    assert "first (" in str(found["notes"])


def test_trials_of_a_server_adapt_the_prediction_for_other_traffic(cli):
    """The longer prompts were measured too: what the short ones teach brings the prediction nearer to it."""
    short, long = "srv-llama-3-1-70b-h100-1024x1024", "srv-llama-3-1-70b-h100-8192x1024"
    predicted = []
    for more in ([], ["--learn-from", short]):
        configurations = cli.json(["predict", "--recording", long, "--json", *more])["configurations"]
        predicted.append({each["label"]: each["output_tokens_per_s_per_accelerator"] for each in configurations})
    recording = load_recording(find_recording(long))
    measured = {str(row.config): row.metrics["output_tokens_per_s_per_accelerator"] for row in recording.rows}
    before, after = (
        float(np.median([abs(np.log(each[label] / value)) for label, value in measured.items()])) for each in predicted
    )
    assert after < before


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("vtrain-h1024-l12-g8-b8", "was measured with accelerator 'a100-80', but this is 'h100'"),
        ("nowhere", "there are no runs in"),
    ],
)
def test_what_cannot_teach_is_refused(source, why, tmp_path, cli):
    name = str(LANDSCAPES / source) if (LANDSCAPES / source).exists() else source
    arguments = ["--recording", str(LANDSCAPES / "nanotron-8b-4n"), "--learn-from", name]
    line = cli.err(["predict", *arguments, "--runs", str(tmp_path)])
    assert why in line
    assert len(line.strip().splitlines()) == 1
