"""The nodes of PyTorch's execution traces, in all schemas, and the text of their types and shapes."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec

MAX_ID = 2**62
_ABSENT = msgspec.Raw(b"")
_TENSOR = re.compile(r"Tensor\((?P<dtype>[^()]*)\)")


class _Attribute(msgspec.Struct):
    name: str = ""
    value: Any = None


class ExecutionNode(msgspec.Struct, gc=False):
    """One operator or range, of any schema; schemas without `attrs` have the fields after it."""

    id: int
    name: str = ""
    ctrl_deps: int | None = None
    inputs: msgspec.Raw = _ABSENT
    outputs: msgspec.Raw = _ABSENT
    attrs: list[_Attribute] = []
    parent: int | None = None
    rf_id: int | None = None
    scope: int | None = None
    tid: int | None = None
    input_shapes: msgspec.Raw = _ABSENT
    input_types: msgspec.Raw = _ABSENT
    output_shapes: msgspec.Raw = _ABSENT
    output_types: msgspec.Raw = _ABSENT

    def attributes(self) -> dict[str, Any]:
        """Return the attributes by name."""
        return {item.name: item.value for item in self.attrs}

    def inputs_as_lists(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Return values, shapes and types of the inputs, one entry for each."""
        return _as_lists(self.inputs, self.input_shapes, self.input_types)

    def outputs_as_lists(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Return values, shapes and types of the outputs, one entry for each."""
        return _as_lists(self.outputs, self.output_shapes, self.output_types)


def _plain(raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _as_lists(values: msgspec.Raw, shapes: msgspec.Raw, types: msgspec.Raw) -> tuple[list[Any], list[Any], list[Any]]:
    found = _plain(values)
    parts = (
        [found.get(key) for key in ("values", "shapes", "types")]
        if isinstance(found, dict)
        else [found, _plain(shapes), _plain(types)]
    )
    first, second, third = (part if isinstance(part, list) else [] for part in parts)
    return first, second, third


def dims_of(shape: Any) -> tuple[int, ...] | None:
    """Return the dimensions of a tensor; None for a list of tensors and for sizes that no tensor has."""
    if not isinstance(shape, list) or len(shape) > 64:
        return None
    if not all(type(size) is int and 0 <= size < MAX_ID for size in shape) or math.prod(shape) >= MAX_ID:
        return None
    return tuple(shape)


def dtype_of(text: Any) -> str:
    """Return the element type in `Tensor(float)` or `GenericList[Tensor(float)]`; "" without one."""
    found = _TENSOR.search(text) if isinstance(text, str) else None
    return found["dtype"] if found else ""
