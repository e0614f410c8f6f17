"""Collectives and process groups of a PyTorch execution trace.

NCCL's calls are the nodes `record_param_comms`: newer schemas state group, sizes and type as attributes, older ones
only as inputs. Other backends' calls are ranges such as `gloo:all_reduce`, whose tensor is their input.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from cclsearch.trace.events import Collective, CollectiveKind, ProcessGroup
from cclsearch.trace.names.kinds import BLOCKING, classify_collective
from cclsearch.trace.readers.collectives import collective_from_args, collective_of_backend
from cclsearch.trace.readers.columns import Interner
from cclsearch.trace.readers.kineto.cpu import BACKEND_CALL, COLLECTIVE_OP
from cclsearch.trace.readers.kineto.table import read_groups
from cclsearch.trace.rules import read_table

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


PARAM_COMMS = "record_param_comms"
INIT_NODE = "## process_group:init ##"
_NOT_A_CALL = re.compile(r"^(init|wait|end|start_?coalescing|end_?coalescing|comm_?init)$", re.IGNORECASE)
_KINETO_NAMES: Mapping[str, str] = read_table("names.yaml")["execution_trace"]
"""Attribute of the execution trace -> Kineto's argument of the same meaning (PyTorch's ParamCommsUtils.hpp)."""
_PEERS = {CollectiveKind.SEND: "Dst Rank", CollectiveKind.RECV: "Src Rank"}
_MAX_PARENTS = 8
"""Number of operators above a backend's call that are searched for its `c10d` operator."""


def read_process_groups(node: ExecutionNode) -> dict[str, ProcessGroup]:
    """Return the groups that the node `## process_group:init ##` lists, by name."""
    values, _, _ = node.inputs_as_lists()
    try:
        listed = json.loads(values[0]) if values and isinstance(values[0], str) else []
    except (ValueError, RecursionError):
        return {}
    configs = [
        {**item, "pg_size": item.get("pg_size", item.get("group_size"))}
        for item in (listed if isinstance(listed, list) else [])
        if isinstance(item, dict)
    ]
    groups = read_groups({"distributedInfo": {"pg_config": configs}})
    for name, group in groups.items():
        if not group.ranks and group.size and group.desc == "default_pg":  # of all ranks: written without its members
            groups[name] = replace(group, ranks=tuple(range(group.size)))
    return groups


@dataclass(frozen=True)
class _Tensors:
    """Elements and type of the tensors of one side of a call."""

    nelems: int | None
    dtype: str


class ExecutionCalls:
    """Collects the calls of a file; `describe` returns their collectives."""

    def __init__(self) -> None:
        self._stated: dict[int, Collective] = {}
        """Number of a node -> its collective, from `record_param_comms`."""
        self._backend: dict[int, _Tensors] = {}
        self._ranks: Counter[int] = Counter()

    @property
    def rank(self) -> int:
        """The rank that callers in the default group state most often; -1 without any."""
        return self._ranks.most_common(1)[0][0] if self._ranks else -1

    def add(self, number: int, node: ExecutionNode, attributes: Mapping[str, Any]) -> None:
        """Keep the node if it is a call."""
        if node.name == PARAM_COMMS:
            args = _args_of(node, attributes)
            name = args.get("Collective name")
            if isinstance(name, str) and name and not _NOT_A_CALL.match(name):
                self._stated[number] = call = collective_from_args(args, name, {})
                if (
                    call.kind in BLOCKING
                ):  # in the other calls `rank` is the root's or the peer's (ProcessGroupNCCL.cpp)
                    self._count_rank(args)
        elif BACKEND_CALL.match(node.name):
            _, shapes, types = node.inputs_as_lists()
            self._backend[number] = _tensors(shapes[:1], types[:1])

    def _count_rank(self, args: Mapping[str, Any]) -> None:
        rank = args.get("rank")
        is_default = args.get("Process Group Description") == "default_pg" or args.get("Process Group Name") == "0"
        if is_default and type(rank) is int and 0 <= rank < 2**31:
            self._ranks[rank] += 1

    def describe(
        self,
        numbers: NDArray[np.int64],
        parents: NDArray[np.int64],
        names: tuple[str, ...],
        name_ids: NDArray[np.int32],
        groups: Mapping[str, ProcessGroup],
    ) -> tuple[tuple[NDArray[np.int32], NDArray[np.int32]], tuple[Collective, ...]]:
        """Return (rows, numbers of their collectives) and the distinct collectives.

        `numbers`: the number of the node in each row. `parents`: the row that called each row, or -1.
        """
        distinct = Interner()
        rows, values = [], []
        found: Mapping[int, Any] = self._stated or self._backend
        for row, number in enumerate(numbers.tolist() if found else ()):
            if number not in found:
                continue
            if self._stated:
                call = _in_group(self._stated[number], groups)
            else:
                above = (names[name_ids[parent]] for parent in _parents_of(row, parents))
                operator = next((name for name in above if COLLECTIVE_OP.match(name)), names[name_ids[row]])
                sent, group = self._backend[number], next(iter(groups.values())) if len(groups) == 1 else None
                call = collective_of_backend(classify_collective(operator), sent.nelems, sent.dtype or None, group)
            rows.append(row)
            values.append(distinct[call])
        return (np.array(rows, np.int32), np.array(values, np.int32)), tuple(distinct)


def _parents_of(row: int, parents: NDArray[np.int64]) -> Iterator[int]:
    for _ in range(_MAX_PARENTS):
        row = int(parents[row])
        if row < 0:
            return
        yield row


def _args_of(node: ExecutionNode, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by Kineto's names: from attributes, else from the inputs by their order.

    Inputs are [tensors,] sequence, group, rank (of the caller, the root or the peer), name, input splits, output
    splits[, first rank, stride, group size[, whether asynchronous]] (ParamCommsUtils.hpp; none in torch 1.x).
    """
    args = {kineto: attributes[name] for name, kineto in _KINETO_NAMES.items() if name in attributes}
    values, shapes, types = node.inputs_as_lists()
    at = next((i for i, value in enumerate(values) if i >= 2 and isinstance(value, str) and _is_call_name(value)), None)
    if at is None:
        return args
    group = values[at - 2]
    group = group if isinstance(group, list) else [group]
    sent, received = _tensors(shapes[:1], types[:1]), _tensors(*node.outputs_as_lists()[1:])
    given = {
        "Collective name": values[at],
        _PEERS.get(classify_collective(values[at]), "rank"): values[at - 1],
        "Process Group Name": str(group[0]) if group else None,
        "Process Group Description": group[1] if len(group) > 1 else None,
        "In split size": values[at + 1] if len(values) > at + 1 else None,
        "Out split size": values[at + 2] if len(values) > at + 2 else None,
        "Group size": values[at + 5] if len(values) > at + 5 else None,
    }
    if at >= 4:
        given |= {
            "dtype": sent.dtype or received.dtype,
            "In msg nelems": sent.nelems,
            "Out msg nelems": received.nelems,
        }
    return {**{name: value for name, value in given.items() if value is not None}, **args}


def _is_call_name(value: str) -> bool:
    return bool(_NOT_A_CALL.match(value)) or classify_collective(value) != CollectiveKind.UNKNOWN


def _tensors(shapes: list[Any], types: list[Any]) -> _Tensors:
    """Return elements and type of all tensors in nested lists of shapes; None if a size is odd or there is none."""
    try:
        nelems = sum(_count(shape) for shape in shapes) if shapes else None
    except (ValueError, RecursionError):
        nelems = None
    dtype = next((found for text in types if (found := dtype_of(text))), "")
    return _Tensors(nelems if nelems is not None and nelems < 2**62 and dtype else None, dtype)


def _count(shape: Any) -> int:
    if not isinstance(shape, list):
        raise ValueError
    if any(isinstance(part, list) for part in shape):
        return sum(_count(part) for part in shape)
    if not all(type(size) is int and 0 <= size < 2**62 for size in shape):
        raise ValueError
    return math.prod(shape)


def _in_group(call: Collective, groups: Mapping[str, ProcessGroup]) -> Collective:
    known = groups.get(call.group or "")
    if known is None:
        return call
    return replace(
        call,
        group_desc=call.group_desc or known.desc or None,
        group_ranks=call.group_ranks or known.ranks or None,
        group_size=call.group_size or known.size,
    )
