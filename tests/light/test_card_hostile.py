"""Odd cards: each loads with notes, or is one line that names what is wrong; none is a traceback or a guess."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from cards import ABSENT, change_fields, make_card

from cclsearch.card.load import inspect_card, load_card, require_card
from cclsearch.cli import main
from cclsearch.core.errors import UserError

MODEL, DATA = "workload.model.", "workload.data."
XPU, TOPO = "workload.hardware.xpu_spec.", "workload.hardware.network_topo."
PLAN = "Model-executor.model_plan_parallelization"

LOADS: list[tuple[dict[str, Any], str]] = [
    ({TOPO + "bandwidth_gbps": [200]}, "must be [scale-out, scale-up]"),
    ({TOPO + "bandwidth_gbps": {"a": 1}}, "must be [scale-out, scale-up]"),
    ({TOPO + "bandwidth_gbps": ["N/A", float("nan")]}, "for scale_up_gbps: not used"),
    ({TOPO + "bandwidth_gbps": [-1, 10**40]}, "for scale_out_gbps: not used"),
    ({"workload.hardware.network_topo": ["x"]}, ""),
    ({MODEL + "model_arch": ["num_layers", 32]}, "source: llama-3.1-8b"),
    ({MODEL + "model_arch": "8B"}, "source: llama-3.1-8b"),
    ({MODEL + "model_arch": {"num_layers": "N/A", "num_heads": "", "head_dim": "TBD"}}, "source: llama-3.1-8b"),
    ({MODEL + "model_arch": {"num_layers": "32", "num_heads": 32.0}}, "source: llama-3.1-8b"),
    ({MODEL + "model_arch": {"num_params": "8.03B"}}, "source: llama-3.1-8b"),
    ({MODEL + "model_arch": {"num_params": 7.0e10}}, "is 70000000000, and 8030261248 in llama-3.1-8b"),
    ({MODEL + "model_family": "  LLAMA_3.1_8B  "}, "source: llama-3.1-8b"),
    ({MODEL + "model_family": "ｌlama", "hf_url": "https://huggingface.co/meta-llama/Llama-3.1-8B"}, "by hf_url"),
    ({MODEL + "model_family": "модель", "hf_url": "HTTPS://HUGGINGFACE.CO/Qwen/Qwen3-4B?x=1#y"}, "qwen3-4b"),
    ({"hf_url": ["https://huggingface.co/Qwen/Qwen3-4B"]}, "source: llama-3.1-8b"),
    ({"hf_url": "x" * 100_000}, "source: llama-3.1-8b"),
    ({"hf_url": "https://huggingface.co/../../etc/passwd"}, "source: llama-3.1-8b"),
    ({MODEL + "phase": None}, "inferred: phase training"),
    ({MODEL + "phase": " Training "}, ""),
    ({"Model-executor": ABSENT}, ""),
    ({"Model-executor": ["torchtitan"]}, ""),
    ({"Model-executor.framework.name": "TorchTitan_v0.2.1rc3"}, ""),
    ({PLAN: [1, 2]}, ""),
    ({PLAN: {"tp": "four", "pp": -1, "cp": 1.5, "dp_shard": 10**30, "ep": None}}, ""),
    ({XPU + "count_per_node": 16}, "count_per_node is 16, but total_count is 8"),
    ({XPU + "total_count": 1, XPU + "count_per_node": None}, "count_per_node 1; source: total_count 1"),
    ({XPU + "memory_gb": "n/a"}, "memory_gb 80"),
    ({DATA + "batch_size": "1e3"}, ""),
    ({MODEL + "epochs": float("inf"), MODEL + "iteration": {"a": [[[1]]]}}, ""),
    ({"version": "one", "runs": [{"score": float("inf")}], "knobs": None}, ""),
    ({"contributor": "\x1b[31mred\x1b[0m\u202e", "contact": None}, ""),
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"workload": ABSENT}, "is not a workload card"),
    ({"workload": ["model"]}, "is not a workload card"),
    ({"workload.model": ["llama"]}, "workload.model has no"),
    ({"workload.hardware": None}, "workload.hardware.xpu_spec has no model, total_count, count_per_node"),
    ({"workload.data": "c4"}, "workload.data has no batch_size, seq_len"),
    ({MODEL + "model_family": "nobody-knows-me"}, "model_arch has no num_layers"),
    ({MODEL + "model_family": 3.1}, "model_arch has no num_layers"),
    ({MODEL + "model_arch": {"num_layers": {"a": 1}}}, "num_layers must be a whole number above 0"),
    ({MODEL + "model_arch": {"hidden_size": 10**30}}, "hidden_size must be a whole number above 0 and at most"),
    ({MODEL + "precision": ["bf16", {"a": 1}]}, "precision must be a dtype"),
    ({MODEL + "phase": ["training"]}, "phase must be training or inference"),
    ({XPU + "model": "abacus", XPU + "memory_gb": 40}, "is not a known accelerator"),
    ({XPU + "count_per_node": None}, "count_per_node is missing"),
    ({DATA + "seq_len": True}, "seq_len must be a whole number above 0"),
    ({"workload.task": "cooking"}, "workload.task must be one of"),
]


def write(folder: Path, data: object) -> str:
    path = folder / "odd.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data, allow_unicode=True), "utf-8")
    return str(path)


@pytest.mark.parametrize(("changes", "remark"), LOADS, ids=range(len(LOADS)))
def test_an_odd_card_loads_and_says_what_was_done(changes, remark, tmp_path):
    card = require_card(inspect_card(write(tmp_path, change_fields(make_card(), changes))))
    assert any(remark in each for each in card.remarks), card.remarks
    assert all("\n" not in each and len(each) < 1000 for each in card.remarks)
    assert type(card).model_validate_json(card.model_dump_json()) == card
    assert len(card.template) <= 200


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=range(len(REFUSED)))
def test_a_wrong_card_is_one_line(changes, message, tmp_path):
    with pytest.raises(UserError) as caught:
        load_card(write(tmp_path, change_fields(make_card(), changes)))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1200


def test_aliases_are_copied_and_cycles_are_refused(tmp_path, capsys):
    text = yaml.safe_dump(make_card())
    shared = "anchor: &xpu {model: h100, memory_gb: 80, total_count: 8, count_per_node: 8}\n"
    parsed = yaml.safe_load(text)
    parsed["workload"]["hardware"]["xpu_spec"] = None
    aliased = shared + yaml.safe_dump(parsed).replace("xpu_spec: null", "xpu_spec: *xpu")
    assert main(["card", "check", write(tmp_path, aliased)]) == 0
    for bad in ("workload: &w {model: *w}\n", "workload: &w [*w]\n", text + "workload: {}\n", "workload: {model: {"):
        capsys.readouterr()
        assert main(["card", "check", write(tmp_path, bad)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
