"""Sizes of the results of XLA's collectives, from the operation's text: tuples are summed, operands left out."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from cclsearch.trace.events import POINT_TO_POINT, CollectiveKind
from cclsearch.trace.names.kinds import bytes_per_element

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
