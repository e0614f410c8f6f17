"""Check that the fields of a card are consistent with each other; drop or look up values if needed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cclsearch.card.fields import BANDWIDTH_PATH, BY_NAME, FieldProblem, infer, is_absent, look_up, note, read_number
from cclsearch.card.hardware import (
    NOMINAL,
    Accelerator,
    find_candidates,
    hint_accelerator,
    match_accelerator,
    memory_in,
    state_accelerator,
)
from cclsearch.core.text import one_line
from cclsearch.core.values import Config

MOE_FIELDS = ("num_experts", "top_k", "expert_intermediate_size")
CATALOGUE = "the catalogue of accelerators"
# Vendors state links for both directions together: a factor of 2, which must be found.
FAR = 1.5
"""Factor between stated and known bandwidth from which a note says so."""
OF_UNKNOWN = ("peak_flops", "memory_gb_per_s", "memory_gb")
"""Fields that a card must state of an accelerator outside the catalogue."""


def check_values(values: dict[str, Any], data: Mapping[str, Any]) -> list[FieldProblem]:
    """Return problems between fields. Changes `values`: removes implausible bandwidths, replaces the accelerator by its
    key, and looks up memory and torus if only one known chip or slice can have them (each change is reported).
    """
    return [
        *_check_sections(data),
        *_check_model(values),
        *_read_accelerator(values),
        *_read_bandwidths(values, data),
        *_infer_links(values),
        *_compare_links(values),
        *_check_torus(values),
    ]


def _problem(name: str, message: str, *, remedy: str | None = None) -> FieldProblem:
    """A blocking problem, which setting the field fixes if no remedy is given."""
    field = BY_NAME[name]
    return FieldProblem(field=field.path, message=message, remedy=field.remedy if remedy is None else remedy)


def _check_sections(data: Mapping[str, Any]) -> Iterator[FieldProblem]:
    for path in ("workload.hardware", "workload.hardware.xpu_spec"):
        given = look_up(data, path)
        if not isinstance(given, Mapping) and not is_absent(given):
            yield note(path, f"must be a section, not {one_line(repr(given), 60)}: not used")


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
    if "peak_flops" in values:
        rates = {name or values.get("precision", "bf16"): rate for name, rate in values["peak_flops"].items()}
        values["peak_flops"] = Config(rates)
    name = values.get("accelerator")
    candidates = find_candidates(name) if name is not None else []
    if candidates:
        yield from _read_known(candidates, values)
    elif name is not None:
        yield from _read_unknown(name, values)
    if name is not None and "precision" in values:
        yield from _note_rates(values)


def _read_known(candidates: Sequence[Accelerator], values: dict[str, Any]) -> Iterator[FieldProblem]:
    """Choose between the chips of one name by the memory that the card or the name states, else take the smallest."""
    name, memory = values["accelerator"], values.get("memory_gb")
    called = candidates[0].name if len(candidates) == 1 else one_line(name, 40)
    largest = max(candidates, key=lambda chip: chip.sizes_gib[-1])
    chosen = match_accelerator(name, memory)
    sizes = sorted({size for chip in candidates for size in chip.sizes_gib})
    listed = " or ".join(f"{size:g}" for size in sizes)
    if memory is not None and chosen is None:
        chosen = largest
        message = f"is {memory:g}, but {called} is sold with {listed} GiB: the card's {memory:g} is used"
        yield note("memory_gb", message)
    elif memory is None:
        stated = memory_in(name)
        chosen = chosen or min(candidates, key=lambda chip: chip.memory_gib)
        gib = stated if stated in chosen.sizes_gib else chosen.sizes_gib[0]
        yield infer(
            values, "memory_gb", gib, _say_memory(called, gib, sizes) if stated is None else _say_memory(name, gib, [])
        )
    assert chosen is not None
    values["accelerator"] = chosen.name
    if chosen.scale_up_domain is not None and "scale_up_domain" not in values:
        yield infer(values, "scale_up_domain", chosen.scale_up_domain, CATALOGUE)


def _say_memory(name: str, chosen: float, sizes: Sequence[float]) -> str:
    """Say why the accelerator of that name gets this much memory."""
    if not sizes:
        return f"the accelerator's name {one_line(name, 40)!r}"
    if len(sizes) == 1:
        return f"the catalogue of accelerators: every {one_line(name, 40)} has {chosen:g} GiB"
    listed = " or ".join(f"{size:g}" for size in sizes)
    why = f"{one_line(name, 40)} is sold with {listed} GiB, and what fits into {chosen:g} fits into all"
    return f"the catalogue of accelerators: {why}; if yours has more: --set memory_gb={sizes[-1]:g}"


def _read_unknown(name: str, values: Mapping[str, Any]) -> Iterator[FieldProblem]:
    missing = [field for field in OF_UNKNOWN if field not in values]
    if missing:
        message = f"is {one_line(name, 60)!r}, which is not a known accelerator{hint_accelerator(name)}"
        remedy = " ".join(f"--set {field}=N" for field in missing)
        yield _problem("accelerator", message, remedy=remedy)


def _infer_links(values: dict[str, Any]) -> Iterator[FieldProblem]:
    """Give an accelerator without stated links the catalogue's; an unknown one gets the links of a usual data-center
    GPU. One node has no links to others, and a host's processors need none.
    """
    name = values.get("accelerator")
    if name is None:
        return
    known = find_candidates(name)
    chip = (match_accelerator(name, values.get("memory_gb")) or known[0]) if known else NOMINAL
    unknown = f"a usual data-center GPU, because {one_line(name, 40)!r} is not a known accelerator"
    one_node = values.get("total_count", 2) <= values.get("count_per_node", 1)
    for field in ("scale_up_gbps", "scale_out_gbps"):
        if field not in values and chip.kind != "cpu" and not (known and one_node and field == "scale_out_gbps"):
            yield infer(values, field, getattr(chip, field), CATALOGUE if known else unknown)


def _compare_links(values: Mapping[str, Any]) -> Iterator[FieldProblem]:
    """A note if the card's scale-up links are far from the catalogue's: of another chip, or of both directions."""
    stated, chip = values.get("scale_up_gbps"), match_accelerator(values.get("accelerator", ""))
    if stated is None or chip is None or chip.nominal or 1 / FAR < stated / chip.scale_up_gbps < FAR:
        return
    message = f"is {stated:g}, but {chip.name} has {chip.scale_up_gbps:g} per direction: the card's figure is used"
    yield note("scale_up_gbps", message, f"--set scale_up_gbps={chip.scale_up_gbps:g}")


def _note_rates(values: Mapping[str, Any]) -> Iterator[FieldProblem]:
    """Note which dtype's rate predictions use for a precision that the accelerator has no units for."""
    chip = state_accelerator(
        values["accelerator"], values.get("memory_gb"), values.get("peak_flops"), values.get("memory_gb_per_s")
    )
    if chip is None or chip.nominal:
        return
    for precision in (values["precision"], *values.get("alternative_precisions", ())):
        if "=" not in precision and chip.peak_flops_of(precision) is None:
            dtype, rate = chip.rate_for(precision)
            used = f"predictions use its {dtype} rate, {rate / 1e12:g} TFLOP/s, and MFU is not reported"
            path, message = BY_NAME["precision"].path, f"is {precision}, for which {chip.name} has no peak rate: {used}"
            yield note(path, message, "--set peak_flops=N")


def _read_bandwidths(values: dict[str, Any], data: Mapping[str, Any]) -> Iterator[FieldProblem]:
    pair, is_given = look_up(data, BANDWIDTH_PATH), "scale_up_gbps" in values
    if pair is not None:
        yield from _read_pair(pair, values)
    if not is_given:
        yield from _halve_both_directions(values)
    out, up = values.get("scale_out_gbps"), values.get("scale_up_gbps")
    if out and up and out > up:
        values["scale_out_gbps"], values["scale_up_gbps"] = up, out
        yield note(
            BANDWIDTH_PATH,
            f"has {out:g} to other nodes and {up:g} inside a node, but the order is [scale-out, scale-up], and"
            f" links inside a node are faster: used as [{up:g}, {out:g}]",
            f"if they are not swapped: --set scale_out_gbps={up:g} --set scale_up_gbps=N",
        )


def _halve_both_directions(values: dict[str, Any]) -> Iterator[FieldProblem]:
    """Data sheets add up both directions of links inside a node: exactly twice the rate of one is taken as that."""
    up, chip = values.get("scale_up_gbps"), match_accelerator(values.get("accelerator", ""))
    if up is None or chip is None or chip.nominal or up != 2 * chip.scale_up_gbps:
        return
    values["scale_up_gbps"] = chip.scale_up_gbps
    yield note(
        BANDWIDTH_PATH,
        f"has {up:g} inside a node, twice the {chip.scale_up_gbps:g} that {chip.name} has per direction: used as"
        f" {chip.scale_up_gbps:g}",
        f"if it is per direction: --set scale_up_gbps={up:g}",
    )


def _read_pair(pair: Any, values: dict[str, Any]) -> Iterator[FieldProblem]:
    if not isinstance(pair, list) or len(pair) != 2:
        message = f"must be [scale-out, scale-up], not {one_line(repr(pair), 60)}: not used"
        yield note(BANDWIDTH_PATH, message, "--set bandwidth_gbps=[N,N]")
        return
    for name, given in zip(("scale_out_gbps", "scale_up_gbps"), pair, strict=True):
        number = read_number(given)
        if name in values:
            continue
        if number is not None and number <= BY_NAME[name].maximum:
            values[name] = number
        else:
            yield note(BANDWIDTH_PATH, f"has {one_line(repr(given), 40)} for {name}: not used", f"--set {name}=N")


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
        yield infer(values, "torus", shapes[0], f"the only {chip.name} slice of {count} chips")
    else:
        message = "is missing: tensor parallelism is not restricted to its axes"
        yield note("torus", message, "--set torus=[N,N]")
