"""Run script `hf-trainer`: trains the card's model with transformers' `Trainer` under Accelerate.

On GPUs it shards with FSDP2 (zero_stage 2 and 3) or replicates with DDP (0); on CPUs, which CCL_DEVICE=cpu chooses on a
machine with GPUs, Accelerate knows DDP only, over gloo.

Knobs: dp, micro_batch_size, activation_checkpointing (none, full), compile, optimizer (Trainer's `optim`), zero_stage.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import IllegalConfig, MissingRequirement, Trial, limit_memory, read_trial, reporting_failures
from step_window import StepWindow, count_steps

STAGES = {0: None, 2: False, 3: True}
"""ZeRO stage -> FSDP2's `reshard_after_forward`; None for no FSDP."""
PRECISIONS = ("fp32", "bf16")


def render_arguments(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `TrainingArguments` for one `config.json`, without those of a machine. A pure function."""
    config = data["config"]
    trial = Trial(Path(), data, config)
    dp, stage, checkpointing = trial.degree("dp"), int(config.get("zero_stage", 0)), _checkpointing(config)
    trained = dp * trial.micro_batch_size * int(data["gradient_accumulation"])
    if trained != data["global_batch_size"]:
        raise IllegalConfig(
            f"dp {dp} x micro-batch {trial.micro_batch_size} x accumulation {data['gradient_accumulation']} must be the"
            f" global batch of {data['global_batch_size']}, but is {trained}"
        )
    if dp != data["num_ranks"]:
        raise IllegalConfig(f"dp must be the number of ranks, {data['num_ranks']}, but it is {dp}")
    if data["precision"] not in PRECISIONS:
        raise IllegalConfig(f"precision must be one of {', '.join(PRECISIONS)}, not {data['precision']!r}")
    if stage not in STAGES:
        raise IllegalConfig(f"zero_stage must be one of {', '.join(map(str, STAGES))}, but it is {stage}")
    return {
        "per_device_train_batch_size": trial.micro_batch_size,
        "gradient_accumulation_steps": int(data["gradient_accumulation"]),
        "max_steps": count_steps(trial),
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "optim": str(config.get("optimizer", "adamw_torch_fused")),
        "weight_decay": 0.01,
        "adam_epsilon": 1e-6,
        "max_grad_norm": 0.0,
        "bf16": data["precision"] == "bf16",
        "activation_checkpointing": checkpointing == "full" and stage == 0,
        "torch_compile": bool(config.get("compile", False)),
        "seed": int(data["seed"]),
        "train_sampling_strategy": "sequential",
        "logging_strategy": "no",
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        **({} if stage else {"ddp_find_unused_parameters": False}),
        **({"fsdp": True, "fsdp_config": _fsdp(data, stage, checkpointing)} if stage else {}),
    }


def _checkpointing(config: Mapping[str, Any]) -> str:
    mode = str(config.get("activation_checkpointing", "none"))
    if mode not in ("none", "full"):
        raise IllegalConfig(f"activation_checkpointing must be none or full, but it is {mode!r}")
    return mode


def _fsdp(data: Mapping[str, Any], stage: int, checkpointing: str) -> dict[str, Any]:
    """Return `fsdp_config`; FSDP checkpoints activations itself, since Trainer's way would gather the weights twice."""
    layer = "MixtralDecoderLayer" if data["arch"].get("moe") else "LlamaDecoderLayer"
    return {
        "version": 2,
        "reshard_after_forward": STAGES[stage],
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": [layer],
        "activation_checkpointing": checkpointing == "full",
    }


def train(trial: Trial) -> None:
    """Run one rank's whole trial; `StepWindow` measures, profiles and reports."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    with reporting_failures(trial, rank):
        if world != trial.data["num_ranks"]:
            raise IllegalConfig(f"the trial needs {trial.data['num_ranks']} ranks, but {world} were started")
        _train(trial, world)


def _train(trial: Trial, world: int) -> None:
    fields = render_arguments(trial.data)
    _prepare_environment(world)
    import torch
    import torch.distributed as dist

    try:
        from hf_trainer_loop import StepTrainer, TrialCallback, make_arguments
    except ModuleNotFoundError as error:
        raise MissingRequirement(
            f"transformers 5.23 or newer and accelerate must be importable by {sys.executable}, but it has no module"
            f" {error.name!r}: pip install 'ccl-search[hf]' there, or set the profile's `python`, `modules` or"
            " `container`"
        ) from None
    from cpu import warm_libraries
    from hf_model import Sequences, make_model

    on_gpu = torch.cuda.is_available() and os.environ.get("CCL_DEVICE") != "cpu"
    if "fsdp" in fields and not on_gpu:
        raise IllegalConfig("zero_stage must be 0 on CPUs: Accelerate uses FSDP on accelerators only")
    if world == 1:
        dist.init_process_group("nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    arguments = make_arguments({**fields, "use_cpu": not on_gpu, "output_dir": str(trial.folder / "hf-trainer")})
    if not on_gpu:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        warm_libraries()
        limit_memory()
    made: list[StepTrainer] = []
    window = StepWindow(
        trial,
        packages=("transformers", "accelerate"),
        read_work=lambda: made[0].read_work(),
        read_losses=lambda losses: made[0].average(losses),
        count_parameters=lambda: made[0].count_parameters(),
    )
    callback = TrialCallback(window)
    sequences = Sequences(trial.data, count_steps(trial))
    made.append(StepTrainer(make_model(trial.data), arguments, train_dataset=sequences, callbacks=[callback]))
    callback.trainer = made[0]
    if trial.data["precision"] == "fp32":  # Trainer and Accelerate turn TF32 on for a compiled model
        torch.backends.cuda.matmul.allow_tf32 = False
    made[0].train()
    dist.destroy_process_group()


def _prepare_environment(world: int) -> None:
    """Leave nothing in the environment that would change what Accelerate does, or call the hub."""
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]
    if world == 1:  # Accelerate would wrap a single rank in DDP
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    os.environ.update({"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TRANSFORMERS_VERBOSITY": "warning"})
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> int:
    trial = read_trial()
    if "RANK" not in os.environ and trial.data["num_ranks"] > 1:
        from cpu import fork_ranks

        return fork_ranks(trial, train, __file__, ("transformers.trainer", "hf_model"))
    train(trial)
    return 0


if __name__ == "__main__":
    sys.exit(main())
