"""Exports of runs to other tools, and Prometheus metrics."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from paths import ROOT
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from recorded_runs import search, write_recording
from starlette.testclient import TestClient

from cclsearch.card.arch import tokens_per_step
from cclsearch.card.hardware import find_accelerator
from cclsearch.card.load import load_card
from cclsearch.card.model import Hardware
from cclsearch.cli import main
from cclsearch.export.ccl_bench import _name_accelerator, copy_evidence, write_entries
from cclsearch.record.lock import FolderLock
from cclsearch.report.pareto import escape_formula
from cclsearch.run.folder import Run
from cclsearch.ui.app import make_app
from cclsearch.ui.guard import Permissions

SECRET = "hunter2-but-much-longer"


@pytest.fixture
def run(project: Path) -> Run:
    return search(write_recording(project / "toy"), "r", budget=9)


def test_the_table_agrees_with_the_ledger_and_leaves_missing_cells_empty(run):
    assert main(["export", "r", "--out", "t.csv"]) == 0
    rows = list(csv.DictReader(Path("t.csv").read_text(encoding="utf-8").splitlines()))
    assert [int(row["trial"]) for row in rows] == list(run.state.trials)
    for row in rows:
        trial = run.state.trials[int(row["trial"])]
        assert int(row["config.tp"]) == trial.config["tp"]
        if trial.loss is None:
            assert (row["loss"], row["metric.step_time_s"], row["failure_kind"]) == ("", "", "out_of_memory")
        else:
            assert float(row["metric.step_time_s"]) == trial.loss
    assert sum(row["state"] == "failed" for row in rows) == 1
    assert {row["provenance"] for row in rows} == {"recorded"}


def test_parquet_contains_the_same_with_types(run):
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    assert main(["export", "r", "--to", "parquet", "--out", "t.parquet"]) == 0
    frame = pd.read_parquet("t.parquet")
    assert len(frame) == 9
    assert frame["config.tp"].dtype.kind == "i"
    assert frame["metric.step_time_s"].isna().sum() == 1


def test_optuna_opens_the_study_and_finds_the_same_best(run, cli):
    url = cli.out(["export", "r", "--to", "optuna", "--out", "study.db"]).split("optuna-dashboard ")[1].split()[0]
    study = optuna.load_study(study_name="r", storage=url)
    assert study.best_value == run.state.best.loss
    assert study.best_trial.params == dict(run.state.best.config)
    [failed] = [trial for trial in study.trials if trial.state.name == "FAIL"]
    assert sum(trial.state.name == "COMPLETE" for trial in study.trials) == 8
    assert failed.user_attrs["failure_kind"] == "out_of_memory"


def test_a_pareto_objective_becomes_a_study_with_several_directions(project):
    search(write_recording(project / "toy"), "p", "--objective", "pareto", budget=6)
    assert main(["export", "p", "--to", "optuna", "--out", "study.db"]) == 0
    study = optuna.load_study(study_name="p", storage=f"sqlite:///{Path('study.db').absolute()}")
    assert [direction.name for direction in study.directions] == ["MINIMIZE", "MINIMIZE"]
    assert study.best_trials


def export_best(name: str) -> tuple[Path, dict[str, Any]]:
    """Export the best trial of a run; returns its folder, and the card as it is written."""
    assert main(["export", name, "--to", "ccl-bench", "--trials", "best", "--out", "cards"]) == 0
    entry = next(Path("cards").iterdir())
    return entry, yaml.safe_load((entry / f"{entry.name}.yaml").read_text(encoding="utf-8"))


def test_a_card_loads_again_and_its_manifest_is_correct(run):
    folder, data = export_best("r")
    card = load_card(str(folder / f"{folder.name}.yaml"))
    assert card.arch.model_copy(update={"num_params": None}) == run.spec.card.arch
    assert tokens_per_step(card) == tokens_per_step(run.spec.card)
    best = run.state.best
    assert data["Model-executor"]["model_plan_parallelization"]["tp"] == best.config["tp"]
    assert "recorded: nothing was run here" in data["description"]
    manifest = json.loads((folder / "evidence" / "manifest.json").read_text(encoding="utf-8"))
    names = {"config.json", "result.json", "admission.json", "metrics.json"}
    assert {f"evidence/{name}" for name in names} <= set(manifest["files"])
    for name, facts in manifest["files"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == facts["sha256"]


_SECTIONS = {
    "": "version description hf_url trace_url contributor contact",
    "workload.model.": "phase moe granularity model_family precision epochs iteration",
    "workload.model.model_arch.": "num_params num_params_embedding num_layers num_heads head_dim",
    "workload.data.": "batch_size seq_len dataset",
    "workload.hardware.": "driver_version",
    "workload.hardware.network_topo.": "topology bandwidth_gbps",
    "workload.hardware.xpu_spec.": "type model total_count count_per_node",
    "Model-executor.": "protocol_selection",
    "Model-executor.framework.": "name compiler_tool_selection",
    "Model-executor.model_plan_parallelization.": "dp_replicate dp_shard tp pp cp ep pp_mb",
    "Model-executor.communication_library.": "name version env",
    "metric_source.": "traces metrics_specific_trace",
}
TEMPLATE = {f"{section}{name}" for section, names in _SECTIONS.items() for name in names.split()}
"""The fields of CCL-Bench's template (workload_card_template.yaml); lists count as one."""


def list_fields(section: dict[str, Any], path: str = "") -> set[str]:
    found: set[str] = set()
    for name, value in section.items():
        found |= list_fields(value, f"{path}{name}.") if isinstance(value, dict) and value else {f"{path}{name}"}
    return found


def test_a_card_of_the_template_is_exported_whole_and_loads_to_an_equal_card(project):
    toy = write_recording(project / "toy")
    data = yaml.safe_load((toy / "card.yaml").read_text(encoding="utf-8"))
    data |= {
        "hf_url": "https://huggingface.co/org/toy",
        "contributor": "Somebody",
        "trace_url": "https://x.invalid/old",
    }
    data["workload"]["hardware"]["network_topo"] |= {"topology": "slingshot"}
    data["workload"]["hardware"]["driver_version"] = "cuda_12.4"
    data["workload"]["data"]["dataset"] = "c4"
    data["workload"]["extra"] = {"switches": 3, "racks": [4, 5]}
    executor = data.setdefault("Model-executor", {"framework": {"name": "megatron"}})
    executor["communication_library"] = {"name": "NCCL", "version": "2.21", "env": {"NCCL_ALGO": "Ring"}}
    executor["protocol_selection"] = ["rocev2", "p2p"]
    (toy / "card.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    run = search(toy, "whole", budget=9)
    entry, written = export_best("whole")
    given = list_fields(written) | {"Model-executor.communication_library.env"}  # a mapping of its own
    assert sorted(TEMPLATE - given) == []
    assert written["Model-executor"]["communication_library"] == executor["communication_library"]
    assert written["Model-executor"]["protocol_selection"] == ["rocev2", "p2p"]
    assert written["workload"]["extra"] == {"switches": 3, "racks": [4, 5]}
    assert (written["contributor"], written["trace_url"]) == (None, None), "of the card's author, not of this trial"
    assert (written["workload"]["model"]["iteration"], written["metric_source"]["traces"]) == (None, [])

    ours, again = run.spec.card, load_card(str(entry / f"{entry.name}.yaml"))
    best = run.state.best
    same = ("task", "phase", "family", "work", "precision", "source", "licence")
    assert {name: getattr(again, name) for name in same} == {name: getattr(ours, name) for name in same}
    assert again.arch.model_copy(update={"num_params": ours.arch.num_params}) == ours.arch
    assert again.hardware == ours.hardware
    assert again.framework == run.spec.framework
    own = {name: again.configuration[name] for name in best.config if name in again.configuration}
    assert own == {name: value for name, value in best.config.items() if name in own}
    assert {"tp", "dp", "pp", "micro_batch_size"} & set(best.config) <= set(own)
    kept = {k: v for k, v in ours.template.items() if not k.startswith(("contributor", "trace_url", "metric_source"))}
    assert {name: again.template.get(name) for name in kept} == kept


@pytest.mark.parametrize(
    ("accelerator", "memory", "name"),
    [("a100-40", 40, "nvidia_a100"), ("a100-80", 80, "nvidia_a100"), ("h100", 80, "nvidia_h100"), ("cpu", 4, "cpu")],
)
def test_accelerators_have_the_names_that_the_tools_of_ccl_bench_know(accelerator, memory, name):
    hardware = Hardware(accelerator=accelerator, num_accelerators=1, accelerators_per_node=1, memory_gib=memory)
    assert _name_accelerator(hardware) == name
    assert find_accelerator(name, memory).name == accelerator


def test_one_trial_may_be_exported_and_a_missing_one_is_named(run, cli):
    assert main(["export", "r", "--to", "ccl-bench", "--trial", "2", "--out", "cards"]) == 0
    assert [path.name[-5:] for path in Path("cards").iterdir()] == ["t0002"]
    assert "there is no trial 99" in cli.err(["export", "r", "--to", "ccl-bench", "--trial", "99"])


def test_evidence_excludes_secrets_links_and_unknown_files(tmp_path, monkeypatch):
    monkeypatch.setenv("CLUSTER_PASSWORD", SECRET)
    trial = tmp_path / "trial"
    (trial / "trace" / "deep").mkdir(parents=True)
    (trial / "stdout.log").write_bytes(f"login {SECRET}\n".encode() + b"\xff\xfe caf\xc3\xa9\n")
    (trial / "trace" / "rank0.json").write_text('{"env": "sk-ant-abcdefghijklmnopqrstuvwx"}', encoding="utf-8")
    with gzip.open(trial / "trace" / "deep" / "rank1.json.gz", "wt", encoding="utf-8") as file:
        file.write(json.dumps({"token": SECRET}))
    (trial / "trace" / "rank2.xplane.pb").write_bytes(b"\x00" + SECRET.encode() + b"\x01")
    (trial / "trace" / "rank3.xplane.pb").write_bytes(b"\x00plain\x01")
    (trial / "trace" / "rank4.sqlite").write_bytes(b"\x00\x17hf_Zq3vT8mK1xW5bN7cR2dL9f\x00")
    (trial / "trace" / "rank5.xplane.pb.gz").write_bytes(gzip.compress(b"\x00" + SECRET.encode() + b"\x01"))
    (trial / "trace" / "rank6.json.gz").write_bytes(gzip.compress(b"{" * 5000)[:-9])
    outside = tmp_path / "outside.json"
    outside.write_text("not ours", encoding="utf-8")
    (trial / "trace" / "link.json").symlink_to(outside)
    (trial / "stderr.log").symlink_to(outside)
    (trial / "notes.txt").write_text("not part of the evidence", encoding="utf-8")

    manifest = copy_evidence(trial, tmp_path / "copy")

    left_out = {name: facts["left_out"] for name, facts in manifest.items() if "left_out" in facts}
    assert set(manifest) - set(left_out) == {
        "evidence/stdout.log", "kineto_trace_0.json", "kineto_trace_1.json", "rank3.xplane.pb",
    }  # fmt: skip
    assert "cannot be read" in left_out.pop("kineto_trace_6.json")
    binary = ("rank2.xplane.pb", "rank4.sqlite", "rank5.xplane.pb.gz")
    assert left_out == dict.fromkeys(binary, "binary file that contains a secret")
    copied = [path for path in (tmp_path / "copy").rglob("*") if path.is_file()]
    assert len(copied) == 4
    for path in copied:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        assert SECRET.encode() not in data
        assert b"sk-ant-" not in data
    assert (tmp_path / "copy" / "evidence" / "stdout.log").read_bytes().endswith(b"\xff\xfe caf\xc3\xa9\n")


def test_no_file_is_overwritten_and_no_name_leaves_the_folder(run, cli):
    Path("t.csv").write_text("mine", encoding="utf-8")
    assert "exists already" in cli.err(["export", "r", "--out", "t.csv"])
    assert Path("t.csv").read_text(encoding="utf-8") == "mine"
    card = run.spec.card.model_copy(update={"name": ".."})
    spec = run.spec.model_copy(update={"run_id": "../../escape", "card": card})
    made = write_entries(replace(run, spec=spec), [run.state.best], Path("cards"))
    assert [path.parent for path in made] == [Path("cards")]
    assert not any(".." in part for part in made[0].parts)


@pytest.mark.parametrize(
    ("value", "cell"),
    [('=HYPERLINK("http://x")', '\'=HYPERLINK("http://x")'), ("plain", "plain"), (True, "true"), (-1.5, -1.5)],
)
def test_text_that_a_spreadsheet_would_run_is_quoted(value, cell):
    assert escape_formula(value) == cell


EXAMPLE = ROOT / "runs" / "example-wl2"
NOW = {"one", "two"}


def read(text: str) -> dict[tuple[str, str, str], float]:
    """(metric, run, state or metric) -> value; the parser raises ValueError for text that is not OpenMetrics."""
    return {
        (sample.name, sample.labels["run"], sample.labels.get("state", sample.labels.get("metric", ""))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def runs(project: Path) -> Path:
    for name in sorted(NOW):
        shutil.copytree(EXAMPLE, project / "runs" / name)
        spec = yaml.safe_load((project / "runs" / name / "search.yaml").read_text())
        (project / "runs" / name / "search.yaml").write_text(yaml.safe_dump({**spec, "run_id": name}))
    return project / "runs"


def test_the_figures_are_those_of_status(runs, cli):
    figures = read(cli.out(["status", "--openmetrics"]))
    best = cli.json(["best", "one", "--json"])
    status = cli.json(["status", "one", "--json"])
    assert {run for _, run, _ in figures} == NOW
    assert figures["ccl_search_trials", "one", "admitted"] == len(status["trials"])
    assert figures["ccl_search_budget_trials", "one", ""] == status["budget"]
    assert figures["ccl_search_spent_trials", "one", ""] == status["spent"]
    assert figures["ccl_search_best", "one", "step_time_s"] == best["step_time_s"]
    assert figures["ccl_search_best_trial", "one", ""] == best["trial"]
    assert figures["ccl_search_running", "one", ""] == 0
    assert {run for _, run, _ in read(cli.out(["status", "two", "--openmetrics"]))} == {"two"}


def test_a_search_that_runs_is_seen_and_a_run_that_cannot_be_read_is_left_out(runs, capsys, cli):
    (runs / "two" / "search.yaml").write_text("{}\n")
    with FolderLock(runs / "one"):
        assert main(["status", "--openmetrics"]) == 0
    shown = capsys.readouterr()
    assert read(shown.out)["ccl_search_running", "one", ""] == 1
    assert "two is left out" in shown.err
    assert "two formats" in cli.err(["status", "--openmetrics", "--json"])


def test_labels_are_one_line_without_secrets(runs, monkeypatch, cli):
    secret = "sk-" + "q7" * 20
    monkeypatch.setenv("MY_API_KEY", secret)
    spec = yaml.safe_load((runs / "one" / "search.yaml").read_text())
    hostile = f'x"}} 1\nccl_search_best{{run="fake"}} 0 {secret} \x1b[31m'
    (runs / "one" / "search.yaml").write_text(yaml.safe_dump({**spec, "workload": hostile}))
    text = cli.out(["status", "one", "--openmetrics"])
    assert secret not in text
    assert "\x1b" not in text
    assert {run for _, run, _ in read(text)} == {"one"}


def test_the_web_page_of_figures_has_runs_of_the_last_day(runs):
    os.utime(runs / "two" / "ledger.jsonl", (0, 0))
    answer = TestClient(make_app(runs, Permissions()), base_url="http://127.0.0.1:8090").get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert {run for _, run, _ in read(answer.text)} == {"one"}
