"""Run script `trtllm`: renders how TensorRT-LLM serves one configuration; it does not run it.

`trtllm-serve` takes options and a YAML file. Options: tensorrt_llm/commands/common_llm_options.py at commit 1f719075;
fields of the file: tensorrt_llm/llmapi/llm_args.py of version 1.1. Measured servers of TensorRT-LLM are searched as
recordings (`srv-*`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from common import IllegalConfig, LaunchForm, MissingRequirement, Trial, run_rank
from serving_model import (
    LAUNCH_PORT,
    LOOPBACK,
    NO_OPTION,
    find_max_len,
    list_launch_notes,
    name_model,
    place_server,
    require_one_machine,
)

OPTIONS = {
    "tp": "--tp_size",
    "pp": "--pp_size",
    "ep": "--ep_size",
    "max_num_seqs": "--max_batch_size",
    "max_num_batched_tokens": "--max_num_tokens",
    "memory_fraction": "--kv_cache_free_gpu_memory_fraction",
}
FIELDS = {
    "dp_attention": "enable_attention_dp",
    "chunked_prefill": "enable_chunked_prefill",
    "prefix_caching": "kv_cache_config.enable_block_reuse",
    "kv_cache_dtype": "kv_cache_config.dtype",
    "block_size": "kv_cache_config.tokens_per_block",
    "scheduling_policy": "scheduler_config.capacity_scheduler_policy",
    "max_graph_size": "cuda_graph_config.max_batch_size",
    "graph_padding": "cuda_graph_config.enable_padding",
    "moe_backend": "moe_config.backend",
    "attention_backend": "attn_backend",
    "stream_interval": "stream_interval",
}
"""Knob -> field of the YAML file; a dot opens a section."""
FILE = "extra.yaml"


def render_file(config: Mapping[str, Any]) -> str:
    """Return the YAML file of a configuration."""
    sections: dict[str, list[str]] = {"": []}
    for knob, value in config.items():
        if (field := FIELDS.get(knob)) is None or value in NO_OPTION:
            continue
        section, _, name = field.rpartition(".")
        text = str(value).lower() if isinstance(value, bool) else str(value)
        sections.setdefault(section, []).append(f"{name}: {text}")
    lines = list(sections.pop(""))
    for section, own in sections.items():
        lines += [f"{section}:", *(f"  {line}" for line in own)]
    if config.get("async_scheduling") is False:
        lines.append("disable_overlap_scheduler: true")
    if config.get("speculative") == "NGram":
        lines += ["speculative_config:", "  decoding_type: NGram", "  max_draft_len: 4"]
    return "\n".join(lines) + "\n"


def show_launch(data: Mapping[str, Any]) -> LaunchForm:
    """Return how to serve one configuration with TensorRT-LLM."""
    config = data["config"]
    known = {*OPTIONS, *FIELDS, "async_scheduling", "speculative", "precision"}
    for knob in config:
        if knob not in known:
            raise IllegalConfig(f"trtllm has no knob {knob!r}; it has {', '.join(sorted(known))}")
    require_one_machine(data)
    words = ["trtllm-serve", name_model(), "--backend", "pytorch", "--host", LOOPBACK, "--port", LAUNCH_PORT]
    words += ["--max_seq_len", str(find_max_len(data))]
    for knob, option in OPTIONS.items():
        words += [option, str(config[knob])] if knob in config else []
    files = {FILE: text} if (text := render_file(config)).strip() else {}
    words += ["--extra_llm_api_options", FILE] if files else []
    return LaunchForm(
        "trtllm-serve",
        place_server(words),
        "the names of options and fields in TensorRT-LLM's public source; nothing was run",
        files=files,
        notes=[f"The checkpoint must be in {data['precision']}.", *list_launch_notes("--max_seq_len")],
    )


def serve(trial: Trial) -> None:
    """Raise: trials of TensorRT-LLM are rendered only."""
    raise MissingRequirement(
        "trtllm configurations are rendered, not run: start the command of `ccl-search space explain --launch`,"
        " or search a recording"
    )


if __name__ == "__main__":
    sys.exit(run_rank(serve, show_launch))
