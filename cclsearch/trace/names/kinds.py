"""Classifies names: kernels, collectives, XLA operations, categories, data types, and the markers of steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise

from cclsearch.trace.events import CollectiveKind, Kind, Step
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
    """The compiled rules for collectives, XLA's operations and precisions."""

    collectives: tuple[Rule, ...]
    xla_communication: tuple[Rule, ...]
    xla_memory: re.Pattern[str]
    xla_container: re.Pattern[str]
    xla_compute: tuple[Rule, ...]
    precisions: tuple[Rule, ...]


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
        precisions=tuple(_rule(name, pattern) for name, pattern in read_table("precisions.yaml")["precisions"]),
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


def classify_precision(kernel: str) -> str:
    """Return the precision of the matrix units that a kernel uses (`bf16`); "" if its name does not say."""
    return _first(load_rules().precisions, kernel) or ""


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


XLA_PROGRAM = "xla_program"
"""Family of host calls that run a program; `readers/xla/table.py` makes steps of them."""
_MAX_NAME_CHARS = 2000


@dataclass(frozen=True)
class StepMarker:
    """A step marker, as its name describes it."""

    family: str
    source: str
    """The table's `step_source` if this marker marks the steps."""
    number: int | None = None
    num_prefill: int | None = None
    """Requests that the step prefills, and decodes; both None if the name does not say."""
    num_decode: int | None = None
    program: str = ""

    @property
    def has_counts(self) -> bool:
        """Whether the name states how many requests the step prefills or decodes."""
        return self.num_prefill is not None or self.num_decode is not None


@dataclass(frozen=True)
class MarkerFamily:
    """Markers that one framework writes."""

    name: str
    source: str
    patterns: tuple[re.Pattern[str], ...]
    ends_step: bool = False
    """Whether a marker ends a step instead of covering it."""


@dataclass(frozen=True)
class MarkerSpan:
    """One marker in a trace: its name and its span."""

    name: str
    start_ns: int
    end_ns: int


@cache
def load_families() -> tuple[MarkerFamily, ...]:
    """Load the table of the package, in the order of preference."""
    return tuple(
        MarkerFamily(
            item["family"], item["source"], tuple(map(re.compile, item["patterns"])), bool(item.get("ends_step"))
        )
        for item in read_table("steps.yaml")
    )


@cache
def _any_marker() -> re.Pattern[str]:
    """One pattern that every marker's name matches: most names are not markers'."""
    patterns = [pattern.pattern for family in load_families() for pattern in family.patterns]
    return re.compile("|".join(re.sub(r"\(\?P<\w+>", "(?:", pattern) for pattern in patterns))


def read_marker(name: str) -> StepMarker | None:
    """Return the marker for a name (`ProfilerStep#12`, `step[DECODE bs=32]`); None if it is not a step marker's."""
    return _read_marker(name[:_MAX_NAME_CHARS])


@lru_cache(4096)
def _read_marker(name: str) -> StepMarker | None:
    if not _any_marker().match(name):
        return None
    for family in load_families():
        for pattern in family.patterns:
            if found := pattern.match(name):
                return _describe(family, found.groupdict())
    return None


def _describe(family: MarkerFamily, groups: dict[str, str | None]) -> StepMarker:
    number, prefill, decode = (
        None if groups.get(key) is None else int(groups[key] or 0) for key in ("number", "prefill", "decode")
    )
    counted = prefill is not None or decode is not None
    return StepMarker(
        family.name,
        family.source,
        number,
        (prefill or 0) if counted else None,
        (decode or 0) if counted else None,
        groups.get("program") or "",
    )


def steps_of_marks(
    names: Iterable[str], marks_named: Callable[[frozenset[str]], Sequence[MarkerSpan]]
) -> tuple[str, tuple[Step, ...]]:
    """Return the source and the steps, by start, of the first family that marks any.

    `names`: the distinct names of the trace. `marks_named`: returns the marks with these names, by start.
    """
    found: dict[str, set[str]] = {}
    for name in names:
        if marker := read_marker(name):
            found.setdefault(marker.family, set()).add(name)
    for family in load_families():
        if family.name == XLA_PROGRAM or family.name not in found:
            continue
        marks = marks_named(frozenset(found[family.name]))
        steps = _steps_between(marks) if family.ends_step else _steps_around(marks)
        if steps:
            return family.source, steps
    return "", ()


def _steps_around(marks: Sequence[MarkerSpan]) -> tuple[Step, ...]:
    """Return one step for each outermost marker; it takes the name of a nested marker if only that has counts."""
    steps: list[Step] = []
    for mark in marks:
        marker = read_marker(mark.name)
        if marker is None:
            continue
        if steps and mark.start_ns < steps[-1].end_ns:  # the same marker a second time, or one nested in another
            outer = read_marker(steps[-1].name)
            if marker.has_counts and outer is not None and not outer.has_counts:
                last = steps[-1]
                steps[-1] = Step(last.number, mark.name, last.start_ns, last.end_ns, last.complete)
            continue
        number = len(steps) if marker.number is None else marker.number
        steps.append(Step(number, mark.name, mark.start_ns, mark.end_ns))
    return tuple(steps)


def _steps_between(marks: Sequence[MarkerSpan]) -> tuple[Step, ...]:
    """Return the steps that end with a marker: from one marker's end to the next one's.

    The parts before the first marker and after the last are incomplete steps: they bound the periods. Of several
    optimizers, which all end the same step, the last one counts. One marker alone marks no step.
    """
    ends = sorted(mark.end_ns for mark in marks if marks[-1].name == mark.name)
    if len(ends) < 2:
        return ()
    name = marks[-1].name
    bounds = [min(0, ends[0]), *ends]
    steps = [Step(i, name, start, end, i > 0) for i, (start, end) in enumerate(pairwise(bounds))]
    return (*steps, Step(len(steps), name, ends[-1], 2**62, complete=False))
