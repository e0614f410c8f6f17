"""Classifies names: kernels, collectives, XLA operations, the profilers' own categories, and data types."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

from cclsearch.trace.events import CollectiveKind, Kind
from cclsearch.trace.names.kernels import ComputeClass, kernel_class

Rule = tuple[str, re.Pattern[str]]

_KINETO_CATEGORIES = {
    Kind.COMPUTE: "kernel Kernel",
    Kind.MEMCPY: "gpu_memcpy Memcpy",
    Kind.MEMSET: "gpu_memset Memset",
    Kind.RUNTIME: "cuda_runtime cuda_driver hip_runtime xpu_runtime privateuse1_runtime privateuse1_driver Runtime",
    Kind.CPU_OP: "cpu_op Operator",
    Kind.ANNOTATION: "user_annotation",
    Kind.DEVICE_ANNOTATION: "gpu_user_annotation",
    Kind.SYNC: "cuda_sync",
    Kind.OVERHEAD: "overhead",
}
KINETO_KINDS = {category: kind for kind, names in _KINETO_CATEGORIES.items() for category in names.split()}
"""Kineto's categories, of 2021 and of today; events of other categories (`python_function`, `Trace`) are dropped."""

UNSUPPORTED_PREFIX = "mtia_"
BLOCKING = frozenset(
    {
        *(CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER),
        *(CollectiveKind.ALL_TO_ALL, CollectiveKind.BARRIER),
    }
)
"""Collectives that no rank leaves before the last rank has entered."""

_FILL = re.compile(r"fill|memset", re.IGNORECASE)

_DTYPES = {
    1: "char signedchar int8 s8 u8 byte uint8 unsignedchar bool pred",
    2: "half float16 f16 bfloat16 bf16 short shortint int16 s16 u16 uint16",
    4: "float float32 f32 int int32 s32 u32 uint32",
    8: "double float64 f64 long longint longlongint int64 s64 u64 uint64 complexfloat c64",
    16: "c128 complexdouble",
}
"""Bytes of an element -> its data types."""
DTYPE_BYTES = {name: size for size, names in _DTYPES.items() for name in names.split()}


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
    import yaml

    data = yaml.safe_load(resources.files("cclsearch.trace.rules").joinpath("names.yaml").read_text("utf-8"))
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
    import yaml

    data = yaml.safe_load(resources.files("cclsearch.trace.rules").joinpath("precisions.yaml").read_text("utf-8"))
    return tuple(_rule(name, pattern) for name, pattern in data["precisions"])


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
