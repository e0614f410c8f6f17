"""The `cpu` run script: losses of a layout, results, traces, and failures."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packages import needs
from trials import DENSE, LAUNCHERS, MOE, make_input, make_job, run_script

from cclsearch.card.model import ModelArch
from cclsearch.core.values import Failure, FailureKind, Value
from cclsearch.launch.collect import collect_result
from cclsearch.launch.contract import NONCE_MARK, PHASE_FILE, RunStatus, TrialPhase, trial_environment
from cclsearch.tasks.training.contract import TrainingResult

pytestmark = needs("torch")


STEPS_BEFORE_STOP = 3
"""Timed steps after which the run scripts decide."""

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def test_reports_what_it_did_and_traces_every_rank(tmp_path):
    payload = make_input({"tp": 2, "micro_batch_size": 4}, profiled_steps=2).model_copy(update={"nonce": "a1b2"})
    result = run_script(tmp_path, payload)
    assert result.world_size == 2
    assert len(result.step_times_s) == 3
    assert all(time_s > 0 for time_s in result.step_times_s)
    assert result.timed_window_s is not None
    assert result.timed_window_s <= sum(result.step_times_s) + 0.1, "another clock agrees with the step times"
    assert len(result.peak_memory_bytes) == len(result.devices) == len(result.hosts) == 2
    assert min(result.peak_memory_bytes) > 4 * 10 * result.num_params / 4, "weights, gradients and two moments at least"
    assert result.foreign_cpu_cores is not None
    assert result.versions["torch"]
    assert (tmp_path / PHASE_FILE).read_text() == TrialPhase.PROFILING
    for rank in range(2):
        with gzip.open(tmp_path / "trace" / f"rank{rank}.json.gz") as file:
            trace = json.load(file)
        names = [event.get("name", "") for event in trace["traceEvents"]]
        assert trace["distributedInfo"]["rank"] == rank
        assert sum(name.startswith("ProfilerStep#") for name in names) == 2
        assert "comm::tp::all_reduce" in names
        assert names.count(f"{NONCE_MARK}a1b2") == 2, "every traced step says whose it is"


def test_trains_the_same_under_torchrun(tmp_path):
    payload = make_input({"dp": 2, "micro_batch_size": 4})
    forked = run_script(tmp_path / "forked", payload)
    launched = run_script(tmp_path / "launched", payload, runner=TORCHRUN)
    assert launched.losses == pytest.approx(forked.losses, abs=1e-5)


def run_failing(folder: Path, budget_gib: str = "", **changes: object) -> Failure:
    base = make_input({"dp": 2, "micro_batch_size": 4}, arch=DENSE, seq_len=512)
    payload = base.model_copy(update=changes)
    make_job(folder, payload)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if budget_gib:
        environment["CCL_CPU_MEMORY_GIB"] = budget_gib
    done = subprocess.run(
        [sys.executable, str(LAUNCHERS / "cpu.py")],
        env={**environment, **trial_environment(folder, payload)},
        capture_output=True,
        timeout=240,
    )
    assert done.returncode != 0
    failure = collect_result(folder, TrainingResult, exit_code=done.returncode)
    assert isinstance(failure, Failure)
    return failure


def test_runs_out_of_memory_beyond_the_budget(tmp_path):
    failure = run_failing(tmp_path, budget_gib="0.02")
    assert failure.kind is FailureKind.OUT_OF_MEMORY
    assert "allocate memory" in failure.message
    assert failure.rank in (0, 1)


def test_refuses_a_global_batch_that_is_not_the_cards(tmp_path):
    failure = run_failing(tmp_path, gradient_accumulation=2)
    assert failure.kind is FailureKind.ILLEGAL_CONFIG
    assert "must be the global batch of 8, but is 16" in failure.message


def check_early_end(tmp_path: Path, script: str, limit: float) -> None:
    """Assert that it ends early only if its first steps are above the limit in seconds."""
    pytest.importorskip({"cpu.py": "torch", "jax_cpu.py": "jax", "hf_trainer.py": "accelerate"}[script])
    payload = make_input({"dp": 2, "micro_batch_size": 4}, profiled_steps=1)
    changes = {"timed_steps": 5, "stop_above": limit, "accelerator": "cpu"}
    result = run_script(tmp_path, payload.model_copy(update=changes), script=script)
    is_pruned = limit < 1
    assert result.status is (RunStatus.PRUNED if is_pruned else RunStatus.OK)
    assert len(result.step_times_s) == (STEPS_BEFORE_STOP if is_pruned else 5)
    assert (tmp_path / "trace").exists() != is_pruned, "the profiled steps did not run"
    assert result.timed_window_s is not None
    assert result.timed_window_s <= sum(result.step_times_s) + 0.1


@pytest.mark.parametrize(
    ("script", "limit"), [("cpu.py", 1e-6), ("cpu.py", 1e6), ("jax_cpu.py", 1e-6), ("hf_trainer.py", 1e-6)]
)
def test_ends_early_only_if_its_first_steps_are_above_the_limit(tmp_path, script, limit):
    """`make test-layouts` has the other two cases."""
    check_early_end(tmp_path, script, limit)


LAYOUT: dict[str, Value] = {"tp": 2, "pp": 2, "ep": 2, "micro_batch_size": 2, "rank_order": "pp-tp-dp"}


def check_same_losses(folder: Path, arch: ModelArch, layouts: list[dict[str, Value]]) -> None:
    """Assert that each layout has the losses of one rank; the tests of layouts assert through this."""
    alone = run_script(folder / "alone", make_input({"micro_batch_size": 8}, arch=arch))
    assert len(alone.losses) == 4, "one warm-up and three timed steps"
    assert alone.precision == "fp32"
    assert alone.losses[-1] < alone.losses[0] - 0.05, "the model must learn, or equal losses would prove little"
    for index, layout in enumerate(layouts):
        result = run_script(folder / str(index), make_input(layout, arch=arch))
        assert result.losses == pytest.approx(alone.losses, abs=2e-4), layout
        assert result.num_params == alone.num_params, layout
        assert (result.global_batch_size, result.seq_len) == (8, 32)


def test_losses_agree_between_one_rank_and_tensor_pipeline_and_expert_parallelism(tmp_path):
    """`make test-layouts` trains the other layouts."""
    check_same_losses(tmp_path, MOE, [LAYOUT])
