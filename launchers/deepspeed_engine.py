"""Run script `deepspeed`: trains the small transformer of `cpu`, with its weights and data, under DeepSpeed's engine.

ZeRO stages 0 to 3 are DeepSpeed's own; ranks are data-parallel. It was tried on CPUs, over gloo; on no GPU yet.

Knobs: dp, micro_batch_size, activation_checkpointing (none, selective, full), zero_stage, overlap_grad_reduce
(`overlap_comm` of stages 1 to 3).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import IllegalConfig, MissingRequirement, Trial, find_packages_first, learning_rate, limit_memory, run_rank
from options import apply_options
from step_window import StepWindow, count_steps

PRECISIONS = ("fp32", "bf16")


def render_config(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's configuration for one `config.json`. A pure function."""
    config = data["config"]
    trial = Trial(Path(), data, config)
    stage = int(config.get("zero_stage", 0))
    trial.require_data_parallel()
    if stage not in range(4):
        raise IllegalConfig(f"zero_stage must be 0, 1, 2 or 3, but it is {stage}")
    if data["precision"] not in PRECISIONS:
        raise IllegalConfig(f"precision must be one of {', '.join(PRECISIONS)}, not {data['precision']!r}")
    rendered = {
        "train_batch_size": data["global_batch_size"],
        "train_micro_batch_size_per_gpu": trial.micro_batch_size,
        "gradient_accumulation_steps": int(data["gradient_accumulation"]),
        "zero_optimization": {"stage": stage},
        # the optimizer is torch's AdamW, as in `cpu`, on every device
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "torch_autocast": {"enabled": data["precision"] == "bf16", "dtype": "bfloat16"},
        "gradient_clipping": 0.0,  # DeepSpeed 0.19 clips to a norm of 1 unless it is given
        "steps_per_print": 1_000_000,
    }
    return apply_options(rendered, data.get("options", ()))


def train(trial: Trial) -> None:
    """Run this rank's whole trial; `StepWindow` measures, profiles and reports."""
    world, config = int(os.environ.get("WORLD_SIZE", "1")), render_config(trial.data)
    if world != trial.data["num_ranks"]:
        raise IllegalConfig(f"the trial needs {trial.data['num_ranks']} ranks, but {world} were started")
    find_packages_first()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    on_gpu = torch.cuda.is_available() and os.environ.get("CCL_DEVICE") != "cpu"
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if on_gpu else "cpu")
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        raise MissingRequirement(
            f"deepspeed must be importable by {sys.executable}, but it has no module {error.name!r}: pip install"
            " --no-build-isolation deepspeed there, or set the profile's `python`, `modules` or `container`"
        ) from None
    if not on_gpu:
        # Only inference needs this C++ op. Built at first start, it leaves a lock when the trial is killed meanwhile,
        # and every later trial would wait for that lock.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if on_gpu else "gloo", verbose=False)
    if not on_gpu:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        limit_memory()
    trainer = Engine(trial, deepspeed, config, torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else None)
    window = StepWindow(
        trial,
        packages=("deepspeed",),
        read_work=trainer.read_work,
        read_losses=trainer.average,
        count_parameters=lambda: trainer.num_params if trainer.rank == 0 else 0,
    )
    run_step = window.wrap(trainer.run_step)
    for step in range(count_steps(trial)):
        run_step(step)
    torch.distributed.destroy_process_group()


class Engine:
    """DeepSpeed's engine around the model of `cpu`; `run_step` is one optimizer step over the global batch."""

    def __init__(self, trial: Trial, deepspeed: Any, config: Mapping[str, Any], device: Any) -> None:
        import torch
        import torch.distributed as dist
        from cpu_model import Layout, Stage

        data = trial.data
        self.data, self.device, self.rank = data, device or torch.device("cpu"), dist.get_rank()
        self.micro_batch, self.share = trial.micro_batch_size, data["global_batch_size"] // dist.get_world_size()
        model = Stage(
            data["arch"],
            Layout(0, tp=1, dp=1, pp=1, ep=1),  # DeepSpeed itself spreads the work over the ranks
            seq_len=data["seq_len"],
            seed=data["seed"],
            checkpointing=str(trial.config.get("activation_checkpointing", "none")),
        )
        self.num_params, self.layers, self.trained = model.num_params, len(model.layers), 0
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate(data["arch"]), eps=1e-6, foreach=False)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=dict(config))

    def run_step(self, step: int) -> Any:
        """Return this rank's mean loss of the step, on the device."""
        import torch
        from cpu import draw_sequences

        first = self.rank * self.share
        tokens = draw_sequences(self.data, step)[first : first + self.share].to(self.device)
        losses, self.trained = [], 0
        for rows in tokens.split(self.micro_batch):
            loss = self.engine(rows[:, :-1], rows[:, 1:])
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach())
            self.trained += len(rows)
        return torch.stack(losses).double().mean()

    def average(self, losses: list[Any]) -> list[float]:
        """Return each step's loss over the global batch; every rank calls it."""
        import torch
        import torch.distributed as dist

        mine = torch.stack(losses)
        dist.all_reduce(mine)
        return list(map(float, mine / dist.get_world_size()))

    def read_work(self) -> dict[str, Any]:
        """Return what was trained."""
        import torch.distributed as dist

        return {
            "global_batch_size": self.trained * dist.get_world_size(),
            "seq_len": self.data["seq_len"],
            "num_layers": self.layers,
            "precision": "bf16" if self.engine.torch_autocast_enabled() else "fp32",
        }


if __name__ == "__main__":
    sys.exit(run_rank(train))
