"""A workload card for scoring traces: it may miss fields, since each metric asks only for those that it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from cclsearch.card.load import inspect_card
from cclsearch.card.model import Card, Hardware, ModelArch, MoEArch, Phase
from cclsearch.trace.events import Reason
from cclsearch.trace.result import NotAvailable

_SETTINGS = {
    "num_accelerators": "num_accelerators",
    "accelerators_per_node": "accelerators_per_node",
    "global_batch_size": "batch_size",
    "memory_gib": "memory_gb",
}
"""Field of a card -> its name in `--set`, if that differs."""


class KnownFields:
    """The fields that a card has; asking for another raises NotAvailable with the setting that gives it."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        values: dict[str, Any] = self.__dict__["_values"]
        if name in values:
            return values[name]
        setting = _SETTINGS.get(name, name)
        raise NotAvailable(Reason.CARD_MISSING_FIELD, f"the card has no {name}: give --set {setting}=...")

    def number(self, name: str) -> int:
        """Return a whole number of the task's work."""
        return int(getattr(self, name))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KnownFields) and other._values == self._values

    def __hash__(self) -> int:
        return hash(tuple(sorted(self._values)))


def load_scoring_card(name: str | None, overlays: Sequence[str] = (), sets: Sequence[str] = ()) -> Card:
    """Return the card of that name or path, whole or with the fields that it has; None starts from an empty card.

    Raises UserError if the file has no `workload` section, or if a setting names an unknown field.
    """
    report = inspect_card(name, overlays, sets)
    return report.card or cast(Card, _partial(report.values, report.name))


def _partial(values: Mapping[str, Any], name: str) -> KnownFields:
    hardware = {field: values[field] for field in Hardware.model_fields if field in values}
    renamed = {"total_count": "num_accelerators", "count_per_node": "accelerators_per_node", "memory_gb": "memory_gib"}
    hardware |= {new: values[old] for old, new in renamed.items() if old in values and new not in hardware}
    optional = dict.fromkeys(field for field, info in Hardware.model_fields.items() if not info.is_required())
    phase = Phase(values["phase"]) if "phase" in values else None
    known: dict[str, Any] = {
        "name": name,
        "title": values.get("description", name),
        "task": values.get("task") or (phase or Phase.TRAINING).value,
        "arch": _partial_model(values),
        "hardware": KnownFields({**optional, **hardware}),
        "alternative_precisions": values.get("alternative_precisions", ()),
        "notes": (),
    }
    work = {"global_batch_size": "batch_size", "seq_len": "seq_len"}
    known |= {field: values[key] for field, key in work.items() if key in values}
    known |= {field: values[field] for field in ("precision", "framework") if field in values}
    known |= {"phase": phase} if phase is not None else {}
    return KnownFields(known)


def _partial_model(values: Mapping[str, Any]) -> KnownFields | ModelArch:
    defaults = {name: info.default for name, info in ModelArch.model_fields.items() if not info.is_required()}
    arch = {**defaults, **{name: values[name] for name in ModelArch.model_fields if name in values}}
    experts = {name: values[name] for name in MoEArch.model_fields if name in values}
    is_moe = values.get("moe", True if "num_experts" in values else None)
    arch.pop("moe", None)
    if is_moe is not None or {"num_layers", "hidden_size", "intermediate_size"} <= set(values):
        arch["moe"] = KnownFields(experts) if is_moe else None
    if all(name in arch for name in ModelArch.model_fields) and not is_moe:
        return ModelArch(**arch)
    return KnownFields(arch)
