"""Reports, exports and comparisons of a task other than training: its own metric, unit and direction, and no other."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import recorded_runs
import yaml

from cclsearch.analysis.report_pages import build_page
from cclsearch.card.fields import CardField, FieldKind
from cclsearch.card.model import Card
from cclsearch.cli import main
from cclsearch.core.metrics import Direction, MetricInfo
from cclsearch.nightly.compare import NightVerdict, compare_night
from cclsearch.nightly.history import choose_figure, is_same_work, read_night
from cclsearch.plugins import TASKS
from cclsearch.report.data import draw_comparisons, rank_runs
from cclsearch.report.gather import gather_run
from cclsearch.report.page import render_page
from cclsearch.run.folder import Run
from cclsearch.tasks.base import Task

OF_TRAINING = re.compile(r"step.time|steps?\b|tokens?\b|\bmfu\b|training|\btrain|sequence|micro.?batch|gradient", re.I)
CARD = {
    "version": 1,
    "description": "Sorts lines of text",
    "workload": {
        "task": "sorting",
        "data": {"num_lines": 5000},
        "hardware": {"xpu_spec": {"model": "cpu", "memory_gb": 4, "total_count": 1, "count_per_node": 1}},
    },
    "Model-executor": {"framework": {"name": "sorter"}},
}


class SortTask(Task):
    """Sorts lines; throughput is measured."""

    name = "sorting"
    metrics = (
        MetricInfo(
            name="lines_per_s",
            unit="lines/s",
            direction=Direction.MAXIMIZE,
            source="result",
            label="throughput",
            is_positive=True,
        ),
        MetricInfo(
            name="hit_rate", unit="fraction", direction=Direction.MAXIMIZE, source="result", label="cache hit rate"
        ),
    )
    primary = "lines_per_s"
    highlights = ("hit_rate",)
    efficiency = ("hit_rate",)
    causes = ("hit_rate",)
    card_fields = (CardField("num_lines", FieldKind.COUNT, ("workload.data.num_lines",), required=True),)
    needs_model = False

    def describe_work(self, card: Card) -> str:
        return f"{card.work['num_lines']} lines"


@pytest.fixture(autouse=True)
def _sorting() -> Iterator[None]:
    TASKS.names()
    TASKS.register("sorting")(SortTask())
    yield
    del TASKS._entries["sorting"]


def write_recording(folder: Path, scale: float = 1.0) -> Path:
    """A recording of sorting: more workers and larger runs are faster, in two precisions of keys; one row fails."""
    folder.mkdir(parents=True)
    (folder / "card.yaml").write_text(yaml.safe_dump(CARD), encoding="utf-8")
    with (folder / "trials.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["precision", "workers", "status", "lines_per_s", "hit_rate"])
        for precision in ("int32", "int64"):
            for workers in (1, 2, 4):
                speed = scale * 1000 * workers * (2 if precision == "int32" else 1)
                fails = (precision, workers) == ("int64", 4)
                writer.writerow(
                    [precision, workers, *(["failed", "", ""] if fails else ["ok", speed, 0.5 + workers / 10])]
                )
    return folder


def search(project: Path, name: str = "sorted", *more: str, scale: float = 1.0) -> Run:
    return recorded_runs.search(write_recording(project / f"rec-{name}", scale), name, *more, budget=6)


def read_output(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    capsys.readouterr()
    assert main(list(words)) == code
    return capsys.readouterr().out


def test_terminal_shows_the_metric_of_the_task(project, capsys):
    search(project)
    best = read_output(capsys, "best", "sorted")
    assert "best: trial " in best
    assert "      throughput 8,000 lines/s (recorded)\n      cache hit rate 90.0%\n" in best
    assert "highest of 5 recorded values of throughput; runner-up: trial " in best
    assert "(8,000 lines/s -> 4,000 lines/s, 50.00% lower)" in best
    assert "precision=int32 workers=4" in best
    text = best + read_output(capsys, "status") + read_output(capsys, "status", "sorted")
    text += "".join(read_output(capsys, "show", "sorted", str(n)) for n in range(1, 7))
    assert "best 8,000 lines/s (recorded)  precision=int32 workers=4" in text
    assert not OF_TRAINING.findall(text)


def test_json_has_the_metrics_of_the_task_as_keys(project, capsys):
    search(project)
    best = json.loads(read_output(capsys, "best", "sorted", "--json"))
    assert (best["lines_per_s"], best["hit_rate"], best["objective"]) == (8000.0, 0.9, "lines_per_s")
    assert not [key for key in best if OF_TRAINING.search(key)]
    [row] = json.loads(read_output(capsys, "status", "--json"))
    assert row["best_lines_per_s"] == 8000.0


def test_page_and_charts_show_the_metric_of_the_task(project):
    page = build_page(search(project))
    html = re.sub(r"<(style|script)\b.*?</\1>", "", render_page([page]), flags=re.S)
    assert "best throughput" in html
    assert "8,000 lines/s" in html
    assert "Throughput (recorded) by trial" in html
    assert "Throughput (recorded) against cache hit rate" in html
    assert page.work == "5000 lines"
    assert not OF_TRAINING.findall(html)
    assert {knob for trial in page.trials for knob in trial.config} == {"precision", "workers"}
    for cell in (">precision</button>", ">int64</td>", ">throughput (lines/s)</button>"):
        assert cell in html


def test_neighbors_of_the_winner_are_ordered_by_the_better_direction(project):
    page = gather_run(search(project))
    assert page.best_trial.value == 8000.0
    assert {n.change: n.ratio for n in page.neighbors}["precision int32 → int64, workers 4 → 2"] == 0.25
    assert all(neighbor.ratio < 1 for neighbor in page.neighbors)


def test_exports_name_the_metric_and_the_work_of_the_task(project, capsys):
    run = search(project)
    read_output(capsys, "export", "sorted", "--out", "trials.csv")
    rows = list(csv.DictReader(Path("trials.csv").read_text(encoding="utf-8").splitlines()))
    assert {"expected_lines_per_s", "metric.lines_per_s", "config.precision"} <= rows[0].keys()
    assert not [name for name in rows[0] if OF_TRAINING.search(name)]
    read_output(capsys, "export", "sorted", "--to", "ccl-bench", "--trials", "best", "--out", "cards")
    [path] = Path("cards").rglob("*sorted-t*.yaml")
    card: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert card["workload"]["task"] == "sorting"
    assert card["workload"]["data"] == {"num_lines": 5000}
    assert "model" not in card["workload"]
    assert card["Model-executor"]["framework"]["name"] == run.spec.framework
    assert "model_plan_parallelization" not in card["Model-executor"]


def test_runs_are_ranked_by_the_better_direction_and_never_across_tasks(project):
    slow, fast = gather_run(search(project, "slow", scale=0.5)), gather_run(search(project, "fast"))
    other = gather_run(recorded_runs.search(recorded_runs.write_recording(project / "rec-toy"), "trained"))
    ranking = rank_runs([slow, other, fast])
    assert [(entry.page.run_id, entry.rank, entry.ratio) for entries in ranking for entry in entries] == [
        ("fast", 1, 1.0),
        ("slow", 2, 0.5),
        ("trained", 1, 1.0),
    ]
    html = render_page([slow, other, fast])
    assert "Runs of different tasks are not compared: sorting, training." in html
    assert html.count('id="ranking-table') == 2
    [bests, *_] = draw_comparisons(rank_runs([slow, other, fast])[0], "")
    assert bests.title == "Best throughput of each run"
    assert "not compared" not in render_page([slow, fast])


def test_a_pareto_front_of_two_tasks_is_refused(project, capsys):
    search(project)
    recorded_runs.search(recorded_runs.write_recording(project / "rec-toy"), "trained")
    capsys.readouterr()
    assert main(["pareto", "sorted", "trained", "--no-png"]) == 2
    assert "no common Pareto front: task differs (sorting; training)" in capsys.readouterr().err
    front = read_output(capsys, "pareto", "sorted", "--no-png")
    assert "1 of 5 configurations" in front
    assert "throughput 8,000 lines/s, 1 accelerator " in front


def test_constraints_and_violations_are_shown(project, capsys):
    page = gather_run(search(project, "sorted", "--constraint", "hit_rate <= 0.8"))
    html = render_page([page])
    assert "Constraint: hit_rate &lt;= 0.8 fraction" in html
    violations = {str(trial.config_text): trial.violation for trial in page.trials}
    assert violations["precision=int32 workers=4"] == pytest.approx(0.125)
    assert violations["precision=int32 workers=2"] == 0.0
    assert violations["precision=int64 workers=4"] is None
    assert ">12.5%</td>" in html
    read_output(capsys, "export", "sorted", "--out", "trials.csv")
    assert "violation" in Path("trials.csv").read_text(encoding="utf-8").splitlines()[0].split(",")


def test_nights_compare_a_metric_of_which_more_is_better(project):
    before, now = read_night(search(project, "one")), read_night(search(project, "two", scale=0.5))
    assert is_same_work(before.run.spec, before.run.spec)
    figure = choose_figure(now.run.spec)
    assert (figure.name, figure.unit) == ("lines_per_s", "lines/s")
    assert now.best is not None
    assert str(now.best) == "precision=int32 workers=4"
    compared = compare_night(now, [before], tolerance=0.02, confidence=0.95)
    assert compared.verdict is NightVerdict.REGRESSED
    assert "is worse than on earlier nights: lines_per_s " in compared.text
    assert "(0.500x)" in compared.text
    better = compare_night(before, [now], tolerance=0.02, confidence=0.95)
    assert better.verdict is NightVerdict.IMPROVED
    assert "(2.000x)" in better.text
