"""The admission rules of training on traces: computed work, precision, and what ranks exchanged."""

from __future__ import annotations

import re
from collections.abc import Iterable

from cclsearch.card.arch import count_parts, tokens_per_step
from cclsearch.card.hardware import PRECISION_BITS, canonical_precision
from cclsearch.scoring.admission import Finding, admission_rule
from cclsearch.scoring.evidence import TracedCollective, TracedProducts
from cclsearch.tasks.training.contract import TrainingEvidence
from cclsearch.tasks.training.layout import recomputes_layers
from cclsearch.tasks.training.thresholds import DEFAULT


@admission_rule("traced_work")
def check_traced_work(evidence: TrainingEvidence) -> Finding:
    """Whether the traces can contain the card's work, even if every kernel without shapes ran at the device's peak."""
    products = evidence.trace.products if evidence.trace else None
    if products is None or products.flops <= 0:
        return None, "the FLOPs of a step cannot be seen in the traces"
    needed = _NeededWork(evidence)
    ratio = products.flops / needed.model
    detail = f"{products.flops:.3g} matrix FLOPs per traced step, {ratio:.2f}x the model's {needed.model:.3g}"
    if products.hidden_s:
        detail += f"; kernels without shapes take {products.hidden_share:.1%} of the compute time"
    most = (1 + DEFAULT.traced_flops_above) * needed.with_all_experts / needed.model
    if ratio > most:
        return False, f"{detail}: at most {most:.2f}x is allowed"
    hidden = products.hidden_flops or 0.0
    if products.hidden_s and products.hidden_flops is None:
        return None, f"{detail}; their rate is unknown"
    if wrong := needed.find_missing(products, hidden):
        return False, f"{detail}: {wrong}"
    if wrong := needed.find_missing(products, 0.0):
        return None, f"{detail} and may contain the rest: {wrong}"
    return True, detail


class _NeededWork:
    """Least work of one step of a card, by part: products with weights, and attention."""

    def __init__(self, evidence: TrainingEvidence) -> None:
        arch, card, config = evidence.card.arch, evidence.card, evidence.payload.config
        parts, tokens = count_parts(arch), tokens_per_step(card)
        head = arch.vocab_size * arch.hidden_size
        layers = parts.active - parts.embedding - parts.head
        rows = arch.num_layers * arch.num_heads * tokens
        attention = 12.0 * rows * arch.head_dim * card.number("seq_len")
        self.model = 6.0 * (layers + head) * tokens + attention
        # a framework may apply every expert to every token, as jax_cpu_model.py does
        self.with_all_experts = self.model + 6.0 * (parts.total - parts.active) * tokens
        self.recomputes = recomputes_layers(config.get("activation_checkpointing"))
        forward_again = 2.0 * DEFAULT.min_recomputed * layers * tokens if self.recomputes else 0.0
        self.weights = 6.0 * (layers + head) * tokens + forward_again
        is_ring = config.as_int("cp") > 1  # its blocks may skip what the causal mask hides
        self.attention = attention * (0.5 if is_ring else 1.0)
        self.rows = None if is_ring else float(rows)
        self.micro_batch = config.as_int("micro_batch_size") if "micro_batch_size" in config else None
        self.has_experts = arch.moe is not None

    def find_missing(self, products: TracedProducts, hidden: float) -> str:
        """Return the missing part of the products if kernels without shapes computed `hidden` FLOPs; "" if none."""
        least = 1 - (DEFAULT.traced_flops_below if products.by_shapes else DEFAULT.traced_costs_below)
        words = f"at least {least:.2f}x"
        needed = self.weights + self.attention
        if products.flops + hidden < least * needed:
            full = f" with the recomputation that the configuration asks for ({needed / self.model:.2f}x)"
            return f"{words} the work of the step is required{full if self.recomputes else ''}"
        if not products.batched_flops:
            return ""  # costs by kernel, or attention in kernels without shapes: only the sum is known
        weights = products.flops - products.batched_flops
        if not self.has_experts and weights + hidden < least * self.weights:
            return f"products with weights are {weights / self.weights:.2f}x what is required, {words} is needed"
        if products.batched_flops + hidden < least * self.attention:
            return f"attention is {products.batched_flops / self.attention:.2f}x what is required, {words} is needed"
        return self._find_missing_rows(products) or self._find_other_batch(products)

    def _find_other_batch(self, products: TracedProducts) -> str:
        batches = products.attention_batches
        if self.micro_batch is None or not batches or self.micro_batch in batches:
            return ""
        return f"attention runs on {batches[0]} sequences a call, but a micro-batch has {self.micro_batch}"

    def _find_missing_rows(self, products: TracedProducts) -> str:
        """Say how many whole queries of attention are missing, by an exact count: sequences x heads x positions x
        layers.
        """
        if not products.attended_rows or self.rows is None or products.hidden_share > DEFAULT.max_hidden_share:
            return ""
        ratio = products.attended_rows / self.rows
        if ratio >= 1 - DEFAULT.attended_below:
            return ""
        return f"backward attention covers {ratio:.2f}x of the queries of all layers, heads, sequences and tokens"


@admission_rule("precision")
def check_precision(evidence: TrainingEvidence) -> Finding:
    """Whether matrix products ran in the card's precision: as declared, and by types and kernel names in the traces."""
    wanted, declared = canonical_precision(evidence.card.precision), evidence.result.precision
    if declared is not None and canonical_precision(declared) != wanted:
        return False, f"the run script declares {declared}, but the card has {wanted}"
    products = evidence.trace.products if evidence.trace else None
    seconds = products.seconds_by_precision if products else {}
    total, bits = sum(seconds.values()), PRECISION_BITS.get(wanted)
    if not total or bits is None:
        seen = "declared; it" if declared is not None else "not declared, and"
        return None, f"{seen} cannot be seen in the traces"
    shares = {name: s / total for name, s in sorted(seconds.items(), key=lambda item: -item[1])}
    narrower = sum(share for name, share in shares.items() if PRECISION_BITS.get(name, bits) < bits)
    listed = ", ".join(f"{share:.0%} {name}" for name, share in shares.items() if share >= 0.005)
    detail = f"time of matrix products by precision: {listed}"
    if narrower > DEFAULT.max_narrower_share:
        return False, f"{detail}; the card has {wanted}: name the precision in the card, or compute in {wanted}"
    return True, detail


_REDUCTIONS = {"all_reduce", "reduce_scatter", "reduce"}
_POINT_TO_POINT = {"send", "recv", "send_recv"}
_WORD = re.compile(r"[a-z]+")
_OTHER_AXES = {
    "dp": {"tp", "tensor", "model", "pp", "pipe", "pipeline", "embedding"},
    "tp": {"dp", "data", "replicate", "shard", "pp", "pipe", "pipeline", "embedding", "edp"},
}
"""Axis -> words in the names of groups that are not of this axis."""


@admission_rule("traced_layout")
def check_traced_layout(evidence: TrainingEvidence) -> Finding:
    """Whether the traces have gradient reductions, stage transfers, expert exchange and tensor collectives."""
    degrees = {axis: evidence.payload.config.as_int(axis) for axis in ("dp", "cp", "tp", "pp", "ep")}
    needed = [name for name, degree in degrees.items() if degree > 1]
    if not needed or evidence.trace is None:
        return None, "the trial has no traces" if needed else "one rank exchanges nothing"
    calls = evidence.trace.collectives
    if calls is None:
        return None, "the traces have no whole steps"
    is_marked = any(origin.nonces for origin in evidence.trace.origins.values())
    if not calls and not is_marked:
        return None, "the traces have no collectives; version 0.4 will exclude such a trial"
    if not evidence.trace.shows_collectives:
        return None, "the traces do not show every collective"
    if any(call.kind == "unknown" for call in calls):
        return None, "the traces do not say what some of the collectives do"
    found: list[str] = []
    unseen: list[str] = []
    for axis in needed:
        wrong, seen = _CHECKS[axis](evidence, degrees, calls)
        if wrong:
            return False, f"{axis} is {degrees[axis]}, but {wrong}"
        (found if seen else unseen).append(seen or axis)
    rest = [f"not distinguishable: the exchange of {' and '.join(unseen)}"] if unseen else []
    return True if found else None, "; ".join(found + rest)


Check = tuple[str, str]
"""Finding of a check: the fault, or ""; the evidence, or "" if the traces cannot show it."""


def _check_replicas(evidence: TrainingEvidence, degrees: dict[str, int], calls: Iterable[TracedCollective]) -> Check:
    """Every replica reduces the gradients of every parameter, dp x cp times over all ranks, in the card's precision."""
    replicas = degrees["dp"] * degrees["cp"]
    reductions = [call for call in calls if call.kind in _REDUCTIONS and _may_be(call, "dp")]
    if not reductions:
        return "the traces have no reduction of gradients", ""
    is_counted = evidence.trace is not None and evidence.trace.format.startswith("kineto")
    if not is_counted or any(call.elements is None for call in reductions):
        return "", "gradients are reduced"
    parts = count_parts(evidence.card.arch)
    spread_out = parts.experts * parts.moe_layers if degrees["ep"] > 1 else 0
    needed = replicas * (parts.total - spread_out)
    share = sum(call.elements or 0.0 for call in reductions) / needed
    narrow = sum(call.elements or 0.0 for call in reductions if _is_narrower(call, evidence.card.precision)) / needed
    if share - narrow < DEFAULT.min_reduced_share <= share:
        return f"{narrow:.1%} of the gradients are rounded to less than the card's {evidence.card.precision}", ""
    if share < DEFAULT.min_reduced_share:
        return f"the collectives of a traced step reduce the gradients of {share:.1%} of the parameters only", ""
    return "", "the gradients of all parameters are reduced"


def _check_tensor(evidence: TrainingEvidence, degrees: dict[str, int], calls: Iterable[TracedCollective]) -> Check:
    """Every layer exchanges activations in forward and backward: more calls than reductions of gradients need."""
    payload, arch = evidence.payload, evidence.card.arch
    size = degrees["tp"]
    own = [call for call in calls if call.kind not in _POINT_TO_POINT and _may_be(call, "tp")]
    fitting = [call for call in own if call.group_size in (None, size)]
    made = sum(call.calls for call in fitting) / payload.num_ranks
    least = 2 * arch.num_layers / degrees["pp"]
    if made >= least:
        return "", "layers exchange activations"
    if made == 0 and not any(call.kind in _POINT_TO_POINT for call in calls):
        return "the traces have no collective over the tensor-parallel ranks", ""
    return "", ""


def _check_stages(evidence: TrainingEvidence, degrees: dict[str, int], calls: Iterable[TracedCollective]) -> Check:
    if any(call.kind in _POINT_TO_POINT for call in calls):
        return "", "stages exchange activations"
    return "the traces have no transfer between pipeline stages", ""


def _check_experts(evidence: TrainingEvidence, degrees: dict[str, int], calls: Iterable[TracedCollective]) -> Check:
    """Tokens go to their experts by all-to-all, or by gathering all of them."""
    kinds = {call.kind for call in calls}
    if "all_to_all" in kinds:
        return "", "experts exchange tokens"
    if kinds & {"all_gather", "reduce_scatter", "broadcast", *_POINT_TO_POINT}:
        return "", ""
    return "the traces have no exchange of tokens between experts", ""


def _is_narrower(call: TracedCollective, precision: str) -> bool:
    """Whether a call's elements have fewer bits than that precision's; False if either is unknown."""
    bits, wanted = PRECISION_BITS.get(call.precision), PRECISION_BITS.get(canonical_precision(precision))
    return bits is not None and wanted is not None and bits < wanted


def _may_be(call: TracedCollective, axis: str) -> bool:
    """Whether a call's group may be of that axis: its name, if it has one, names no other."""
    return not set(_WORD.findall(call.axis.lower())) & _OTHER_AXES[axis]


_CHECKS = {"dp": _check_replicas, "cp": _check_replicas, "tp": _check_tensor, "pp": _check_stages, "ep": _check_experts}
