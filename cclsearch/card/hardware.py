"""Accelerators by name: peak rates, memory, links. The numbers and their sources are in `hardware.yaml`."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from cclsearch.core.content import content_roots
from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line
from cclsearch.core.values import Model
from cclsearch.core.yaml_file import read_yaml, validate_mapping

HARDWARE_FILE = "hardware.yaml"

_IGNORED_TOKENS = frozenset(
    {"nvidia", "tesla", "amd", "instinct", "google", "cloud", "gpu", "tpu", "tensor", "core", "chip"}
) | {"hbm", "hbm2", "hbm2e", "hbm3", "hbm3e"}
_MEMORY = re.compile(r"^(\d{1,4})(?:gb|gib|g)$")


class Accelerator(Model):
    """One kind of chip. Rates are dense peaks; links are per accelerator and direction."""

    name: str
    """Key in `hardware.yaml`: `a100-40`, `tpu-v5e`, `cpu`."""
    kind: Literal["gpu", "tpu", "cpu"]
    aliases: tuple[str, ...] = ()
    memory_gib: float = Field(gt=0)
    variants_gib: tuple[float, ...] = ()
    """Memory sizes in which the same chip is sold, if its other numbers are the same."""
    peak_flops: dict[str, float]
    """FLOP/s by dtype (`bf16`, `fp16`, `tf32`, `fp32`, `fp8`, ...)."""
    memory_gb_per_s: float = Field(gt=0)
    scale_up_gbps: float = Field(gt=0)
    """Gbit/s inside a node (NVLink, xGMI) or over ICI, one direction."""
    scale_out_gbps: float = Field(gt=0)
    """Gbit/s to other nodes, one direction."""
    scale_up_latency_us: float = Field(gt=0)
    scale_out_latency_us: float = Field(gt=0)
    slices: tuple[tuple[int, ...], ...] = ()
    """Chips along each axis of the TPU slices that are offered; empty for other accelerators."""
    nominal: bool = False
    """Whether no vendor states these numbers: good enough to order predictions, never to report MFU."""
    source: str

    @property
    def memory_bytes(self) -> int:
        """Device memory in bytes."""
        return int(self.memory_gib * 2**30)

    @property
    def hbm_bytes_per_s(self) -> float:
        """Device-memory bandwidth in bytes per second."""
        return self.memory_gb_per_s * 1e9

    def peak_flops_of(self, precision: str) -> float | None:
        """Dense peak FLOP/s at that dtype; None if the chip has no such units or no vendor states it."""
        return self.peak_flops.get(canonical_precision(precision))


PRECISIONS = {
    "bfloat16": "bf16",
    "torch.bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "tensorfloat32": "tf32",
    "float8": "fp8",
    "fp8_e4m3": "fp8",
}
"""Alternative names of a dtype -> the name used here."""
PRECISION_BITS = {"fp64": 64, "fp32": 32, "tf32": 19, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "fp4": 4}
"""Precision -> bits of an operand that the matrix units use."""


def canonical_precision(name: str) -> str:
    """Return a dtype's name as this project writes it: `bf16` for `torch.bfloat16`."""
    return PRECISIONS.get(name.lower(), name.lower())


def find_accelerator(name: str, memory_gib: float | None = None) -> Accelerator:
    """The accelerator of that name (key, alias, or what torch, JAX or nvidia-smi report: `NVIDIA H100 80GB HBM3`).

    `memory_gib` decides between variants (A100 of 40 and of 80). Raises UserError if the name is unknown or ambiguous,
    or if no variant has that much memory; a name that only contains a known one is unknown.
    """
    candidates = _candidates(name)
    wanted = memory_gib if memory_gib is not None else _memory_in(name)
    if not candidates:
        known = ", ".join(sorted(load_accelerators()))
        raise UserError(
            f"there is no accelerator {one_line(name, 80)!r} in hardware.yaml; known: {known} "
            "(a project may add its own in a hardware.yaml in its root)"
        )
    if wanted is None:
        if len(candidates) == 1:
            return candidates[0]
        names = " and ".join(candidate.name for candidate in candidates)
        raise UserError(
            f"accelerator {one_line(name, 80)!r} may be {names}: give its memory (memory_gb), or one of these names"
        )
    large_enough = [c for c in candidates if wanted <= 1.1 * max(c.memory_gib, *c.variants_gib, 0.0)]
    if not large_enough and candidates[0].kind != "cpu":
        sizes = ", ".join(f"{candidate.memory_gib:g} GiB" for candidate in candidates)
        raise UserError(f"accelerator {one_line(name, 80)!r} has {sizes} of memory, not {wanted:g} GiB")
    return min(large_enough or candidates, key=lambda candidate: candidate.memory_gib)


def match_accelerator(name: str, memory_gib: float | None = None) -> Accelerator | None:
    """As `find_accelerator`, but None if nothing fits or the name is ambiguous."""
    try:
        return find_accelerator(name, memory_gib)
    except UserError:
        return None


def load_accelerators() -> dict[str, Accelerator]:
    """Every accelerator by its key; a project's `hardware.yaml` takes precedence over the shipped one."""
    shipped = Path(__file__).with_name(HARDWARE_FILE)
    own = [root / HARDWARE_FILE for root in content_roots() if (root / HARDWARE_FILE).is_file()]
    known: dict[str, Accelerator] = {}
    for path in (*own, shipped):
        stamp = path.stat()
        for accelerator in _read(path, stamp.st_mtime_ns, stamp.st_size):
            known.setdefault(accelerator.name, accelerator)
    return known


@cache
def _read(path: Path, mtime_ns: int, size: int) -> tuple[Accelerator, ...]:
    entries = read_yaml(path).get("accelerators")
    if not isinstance(entries, dict):
        raise UserError(f"{path}: `accelerators` must be a mapping of names to fields, not {type(entries).__name__}")
    found = []
    for name, entry in entries.items():
        if not isinstance(entry, dict):
            raise UserError(f"{path}: accelerators.{name} must be a mapping, not {type(entry).__name__}")
        found.append(validate_mapping(Accelerator, {"name": name, **entry}, f"{path}: accelerators.{name}"))
    return tuple(found)


def _tokens(name: str) -> list[str]:
    return [token for token in re.split(r"[^a-z0-9]+", name.lower()) if token]


def _bare(name: str) -> str:
    """The name without vendor, memory size and kind of memory: `NVIDIA A100-SXM4-40GB` -> `a100-sxm4`."""
    return "-".join(token for token in _tokens(name) if token not in _IGNORED_TOKENS and not _MEMORY.match(token))


def _memory_in(name: str) -> float | None:
    sizes = [float(match.group(1)) for token in _tokens(name) if (match := _MEMORY.match(token))]
    return sizes[0] if len(sizes) == 1 else None


def _candidates(name: str) -> list[Accelerator]:
    known = load_accelerators()
    exact = "-".join(_tokens(name))
    if exact in known:
        return [known[exact]]
    bare = _bare(name)
    if not bare:
        return []
    return [a for a in known.values() if bare in {_bare(alias) for alias in (a.name, *a.aliases)}]
