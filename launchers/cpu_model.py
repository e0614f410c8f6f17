"""The decoder-only transformer of the `cpu` run script, with explicit tensor, pipeline and expert parallelism.

Every weight is drawn whole from its own seed and then sharded, so that all layouts train the same model. Shapes in
names and comments: B sequences, S tokens per sequence, T = B x S, H hidden, V vocabulary, E experts.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import IllegalConfig
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.profiler import record_function
from torch.utils.checkpoint import checkpoint
from unlike import cut_layers


@dataclass(frozen=True)
class Axis:
    """One parallel axis of this rank: its ranks in order, and the index of this rank."""

    name: str
    ranks: tuple[int, ...]
    index: int
    group: Any = None

    @property
    def size(self) -> int:
        return len(self.ranks)


class Layout:
    """The axes of one rank; `order` names the degrees over ranks, innermost first. `ep` groups are within a stage."""

    def __init__(self, rank: int, *, tp: int, dp: int, pp: int, ep: int, order: str = "tp-dp-pp") -> None:
        stage = tp * dp
        if stage % ep:
            raise IllegalConfig(f"ep must divide the {stage} ranks of a pipeline stage (dp x tp), but it is {ep}")
        size, stride, apart = {"tp": tp, "dp": dp, "pp": pp}, {}, 1
        if sorted(order.split("-")) != sorted(size):
            raise IllegalConfig(f"rank_order must name tp, dp and pp once each, not {order!r}")
        for name in order.split("-"):
            stride[name] = apart
            apart *= size[name]

        def along(name: str) -> list[range]:
            """The ranks of every group along a degree, one group for each choice of the others."""
            others = [range(0, size[other] * stride[other], stride[other]) for other in size if other != name]
            firsts = sorted(sum(choice) for choice in itertools.product(*others))
            return [range(first, first + size[name] * stride[name], stride[name]) for first in firsts]

        self.rank = rank
        inside = sorted(i * stride["tp"] + j * stride["dp"] for i in range(tp) for j in range(dp))
        stages = [[first + other for other in inside] for first in range(0, pp * stride["pp"], stride["pp"])]
        self.tp = self._axis("tp", along("tp"))
        self.dp = self._axis("dp", along("dp"))
        self.pp = self._axis("pp", along("pp"))
        self.ep = self._axis("ep", [ranks[i : i + ep] for ranks in stages for i in range(0, stage, ep)])
        self.edp = self._axis("edp", [ranks[i::ep] for ranks in stages for i in range(ep)])
        self.ends = self._axis("embedding", [sorted({ranks[0], ranks[-1]}) for ranks in along("pp")])

    @property
    def is_first(self) -> bool:
        return self.pp.index == 0

    @property
    def is_last(self) -> bool:
        return self.pp.index == self.pp.size - 1

    def _axis(self, name: str, groups: Sequence[Sequence[int]]) -> Axis:
        """Return this rank's axis; every rank creates every group in the same order, except groups of one rank."""
        own = Axis(name, (self.rank,), 0)
        for ranks in map(tuple, groups):
            group = dist.new_group(list(ranks), group_desc=f"mesh_{name}") if len(ranks) > 1 else None
            if self.rank in ranks:
                own = Axis(name, ranks, ranks.index(self.rank), group)
        return own


def all_reduce(axis: Axis, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """All-reduce in place over the axis; the collective is named in traces."""
    if axis.size > 1:
        with record_function(f"comm::{axis.name}::all_reduce"):
            dist.all_reduce(tensor, op=op, group=axis.group)
    return tensor


class _Copy(Function):
    """Identity forward, all-reduce backward: the input of a column-parallel layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(ctx.axis, grad.contiguous().clone()), None


class _Reduce(Function):
    """All-reduce forward, identity backward: the output of a row-parallel layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return all_reduce(axis, x.contiguous().clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _gather_rows(axis: Axis, x: Tensor) -> Tensor:
    whole = x.new_empty((x.shape[0] * axis.size, *x.shape[1:]))
    with record_function(f"comm::{axis.name}::all_gather"):
        dist.all_gather_into_tensor(whole, x.contiguous(), group=axis.group)
    return whole


class _Split(Function):
    """This rank's share of replicated rows forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.chunk(axis.size)[axis.index].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather_rows(ctx.axis, grad), None


class _Gather(Function):
    """All-gather of rows forward, this rank's share backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _gather_rows(axis, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.axis.size)[ctx.axis.index].clone(), None


def _exchange(axis: Axis, x: Tensor, received: list[int], sent: list[int]) -> Tensor:
    out = x.new_empty((sum(received), *x.shape[1:]))
    with record_function(f"comm::{axis.name}::all_to_all"):
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=axis.group)
    return out


class _AllToAll(Function):
    """Send `sent[i]` rows to the i-th rank of the axis; the reverse in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, received: list[int], sent: list[int]) -> Tensor:
        ctx.axis, ctx.received, ctx.sent = axis, received, sent
        return _exchange(axis, x, received, sent)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(ctx.axis, grad, ctx.sent, ctx.received), None, None, None


class _VocabParallelLoss(Function):
    """Mean cross-entropy over T tokens of logits sharded along the vocabulary (Megatron-LM's scheme)."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor, axis: Axis) -> Tensor:
        top_T = all_reduce(axis, logits_TV.max(dim=-1).values, dist.ReduceOp.MAX)
        exp_TV = (logits_TV - top_T[:, None]).exp_()
        total_T = all_reduce(axis, exp_TV.sum(dim=-1))
        local_T = targets_T - axis.index * logits_TV.shape[1]
        mine_T = (local_T >= 0) & (local_T < logits_TV.shape[1])
        local_T = local_T.clamp(0, logits_TV.shape[1] - 1)
        target_T = torch.where(mine_T, logits_TV.gather(1, local_T[:, None])[:, 0] - top_T, 0.0)
        all_reduce(axis, target_T)
        ctx.save_for_backward(exp_TV.div_(total_T[:, None]), local_T, mine_T)
        return (total_T.log() - target_T).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        probability_TV, local_T, mine_T = ctx.saved_tensors
        grad_TV = probability_TV.clone()
        grad_TV[torch.arange(len(local_T)), local_T] -= mine_T.to(grad_TV.dtype)
        return grad_TV.mul_(grad / len(local_T)), None, None


class Builder:
    """Draws weights and takes this rank's shard; counts each weight once over all ranks."""

    def __init__(self, arch: Mapping[str, Any], layout: Layout, seed: int) -> None:
        self.arch, self.layout, self.seed = arch, layout, seed
        self.num_params = 0

    def draw(self, name: str, *shape: int, std: float = 0.02, counted: bool = True, expert: bool = False) -> Tensor:
        """Return the whole weight, always the same for one name and seed."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + zlib.crc32(name.encode()))
        owner = self.layout.edp.index == 0 if expert else self.layout.tp.index == self.layout.dp.index == 0
        if counted and owner:
            self.num_params += torch.Size(shape).numel()
        return torch.randn(shape, generator=generator) * std

    def ones(self, size: int) -> nn.Parameter:
        if self.layout.tp.index == self.layout.dp.index == 0:
            self.num_params += size
        return nn.Parameter(torch.ones(size))

    def cut(self, whole: Tensor, dim: int = 0) -> Tensor:
        """Return this tensor-parallel rank's shard along `dim`."""
        tp = self.layout.tp
        if whole.shape[dim] % tp.size:
            raise IllegalConfig(f"tp must divide a width of {whole.shape[dim]}, but it is {tp.size}")
        return whole.chunk(tp.size, dim)[tp.index].clone()

    def vocabulary(self, name: str, counted: bool = True) -> nn.Parameter:
        """Return this rank's rows of a (V, H) table, padded to the same number for every tensor-parallel rank."""
        tp, vocab = self.layout.tp, self.arch["vocab_size"]
        rows = -(-vocab // tp.size)
        whole = self.draw(name, vocab, self.arch["hidden_size"], counted=counted)
        return nn.Parameter(F.pad(whole, (0, 0, 0, rows * tp.size - vocab)).chunk(tp.size)[tp.index].clone())


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, heads sharded over tensor-parallel ranks."""

    def __init__(self, build: Builder, name: str, selective: bool) -> None:
        super().__init__()
        arch, tp = build.arch, build.layout.tp
        if arch["num_heads"] % tp.size or arch["num_kv_heads"] % tp.size:
            heads = f"{arch['num_heads']} heads and {arch['num_kv_heads']} KV heads"
            raise IllegalConfig(f"tp must divide the {heads}, but it is {tp.size}")
        self.tp, self.selective, self.head_dim = tp, selective, arch["head_dim"]
        self.sizes = [arch[key] // tp.size * self.head_dim for key in ("num_heads", "num_kv_heads", "num_kv_heads")]
        hidden, q_size, kv_size = (
            arch["hidden_size"],
            arch["num_heads"] * self.head_dim,
            arch["num_kv_heads"] * self.head_dim,
        )
        parts = [build.cut(build.draw(f"{name}.{part}", size, hidden)) for part, size in
                 (("q", q_size), ("k", kv_size), ("v", kv_size))]  # fmt: skip
        self.qkv = nn.Parameter(torch.cat(parts))
        self.out = nn.Parameter(build.cut(build.draw(f"{name}.out", hidden, q_size), dim=1))

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        x = _Copy.apply(x, self.tp) if self.tp.size > 1 else x
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in F.linear(x, self.qkv).split(self.sizes, dim=-1)
        )
        if self.selective and torch.is_grad_enabled():
            mixed = checkpoint(_attend, q, k, v, rotary, use_reentrant=False)
        else:
            mixed = _attend(q, k, v, rotary)
        out = F.linear(mixed, self.out)
        return _Reduce.apply(out, self.tp) if self.tp.size > 1 else out


def _attend(q: Tensor, k: Tensor, v: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    q, k = _rotate(q, rotary).to(v.dtype), _rotate(k, rotary).to(v.dtype)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return mixed.transpose(1, 2).flatten(2)


def _rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def make_rotary(seq_len: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return (S, head_dim / 2) cosines and sines of the rotary embedding, base 10,000."""
    frequency = 10_000.0 ** (-torch.arange(0, head_dim, 2)[: head_dim // 2] / head_dim)
    angle = torch.arange(seq_len)[:, None] * frequency
    return angle.cos(), angle.sin()


class FeedForward(nn.Module):
    """A dense feed-forward block, its width sharded over tensor-parallel ranks."""

    def __init__(self, build: Builder, name: str, width: int) -> None:
        super().__init__()
        hidden, self.gated, self.tp = build.arch["hidden_size"], build.arch["gated_mlp"], build.layout.tp
        parts = [build.cut(build.draw(f"{name}.{part}", width, hidden)) for part in ("up", "gate")[: 1 + self.gated]]
        self.into = nn.Parameter(torch.cat(parts))
        self.out = nn.Parameter(build.cut(build.draw(f"{name}.down", hidden, width), dim=1))

    def forward(self, x: Tensor) -> Tensor:
        x = _Copy.apply(x, self.tp) if self.tp.size > 1 else x
        out = F.linear(_activate(F.linear(x, self.into), self.gated), self.out)
        return _Reduce.apply(out, self.tp) if self.tp.size > 1 else out


def _activate(x: Tensor, gated: bool) -> Tensor:
    if not gated:
        return F.gelu(x)
    up, gate = x.chunk(2, dim=-1)
    return up * F.silu(gate)


class MixtureOfExperts(nn.Module):
    """Top-k routed experts, dropless, distributed over the expert axis by all-to-all; shared experts are a dense block.

    Tokens that are replicated over tensor-parallel ranks are split among them first; experts are not sharded.
    """

    def __init__(self, build: Builder, name: str) -> None:
        super().__init__()
        moe, hidden, self.layout = build.arch["moe"], build.arch["hidden_size"], build.layout
        self.num_experts, self.top_k, self.gated = moe["num_experts"], moe["top_k"], build.arch["gated_mlp"]
        ep, width = self.layout.ep, moe["expert_intermediate_size"]
        if self.num_experts % ep.size:
            raise IllegalConfig(f"ep must divide the {self.num_experts} experts, but it is {ep.size}")
        self.router = nn.Parameter(build.draw(f"{name}.router", self.num_experts, hidden))
        share = self.num_experts // ep.size
        own = range(ep.index * share, (ep.index + 1) * share)
        into = [build.draw(f"{name}.{e}.into", (1 + self.gated) * width, hidden, expert=True) for e in own]
        out = [build.draw(f"{name}.{e}.out", hidden, width, expert=True) for e in own]
        self.into, self.out = nn.Parameter(torch.stack(into)), nn.Parameter(torch.stack(out))
        self.shared = FeedForward(build, f"{name}.shared", num * width) if (num := moe["num_shared_experts"]) else None

    def forward(self, x: Tensor) -> Tensor:
        tp, tokens_TH = self.layout.tp, x.flatten(0, 1)
        if len(tokens_TH) % tp.size:
            raise IllegalConfig(f"tp must divide the {len(tokens_TH)} tokens of a micro-batch, but it is {tp.size}")
        mine_TH = _Split.apply(tokens_TH, tp) if tp.size > 1 else tokens_TH
        routed_TH = self._route(mine_TH)
        routed_TH = _Gather.apply(routed_TH, tp) if tp.size > 1 else routed_TH
        routed = routed_TH.view_as(x)
        return routed if self.shared is None else routed + self.shared(x)

    def _route(self, tokens_TH: Tensor) -> Tensor:
        """Return (T, H): every token's top-k experts, weighted by their renormalized probabilities."""
        with record_function("moe::route"):
            weight_Tk, expert_Tk = F.linear(tokens_TH, self.router).float().softmax(-1).topk(self.top_k)
            weight_Tk = weight_Tk / weight_Tk.sum(-1, keepdim=True)
            order = expert_Tk.flatten().argsort(stable=True)
            count_E = expert_Tk.flatten().bincount(minlength=self.num_experts)
        source = order // self.top_k
        done = self._dispatch(tokens_TH[source], count_E)
        weighted = done * weight_Tk.flatten()[order][:, None].to(done.dtype)
        return torch.zeros_like(tokens_TH, dtype=weighted.dtype).index_add(0, source, weighted)

    def _dispatch(self, rows: Tensor, count_E: Tensor) -> Tensor:
        """Send rows, sorted by expert, to the ranks of their experts; return the results in the same order."""
        ep = self.layout.ep
        if ep.size == 1:
            return self._compute(rows, count_E.tolist())
        sent = count_E.view(ep.size, -1)
        received = _exchange(ep, sent, [1] * ep.size, [1] * ep.size)
        splits = received.sum(1).tolist(), sent.sum(1).tolist()
        got = _AllToAll.apply(rows, ep, *splits)
        local = torch.arange(sent.shape[1], device=rows.device).repeat(ep.size).repeat_interleave(received.flatten())
        by_expert = local.argsort(stable=True)
        done = self._compute(got[by_expert], received.sum(0).tolist())
        return _AllToAll.apply(done[by_expert.argsort()], ep, splits[1], splits[0])

    def _compute(self, rows: Tensor, counts: list[int]) -> Tensor:
        parts = [
            F.linear(_activate(F.linear(part, into), self.gated), out)
            for part, into, out in zip(rows.split(counts), self.into, self.out, strict=True)
        ]
        return torch.cat(parts)


class Layer(nn.Module):
    """One transformer layer: attention and feed-forward block, each with a norm before it and a residual around it."""

    def __init__(self, build: Builder, index: int, checkpointing: str) -> None:
        super().__init__()
        arch, name = build.arch, f"layer{index}"
        moe = arch.get("moe")
        self.norm_1, self.norm_2 = build.ones(arch["hidden_size"]), build.ones(arch["hidden_size"])
        self.attention = Attention(build, f"{name}.attention", checkpointing == "selective")
        dense = not moe or index < moe["num_dense_layers"]
        self.ffn = (
            FeedForward(build, f"{name}.ffn", arch["intermediate_size"])
            if dense
            else MixtureOfExperts(build, f"{name}.moe")
        )

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(F.rms_norm(x, x.shape[-1:], self.norm_1), rotary)
        return x + self.ffn(F.rms_norm(x, x.shape[-1:], self.norm_2))


class Stage(nn.Module):
    """This rank's pipeline stage: its layers; the embedding on the first stage; norm, head and loss on the last."""

    def __init__(
        self,
        arch: Mapping[str, Any],
        layout: Layout,
        *,
        seq_len: int,
        seed: int,
        checkpointing: str,
        stage_layers: Sequence[int] = (),
    ) -> None:
        """`stage_layers` are the layers of each stage; empty: as near to equal as possible."""
        super().__init__()
        build = Builder(arch, layout, seed)
        self.arch, self.layout, self.checkpointing = arch, layout, checkpointing
        pp, tied = layout.pp, arch["tied_embeddings"]
        if arch["num_layers"] < pp.size:
            raise IllegalConfig(f"pp must be at most the {arch['num_layers']} layers, but it is {pp.size}")
        self.embedding = build.vocabulary("embedding") if layout.is_first else None
        own = cut_layers(arch["num_layers"], pp.size, stage_layers)[pp.index]
        self.layers = nn.ModuleList(Layer(build, index, checkpointing) for index in own)
        self.norm = build.ones(arch["hidden_size"]) if layout.is_last else None
        self.head = None
        if layout.is_last and not (tied and layout.is_first):
            self.head = build.vocabulary("embedding" if tied else "head", counted=not tied)
        for name, values in zip(("cos", "sin"), make_rotary(seq_len, arch["head_dim"]), strict=True):
            self.register_buffer(name, values, persistent=False)
        self.num_params = build.num_params

    def forward(self, x: Tensor, targets_BS: Tensor) -> Tensor:
        """Return hidden states for the next stage, or the mean loss on the last. `x` is tokens (B, S) on the first."""
        hidden = self._embed(x) if self.layout.is_first else x
        rotary = self.cos, self.sin
        for layer in self.layers:
            if self.checkpointing == "full":
                hidden = checkpoint(layer, hidden, rotary, use_reentrant=False)
            else:
                hidden = layer(hidden, rotary)
        return self._loss(hidden, targets_BS.flatten()) if self.layout.is_last else hidden

    def _embed(self, tokens_BS: Tensor) -> Tensor:
        tp, table = self.layout.tp, self.embedding
        if tp.size == 1:
            return F.embedding(tokens_BS, table)
        local = tokens_BS - tp.index * len(table)
        mine = (local >= 0) & (local < len(table))
        rows = F.embedding(local.clamp(0, len(table) - 1), table) * mine[..., None]
        return _Reduce.apply(rows, tp)

    def _loss(self, hidden: Tensor, targets_T: Tensor) -> Tensor:
        tp, table = self.layout.tp, self.embedding if self.head is None else self.head
        hidden = F.rms_norm(hidden, hidden.shape[-1:], self.norm).flatten(0, 1)
        if tp.size == 1:
            return F.cross_entropy(F.linear(hidden, table).float(), targets_T)
        logits_TV = F.linear(_Copy.apply(hidden, tp), table).float()
        padding = max(0, (tp.index + 1) * len(table) - self.arch["vocab_size"])
        if padding:
            rows = torch.arange(len(table), device=table.device)
            logits_TV = logits_TV.masked_fill(rows >= len(table) - padding, float("-inf"))
        return _VocabParallelLoss.apply(logits_TV, targets_T, tp)
