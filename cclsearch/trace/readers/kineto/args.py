"""Decodes the arguments of Kineto's events, many at a time, and leniently if a file needs it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

import msgspec

from cclsearch.trace.events import LaunchShape, OpShape
from cclsearch.trace.readers.json_structs import number_of, repair_text

ABSENT = msgspec.Raw(b"")
_DECODER = json.JSONDecoder(strict=False)

SHAPED_OPS = re.compile(
    r"^(aten::(_?(mm|addmm|bmm|baddbmm|mv|addmv|scaled_mm|_scaled_mm|grouped_mm|_grouped_mm)(_out)?$"
    r"|_?(scaled_dot_product|flash_attention|efficient_attention|cudnn_attention)"
    r"|(cudnn|miopen|mkldnn)_convolution|convolution_backward$|slow_conv|thnn_conv)"
    r"|flash_attn|c10d::|_c10d_functional::|gloo:|mpi:|ucc:)"
)
"""Operators whose input shapes are kept: matrix products, attention, convolutions and collectives."""


class RuntimeArgs(msgspec.Struct, gc=False):
    """Arguments of a launch."""

    corr: int = msgspec.field(default=-1, name="correlation")


class DeviceArgs(msgspec.Struct, gc=False):
    """Arguments of a device row."""

    ext: int = msgspec.field(default=-1, name="External id")
    old_ext: int = msgspec.field(default=-1, name="external id")
    device: int = -1
    stream: int = -1
    corr: int = msgspec.field(default=-1, name="correlation")
    registers: int | None = msgspec.field(default=None, name="registers per thread")
    shared: int | None = msgspec.field(default=None, name="shared memory")
    blocks_per_sm: float = msgspec.field(default=-1.0, name="blocks per SM")
    grid: msgspec.Raw = ABSENT
    block: msgspec.Raw = ABSENT
    bytes: int = -1
    collective: str | None = msgspec.field(default=None, name="Collective name")


class ShapeArgs(msgspec.Struct, gc=False):
    """Arguments of an operator: shapes and types of its inputs."""

    ext: int = msgspec.field(default=-1, name="External id")
    old_ext: int = msgspec.field(default=-1, name="external id")
    scalars: msgspec.Raw = msgspec.field(default=ABSENT, name="Concrete Inputs")
    dtypes: msgspec.Raw = msgspec.field(default=ABSENT, name="Input type")
    dims: msgspec.Raw = msgspec.field(default=ABSENT, name="Input Dims")


class MemoryArgs(msgspec.Struct, gc=False):
    """Arguments of an allocation: state of the allocator."""

    device_type: int = msgspec.field(default=0, name="Device Type")
    device_id: int = msgspec.field(default=-1, name="Device Id")
    allocated: int = msgspec.field(default=-1, name="Total Allocated")
    reserved: int = msgspec.field(default=-1, name="Total Reserved")


Args = TypeVar("Args", RuntimeArgs, DeviceArgs, ShapeArgs, MemoryArgs)


@cache
def _decoder(kind: type[Any]) -> Any:
    return msgspec.json.Decoder(list[kind], strict=False)  # type: ignore[valid-type]


def decode_args(kind: type[Args], raws: Sequence[msgspec.Raw]) -> list[Args]:
    """Return one value per argument object; fields that cannot be parsed keep their default."""
    try:
        decoded: list[Args] = _decoder(kind).decode(b"[" + b",".join(raws) + b"]")
        if len(decoded) == len(raws):
            return decoded
    except (msgspec.MsgspecError, ValueError, RecursionError):
        pass
    return [_decode_one(kind, raw) for raw in raws]


def _decode_one(kind: type[Args], raw: msgspec.Raw) -> Args:
    try:
        return msgspec.json.decode(raw, type=kind, strict=False)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        pass
    values = plain_args(raw)
    found: dict[str, Any] = {}
    for info in msgspec.structs.fields(kind):
        value = values.get(info.encode_name)
        if value is None:
            continue
        if info.type is msgspec.Raw:
            found[info.name] = msgspec.Raw(json.dumps(value).encode("utf-8", "replace"))
        elif info.type is float:
            number = number_of(value)
            found[info.name] = -1.0 if number is None else number
        elif isinstance(info.default, int) or (info.default is None and info.name in ("registers", "shared")):
            number = number_of(value)
            if number is not None:
                found[info.name] = int(number)
        else:
            found[info.name] = str(value)
    return kind(**found)


def plain_args(raw: msgspec.Raw) -> dict[str, Any]:
    """Return the arguments as a plain dictionary, without values that are broken; empty if they are not an object."""
    text = bytes(raw).decode("utf-8", "replace")
    try:
        values = _DECODER.decode(text)
    except (ValueError, RecursionError):
        values = repair_text(text)[0]
    return values if isinstance(values, dict) else {}


def read_grid(key: tuple[bytes, bytes, int | None, int | None]) -> LaunchShape | None:
    """Return the launch shape of (grid, block, registers, shared memory); None without grid or block."""
    grid, block = _ints(key[0]), _ints(key[1])
    if not grid or not block:
        return None
    blocks, threads = math.prod(grid), math.prod(block)
    return LaunchShape(blocks, threads, key[2], key[3]) if blocks < 2**62 and threads < 2**62 else None


def read_shape(key: tuple[bytes, bytes, bytes]) -> OpShape:
    """Return the shape of (dims, types, scalars), each as JSON text."""
    dims, dtypes, scalars = (_list(text) for text in key)
    sizes = tuple(
        tuple(int(n) for n in dim) if isinstance(dim, list) and all(isinstance(n, int) for n in dim) else ()
        for dim in dims
    )
    return OpShape(sizes, tuple(str(item) for item in dtypes), tuple(str(item) for item in scalars))


def _list(text: bytes) -> list[Any]:
    try:
        value = _DECODER.decode(text.decode("utf-8", "replace")) if text else []
    except (ValueError, RecursionError):
        return []
    return value if isinstance(value, list) else []


def _ints(text: bytes) -> list[int]:
    numbers = _list(text)
    return numbers if all(isinstance(n, int) and 0 < n < 2**31 for n in numbers) else []
