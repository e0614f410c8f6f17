"""A dense transformer over a paged KV cache, in fp32 on CPU: the model of the small server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """Successive tokens of one sequence that a step computes: from position `start`, into its blocks."""

    owner: Any
    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]


class PagedModel:
    """Weights drawn from a seed, and `num_blocks` blocks of keys and values for each layer."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        arch = self.arch = options["arch"]
        self.block_size = int(options["block_size"])
        self.heads, self.kv_heads, self.head_dim = arch["num_heads"], arch["num_kv_heads"], arch["head_dim"]
        self.generator = torch.Generator().manual_seed(options["seed"])
        self.num_params = 0
        hidden, width = arch["hidden_size"], arch["intermediate_size"]
        gated = arch.get("gated_mlp", True)
        self.qkv_sizes = [heads * self.head_dim for heads in (self.heads, self.kv_heads, self.kv_heads)]
        self.embedding = self._draw(arch["vocab_size"], hidden)
        self.layers = [
            {
                "norm_1": self._ones(hidden),
                "qkv": self._draw(sum(self.qkv_sizes), hidden),
                "out": self._draw(hidden, self.qkv_sizes[0]),
                "norm_2": self._ones(hidden),
                "up": self._draw((2 if gated else 1) * width, hidden),
                "down": self._draw(hidden, width),
            }
            for _ in range(arch["num_layers"])
        ]
        self.is_gated = gated
        self.norm = self._ones(hidden)
        self.head = self.embedding if arch["tied_embeddings"] else self._draw(arch["vocab_size"], hidden)
        self.cos, self.sin = _make_rotary(options["max_len"] + 1, self.head_dim)
        token_bytes = 2 * 4 * arch["num_layers"] * self.kv_heads * self.head_dim
        self.num_blocks = int(options["kv_cache_mib"]) * 2**20 // token_bytes // self.block_size
        self.batch_bucket, self.context_bucket = options.get("batch_bucket", 1), options.get("context_bucket", 1)
        # one block more than sequences get: padding writes there
        shape = (arch["num_layers"], 2, self.num_blocks + 1, self.block_size, self.kv_heads, self.head_dim)
        self.cache = torch.zeros(shape)

    def _draw(self, *shape: int) -> Tensor:
        self.num_params += torch.Size(shape).numel()
        return torch.randn(shape, generator=self.generator) * 0.05

    def _ones(self, size: int) -> Tensor:
        self.num_params += size
        return torch.ones(size)

    def forward(self, chunks: Sequence[Chunk]) -> list[int]:
        """Compute the chunks' tokens into the cache; returns the most probable next token after each chunk.

        The sequences with one token are padded to a multiple of `batch_bucket`, as a static graph computes them.
        """
        real = len(chunks)
        padding = -sum(len(chunk.tokens) == 1 for chunk in chunks) % self.batch_bucket
        chunks = [*chunks, *[Chunk(None, [0], 0, [self.num_blocks])] * padding]
        tokens = torch.tensor([token for chunk in chunks for token in chunk.tokens])
        positions = torch.cat([torch.arange(c.start, c.start + len(c.tokens)) for c in chunks])
        blocks = torch.cat([self._find_blocks(chunk) for chunk in chunks])
        decodes = [n for n, chunk in enumerate(chunks) if len(chunk.tokens) == 1]
        ends = torch.tensor([len(chunk.tokens) for chunk in chunks]).cumsum(0)
        table, mask = self._pad(chunks, decodes)
        x = F.embedding(tokens, self.embedding)
        rotary = self.cos[positions][:, None], self.sin[positions][:, None]
        for layer, cache in zip(self.layers, self.cache, strict=True):
            normed = F.rms_norm(x, x.shape[-1:], layer["norm_1"])
            q, k, v = (
                part.unflatten(-1, (-1, self.head_dim))
                for part in F.linear(normed, layer["qkv"]).split(self.qkv_sizes, dim=-1)
            )
            q, k = _rotate(q, rotary), _rotate(k, rotary)
            cache[0, blocks, positions % self.block_size] = k
            cache[1, blocks, positions % self.block_size] = v
            mixed = torch.empty_like(q)
            if decodes:
                rows = ends[decodes] - 1
                mixed[rows] = self._attend_one(q[rows], cache, table, mask)
            for n, chunk in enumerate(chunks):
                if len(chunk.tokens) > 1:
                    end = int(ends[n])
                    start = end - len(chunk.tokens)
                    mixed[start:end] = self._attend_many(q[start:end], cache, chunk)
            x = x + F.linear(mixed.flatten(1), layer["out"])
            inner = F.linear(F.rms_norm(x, x.shape[-1:], layer["norm_2"]), layer["up"])
            if self.is_gated:
                gate, up = inner.chunk(2, dim=-1)
                inner = F.silu(gate) * up
            else:
                inner = F.gelu(inner)
            x = x + F.linear(inner, layer["down"])
        last = F.rms_norm(x[ends - 1], x.shape[-1:], self.norm)
        chosen: list[int] = F.linear(last, self.head).argmax(-1).tolist()
        return chosen[:real]

    def _find_blocks(self, chunk: Chunk) -> Tensor:
        """Return the block of each token of a chunk."""
        positions = torch.arange(chunk.start, chunk.start + len(chunk.tokens))
        return torch.tensor(chunk.blocks)[positions // self.block_size]

    def _pad(self, chunks: Sequence[Chunk], decodes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the (B, blocks) table of sequences with one token each, and the (B, 1, 1, tokens) mask."""
        if not decodes:
            return torch.empty(0), torch.empty(0)
        used = [chunks[n].start // self.block_size + 1 for n in decodes]
        most = -(-max(used) * self.block_size // self.context_bucket) * self.context_bucket
        most = -(-most // self.block_size)  # keys of so many blocks are read for every sequence
        table = torch.tensor([[*chunks[n].blocks[:u], *[0] * (most - u)] for n, u in zip(decodes, used, strict=True)])
        lengths = torch.tensor([chunks[n].start + 1 for n in decodes])
        mask = torch.arange(most * self.block_size)[None] < lengths[:, None]
        return table, mask[:, None, None]

    def _attend_one(self, q: Tensor, cache: Tensor, table: Tensor, mask: Tensor) -> Tensor:
        """Attention of one token of each of several sequences."""
        k, v = (cache[side][table].flatten(1, 2).transpose(1, 2) for side in (0, 1))
        mixed = F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=mask, enable_gqa=True)
        return mixed[:, :, 0]

    def _attend_many(self, q: Tensor, cache: Tensor, chunk: Chunk) -> Tensor:
        """Attention of the successive tokens of one sequence to all before them and to themselves."""
        length = chunk.start + len(chunk.tokens)
        table = torch.tensor(chunk.blocks[: -(-length // self.block_size)])
        k, v = (cache[side][table].flatten(0, 1)[:length].transpose(0, 1)[None] for side in (0, 1))
        mask = torch.ones(len(chunk.tokens), length, dtype=torch.bool).tril(chunk.start)
        mixed = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, attn_mask=mask, enable_gqa=True)
        return mixed[0].transpose(0, 1)


def _make_rotary(length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    frequency = 10_000.0 ** (-torch.arange(0, head_dim, 2)[: head_dim // 2] / head_dim)
    angle = torch.arange(length)[:, None] * frequency
    return angle.cos(), angle.sin()


def _rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
