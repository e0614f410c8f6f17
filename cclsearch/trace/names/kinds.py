"""Classifies names: kernels, collectives, XLA operations, the profilers' own categories, and data types."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from cclsearch.trace.events import CollectiveKind, Kind
from cclsearch.trace.names.kernels import ComputeClass, kernel_class
from cclsearch.trace.rules import read_table

Rule = tuple[str, re.Pattern[str]]

KINETO_KINDS = {c: Kind[kind] for kind, names in read_table("names.yaml")["kineto"].items() for c in names.split()}
"""Kineto's categories, of 2021 and of today; events of other categories (`python_function`, `Trace`) are dropped."""

UNSUPPORTED_PREFIX = "mtia_"
BLOCKING = frozenset(map(CollectiveKind, read_table("names.yaml")["blocking"]))
"""Collectives that no rank leaves before the last rank has entered."""

_FILL = re.compile(r"fill|memset", re.IGNORECASE)

DTYPE_BYTES = {name: size for size, names in read_table("names.yaml")["dtype_bytes"].items() for name in names.split()}


@dataclass(frozen=True)
class NameRules:
    """The compiled rules for collectives and for XLA's operations."""

    collectives: tuple[Rule, ...]
    xla_communication: tuple[Rule, ...]
    xla_memory: re.Pattern[str]
    xla_container: re.Pattern[str]
    xla_compute: tuple[Rule, ...]


@cache
def load_rules() -> NameRules:
    """Load the rules of the package."""
    data = read_table("names.yaml")
    return NameRules(
        collectives=tuple(_rule(kind, pattern) for kind, pattern in data["collectives"]),
        xla_communication=tuple(_rule(kind, pattern) for pattern, kind in data["xla_communication"].items()),
        xla_memory=_any_of(data["xla_memory"]),
        xla_container=_any_of(data["xla_container"]),
        xla_compute=tuple(_rule(name, pattern) for name, pattern in data["xla_compute"]),
    )


def classify_kernel(name: str) -> tuple[Kind, ComputeClass]:
    """Return the kind of the kernel of this name, and the class if it computes."""
    found = kernel_class(name)
    if found == "communication":
        return Kind.COMM, ComputeClass.OTHER
    if found == "memory":
        return (Kind.MEMSET if _FILL.search(name) else Kind.MEMCPY), ComputeClass.OTHER
    return Kind.COMPUTE, ComputeClass[found.upper()]


def classify_operator(name: str) -> ComputeClass:
    """Return the class of an operator (`aten::mm`), which computes: its kernel's class, or OTHER."""
    found = kernel_class(name.rsplit("::", 1)[-1])
    return ComputeClass.__members__.get(found.upper(), ComputeClass.OTHER)


@cache
def load_precisions() -> tuple[Rule, ...]:
    """Load the rules of `rules/precisions.yaml`."""
    return tuple(_rule(name, pattern) for name, pattern in read_table("precisions.yaml")["precisions"])


def classify_precision(kernel: str) -> str:
    """Return the precision of the matrix units that a kernel uses (`bf16`); "" if its name does not say."""
    return _first(load_precisions(), kernel) or ""


def classify_collective(name: str) -> CollectiveKind:
    """Return the collective that the name of a kernel, operator or argument means."""
    return CollectiveKind(_first(load_rules().collectives, name) or "unknown")


def classify_xla(category: str, name: str) -> tuple[Kind, CollectiveKind | None, ComputeClass]:
    """Return kind, collective and class of an XLA operation, from its `hlo_category` if present, else from its name."""
    rules, name = load_rules(), name.lstrip("%")
    for text in filter(None, (category, name)):
        collective = _first(rules.xla_communication, text)
        if collective:
            return Kind.COMM, CollectiveKind(collective), ComputeClass.OTHER
        if rules.xla_container.search(text):
            return Kind.CONTAINER, None, ComputeClass.OTHER
        if rules.xla_memory.search(text):
            return Kind.MEMCPY, None, ComputeClass.OTHER
    found = _first(rules.xla_compute, name) if not category else _first(rules.xla_compute, category)
    return Kind.COMPUTE, None, ComputeClass[(found or "other").upper()]


def bytes_per_element(dtype: str | None) -> int | None:
    """Return the bytes of one element; None for an unknown data type (never a guess)."""
    if not dtype:
        return None
    name = dtype.rsplit("::", 1)[-1].replace(" ", "").replace("_", "").lower()
    if name.startswith("float8") or name.startswith("f8e"):
        return 1
    return DTYPE_BYTES.get(name)


def _first(rules: tuple[Rule, ...], text: str) -> str | None:
    return next((name for name, pattern in rules if pattern.search(text)), None)


def _any_of(patterns: list[str]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns), re.IGNORECASE)


def _rule(name: str, pattern: str) -> Rule:
    return name, re.compile(pattern, re.IGNORECASE)
