"""Rules on degrees of parallelism, accelerators and the model, for any task that shards a model."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cclsearch.card.model import Card
from cclsearch.space.knobs import named_degrees, rank_degrees, stated_knobs
from cclsearch.space.numbers import find_number
from cclsearch.space.rule import Clause, Counts, Rule, RuleKind, register_rule


@register_rule("num_accelerators", rank_degrees, needs=(), kind=RuleKind.ASKED)
def _num_accelerators(card: Card, options: Mapping[str, Any]) -> Clause:
    total, fewer = card.hardware.num_accelerators, bool(options.get("use_fewer"))
    present = options.get("knobs", ())
    degrees = named_degrees(present)
    named = " x ".join(stated_knobs(degrees, present))
    return (
        f"{named} is {'at most ' if fewer else ''}{total}, the number of accelerators",
        lambda at: at.product(degrees) <= total if fewer else at.product(degrees) == total,
        lambda c: f"{c.describe(degrees)} is {c.product(degrees)} of {total} accelerators",
    )


@register_rule("divides", parameters={"name": str, "knobs": list, "number": str, "because": str})
def _divides(card: Card, options: Mapping[str, Any]) -> Rule:
    """The product of some knobs divides a number of the card (`heads`, `layers`, `accelerators_per_node`, ...)."""
    knobs, number = tuple(options["knobs"]), find_number(card, options["number"])
    named, what = " x ".join(knobs), f"{number} ({options['number'].replace('_', ' ')})"
    because = f": {options['because']}" if options.get("because") else ""
    return Rule(
        str(options["name"]),
        knobs,
        f"{named} divides {what}{because}",
        lambda at: number % at.product(knobs) == 0,
        lambda c: f"{what} / ({Counts(c).describe(knobs)}) = {number / Counts(c).product(knobs):g}",
        needs=knobs,
    )


def register_divides(name: str, degree: str, read: Callable[[Card], int], what: str) -> None:
    """Register the rule `name`: the degree divides a number of the card; `what` names that number."""

    @register_rule(name, degree)
    def _divides_number(card: Card, options: Mapping[str, Any]) -> Clause:
        number = read(card)
        return (
            f"{degree} divides the {number} {what}",
            lambda at: number % at[degree] == 0,
            lambda c: f"{number} {what} / {degree} {c[degree]} = {number / c[degree]:g}",
        )


register_divides("tp_divides_heads", "tp", lambda card: card.arch.num_heads, "attention heads")


@register_rule("tp_divides_kv_heads", "tp", parameters={"shared_since": str})
def _tp_divides_kv_heads(card: Card, options: Mapping[str, Any]) -> Clause:
    """`shared_since: 0.16`: since that version of the framework, also if none is stated, ranks may share a KV head."""
    number, since = card.arch.num_kv_heads, options.get("shared_since")
    shared = since and (read_version(card.framework_version) or (math.inf,)) >= read_version(since)
    return (
        f"tp divides the {number} KV heads{', or is a multiple of them' if shared else ''}",
        lambda at: (number % at["tp"] == 0) | (bool(shared) & (at["tp"] % number == 0)),
        lambda c: f"{number} KV heads / tp {c['tp']} = {number / c['tp']:g}",
    )


def read_version(text: str) -> tuple[int, ...]:
    """The numbers of a version, to compare: (0, 16, 0) of `core_r0.16.0rc1`; () without one (`main`)."""
    match = re.search(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()


@register_rule("tp_divides_widths", "tp", parameters={"experts": bool})
def _tp_divides_widths(card: Card, options: Mapping[str, Any]) -> Clause:
    """`experts: true` if tensor parallelism shards the routed experts too."""
    arch = card.arch
    widths = {"hidden size": arch.hidden_size, "feed-forward width": arch.intermediate_size}
    if arch.moe is not None and arch.moe.num_shared_experts:
        widths["width of the shared experts"] = arch.moe.num_shared_experts * arch.moe.expert_intermediate_size
    if arch.moe is not None and options.get("experts"):
        widths["expert width"] = arch.moe.expert_intermediate_size
    text = ", ".join(f"{name} {width}" for name, width in widths.items())
    common = math.gcd(*widths.values())
    return (
        f"tp divides {text}",
        lambda at: common % at["tp"] == 0,
        lambda c: f"{text} / tp {c['tp']} = " + ", ".join(f"{width / c['tp']:g}" for width in widths.values()),
    )


@register_rule("pp_at_most_layers", "pp")
def _pp_at_most_layers(card: Card, options: Mapping[str, Any]) -> Clause:
    layers = card.arch.num_layers
    return (
        f"pp is at most the {layers} layers",
        lambda at: at["pp"] <= layers,
        lambda c: f"pp {c['pp']} stages for {layers} layers",
    )


@register_rule("tied_embeddings_need_one_stage", "pp")
def _tied_embeddings_need_one_stage(card: Card, options: Mapping[str, Any]) -> Clause | None:
    if not card.arch.tied_embeddings:
        return None
    return (
        "with tied embeddings pp is 1: the framework does not tie weights across pipeline stages",
        lambda at: at["pp"] == 1,
        lambda c: f"tied embeddings with pp {c['pp']}",
    )


@register_rule("ep_divides_experts", "ep")
def _ep_divides_experts(card: Card, options: Mapping[str, Any]) -> Clause:
    experts = card.arch.moe.num_experts if card.arch.moe else 1
    what = f"{experts} experts" if card.arch.moe else "model without experts"
    return (
        f"ep divides the {what}" if card.arch.moe else "ep is 1: the model has no experts",
        lambda at: experts % at["ep"] == 0,
        lambda c: (
            f"ep {c['ep']} for a {what}" if not card.arch.moe else f"{what} / ep {c['ep']} = {experts / c['ep']:g}"
        ),
    )


def _stage_degrees() -> tuple[str, ...]:
    """The degrees whose product is the number of ranks of a pipeline stage."""
    return tuple(degree for degree in reversed(rank_degrees()) if degree != "pp")


@register_rule("ep_inside_stage", "ep", _stage_degrees)
def _ep_inside_stage(card: Card, options: Mapping[str, Any]) -> Clause:
    stage = _stage_degrees()
    return (
        f"ep divides the {' x '.join(stated_knobs(stage, options.get('knobs', ())))} ranks of a pipeline stage",
        lambda at: at.product(stage) % at["ep"] == 0,
        lambda c: f"ep {c['ep']} among {c.describe(stage)} = {c.product(stage)} ranks of a stage",
    )


@register_rule("ep_divides_dp", "ep", "dp")
def _ep_divides_dp(card: Card, options: Mapping[str, Any]) -> Clause:
    return (
        "ep divides dp: experts are spread over data-parallel ranks only",
        lambda at: at["dp"] % at["ep"] == 0,
        lambda c: f"ep {c['ep']} with dp {c['dp']}",
    )


def fit_degrees(torus: tuple[int, ...], num_degrees: int = 3) -> set[tuple[int, ...]]:
    """Every tuple of degrees obtained by assigning each axis of the torus to one of them.

    These are the meshes that JAX's `mesh_utils.create_device_mesh` can build without `allow_split_physical_axes`.
    """
    fits = {(1,) * num_degrees}
    for axis in torus:
        fits = {(*fit[:n], fit[n] * axis, *fit[n + 1 :]) for fit in fits for n in range(num_degrees)}
    return fits


@register_rule("degrees_on_torus", rank_degrees, needs=())
def _degrees_on_torus(card: Card, options: Mapping[str, Any]) -> Clause | None:
    torus, degrees = card.hardware.torus, rank_degrees()
    if torus is None:
        return None
    allowed = np.array(sorted(fit_degrees(torus, len(degrees))), dtype=np.int64)
    shape = "x".join(map(str, torus))
    *most, last = stated_knobs(degrees, options.get("knobs", ()))
    return (
        f"{', '.join(most)} and {last} each use whole axes of the {shape} torus",
        lambda at: (np.stack([at[d] for d in degrees], axis=1)[:, None, :] == allowed).all(axis=2).any(axis=1),
        lambda c: f"{c.describe(degrees, ', ')} on a torus of {shape}",
    )


def _register_needs_links(knob: str, *choices: str) -> None:
    """Register the rule `KNOB_needs_links`: these choices of the knob are computed from measured links."""

    @register_rule(f"{knob}_needs_links", knob)
    def _needs_links(card: Card, options: Mapping[str, Any]) -> Clause | None:
        if card.hardware.links is not None:
            return None
        return (
            f"{knob}={' or '.join(choices)} needs measured links, which the profile has not"
            " (`ccl-search links measure`)",
            lambda at: ~at.equals(knob, choices),
            lambda c: "the profile has no measured links",
        )


_register_needs_links("host_order", "links", "ranks")
_register_needs_links("device_order", "links")
