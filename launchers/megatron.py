"""Run script `megatron`: runs one trial with Megatron-LM's own `pretrain_gpt.py`, one process per rank under torchrun.

`MEGATRON_PATH` (in the profile's environment) names a checkout of Megatron-LM. The knobs become its options, which are
checked against `megatron.options.txt`; its function for one step is timed and profiled; it trains on its mock data.
"""

from __future__ import annotations

import inspect
import os
import runpy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import (
    IllegalConfig,
    LaunchForm,
    MissingRequirement,
    Trial,
    run_rank,
    torchrun_notes,
    torchrun_words,
)
from options import check_options
from step_window import StepWindow, count_steps

HERE = str(Path(__file__).resolve().parent)


def render_options(data: Mapping[str, Any]) -> list[str]:
    """Return Megatron-LM's arguments for one `config.json`; ValueError for an undocumented option. A pure function."""
    words = [*_model(data["arch"]), *_training(data), *_parallelism(data), *data.get("options", ()), *_logging()]
    check_options((word for word in words if word.startswith("--")), "megatron")
    return words


def show_launch(data: Mapping[str, Any]) -> LaunchForm:
    """Return how to run one `config.json` with Megatron-LM alone."""
    return LaunchForm(
        title="Megatron-LM",
        command=[*torchrun_words(data), "pretrain_gpt.py", *render_options(data)],
        environment={} if data["config"].get("zero_stage") == 3 else {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        checked="each option is in megatron.options.txt, which says which Megatron Core 0.19.2 parses",
        notes=(
            *torchrun_notes(data),
            "Run it in a checkout of Megatron-LM, on mock data; --train-iters is the number of steps.",
            "A trial runs the same pretrain_gpt.py, and also times its steps and records a trace.",
        ),
    )


def _model(arch: Mapping[str, Any]) -> list[str]:
    words = [
        *("--num-layers", str(arch["num_layers"]), "--hidden-size", str(arch["hidden_size"])),
        *("--ffn-hidden-size", str(arch["intermediate_size"])),
        *("--num-attention-heads", str(arch["num_heads"])),
        *("--kv-channels", str(arch.get("v_head_dim") or arch["head_dim"])),
        *("--vocab-size", str(arch["vocab_size"]), "--tokenizer-type", "NullTokenizer"),
        *("--position-embedding-type", "learned_absolute" if arch.get("learned_positions") else "rope"),
        *("--normalization", "RMSNorm"),
    ]
    switches = {
        "--disable-bias-linear": not arch.get("linear_bias"),
        "--add-qkv-bias": arch.get("qkv_bias") and not arch.get("linear_bias"),
        "--qk-layernorm": arch.get("qk_norm"),
    }
    words += [option for option, is_on in switches.items() if is_on]
    words += ["--mtp-num-layers", str(arch["mtp_layers"])] if arch.get("mtp_layers") else []
    words += [*_windows(arch), *_latent(arch)]
    if arch["num_kv_heads"] != arch["num_heads"]:
        words += ["--group-query-attention", "--num-query-groups", str(arch["num_kv_heads"])]
    words += ["--swiglu"] if arch["gated_mlp"] else []
    words += [] if arch["tied_embeddings"] else ["--untie-embeddings-and-output-weights"]
    return words + (_experts(arch) if arch.get("moe") else [])


def _windows(arch: Mapping[str, Any]) -> list[str]:
    """Return the options of windows; a list has 1 for a windowed layer and 0 for one that attends to all tokens."""
    window, layers = arch.get("sliding_window"), arch["num_layers"]
    if not window:
        return []
    words, full = ["--window-size", f"{window - 1},0"], layers - (arch.get("windowed_layers") or layers)
    kinds = [0 if (i + 1) * full // layers > i * full // layers else 1 for i in range(layers)]
    return words + (["--window-attn-skip-freq", str(kinds).replace(" ", "")] if full else [])


def _latent(arch: Mapping[str, Any]) -> list[str]:
    """Return the options of multi-head latent attention."""
    if not arch.get("kv_lora_rank"):
        return []
    widths = {
        "--q-lora-rank": arch.get("q_lora_rank"),
        "--kv-lora-rank": arch["kv_lora_rank"],
        "--qk-head-dim": arch["head_dim"] - arch["qk_rope_head_dim"],
        "--qk-pos-emb-head-dim": arch["qk_rope_head_dim"],
        "--v-head-dim": arch["v_head_dim"],
    }
    return ["--multi-latent-attention", *(w for name, width in widths.items() if width for w in (name, str(width)))]


BALANCES = {
    "aux_loss": ("aux_loss", "--moe-aux-loss-coeff", "1e-3"),
    "bias": ("none", "--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"),
    "none": ("none",),
}
"""Balance of the router -> its load balancing type, and further options."""


def _experts(arch: Mapping[str, Any]) -> list[str]:
    moe = arch["moe"]
    words = [
        *("--num-experts", str(moe["num_experts"]), "--moe-router-topk", str(moe["top_k"])),
        *("--moe-ffn-hidden-size", str(moe["expert_intermediate_size"])),
        *("--moe-grouped-gemm", "--moe-router-load-balancing-type"),
        *BALANCES[arch.get("router_balance") or "none"],
    ]
    if moe["num_shared_experts"]:
        width = moe["num_shared_experts"] * moe["expert_intermediate_size"]
        words += ["--moe-shared-expert-intermediate-size", str(width)]
    if dense := moe["num_dense_layers"]:
        words += ["--moe-layer-freq", f"([0]*{dense}+[1]*{arch['num_layers'] - dense})"]
    return words


def _training(data: Mapping[str, Any]) -> list[str]:
    micro_batch = data["config"].get("micro_batch_size")
    if micro_batch is None:
        micro_batch = data["global_batch_size"] // (data["config"].get("dp", 1) * data["gradient_accumulation"])
    steps = count_steps(Trial(Path(), data, data["config"]))
    return [
        *("--seq-length", str(data["seq_len"]), "--max-position-embeddings", str(data["seq_len"])),
        *("--micro-batch-size", str(micro_batch), "--global-batch-size", str(data["global_batch_size"])),
        *("--train-iters", str(steps), "--seed", str(data["seed"] or 1234)),
        *("--optimizer", "adam", "--lr", "1e-4", "--lr-decay-style", "constant"),
        *("--mock-data", "--no-create-attention-mask-in-dataloader", "--num-workers", "1", "--split", "100,0,0"),
    ]


def _parallelism(data: Mapping[str, Any]) -> list[str]:
    config = data["config"]
    degrees = {"tp": "--tensor-model-parallel-size", "pp": "--pipeline-model-parallel-size"}
    words = [word for knob, option in degrees.items() for word in (option, str(config.get(knob, 1)))]
    words += ["--context-parallel-size", str(config["cp"])] if "cp" in config else []
    if data["arch"].get("moe"):
        words += ["--expert-model-parallel-size", str(config.get("ep", 1))]
    if (recompute := str(config.get("activation_checkpointing", "none"))) != "none":
        words += ["--recompute-granularity", recompute]
    modules = next(
        (m for m in (config.get("recompute_moe"), config.get("recompute_modules")) if m not in (None, "none")), ""
    )
    if modules and recompute == "selective":
        words += ["--recompute-modules", *str(modules).split("+")]
    switches = {"sequence_parallel": "--sequence-parallel", "zero_stage": "--use-distributed-optimizer"}
    words += [option for knob, option in switches.items() if config.get(knob)]
    if int(config.get("zero_stage", 0)) == 3:
        words += ["--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params"]
        words += ["--ckpt-format", "fsdp_dtensor"]
    if config.get("rank_order") == "tp-pp-dp":
        words.append("--use-tp-pp-dp-mapping")
    return words + _pipeline(config, data["arch"]["num_layers"], data.get("stage_layers", ()))


def _pipeline(config: Mapping[str, Any], layers: int, stage_layers: Sequence[int] = ()) -> list[str]:
    """Return the options of the stages: a layout of its own if the layers are not divided into equal chunks."""
    if len(set(stage_layers)) > 1:
        if sum(stage_layers) != layers or len(stage_layers) != int(config.get("pp", 1)):
            raise IllegalConfig(
                f"stage_layers {list(stage_layers)} do not split {layers} layers over pp {config.get('pp', 1)}"
            )
        return ["--pipeline-model-parallel-layout", "E" + "|".join(f"t*{count}" for count in stage_layers) + "L"]
    if str(config.get("stage_layers", "even")) != "even" and not stage_layers:
        raise IllegalConfig(f"stage_layers is {config['stage_layers']}, but config.json has no layers of each stage")
    chunks = int(config.get("virtual_pipeline", 1))
    stages = int(config.get("pp", 1)) * chunks
    if layers % stages:
        return ["--pipeline-model-parallel-layout", render_layout(layers, stages)]
    return ["--num-virtual-stages-per-pipeline-rank", str(chunks)] if chunks > 1 else []


def render_layout(layers: int, stages: int) -> str:
    """Return Megatron-LM's layout of uneven stages, `Et*5|t*6|t*5L`: the first and last have no more than the others.

    `E` is the embedding, `t` a layer and `L` the loss (megatron/core/transformer/pipeline_parallel_layer_layout.py).
    """
    if layers + 2 < stages:
        raise IllegalConfig(f"{layers} layers, embedding and loss are fewer than pp x virtual_pipeline = {stages}")
    if layers < stages:
        return "E|" + "|".join(["t"] * layers) + ("|L" if layers + 1 < stages else "L")
    each, more = divmod(layers, stages)
    inner = sorted(range(stages), key=lambda stage: (stage in (0, stages - 1), stage == stages - 1, stage))[:more]
    parts = [f"t*{each + (stage in inner)}" for stage in range(stages)]
    return "E" + "|".join(parts) + "L"


def _logging() -> list[str]:
    return ["--log-interval", "1", "--eval-iters", "0", "--eval-interval", "1000000"]


def read_losses(steps: list[Any]) -> list[float]:
    """Return the loss of each step from what Megatron-LM's `train_step` returned; empty on ranks without losses.

    Its first item maps names to losses, reduced over the data-parallel ranks, on the ranks of the last pipeline stage.
    """
    reduced = [returned[0] if isinstance(returned, tuple) else returned for returned in steps]
    if not all(isinstance(losses, Mapping) and losses for losses in reduced):
        return []
    values = [next(iter(losses.values())) for losses in reduced]
    return [float(value[0] if isinstance(value, tuple | list) else value) for value in values]


def read_work() -> dict[str, Any]:
    """Return what Megatron-LM reports that it trained."""
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.training import get_args

    args = get_args()
    return {
        "global_batch_size": get_num_microbatches() * args.micro_batch_size * args.data_parallel_size,
        "seq_len": args.seq_length,
        "num_layers": args.num_layers,
        "precision": read_precision(args),
    }


def read_precision(args: Any) -> str:
    """Return the precision by which cards name what Megatron-LM's arguments chose."""
    if args.fp4:
        return "nvfp4"
    if args.fp8:
        return {"tensorwise": "fp8", "mxfp8": "mxfp8"}.get(args.fp8_recipe, f"fp8-{args.fp8_recipe}")
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"


def keep_model(train_step: Callable[..., Any], models: list[Any]) -> Callable[..., Any]:
    """Return Megatron-LM's `train_step` that also keeps its model: the chunks of this rank."""
    parameters = inspect.signature(train_step)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not models:
            models.append(parameters.bind(*args, **kwargs).arguments["model"])
        return train_step(*args, **kwargs)

    return run


def count_parameters(chunks: Iterable[Any]) -> int:
    """Return the parameters of the model that this rank counts: each is counted by the first rank that has it.

    Megatron-LM marks parameters that tensor-parallel ranks shard (`tensor_model_parallel`), those of experts
    (`allreduce` is false) and copies of the embedding on the last pipeline stage (`shared_embedding`).
    """
    from megatron.core import parallel_state

    is_first_copy = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    is_first_slice = parallel_state.get_tensor_model_parallel_rank() == 0
    is_first_stage = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    own = 0
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        if not getattr(parameter, "allreduce", True):  # whole experts, one copy for each expert-data-parallel rank
            is_counted = parallel_state.get_expert_data_parallel_rank() == 0
        else:
            is_counted = is_first_copy and (is_first_slice or getattr(parameter, "tensor_model_parallel", False))
            is_counted &= is_first_stage or not getattr(parameter, "shared_embedding", False)
        own += parameter.numel() * is_counted
    return own


def train(trial: Trial) -> None:
    """Run `pretrain_gpt.py` with its step function measured."""
    root = os.environ.get("MEGATRON_PATH")
    if not root or not (Path(root) / "pretrain_gpt.py").is_file():
        raise MissingRequirement(
            f"MEGATRON_PATH must name a checkout of Megatron-LM on this node, with pretrain_gpt.py, but it is {root!r}:"
            " set it in the profile's `environment`"
        )
    sys.path[:] = [root, *(path for path in sys.path if Path(path or ".").resolve() != Path(HERE))]
    if int(trial.config.get("zero_stage", 0)) != 3:  # Megatron FSDP asserts that it is not 1
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    from megatron.training import training

    models: list[Any] = []
    window = StepWindow(
        trial,
        packages=("megatron-core", "transformer-engine"),
        read_work=read_work,
        read_losses=read_losses,
        count_parameters=lambda: count_parameters(models[0]),
    )
    training.train_step = window.wrap(keep_model(training.train_step, models))
    sys.argv = [str(Path(root) / "pretrain_gpt.py"), *render_options(trial.data)]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    sys.exit(run_rank(train, show_launch))
