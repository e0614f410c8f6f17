"""Each framework that trains on CPUs has the same losses in all layouts: `make test-layouts`.

`make test` trains one layout of each.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from test_run_script_cpu import check_early_end, check_same_losses
from test_run_script_hf import MIXTRAL, check_same_training
from trials import DENSE, LAUNCHERS, MOE, make_input, make_job, run_script

from cclsearch.core.values import Value
from cclsearch.launch.collect import collect_result
from cclsearch.launch.contract import trial_environment
from cclsearch.tasks.training.contract import TrainingResult

DENSE_LAYOUTS: list[dict[str, Value]] = [
    {"dp": 2, "micro_batch_size": 2, "zero_stage": 1, "activation_checkpointing": "full"},
    {"tp": 2, "micro_batch_size": 4, "activation_checkpointing": "selective"},
    {"tp": 2, "pp": 2, "micro_batch_size": 1, "rank_order": "pp-tp-dp"},
]
EXPERTS = {"tp": 2, "dp": 2, "ep": 4, "rank_order": "dp-tp-pp"}
MOE_LAYOUTS: list[dict[str, Value]] = [
    {"pp": 2, "dp": 2, "ep": 2, "micro_batch_size": 1},
    {**EXPERTS, "micro_batch_size": 2, "activation_checkpointing": "full", "zero_stage": 1},
]


def test_dense_losses_agree_between_layouts(tmp_path):
    check_same_losses(tmp_path, DENSE, DENSE_LAYOUTS)


def test_mixture_of_experts_losses_agree_between_layouts(tmp_path):
    check_same_losses(tmp_path, MOE, MOE_LAYOUTS)


def test_the_trainer_of_transformers_trains_a_mixture_of_experts_as_cpu_does(tmp_path):
    check_same_training(tmp_path, MIXTRAL, {"micro_batch_size": 4, "optimizer": "adamw_torch"})


@pytest.mark.parametrize("script", ["jax_cpu.py", "hf_trainer.py"])
def test_no_early_end_if_the_first_steps_are_below_the_limit(tmp_path, script):
    check_early_end(tmp_path, script, limit=1e6)


def run_two_processes(folder: Path) -> TrainingResult:
    payload = make_input({"dp": 2, "ep": 2, "micro_batch_size": 4}, arch=MOE)
    make_job(folder, payload)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {**os.environ, **trial_environment(folder, payload), "CCL_NUM_PROCESSES": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(LAUNCHERS / "jax_cpu.py")],
            env={**environment, "CCL_PROCESS_ID": str(process), "CCL_COORDINATOR": coordinator},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in range(2)
    ]
    said = [process.communicate(timeout=240)[0] for process in processes]
    result = collect_result(folder, TrainingResult)
    assert isinstance(result, TrainingResult), "\n".join([str(result), *said])[-4000:]
    return result


def test_losses_of_jax_agree_between_one_process_and_two(tmp_path):
    alone = run_script(tmp_path / "alone", make_input({"micro_batch_size": 8}, arch=MOE), script="jax_cpu.py")
    joined = run_two_processes(tmp_path / "joined")
    assert joined.losses[:4] == pytest.approx(alone.losses, rel=2e-5), "the bound that jax-cpu declares"
    assert joined.num_params == alone.num_params
    assert len(joined.hosts) == 2
