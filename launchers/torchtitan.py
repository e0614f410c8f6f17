"""Run script `torchtitan`: runs one trial with torchtitan's own trainer, one process per rank under torchrun.

The knobs become torchtitan's command-line options, which are checked against `torchtitan.options.txt` and, if
torchtitan is installed, by its own parser. The card's model and synthetic data come from `torchtitan_model.py`.
"""

from __future__ import annotations

import inspect
import json
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
    run_rank,
    torchrun_notes,
    torchrun_words,
)
from options import check_options
from step_window import StepWindow, count_steps

HERE = Path(__file__).resolve().parent
MODULE = "card_config"
"""Name of the module that a launch by hand writes."""
CHECKPOINTING = {"none": "None", "selective": "SelectiveAC.Config()", "full": "FullAC.Config()"}
"""Mode -> torchtitan's object, as Python."""
DTYPES = {"fp32": "float32", **dict.fromkeys(("bf16", "fp8", "mxfp8", "nvfp4"), "bfloat16")}
"""Precision -> torchtitan's name of the weights' dtype."""


def render_options(data: Mapping[str, Any]) -> list[str]:
    """Return torchtitan's arguments for one `config.json`; ValueError for an undocumented option. A pure function."""
    words = ["--module", "torchtitan_model", "--config", "make_config", *_training(data), *_parallelism(data)]
    words += data.get("options", ())
    # last: options after it would be parsed as the mode's own
    words.append(f"activation_checkpoint:{data['config'].get('activation_checkpointing', 'none')}")
    options = [word for word in words if word.startswith(("--", "activation_checkpoint:"))]
    check_options(options, "torchtitan")
    return words


def show_launch(data: Mapping[str, Any]) -> LaunchForm:
    """Return how to run one `config.json` with torchtitan alone, by options or by one Python function."""
    words = render_options(data)
    words[words.index("--module") + 1] = MODULE
    start = [*torchrun_words(data), "-m", "torchtitan.train"]
    return LaunchForm(
        title="torchtitan 0.3",
        command=[*start, *words],
        files={f"{MODULE}.py": write_module(words), "config.json": json.dumps(dict(data), indent=1)},
        environment={"CCL_CONFIG": "config.json", "CCL_TRIAL_DIR": "."},
        checked="torchtitan 0.3.0 parses options of this form, and the function make_whole_config, to equal values",
        notes=(
            *torchrun_notes(data),
            f"{MODULE}.py takes the model of config.json, and synthetic data, from ccl-search's torchtitan_model.py.",
            "torchtitan will remove --section.option. There, --config make_whole_config replaces all options: not"
            " checked, because no such torchtitan is on the package index.",
            "A trial runs the same trainer with weights drawn from the seed, also times its steps, records a trace, and"
            " adapts two calls that torch 2.13 has by other names.",
        ),
    )


def write_module(words: list[str]) -> str:
    """Return a Python module with the card's configuration, and one with these options set in it."""
    lines = [
        "import sys",
        "",
        f"sys.path.append({str(HERE)!r})",
        "from torchtitan_model import make_config",
        "",
        "",
        "def make_whole_config():",
        "    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC",
        "",
        "    config = make_config()",
    ]
    options = words[words.index("--config") + 2 :]
    for word, after in zip(options, [*options[1:], ""], strict=True):
        if word.startswith("--"):
            has_value = after and not after.startswith(("--", "activation_checkpoint:"))
            lines.append(f"    config.{word[2:]} = {_write_value(after) if has_value else True}")
        elif word.startswith("activation_checkpoint:"):
            lines.append(f"    config.activation_checkpoint = {CHECKPOINTING[word.split(':')[1]]}")
    return "\n".join([*lines, "    return config", ""])


def _write_value(word: str) -> str:
    """Return an option's value as Python: a number or a text."""
    return word if word.lstrip("-").isdigit() else json.dumps(word)


def _training(data: Mapping[str, Any]) -> list[str]:
    config, steps = data["config"], count_steps(Trial(Path(), data, data["config"]))
    micro_batch = config.get("micro_batch_size")
    if micro_batch is None:
        micro_batch = data["global_batch_size"] // (config.get("dp", 1) * data["gradient_accumulation"])
    # a pipeline splits the local batch into micro-batches itself; without one they are accumulated
    local = micro_batch * (data["gradient_accumulation"] if config.get("pp", 1) > 1 else 1)
    if data["precision"] not in DTYPES:
        raise IllegalConfig(f"precision must be one of {', '.join(DTYPES)}, not {data['precision']!r}")
    return [
        *("--training.local_batch_size", str(local)),
        *("--training.global_batch_size", str(data["global_batch_size"])),
        *("--training.seq_len", str(data["seq_len"]), "--training.steps", str(steps)),
        *("--training.mixed_precision_param", DTYPES[data["precision"]]),
        *("--parallelism.pipeline_parallel_microbatch_size", str(micro_batch)),
        *("--debug.seed", str(data["seed"]), "--metrics.log_freq", "1"),
    ]


def _parallelism(data: Mapping[str, Any]) -> list[str]:
    config = data["config"]
    dp, zero_stage = int(config.get("dp", 1)), int(config.get("zero_stage", 3))
    replicate = dp if zero_stage == 0 else int(config.get("dp_replicate", 1))
    if dp % replicate:
        raise IllegalConfig(f"dp_replicate must divide dp = {dp}, but it is {replicate}")
    shard = dp // replicate
    reshard = {0: "default", 2: "never", 3: "always"}
    if zero_stage not in reshard:
        raise IllegalConfig(f"zero_stage must be one of {', '.join(map(str, reshard))}, but it is {zero_stage}")
    return [
        *("--parallelism.data_parallel_replicate_degree", str(replicate)),
        *("--parallelism.data_parallel_shard_degree", str(shard)),
        *("--parallelism.fsdp_reshard_after_forward", reshard[zero_stage]),
        *("--parallelism.tensor_parallel_degree", str(config.get("tp", 1))),
        *("--parallelism.pipeline_parallel_degree", str(config.get("pp", 1))),
        *("--parallelism.pipeline_parallel_schedule", _choose_schedule(data)),
        *(("--parallelism.context_parallel_degree", str(config["cp"])) if "cp" in config else ()),
        # its default, headtail, cannot shard the block mask of the models' FlexAttention
        *(("--parallelism.context_parallel_load_balancer", "ptrr") if int(config.get("cp", 1)) > 1 else ()),
        *("--parallelism.expert_parallel_degree", str(config.get("ep", 1))),
        # its default, spmd_types, passes FSDP arguments that only a nightly torch accepts (2.13 refuses them)
        *("--parallelism.spmd_backend", "partial_dtensor"),
    ]


def _choose_schedule(data: Mapping[str, Any]) -> str:
    """Return the pipeline schedule. torch refuses 1F1B with fewer micro-batches than stages; GPipe then runs the same.

    Interleaved1F1B has 2 stages per rank unless torchtitan is told otherwise.
    """
    config = data["config"]
    chunks = int(config.get("virtual_pipeline", 1))
    if chunks not in (1, 2):
        raise IllegalConfig(f"virtual_pipeline must be 1 or 2, but it is {chunks}")
    if chunks == 2:
        return str(config.get("pipeline_schedule", "default")).replace("default", "Interleaved1F1B")
    return "GPipe" if data["gradient_accumulation"] < int(config.get("pp", 1)) else "1F1B"


def train(trial: Trial) -> None:
    """Build torchtitan's trainer from its own parser and run it with its step function measured."""
    words = render_options(trial.data)
    find_packages_first()
    try:
        from torchtitan.config import ConfigManager
        from torchtitan.tools.logging import init_logger
        from torchtitan.trainer import Trainer
    except ModuleNotFoundError as error:
        raise MissingRequirement(
            f"torchtitan 0.3 must be importable by {sys.executable}, but it has no module {error.name!r}; install it"
            " there, or set the profile's `python`, `modules` or `container`"
        ) from None

    init_logger()
    alias_set_timeout()
    losses: list[float] = []
    config = ConfigManager().parse_args(words)
    config.dump_folder = str(trial.folder / "torchtitan")
    trainer = Trainer(config)
    from torchtitan_model import count_parameters, draw_weights

    draw_weights(trainer.model_parts, trial.data["seed"])

    def read_work() -> dict[str, Any]:
        batch = trainer.parallel_dims.dp_replicate * trainer.parallel_dims.dp_shard
        return {
            "global_batch_size": trainer.gradient_accumulation_steps * config.training.local_batch_size * batch,
            "seq_len": config.training.seq_len,
            "num_layers": len(config.model_spec.model.layers),
            "precision": next(
                p for p in (trial.data["precision"], *DTYPES) if DTYPES[p] == config.training.mixed_precision_param
            ),
        }

    def record_loss(step: int, loss: float, *args: Any, **kwargs: Any) -> Any:
        losses.append(float(loss))
        return log(step, loss, *args, **kwargs)

    if trainer.parallel_dims.pp_enabled:
        accept_micro_batches(trainer.pp_schedule)
    log, trainer.metrics_processor.log = trainer.metrics_processor.log, record_loss
    window = StepWindow(
        trial,
        packages=("torchtitan",),
        read_work=read_work,
        read_losses=lambda _: losses,
        count_parameters=lambda: count_parameters(trainer),
    )
    trainer.train_step = window.wrap(trainer.train_step)
    try:
        trainer.train()
    finally:
        trainer.close()
    import torch.distributed as dist

    dist.destroy_process_group()


def alias_set_timeout() -> None:
    """Define `torch.distributed.set_timeout`, which torchtitan 0.3 calls, in a torch that has it by an older name."""
    import torch.distributed as dist

    vars(dist).setdefault("set_timeout", getattr(dist.distributed_c10d, "_set_pg_timeout", None))


def accept_micro_batches(schedule: Any) -> None:
    """Let a schedule accept lists of micro-batches, as torchtitan 0.3 passes them; torch 2.13's `step` does not."""
    if "arg_mbs" in inspect.signature(schedule.step).parameters:
        return

    def step(*, arg_mbs: Any = None, kwarg_mbs: Any = None, target_mbs: Any = None, **options: Any) -> None:
        for stage in getattr(schedule, "_stages", None) or [schedule._stage]:
            stage.has_backward = schedule._has_backward
            stage.clear_runtime_states()
        schedule._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, **options)

    schedule.step = step


if __name__ == "__main__":
    sys.exit(run_rank(train, show_launch))
