"""`claims frameworks` compares the best configurations of frameworks, and nothing that is not equal work."""

from __future__ import annotations

import json
import shutil

import pytest
from paths import ROOT

from cclsearch.cli import main

LANDSCAPES = ROOT / "benchmarks" / "landscapes"


def compare(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, object]]:
    code = main(["claims", "frameworks", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_each_framework_counts_by_its_best_within_the_limit(capsys):
    name = "srv-gpt-oss-120b-h200-1024x1024"
    code, tight = compare(capsys, name, "--limit", "tpot_mean_s <= 0.008")
    assert code == 0
    (case,) = tight["cases"]
    assert case["provenance"] == "recorded"
    assert [one["framework"] for one in case["frameworks"]] == ["vllm", "trtllm"]
    best, second = case["frameworks"]
    assert best["behind"] == 1
    assert second["behind"] == pytest.approx(best["value"] / second["value"])
    _, loose = compare(capsys, name, "--limit", "tpot_mean_s <= 0.03")
    assert loose["cases"][0]["frameworks"][0]["framework"] == "trtllm", "which one is best depends on the limit"
    assert loose["cases"][0]["frameworks"][0]["value"] > best["value"]


def test_only_equal_precision_is_compared(capsys):
    code, found = compare(capsys, "gpustack-qwen3-32b-a100")
    assert code == 1
    assert [case["name"] for case in found["cases"]] == ["gpustack-qwen3-32b-a100, checkpoint"]


def test_runs_of_equal_work_are_compared_and_others_are_not(tmp_path, capsys, cli, monkeypatch):
    source = LANDSCAPES / "nanotron-8b-2n"
    for name, framework, factor in (("one", "nanotron", 1.0), ("two", "megatron", 0.5)):
        folder = tmp_path / name
        shutil.copytree(source, folder)
        card = (folder / "card.yaml").read_text()
        (folder / "card.yaml").write_text(card.replace("nanotron", framework))
        table = next(path for path in (folder / "trials.csv", folder / "landscape.csv") if path.exists())
        header, *rows = table.read_text().splitlines()
        column = header.split(",").index("step_time_s")
        cells = [row.split(",") for row in rows]
        for row in cells:
            row[column] = str(float(row[column]) * factor) if row[column] else ""
        table.write_text("\n".join([header, *map(",".join, cells)]) + "\n")
        run = ["run", "--recording", str(folder), "--budget", "4", "--name", name, "--runs", str(tmp_path / "runs")]
        assert main(run) == 0
    runs = ["--runs", str(tmp_path / "runs")]
    capsys.readouterr()
    code, found = compare(capsys, "one", "two", *runs)
    assert code == 0
    (case,) = found["cases"]
    assert [(one["framework"], one["num_measured"]) for one in case["frameworks"]] == [("megatron", 4), ("nanotron", 4)]
    assert "note: one: only one framework (nanotron)" in cli.out(["claims", "frameworks", "one", *runs], 1)


def test_a_picture_shows_all_cases(tmp_path, capsys):
    picture = tmp_path / "frameworks.svg"
    assert main(["claims", "frameworks", "srv-gpt-oss-120b-h200-1024x1024", "--picture", str(picture)]) == 0
    assert "best in: trtllm 4, vllm 2" in capsys.readouterr().out
    drawn = picture.read_text()
    assert all(word in drawn for word in ("vllm", "tpot_mean_s &lt;= 0.008", "tpot_mean_s &lt;= 0.05", "recorded"))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["frameworks", "nowhere"], "'nowhere' is neither a run nor a recording"),
        (["overlap", "trace.json", "--limit", "x <= 1"], "--limit is for `claims frameworks`"),
        (["frameworks", "srv-gpt-oss-120b-h200-1024x1024", "--limit", "speed <= 1"], "speed"),
        (["frameworks", "example-wl2", "--limit", "tpot_mean_s <= 1"], "--limit is for recordings"),
    ],
)
def test_what_cannot_be_compared_is_refused(arguments, why, cli):
    assert why in cli.err(["claims", *arguments])
