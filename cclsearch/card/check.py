"""Check that the fields of a card are consistent with each other; drop or look up values if needed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from cclsearch.card.fields import BANDWIDTH_PATH, BY_NAME, FieldProblem, look_up, read_number
from cclsearch.card.hardware import Accelerator, find_accelerator, match_accelerator
from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line

MOE_FIELDS = ("num_experts", "top_k", "expert_intermediate_size")


def check_values(values: dict[str, Any], data: Mapping[str, Any]) -> list[FieldProblem]:
    """Problems between fields. Changes `values`: implausible bandwidths are removed, the accelerator is replaced by its
    key, and memory and torus are looked up if only one known chip or slice can have them (each change is reported)."""
    return [
        *_check_model(values),
        *_read_accelerator(values),
        *_read_bandwidths(values, data),
        *_check_torus(values),
    ]


def _problem(name: str, message: str, *, remedy: str | None = None) -> FieldProblem:
    """A blocking problem, which setting the field fixes if no remedy is given."""
    field = BY_NAME[name]
    return FieldProblem(field=field.path, message=message, remedy=field.remedy if remedy is None else remedy)


def _note(path: str, message: str, remedy: str = "") -> FieldProblem:
    return FieldProblem(field=path, message=message, remedy=remedy, blocking=False)


def _check_model(values: Mapping[str, Any]) -> Iterator[FieldProblem]:
    heads, kv_heads = values.get("num_heads"), values.get("num_kv_heads")
    if heads and kv_heads and heads % kv_heads:
        yield _problem("num_kv_heads", f"must divide num_heads: {kv_heads} does not divide {heads}")
    if not values.get("moe", "num_experts" in values):
        return
    for name in MOE_FIELDS:
        if name not in values:
            yield _problem(name, "is missing, but the model is a mixture of experts")
    experts, top_k = values.get("num_experts"), values.get("top_k")
    if experts and experts < 2:
        yield _problem("num_experts", f"must be at least 2, not {experts}")
    if experts and top_k and top_k > experts:
        yield _problem("top_k", f"must be at most num_experts: {top_k} is above {experts}")
    dense, layers = values.get("num_dense_layers", 0), values.get("num_layers")
    if layers and dense >= layers:
        yield _problem("num_dense_layers", f"must be below num_layers: {dense} of {layers}")


def _read_accelerator(values: dict[str, Any]) -> Iterator[FieldProblem]:
    name, memory = values.get("accelerator"), values.get("memory_gb")
    found: Accelerator | None = None
    if name is not None:
        found = match_accelerator(name, memory)
        if found is not None:
            values["accelerator"] = found.name
        elif memory is not None:
            yield _note(BY_NAME["accelerator"].path, f"{_why_unknown(name, memory)}; the card's value is kept")
    if memory is None and name is not None:
        yield _look_up_memory(name, found, values)
    elif memory is None:
        yield _problem("memory_gb", "is missing")
    if "memory_gb" in values:
        values["memory_gib"] = values["memory_gb"]


def _look_up_memory(name: str, found: Accelerator | None, values: dict[str, Any]) -> FieldProblem:
    if found is None:
        return _problem("memory_gb", f"is missing, and {_why_unknown(name, None)}")
    if found.variants_gib:
        sizes = " or ".join(f"{size:g}" for size in found.variants_gib)
        return _problem("memory_gb", f"is missing, and {found.name} is sold with {sizes} GiB")
    values["memory_gb"] = found.memory_gib
    return _note(BY_NAME["memory_gb"].path, f"is missing; every {found.name} has {found.memory_gib:g} GiB")


def _why_unknown(name: str, memory_gib: float | None) -> str:
    try:
        find_accelerator(name, memory_gib)
    except UserError as error:
        return one_line(str(error), 200)
    return f"{name!r} is known"


def _read_bandwidths(values: dict[str, Any], data: Mapping[str, Any]) -> Iterator[FieldProblem]:
    pair = look_up(data, BANDWIDTH_PATH)
    if pair is not None:
        yield from _read_pair(pair, values)
    out, up = values.get("scale_out_gbps"), values.get("scale_up_gbps")
    if out and up and out > up:
        del values["scale_out_gbps"], values["scale_up_gbps"]
        yield _note(
            BANDWIDTH_PATH,
            f"has {out:g} to other nodes and {up:g} inside a node, but the order is [scale-out, scale-up], and"
            " links inside a node are faster: neither is used",
            f"if they are swapped: --set bandwidth_gbps=[{up:g},{out:g}]",
        )


def _read_pair(pair: Any, values: dict[str, Any]) -> Iterator[FieldProblem]:
    if not isinstance(pair, list) or len(pair) != 2:
        message = f"must be [scale-out, scale-up], not {one_line(repr(pair), 60)}: not used"
        yield _note(BANDWIDTH_PATH, message, "--set bandwidth_gbps=[N,N]")
        return
    for name, given in zip(("scale_out_gbps", "scale_up_gbps"), pair, strict=True):
        number = read_number(given)
        if name in values:
            continue
        if number is not None and number <= BY_NAME[name].maximum:
            values[name] = number
        else:
            yield _note(BANDWIDTH_PATH, f"has {one_line(repr(given), 40)} for {name}: not used", f"--set {name}=N")


def _check_torus(values: dict[str, Any]) -> Iterator[FieldProblem]:
    torus, count = values.get("torus"), values.get("total_count")
    if torus is not None and count is not None and math.prod(torus) != count:
        shape = "x".join(map(str, torus))
        message = f"must multiply to total_count: {shape} is {math.prod(torus)} chips, not {count}"
        yield _problem("torus", message, remedy="--set torus=[N,N]")
    chip = match_accelerator(values["accelerator"]) if "accelerator" in values else None
    if torus is not None or count is None or chip is None or chip.kind != "tpu":
        return
    shapes = [shape for shape in chip.slices if math.prod(shape) == count]
    if len(shapes) == 1:
        values["torus"] = shapes[0]
        shape = "x".join(map(str, shapes[0]))
        yield _note(BY_NAME["torus"].path, f"is missing; {shape} is the only {chip.name} slice of {count} chips")
    else:
        message = "is missing: tensor parallelism is not restricted to its axes"
        yield _note(BY_NAME["torus"].path, message, "--set torus=[N,N]")
