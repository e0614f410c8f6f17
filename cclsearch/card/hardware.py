"""Accelerators by name: peak rates, memory, links. The numbers and their sources are in `hardware.yaml`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from cclsearch.core.content import content_roots
from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line
from cclsearch.core.values import Model
from cclsearch.core.yaml_file import read_yaml, validate_mapping

HARDWARE_FILE = "hardware.yaml"

_IGNORED_TOKENS = frozenset(
    {"nvidia", "tesla", "geforce", "amd", "instinct", "google", "cloud", "intel", "habana", "aws"}
    | {"gpu", "tpu", "tensor", "core", "chip", "accelerator"}
) | {"hbm", "hbm2", "hbm2e", "hbm3", "hbm3e"}
_TPU = re.compile(r"^tpu(?=v?\d)")
_MEMORY = re.compile(r"^(\d{1,4})(?:gb|gib|g)$")
# Drivers report `NVIDIA GH200 480GB`: the memory of the CPU, not of the GPU.
_CPU_MEMORY = "480gb"
"""Part of a device's name to ignore as its memory."""


class Accelerator(Model):
    """One kind of chip. Rates are dense peaks; links are per accelerator and direction."""

    name: str
    """Key in `hardware.yaml`: `a100-40`, `tpu-v5e`, `cpu`."""
    kind: Literal["gpu", "tpu", "npu", "cpu"]
    """`npu`: Gaudi, Trainium and other chips that run compiled graphs."""
    aliases: tuple[str, ...] = ()
    memory_gib: float = Field(gt=0)
    variants_gib: tuple[float, ...] = ()
    """Memory sizes in which the same chip is sold, if its other numbers are the same."""
    peak_flops: dict[str, float] = Field(min_length=1)
    """FLOP/s by dtype (`bf16`, `fp16`, `tf32`, `fp32`, `fp8`, ...)."""
    memory_gb_per_s: float = Field(gt=0)
    scale_up_gbps: float = Field(gt=0)
    """Gbit/s inside a node (NVLink, xGMI) or over ICI, one direction."""
    scale_out_gbps: float = Field(gt=0)
    """Gbit/s to other nodes, one direction."""
    scale_up_latency_us: float = Field(gt=0)
    scale_out_latency_us: float = Field(gt=0)
    scale_up_domain: int | None = Field(default=None, ge=1)
    """Accelerators that the scale-up links connect, if more than a node (72 for GB200 NVL72); None: one node."""
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
        name = canonical_precision(precision)
        return self.peak_flops.get(_RATE_OF.get(name, name))

    def rate_for(self, precision: str) -> tuple[str, float]:
        """Return the dtype whose units compute that precision and its FLOP/s: itself or its entry in `_COMPUTED_AS`."""
        name = canonical_precision(precision)
        name = _RATE_OF.get(name, name)
        order = (name, *_COMPUTED_AS.get(name, ("bf16", "fp16", "fp32")), *self.peak_flops)
        found = next(dtype for dtype in order if dtype in self.peak_flops)
        return found, self.peak_flops[found]

    @property
    def sizes_gib(self) -> tuple[float, ...]:
        """Every memory size in which it is sold, smallest first."""
        return tuple(sorted({self.memory_gib, *self.variants_gib}))


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
_RATE_OF = {"mxfp8": "fp8", "fp8_e5m2": "fp8", "nvfp4": "fp4", "mxfp4": "fp4"}
_RATE_OF |= dict.fromkeys(("fp8-delayed", "fp8-blockwise", "fp8-full"), "fp8")
"""Formats of scaled blocks -> the dtype whose units compute them at the same rate."""
# bf16 for fp32 is JAX's default on TPUs.
_COMPUTED_AS = {
    "fp4": ("fp8", "bf16", "fp16", "tf32", "fp32"),
    "fp8": ("bf16", "fp16", "tf32", "fp32"),
    "int8": ("bf16", "fp16", "fp32"),
    "bf16": ("tf32", "fp32"),
    "fp16": ("tf32", "fp32", "bf16"),
    "tf32": ("fp32", "bf16"),
    "fp32": ("tf32", "bf16"),
    "fp64": ("fp32",),
}
"""Dtype -> the next wider dtype, which computes it on a chip without units for it."""
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
    candidates = find_candidates(name)
    wanted = memory_gib if memory_gib is not None else memory_in(name)
    if not candidates:
        raise UserError(f"there is no accelerator {one_line(name, 80)!r}{hint_accelerator(name)}")
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


def find_usual(name: str) -> Accelerator | None:
    """The accelerator of a name without a memory size, in its smallest size; None if unknown."""
    # A configuration that fits into the smallest size that is sold fits into the others too.
    exact = match_accelerator(name)
    return exact or min(find_candidates(name), key=lambda candidate: candidate.memory_gib, default=None)


def hint_accelerator(name: str) -> str:
    """Return the suffix of an error about an unknown accelerator: the nearest known name, and where the others are."""
    names = {_bare(alias): each.name for each in load_accelerators().values() for alias in (each.name, *each.aliases)}
    near = difflib.get_close_matches(_bare(name), names, n=1, cutoff=0.7)
    guess = f"did you mean {names[near[0]]!r}? " if near else ""
    return f" ({guess}`ccl-search accelerators` lists the known ones)"


def state_accelerator(
    name: str, memory_gib: float | None, peak_flops: Mapping[str, Any] | None, memory_gb_per_s: float | None
) -> Accelerator | None:
    """The known accelerator with the numbers that a card states instead; one of these numbers alone if it is unknown.

    None if it is unknown and the numbers do not suffice. An unknown one gets the links and latencies of `NOMINAL`.
    """
    found = match_accelerator(name, memory_gib) or find_usual(name)
    stated: dict[str, Any] = {"memory_gb_per_s": memory_gb_per_s} if memory_gb_per_s else {}
    if found is None:
        if not peak_flops or not memory_gb_per_s:
            return None
        found = NOMINAL.model_copy(update={"name": name, "nominal": False, "peak_flops": {}, "source": "the card"})
    if peak_flops:
        stated["peak_flops"] = {**found.peak_flops, **peak_flops}
    if memory_gib:
        stated["memory_gib"] = memory_gib
    return found.model_copy(update=stated)


# Good enough to order predictions; a note says so, and no MFU is computed from it.
NOMINAL = Accelerator(
    name="unknown",
    kind="gpu",
    memory_gib=80,
    peak_flops={"bf16": 300e12},
    memory_gb_per_s=2000,
    scale_up_gbps=2400,
    scale_out_gbps=200,
    scale_up_latency_us=3,
    scale_out_latency_us=8,
    nominal=True,
    source="nominal numbers of a data-center GPU, ours: only for ordering predictions",
)
"""Stand-in for the accelerator of a recording that neither names a known one nor states its numbers."""


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
    return [token for part in re.split(r"[^a-z0-9]+", name.lower()) if (token := _TPU.sub("", part))]


def _bare(name: str) -> str:
    """The name without vendor, memory size and kind of memory: `NVIDIA A100-SXM4-40GB` -> `a100-sxm4`."""
    return "-".join(token for token in _tokens(name) if token not in _IGNORED_TOKENS and not _MEMORY.match(token))


def memory_in(name: str) -> float | None:
    """The memory size in GiB that a name contains (`A100-SXM4-40GB`); None if it contains none, or several."""
    tokens = [token for token in _tokens(name) if token != _CPU_MEMORY]
    sizes = [float(match.group(1)) for token in tokens if (match := _MEMORY.match(token))]
    return sizes[0] if len(sizes) == 1 else None


def find_candidates(name: str) -> list[Accelerator]:
    """Every accelerator with that name, of any memory size: more than one for `a100`."""
    known = load_accelerators()
    exact = "-".join(_tokens(name))
    if exact in known:
        return [known[exact]]
    bare = _bare(name)
    if not bare:
        return []
    return [a for a in known.values() if bare in {_bare(alias) for alias in (a.name, *a.aliases)}]
