"""The decoder-only transformer of the `jax-cpu` run script, sharded over a mesh of devices.

Every weight is drawn whole from its own seed and then sharded, so that all layouts train the same model. Shapes in
names: B sequences, S tokens per sequence, N query heads, G KV heads, D head size, E experts.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from math import prod
from typing import Any

from common import IllegalConfig, Trial


def make_mesh(trial: Trial) -> Any:
    """Return the mesh with axes `data`, `expert`, `tensor`; experts are distributed over a part of the data axis."""
    import jax

    dp, ep, tp = (trial.degree(knob) for knob in ("dp", "ep", "tp"))
    if trial.degree("pp") != 1:
        raise IllegalConfig(f"this script has no pipeline parallelism: pp must be 1, but it is {trial.degree('pp')}")
    if dp % ep:
        raise IllegalConfig(f"ep must divide dp = {dp}, but it is {ep}")
    devices = jax.devices()
    if len(devices) != trial.data["num_ranks"]:
        raise IllegalConfig(f"the trial needs {trial.data['num_ranks']} devices, but there are {len(devices)}")
    import numpy as np

    order = str(trial.config.get("rank_order", "tp-dp"))
    if order not in ("tp-dp", "dp-tp"):
        raise IllegalConfig(f"rank_order must be tp-dp or dp-tp, not {order!r}")
    grid = np.array(devices)
    inside = grid.reshape(dp // ep, ep, tp) if order == "tp-dp" else grid.reshape(tp, dp // ep, ep).transpose(1, 2, 0)
    return jax.sharding.Mesh(inside, ("data", "expert", "tensor"))


class Model:
    """The weights, their sharding over the mesh, and the loss."""

    def __init__(self, trial: Trial, mesh: Any) -> None:
        self.trial, self.arch, self.mesh = trial, trial.data["arch"], mesh
        self.remat = trial.config.get("activation_checkpointing", "none") == "full"
        self.specs = self._specify()

    def _specify(self) -> dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]:
        """Return name -> (shape, mesh axis of each dimension)."""
        a = self.arch
        hidden, q_size, kv_size = a["hidden_size"], a["num_heads"] * a["head_dim"], a["num_kv_heads"] * a["head_dim"]
        specs: dict[str, Any] = {
            "embedding": ((a["vocab_size"], hidden), (None, "tensor")),
            "norm": ((hidden,), (None,)),
        }
        if not a["tied_embeddings"]:
            specs["head"] = ((a["vocab_size"], hidden), (None, "tensor"))
        for i in range(a["num_layers"]):
            layer = {
                "norm_1": ((hidden,), (None,)),
                "norm_2": ((hidden,), (None,)),
                "q": ((hidden, q_size), (None, "tensor")),
                "k": ((hidden, kv_size), (None, "tensor")),
                "v": ((hidden, kv_size), (None, "tensor")),
                "out": ((q_size, hidden), ("tensor", None)),
                **self._specify_ffn(i),
            }
            specs |= {f"layer{i}.{name}": spec for name, spec in layer.items()}
        return specs

    def _specify_ffn(self, index: int) -> dict[str, Any]:
        a, moe, gated = self.arch, self.arch.get("moe"), self.arch["gated_mlp"]
        hidden = a["hidden_size"]

        def dense(prefix: str, width: int) -> dict[str, Any]:
            into = {f"{prefix}up": ((hidden, width), (None, "tensor"))}
            if gated:
                into[f"{prefix}gate"] = ((hidden, width), (None, "tensor"))
            return into | {f"{prefix}down": ((width, hidden), ("tensor", None))}

        if not moe or index < moe["num_dense_layers"]:
            return dense("", a["intermediate_size"])
        num, width = moe["num_experts"], moe["expert_intermediate_size"]
        specs: dict[str, Any] = {
            "router": ((hidden, num), (None, None)),
            "expert_up": ((num, hidden, width), ("expert", None, "tensor")),
            "expert_down": ((num, width, hidden), ("expert", "tensor", None)),
        }
        if gated:
            specs["expert_gate"] = ((num, hidden, width), ("expert", None, "tensor"))
        return specs | (dense("shared_", moe["num_shared_experts"] * width) if moe["num_shared_experts"] else {})

    @property
    def num_params(self) -> int:
        return sum(prod(shape) for shape, _ in self.specs.values())

    def sharding(self, spec: tuple[str | tuple[str, ...] | None, ...]) -> Any:
        from jax.sharding import NamedSharding, PartitionSpec

        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def draw_weights(self) -> dict[str, Any]:
        """Return every weight, drawn from its own seed and sharded over the mesh: the same model in every layout."""
        import jax
        import numpy as np

        weights = {}
        for name, (shape, spec) in self.specs.items():
            if "norm" in name:
                whole = np.ones(shape, np.float32)
            else:
                seed = self.trial.data["seed"] * 1_000_003 + zlib.crc32(name.encode())
                whole = np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(0.02)
            weights[name] = jax.make_array_from_callback(shape, self.sharding(spec), whole.__getitem__)
        return weights

    def loss(self, weights: Mapping[str, Any], tokens_BS: Any) -> Any:
        """Return the mean cross-entropy of the next token."""
        import jax
        import jax.numpy as jnp

        x = weights["embedding"][tokens_BS[:, :-1]]
        for i in range(self.arch["num_layers"]):
            own = {k.split(".", 1)[1]: w for k, w in weights.items() if k.startswith(f"layer{i}.")}
            layer = jax.checkpoint(self._layer) if self.remat else self._layer
            x = layer(x, own)
        x = _norm(x, weights["norm"])
        logits = (x @ weights.get("head", weights["embedding"]).T).astype(jnp.float32)
        targets = tokens_BS[:, 1:]
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
        return -picked.mean()

    def _layer(self, x: Any, w: Mapping[str, Any]) -> Any:
        import jax

        with jax.named_scope("attention"):
            x = x + self._attend(_norm(x, w["norm_1"]), w)
        with jax.named_scope("feed_forward"):
            h = _norm(x, w["norm_2"])
            return x + (self._route(h, w) if "router" in w else self._dense(h, w, ""))

    def _attend(self, x: Any, w: Mapping[str, Any]) -> Any:
        import jax.numpy as jnp

        size = self.arch["head_dim"]
        q, k, v = (jnp.reshape(x @ w[name], (*x.shape[:2], -1, size)) for name in ("q", "k", "v"))
        attend = _attend_in_groups if self.trial.config.get("attention") == "grouped" else _attend_by_library
        mixed = attend(_rotate(q).astype(v.dtype), _rotate(k).astype(v.dtype), v)
        return mixed.reshape(*x.shape[:2], -1) @ w["out"]

    def _dense(self, x: Any, w: Mapping[str, Any], prefix: str) -> Any:
        import jax

        up = x @ w[f"{prefix}up"]
        inner = _gate(up, x @ w[f"{prefix}gate"]) if self.arch["gated_mlp"] else jax.nn.gelu(up)
        return inner @ w[f"{prefix}down"]

    def _route(self, x: Any, w: Mapping[str, Any]) -> Any:
        """Apply the experts, weighted by the renormalized top-k probabilities: every one to every token."""
        import jax
        import jax.numpy as jnp

        activate = _gate if self.arch["gated_mlp"] else jax.nn.gelu
        inward = [w[name] for name in ("expert_up", "expert_gate") if name in w]

        probability = jax.nn.softmax((x @ w["router"]).astype(jnp.float32))
        top, index = jax.lax.top_k(probability, self.arch["moe"]["top_k"])
        top = top / top.sum(-1, keepdims=True)
        weight_BSE = (jax.nn.one_hot(index, probability.shape[-1]) * top[..., None]).sum(-2).astype(x.dtype)
        inner = activate(*(jnp.einsum("bsh,ehf->ebsf", x, weight) for weight in inward))
        done = jnp.einsum("ebsf,efh,bse->bsh", inner, w["expert_down"], weight_BSE)
        return done + self._dense(x, w, "shared_") if "shared_up" in w else done


def _gate(up: Any, gate: Any) -> Any:
    import jax

    return up * jax.nn.silu(gate)


def _attend_by_library(q_BSND: Any, k_BSGD: Any, v_BSGD: Any) -> Any:
    import jax

    return jax.nn.dot_product_attention(q_BSND, k_BSGD, v_BSGD, is_causal=True)


def _attend_in_groups(q_BSND: Any, k_BSGD: Any, v_BSGD: Any) -> Any:
    """The same, with the query heads of a KV head as rows of one product: fewer and larger products."""
    import jax
    import jax.numpy as jnp

    batch, length, heads, size = q_BSND.shape
    groups = k_BSGD.shape[2]
    rows = q_BSND.reshape(batch, length, groups, heads // groups, size).transpose(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, groups, -1, size)
    k_BGSD, v_BGSD = (x.transpose(0, 2, 1, 3) for x in (k_BSGD, v_BSGD))
    scores = jnp.einsum("bgrd,bgsd->bgrs", rows, k_BGSD, preferred_element_type=jnp.float32) * size**-0.5
    seen = jnp.tile(jnp.tril(jnp.ones((length, length), bool)), (heads // groups, 1))
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30)).astype(v_BSGD.dtype)
    mixed = jnp.einsum("bgrs,bgsd->bgrd", weights, v_BGSD).reshape(batch, groups, heads // groups, length, size)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(q_BSND.shape)


def _norm(x: Any, weight: Any) -> Any:
    import jax

    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def _rotate(x: Any) -> Any:
    import jax.numpy as jnp

    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * 10_000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
