"""Rows of a recording that differ in their load only are loads of one trial, in replay, bench and predictions alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from cclsearch.cli import main
from cclsearch.core.content import list_recordings
from cclsearch.core.errors import UserError
from cclsearch.loop.bench import list_problems, run_bench
from cclsearch.plan.target import find_recording
from cclsearch.recording.load import load_recording
from cclsearch.scoring.objective import choose_objective
from cclsearch.tasks.base import task_of

CARD = {
    "version": 1,
    "source": "made for this test",
    "licence": "Apache-2.0",
    "workload": {
        "model": {
            "phase": "inference",
            "model_family": "m",
            "model_arch": {
                "num_layers": 16, "num_heads": 16, "num_kv_heads": 4, "head_dim": 64, "hidden_size": 1024,
                "intermediate_size": 4096, "vocab_size": 32000, "tied_embeddings": False,
            },
        },
        "data": {"input_len": 256, "output_len": 128},
        "hardware": {
            "network_topo": {"bandwidth_gbps": [400, 3600]},
            "xpu_spec": {"type": "GPU", "model": "nvidia_h100", "memory_gb": 80, "total_count": 8, "count_per_node": 8},
        },
    },
    "Model-executor": {"framework": {"name": "some-engine"}},
}  # fmt: skip
HEAD = "backend,precision,tp,ep,concurrency,status,num_gpus,ttft_s,tpot_s,output_tok_s_per_gpu_est\n"
ROWS = """\
a,fp8,1,1,4,ok,1,0.1,0.008,400
a,fp8,1,1,16,ok,1,0.2,0.018,800
a,fp8,2,1,4,ok,2,0.1,0.005,300
a,fp8,2,1,16,ok,2,0.2,0.009,700
b,fp8,4,1,16,ok,4,0.2,0.007,500
b,fp8,4,1,4,ok,4,0.1,0.004,200
b,fp4,1,8,4,ok,8,0.1,0.009,100
"""


def write(folder: Path, rows: str = ROWS, head: str = HEAD, **data: object) -> Path:
    folder.mkdir(parents=True)
    card = {**CARD, "workload": {**CARD["workload"], "data": {**CARD["workload"]["data"], **data}}}  # type: ignore[index, dict-item, call-overload]
    (folder / "card.yaml").write_text(yaml.safe_dump(card))
    (folder / "landscape.csv").write_text(head + rows)
    return folder


def test_rows_of_one_configuration_are_the_loads_of_one_trial(tmp_path):
    recording = load_recording(write(tmp_path / "r"))
    assert recording.card.task == "serving", "a table of concurrencies is no batch, though its card says inference only"
    assert recording.card.work["max_concurrency"] == 16
    assert recording.card.precisions == ("fp8", "fp4")
    assert [len(row.loads) for row in recording.rows] == [2, 2, 2, 1]
    assert [load["concurrency"] for load in recording.rows[2].loads] == [4, 16], "the least first"
    assert recording.rows[0].metrics["tpot_mean_s"] == 0.018
    assert recording.best_value == 800
    assert "concurrency" not in [knob.name for knob in recording.space.knobs]
    assert list(recording.space.num_accelerators_N) == [1, 2, 4, 8], "eight replicas share the experts of the last row"
    assert dict(recording.rows[3].config)["dp"] == 8


@pytest.mark.parametrize(("limit", "best"), [("0.02", "800"), ("0.01", "700"), ("0.0075", "500")])
def test_a_replay_answers_with_the_best_load_that_keeps_the_limit(limit, best, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = str(write(tmp_path / "r"))
    assert main(["run", "--recording", folder, "--budget", "4", "--constraint", f"tpot_mean_s <= {limit}"]) == 0
    assert f"per accelerator {best} tokens/s (recorded)" in capsys.readouterr().out


def test_a_percentile_that_a_recording_lacks_is_refused_in_one_line(tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    folder = str(write(tmp_path / "r"))
    for more in (["--constraint", "tpot_p99_s <= 0.02"], ["--objective", "ttft_p90_s"]):
        error = cli.err(["run", "--recording", folder, *more]).strip()
        assert error.count("\n") == 0
        assert "has no" in error
        assert not (tmp_path / "runs").exists()


def test_a_recording_is_searched_by_its_own_name(tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "workloads" / "recordings" / "my-server")
    assert "made for this test (Apache-2.0)" in cli.out(["run", "--workload", "my-server", "--budget", "4"])
    assert main(["space", "list", "--workload", "my-server"]) == 0


def test_a_rate_of_requests_follows_from_tokens_so_that_the_fewest_accelerators_for_it_are_found(
    tmp_path, monkeypatch, capsys
):
    folder = write(tmp_path / "r")
    assert load_recording(folder).rows[1].metrics["requests_per_s"] == pytest.approx(700 * 2 / 128)
    monkeypatch.chdir(tmp_path)
    command = ["run", "--recording", str(folder), "--objective", "fewest_accelerators:rate=10", "--json"]
    assert main([*command, "--budget", "4", "--name", "few"]) == 0
    best = json.loads(capsys.readouterr().out.splitlines()[-1])["best"]
    assert (best["config"]["tp"], best["num_accelerators"]) == (2, 2), "one accelerator answers 6.25 requests/s"


def test_the_time_of_a_batch_gives_its_throughput(tmp_path):
    head, rows = "engine,num_devices,batch_size,status,latency_s\n", "a,1,1,ok,2\na,1,8,ok,4\nb,2,8,ok,3.2\n"
    recording = load_recording(write(tmp_path / "r", rows, head))
    assert recording.card.task == "inference"
    assert [row.metrics[recording.primary.name] for row in recording.rows] == pytest.approx([256, 160])
    assert list(recording.space.num_accelerators_N) == [1, 2]


def test_degrees_of_attention_inside_tensor_parallelism_are_no_further_accelerators(tmp_path):
    head = "tp,dp,dp_attention,status,output_tok_s\n"
    recording = load_recording(write(tmp_path / "r", "8,1,false,ok,800\n8,8,true,ok,1600\n", head, concurrency=8))
    assert [row.metrics[recording.primary.name] for row in recording.rows] == [100, 200]


@pytest.mark.parametrize("cell", ["0", "-4", "many", "nan"])
def test_a_load_that_is_no_number_is_named(cell, tmp_path, capsys):
    folder = write(tmp_path / "r", ROWS + f"b,fp8,8,1,{cell},ok,8,0.1,0.01,10\n")
    assert main(["recording", "check", str(folder)]) == 2
    captured = capsys.readouterr()
    assert f"row 9: concurrency must be a number above 0; it is {cell!r}" in captured.out + captured.err


def test_bench_searches_a_cell_for_each_limit_that_is_a_problem(tmp_path):
    recording = load_recording(write(tmp_path / "r"))
    labels = [problem.label for problem in list_problems([recording], ["r"])]
    assert labels == [f"r tpot_mean_s <= {limit}" for limit in ("0.008", "0.01", "0.015", "0.02", "0.03", "0.05")]
    tight = load_recording(write(tmp_path / "t", ROWS.replace("0.00", "0.9")))
    kept = ["tpot_mean_s <= 0.02", "tpot_mean_s <= 0.03", "tpot_mean_s <= 0.05"]
    assert [problem.limit for problem in list_problems([tight], ["t"])] == kept
    figures = run_bench(tmp_path / "r", samplers=["random"], seeds=2, budget=4, workers=1)["samplers"]["random"]
    assert figures["num_cells"] == 12
    assert figures["regret"]["4"] == 0
    assert 0 < figures["regret"]["1"] <= 1
    assert figures["regret_of_many"] is None, "it has four configurations"


def test_a_data_set_in_place_of_lengths_is_answered_by_a_recording_only(tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    lengths = {"input_len": None, "output_len": None}
    head = "tp,status,output_tok_s\n"
    folder = write(tmp_path / "r", "8,ok,800\n4,ok,500\n", head, dataset="ShareGPT, all at once", **lengths)
    assert "2 configurations of ShareGPT, all at once" in cli.out(["run", "--recording", str(folder), "--budget", "2"])
    card = load_recording(folder).card
    objective = choose_objective("output_tokens_per_s", (), task="serving")
    assert task_of(card).freeze(card, objective).work["dataset"] == "ShareGPT, all at once"
    with pytest.raises(UserError, match="has no input_len, output_len: give --set input_len=N"):
        task_of(card).freeze(card.model_copy(update={"recording": None}), objective)


def test_every_shipped_table_of_a_server_loads_with_its_source():
    names = [name for name in list_recordings() if name.startswith(("srv-", "gpustack-"))]
    assert len(names) == 36
    for name in names:
        recording = load_recording(find_recording(name))
        assert (recording.card.task, recording.card.licence) == ("serving", "Apache-2.0")
        assert recording.card.source
