"""Names of kernels as profilers print them: split into name and template arguments, and shortened to a family."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

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
