"""Run script `hf-trainer`: trains the card's model with transformers' `Trainer` under Accelerate.

On GPUs it shards with FSDP2 (zero_stage 2 and 3) or replicates with DDP (0). On CPUs, which the card or CCL_DEVICE=cpu
chooses, Accelerate knows DDP only, over gloo.

Every rank holds the whole model: transformers shards tensors only of a model that it loads from a checkpoint.

Knobs: dp, micro_batch_size, activation_checkpointing (none, full), compile, optimizer (Trainer's `optim`), zero_stage.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import (
    IllegalConfig,
    LaunchForm,
    MissingRequirement,
    Trial,
    find_packages_first,
    learning_rate,
    limit_memory,
    print_launch,
    read_trial,
    reporting_failures,
    torchrun_notes,
    torchrun_words,
)
from hf_config import FAMILIES, describe_shape
from options import apply_options
from step_window import StepWindow, count_steps

STAGES = {0: None, 2: False, 3: True}
"""ZeRO stage -> FSDP2's `reshard_after_forward`; None for no FSDP."""
PRECISIONS = ("fp32", "bf16")
PROGRAM = """\
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments


class RandomTokens(torch.utils.data.Dataset):
    def __init__(self, vocabulary, length, count):
        self.vocabulary, self.length, self.count = vocabulary, length, count

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(self.vocabulary, (self.length,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


(arguments,) = HfArgumentParser(TrainingArguments).parse_json_file(sys.argv[1])
config = AutoConfig.from_pretrained(".")
sequences = RandomTokens(config.vocab_size, SEQ_LEN, arguments.max_steps * GLOBAL_BATCH)
trainer = Trainer(AutoModelForCausalLM.from_config(config), arguments, train_dataset=sequences)
trainer.train()
"""
"""What a launch by hand starts, with two numbers to fill in."""


def render_arguments(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `TrainingArguments` for one `config.json`, without those of a machine. A pure function."""
    config = data["config"]
    trial = Trial(Path(), data, config)
    stage, checkpointing = int(config.get("zero_stage", 0)), _checkpointing(config)
    trial.require_data_parallel()
    if data["precision"] not in PRECISIONS:
        raise IllegalConfig(f"precision must be one of {', '.join(PRECISIONS)}, not {data['precision']!r}")
    if stage not in STAGES:
        raise IllegalConfig(f"zero_stage must be one of {', '.join(map(str, STAGES))}, but it is {stage}")
    rendered = {
        "per_device_train_batch_size": trial.micro_batch_size,
        "gradient_accumulation_steps": int(data["gradient_accumulation"]),
        "max_steps": count_steps(trial),
        "learning_rate": learning_rate(data["arch"]),
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
    return apply_options(rendered, data.get("options", ()))


def describe_model(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the card's model as transformers' `config.json`; IllegalConfig if no family has its layers."""
    return {
        **describe_shape(data["arch"]),
        "max_position_embeddings": data["seq_len"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "rms_norm_eps": 2.0**-23,  # torch's default for fp32, which `cpu` uses
        "pad_token_id": None,
        "use_cache": False,
    }


def describe_adapters(arch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of PEFT's `LoraConfig`."""
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    targets = attention if arch.get("lora_targets") == "attention" else "all-linear"
    rank = int(arch["lora_rank"])
    return {"r": rank, "lora_alpha": 2 * rank, "target_modules": targets, "task_type": "CAUSAL_LM"}


def show_launch(data: Mapping[str, Any]) -> LaunchForm:
    """Return how to run one `config.json` with `accelerate launch` alone."""
    arguments = render_arguments(data)
    fsdp = arguments.pop("fsdp_config", None)
    arguments.pop("fsdp", None)  # Accelerate's configuration says it
    arguments |= {"use_cpu": _wants_cpu(data), "output_dir": "output"}
    program = PROGRAM.replace("SEQ_LEN", str(data["seq_len"])).replace("GLOBAL_BATCH", str(data["global_batch_size"]))
    if data["arch"].get("lora_rank"):
        adapters = ", ".join(f"{name}={value!r}" for name, value in describe_adapters(data["arch"]).items())
        program = "from peft import LoraConfig, get_peft_model\n" + program.replace(
            "AutoModelForCausalLM.from_config(config)",
            f"get_peft_model(AutoModelForCausalLM.from_config(config), LoraConfig({adapters}))",
        )
    command, files = _render_command(data, fsdp)
    return LaunchForm(
        title="Hugging Face Trainer with Accelerate",
        command=[*command, "train.py", "training.json"],
        files={
            **files,
            "training.json": json.dumps(arguments, indent=1) + "\n",
            "config.json": json.dumps(describe_model(data), indent=1) + "\n",
            "train.py": program,
        },
        checked="the keys are those of accelerate 1.15 (commands/config/config_args.py) and transformers 5.23"
        " (training_args.py), whose own parsers read them in the tests",
        notes=(
            *torchrun_notes(data),
            *(() if files else ["On CPUs `accelerate launch` starts one process, or needs MPI; torchrun starts all."]),
            "It trains on random tokens from random weights; replace both in train.py.",
            "A trial trains in the same way under torchrun, on the weights and tokens of `cpu`, decays every weight,"
            " and also times its steps and records a trace.",
        ),
    )


def _render_command(data: Mapping[str, Any], fsdp: Mapping[str, Any] | None) -> tuple[list[str], dict[str, str]]:
    """Return what starts the ranks, and its files."""
    if _wants_cpu(data) and data["num_ranks"] > 1:
        return torchrun_words(data), {}
    place = ["--machine_rank=NODE_RANK", "--main_process_ip=HEAD_NODE", "--main_process_port=29500"]
    command = ["accelerate", "launch", "--config_file", "accelerate.yaml"]
    several = data["num_ranks"] > data["ranks_per_node"]
    return [*command, *(place if several else ())], {"accelerate.yaml": _render_accelerate(data, fsdp)}


def _render_accelerate(data: Mapping[str, Any], fsdp: Mapping[str, Any] | None) -> str:
    """Return Accelerate's configuration file; its values are words and numbers that JSON and YAML write alike."""
    ranks, per_node = int(data["num_ranks"]), int(data["ranks_per_node"])
    fields: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": ("FSDP" if fsdp else "MULTI_GPU") if ranks > 1 else "NO",
        "mixed_precision": "bf16" if data["precision"] == "bf16" else "no",
        "use_cpu": _wants_cpu(data),
        "num_machines": -(-ranks // per_node),
        "num_processes": ranks,
    }
    lines = [f"{name}: {json.dumps(value)}" for name, value in fields.items()]
    if fsdp:
        lines += ["fsdp_config:", f"  fsdp_version: {fsdp['version']}"]
        names = ("reshard_after_forward", "auto_wrap_policy", "activation_checkpointing")
        lines += [f"  fsdp_{name}: {json.dumps(fsdp[name])}" for name in names]
        lines += [f"  fsdp_transformer_layer_cls_to_wrap: {json.dumps(fsdp['transformer_layer_cls_to_wrap'][0])}"]
        lines += ["  fsdp_offload_params: false", "  fsdp_cpu_ram_efficient_loading: false"]
        lines += ["  fsdp_state_dict_type: FULL_STATE_DICT"]
    return "\n".join(lines) + "\n"


def _wants_cpu(data: Mapping[str, Any]) -> bool:
    return data.get("accelerator") == "cpu" or os.environ.get("CCL_DEVICE") == "cpu"


def _checkpointing(config: Mapping[str, Any]) -> str:
    mode = str(config.get("activation_checkpointing", "none"))
    if mode not in ("none", "full"):
        raise IllegalConfig(f"activation_checkpointing must be none or full, but it is {mode!r}")
    return mode


def _fsdp(data: Mapping[str, Any], stage: int, checkpointing: str) -> dict[str, Any]:
    """Return `fsdp_config`; FSDP checkpoints activations itself, since Trainer's way would gather the weights twice."""
    layer = f"{FAMILIES[describe_shape(data['arch'])['model_type']]}DecoderLayer"
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
    fields, on_gpu = render_arguments(trial.data), not _wants_cpu(trial.data)
    _prepare_environment(world, on_gpu)
    find_packages_first()
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

    if on_gpu and not torch.cuda.is_available():
        raise MissingRequirement("torch sees no GPU: install a torch with CUDA or ROCm, or check the driver")
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


def _prepare_environment(world: int, on_gpu: bool) -> None:
    """Leave nothing in the environment that would change what Accelerate does, or call the hub."""
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]
    if not on_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if world == 1:  # Accelerate would wrap a single rank in DDP
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    os.environ.update({"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TRANSFORMERS_VERBOSITY": "warning"})
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> int:
    trial = read_trial()
    if print_launch(trial, show_launch):
        return 0
    if "RANK" not in os.environ and trial.data["num_ranks"] > 1:
        from cpu import fork_ranks

        return fork_ranks(trial, train, __file__, ("transformers.trainer", "hf_model"))
    train(trial)
    return 0


if __name__ == "__main__":
    sys.exit(main())
