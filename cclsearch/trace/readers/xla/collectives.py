"""Joins start and done of XLA's collectives, and describes them; sizes are from shapes, not from `bytes_accessed`."""

from __future__ import annotations

import math
import re
from functools import lru_cache

import numpy as np

from cclsearch.trace.events import Collective, CollectiveKind, Kind
from cclsearch.trace.names.kinds import classify_collective, classify_xla
from cclsearch.trace.readers.xla.planes import Stats, XlaRow
from cclsearch.trace.readers.xla.shapes import measure_result

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
