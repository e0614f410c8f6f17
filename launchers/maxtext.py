"""Run script `maxtext`: runs one trial with MaxText, one process per host of a TPU slice.

`MAXTEXT_COMMAND` (in the profile's environment) starts its trainer, by default `python -m
maxtext.trainers.pre_train.train`; `MAXTEXT_CONFIG` names its base.yml. The knobs become its settings, which are checked
against `maxtext.options.txt`. Step times come from its log, without the profiled steps and the one before them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import (
    IllegalConfig,
    LaunchForm,
    Trial,
    host_name,
    package_versions,
    print_launch,
    read_trial,
    reporting_failures,
    write_result,
)
from options import check_options
from step_window import count_steps

DEFAULT_COMMAND = "python -m maxtext.trainers.pre_train.train"
METRICS_FILE = "maxtext-metrics.jsonl"
"""What MaxText writes at each step; its log rounds losses and hides those of the first and last profiled steps."""
DTYPES = {"fp32": "float32", **dict.fromkeys(("bf16", "fp8", "fp8-full", "fp8-delayed", "mxfp8", "nvfp4"), "bfloat16")}
"""Precision -> MaxText's name of the dtype that is not quantized."""
BALANCES = {
    "aux_loss": {"load_balance_loss_weight": 1e-3},
    "bias": {"routed_bias": True, "routed_score_func": "sigmoid"},
}
"""Balance of the router -> settings."""

_STEP = re.compile(
    r"completed step: (?P<step>\d+), seconds: (?P<seconds>[0-9.eE+-]+)"
    r"(?:.*?total_weights: (?P<tokens>\d+))?.*?loss: (?P<loss>[0-9.eE+-]+)"
)
_PARAMS = re.compile(r"number parameters: (?P<billions>[0-9.]+) billion")
_MEMORY = re.compile(r"Using \(GB\) (?P<used>[0-9.]+) / (?P<limit>[0-9.]+)")


def render_options(data: Mapping[str, Any], folder: Path) -> list[str]:
    """Return MaxText's settings for one `config.json`; ValueError for an undocumented setting. A pure function."""
    settings = {**_model(data["arch"]), **_training(data), **_parallelism(data), **_running(data, folder)}
    settings |= dict(word.split("=", 1) for word in data.get("options", ()))
    check_options(settings, "maxtext")
    return [f"{name}={_write_value(value)}" for name, value in settings.items()]


def show_launch(data: Mapping[str, Any]) -> LaunchForm:
    """Return how to run one `config.json` with MaxText alone."""
    command = shlex.split(os.environ.get("MAXTEXT_COMMAND", DEFAULT_COMMAND))
    config = os.environ.get("MAXTEXT_CONFIG")
    return LaunchForm(
        title="MaxText",
        command=[*command, *([config] if config else []), *render_options(data, Path("output"))],
        checked="each setting is in maxtext.options.txt; MaxText 0.2.5 accepts such settings (its configs/types.py)",
        notes=(
            "Run it on every host of the slice; steps is the number of steps, and the data is synthetic.",
            "A trial runs the same trainer, also records a profile, and reads step times from its log.",
        ),
    )


def _write_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _model(arch: Mapping[str, Any]) -> dict[str, Any]:
    settings = {
        "base_num_decoder_layers": arch["num_layers"],
        "base_emb_dim": arch["hidden_size"],
        "base_num_query_heads": arch["num_heads"],
        "base_num_kv_heads": arch["num_kv_heads"],
        "head_dim": arch["head_dim"],
        "base_mlp_dim": arch["intermediate_size"],
        "vocab_size": arch["vocab_size"],
        "logits_via_embedding": arch["tied_embeddings"],
        "mlp_activations": "['silu','linear']" if arch["gated_mlp"] else "['gelu']",
        **({"decoder_block": "qwen3", "use_qk_norm": True} if arch.get("qk_norm") else {}),
    }
    if moe := arch.get("moe"):
        settings |= {
            "num_experts": moe["num_experts"],
            "num_experts_per_tok": moe["top_k"],
            "base_moe_mlp_dim": moe["expert_intermediate_size"],
        }
        if not moe["num_dense_layers"]:  # configs/types.py: in a model of experts only, both widths must be equal
            settings["base_mlp_dim"] = moe["expert_intermediate_size"]
        if moe["num_shared_experts"] or moe["num_dense_layers"]:
            settings |= {
                "decoder_block": "deepseek",
                "shared_experts": moe["num_shared_experts"],
                "first_num_dense_layers": moe["num_dense_layers"],
            }
        else:
            settings |= {"decoder_block": "qwen3_moe" if arch.get("qk_norm") else "mixtral"}
        settings |= BALANCES.get(arch.get("router_balance") or "", {})
    if arch.get("kv_lora_rank"):
        ranks = {name: arch[name] for name in ("kv_lora_rank", "qk_rope_head_dim", "v_head_dim")}
        nope = arch["head_dim"] - arch["qk_rope_head_dim"]
        latent = {"attention_type": "mla", "q_lora_rank": arch.get("q_lora_rank") or 0, "qk_nope_head_dim": nope}
        settings |= {"decoder_block": "deepseek", **latent, **ranks}
    return settings


def _training(data: Mapping[str, Any]) -> dict[str, Any]:
    if data["precision"] not in DTYPES:
        raise IllegalConfig(f"precision must be one of {', '.join(DTYPES)}, not {data['precision']!r}")
    return {
        "per_device_batch_size": per_device_batch(data),
        "gradient_accumulation_steps": data["gradient_accumulation"],
        "max_target_length": data["seq_len"],
        "dtype": DTYPES[data["precision"]],
        "steps": count_steps(Trial(Path(), data, data["config"])),
        "dataset_type": "synthetic",
        "init_weights_seed": data["seed"],
        "data_shuffle_seed": data["seed"],
    }


def per_device_batch(data: Mapping[str, Any]) -> int | float:
    """Return sequences per device and micro-step: MaxText counts all devices, and a TP group shares a micro-batch."""
    share = data["global_batch_size"] / (data["num_ranks"] * data["gradient_accumulation"])
    return int(share) if share == int(share) else share


def _parallelism(data: Mapping[str, Any]) -> dict[str, Any]:
    config, experts = data["config"], int(data["config"].get("ep", 1))
    dp = int(config.get("dp", 1))
    if int(config.get("pp", 1)) != 1:
        raise IllegalConfig(f"this run script has no pipeline parallelism: pp must be 1, but it is {config['pp']}")
    if dp % experts:
        raise IllegalConfig(f"ep must divide dp = {dp}, but it is {experts}")
    context = int(config.get("cp", 1))
    axes = {"ici_tensor_parallelism": int(config.get("tp", 1)), "ici_expert_parallelism": experts}
    sharded = int(config.get("zero_stage", 3)) == 3
    axes |= {"ici_fsdp_parallelism": dp // experts if sharded else 1}
    axes |= {"ici_data_parallelism": 1 if sharded else dp // experts}
    axes |= {"ici_context_parallelism": context} if "cp" in config else {}
    remat = {"none": "minimal_with_context", "minimal": "minimal", "full": "full"}
    return {**axes, "remat_policy": remat[str(config.get("activation_checkpointing", "full"))]}


def _running(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    settings = {
        "run_name": "maxtext",
        "base_output_directory": str(folder),
        "enable_checkpointing": False,
        "enable_goodput_recording": False,
        "monitor_goodput": False,
        "log_period": 1,
        "metrics_file": str(folder / METRICS_FILE),
    }
    if data["profiled_steps"]:
        settings |= {
            "profiler": "xplane",
            "upload_all_profiler_results": True,
            "skip_first_n_steps_for_profiler": data["warmup_steps"] + data["timed_steps"] + 1,
            "profiler_steps": data["profiled_steps"],
        }
    return settings


@dataclass(frozen=True)
class Log:
    """The parsed log: seconds, loss and trained tokens by step, billions of parameters, GB in use on a device."""

    seconds: dict[int, float]
    losses: dict[int, float]
    tokens: dict[int, int]
    billions: float | None
    used_gb: float | None


def parse_log(text: str) -> Log:
    """Parse MaxText's log."""
    steps = {int(m["step"]): m for m in _STEP.finditer(text)}
    billions, used = _PARAMS.search(text), [float(m["used"]) for m in _MEMORY.finditer(text)]
    return Log(
        {step: float(m["seconds"]) for step, m in steps.items()},
        {step: float(m["loss"]) for step, m in steps.items()},
        {step: int(m["tokens"]) for step, m in steps.items() if m["tokens"]},
        float(billions["billions"]) if billions else None,
        max(used, default=None),
    )


def run_trainer(trial: Trial) -> tuple[int, str]:
    """Run MaxText's trainer, passing its output through; return its exit code and log."""
    command = mark_command(shlex.split(os.environ.get("MAXTEXT_COMMAND", DEFAULT_COMMAND)))
    if config := os.environ.get("MAXTEXT_CONFIG"):
        command.append(config)
    lines = []
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [*command, *render_options(trial.data, trial.folder)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        for line in process.stdout or ():
            sys.stdout.write(line)
            sys.stdout.flush()
            lines.append(line)
    return process.returncode, "".join(lines)


def mark_command(command: list[str]) -> list[str]:
    """Return the command that also marks its traces if it runs a module with `python -m`; any other is unchanged."""
    if "-m" not in command[:-1]:
        return command
    at = command.index("-m")
    return [*command[:at], str(Path(__file__).resolve().with_name("maxtext_trainer.py")), *command[at + 1 :]]


def read_losses(folder: Path, log: Log) -> list[float]:
    """Return the loss of each step: from MaxText's metrics file if it wrote one, else from its log."""
    losses = dict(log.losses)
    if (folder / METRICS_FILE).is_file():
        for line in (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines():
            metrics = json.loads(line)
            losses[int(metrics["step"])] = float(metrics["learning/loss"])
    return [losses[step] for step in sorted(losses)]


def collect_traces(trial: Trial) -> None:
    """Copy MaxText's profiles from its run's `tensorboard/plugins/profile` to `trace/`."""
    for plugins in sorted((trial.folder / "maxtext").glob("**/plugins")):
        shutil.copytree(plugins, trial.trace_folder / "plugins", dirs_exist_ok=True)


def write_report(trial: Trial, log: Log) -> None:
    """Write `result.json` from the log of the process with step lines."""
    data, first = trial.data, int(trial.data["warmup_steps"])
    window = range(first, first + int(data["timed_steps"]))
    missing = [step for step in window if step not in log.seconds]
    if missing:
        raise RuntimeError(f"MaxText's log has no line for steps {missing}")
    fields: dict[str, Any] = {}
    if first in log.tokens:  # older versions do not log how many tokens a step trained
        fields["global_batch_size"] = log.tokens[first] // data["seq_len"]
    if log.billions is not None:
        fields["num_params"] = round(log.billions * 1e9)
        fields["metrics"] = {"num_params_billion": log.billions}
        fields["num_params"] = round(log.billions * 1e9)
    if log.used_gb is not None:
        fields["peak_memory_bytes"] = [int(log.used_gb * 1e9)] * data["num_ranks"]
    write_result(
        trial,
        world_size=data["num_ranks"],
        seq_len=data["seq_len"],
        num_layers=data["arch"]["num_layers"],
        step_times_s=[log.seconds[step] for step in window],
        warmup_steps=first,
        precision=data["precision"],
        losses=read_losses(trial.folder, log),
        versions=package_versions("jax", "jaxlib", "libtpu", "maxtext"),
        devices=[os.environ.get("TPU_ACCELERATOR_TYPE", "tpu")] * data["num_ranks"],
        hosts=[host_name()],
        **fields,
    )


def main() -> int:
    trial = read_trial()
    if print_launch(trial, show_launch):
        return 0
    process = int(os.environ.get("CCL_PROCESS_ID", "0"))
    with reporting_failures(trial, process):
        code, text = run_trainer(trial)
        collect_traces(trial)
        if code:  # the engine reads the reason from the output
            return code if 0 < code < 128 else 1
        if process == 0:
            write_report(trial, parse_log(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
