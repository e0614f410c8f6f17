"""Joins start and done of XLA's collectives, and describes them; sizes are from shapes, not from `bytes_accessed`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cclsearch.trace.events import POINT_TO_POINT, Collective, CollectiveKind, Kind
from cclsearch.trace.names.kinds import bytes_per_element, classify_collective, classify_xla
from cclsearch.trace.readers.xla.planes import Stats, XlaRow

_SHAPE = re.compile(r"\b(?P<dtype>(?!token|opaque)[a-z]\w*)\[(?P<dims>(?:\d{1,15}(?:,|(?=\])))*)\]")
_OPCODE = re.compile(r"\s*(?P<opcode>[a-z][a-z0-9-]*)\(")
_MAX_TEXT = 200_000

Leaf = tuple[str, int]


@dataclass(frozen=True)
class ResultSize:
    """Total size of the arrays that a collective results in."""

    dtype: str
    """Data type of the largest array."""
    nelems: int
    nbytes: int | None
    """None if the size of a data type is unknown."""


@lru_cache(maxsize=4096)
def measure_result(shape: str, text: str, kind: CollectiveKind, is_start: bool) -> ResultSize | None:
    """Return the size of the operation's results on one device; None without a shape.

    `shape`: the result's shape if known separately, else "". `text`: the operation as HLO prints it. The tuple of a
    `-start` contains operands and results (all-reduce-start of today's XLA: only results); the number of operands
    distinguishes the two.
    """
    body = text.split(" = ", 1)[-1][:_MAX_TEXT]
    printed, rest = _cut_shape(body)
    opcode = _OPCODE.match(rest)
    members = _split_members(_cut_shape(shape[:_MAX_TEXT])[0] if shape else printed)
    if not any(members):
        return None
    if kind in POINT_TO_POINT or (opcode and opcode["opcode"] == "fusion"):  # one array; the rest: buffers and flags
        return max((_add_up([leaf]) for member in members for leaf in member), key=lambda found: found.nbytes or 0)
    if is_start and len(members) > 1:
        num_operands = len(_split_members(_cut_shape(rest[opcode.end() - 1 :])[0])) if opcode else 0
        members = _results_of_start(members, kind, num_operands)
    return _add_up([leaf for member in members for leaf in member])


def _results_of_start(members: list[list[Leaf]], kind: CollectiveKind, num_operands: int) -> list[list[Leaf]]:
    """Return the members of a start's tuple that are results."""
    members = [member for member in members if member]
    arrays = [member for member in members if member != [("u32", 1)]]  # flags of the transfer
    members = arrays or members
    if kind is CollectiveKind.ALL_REDUCE and num_operands == len(members):
        return members
    half = len(members) // 2
    if num_operands and len(members) >= 2 * num_operands:
        return members[num_operands : 2 * num_operands]
    if kind is CollectiveKind.ALL_REDUCE and members[:half] != members[half:]:
        return members
    return members[1:2] if any(len(member) > 1 for member in members) else members[half:]


def _add_up(leaves: Sequence[Leaf]) -> ResultSize:
    widths = [bytes_per_element(dtype) for dtype, _ in leaves]
    sizes = [None if width is None else width * count for width, (_, count) in zip(widths, leaves, strict=True)]
    dtype = max(zip(leaves, widths, strict=True), key=lambda found: found[0][1] * (found[1] or 1))[0][0]
    known = [size for size in sizes if size is not None]
    return ResultSize(dtype, sum(count for _, count in leaves), sum(known) if len(known) == len(sizes) else None)


def _cut_shape(text: str) -> tuple[str, str]:
    """Split the text after the shape (or the bracketed list) that it begins with."""
    if not text.startswith("("):
        shape, _, rest = text.partition(" ")
        return shape, rest
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return text[: at + 1], text[at + 1 :]
    return text, ""


def _split_members(shape: str) -> list[list[Leaf]]:
    """Return the arrays of each member of a tuple, nested members flattened; another shape is one member."""
    if not shape.startswith("("):
        found = _leaves(shape)
        return [found] if found else []
    members, depth, begin = [], 0, 1
    for at, letter in enumerate(shape):
        if letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        if (letter == "," and depth == 1) or (not depth and at):
            members.append(_leaves(shape[begin:at]))
            begin = at + 1
    return [*members, _leaves(shape[begin:])] if depth else members


def _leaves(text: str) -> list[Leaf]:
    return [
        (found["dtype"], math.prod(int(dim) for dim in found["dims"].split(",") if dim))
        for found in _SHAPE.finditer(text)
    ]


_GROUP_LIST = re.compile(r"replica_groups=\{(?P<groups>\{[\d,{} ]*\})\}")
_GROUP = re.compile(r"\{(\d{1,9}(?:,\d{1,9})*)\}")
_GROUP_IOTA = re.compile(
    r"replica_groups=\[(?P<shape>\d{1,9},\d{1,9})\]"
    r"(?:<=\[(?P<dims>\d{1,9}(?:,\d{1,9})*)\](?:T\((?P<order>\d{1,3}(?:,\d{1,3})*)\))?)?"
)
# A larger number of devices means a damaged trace.
_MAX_DEVICES = 1 << 20
"""Largest number of devices."""
_START = re.compile(r"-start(\.\d+)?$")
_DONE = re.compile(r"-done(\.\d+)?$")
_STARTED_BY = re.compile(r"-done\([^%)]*%?(?P<start>[\w.-]+-start(?:\.\d+)?)")


Groups = tuple[tuple[int, ...], ...]


def join_pairs(rows: list[XlaRow]) -> list[XlaRow]:
    """Return the rows with each asynchronous pair (`all-reduce-start`, `-done`) as one row from start to end."""
    waiting: dict[str, XlaRow] = {}
    kept: list[XlaRow] = []
    for row in sorted(rows, key=lambda row: row.start_ps):
        name = row.name.lstrip("%")
        if row.kind == Kind.COMM and _START.search(name):
            waiting[name] = row
        elif row.kind == Kind.COMM and _DONE.search(name):
            started = waiting.pop(_start_name(name, row.stats or {}, waiting), None)
            if started is not None:
                started.duration_ps = row.start_ps + row.duration_ps - started.start_ps
                continue
        kept.append(row)
    return kept


def _start_name(done: str, stats: Stats, waiting: dict[str, XlaRow]) -> str:
    stated = _STARTED_BY.search(str(stats.get("long_name") or ""))
    if stated and stated["start"] in waiting:
        return stated["start"]
    same_number = _DONE.sub(lambda found: f"-start{found[1] or ''}", done)
    if same_number in waiting:
        return same_number
    base = done.split("-done")[0]
    return next((name for name in waiting if name.split("-start")[0] == base), "")


def describe_collective(name: str, stats: Stats, device: int = -1, devices: frozenset[int] = frozenset()) -> Collective:
    """Return kind, group and sizes from the operation's text and shape; parts that neither states are unknown.

    `device`: the ordinal of the device that ran it; `devices`: the ordinals of all devices of its file.
    """
    category = str(stats.get("hlo_category") or "")
    _, kind, _ = classify_xla(category, name)
    kind = kind or classify_collective(name)
    text = str(stats.get("long_name") or stats.get("tf_op") or "")
    groups, size = read_groups(text)
    world = sum(map(len, groups)) or None
    ranks = _own_group(groups, device, devices)
    is_start = bool(_START.search(name)) or category.endswith("-start")
    found = measure_result(str(stats.get("shape_with_layout") or ""), text, kind, is_start)
    if found is None:
        return Collective(kind, group_ranks=ranks, group_size=size, world_size=world)
    in_count: int | None = found.nelems
    in_bytes = found.nbytes
    if kind == CollectiveKind.ALL_GATHER:
        in_count = found.nelems // size if size else None
        in_bytes = in_bytes // size if in_bytes is not None and size else None
    elif kind == CollectiveKind.REDUCE_SCATTER:
        in_count = found.nelems * size if size else None
        in_bytes = in_bytes * size if in_bytes is not None and size else None
    return Collective(
        kind,
        group_ranks=ranks,
        group_size=size,
        dtype=found.dtype,
        in_nelems=in_count,
        out_nelems=found.nelems,
        in_bytes=in_bytes,
        out_bytes=found.nbytes,
        has_args=True,
        world_size=world,
    )


def read_groups(text: str) -> tuple[Groups, int | None]:
    """Return the replica groups in an operation's text and the group size; no groups if the text does not name all.

    Reads both forms of HLO: `{{0,1},{2,3}}`, and `[groups,size]<=[dims]T(permutation)`, which numbers all devices in
    the shape `dims`, transposes and flattens them, and splits the result into groups. Unequal groups have size None.
    """
    listed = _GROUP_LIST.search(text)
    if listed:
        return _parse_list(listed["groups"])
    iota = _GROUP_IOTA.search(text)
    return _parse_iota(iota["shape"], iota["dims"] or "", iota["order"] or "") if iota else ((), None)


@lru_cache(maxsize=256)
def _parse_list(text: str) -> tuple[Groups, int | None]:
    groups = tuple(tuple(int(n) for n in found.split(",")) for found in _GROUP.findall(text))
    sizes = {len(group) for group in groups}
    return groups, sizes.pop() if len(sizes) == 1 else None


@lru_cache(maxsize=256)
def _parse_iota(shape: str, dims: str, order: str) -> tuple[Groups, int | None]:
    """Parse the iota form; only the size if the numbers are inconsistent or too large."""
    (count, size), extents = (tuple(int(n) for n in text.split(",") if n) for text in (shape, dims))
    axes = tuple(int(n) for n in order.split(",") if n) or tuple(range(len(extents)))
    fits = math.prod(extents) == count * size and sorted(axes) == list(range(len(extents)))
    if not extents or not fits or not 0 < count * size <= _MAX_DEVICES:
        return (), size or None
    rows = np.arange(count * size).reshape(extents).transpose(axes).reshape(count, size)
    return tuple(tuple(row) for row in rows.tolist()), size


def _own_group(groups: Groups, device: int, devices: frozenset[int]) -> tuple[int, ...] | None:
    """Return the group of this device; None if unknown.

    Groups number the devices of the whole run, a trace those of its host: the numbers agree if the groups name exactly
    the devices of the file. A single group is the group of every device.
    """
    if len(groups) == 1:
        return groups[0]
    if devices != {member for group in groups for member in group}:
        return None
    return next((group for group in groups if device in group), None)
