"""Names of kernels: split into name and template arguments, shortened to a family, classified by a table of patterns.

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
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path

from cclsearch.core.content import project_root
from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line

# The identifying part of a kernel's name comes first, and patterns search all of it.
MAX_ARGUMENTS = 600
"""Length to which template arguments are cut."""

MAX_NAME = 4096
"""Longer names are cut, so that patterns take bounded time on any name."""

_NOISE = re.compile(r"\s*\[clone [^\]]*\]|(?<=\w)\.kd$|\(anonymous namespace\)::|<unnamed>::|\{anonymous\}::")
_SERIAL = re.compile(r"(?:[_.]\d+)+$")
_WRAPPERS = frozenset({"kernel", "kernel2", "device_kernel", "kentry", "globalkernel", "kernel_launcher", "run_kernel"})
"""Kernels of libraries that wrap any operation (CUTLASS, ck_tile): their template arguments name it."""
_ADAPTER = re.compile(r"^[\w:]*::enable_[\w]+<|^enable_[\w]+<")
_CUTE_DSL = re.compile(
    r"^(?:(?P<own>\w+?)_)?kernel_cutlass_(?:kernel_)?_*(?:main__)?(?P<function>\w*?)"
    r"(?=_object_at_|_tensor(?:ptr)?\d|_tensorptr|_CopyAtom|_None|_\d+$|$)"
)
"""Names that CuTe DSL generates: a prefix, module and class or function run together, and the types of arguments."""
_NO_OPERATION = re.compile(
    r"^$|^[\d\s]|^\(|^(?:ck_tile::)?gfx\d|^(?:true|false|u?int|float|double|void|unsigned.*|__\w+)$"
)


@dataclass(frozen=True)
class KernelName:
    """A kernel's name without its return type and its parameters."""

    name: str
    """Qualified name without template arguments: `flashinfer::norm::RMSNormKernel`."""
    arguments: str = ""
    """Template arguments as text (of a mangled name, the identifiers in it)."""

    @property
    def last(self) -> str:
        """The name without namespaces; of a wrapper (`cutlass::device_kernel`), all that identifies its operation."""
        return self.qualified if self.is_wrapper else self.name.rsplit("::", 1)[-1]

    @property
    def qualified(self) -> str:
        """The name with namespaces, and with template arguments if it is a wrapper."""
        return self.all if self.is_wrapper else self.name

    @property
    def is_wrapper(self) -> bool:
        """Whether only the template arguments name the kernel's operation."""
        return self.name.rsplit("::", 1)[-1].lower() in _WRAPPERS

    @property
    def all(self) -> str:
        """The name with its template arguments."""
        return f"{self.name}<{self.arguments}>" if self.arguments else self.name


def split_kernel_name(text: str) -> KernelName:
    """Return name and template arguments of a kernel, as any profiler prints it: demangled, mangled, or plain."""
    bare = _NOISE.sub("", text[:MAX_NAME].strip())
    if bare.startswith(("Memcpy ", "Memset ")):
        return KernelName(bare)  # an event of the profiler, whose parentheses hold no parameters
    if "kernel_cutlass_" in bare and (found := _CUTE_DSL.match(bare)):
        return KernelName(found["own"] or found["function"] or bare)
    if bare.startswith("_Z"):
        return _split_mangled(bare) or KernelName(bare)
    return _split_demangled(bare.replace("operator()", "operator"))


def _split_demangled(text: str) -> KernelName:
    if "<" not in text and "(" not in text:
        return KernelName(text.split(" ", 1)[1] if text.startswith("void ") else text)
    kept: list[str] = []
    arguments: list[str] = []
    stack: list[str] = []
    ended = False
    for letter in text:
        if letter in "<(" and (kept or stack):
            if letter == "(" and not stack:
                break  # the parameters
            stack.append(letter)
            ended = False
        elif stack and letter in ">)":
            if letter == ")" or stack[-1] == "<":
                stack.pop()
            if not stack:
                arguments.append(" ")
                continue
        if stack:
            arguments.append(letter if len(stack) > 1 or letter != "<" else "")
        elif letter == " ":
            ended = True
        elif letter not in "<>()":
            if ended and letter not in ":*&":  # what came before was the return type
                kept, arguments = [], []
            ended = False
            kept.append(letter)
    name = "".join(kept)
    return KernelName(name or text, "".join(arguments).strip()[:MAX_ARGUMENTS])


def _split_mangled(text: str) -> KernelName | None:
    """Return the parts of an Itanium-mangled name, without its types: only the identifiers name the operation."""
    at = 3 if text.startswith("_ZN") else 2
    parts: list[str] = []
    while at < len(text):
        found = re.compile(r"L?(\d{1,4})|St|K").match(text, at)
        if not found:
            break
        at = found.end()
        if found[1]:
            parts.append(text[at : at + int(found[1])])
            at += int(found[1])
            if not text.startswith("_ZN"):
                break
    names = [part for part in parts if part and not part.startswith("_GLOBAL__N")]
    if not names:
        return None
    inner: list[str] = []
    rest = text[at : at + 2 * MAX_ARGUMENTS]
    skip = 0
    for found in re.finditer(r"L[a-z]n?\d+E|S\d*_|DF16[b_]|(\d{1,4})(?=[A-Za-z_])", rest):
        if found[1] and found.start() >= skip and found.end() + int(found[1]) <= len(rest):
            skip = found.end() + int(found[1])
            inner.append(rest[found.end() : skip])
    return KernelName("::".join(names), " ".join(inner)[:MAX_ARGUMENTS])


@lru_cache(maxsize=8192)
def kernel_family(text: str) -> str:
    """Return the name without template arguments, parameters, return type and serial number.

    A wrapper keeps the argument that names its operation: `cutlass::device_kernel<flash::FlashAttnFwdSm90>`.
    """
    kernel = split_kernel_name(text)
    name = _SERIAL.sub("", kernel.name) or kernel.name
    if kernel.is_wrapper and (operation := _operation(kernel.arguments)):
        name = f"{name}<{operation}>"
    return one_line(name, 120) or one_line(text, 80)


def _operation(arguments: str) -> str:
    """Return the first template argument that names an operation, without its own arguments and adapters around it."""
    text = arguments
    while _ADAPTER.match(text):
        text = text.split("<", 1)[1]
    depth = 0
    parts = [""]
    for letter in text:
        depth += (letter in "<(") - (letter in ">)")
        if letter in ", " and depth == 0:
            parts.append("")
        elif depth == 0 and letter not in "<>()":
            parts[-1] += letter
    return next((part for part in parts if not _NO_OPERATION.match(part)), "")


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


PRODUCTS = (ComputeClass.GEMM, ComputeClass.ATTENTION, ComputeClass.CONVOLUTION, ComputeClass.MOE)
"""Classes of kernels with matrix products."""
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
