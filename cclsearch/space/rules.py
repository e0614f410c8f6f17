"""The named constraints: each is one vectorised check over columns of knobs, and one sentence about a configuration.

A rule is made for a card (its numbers are bound then) and applied twice in the same form: to whole columns when the
space is enumerated, and to a single configuration when `explain` says why it is illegal. So the two never disagree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cclsearch.card.model import Card
from cclsearch.values import Value

BoolArray = NDArray[np.bool_]
Check = Callable[["Columns"], BoolArray]
Why = Callable[[Mapping[str, Any]], str]

NEUTRAL: dict[str, Value] = {"zero_stage": 0, "sequence_parallel": False}
"""What a knob is worth where the space lacks it; 1 for every other."""


class Columns:
    """Values of N configurations by knob; a knob that the space lacks has its neutral value."""

    def __init__(self, values: Mapping[str, NDArray[Any]], size: int) -> None:
        self._values = values
        self.size = size

    def __getitem__(self, knob: str) -> NDArray[np.int64]:
        """(N,) whole numbers; truth is 1."""
        if knob in self._values:
            return self._values[knob].astype(np.int64)
        return np.full(self.size, int(NEUTRAL.get(knob, 1)), dtype=np.int64)

    def equals(self, knob: str, choices: tuple[Value, ...]) -> BoolArray:
        """(N,) whether the knob has one of these values (true is not 1)."""
        hits = (any(_same(value, choice) for choice in choices) for value in self._values[knob].tolist())
        return np.fromiter(hits, bool, count=self.size)


@dataclass(frozen=True)
class Rule:
    """One constraint, bound to a card."""

    name: str
    knobs: tuple[str, ...]
    """The knobs that it looks at: it is applied as soon as those are enumerated. The first is its subject: a space
    without that knob has no use for the rule."""
    summary: str
    """What must hold, with the card's numbers."""
    check: Check
    why: Why
    """The sentence for one configuration, with its numbers."""
    needs_all: bool = False
    """Whether a space that lacks any of the knobs, and not only the first, has no use for the rule."""


Maker = Callable[[Card, Mapping[str, Any]], Rule | None]
RULES: dict[str, Maker] = {}
"""Name -> what makes the rule for a card and the framework's parameters; None where it does not apply to the card."""
PARAMETERS: dict[str, frozenset[str]] = {}
"""Name -> the parameters that a framework file may give."""
ALWAYS = (
    "num_accelerators",
    "tp_divides_heads",
    "tp_divides_kv_heads",
    "pp_at_most_layers",
    "accumulation_whole",
    "ep_divides_experts",
    "ep_inside_stage",
)
"""Rules that hold whatever the framework."""


def _rule(name: str, *parameters: str) -> Callable[[Maker], Maker]:
    def enter(maker: Maker) -> Maker:
        RULES[name] = maker
        PARAMETERS[name] = frozenset(parameters)
        return maker

    return enter


def _same(left: Value, right: Value) -> bool:
    return isinstance(left, bool) == isinstance(right, bool) and left == right


def _get(config: Mapping[str, Any], knob: str) -> int:
    return int(config.get(knob, NEUTRAL.get(knob, 1)))


@_rule("num_accelerators", "use_fewer")
def _num_accelerators(card: Card, options: Mapping[str, Any]) -> Rule:
    total, fewer = card.hardware.num_accelerators, bool(options.get("use_fewer"))

    def check(at: Columns) -> BoolArray:
        product = at["tp"] * at["dp"] * at["pp"]
        return np.asarray(product <= total if fewer else product == total, dtype=bool)

    return Rule(
        "num_accelerators",
        ("tp", "dp", "pp"),
        f"tp x dp x pp is {'at most ' if fewer else ''}{total}, the accelerators there are",
        check,
        lambda c: (
            f"tp {_get(c, 'tp')} x dp {_get(c, 'dp')} x pp {_get(c, 'pp')} is "
            f"{_get(c, 'tp') * _get(c, 'dp') * _get(c, 'pp')} of {total} accelerators"
        ),
    )


def _tp_divides(name: str, number: int, what: str) -> Rule:
    return Rule(
        name,
        ("tp",),
        f"tp divides the {number} {what}",
        lambda at: number % at["tp"] == 0,
        lambda c: f"{number} {what} over tp {_get(c, 'tp')} is {number / _get(c, 'tp'):g} each",
    )


@_rule("tp_divides_heads")
def _tp_divides_heads(card: Card, options: Mapping[str, Any]) -> Rule:
    return _tp_divides("tp_divides_heads", card.arch.num_heads, "attention heads")


@_rule("tp_divides_kv_heads")
def _tp_divides_kv_heads(card: Card, options: Mapping[str, Any]) -> Rule:
    return _tp_divides("tp_divides_kv_heads", card.arch.num_kv_heads, "KV heads")


@_rule("tp_divides_widths", "experts")
def _tp_divides_widths(card: Card, options: Mapping[str, Any]) -> Rule:
    """`experts: true` where tensor parallelism cuts the routed experts too."""
    arch = card.arch
    widths = {"hidden size": arch.hidden_size, "feed-forward width": arch.intermediate_size}
    if arch.moe is not None and arch.moe.num_shared_experts:
        widths["width of the shared experts"] = arch.moe.num_shared_experts * arch.moe.expert_intermediate_size
    if arch.moe is not None and options.get("experts"):
        widths["expert width"] = arch.moe.expert_intermediate_size
    text = ", ".join(f"{name} {width}" for name, width in widths.items())
    common = math.gcd(*widths.values())
    return Rule(
        "tp_divides_widths",
        ("tp",),
        f"tp divides {text}",
        lambda at: common % at["tp"] == 0,
        lambda c: f"{text} over tp {_get(c, 'tp')} are {_each(widths.values(), _get(c, 'tp'))}",
    )


@_rule("moe_tp_divides_tokens")
def _moe_tp_divides_tokens(card: Card, options: Mapping[str, Any]) -> Rule | None:
    length = card.seq_len
    if card.arch.moe is None:
        return None
    return Rule(
        "moe_tp_divides_tokens",
        ("tp", "micro_batch_size"),
        "in a mixture of experts tp divides the tokens of a micro-batch",
        lambda at: (at["micro_batch_size"] * length) % at["tp"] == 0,
        lambda c: f"{_get(c, 'micro_batch_size')} sequences of {length} tokens over tp {_get(c, 'tp')}",
    )


@_rule("tp_inside_node")
def _tp_inside_node(card: Card, options: Mapping[str, Any]) -> Rule:
    node = min(card.hardware.accelerators_per_node, card.hardware.num_accelerators)
    return Rule(
        "tp_inside_node",
        ("tp",),
        f"tp divides the {node} accelerators of a node, so that no tensor-parallel group leaves it",
        lambda at: node % at["tp"] == 0,
        lambda c: f"tp {_get(c, 'tp')} in nodes of {node} accelerators",
    )


@_rule("pp_at_most_layers")
def _pp_at_most_layers(card: Card, options: Mapping[str, Any]) -> Rule:
    layers = card.arch.num_layers
    return Rule(
        "pp_at_most_layers",
        ("pp",),
        f"pp is at most the {layers} layers",
        lambda at: at["pp"] <= layers,
        lambda c: f"pp {_get(c, 'pp')} stages for {layers} layers",
    )


@_rule("pp_divides_layers")
def _pp_divides_layers(card: Card, options: Mapping[str, Any]) -> Rule:
    layers = card.arch.num_layers
    return Rule(
        "pp_divides_layers",
        ("pp",),
        f"pp divides the {layers} layers",
        lambda at: layers % at["pp"] == 0,
        lambda c: f"{layers} layers over pp {_get(c, 'pp')} are {layers / _get(c, 'pp'):g} a stage",
    )


@_rule("accumulation_whole")
def _accumulation_whole(card: Card, options: Mapping[str, Any]) -> Rule:
    batch = card.global_batch_size
    return Rule(
        "accumulation_whole",
        ("dp", "micro_batch_size"),
        f"gradient accumulation, global batch {batch} / (dp x micro_batch_size), is a whole number of at least 1",
        lambda at: batch % (at["dp"] * at["micro_batch_size"]) == 0,
        lambda c: (
            f"global batch {batch} / (dp {_get(c, 'dp')} x micro_batch_size {_get(c, 'micro_batch_size')}) is "
            f"{batch / (_get(c, 'dp') * _get(c, 'micro_batch_size')):g}"
        ),
    )


@_rule("micro_batches_cover_stages")
def _micro_batches_cover_stages(card: Card, options: Mapping[str, Any]) -> Rule:
    batch = card.global_batch_size
    return Rule(
        "micro_batches_cover_stages",
        ("pp", "dp", "micro_batch_size"),
        "a pipeline has at least as many micro-batches as stages",
        lambda at: (at["pp"] == 1) | (batch >= at["pp"] * at["dp"] * at["micro_batch_size"]),
        lambda c: f"{batch / (_get(c, 'dp') * _get(c, 'micro_batch_size')):g} micro-batches for pp {_get(c, 'pp')}",
    )


@_rule("ep_divides_experts")
def _ep_divides_experts(card: Card, options: Mapping[str, Any]) -> Rule:
    experts = card.arch.moe.num_experts if card.arch.moe else 1
    what = f"{experts} experts" if card.arch.moe else "model without experts"
    return Rule(
        "ep_divides_experts",
        ("ep",),
        f"ep divides the {what}" if card.arch.moe else "ep is 1: the model has no experts",
        lambda at: experts % at["ep"] == 0,
        lambda c: (
            f"ep {_get(c, 'ep')} for a {what}"
            if not card.arch.moe
            else f"{what} over ep {_get(c, 'ep')} are {experts / _get(c, 'ep'):g} each"
        ),
    )


@_rule("ep_inside_stage")
def _ep_inside_stage(card: Card, options: Mapping[str, Any]) -> Rule:
    return Rule(
        "ep_inside_stage",
        ("ep", "tp", "dp"),
        "ep divides the dp x tp ranks of a pipeline stage",
        lambda at: (at["dp"] * at["tp"]) % at["ep"] == 0,
        lambda c: (
            f"ep {_get(c, 'ep')} among dp {_get(c, 'dp')} x tp {_get(c, 'tp')} = "
            f"{_get(c, 'dp') * _get(c, 'tp')} ranks of a stage"
        ),
    )


@_rule("ep_divides_dp")
def _ep_divides_dp(card: Card, options: Mapping[str, Any]) -> Rule:
    return Rule(
        "ep_divides_dp",
        ("ep", "dp"),
        "ep divides dp: experts are spread over data-parallel ranks only",
        lambda at: at["dp"] % at["ep"] == 0,
        lambda c: f"ep {_get(c, 'ep')} with dp {_get(c, 'dp')}",
    )


@_rule("zero_needs_dp", "least")
def _zero_needs_dp(card: Card, options: Mapping[str, Any]) -> Rule:
    least = int(options.get("least", 1))
    return Rule(
        "zero_needs_dp",
        ("zero_stage", "dp"),
        f"zero_stage of {least} or more needs dp above 1: alone it changes nothing, and equals stage {least - 1}",
        lambda at: (at["zero_stage"] < least) | (at["dp"] > 1),
        lambda c: f"zero_stage {_get(c, 'zero_stage')} with dp {_get(c, 'dp')}",
    )


@_rule("zero_limited_by_pp", "most")
def _zero_limited_by_pp(card: Card, options: Mapping[str, Any]) -> Rule:
    most = int(options.get("most", 1))
    return Rule(
        "zero_limited_by_pp",
        ("zero_stage", "pp"),
        f"with pp above 1 zero_stage is at most {most}",
        lambda at: (at["pp"] == 1) | (at["zero_stage"] <= most),
        lambda c: f"zero_stage {_get(c, 'zero_stage')} with pp {_get(c, 'pp')}",
    )


@_rule("sequence_parallel_needs_tp")
def _sequence_parallel_needs_tp(card: Card, options: Mapping[str, Any]) -> Rule:
    return Rule(
        "sequence_parallel_needs_tp",
        ("sequence_parallel", "tp"),
        "sequence_parallel needs tp above 1: alone it changes nothing",
        lambda at: (at["sequence_parallel"] == 0) | (at["tp"] > 1),
        lambda c: f"sequence_parallel {bool(_get(c, 'sequence_parallel'))} with tp {_get(c, 'tp')}".lower(),
    )


@_rule("sequence_parallel_divides_sequence")
def _sequence_parallel_divides_sequence(card: Card, options: Mapping[str, Any]) -> Rule:
    length = card.seq_len
    return Rule(
        "sequence_parallel_divides_sequence",
        ("sequence_parallel", "tp"),
        f"with sequence_parallel tp divides the sequence of {length}",
        lambda at: (at["sequence_parallel"] == 0) | (length % at["tp"] == 0),
        lambda c: f"sequence of {length} over tp {_get(c, 'tp')}",
    )


@_rule("moe_tp_needs_sequence_parallel")
def _moe_tp_needs_sequence_parallel(card: Card, options: Mapping[str, Any]) -> Rule | None:
    if card.arch.moe is None:
        return None
    return Rule(
        "moe_tp_needs_sequence_parallel",
        ("sequence_parallel", "tp"),
        "a mixture of experts with tp above 1 needs sequence_parallel",
        lambda at: (at["tp"] == 1) | (at["sequence_parallel"] == 1),
        lambda c: f"sequence_parallel {bool(_get(c, 'sequence_parallel'))} with tp {_get(c, 'tp')}".lower(),
    )


@_rule("virtual_pipeline_needs_pp", "least_pp")
def _virtual_pipeline_needs_pp(card: Card, options: Mapping[str, Any]) -> Rule:
    least = int(options.get("least_pp", 2))
    return Rule(
        "virtual_pipeline_needs_pp",
        ("virtual_pipeline", "pp"),
        f"virtual_pipeline above 1 needs pp of at least {least}",
        lambda at: (at["virtual_pipeline"] == 1) | (at["pp"] >= least),
        lambda c: f"virtual_pipeline {_get(c, 'virtual_pipeline')} with pp {_get(c, 'pp')}",
    )


@_rule("virtual_pipeline_divides_layers")
def _virtual_pipeline_divides_layers(card: Card, options: Mapping[str, Any]) -> Rule:
    layers = card.arch.num_layers
    return Rule(
        "virtual_pipeline_divides_layers",
        ("virtual_pipeline", "pp"),
        f"pp x virtual_pipeline divides the {layers} layers",
        lambda at: (at["virtual_pipeline"] == 1) | (layers % (at["pp"] * at["virtual_pipeline"]) == 0),
        lambda c: (
            f"{layers} layers over pp {_get(c, 'pp')} x virtual_pipeline {_get(c, 'virtual_pipeline')} are "
            f"{layers / (_get(c, 'pp') * _get(c, 'virtual_pipeline')):g} a chunk"
        ),
    )


@_rule("virtual_pipeline_micro_batches")
def _virtual_pipeline_micro_batches(card: Card, options: Mapping[str, Any]) -> Rule:
    batch = card.global_batch_size

    def check(at: Columns) -> BoolArray:
        share = at["dp"] * at["micro_batch_size"] * at["pp"]
        return np.asarray((at["virtual_pipeline"] == 1) | (batch % share == 0), dtype=bool)

    return Rule(
        "virtual_pipeline_micro_batches",
        ("virtual_pipeline", "pp", "dp", "micro_batch_size"),
        "with virtual_pipeline above 1 the micro-batches are a multiple of pp",
        check,
        lambda c: (
            f"{batch / (_get(c, 'dp') * _get(c, 'micro_batch_size')):g} micro-batches with pp {_get(c, 'pp')} and "
            f"virtual_pipeline {_get(c, 'virtual_pipeline')}"
        ),
    )


@_rule("implies", "name", "when", "then", "because")
def _implies(card: Card, options: Mapping[str, Any]) -> Rule:
    when = {knob: _listed(values) for knob, values in options["when"].items()}
    then = {knob: _listed(values) for knob, values in options["then"].items()}

    def check(at: Columns) -> BoolArray:
        applies = np.logical_and.reduce([at.equals(knob, values) for knob, values in when.items()])
        holds = np.logical_and.reduce([at.equals(knob, values) for knob, values in then.items()])
        return np.asarray(~applies | holds, dtype=bool)

    condition, demand = _clauses(when), _clauses(then)
    knobs = tuple(dict.fromkeys((*when, *then)))
    because = f": {options['because']}" if options.get("because") else ""
    return Rule(
        str(options["name"]),
        knobs,
        f"{condition} needs {demand}{because}",
        check,
        lambda c: ", ".join(f"{knob} {c[knob]}" for knob in knobs).lower(),
        needs_all=True,
    )


def _each(widths: Iterable[int], parts: int) -> str:
    return ", ".join(f"{width / parts:g}" for width in widths)


def _listed(values: Any) -> tuple[Value, ...]:
    return tuple(values) if isinstance(values, list) else (values,)


def _clauses(part: Mapping[str, tuple[Value, ...]]) -> str:
    return " and ".join(f"{knob}={'|'.join(str(v).lower() for v in values)}" for knob, values in part.items())
