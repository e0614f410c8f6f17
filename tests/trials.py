"""Small trials for tests: a model, a trial folder, and a run script executed on it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from cclsearch.card.model import ModelArch, MoEArch
from cclsearch.core.values import Config, Value
from cclsearch.launch.base import Job
from cclsearch.launch.collect import collect_result
from cclsearch.launch.contract import CONFIG_FILE, trial_environment
from cclsearch.tasks.training.contract import TrainingInput, TrainingResult

LAUNCHERS = Path(__file__).parent.parent / "launchers"

DENSE = ModelArch(
    num_layers=4,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    vocab_size=131,
)
MOE = DENSE.model_copy(
    update={
        "num_layers": 2,
        "tied_embeddings": True,
        "moe": MoEArch(num_experts=8, top_k=2, expert_intermediate_size=32, num_shared_experts=1, num_dense_layers=1),
    }
)


def make_input(
    config: Mapping[str, Value],
    *,
    arch: ModelArch = DENSE,
    global_batch: int = 8,
    seq_len: int = 32,
    run_id: str = "run",
    trial: int = 1,
    profiled_steps: int = 0,
    precision: str = "fp32",
) -> TrainingInput:
    """`config.json` of a trial with that configuration."""
    chosen = Config(config)
    dp, micro_batch = chosen.as_int("dp"), chosen.as_int("micro_batch_size")
    ranks = dp * chosen.as_int("tp") * chosen.as_int("pp")
    return TrainingInput(
        run_id=run_id,
        trial=trial,
        config=chosen,
        arch=arch,
        global_batch_size=global_batch,
        seq_len=seq_len,
        precision=precision,
        gradient_accumulation=global_batch // (dp * micro_batch),
        num_ranks=ranks,
        ranks_per_node=ranks,
        warmup_steps=1,
        timed_steps=3,
        profiled_steps=profiled_steps,
    )


def make_job(folder: Path, payload: TrainingInput, *, timeout_s: float = 180.0, attempt: int = 1) -> Job:
    """A job in `folder` with its `config.json` written."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(payload.model_dump_json())
    return Job(
        run_id=payload.run_id,
        trial=payload.trial,
        attempt=attempt,
        trial_dir=folder,
        payload=payload,
        timeout_s=timeout_s,
    )


def run_script(
    folder: Path,
    payload: TrainingInput,
    *,
    script: str = "cpu.py",
    environment: Mapping[str, str] | None = None,
    runner: Sequence[str] = (),
) -> TrainingResult:
    """Run a script of `launchers/` on one trial and return its result; AssertionError with its log if it failed."""
    make_job(folder, payload)
    done = subprocess.run(
        [sys.executable, *runner, str(LAUNCHERS / script)],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            **(environment or {}),
            **trial_environment(folder, payload),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    (folder / "stdout.log").write_text(done.stdout)
    (folder / "stderr.log").write_text(done.stderr)
    result = collect_result(folder, TrainingResult, exit_code=done.returncode)
    assert isinstance(result, TrainingResult), f"{result}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return result


def copy_framework(folder: Path, name: str, *changes: tuple[str, str, str], shipped: str = "cpu") -> None:
    """Copy a shipped framework under that name, with each (script, text, its replacement) in its run scripts.

    The copy does not repeat a trial because other processes use the cores.
    """
    folder.mkdir()
    for script in LAUNCHERS.glob("*.py"):
        shutil.copy(script, folder)
    shutil.copy(LAUNCHERS / f"{shipped}.framework.yaml", folder / f"{name}.framework.yaml")
    timer = {"cpu": "cpu.py", "cpu-serving": "serving_run.py"}[shipped]
    for file, old, new in (*changes, (timer, "foreign_cores(start, end, own_s)", "0.0")):
        text = (folder / file).read_text()
        assert text.count(old) == 1
        (folder / file).write_text(text.replace(old, new))
