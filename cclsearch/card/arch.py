"""Counts the parameters and FLOP of a decoder-only transformer, and the tokens of a training step."""

from __future__ import annotations

from dataclasses import dataclass

from cclsearch.card.model import Card, ModelArch


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by part, without the norms of latent vectors and some biases (well under 1 %)."""

    attention: int
    """Projections of one layer."""
    dense_mlp: int
    """Feed-forward part of one dense layer."""
    experts: int
    """All routed experts of one MoE layer."""
    shared_experts: int
    """Shared experts of one MoE layer."""
    router: int
    active_experts: int
    """Routed experts of one MoE layer that one token uses."""
    norms: int
    """Norms and biases of one layer."""
    embedding: int
    head: int
    """Output projection; 0 if it is tied to the embedding."""
    dense_layers: int
    moe_layers: int

    @property
    def total(self) -> int:
        """Parameters of the whole model."""
        return self._layers(self.experts) + self.embedding + self.head

    @property
    def active(self) -> int:
        """Parameters that one token uses."""
        return self._layers(self.active_experts) + self.embedding + self.head

    def _layers(self, experts: int) -> int:
        layers = self.dense_layers + self.moe_layers
        moe = self.moe_layers * (experts + self.shared_experts + self.router)
        return layers * (self.attention + self.norms) + self.norms // 2 + self.dense_layers * self.dense_mlp + moe


def count_parts(arch: ModelArch) -> ParameterCount:
    """Return the parameters by part.

    Source: Narayanan et al. 2021 (Megatron-LM), section 2, extended to GQA, gated MLPs and mixtures of experts.
    """
    h, moe = arch.hidden_size, arch.moe
    matrices = 3 if arch.gated_mlp else 2
    layers = arch.num_layers + (arch.mtp_layers or 0)
    moe_layers = layers - min(moe.num_dense_layers, arch.num_layers) if moe else 0
    expert = matrices * h * moe.expert_intermediate_size if moe else 0
    return ParameterCount(
        attention=count_attention(arch),
        dense_mlp=matrices * h * arch.intermediate_size,
        experts=expert * moe.num_experts if moe else 0,
        shared_experts=expert * moe.num_shared_experts if moe else 0,
        router=h * moe.num_experts if moe else 0,
        active_experts=expert * moe.top_k if moe else 0,
        norms=_count_norms(arch),
        embedding=(arch.vocab_size + (arch.learned_positions or 0)) * h,
        head=0 if arch.tied_embeddings else arch.vocab_size * h,
        dense_layers=layers - moe_layers,
        moe_layers=moe_layers,
    )


def _count_norms(arch: ModelArch) -> int:
    h, queries, keys = arch.hidden_size, arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    norms = (4 if arch.post_norms else 2) * h + 2 * arch.head_dim * arch.qk_norm
    biases = (queries + 2 * keys) * (arch.qkv_bias or arch.linear_bias)
    return norms + biases + (2 * h + arch.intermediate_size) * arch.linear_bias


def count_attention(arch: ModelArch) -> int:
    """Return the parameters of one layer's projections of queries, keys, values and output.

    With latent attention as in DeepSeek-V2 (DeepSeek-AI 2024, section 2.1).
    """
    h, heads, value = arch.hidden_size, arch.num_heads, arch.v_head_dim or arch.head_dim
    if arch.kv_lora_rank is None:
        return h * (arch.head_dim * (heads + arch.num_kv_heads) + value * (heads + arch.num_kv_heads))
    rope = arch.qk_rope_head_dim or 0
    queries = heads * arch.head_dim
    queries = arch.q_lora_rank * (h + queries) if arch.q_lora_rank else h * queries
    latent = h * (arch.kv_lora_rank + rope) + arch.kv_lora_rank * heads * (arch.head_dim - rope + value)
    return queries + latent + heads * value * h


def score_width(arch: ModelArch) -> float:
    """Return the width of a layer's products with the attention matrix: heads x the mean head of keys and values."""
    return arch.num_heads * (arch.head_dim + (arch.v_head_dim or arch.head_dim)) / 2


def attention_span(arch: ModelArch, seq_len: int) -> float:
    """Return the tokens that a query meets, averaged over layers; S without windows, as causal masks are not counted.

    A windowed layer's queries meet W keys, and fewer at the start: as many as half of 2 W - W^2 / S without a mask.
    """
    window = min(arch.sliding_window or seq_len, seq_len)
    share = (arch.windowed_layers or arch.num_layers) / arch.num_layers
    return seq_len - share * (seq_len - window) ** 2 / seq_len


def count_parameters(arch: ModelArch) -> int:
    """Return the number of parameters of the whole model, with its adapters."""
    return count_parts(arch).total + count_adapters(arch)


def count_adapters(arch: ModelArch) -> int:
    """Return the parameters of LoRA (Hu et al. 2021, section 4.1): rank x (inputs + outputs) of each adapted matrix.

    Routed experts have none: libraries keep them in one tensor.
    """
    h, queries, keys = arch.hidden_size, arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    widths = arch.num_layers * (2 * (h + queries) + 2 * (h + keys))
    if arch.lora_targets != "attention":
        parts, matrices = count_parts(arch), 3 if arch.gated_mlp else 2
        shared = arch.moe.num_shared_experts * arch.moe.expert_intermediate_size if arch.moe else 0
        widths += matrices * parts.dense_layers * (h + arch.intermediate_size)
        widths += matrices * parts.moe_layers * (h + shared) * (shared > 0)
    return widths * (arch.lora_rank or 0)


def flops_per_token(arch: ModelArch, seq_len: int) -> float:
    """Return the training FLOP per token: 6 (N_active - N_input_embedding) + 12 L heads head_dim S.

    S is the span of windows. Frozen weights need no gradients: 4 N, and 6 N of the adapters.
    The output projection counts even if it is tied. Source: PaLM (Chowdhery et al. 2022), appendix B.
    """
    parts = count_parts(arch)
    matmul = parts.active - parts.embedding - parts.head + arch.vocab_size * arch.hidden_size
    trained = 4.0 * matmul + 6.0 * count_adapters(arch) if arch.lora_rank else 6.0 * matmul
    return trained + 12.0 * arch.num_layers * score_width(arch) * attention_span(arch, seq_len)


def tokens_per_step(card: Card) -> int:
    """Return the tokens of an optimizer step of training: global batch x sequence length."""
    return card.number("global_batch_size") * card.number("seq_len")
