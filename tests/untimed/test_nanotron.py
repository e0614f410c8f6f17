"""The run scripts `nanotron` and `deepspeed`, up to where they need what is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from test_run_script_options import load_script
from trials import DENSE, LAUNCHERS, make_input, make_job

from cclsearch.core.values import Failure, FailureKind, Value
from cclsearch.launch.collect import collect_result
from cclsearch.launch.contract import trial_environment
from cclsearch.tasks.training.contract import TrainingInput, TrainingResult

CONFIG: dict[str, Value] = {"tp": 2, "dp": 2, "pp": 2, "micro_batch_size": 2, "zero_stage": 1}


def render(monkeypatch: pytest.MonkeyPatch, config: dict[str, Value], **fields: Any) -> tuple[dict[str, Any], str]:
    """The configuration, and its YAML."""
    script = load_script("nanotron", monkeypatch)
    data = make_input(config, precision=fields.pop("precision", "bf16"), **fields).model_dump(mode="json")
    rendered = script.render_config(data)
    return rendered, script.write_yaml(rendered)


def test_the_yaml_reads_back_as_it_is_and_trains_the_cards_batch(monkeypatch):
    rendered, text = render(monkeypatch, CONFIG)
    assert yaml.safe_load(text) == rendered
    tokens, parallelism = rendered["tokens"], rendered["parallelism"]
    batch = tokens["micro_batch_size"] * tokens["batch_accumulation_per_replica"] * parallelism["dp"]
    assert batch == 8, "micro-batch x accumulation x dp is the card's global batch"
    assert rendered["model"]["model_config"]["num_key_value_heads"] == DENSE.num_kv_heads
    assert [stage["data"]["dataset"] for stage in rendered["data_stages"]] == [None]


@pytest.mark.parametrize("value", [1e-8, 1e22, 3e-4, 0.5, 7, True, None, "1f1b", "on", "a: b", "#", "-", "", "ü'\""])
def test_every_scalar_is_read_back_by_yaml_as_it_is(value, monkeypatch):
    script = load_script("nanotron", monkeypatch)
    read = yaml.safe_load(script.write_yaml({"a": [{"b": value, "c": {"d": value}}]}))
    assert read == {"a": [{"b": value, "c": {"d": value}}]}
    assert type(read["a"][0]["b"]) is type(value)


@pytest.mark.parametrize(
    ("config", "precision", "why"),
    [
        ({"activation_checkpointing": "selective"}, "bf16", "activation_checkpointing must be none or full"),
        ({"zero_stage": 2}, "bf16", "zero_stage must be 0 or 1"),
        ({}, "fp32", "precision must be one of bf16"),
    ],
)
def test_what_nanotron_cannot_do_is_refused(config, precision, why, monkeypatch):
    with pytest.raises(Exception, match=why):
        render(monkeypatch, {**CONFIG, **config}, precision=precision)


def test_a_field_that_nanotron_does_not_document_is_refused(monkeypatch):
    script = load_script("nanotron", monkeypatch)
    monkeypatch.setattr(script, "_optimizer", lambda *_: {"turbo": {"boost": 1}})
    data = make_input(CONFIG, precision="bf16").model_dump(mode="json")
    with pytest.raises(ValueError, match=r"nanotron does not document .*: optimizer.turbo, optimizer.turbo.boost"):
        script.render_config(data)


def test_without_nanotron_the_trial_ends_in_one_line_and_costs_no_budget(tmp_path):
    failure = start(tmp_path / "trial", make_input(CONFIG, precision="bf16"), "nanotron.py")
    assert failure.kind is FailureKind.LAUNCHER
    assert "nanotron must be importable by" in failure.message
    assert "No module named 'nanotron" in failure.message


def test_losses_are_those_of_ranks_that_have_them(monkeypatch):
    script = load_script("nanotron", monkeypatch)
    assert script.read_losses([([], 2.5, None), ([], 2.25, None)]) == [2.5, 2.25]
    assert script.read_losses([([], None, None)]) == []


def test_a_tied_parameter_is_counted_by_one_rank(monkeypatch):
    import torch.distributed as dist

    script = load_script("nanotron", monkeypatch)

    class Parameter:
        def __init__(self, size: int, *ranks: int) -> None:
            self.numel, self.is_tied = (lambda: size), bool(ranks)
            self.get_tied_info = lambda: SimpleNamespace(global_ranks=ranks)

    model = SimpleNamespace(parameters=lambda: [Parameter(100), Parameter(10, 2, 3), Parameter(1, 1, 3)])
    context = SimpleNamespace(dp_pg="dp")
    trainer = SimpleNamespace(parallel_context=context, unwrapped_model=model)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0 if group == "dp" else 2)
    assert script.count_parameters(trainer) == 110, "rank 1 counts the last one"
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 1)
    assert script.count_parameters(trainer) == 0, "the first data-parallel rank counts"


DEEPSPEED: dict[str, Value] = {"dp": 2, "micro_batch_size": 2, "zero_stage": 1, "activation_checkpointing": "none"}


def start(folder: Path, payload: TrainingInput, script: str = "deepspeed_engine.py") -> TrainingResult | Failure:
    """Run the script, as launchers do, and return its result."""
    job = make_job(folder, payload)
    environment = {**os.environ, **trial_environment(folder, payload), "CCL_DEVICE": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(LAUNCHERS / script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    return collect_result(job.trial_dir, TrainingResult, exit_code=done.returncode)


def test_every_knob_is_in_the_configuration(monkeypatch):
    script = load_script("deepspeed_engine", monkeypatch)
    payload = make_input({**DEEPSPEED, "zero_stage": 3}, global_batch=16)
    lever = {"options": ["zero_optimization.overlap_comm=true"]}  # of `overlap_grad_reduce`, by the framework's file
    config = script.render_config({**payload.model_dump(mode="json"), **lever})
    assert config["zero_optimization"] == {"stage": 3, "overlap_comm": True}
    assert config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * 2 == 16
    assert config["train_batch_size"] == 16
    assert config["gradient_clipping"] == 0.0, "as in `cpu`; DeepSpeed's default would clip"


@pytest.mark.parametrize(
    ("change", "precision", "why"),
    [
        ({"zero_stage": 4}, "fp32", "zero_stage must be 0, 1, 2 or 3"),
        ({"tp": 2}, "fp32", "dp must be the number of ranks, 4"),
        ({}, "fp16", "precision must be one of fp32, bf16"),
    ],
)
def test_what_it_cannot_do_is_refused(change, precision, why, monkeypatch):
    script = load_script("deepspeed_engine", monkeypatch)
    payload = make_input({**DEEPSPEED, **change}, precision=precision)
    with pytest.raises(Exception, match=why):
        script.render_config(payload.model_dump(mode="json"))


def test_without_deepspeed_the_trial_ends_in_one_line_and_costs_no_budget(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['deepspeed'] = None\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    failure = start(tmp_path / "trial", make_input({**DEEPSPEED, "dp": 1}))
    assert failure.kind is FailureKind.LAUNCHER
    assert "deepspeed must be importable by" in failure.message
