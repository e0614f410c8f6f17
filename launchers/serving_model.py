"""Shared by run scripts of inference engines: the checkpoint that they serve, and what all engines are asked."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import IllegalConfig, MissingRequirement, write_json
from hf_config import FAMILIES, describe_shape

MODEL, MAX_LEN, HOST, PORT = "CCL_MODEL_PATH", "CCL_MAX_MODEL_LEN", "CCL_SERVE_HOST", "CCL_SERVE_PORT"
LOOPBACK, LAUNCH_PORT = "127.0.0.1", "8000"
NO_OPTION = frozenset({"auto", "default", "none"})
"""Values of a knob that leave its option out."""
FP8 = "fp8"
"""A precision that engines make of weights in bf16 as they load them."""
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", FP8: "bfloat16"}
"""Precision -> type of the weights in the checkpoint, as torch and the engines name it."""
PUBLISHED = ("mxfp8", "mxfp4", "nvfp4", "fp4", "awq", "gptq", "int4", "int8")
"""Precisions that only a checkpoint can have: engines read them from its `quantization_config`."""
PACKED = {"U8": 2, "I8": 1, "I32": 8, "F4": 1}
"""Type of a tensor in a checkpoint of 4 bits -> weights in one number of it."""
SPARE_TOKENS = 8
"""Tokens beyond the longest request that the server's context holds."""
MOST_HEADER_BYTES = 100_000_000
"""A safetensors header is at most so long (the format's own limit)."""


def find_max_len(data: Mapping[str, Any]) -> int:
    """Return the tokens of the longest request and some to spare, or of the context that CCL_MAX_MODEL_LEN asks for."""
    return max(find_longest(data) + SPARE_TOKENS, int(os.environ.get(MAX_LEN) or 0))


def place_server(words: Sequence[str]) -> list[str]:
    """Return a command as the profile's `environment` wants it: with the host and the port of CCL_SERVE_HOST and
    CCL_SERVE_PORT."""
    places = {LOOPBACK: os.environ.get(HOST) or LOOPBACK, LAUNCH_PORT: os.environ.get(PORT) or LAUNCH_PORT}
    return [places.get(word, word) for word in words]


def name_model() -> str:
    """Return the checkpoint that the card or the profile names, or the word MODEL."""
    return os.environ.get(MODEL) or "MODEL"


MODEL_NOTE = "MODEL is the checkpoint: a folder or its name on the hub."


def list_launch_notes(option: str) -> list[str]:
    """Return what to know of a server's launch: the checkpoint, if it is not named, and its context length."""
    context = f"{option} is the longest request of the card, or {MAX_LEN} of the profile's environment if that is more."
    return [*([] if os.environ.get(MODEL) else [MODEL_NOTE]), context]


def find_longest(data: Mapping[str, Any]) -> int:
    """Return the tokens of the longest request of all loads, prompt and answer."""
    requests = [*data["requests"], *(data.get("other") or {"requests": ()})["requests"]]
    return max(int(each["input_tokens"] + each["output_tokens"]) for each in requests)


def count_nodes(data: Mapping[str, Any]) -> int:
    """Return how many machines the accelerators of a configuration need."""
    ranks = int(data.get("num_ranks", 1))
    return -(-ranks // int(data.get("ranks_per_node", ranks)))


def require_one_machine(data: Mapping[str, Any]) -> None:
    """Raise IllegalConfig if a server would need more accelerators than one machine has."""
    if count_nodes(data) > 1:
        raise IllegalConfig(
            f"the server runs on one machine, which has {data['ranks_per_node']} accelerators; the configuration needs"
            f" {data['num_ranks']}"
        )


def require_whole_nodes(data: Mapping[str, Any], *, spreads_replicas: bool, whole_stages: bool = False) -> None:
    """Raise IllegalConfig unless the ranks fill all nodes alike, and a replica fills whole nodes or a part of one.

    `spreads_replicas`: whether one server may have its replicas (`dp`) on several nodes; `whole_stages`: whether the
    same must hold of pipeline stages.
    """
    nodes, ranks, config = count_nodes(data), int(data.get("num_ranks", 1)), data["config"]
    if nodes == 1:
        return
    if ranks % nodes:
        raise IllegalConfig(f"{ranks} accelerators on {nodes} nodes: each node must have as many as the others")
    replica, local = int(config.get("tp", 1)) * int(config.get("pp", 1)), ranks // nodes
    if replica < ranks and not spreads_replicas:
        raise IllegalConfig(f"dp must be 1 on {nodes} nodes, but it is {ranks // replica}")
    if replica % local and local % replica:
        raise IllegalConfig(
            f"a replica has {replica} accelerators and each of {nodes} nodes {local}: one must divide the other"
        )
    pp = int(config.get("pp", 1))
    if whole_stages and pp % nodes and nodes % pp:
        raise IllegalConfig(f"pp {pp} on {nodes} nodes: one must divide the other")


def find_checkpoint() -> Path:
    """Return the folder of the checkpoint; raises MissingRequirement if none is named or there."""
    named = os.environ.get(MODEL, "")
    folder = Path(named).expanduser()
    if not named or not (folder / "config.json").is_file():
        said = f"{named!r} has no config.json" if named else "it is not set"
        raise MissingRequirement(f"{MODEL} (in the profile's `environment`) must be the folder of a checkpoint: {said}")
    return folder


def describe_model(arch: Mapping[str, Any], max_len: int) -> dict[str, Any]:
    """Return the card's model as transformers' `config.json`; IllegalConfig if no family has its layers."""
    shape = describe_shape(arch)
    return {
        "architectures": [f"{FAMILIES[shape['model_type']]}ForCausalLM"],
        **shape,
        "max_position_embeddings": max_len,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


RANDOM_WEIGHTS = """
import sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM
folder, dtype, seed = sys.argv[1:]
torch.manual_seed(int(seed))
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=getattr(torch, dtype))
model.save_pretrained(folder)
"""
"""A program: writes the weights of the model that a folder describes. Another process runs it, for its memory."""


def write_checkpoint(folder: Path, data: Mapping[str, Any], dtype: str) -> None:
    """Write a model of the card's shape with random weights, as a checkpoint."""
    write_json(folder / "config.json", describe_model(data["arch"], find_max_len(data)))
    words = [sys.executable, "-c", RANDOM_WEIGHTS, str(folder), dtype, str(data["seed"])]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        last = next(iter(done.stderr.strip().splitlines()[-1:]), f"code {done.returncode}")
        raise MissingRequirement(f"a model with random weights could not be written: {last[:300]}")


def render_weights(data: Mapping[str, Any], engine: str, model: str) -> list[str]:
    """Return the options that name the weights' type. A quantized checkpoint says itself how it is quantized."""
    precision = data["precision"]
    dtype = "auto" if precision in PUBLISHED else DTYPES.get(precision)
    if dtype is None:
        raise IllegalConfig(f"{engine} serves {', '.join((*DTYPES, *PUBLISHED))} weights here, not {precision}")
    quantized = precision == FP8 and not read_quantization(Path(model))
    return ["--dtype", dtype, *(["--quantization", FP8] if quantized else [])]


def read_quantization(folder: Path) -> Mapping[str, Any]:
    """Return the checkpoint's `quantization_config`; empty if it has none, or if its folder is not here."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found.get("quantization_config") or (found.get("text_config") or {}).get("quantization_config") or {}


def describe_checkpoint(asked: str) -> dict[str, Any]:
    """Return weights and precision of the quantized checkpoint that is served; empty if it is not quantized."""
    folder = Path(os.environ.get(MODEL, "")).expanduser()
    quantization = read_quantization(folder) if os.environ.get(MODEL) else {}
    if not quantization:
        return {}
    bits = 4 if re.search(r'fp4|"(num_)?bits": 4|awq', json.dumps(quantization).lower()) else 8
    fits = bits == (8 if asked in (FP8, "mxfp8", "int8") else 4)
    return {"num_params": count_checkpoint(folder), "precision": asked if fits else f"{bits} bits"}


SCALES = ("scale", "scales", "scale_inv", "qzeros", "g_idx", "zero_point", "weight_shape", "scale_2")
"""Ends of the names of tensors in quantized checkpoints that hold no weights."""


def count_checkpoint(folder: Path) -> int | None:
    """Return the weights in the checkpoint's safetensors files, by their headers; None if it has none."""
    total, packed = 0, PACKED if read_quantization(folder) else {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > MOST_HEADER_BYTES:
                raise MissingRequirement(f"{path} is not a safetensors file: its header would have {size} bytes")
            header = json.loads(file.read(size))
        skipped = ("__metadata__", *(SCALES if packed else ()))
        own = (each for name, each in header.items() if not name.endswith(skipped))
        total += sum(math.prod(each["shape"]) * packed.get(each.get("dtype"), 1) for each in own)
    return total or None
