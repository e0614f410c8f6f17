"""Run script `nanotron`: runs one trial with nanotron's own trainer, one process per rank under torchrun.

The knobs become nanotron's YAML configuration, whose fields are checked against `nanotron.options.txt`. Its trainer's
function for one step is timed and profiled; the data is synthetic. Written from nanotron's public source: it needs GPUs
and has not run on one yet.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from common import (
    IllegalConfig,
    LaunchForm,
    MissingRequirement,
    Trial,
    number_sequences,
    run_rank,
    torchrun_notes,
    torchrun_words,
)
from options import apply_options, check_options
from step_window import StepWindow, count_steps

HERE = Path(__file__).resolve().parent
FILE = "nanotron.yaml"
STAGE = "synthetic"
"""Name of the only data stage."""
DTYPES = {"bf16": "bfloat16"}
"""Precision -> nanotron's name of it. Its attention (flash_attention_2) has no kernels for fp32."""
_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./-]*")
_WORDS = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})
"""What YAML would read as something else than text."""


def render_config(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return nanotron's configuration for one `config.json`; ValueError for an undocumented field. A pure function."""
    seed, steps = int(data["seed"]), count_steps(Trial(Path(), data, data["config"]))
    source = {"dataset": None, "num_loading_workers": 1, "seed": seed}
    config = {
        "general": {"project": "ccl-search", "run": "trial", "seed": seed, "ignore_sanity_checks": True},
        "parallelism": _parallelism(data["config"]),
        "model": _model(data),
        "tokenizer": {"tokenizer_name_or_path": None},
        "tokens": {
            "sequence_length": data["seq_len"],
            "train_steps": steps,
            "micro_batch_size": Trial(Path(), data, data["config"]).micro_batch_size,
            "batch_accumulation_per_replica": data["gradient_accumulation"],
        },
        "optimizer": _optimizer(int(data["config"].get("zero_stage", 0)), steps),
        "data_stages": [{"name": STAGE, "start_training_step": 1, "data": source}],
        "checkpoints": {"checkpoints_path": "checkpoints", "checkpoint_interval": 1_000_000},
        "logging": {"log_level": "info", "log_level_replica": "info", "iteration_step_info_interval": 1},
    }
    apply_options(config, data.get("options", ()))
    check_options(list_fields(config), "nanotron")
    return config


def _parallelism(config: Mapping[str, Any]) -> dict[str, Any]:
    recompute = str(config.get("activation_checkpointing", "none"))
    if recompute not in ("none", "full"):
        raise IllegalConfig(f"activation_checkpointing must be none or full, but it is {recompute!r}")
    # nanotron's own examples have REDUCE_SCATTER: sequences are sharded over tp outside of linear layers
    is_sharded = bool(config.get("sequence_parallel", True))
    return {
        **{axis: int(config.get(axis, 1)) for axis in ("dp", "pp", "tp")},
        "expert_parallel_size": 1,
        "pp_engine": "1f1b",
        "tp_mode": "REDUCE_SCATTER" if is_sharded else "ALL_REDUCE",
        "tp_linear_async_communication": is_sharded,  # nanotron has it only for REDUCE_SCATTER
        "recompute_layer": recompute == "full",
    }


def _model(data: Mapping[str, Any]) -> dict[str, Any]:
    arch = data["arch"]
    if data["precision"] not in DTYPES:
        raise IllegalConfig(f"precision must be one of {', '.join(DTYPES)}, not {data['precision']!r}")
    return {
        "dtype": DTYPES[data["precision"]],
        "init_method": {"std": 0.025},
        "make_vocab_size_divisible_by": 1,
        "ddp_bucket_cap_mb": 25,
        "model_config": {
            "is_llama_config": True,
            "hidden_act": "silu",
            "hidden_size": arch["hidden_size"],
            "intermediate_size": arch["intermediate_size"],
            "num_attention_heads": arch["num_heads"],
            "num_hidden_layers": arch["num_layers"],
            "num_key_value_heads": arch["num_kv_heads"],
            "max_position_embeddings": data["seq_len"],
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": arch["tied_embeddings"],
            "vocab_size": arch["vocab_size"],
        },
    }


def _optimizer(zero_stage: int, steps: int) -> dict[str, Any]:
    if zero_stage not in (0, 1):
        raise IllegalConfig(f"zero_stage must be 0 or 1, but it is {zero_stage}")
    return {
        "zero_stage": zero_stage,
        "weight_decay": 0.01,
        "clip_grad": 1.0,
        "accumulate_grad_in_fp32": True,
        "optimizer_factory": {
            "name": "adamW",
            "adam_eps": 1e-8,
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "torch_adam_is_fused": True,
        },
        "learning_rate_scheduler": {
            "learning_rate": 3e-4,
            "lr_warmup_steps": 1,
            "lr_warmup_style": "linear",
            "lr_decay_style": "linear",
            "lr_decay_steps": max(1, steps - 1),
            "min_decay_lr": 1e-5,
        },
    }


def list_fields(config: Any, above: str = "") -> Iterator[str]:
    """Yield the dotted name of every field; the items of a list have the name of the list."""
    if isinstance(config, dict):
        for name, value in config.items():
            yield above + name
            yield from list_fields(value, f"{above}{name}.")
    elif isinstance(config, list):
        for item in config:
            yield from list_fields(item, above)


def write_yaml(value: Any, indent: int = 0) -> str:
    """Return the value as YAML, which PyYAML reads back as it is; empty mappings and lists do not occur."""
    lines, space = [], " " * indent
    if isinstance(value, list):
        for item in value:
            lines.append(f"{space}- {write_yaml(item, indent + 2).lstrip()}")
        return "".join(lines)
    for name, item in value.items():
        if isinstance(item, dict | list):
            lines.append(f"{space}{name}:\n{write_yaml(item, indent + 2)}")
        else:
            lines.append(f"{space}{name}: {_write_scalar(item)}\n")
    return "".join(lines)


def _write_scalar(value: Any) -> str:
    if isinstance(value, float):  # YAML 1.1 reads 1e-08 as text, and 1.0e-08 as a number
        mantissa, _, exponent = repr(value).partition("e")
        return (mantissa if "." in mantissa else mantissa + ".0") + (f"e{int(exponent):+d}" if exponent else "")
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value)


def show_launch(data: Mapping[str, Any]) -> LaunchForm:
    """Return how to run one `config.json` with nanotron alone."""
    stated = "sequence_parallel" in data["config"] or int(data["config"].get("tp", 1)) == 1
    return LaunchForm(
        title="nanotron",
        command=[*torchrun_words(data), "run_train.py", "--config-file", FILE],
        files={FILE: write_yaml(render_config(data))},
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        checked="each field is in the list of nanotron's fields of nanotron.options.txt; it has not run on a GPU yet",
        notes=(
            *torchrun_notes(data),
            "Run it in a checkout of nanotron; without a dataset in data_stages, run_train.py uses its dummy data.",
            *(() if stated else ("The configuration has no sequence_parallel: tp_mode is as in nanotron's examples.",)),
            "A trial runs nanotron's trainer with the same configuration, times its steps and records a trace.",
        ),
    )


class Batches:
    """Endless micro-batches of one data-parallel rank, as nanotron's model takes them; also their `dataset`.

    Sequences are a noisy pattern, each drawn from its number in the whole data: the same in every layout.
    """

    def __init__(self, trainer: Any, seed: int) -> None:
        self.trainer, self.seed, self.dataset = trainer, seed, self

    def get_consumption_stats(self) -> dict[str, Any]:
        """Return nothing: nanotron logs how much of each dataset it consumed."""
        return {}

    def update_consumption_metrics(self, **_: Any) -> None:
        """Accept what nanotron counts."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        import torch
        import torch.distributed as dist
        from nanotron.parallel.pipeline_parallel.tensor_pointer import TensorPointer
        from nanotron.parallel.pipeline_parallel.utils import get_input_output_pp_ranks

        trainer, context = self.trainer, self.trainer.parallel_context
        first, last = get_input_output_pp_ranks(model=trainer.unwrapped_model)
        stage, size = dist.get_rank(context.pp_pg), (trainer.micro_batch_size, trainer.sequence_length)
        takes = inspect.signature(type(trainer.unwrapped_model).forward).parameters
        numbers = number_sequences(
            trainer.global_batch_size, rank=dist.get_rank(context.dp_pg), ranks=context.dp_pg.size()
        )
        mask = torch.ones(size, dtype=torch.bool, device="cuda")
        positions = torch.arange(size[1], device="cuda").expand(size).contiguous()
        while True:
            tokens = torch.stack([self._draw(next(numbers)) for _ in range(size[0])]).cuda()
            inputs = {"input_ids": tokens[:, :-1].contiguous(), "input_mask": mask, "position_ids": positions}
            labels = {"label_ids": tokens[:, 1:].contiguous(), "label_mask": mask}
            batch = {name: value if stage == first else TensorPointer(first) for name, value in inputs.items()}
            batch |= {name: value if stage == last else TensorPointer(last) for name, value in labels.items()}
            yield {name: value for name, value in batch.items() if name in takes}

    def _draw(self, number: int) -> Any:
        """Return the (S + 1,) tokens of the sequence with that number."""
        import torch

        vocab = int(self.trainer.config.model.model_config.vocab_size)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        noise = torch.randint(0, 3, (self.trainer.sequence_length + 1,), generator=generator)
        noise[0] = torch.randint(0, vocab, (), generator=generator)
        return noise.cumsum(0) % vocab


def read_losses(steps: Iterable[Any]) -> list[float]:
    """Return the loss of each step from what nanotron's `training_step` returned: outputs, mean loss, and more."""
    losses = [returned[1] for returned in steps]
    return [] if any(loss is None for loss in losses) else [float(loss) for loss in losses]


def count_parameters(trainer: Any) -> int:
    """Return the parameters that this rank counts: a tied one is counted by the first rank that has it."""
    import torch.distributed as dist

    if dist.get_rank(trainer.parallel_context.dp_pg):
        return 0
    rank, own = dist.get_rank(), 0
    for parameter in trainer.unwrapped_model.parameters():
        ranks = parameter.get_tied_info().global_ranks if parameter.is_tied else (rank,)
        own += parameter.numel() * (rank == min(ranks))
    return own


def import_trainer() -> Any:
    """Return nanotron's trainer class; MissingRequirement in one line if nanotron or a GPU is missing."""
    # this file has the package's name: its folder must not be searched
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != HERE]
    try:
        trainer = importlib.import_module("nanotron.trainer").DistributedTrainer
        importlib.import_module("nanotron.parallel.pipeline_parallel.tensor_pointer")
    except ImportError as error:
        raise MissingRequirement(
            f"nanotron must be importable by {sys.executable}, but: {error}. Install it from its public source, or set"
            " the profile's `python`, `modules` or `container`"
        ) from None
    import torch

    if not torch.cuda.is_available():
        raise MissingRequirement("nanotron needs GPUs, but torch sees none: install a torch with CUDA")
    return trainer


def train(trial: Trial) -> None:
    """Build nanotron's trainer from its configuration and run it with its step function measured."""
    text = write_yaml(render_config(trial.data))
    make_trainer = import_trainer()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    path = trial.folder / f"rank{os.environ.get('RANK', '0')}-{FILE}"
    path.write_text(text, encoding="utf-8")
    trainer = make_trainer(str(path))
    batches = Batches(trainer, int(trial.data["seed"]))

    def read_work() -> dict[str, Any]:
        return {
            "global_batch_size": trainer.global_batch_size,
            "seq_len": trainer.sequence_length,
            "num_layers": trainer.model_config.num_hidden_layers,
            "precision": next(p for p, dtype in DTYPES.items() if str(trainer.config.model.dtype).endswith(dtype)),
        }

    def set_data(_: Any) -> None:
        """Stand for the method that opens the data of a stage: ours is on the device already."""
        if trainer.current_dataloader is None:
            trainer.current_dataloader, trainer.current_base_dl = iter(batches), batches

    window = StepWindow(
        trial,
        packages=("nanotron", "flash-attn"),
        read_work=read_work,
        read_losses=read_losses,
        count_parameters=lambda: count_parameters(trainer),
    )
    trainer._update_dataloader_based_on_training_stages = set_data
    trainer.training_step = window.wrap(trainer.training_step)
    trainer.train({STAGE: batches})


if __name__ == "__main__":
    sys.exit(run_rank(train, show_launch))
