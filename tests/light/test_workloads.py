"""The shipped cards: they are what docs/workloads.md says, and each training card has a space that fits somewhere."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import yaml
from paths import ROOT

from cclsearch.card.load import load_card
from cclsearch.space.build import build_space
from cclsearch.space.framework import load_framework
from cclsearch.stats.closed_form import predict_space

SPELLED = {"Megatron-LM": "megatron", "torchtitan": "torchtitan", "vLLM": "vllm"}
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "workloads.md").read_text().splitlines()
    if re.match(r"\| `wl\d", line)
]
TRAINING = [f"wl{n}" for n in range(1, 8)]


def read_yaml_card(name: str) -> dict[str, Any]:
    card: dict[str, Any] = yaml.safe_load((ROOT / "workloads" / f"{name}.yaml").read_text())
    return card


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_table_of_workloads_says_what_the_card_has(row):
    name, _, what, work, accelerators, framework, _ = row
    card = read_yaml_card(name.strip("`"))
    data, xpu = card["workload"]["data"], card["workload"]["hardware"]["xpu_spec"]
    assert card["workload"]["model"]["phase"] == what.split(",")[0]
    assert f"{data['batch_size']} x {data['seq_len']}" == work
    assert xpu["total_count"] == int(accelerators)
    assert card["Model-executor"]["framework"]["name"] == SPELLED[framework.split(",")[0]]
    assert "128 tokens out" not in what or data["output_len"] == 128


def test_the_table_has_every_shipped_card_of_the_paper():
    assert {row[0].strip("`") for row in ROWS} == {path.stem for path in (ROOT / "workloads").glob("wl*.yaml")}


@pytest.mark.parametrize("name", TRAINING)
def test_some_configurations_of_every_training_card_fit_into_memory(name):
    card = load_card(name)
    prediction = predict_space(card, build_space(card, load_framework(card.framework)))
    assert np.count_nonzero(prediction.fits_N > 0.5) > 0


@pytest.mark.parametrize("name", ["wl4", "wl6", "wl7"])
def test_the_configuration_that_the_reference_ran_is_in_the_space(name):
    card, plan = load_card(name), read_yaml_card(name)["Model-executor"]["model_plan_parallelization"]
    space = build_space(card, load_framework(card.framework))
    stated = {"tp": plan["tp"], "pp": plan["pp"], "dp": plan["dp_shard"] * plan["dp_replicate"], "ep": plan["ep"]}
    assert space.matching(stated).any()


def test_cards_of_the_paper_say_where_each_value_is_stated():
    for row in ROWS:
        card = read_yaml_card(row[0].strip("`"))
        assert {"model", "data", "framework", "hardware"} <= set(card["sources"])
        assert "not known of the paper" not in str(card["sources"])


@pytest.mark.parametrize("name", ["wl1-inference", "wl2-inference", "wl3-inference"])
def test_cards_of_inference_load_and_are_searched_with_their_framework(name, project, cli):
    assert "inference of" in cli.out(["card", "check", name])
    for command in (["space"], ["predict"], ["run", "--launcher", "simulate", "--budget", "2"]):
        assert "max_num_seqs" in cli.out([*command, "--workload", name])
    [line] = cli.err(["run", "--workload", name, "--framework", "no-engine"]).splitlines()
    assert "no-engine" in line
