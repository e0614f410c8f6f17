"""A task of a plugin outside the tree, through the command line: `tests/plugins/toy_task` compresses bytes on a CPU.

Each command is a process of its own, which finds the installed plugin as it finds any other. The trials really run.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_calls import CommandResult, call_in_subprocess
from llm.players import knob_choices, own_turn
from llm.server import KEY, MODEL, Reaction, Say, check_first, serve
from paths import TESTS

from cclsearch.core.trust import trust_project
from cclsearch.propose.agent.providers.types import CompletionRequest

PLUGIN = TESTS / "plugins" / "toy_task"
RUN = ("run", "--workload", "logs", "--launcher", "local")
OF_TRAINING = re.compile(
    r"step[ _]time|optimizer|\btraining\b|\bmfu\b|\bseq_len\b|sequence length|global[ _]batch|micro[-_ ]?batch"
    r"|tokens[ /_](?:s\b|per\b)|\bparallelism\b|\b(?:tp|pp|dp)\b",
    re.IGNORECASE,
)
"""Words of training: nothing that this task shows to people or to an LLM contains them."""


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed packages that contains the plugin, as its `pyproject.toml` declares it."""
    site = tmp_path_factory.mktemp("site")
    declared = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    info = site / f"{declared['name'].replace('-', '_')}-{declared['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {declared['name']}\nVersion: {declared['version']}\n")
    points = "".join(f"{name} = {module}\n" for name, module in declared["entry-points"]["cclsearch"].items())
    (info / "entry_points.txt").write_text(f"[cclsearch]\n{points}")
    shutil.copytree(PLUGIN / info.name.split("-")[0], site / info.name.split("-")[0])
    return site


class Toy:
    """A user's project in which the plugin is installed."""

    def __init__(self, folder: Path, site: Path) -> None:
        self.folder, self.site = folder, site
        shutil.copytree(PLUGIN / "project", folder)
        trust_project(folder)

    def call(self, *words: str, code: int = 0) -> CommandResult:
        """Run one `ccl-search` command in the project; its exit code must be `code`."""
        with contextlib.chdir(self.folder):
            return call_in_subprocess(*words, plugin=self.site, code=code)

    def run_path(self, name: str) -> Path:
        return self.folder / "runs" / name


@pytest.fixture
def toy(tmp_path: Path, installed: Path) -> Toy:
    return Toy(tmp_path / "project", installed)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory, installed: Path) -> Toy:
    """A project with a search `plain` of 6 trials under the task's default objective; tests only read it."""
    toy = Toy(tmp_path_factory.mktemp("searched") / "project", installed)
    toy.call(*RUN, "--budget", "6", "--name", "plain")
    return toy


def trials_of(toy: Toy, run: str) -> list[dict[str, Any]]:
    return toy.call("status", run, "--json").json["trials"]


def ran_once(toy: Toy, run: str) -> bool:
    """Whether no doubtful measurement was made again: the best is then the greatest, else what two runs confirm."""
    return all(trial["purpose"] == "search" for trial in trials_of(toy, run))


def metrics_of(toy: Toy, run: str, trial: int) -> dict[str, float]:
    """The metrics of a trial, from the file for readers in its folder."""
    return json.loads((toy.run_path(run) / "trials" / f"{trial:04d}" / "metrics.json").read_text())["metrics"]


def text_of(page: str) -> str:
    """A page without styles and scripts."""
    return re.sub(r"<(style|script)\b.*?</\1>", "", page, flags=re.DOTALL)


def test_the_space_has_the_tasks_rule_and_choices(toy):
    shown = toy.call("space", "--workload", "logs").out
    assert "chunks_cover_workers" in shown
    assert OF_TRAINING.findall(shown) == []
    described = toy.call("space", "--workload", "logs", "--json").json
    assert {knob["name"] for knob in described["knobs"]} == {"workers", "chunk_kib", "level"}
    too_large = "workers=4,chunk_kib=512,level=1"
    explained = toy.call("space", "explain", "--workload", "logs", "--config", too_large, code=1).out
    assert "chunks_cover_workers" in explained
    assert "8 chunks for 4 workers" in explained


def test_the_closed_form_predicts_both_metrics_by_part(toy):
    shown = toy.call("predict", "--workload", "logs", "--top", "3").out
    assert "throughput" in shown
    assert "MB/s" in shown
    assert OF_TRAINING.findall(shown) == []
    predicted = toy.call("predict", "--workload", "logs", "--top", "200", "--json").json["configurations"]
    figures = [row["throughput_mb_s"] for row in predicted]
    assert figures == sorted(figures, reverse=True), "the greatest throughput first"
    assert predicted[0]["config"]["level"] == 1


def test_a_search_runs_its_trials_and_finds_the_greatest_throughput(searched):
    best = searched.call("best", "plain", "--json").json
    numbers = [trial["trial"] for trial in trials_of(searched, "plain")]
    assert numbers == [1, 2, 3, 4, 5, 6]
    measured = {number: metrics_of(searched, "plain", number) for number in numbers}
    assert best["throughput_mb_s"] == measured[best["trial"]]["throughput_mb_s"]
    if ran_once(searched, "plain"):
        assert best["throughput_mb_s"] == max(found["throughput_mb_s"] for found in measured.values())
    assert best["latency_p99_s"] == measured[best["trial"]]["latency_p99_s"]
    assert set(best) & {"step_time_s", "tokens_per_s", "mfu"} == set()
    result = json.loads((Path(best["evidence"]) / "result.json").read_text())
    assert result["input_bytes"] == 4 * 2**20
    assert best["throughput_mb_s"] == pytest.approx(
        result["input_bytes"] / 1e6 / sorted(result["pass_times_s"])[len(result["pass_times_s"]) // 2]
    )


def test_texts_of_a_search_have_the_tasks_words_and_none_of_training(searched):
    shown = "".join(
        searched.call(*words).out
        for words in (("status", "plain"), ("status",), ("best", "plain"), ("admit", "plain"), ("show", "plain", "1"))
    )
    assert "throughput" in shown
    assert "MB/s" in shown
    assert OF_TRAINING.findall(shown) == []
    planned = searched.call(*RUN, "--budget", "2", "--dry-run").out
    assert "MB/s" in planned
    assert OF_TRAINING.findall(planned) == []


def test_the_report_has_the_tasks_words_and_none_of_training(searched):
    searched.call("report", "plain", "--out", "page.html")
    page = (searched.folder / "page.html").read_text(encoding="utf-8")
    text = text_of(page)
    assert "throughput" in text
    assert "MB/s" in text
    assert "99th percentile latency" in text
    assert OF_TRAINING.findall(text) == []
    shown = searched.call("report", "plain", "--no-png", "--out", "again.html").out
    assert OF_TRAINING.findall(shown) == []


def test_exports_have_the_tasks_columns(searched, tmp_path):
    table, study_file = tmp_path / "table.csv", tmp_path / "study.db"
    searched.call("export", "plain", "--to", "csv", "--out", str(table))
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    best = searched.call("best", "plain", "--json").json
    [marked] = [row for row in rows if row["is_best"] == "True"]
    assert int(marked["trial"]) == best["trial"]
    assert float(marked["metric.throughput_mb_s"]) == pytest.approx(best["throughput_mb_s"])
    assert "expected_throughput_mb_s" in marked
    assert OF_TRAINING.findall(" ".join(marked)) == []
    searched.call("export", "plain", "--to", "optuna", "--out", str(study_file))
    import optuna

    [study] = optuna.get_all_study_summaries(f"sqlite:///{study_file}")
    assert study.best_trial is not None
    assert study.n_trials == 6
    loaded = optuna.load_study(study_name=study.study_name, storage=f"sqlite:///{study_file}")
    if ran_once(searched, "plain"):
        assert {name: loaded.best_trial.params[name] for name in best["config"]} == best["config"]


def test_admission_is_repeated_from_the_evidence_and_finds_an_edited_result(searched, toy):
    admissions = searched.call("admit", "plain", "--json").json
    assert [trial["admitted"] for trial in admissions["trials"]] == [True] * 6
    rules = {verdict["rule"]: verdict["ok"] for verdict in admissions["trials"][0]["verdicts"]}
    assert rules["compressed_bytes"] is True
    assert rules.keys() & {"work", "steps", "warmup", "training_loss", "traced_work"} == set()
    toy.call(*RUN, "--budget", "1", "--name", "edited")
    path = toy.run_path("edited") / "trials" / "0001" / "result.json"
    path.write_text(path.read_text().replace("0.", "0.0", 1))
    [trial] = toy.call("admit", "edited", "--json", code=1).json["trials"]
    assert "result.json was changed" in trial["reason"]


@pytest.mark.parametrize(
    ("cheating", "reason"),
    [
        ('make_logs(given["work"]["total_mib"] * 2**19)', "bytes"),
        ('bytes(given["work"]["total_mib"] * 2**20)', "SHA-256"),
    ],
)
def test_a_run_of_other_work_is_never_ranked(toy, cheating, reason):
    script, honest = toy.folder / "launchers" / "zlib_run.py", 'make_logs(given["work"]["total_mib"] * 2**20)'
    assert f"data = {honest}" in script.read_text()
    script.write_text(script.read_text().replace(f"data = {honest}", f"data = {cheating}"))
    shown = toy.call(*RUN, "--budget", "1", "--name", "other", code=1).out
    assert reason in shown
    assert toy.call("status", "other", "--json").json["best"] is None


def test_an_impossible_constraint_reports_the_closest_configuration_and_by_how_much(toy):
    shown = toy.call(*RUN, "--budget", "3", "--objective", "steady:seconds=0.000001", "--name", "unmet", code=1).out
    figures = {trial["trial"]: metrics_of(toy, "unmet", trial["trial"]) for trial in trials_of(toy, "unmet")}
    closest = min(figures, key=lambda number: figures[number]["latency_p99_s"])
    assert toy.call("status", "unmet", "--json").json["best"] is None
    [line] = [line for line in shown.splitlines() if "closest" in line]
    assert f"trial {closest}" in line
    assert f"{figures[closest]['latency_p99_s']:.4g}" in line
    assert "99th percentile latency" in line or "latency_p99_s" in line


def test_a_sweep_over_two_of_its_metrics_has_a_front(toy):
    toy.call("sweep", *RUN[1:], "--objective", "balance", "--budget", "5", "--name", "both")
    front = toy.call("pareto", "both", "--json").json
    assert front["metrics"] == ["throughput_mb_s", "latency_p99_s"]
    values = [tuple(point["values"]) for point in front["points"] if point["on_front"]]
    for (fast, slow), (other_fast, other_slow) in itertools.permutations(values, 2):
        assert not (other_fast >= fast and other_slow <= slow), "a point of the front is dominated"
    shown = toy.call("pareto", "both", "--no-png").out
    assert "throughput " in shown
    page = (toy.run_path("both") / "pareto.html").read_text(encoding="utf-8")
    assert OF_TRAINING.findall(text_of(page + shown)) == []
    chosen = toy.call("pareto", "both", "--metrics", "throughput_mb_s,compression_ratio", "--json").json
    assert chosen["metrics"] == ["throughput_mb_s", "compression_ratio"]


def test_parallel_trials_confirmations_and_warm_starts(toy):
    toy.call(*RUN, "--budget", "3", "--parallel", "2", "--confirm", "1", "--name", "first")
    assert len(trials_of(toy, "first")) > 3, "the finalists ran again"
    assert toy.call("best", "first", "--json").json["confidence"]["noise_measured"] is True
    toy.call(*RUN, "--budget", "2", "--learn-from", "auto", "--name", "second")
    assert "warm start from 1 earlier run: first" in toy.call("status", "second").out
    planned = toy.call(*RUN, "--set", "total_mib=2", "--learn-from", "first", "--dry-run").out
    assert "set the prior of throughput_mb_s" in planned, "other work on the same cluster"
    assert "warm start" not in planned, "its times do not count"


def test_the_second_night_compares_with_the_first(toy):
    """The script of the second night waits: a real difference, far beyond the noise of any machine."""
    toy.call("nightly", "nightly.yaml")
    assert summary_of(toy)["verdict"] == "first"
    script = toy.folder / "launchers" / "zlib_run.py"
    waits = script.read_text().replace("    with Thread", "    time.sleep(0.2)\n    with Thread")
    assert waits != script.read_text()
    script.write_text(waits)
    shown = toy.call("nightly", "nightly.yaml", code=3).out
    job = summary_of(toy)
    assert (job["verdict"], job["nights_before"]) == ("regressed", 1)
    assert job["worse"][0]["ratio"] < 0.5, "less is worse for a metric to maximize"
    texts = [(toy.folder / "runs/nights/nightly" / name).read_text() for name in ("summary.md", "report.html")]
    assert "MB/s" in texts[0]
    for text in (shown, *texts):
        assert OF_TRAINING.findall(text_of(text)) == []


def summary_of(toy: Toy) -> dict[str, Any]:
    """The only job of the latest night."""
    [job] = json.loads((toy.folder / "runs/nights/nightly/summary.json").read_text())["jobs"]
    return job


def test_a_recording_of_the_task_is_replayed_and_benched(toy):
    recording = toy.folder / "workloads" / "recordings" / "zlib"
    with (recording / "trials.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    fastest = max(rows, key=lambda row: float(row["throughput_mb_s"]))
    toy.call(
        "run", "--workload", "logs", "--recording", str(recording), "--budget", str(len(rows)), "--name", "replayed"
    )
    best = toy.call("best", "replayed", "--json").json
    assert best["throughput_mb_s"] == float(fastest["throughput_mb_s"])
    assert best["latency_p99_s"] == float(fastest["latency_p99_s"])
    assert {knob: str(value) for knob, value in best["config"].items()} == {
        knob: fastest[knob] for knob in best["config"]
    }
    constrained = ("--objective", "steady:seconds=0.0005", "--name", "steady", "--budget", str(len(rows)))
    toy.call("run", "--workload", "logs", "--recording", str(recording), *constrained)
    kept = [float(row["throughput_mb_s"]) for row in rows if float(row["latency_p99_s"]) <= 0.0005]
    assert 0 < len(kept) < len(rows)
    assert toy.call("best", "steady", "--json").json["throughput_mb_s"] == max(kept) < float(fastest["throughput_mb_s"])
    options = ("--seeds", "1", "--budget", "6", "--samplers", "all", "--json", "figures.json", "--workers", "1")
    shown = toy.call("bench", str(recording.parent), *options).out
    figures = json.loads((toy.folder / "figures.json").read_text())
    ratio = figures["samplers"]["surrogate"]["best_over_optimum"]["gmean"]
    assert all(value >= 1 for value in ratio.values()), "1 is the optimum, also of a metric to maximize"
    assert OF_TRAINING.findall(shown) == []
    assert set(figures["samplers"]) >= {"surrogate", "gp", "grid", "heuristic", "random", "tpe"}


def test_an_llm_reads_the_tasks_words_and_its_configurations_run(toy, monkeypatch):
    wanted = iter([{"workers": 1, "chunk_kib": chunk, "level": 1} for chunk in (16, 32, 64, 128, 256, 512)])

    def script(request: CompletionRequest) -> Reaction:
        assert set(knob_choices(request)) == {"workers", "chunk_kib", "level"}
        if len(own_turn(request).messages) == 1:
            return Say((("predict", {"configurations": [{"workers": 1, "chunk_kib": 4, "level": 9}]}),))
        entry = {"config": next(wanted), "rationale": "larger chunks", **expectations(request)}
        return Say((("submit", {"configurations": [entry]}),))

    with serve(check_first(script)) as server:
        monkeypatch.setenv("CCL_SEARCH_LLM_API_KEY", KEY)
        limited = ("--objective", "steady:seconds=0.05", "--strategy", "llm")
        toy.call(*RUN, "--budget", "4", *limited, "--llm", f"{server.url}/v1#{MODEL}", "--name", "asked")
        assert server.refused == []
        text = "\n".join(json.dumps(body) for body in server.bodies)
    assert server.requests
    for words in ("throughput_mb_s", "latency_p99_s", "MB/s", "threads that compress chunks", "chunks_cover_workers"):
        assert words in text
    assert OF_TRAINING.findall(text) == []
    assert re.findall(r"\bnan\b", text) == [], "this task predicts no memory"
    assert "memory unknown" in text
    proposers = {trial["proposer"] for trial in trials_of(toy, "asked")}
    assert proposers & {"llm"}


def expectations(request: CompletionRequest) -> dict[str, float]:
    """A number for each expected figure that the tool `submit` asks for."""
    tool = next(tool for tool in request.tools if tool.name == "submit")
    entry = tool.parameters["properties"]["configurations"]["items"]["properties"]
    names = [name for name in entry if name.startswith("expected_")]
    assert "expected_throughput_mb_s" in names
    return dict.fromkeys(names, 1.0)


def test_without_the_plugin_one_line_names_the_task(searched, tmp_path):
    with contextlib.chdir(searched.folder):
        for words in (("report", "plain"), ("resume", "plain"), ("run", "--workload", "logs")):
            refused = call_in_subprocess(*words, plugin=tmp_path, code=2).err
            assert "'compress'" in refused
            assert refused.count("\n") == 1


def test_the_page_shows_every_file_of_the_plugin():
    page = (PLUGIN.parents[2] / "docs" / "your-task.md").read_text()
    blocks = re.findall(r"```(?:python|yaml|toml)\n(.*?)```", page, re.DOTALL)
    files = {path.relative_to(PLUGIN).as_posix(): path.read_text() for path in PLUGIN.rglob("*") if path.is_file()}
    files = {n: t for n, t in files.items() if "/recordings/" not in n and not n.endswith(("__init__.py", ".pyc"))}
    assert sorted(name for name, text in files.items() if text not in blocks) == []
    assert len(blocks) == len(files), "and nothing else"


def test_the_recording_has_the_card_of_the_workload():
    card = yaml.safe_load((PLUGIN / "project" / "workloads" / "logs.yaml").read_text())
    recorded = yaml.safe_load((PLUGIN / "project" / "workloads" / "recordings" / "zlib" / "card.yaml").read_text())
    assert recorded["workload"] == card["workload"]
