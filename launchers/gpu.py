"""Run script `gpu`: trains the small transformer of `cpu` on GPUs, with torch over NCCL (RCCL on AMD's).

Knobs besides those of `cpu` (tp, dp, micro_batch_size, activation_checkpointing, zero_stage): compile (torch.compile of
each layer), optimizer (foreach or fused AdamW) and attention (the backend of scaled dot-product attention).

CCL_DEVICE=cpu runs it without a GPU, over gloo. CCL_SHARE_GPU=nccl or =gloo lets several ranks use one GPU, with that
backend: for tests of communication on a machine with one GPU.
"""

from __future__ import annotations

import os
import sys
import tempfile
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from common import IllegalConfig, MissingRequirement, Trial, read_trial, reporting_failures
from cpu import Trainer, fork_ranks
from cpu_model import Layout, all_reduce
from step_window import StepWindow, count_steps

ATTENTION = {
    "math": torch.backends.cuda.enable_math_sdp,
    "flash": torch.backends.cuda.enable_flash_sdp,
    "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
    "cudnn": torch.backends.cuda.enable_cudnn_sdp,
}
"""Backend of scaled dot-product attention -> the function that turns it on or off for the process."""
COMPILE_CACHE = os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")


def choose_device(local_rank: int) -> torch.device:
    """Return this rank's device and make it the current one; its backend is `choose_backend`'s."""
    if os.environ.get("CCL_DEVICE") == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise MissingRequirement("torch sees no GPU: install a torch with CUDA or ROCm, or check the driver")
    if local_rank >= count and not os.environ.get("CCL_SHARE_GPU"):
        raise IllegalConfig(f"{local_rank + 1} ranks need as many GPUs, but torch sees {count} on this host")
    torch.cuda.set_device(local_rank % count)
    return torch.device("cuda", local_rank % count)


def choose_backend(device: torch.device, rank: int) -> str:
    """Return the backend of torch.distributed, after setting what ranks that share a GPU need."""
    shared = os.environ.get("CCL_SHARE_GPU")
    if device.type == "cpu" or shared == "gloo":
        return "gloo"
    if shared:  # NCCL refuses two ranks of one host on one GPU, so each rank claims to be a host of its own
        own = {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        os.environ.update({"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", **own})
    return "nccl"


def choose_attention(name: str) -> None:
    """Make scaled dot-product attention use only this backend; `auto` leaves the choice to torch.

    Each backend has a compile cache of its own: the keys of torch's leave the backend out, so that a compiled layer
    would use the backend with which it was compiled first (github.com/pytorch/pytorch, issue 185449).
    """
    if name not in (*ATTENTION, "auto"):
        raise IllegalConfig(f"attention must be auto or one of {', '.join(ATTENTION)}, but it is {name!r}")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = COMPILE_CACHE if name == "auto" else f"{COMPILE_CACHE}-{name}"
    for backend, enable in ATTENTION.items():
        enable(name in (backend, "auto"))


def make_trainer(trial: Trial, layout: Layout, device: torch.device) -> Trainer:
    """Return the trainer of this configuration; the attention backend is set for the whole process."""
    config = trial.config
    choose_attention(str(config.get("attention", "auto")))
    adam = str(config.get("optimizer", "foreach"))
    trainer = Trainer(trial, layout, device, {"foreach": adam == "foreach", "fused": adam == "fused"})
    if config.get("compile", False):
        for layer in trainer.stage.layers:
            layer.compile()
    return trainer


def train(trial: Trial) -> None:
    """Run one rank's whole trial; `StepWindow` measures, profiles and reports."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    with reporting_failures(trial, rank):
        _train(trial, rank, world)


def _train(trial: Trial, rank: int, world: int) -> None:
    if world != trial.data["num_ranks"]:
        raise IllegalConfig(f"the trial needs {trial.data['num_ranks']} ranks, but {world} were started")
    device = choose_device(int(os.environ.get("LOCAL_RANK", "0")))
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if world == 1 else {}
    dist.init_process_group(choose_backend(device, rank), timeout=timedelta(minutes=10), **alone)
    order = f"{trial.config.get('rank_order', 'tp-dp')}-pp"
    layout = Layout(rank, tp=trial.degree("tp"), dp=trial.degree("dp"), pp=1, ep=1, order=order)
    made: list[Trainer] = []
    window = StepWindow(
        trial,
        packages=("triton",),
        read_work=lambda: _read_work(trial, made[0]),
        read_losses=lambda losses: _read_losses(layout, losses),
        count_parameters=lambda: made[0].stage.num_params,
    )
    made.append(make_trainer(trial, layout, device))
    run_step = window.wrap(lambda: _train_step(made[0]))
    for _ in range(count_steps(trial)):
        _run(run_step)
    dist.destroy_process_group()


def _run(run_step: Any) -> None:
    try:
        run_step()
    except RuntimeError as error:
        if "No available kernel" in str(error):
            raise IllegalConfig(f"this attention backend does not support the model here: {error}") from error
        raise


def _train_step(trainer: Trainer) -> Any:
    """Run one step; returns this rank's part of its loss, on the device."""
    trainer.run_step()
    return trainer.losses[-1]


def _read_losses(layout: Layout, losses: list[Any]) -> list[float]:
    """Return the loss of each step over the global batch; every rank calls it."""
    return list(map(float, all_reduce(layout.dp, torch.stack([torch.as_tensor(loss) for loss in losses]))))


def _read_work(trial: Trial, trainer: Trainer) -> dict[str, Any]:
    return {
        "global_batch_size": trainer.layout.dp.size * trainer.accumulation * trainer.micro_batch,
        "seq_len": trial.data["seq_len"],
        "num_layers": len(trainer.stage.layers),
        "precision": "bf16" if trainer.is_bf16 else "fp32",
    }


def main() -> int:
    trial = read_trial()
    if "RANK" not in os.environ and trial.data["num_ranks"] > 1:
        return fork_ranks(trial, train, __file__)
    train(trial)
    return 0


if __name__ == "__main__":
    sys.exit(main())
