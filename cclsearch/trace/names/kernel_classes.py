"""The class of a kernel, from its name: one table of patterns as data, preceded by a user's own lines.

`rules/kernel_classes.csv` has a pattern per line with its class and its source. The first matching pattern decides
(Python regular expressions, case ignored). `match` selects the searched text: `last` is the name without namespaces,
`name` has them, `qualified` also has the template arguments of kernels that wrap any operation
(`cutlass::device_kernel`), and `all` those of every kernel. A user's lines come first: the file in the environment
variable CCL_KERNEL_CLASSES (`ccl-search score --kernel-classes FILE`), then `kernel_classes.csv` in the project.
"""

from __future__ import annotations

import csv
import io
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from importlib import resources
from pathlib import Path

from cclsearch.core.content import project_root
from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line
from cclsearch.trace.names.kernel_names import KernelName, split_kernel_name


class ComputeClass(IntEnum):
    """Class of a compute kernel, from its name (`rules/kernel_classes.csv`).

    A fused kernel has the class that comes first in this order: moe, state_space, attention, convolution, gemm, norm,
    rope, sampling, quantization, optimizer, embedding, reduction, elementwise. What also communicates communicates.
    """

    OTHER = 0
    GEMM = 1
    """Matrix products and their split-K reductions."""
    ATTENTION = 2
    NORM = 3
    ELEMENTWISE = 4
    """Also data movement: copies, gathers, concatenations, writes to the cache of keys and values."""
    REDUCTION = 5
    """Also softmax, losses, scans, sorts and selections."""
    MOE = 6
    """Routing, permutation and products of experts; a metric asks the card whether the model has experts."""
    OPTIMIZER = 7
    EMBEDDING = 8
    CONVOLUTION = 9
    ROPE = 10
    """Rotary position embedding."""
    QUANTIZATION = 11
    SAMPLING = 12
    """Sampling of tokens, and checks of drafted tokens."""
    STATE_SPACE = 13
    """State-space models and linear attention."""


FILE_NAME = "kernel_classes.csv"
VARIABLE = "CCL_KERNEL_CLASSES"
CLASSES = ("communication", "memory", *(member.name.lower() for member in ComputeClass))
"""Classes that a line may name; `memory` are copies and fills that a runtime does with kernels."""
OTHER = ComputeClass.OTHER.name.lower()


@dataclass(frozen=True)
class ClassRule:
    """One line of the table."""

    name: str
    match: str
    pattern: re.Pattern[str]


@dataclass(frozen=True)
class KernelClasses:
    """The lines in force, and the classes of the names seen so far: a trace repeats a name many times."""

    rules: tuple[ClassRule, ...]
    fingerprint: str
    known: dict[str, str] = field(default_factory=dict)

    def find(self, kernel: str) -> str:
        """Return the class of a kernel; `other` if no line matches."""
        found = self.known.get(kernel)
        if found is None:
            found = self.known[kernel] = self._search(split_kernel_name(kernel))
        return found

    def _search(self, kernel: KernelName) -> str:
        texts = {match: getattr(kernel, match) for match in ("last", "name", "qualified", "all")}
        return next((rule.name for rule in self.rules if rule.pattern.search(texts[rule.match])), OTHER)


def kernel_class(name: str) -> str:
    """Return the class of the kernel of this name, one of `CLASSES`."""
    return load_classes().find(name)


def load_classes() -> KernelClasses:
    """Return the table in force; raises UserError if a user's own table is malformed."""
    return _load(os.environ.get(VARIABLE, ""), _project(os.getcwd()))


@cache
def _project(folder: str) -> str:
    """Return the project's folder; `folder` is the working directory."""
    return str(project_root())


@cache
def _load(named: str, project: str) -> KernelClasses:
    shipped = resources.files("cclsearch.trace.rules").joinpath(FILE_NAME).read_text("utf-8")
    own = Path(project) / FILE_NAME
    texts = [(named, _read(Path(named)))] if named else []
    texts += [(str(own), _read(own))] if own.is_file() else []
    texts.append((FILE_NAME, shipped))
    rules = tuple(rule for source, text in texts for rule in _parse(text, source))
    return KernelClasses(rules, f"{zlib.crc32(''.join(text for _, text in texts).encode()):08x}")


def check_classes(path: Path) -> None:
    """Raise UserError if the user's table at `path` cannot be used."""
    tuple(_parse(_read(path), str(path)))


def use_classes(path: Path) -> None:
    """Use the user's table at `path` in this process; raises UserError if it cannot be used."""
    check_classes(path)
    os.environ[VARIABLE] = str(path.absolute())


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"the kernel classes {str(path)!r} cannot be read: {reason}") from error


def _parse(text: str, source: str) -> Iterator[ClassRule]:
    rows = csv.DictReader(io.StringIO(text))
    if rows.fieldnames is None or not {"class", "pattern"} <= set(rows.fieldnames):
        raise UserError(f"{source}: its first line must name the columns class and pattern (also: match, source)")
    for row in rows:
        name, match, pattern = ((row.get(column) or "").strip() for column in ("class", "match", "pattern"))
        where = f"{source}, line {rows.line_num}"
        if name not in CLASSES:
            raise UserError(f"{where}: there is no kernel class {one_line(name, 60)!r}; classes: {', '.join(CLASSES)}")
        if match not in ("", "last", "name", "qualified", "all"):
            raise UserError(f"{where}: match must be last, name, qualified or all, not {one_line(match, 60)!r}")
        try:
            compiled = re.compile(pattern, re.IGNORECASE)
        except re.error as error:
            raise UserError(f"{where}: {one_line(pattern, 80)!r} is not a regular expression: {error}") from error
        if not pattern:
            raise UserError(f"{where}: the pattern is empty: it would match every kernel")
        yield ClassRule(name, match or "all", compiled)
