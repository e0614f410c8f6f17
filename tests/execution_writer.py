"""Writes PyTorch execution traces of any schema for tests, node by node."""

from __future__ import annotations

import json
from typing import Any

SCHEMA = "1.1.1-chakra.0.0.4"
GROUPS = '[{"pg_name": "0", "pg_desc": "default_pg", "backend_config": "nccl", "ranks": [], "group_size": 4}]'


def tensor(*sizes: int, dtype: str = "float", device: str = "cuda:0") -> tuple[Any, Any, str]:
    """Return value, shape and type of a tensor."""
    return [1, 2, 0, 9, 4, device], list(sizes), f"Tensor({dtype})"


def tensors(*sizes: int, dtype: str = "float") -> tuple[Any, Any, str]:
    """Return value, shape and type of a list with one tensor."""
    value, shape, text = tensor(*sizes, dtype=dtype)
    return [value], [shape], f"GenericList[{text}]"


def plain(value: Any, type_name: str = "Int") -> tuple[Any, Any, str]:
    """Return value, shape and type of an input that is not a tensor."""
    return value, [], type_name


def _columns(entries: tuple[Any, ...]) -> dict[str, Any]:
    values, shapes, types = zip(*entries, strict=True) if entries else ((), (), ())
    return {"values": list(values), "shapes": list(shapes), "types": list(types), "strides": [[] for _ in values]}


def node(
    number: int,
    name: str,
    parent: int = 2,
    *,
    inputs: tuple[Any, ...] = (),
    outputs: tuple[Any, ...] = (),
    **attrs: Any,
) -> dict[str, Any]:
    """Return a node of a current schema; `attrs` replace or add attributes."""
    attributes = {"rf_id": number, "fw_parent": 0, "seq_id": -1, "scope": 0, "tid": 1, "fw_tid": 0, "op_schema": ""}
    return {
        "id": number,
        "name": name,
        "ctrl_deps": parent,
        "inputs": _columns(inputs),
        "outputs": _columns(outputs),
        "attrs": [
            {"name": key, "type": "string" if isinstance(value, str) else "uint64", "value": value}
            for key, value in {**attributes, "kernel_backend": "", "kernel_file": "", **attrs}.items()
        ],
    }


def flat_node(number: int, name: str, parent: int = 2, *, inputs: tuple[Any, ...] = ()) -> dict[str, Any]:
    """Return a node of the schemas before `attrs`."""
    columns = _columns(inputs)
    return {
        **{"name": name, "id": number, "rf_id": number, "parent": parent, "fw_parent": 0, "seq_id": -1, "scope": 0},
        **{"tid": 1, "fw_tid": 0, "op_schema": "", "inputs": columns["values"], "input_shapes": columns["shapes"]},
        **{"input_types": columns["types"], "outputs": [], "output_shapes": [], "output_types": []},
    }


def document(nodes: list[dict[str, Any]], schema: str = SCHEMA) -> dict[str, Any]:
    """Return the document with these nodes below a process and a thread."""
    frame = f"[pytorch|profiler|execution_{'graph' if schema in ('1.0.0', '1.0.1') else 'trace'}|"
    make = node if "chakra" in schema else flat_node
    head = [make(1, f"{frame}process]", 1), make(2, f"{frame}thread]", 1)]
    return {"schema": schema, "pid": 7, "time": "2026-01-01 00:00:00", "start_ts": 5, "nodes": [*head, *nodes]}


def training_nodes() -> list[dict[str, Any]]:
    """Return two products inside an operator, an all-reduce and a reduce-scatter of NCCL, and a Triton kernel."""
    product = (tensor(8, 16), tensor(16, 4))
    call = {"pg_name": "0", "pg_desc": "default_pg", "pg_size": 4, "dtype": "BFloat16"}
    return [
        node(3, "## process_group:init ##", inputs=(plain(GROUPS, "String"),), scope=7),
        node(4, "aten::linear", inputs=product),
        node(5, "aten::mm", 4, inputs=product),
        node(6, "aten::mm", inputs=product),
        node(7, "c10d::allreduce_"),
        node(8, "record_param_comms", 7, collective_name="allreduce", in_msg_nelems=100, out_msg_nelems=100, **call),
        node(9, "nccl:all_reduce", 8, scope=7),
        node(10, "record_param_comms", inputs=reduce_scatter_inputs(), outputs=(tensor(64, dtype="c10::BFloat16"),)),
        node(11, "record_param_comms", collective_name="wait", in_msg_nelems=0, out_msg_nelems=0, **call),
        node(12, "triton_poi_fused_add_0", kernel_backend="triton", kernel_file="/inductor/a.py"),
    ]


def reduce_scatter_inputs() -> tuple[Any, ...]:
    """Return the inputs of a call that states nothing in attributes."""
    return call_inputs("_reduce_scatter_base", 2)


def call_inputs(name: str, rank: int) -> tuple[Any, ...]:
    """Return the inputs of `record_param_comms`; `rank` is that of the caller, the root or the peer."""
    group = (["0", "default_pg"], [[], []], "Tuple[String,String]")
    sizes = (plain([], "GenericList[]"), plain([], "GenericList[]"), plain(0), plain(1), plain(4))
    return (tensors(256, dtype="c10::BFloat16"), plain([3, False]), group, plain(rank), plain(name), *sizes)


def as_bytes(nodes: list[dict[str, Any]] | None = None, schema: str = SCHEMA) -> bytes:
    """Return the document as a file; without nodes, those of `training_nodes`."""
    return json.dumps(document(training_nodes() if nodes is None else nodes, schema), indent=1).encode()
