"""`ccl-search card`: what loads, what does not, in one line each; and what searches say of inference cards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from cclsearch.cli import main
from tests.test_card_inference import make_card

Output = pytest.CaptureFixture[str]


def write(path: Path, data: object) -> str:
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data), "utf-8")
    return str(path)


def test_check_prints_every_inferred_value_and_its_source(tmp_path: Path, capsys: Output) -> None:
    card = write(tmp_path / "a.yaml", make_card(hf_url="https://huggingface.co/meta-llama/Llama-3.1-8B"))
    assert main(["card", "check", card]) == 0
    out = capsys.readouterr().out
    assert "; source: llama-3.1-8b in the catalogue of models, by hf_url (PyPI litgpt" in out
    for value in ("num_layers 32", "hidden_size 4096", "num_kv_heads 8", "vocab_size 128256", "gated_mlp true"):
        assert value in out


def test_check_of_several_says_one_line_for_each_that_fails(tmp_path: Path, capsys: Output) -> None:
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


def test_show_prints_the_card_as_it_is_read(tmp_path: Path, capsys: Output) -> None:
    card = write(tmp_path / "a.yaml", make_card())
    assert main(["card", "show", card]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["model"]["hidden_size"] == 4096
    assert shown["framework_version"] == "0.1.0"
    assert shown["configuration"]["dp_shard"] == 2
    assert shown["template"]["workload.data.dataset"] == "c4"
    assert main(["card", "show", card, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["inferred"][0]["source"]
    assert main(["card", "show", card, card]) == 2


@pytest.mark.parametrize("command", ["space", "predict", "run"])
def test_an_inference_card_is_refused_as_such_before_any_field_is_asked_for(
    command: str, tmp_path: Path, capsys: Output
) -> None:
    data = make_card("nobody-knows-me")
    data["workload"]["model"]["phase"] = "serving"
    del data["workload"]["hardware"]
    card = write(tmp_path / "a.yaml", data)
    assert main([command, "--workload", card]) == 2
    err = capsys.readouterr().err
    assert "is an inference workload (serving), which cannot be searched yet" in err
    assert "--set" not in err


def test_space_and_predict_name_the_sources_of_inferred_values(tmp_path: Path, capsys: Output) -> None:
    card = write(tmp_path / "a.yaml", make_card())
    for command in ("space", "predict"):
        assert main([command, "--workload", card]) == 0
        assert "; source: llama-3.1-8b in the catalogue" in capsys.readouterr().out
        assert main([command, "--workload", card, "--json"]) == 0
        inferred = json.loads(capsys.readouterr().out)["inferred"]
        assert {each["field"] for each in inferred} >= {"hidden_size", "num_kv_heads", "vocab_size"}


def test_a_card_without_a_framework_asks_for_one(tmp_path: Path, capsys: Output) -> None:
    data = make_card()
    del data["Model-executor"]
    card = write(tmp_path / "a.yaml", data)
    assert main(["card", "check", card]) == 0
    assert main(["space", "--workload", card]) == 2
    assert "the card names no framework: choose one with --framework" in capsys.readouterr().err
    assert main(["space", "--workload", card, "--framework", "torchtitan"]) == 0
