"""Values that a card does not state but that follow from others: the model's shape, phase, framework and lengths.

A value that the card states always takes precedence, and each inferred one names its source.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from cclsearch.card.arch import count_parameters
from cclsearch.card.catalogue import (
    MAX_OF_ANOTHER_KIND,
    TOLERANCE,
    KnownModel,
    agrees_in_size,
    differences,
    find_by_address,
    find_by_name,
    find_by_shape,
    find_like,
    names_a_size,
)
from cclsearch.card.fields import EXECUTORS, FieldProblem, infer, look_up, note
from cclsearch.card.model import make_model
from cclsearch.core.text import one_line
from cclsearch.core.yaml_file import read_yaml

SHAPE = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size")
EXPERTS = ("num_experts", "top_k", "expert_intermediate_size", "num_shared_experts", "num_dense_layers")
_SWITCHES = ("tied_embeddings", "gated_mlp")
# A mixture's `intermediate_size` is left out: cards mean one expert's width or another by it.
_COUNTED = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "num_experts", "top_k")
"""Stated fields that identify a model."""
_MAY_VARY = frozenset({"num_layers", "vocab_size", "num_params", "top_k"})
"""Fields in which a variant of a model may differ from it and still have its widths."""
# The formula leaves out biases, learned positions and the projections of latent attention.
_COUNT_TOLERANCE = 0.05
"""Largest relative difference between a stated count of parameters and the count from the widths."""
_GRANULARITY = {"model_fwd_bwd_pass": "training", "model_fwd": "inference"}
_PHASE_OF_TASK = {"training": "training", "inference": "inference", "serving": "inference"}
_PHASE_OF_FRAMEWORK = {
    **dict.fromkeys(("vllm", "sglang", "tensorrt-llm", "trtllm", "tgi"), "inference"),
    **dict.fromkeys(("megatron", "megatron-lm", "torchtitan", "maxtext", "deepspeed", "nanotron", "nemo"), "training"),
}
_VERSIONED = re.compile(r"^([A-Za-z][A-Za-z_+\- ]*?)[\s_=@-]*v?(\d+(?:\.\d+)+[\w.+-]*)$")
_ADDRESSES = ("hf_url", "workload.model.hf_url", "workload.hf_url", "source")


class _Match(NamedTuple):
    model: KnownModel
    how: str
    """Description of what identified it."""
    is_sized: bool = True
    """Whether it has the size that the card's model name states."""


def infer_phase(data: Mapping[str, Any]) -> FieldProblem | None:
    """The note on the phase that a card without one has; None if it has one, or if nothing says which."""
    if look_up(data, "workload.model.phase") not in (None, ""):
        return None
    if (task := look_up(data, "workload.task")) is not None:
        phase = _PHASE_OF_TASK.get(str(task).strip().lower())
        return infer({}, "phase", phase, f"workload.task {str(task).strip().lower()}") if phase else None
    granularity = str(look_up(data, "workload.model.granularity")).strip().lower()
    values: dict[str, Any] = {}
    if granularity in _GRANULARITY:
        return infer(values, "phase", _GRANULARITY[granularity], f"workload.model.granularity {granularity}")
    named = next((look_up(data, f"{root}.framework.name") for root in EXECUTORS if look_up(data, root)), None)
    framework = split_version(str(named))[0].lower().replace("_", "-")
    if framework in _PHASE_OF_FRAMEWORK:
        return infer(values, "phase", _PHASE_OF_FRAMEWORK[framework], f"the framework {framework}")
    return None


def split_version(framework: str) -> tuple[str, str]:
    """Name and version of `torchtitan-0.1.0`; the version is empty if there is none."""
    match = _VERSIONED.match(framework.strip())
    return (match[1].strip(), match[2]) if match else (framework.strip(), "")


def infer_values(values: dict[str, Any], data: Mapping[str, Any]) -> Iterator[FieldProblem]:
    """Fill in the fields that follow from others, and report each."""
    if "framework" in values:
        values["framework"], version = split_version(values["framework"])
        if version:
            values.setdefault("framework_version", version)
    yield from _infer_lengths(values)
    yield from _infer_blocks(values, data)
    yield from _infer_shape(values, data)
    yield from _infer_from_widths(values)
    yield from _check_count(values)
    yield from _infer_hardware(values)


def _infer_lengths(values: dict[str, Any]) -> Iterator[FieldProblem]:
    given = [values[name] for name in ("input_len", "output_len") if name in values]
    if "seq_len" not in values and len(given) == 2:
        yield infer(values, "seq_len", sum(given), "input_len + output_len")


@cache
def _read_checkpoints() -> list[dict[str, Any]]:
    return list(read_yaml(Path(__file__).with_name("checkpoints.yaml"))["checkpoints"])


def _infer_blocks(values: dict[str, Any], data: Mapping[str, Any]) -> Iterator[FieldProblem]:
    """The blocks of a published checkpoint, by its name."""
    if "weight_block" in values or "precision" not in values:
        return
    names = [values.get("model_family", ""), *(look_up(data, place) for place in _ADDRESSES)]
    for known in _read_checkpoints():
        name = next((each for each in names if isinstance(each, str) and re.search(known["name"], each.lower())), None)
        if name is not None and values["precision"] in known["precisions"]:
            if known["weight_block"]:
                source = f"the checkpoint {one_line(name, 60)} ({known['source']})"
                yield infer(values, "weight_block", known["weight_block"], source)
            return


def _infer_hardware(values: dict[str, Any]) -> Iterator[FieldProblem]:
    count, per_node = values.get("total_count"), values.get("count_per_node")
    if count is not None and per_node is not None and per_node > count:
        values["count_per_node"] = count
        message = f"is {per_node}, but total_count is {count}: one node with {count} is used"
        yield note("count_per_node", message)
    if count == 1 and per_node is None:
        yield infer(values, "count_per_node", 1, "total_count 1")


def _infer_shape(values: dict[str, Any], data: Mapping[str, Any]) -> Iterator[FieldProblem]:
    wanted = (*SHAPE, *(EXPERTS[:3] if values.get("moe", "num_experts" in values) else ()))
    if all(name in values for name in wanted):
        return
    stated = {name: values[name] for name in (*_COUNTED, "num_params") if name in values}
    named = list(_find_named(values, data, stated))
    chosen = _choose(named, stated, values.get("moe"))
    for match in named if chosen is None else [m for m in named if m.model.shape != chosen.model.shape]:
        instead = f", but {chosen.model.name} {chosen.how}" if chosen is not None else ""
        yield note("model_family", _say_not_used(match, differences(match.model, stated)) + instead)
    if chosen is None:
        if not named and "model_family" in values:
            yield note("model_family", f"{one_line(values['model_family'], 60)!r} is not in the catalogue of models")
        return
    yield from _correct_moe(chosen.model, values)
    yield from _use(chosen, values, differences(chosen.model, stated))


def _choose(named: Sequence[_Match], stated: Mapping[str, int], is_moe: bool | None) -> _Match | None:
    """The model that agrees best: with the name, with `moe` and all that is stated; then by shape; then with less."""
    usable = [match for match in named if match.is_sized]
    exact = [match for match in usable if not differences(match.model, stated)]
    alike = [match for match in usable if set(differences(match.model, stated)) <= _MAY_VARY]
    same_kind = [match for match in exact if is_moe in (None, "num_experts" in match.model.fields)]
    by_shape = None if same_kind else _find_shape(stated, is_moe)
    return next(iter([*same_kind, *filter(None, [by_shape]), *exact, *alike]), None)


def _find_named(values: Mapping[str, Any], data: Mapping[str, Any], stated: Mapping[str, int]) -> Iterator[_Match]:
    """The models that the card's address and name say, the address first."""
    family = values.get("model_family", "")
    for place in _ADDRESSES:
        address = look_up(data, place)
        model = find_by_address(address) if isinstance(address, str) and len(address) < 500 else None
        if model is not None:
            yield _Match(model, f"by {place}", agrees_in_size(family, model))
    exact = find_by_name(family) if family else None
    if exact is not None:
        yield _Match(exact, f"by model_family {one_line(family, 60)!r}")
        return
    agreeing = [model for model in find_like(family) if not differences(model, stated)] if family else []
    if len({model.shape for model in agreeing}) == 1 and (stated or names_a_size(family)):
        why = "and the stated shape" if stated else "the only model whose name contains it"
        yield _Match(agreeing[0], f"by model_family {one_line(family, 60)!r}, {why}")


def _find_shape(stated: Mapping[str, int], is_moe: bool | None) -> _Match | None:
    found = [model for model in find_by_shape(stated) if is_moe in (None, "num_experts" in model.fields)]
    if len({model.shape for model in found}) != 1:
        return None
    return _Match(found[0], f"by shape: {', '.join(f'{name} {value}' for name, value in stated.items())}")


def _say_not_used(match: _Match, found: Mapping[str, tuple[int, int]]) -> str:
    what = ", ".join(f"{name} {theirs} (not {ours})" for name, (ours, theirs) in found.items())
    if not match.is_sized:
        what = f"{match.model.num_params} parameters, which the name of the card's model contradicts"
    return f"is {match.model.name} {match.how}" + (f", which has {what}: not used" if what else ": not used")


def _correct_moe(model: KnownModel, values: dict[str, Any]) -> Iterator[FieldProblem]:
    """A card that says `moe` of a dense model, or the contrary, and states no experts: the model decides."""
    has_experts, stated = "num_experts" in model.fields, values.get("moe")
    if stated is None or stated == has_experts or "num_experts" in values:
        return
    values["moe"] = has_experts
    what = "is a mixture of experts" if has_experts else "has no experts"
    yield note("moe", f"is {str(stated).lower()}, but {model.name} {what}: {str(has_experts).lower()} is used")


def _use(match: _Match, values: dict[str, Any], differing: Mapping[str, tuple[int, int]]) -> Iterator[FieldProblem]:
    model = match.model
    off = count_parameters(make_model(model.fields)) / model.num_params - 1 if model.num_params else None
    if off is None or abs(off) > MAX_OF_ANOTHER_KIND:
        what = f"{model.name} {match.how} has layers of another kind ({model.shape_note}): its shape is not used"
        yield note("model_family", what)
        return
    source = f"{model.name} in the catalogue of models, {match.how} ({model.source})"
    for name in (*SHAPE, *_SWITCHES, *(EXPERTS if values.get("moe", True) else ())):
        if name in model.fields and name not in values:
            yield infer(values, name, model.fields[name], source)
    for name, (ours, theirs) in differing.items():
        yield note(name, f"is {ours}, and {theirs} in {model.name}: the card's value is used")
    for name, value in model.features.items():
        if name not in values:
            yield infer(values, name, value, source)
    if abs(off) > TOLERANCE or model.shape_note:
        left_out = f": {model.shape_note}" if model.shape_note else ""
        what = f"{model.name} is described as a plain transformer with {off:+.1%} parameters of the model{left_out}"
        yield note("model_family", what)


def _infer_from_widths(values: dict[str, Any]) -> Iterator[FieldProblem]:
    """Infer as the template states: head_dim is hidden_size / num_heads, the embedding is vocab x hidden."""
    hidden, heads, head_dim = (values.get(name) for name in ("hidden_size", "num_heads", "head_dim"))
    if hidden and heads and not head_dim and hidden % heads == 0:
        yield infer(values, "head_dim", hidden // heads, "hidden_size / num_heads")
    elif heads and head_dim and not hidden:
        yield infer(values, "hidden_size", heads * head_dim, "num_heads x head_dim")
    hidden, embedding = values.get("hidden_size"), values.get("num_params_embedding")
    if hidden and embedding and "vocab_size" not in values and embedding % hidden == 0:
        yield infer(values, "vocab_size", embedding // hidden, "num_params_embedding / hidden_size")


def _check_count(values: Mapping[str, Any]) -> Iterator[FieldProblem]:
    stated = values.get("num_params")
    experts = EXPERTS[:3] if values.get("moe", "num_experts" in values) else ()
    if stated and all(name in values for name in (*SHAPE, *experts)) and values.get("num_experts", 2) > 1:
        counted = count_parameters(make_model(values))
        if abs(counted / stated - 1) > _COUNT_TOLERANCE:
            message = f"is {stated}, but the widths have {counted} parameters ({counted / stated - 1:+.0%})"
            yield note("num_params", message)
