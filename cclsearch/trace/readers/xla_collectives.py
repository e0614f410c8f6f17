"""Collectives of XLA: start and done joined, and sizes from shapes (never from `bytes_accessed`)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from cclsearch.trace.events import Collective, CollectiveKind, Kind
from cclsearch.trace.kinds import classify_collective, classify_xla
from cclsearch.trace.readers.collectives import bytes_per_element, product
from cclsearch.trace.readers.planes import Stats

if TYPE_CHECKING:
    from cclsearch.trace.readers.xla_table import Row

_SHAPE = re.compile(r"(?P<dtype>pred|bf16|[fsuc]\d+\w*)\[(?P<dims>(?:\d{1,15}(?:,|(?=\])))*)\]")
_GROUP_LIST = re.compile(r"replica_groups=\{\{(?P<first>\d{1,9}(?:,\d{1,9})*)\}")
_GROUP_IOTA = re.compile(r"replica_groups=\[(?P<groups>\d{1,9}),(?P<size>\d{1,9})\]")
_START = re.compile(r"-start(\.\d+)?$")
_DONE = re.compile(r"-done(\.\d+)?$")
_STARTED_BY = re.compile(r"-done\([^%)]*%?(?P<start>[\w.-]+-start(?:\.\d+)?)")


def join_pairs(rows: list[Row]) -> list[Row]:
    """The rows, each pair of an asynchronous collective (`all-reduce-start`, `-done`) as one row from start to end."""
    waiting: dict[str, Row] = {}
    kept: list[Row] = []
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


def _start_name(done: str, stats: Stats, waiting: dict[str, Row]) -> str:
    stated = _STARTED_BY.search(str(stats.get("long_name") or ""))
    if stated and stated["start"] in waiting:
        return stated["start"]
    same_number = _DONE.sub(lambda found: f"-start{found[1] or ''}", done)
    if same_number in waiting:
        return same_number
    base = done.split("-done")[0]
    return next((name for name in waiting if name.split("-start")[0] == base), "")


def describe_collective(name: str, stats: Stats) -> Collective:
    """Kind, group and sizes, as far as the operation's text and shape say."""
    _, kind, _ = classify_xla(str(stats.get("hlo_category") or ""), name)
    kind = kind or classify_collective(name)
    text = str(stats.get("long_name") or stats.get("tf_op") or "")
    ranks, size = _group(text)
    found = _largest_shape(str(stats.get("shape_with_layout") or text.split(" = ", 1)[-1].split("(%", 1)[0]))
    if found is None:
        return Collective(kind, group_ranks=ranks, group_size=size)
    dtype, count = found
    width = bytes_per_element(dtype)
    out_count: int | None = count
    in_count: int | None = count
    if kind == CollectiveKind.ALL_GATHER:
        in_count = count // size if size else None
    elif kind == CollectiveKind.REDUCE_SCATTER:
        in_count = count * size if size else None
    return Collective(
        kind,
        group_ranks=ranks,
        group_size=size,
        dtype=dtype,
        in_nelems=in_count,
        out_nelems=out_count,
        in_bytes=None if width is None or in_count is None else in_count * width,
        out_bytes=None if width is None else count * width,
        has_args=True,
    )


def _largest_shape(text: str) -> tuple[str, int] | None:
    """Data type and elements of the largest array in a shape; of a tuple of equal operands, their sum."""
    shapes = [
        (found["dtype"], product([int(dim) for dim in found["dims"].split(",") if dim]))
        for found in _SHAPE.finditer(text[:10_000])
    ]
    if not shapes:
        return None
    return max(shapes, key=lambda shape: shape[1] * (bytes_per_element(shape[0]) or 1))


def _group(text: str) -> tuple[tuple[int, ...] | None, int | None]:
    listed = _GROUP_LIST.search(text)
    if listed:
        ranks = tuple(int(rank) for rank in listed["first"].split(",") if rank)
        return ranks, len(ranks)
    iota = _GROUP_IOTA.search(text)
    return (None, int(iota["size"])) if iota else (None, None)
