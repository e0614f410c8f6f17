"""`ccl-search card`: what loads, what does not, in one line each; and what searches say of inference cards."""

from __future__ import annotations

from pathlib import Path

import yaml
from cards import make_card

from cclsearch.cli import main
from tests.trace_writer import gpu_events, kineto_document, write_kineto


def write(path: Path, data: object) -> str:
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data), "utf-8")
    return str(path)


def write_trace(folder: Path) -> Path:
    """A trace with the markers of vLLM: one prefill and three decode steps."""
    events = gpu_events(steps=4)
    for event in events:
        if event["name"].startswith("ProfilerStep#"):
            is_first = event["name"] == "ProfilerStep#5"
            event["name"] = f"execute_context_{'1(512)_generation_0(0)' if is_first else '0(0)_generation_4(4)'}"
    return write_kineto(folder / "trace" / "rank0.json", kineto_document(events))


def test_check_prints_every_inferred_value_and_its_source(tmp_path, cli):
    card = write(tmp_path / "a.yaml", make_card(hf_url="https://huggingface.co/meta-llama/Llama-3.1-8B"))
    out = cli.out(["card", "check", card])
    assert "; source: llama-3.1-8b in the catalogue of models, by hf_url (PyPI litgpt" in out
    for value in ("num_layers 32", "hidden_size 4096", "num_kv_heads 8", "vocab_size 128256", "gated_mlp true"):
        assert value in out


def test_check_of_several_says_one_line_for_each_that_fails(tmp_path, capsys):
    good = write(tmp_path / "good.yaml", make_card())
    bad = write(tmp_path / "bad.yaml", make_card("nobody-knows-me"))
    other = write(tmp_path / "tuning.yaml", "config_space: []\n")
    assert main(["card", "check", bad, good, other, str(tmp_path / "none.yaml")]) == 2
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert len(lines) == 3
    assert "workload.model.model_arch has no num_layers" in lines[0]
    assert "is not a workload card" in lines[1]
    assert "none.yaml" in lines[2]
    assert captured.out.endswith("1 of 4 cards load\n")


def test_show_prints_the_card_as_it_is_read(tmp_path, cli):
    card = write(tmp_path / "a.yaml", make_card())
    shown = yaml.safe_load(cli.out(["card", "show", card]))
    assert shown["model"]["hidden_size"] == 4096
    assert shown["framework_version"] == "0.1.0"
    assert shown["configuration"]["dp_shard"] == 2
    assert shown["template"]["workload.data.dataset"] == "c4"
    assert cli.json(["card", "show", card, "--json"])["inferred"][0]["source"]
    assert main(["card", "show", card, card]) == 2


def test_space_and_predict_name_the_sources_of_inferred_values(tmp_path, cli):
    card = write(tmp_path / "a.yaml", make_card())
    for command in ("space", "predict"):
        assert "; source: llama-3.1-8b in the catalogue" in cli.out([command, "--workload", card])
        inferred = cli.json([command, "--workload", card, "--json"])["inferred"]
        assert {each["field"] for each in inferred} >= {"hidden_size", "num_kv_heads", "vocab_size"}


def test_space_says_whether_the_plan_in_the_card_is_in_it(tmp_path, cli):
    data = make_card()
    shown = cli.out(["space", "--workload", write(tmp_path / "a.yaml", data)])
    [line] = [line for line in shown.splitlines() if line.startswith("the plan in the card's file")]
    assert "tp=4" in line
    assert int(line.split(": ")[-1].split()[0]) > 0
    data["Model-executor"]["model_plan_parallelization"] |= {"tp": 3}
    shown = cli.out(["space", "--workload", write(tmp_path / "b.yaml", data)])
    assert ": 0 configurations of the search space" in shown


def test_a_run_freezes_what_was_inferred(tmp_path, capsys):
    card = write(tmp_path / "a.yaml", make_card())
    runs = tmp_path / "runs"
    arguments = ["--launcher", "simulate", "--budget", "1", "--name", "frozen", "--runs", str(runs), "--quiet"]
    assert main(["run", "--workload", card, *arguments]) == 0
    frozen = yaml.safe_load((runs / "frozen" / "search.yaml").read_text("utf-8"))["card"]
    assert {each["field"]: each["value"] for each in frozen["inferred"]}["hidden_size"] == 4096
    assert frozen["template"]["Model-executor.communication_library.name"] == "NCCL"
    assert frozen["configuration"]["tp"] == 4


def test_a_trace_is_scored_with_an_inference_card_that_states_no_shape(tmp_path, cli):
    data = make_card("mixtral", hf_url="https://huggingface.co/mistralai/Mixtral-8x7B-v0.1/tree/main")
    data["workload"]["model"] |= {"phase": "inference", "moe": True}
    data["workload"]["data"] = {"max-model-len": 4096, "max-num-seqs": 16}
    data["workload"]["hardware"]["network_topo"]["bandwidth_gbps"] = ["TBD", "TBD"]
    data["Model-executor"]["framework"]["name"] = "vllm"
    trace = write_trace(tmp_path)
    arguments = ["score", str(trace), "--metric", "ttft", "--metric", "tpot", "--json"]
    with_card = cli.json([*arguments, "--card", write(tmp_path / "a.yaml", data)])
    assert with_card == cli.json(arguments)
    assert with_card["ttft"]["value"] > 0
    assert with_card["tpot"]["value"] > 0
    assert main(["what-if", str(trace), "--card", str(tmp_path / "a.yaml"), "--scale-up-bw", "2x"]) == 0
