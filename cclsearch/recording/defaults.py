"""Default values for the missing fields of a recording's card, so that its table can still be replayed.

A real run never guesses a field. A recording is only looked up: a wrong width only gives the prediction a worse
starting point, which the trials correct; every default is reported.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cclsearch.card.catalogue import differences, find_by_name
from cclsearch.card.fields import read_field
from cclsearch.card.hardware import NOMINAL, find_candidates
from cclsearch.card.load import read_task
from cclsearch.card.model import PRECISION, Phase
from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line
from cclsearch.core.values import Value
from cclsearch.recording.table import RecordedRow
from cclsearch.space.table import count_ranks

# 4 for attention, 8 for the feed-forward part.
_PARAMS_PER_LAYER = 12
"""Parameters of a transformer layer divided by hidden size squared."""


def complete_card(
    data: Mapping[str, Any], rows: Sequence[RecordedRow], path: Path, task: Any
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The card with every field that a replay needs, and one line for each field set to a default.

    Raises UserError if a number of the task's work is missing: without the fixed work the rows have no meaning.
    """
    card = copy.deepcopy(dict(data))
    workload = _mapping(card, "workload")
    notes: list[str] = []
    card.setdefault("recording", path.parent.name)
    if task.name != read_task(card, str(path)):
        workload["task"] = task.name
    configs: list[Mapping[str, Value]] = [row.config for row in rows] or [{}]
    notes += task.complete_recorded_work(_mapping(workload, "data"), [load for row in rows for load in row.loads])
    for field in task.card_fields:
        _, problem = read_field(card, field)
        if problem is not None:
            raise UserError(f"{path}: {problem}")
    if task.needs_model:
        model = _mapping(workload, "model")
        phase = {"phase": lambda _: task.name} if task.name in list(Phase) else {}
        counts = Counter(str(config[PRECISION]) for config in configs if PRECISION in config)
        usual, *others = [name for name, _ in counts.most_common()] or ["bf16"]
        if others and _text(model.get("precision")) is None:
            model.setdefault("alternative_precisions", others)
        _fill_in(model, {**phase, "precision": lambda _: usual}, "model", notes, _text)
        arch = _mapping(model, "model_arch")
        if not _is_published(model, arch):
            _fill_in(arch, _ARCH, "model.model_arch", notes, _positive)
    hardware = _mapping(workload, "hardware")
    _complete_hardware(_mapping(hardware, "xpu_spec"), configs, notes)
    _mapping(hardware, "network_topo")
    framework = _mapping(_mapping(card, "Model-executor"), "framework")
    _fill_in(framework, {"name": lambda _: "unknown"}, "framework", notes, _text)
    return card, tuple(notes)


def _is_published(model: Mapping[str, Any], arch: Mapping[str, Any]) -> bool:
    """Whether the catalogue has the card's model with the shape that the card states; the catalogue's is used then."""
    known = find_by_name(str(model.get("model_family")))
    return known is not None and not differences(known, {n: int(v) for n in _ARCH if (v := _positive(arch.get(n)))})


def _complete_hardware(xpu: dict[str, Any], configs: Sequence[Mapping[str, Value]], notes: list[str]) -> None:
    largest = max(map(count_ranks, configs))
    _fill_in(xpu, {"type": lambda _: "GPU", "model": lambda _: "unknown"}, "hardware.xpu_spec", notes, _text)
    numbers: dict[str, Callable[[Mapping[str, Any]], Any]] = {
        "total_count": lambda _: largest,
        "count_per_node": lambda spec: min(8, int(spec["total_count"])),
    }
    _fill_in(xpu, numbers, "hardware.xpu_spec", notes, _positive)
    if not find_candidates(str(xpu["model"])):
        _stand_in(xpu, notes)


def _stand_in(xpu: dict[str, Any], notes: list[str]) -> None:
    """Give an unknown accelerator the missing numbers of `NOMINAL`, marked, so that no MFU is computed from them."""
    rate = next(iter(NOMINAL.peak_flops.values()))
    stated = {"peak_flops": rate, "memory_gb_per_s": NOMINAL.memory_gb_per_s, "memory_gb": NOMINAL.memory_gib}
    missing = {field: value for field, value in stated.items() if xpu.get(field) is None}
    xpu.update(missing)
    if {"peak_flops", "memory_gb_per_s"} & set(missing):
        xpu["nominal"] = True
        names = ", ".join(f"{field} {value:g}" for field, value in missing.items())
        notes.append(
            f"card: {one_line(str(xpu['model']), 40)!r} is not a known accelerator: predictions are nominal, with"
            f" {names} of a usual data-center GPU, until trials correct them (its numbers belong into"
            " hardware.xpu_spec)"
        )
    elif missing:
        notes.append(f"card: hardware.xpu_spec.memory_gb is missing; {NOMINAL.memory_gib:g} is used instead")


def _fill_in(
    part: dict[str, Any],
    makers: Mapping[str, Callable[[Mapping[str, Any]], Any]],
    where: str,
    notes: list[str],
    read: Callable[[Any], Any],
) -> None:
    for field, make in makers.items():
        if read(part.get(field)) is None:
            part[field] = make(part)
            notes.append(f"card: {where}.{field} is missing; {part[field]!r} is used instead")


def _mapping(part: dict[str, Any], key: str) -> dict[str, Any]:
    if not isinstance(part.get(key), dict):
        part[key] = {}
    mapping: dict[str, Any] = part[key]
    return mapping


def _positive(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        return None
    return float(value)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value.strip() and value.strip().upper() != "N/A" else None


def _guess_layers(arch: Mapping[str, Any]) -> int:
    params, hidden = _positive(arch.get("num_params")), _positive(arch.get("hidden_size"))
    if params and hidden:
        return max(1, round(params / (_PARAMS_PER_LAYER * hidden**2)))
    return max(2, round(32 * (params / 7e9) ** 0.25)) if params else 32


def _guess_hidden(arch: Mapping[str, Any]) -> int:
    params, heads = _positive(arch.get("num_params")), _positive(arch.get("num_heads"))
    hidden = math.sqrt(params / (_PARAMS_PER_LAYER * arch["num_layers"])) if params else 4096.0
    unit = heads or 128
    return max(1, round(hidden / unit)) * int(unit)


_ARCH: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "num_layers": _guess_layers,
    "hidden_size": _guess_hidden,
    "num_heads": lambda arch: max(1, int(arch["hidden_size"]) // int(_positive(arch.get("head_dim")) or 128)),
    "num_kv_heads": lambda arch: int(arch["num_heads"]),
    "head_dim": lambda arch: max(1, int(arch["hidden_size"]) // int(arch["num_heads"])),
    "intermediate_size": lambda arch: 4 * int(arch["hidden_size"]),
    "vocab_size": lambda _: 50257,
}
