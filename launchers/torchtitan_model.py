"""Builds the trial's model and synthetic data for torchtitan's `--module torchtitan_model --config make_config`.

Layers come from torchtitan 0.3's own builders: its Llama 3 for dense models whose heads together have the hidden size,
its Qwen3 for other dense models and for mixtures of experts, with torchtitan's shared experts if the card has any.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from common import IllegalConfig, number_sequences, read_trial
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.data import IterableDataset
from torchtitan.components import quantization
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models import llama3, qwen3
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import decoder_vocab_size, make_ffn_config
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

QUANTIZED = {
    "fp8": partial(quantization.Float8LinearConverter.Config, filter_fqns=["lm_head"]),
    "mxfp8": partial(quantization.MXFP8LinearConverter.Config, fqns=["layers"]),
    "nvfp4": partial(quantization.NVFP4LinearConverter.Config, fqns=["layers"]),
}
"""Precision -> torchtitan's conversion of the linear layers of all blocks."""


class TokenRule(IterableDataset):
    """Endless sequences of a noisy pattern that a model can learn: those of one data-parallel rank.

    Each sequence is drawn from its number in the whole data, so that a global batch is the same for every layout.
    """

    def __init__(self, vocab_size: int, seq_len: int, seed: int, *, global_batch: int, rank: int, ranks: int) -> None:
        self.vocab_size, self.seq_len, self.seed = vocab_size, seq_len, seed
        self.global_batch, self.rank, self.ranks = global_batch, rank, ranks

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        positions = torch.arange(self.seq_len)
        for number in number_sequences(self.global_batch, rank=self.rank, ranks=self.ranks):
            tokens = self.draw(number)
            yield {"input": tokens[:-1], "positions": positions}, tokens[1:]

    def draw(self, number: int) -> torch.Tensor:
        """Return the (S + 1,) tokens of the sequence with that number."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        noise = torch.randint(0, 3, (self.seq_len + 1,), generator=generator)
        noise[0] = torch.randint(0, self.vocab_size, (), generator=generator)
        return noise.cumsum(0) % self.vocab_size


class SyntheticLoader(ParallelAwareDataloader):
    """torchtitan's loader over `TokenRule`."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        vocab_size: int = 0
        seed: int = 0
        global_batch: int = 0

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **kwargs: Any
    ) -> None:
        batch = {"global_batch": config.global_batch, "rank": dp_rank, "ranks": dp_world_size}
        data = TokenRule(config.vocab_size, seq_len, config.seed, **batch)
        super().__init__(data, dp_rank=dp_rank, dp_world_size=dp_world_size, batch_size=local_batch_size)


class NoTokenizer(BaseTokenizer):
    """A tokenizer that does nothing: the tokens are synthetic."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        return []

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 0


def draw_weights(parts: Iterable[nn.Module], seed: int) -> None:
    """Initialize every weight again, each drawn whole from a seed of its own and then sharded.

    torchtitan seeds each pipeline stage differently and draws weights in order, so that its own depend on the layout.
    """
    for part in parts:
        for path, module in part.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                initialize = (getattr(module, "_param_init", None) or {}).get(name, skip_param_init)
                if initialize is not skip_param_init:
                    _draw(parameter, initialize, seed * 1_000_003 + zlib.crc32(f"{_plain(path)}.{name}".encode()))


def _draw(parameter: nn.Parameter, initialize: Callable[[torch.Tensor], Any], seed: int) -> None:
    devices = [parameter.device] if parameter.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        initialize(whole)
        if not isinstance(parameter, DTensor):
            parameter.copy_(whole)
            return
        # the shards as DTensor cuts them, also of a dimension that both FSDP and tensor parallelism shard
        shard = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(shard.to_local())


def _plain(path: str) -> str:
    """Return a module's path without the wrappers of activation checkpointing and torch.compile."""
    return ".".join(part for part in path.split(".") if part not in ("_checkpoint_wrapped_module", "_orig_mod"))


def count_parameters(trainer: Trainer) -> int:
    """Return the parameters of this rank's pipeline stage; 0 on all but one of the ranks that hold it."""
    stages = trainer.parallel_dims.pp
    ranks_of_a_stage = torch.distributed.get_world_size() // stages
    if torch.distributed.get_rank() % ranks_of_a_stage:  # the pipeline is the outermost axis of torchtitan's mesh
        return 0
    return sum({id(p): p.numel() for part in trainer.model_parts for p in part.parameters()}.values())


def make_config() -> Trainer.Config:
    """Return the trainer's configuration for the trial that the environment names; options add the rest."""
    data = read_trial().data
    spec = make_spec(data["arch"], data["seq_len"])
    if data["precision"] in QUANTIZED:
        converter = QUANTIZED[data["precision"]](model_compile_enabled=data["config"].get("compile", True))
        spec.model = converter.build().convert(spec.model)
    return Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),
        tokenizer=NoTokenizer.Config(),
        dataloader=SyntheticLoader.Config(
            vocab_size=data["arch"]["vocab_size"], seed=data["seed"], global_batch=data["global_batch_size"]
        ),
        optimizer=default_adamw(lr=1e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(enable=False),
    )


def make_spec(arch: Mapping[str, Any], seq_len: int) -> ModelSpec:
    """Return torchtitan's specification of the card's model: Llama 3 if heads have the hidden size, else Qwen3."""
    if not arch["gated_mlp"]:
        raise IllegalConfig("torchtitan's Llama 3 and Qwen3 are gated (SwiGLU), but the card's model is not")
    is_llama = arch["head_dim"] * arch["num_heads"] == arch["hidden_size"]
    is_llama = is_llama and not (arch.get("moe") or arch.get("qk_norm"))
    library = llama3 if is_llama else qwen3
    hidden, vocab, tied = arch["hidden_size"], arch["vocab_size"], arch["tied_embeddings"]
    make_model, make_layers = (llama3.Llama3Model, _llama_layers) if is_llama else (qwen3.Qwen3Model, _qwen_layers)
    model = make_model.Config(
        layers=make_layers(arch, seq_len),
        dim=hidden,
        vocab_size=vocab,
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocab,
            embedding_dim=hidden,
            # a tied embedding is the head's weight, which the head initializes
            param_init=library._EMBEDDING_SKIP_INIT if tied else library._EMBEDDING_INIT,
        ),
        norm=RMSNorm.Config(normalized_shape=hidden, param_init=library._NORM_INIT),
        lm_head=Linear.Config(
            in_features=hidden,
            out_features=vocab,
            param_init=llama3._output_linear_init(hidden) if is_llama else qwen3._LINEAR_INIT,
        ),
    )
    template = library.model_registry("debugmodel")
    return ModelSpec(
        name=template.name,
        flavor="card",
        model=model,
        parallelize_fn=template.parallelize_fn,
        pipelining_fn=template.pipelining_fn,
        post_optimizer_build_fn=template.post_optimizer_build_fn,
        state_dict_adapter=template.state_dict_adapter,
    )


def _llama_layers(arch: Mapping[str, Any], seq_len: int) -> list[Any]:
    rope = ComplexRoPE.Config(dim=arch["head_dim"], max_seq_len=max(seq_len, 131072), theta=500000, scaling="llama")
    return list(
        llama3._build_llama3_layers(
            n_layers=arch["num_layers"],
            dim=arch["hidden_size"],
            n_heads=arch["num_heads"],
            n_kv_heads=arch["num_kv_heads"],
            hidden_dim=arch["intermediate_size"],
            rope=rope,
            attn_backend="flex",
        )
    )


def _qwen_layers(arch: Mapping[str, Any], seq_len: int) -> list[Any]:
    """Return dense layers, then expert layers; shared experts are one feed-forward block of their total width."""
    moe, num = arch.get("moe"), arch["num_layers"]
    shape = {
        "dim": arch["hidden_size"],
        "n_heads": arch["num_heads"],
        "n_kv_heads": arch["num_kv_heads"],
        "head_dim": arch["head_dim"],
        "attn_backend": "flex",
        "rope": CosSinRoPE.Config(dim=arch["head_dim"], max_seq_len=max(seq_len, 40960), theta=1000000.0),
    }
    dense = moe["num_dense_layers"] if moe else num
    layers = qwen3._build_qwen3_layers(n_layers=dense, hidden_dim=arch["intermediate_size"], **shape)
    if moe is None:
        return list(layers)
    sparse = qwen3._build_qwen3_moe_layers(
        n_layers=num - dense,
        moe_hidden_dim=moe["expert_intermediate_size"],
        num_experts=moe["num_experts"],
        top_k=moe["top_k"],
        moe_comm_backend="standard",
        **shape,
    )
    if moe["num_shared_experts"]:
        for layer in sparse:
            layer.moe.shared_experts = make_ffn_config(
                dim=arch["hidden_size"],
                hidden_dim=moe["num_shared_experts"] * moe["expert_intermediate_size"],
                w1_param_init=qwen3._LINEAR_INIT,
                w2w3_param_init=qwen3._LINEAR_INIT,
            )
    return [*layers, *sparse]
