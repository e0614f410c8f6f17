"""The run script `deepspeed` trains the same work as `cpu`, and refuses what it cannot do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_run_script_options import load_script
from trials import LAUNCHERS, make_input, make_job

from cclsearch.core.values import Failure, FailureKind, Value
from cclsearch.launch.collect import collect_result
from cclsearch.launch.contract import trial_environment
from cclsearch.tasks.training.contract import TrainingInput, TrainingResult

CONFIG: dict[str, Value] = {"dp": 2, "micro_batch_size": 2, "zero_stage": 1, "activation_checkpointing": "none"}


def start(folder: Path, payload: TrainingInput, *python: str) -> TrainingResult | Failure:
    """Run the script, as launchers do, and return its result."""
    job = make_job(folder, payload)
    environment = {**os.environ, **trial_environment(folder, payload), "CCL_DEVICE": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, *python, str(LAUNCHERS / "deepspeed_engine.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    return collect_result(job.trial_dir, TrainingResult, exit_code=done.returncode)


def test_every_knob_is_in_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("deepspeed_engine", monkeypatch)
    payload = make_input({**CONFIG, "zero_stage": 3, "overlap_grad_reduce": True}, global_batch=16)
    config = script.render_config(payload.model_dump(mode="json"))
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
def test_what_it_cannot_do_is_refused(
    change: dict[str, Value], precision: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script("deepspeed_engine", monkeypatch)
    payload = make_input({**CONFIG, **change}, precision=precision)
    with pytest.raises(Exception, match=why):
        script.render_config(payload.model_dump(mode="json"))


def test_without_deepspeed_the_trial_ends_in_one_line_and_costs_no_budget(tmp_path: Path) -> None:
    block = tmp_path / "sitecustomize.py"
    block.write_text("import sys\nsys.modules['deepspeed'] = None\n")
    payload = make_input({**CONFIG, "dp": 1})
    environment = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", environment["PYTHONPATH"])
        failure = start(tmp_path / "trial", payload)
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.LAUNCHER
    assert "deepspeed must be importable by" in failure.message
