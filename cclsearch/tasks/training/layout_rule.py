"""The admission rule that asks the traces whether ranks exchanged what their layout requires."""

from __future__ import annotations

import re
from collections.abc import Iterable

from cclsearch.card.arch import count_parts
from cclsearch.card.hardware import PRECISION_BITS, canonical_precision
from cclsearch.scoring.admission import Finding, admission_rule
from cclsearch.scoring.evidence import TracedCollective
from cclsearch.tasks.training.contract import TrainingEvidence
from cclsearch.tasks.training.thresholds import DEFAULT

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


_CHECKS = {
    "dp": _check_replicas,
    "cp": _check_replicas,
    "tp": _check_tensor,
    "pp": _check_stages,
    "ep": _check_experts,
}
