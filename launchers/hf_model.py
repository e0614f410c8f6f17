"""The card's model as transformers builds it, with the weights and the data that the run script `cpu` trains.

Each weight is drawn by `cpu`'s builder under the same name, so the two frameworks start from the same model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from common import IllegalConfig, MissingRequirement, number_step
from cpu import draw_sequences
from cpu_model import Builder, Layout
from hf_trainer import describe_adapters, describe_model
from serving_model import MODEL, find_checkpoint
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig


def make_model(data: Mapping[str, Any]) -> Any:
    """Return the checkpoint that the profile names, else the drawn model of the card; with adapters if it has them."""
    model = _load_checkpoint(data) if os.environ.get(MODEL) else _draw_model(data)
    return _add_adapters(data, model) if data["arch"].get("lora_rank") else model


def _load_checkpoint(data: Mapping[str, Any]) -> Any:
    """Return the checkpoint, quantised if the card says so."""
    arch, path, options = data["arch"], find_checkpoint(), {}
    if arch.get("base_precision"):
        four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
        kind = four if arch["base_precision"] == "nf4" else {"load_in_8bit": True}
        place = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
        options = {"quantization_config": BitsAndBytesConfig(**kind), "device_map": {"": place}}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=_base_dtype(data), attn_implementation="sdpa", **options)
    text = model.config.get_text_config()
    if (text.num_hidden_layers, text.hidden_size) != (arch["num_layers"], arch["hidden_size"]):
        raise IllegalConfig(
            f"the checkpoint {path} has {text.num_hidden_layers} layers of width {text.hidden_size}, but the card"
            f" {arch['num_layers']} of {arch['hidden_size']}"
        )
    return model


def _base_dtype(data: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of the weights in memory: frozen ones need no master copy."""
    return torch.bfloat16 if data["arch"].get("lora_rank") and data["precision"] == "bf16" else torch.float32


def _add_adapters(data: Mapping[str, Any], model: Any) -> Any:
    """Return the model with LoRA's adapters by PEFT, the same ones on every rank; only they are trained."""
    try:
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError:
        raise MissingRequirement("lora_rank needs peft: pip install 'ccl-search[hf]' where the trial runs") from None
    stage = int(data["config"].get("zero_stage", 0))
    if not data["arch"].get("base_precision"):
        model.to(_base_dtype(data))
    elif stage or not os.environ.get(MODEL):
        raise IllegalConfig(
            f"base_precision needs zero_stage 0, and a checkpoint: {MODEL} in the profile's environment"
        )
    torch.manual_seed(data["seed"])
    if data["config"].get("activation_checkpointing") == "full":
        model.enable_input_require_grads()
    # FSDP2 shards together only weights of one dtype
    return get_peft_model(model, LoraConfig(**describe_adapters(data["arch"])), autocast_adapter_dtype=stage == 0)


def _draw_model(data: Mapping[str, Any]) -> Any:
    """Return the model of the card's shape, of its family in transformers, with the drawn weights."""
    fields = describe_model(data)
    # loops over the experts: the other implementations hide the shapes of their products from traces
    how = {"attn_implementation": "sdpa", **({"experts_implementation": "eager"} if data["arch"].get("moe") else {})}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields, **how)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if config.model_type in ("llama", "mixtral"):
        _load(model, dict(_draw_weights(data)))
    else:
        _draw_all(model, Builder(data["arch"], Layout(0, tp=1, dp=1, pp=1, ep=1), data["seed"]))
    return model


def _draw_all(model: Any, build: Builder) -> None:
    """Draw every weight from its own name, set norms to 1 and biases to 0: the same model on every rank."""
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            weight.data.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            weight.data.copy_(build.draw(name, *weight.shape))


def _load(model: Any, weights: Mapping[str, Tensor]) -> None:
    own = dict(model.named_parameters())
    if set(own) != set(weights):
        different = ", ".join(sorted(set(own) ^ set(weights)))
        raise RuntimeError(f"this transformers names its weights otherwise: {different}")
    for name, weight in weights.items():
        own[name].data.copy_(weight)


def _draw_weights(data: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter's name in transformers, and its values."""
    arch = data["arch"]
    build = Builder(arch, Layout(0, tp=1, dp=1, pp=1, ep=1), data["seed"])
    hidden, vocab, norm = arch["hidden_size"], arch["vocab_size"], torch.ones(arch["hidden_size"])
    yield "model.embed_tokens.weight", build.draw("embedding", vocab, hidden)
    if not arch["tied_embeddings"]:
        yield "lm_head.weight", build.draw("head", vocab, hidden)
    yield "model.norm.weight", norm
    queries, keys = (arch[heads] * arch["head_dim"] for heads in ("num_heads", "num_kv_heads"))
    for index in range(arch["num_layers"]):
        ours, theirs = f"layer{index}", f"model.layers.{index}"
        yield f"{theirs}.input_layernorm.weight", norm
        yield f"{theirs}.post_attention_layernorm.weight", norm
        for part, size in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{theirs}.self_attn.{part}_proj.weight", build.draw(f"{ours}.attention.{part}", size, hidden)
        yield f"{theirs}.self_attn.o_proj.weight", build.draw(f"{ours}.attention.out", hidden, queries)
        yield from _draw_experts(build, ours, theirs) if arch.get("moe") else _draw_dense(build, ours, theirs)


def _draw_dense(build: Builder, ours: str, theirs: str) -> Iterator[tuple[str, Tensor]]:
    hidden, width = build.arch["hidden_size"], build.arch["intermediate_size"]
    for part in ("up", "gate"):
        yield f"{theirs}.mlp.{part}_proj.weight", build.draw(f"{ours}.ffn.{part}", width, hidden)
    yield f"{theirs}.mlp.down_proj.weight", build.draw(f"{ours}.ffn.down", hidden, width)


def _draw_experts(build: Builder, ours: str, theirs: str) -> Iterator[tuple[str, Tensor]]:
    moe, hidden = build.arch["moe"], build.arch["hidden_size"]
    width, experts = moe["expert_intermediate_size"], range(moe["num_experts"])
    yield f"{theirs}.mlp.gate.weight", build.draw(f"{ours}.moe.router", len(experts), hidden)
    into = torch.stack([build.draw(f"{ours}.moe.{e}.into", 2 * width, hidden) for e in experts])
    up, gate = into.chunk(2, dim=1)
    yield f"{theirs}.mlp.experts.gate_up_proj", torch.cat((gate, up), dim=1)
    down = [build.draw(f"{ours}.moe.{e}.out", hidden, width) for e in experts]
    yield f"{theirs}.mlp.experts.down_proj", torch.stack(down)


class Sequences(Dataset[dict[str, Tensor]]):
    """All sequences of a trial by their number in the data: those of step k are k x global batch and the following.

    `shift_labels` are the targets themselves: every one of a sequence's tokens is predicted, as in `cpu`.
    """

    def __init__(self, data: Mapping[str, Any], num_steps: int) -> None:
        self.data, self.batch, self.num_steps = data, int(data["global_batch_size"]), num_steps
        self.draw = lru_cache(maxsize=2)(lambda step, _: draw_sequences(data, step))

    def __len__(self) -> int:
        return self.batch * self.num_steps

    def __getitem__(self, number: int) -> dict[str, Any]:
        step, row = divmod(number, self.batch)
        tokens = self.draw(step, number_step(self.data, step))[row]
        return {"number": number, "input_ids": tokens[:-1], "labels": tokens[1:], "shift_labels": tokens[1:]}
