"""Writes small traces in every format that the readers support, in the layout of the profilers."""

from __future__ import annotations

import gzip
import json
import sqlite3
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def span(category: str, name: str, start_us: float, duration_us: float, *, tid: int = 1, **args: Any) -> dict[str, Any]:
    """Return one complete Kineto event."""
    event = {"ph": "X", "cat": category, "name": name, "pid": 7, "tid": tid, "ts": start_us, "dur": duration_us}
    return {**event, "args": args}


def collective_args(name: str = "allreduce", nelems: int = 1 << 20, ranks: int = 2, **more: Any) -> dict[str, Any]:
    """Return the arguments of an NCCL kernel in a modern trace."""
    return {
        "Collective name": name,
        "In msg nelems": nelems,
        "Out msg nelems": nelems,
        "Group size": ranks,
        "dtype": "BFloat16",
        "In split size": "[]",
        "Out split size": "[]",
        "Process Group Name": "0",
        "Process Group Description": "default_pg",
        "Process Group Ranks": str(list(range(ranks))),
        **more,
    }


def gpu_events(*, steps: int = 3, start_us: float = 1000.0, lag_us: float = 50.0) -> list[dict[str, Any]]:
    """Steps of 1000 us, each launching one matrix product (400 us), one all-reduce (300 us, 100 exposed) and a copy."""
    events, corr = [], 100
    for step in range(steps):
        begin = start_us + 1000.0 * step
        events.append(span("user_annotation", f"ProfilerStep#{step + 5}", begin, 990.0))
        events.append(
            span("cpu_op", "aten::mm", begin + 5, 20, **{"External id": corr, "Input Dims": [[64, 32], [32, 16]]})
        )
        device = [
            ("kernel", "ampere_sgemm_128x64_tn", 400.0, 0.0, {"grid": [216, 1, 1], "block": [128, 1, 1]}, 7),
            ("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL()", 300.0, 200.0, collective_args(), 20),
            ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 50.0, 600.0, {"bytes": 4096}, 7),
        ]
        for category, name, duration, offset, args, stream in device:
            corr += 1
            launch = begin + 10 + offset / 10
            events.append(span("cuda_runtime", "cudaLaunchKernel", launch, 5, correlation=corr))
            shown = {"device": 0, "stream": stream, "correlation": corr, **args}
            if name.startswith("ampere"):
                shown |= {"External id": corr - 1, "blocks per SM": 2.0, "registers per thread": 64, "shared memory": 0}
            events.append(span(category, name, begin + lag_us + offset, duration, tid=stream, **shown))
        corr += 10
    return events


def kineto_document(
    events: list[dict[str, Any]],
    *,
    rank: int = 0,
    world: int = 1,
    base_ns: int = 1_700_000_000 * 10**9,
    gpu: bool = True,
) -> dict[str, Any]:
    """Return the document around the events, as Kineto writes it."""
    group = {"pg_name": "0", "pg_desc": "default_pg", "pg_size": world, "ranks": list(range(world))}
    device = {"id": 0, "name": "NVIDIA A100-SXM4-80GB", "numSms": 108, "totalGlobalMem": 80 << 30}
    return {
        "schemaVersion": 1,
        "deviceProperties": [device] if gpu else [],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world, "pg_config": [group]},
        "traceEvents": events,
        "traceName": "trace.json",
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base_ns,
    }


def layout_kineto(document: dict[str, Any]) -> str:
    """Return the document as text in Kineto's layout: each field of an event on a line, indented."""
    head = {key: value for key, value in document.items() if key != "traceEvents"}
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    events = ",\n".join(
        "  {\n" + ",\n".join(f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in event.items()) + "\n  }"
        for event in document["traceEvents"]
    )
    return "{\n" + "\n".join(lines) + '\n  "traceEvents": [\n' + events + '\n  ],\n  "INFO": []\n}\n'


def write_kineto(path: Path, document: dict[str, Any] | None = None, *, text: str | None = None) -> Path:
    """Write the document in Kineto's layout (or the text unchanged); gzip if the name ends with .gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = (text if text is not None else layout_kineto(document or kineto_document(gpu_events()))).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def cpu_events() -> list[dict[str, Any]]:
    """Two steps on CPU over gloo: a DDP all-reduce, and a reduce-scatter that gloo runs as an all-reduce."""
    events = []
    for step in range(2):
        begin = 1000.0 + 1000 * step
        events += [
            span("user_annotation", f"ProfilerStep#{step}", begin, 900),
            span("cpu_op", "aten::linear", begin + 10, 300),
            span("cpu_op", "aten::addmm", begin + 20, 200),
            span("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", begin + 400, 200, tid=2),
            span("cpu_op", "c10d::allreduce_", begin + 450, 50, tid=2, **{"Input Dims": [[[1024]]]}),
            span("cpu_op", "c10d::_reduce_scatter_base_", begin + 650, 10, **{"Input Dims": [[1024], [4096]]}),
        ]
        for offset, size in ((460, 1024), (660, 4096)):
            shape = {"Input Dims": [[size]], "Input type": ["float"]}
            events.append(span("user_annotation", "gloo:all_reduce", begin + offset, 100, tid=3, **shape))
    return events


# --- XSpace -------------------------------------------------------------------------------------------------------


def _varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def field(number: int, value: int | float | str | bytes) -> bytes:
    """One field of a protocol buffer message."""
    if isinstance(value, float):
        return _varint(number << 3 | 1) + struct.pack("<d", value)
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def plane(
    name: str, lines: dict[str, list[tuple[str, int, int, dict[str, Any]]]], stats: dict[str, Any] | None = None
) -> bytes:
    """An XPlane. An event is (name, start in ps, duration in ps, statistics); those with `@` belong to its metadata."""
    stat_ids: dict[str, int] = {}
    names: dict[str, tuple[int, dict[str, Any]]] = {}

    def stat(key: str, value: Any) -> bytes:
        number = stat_ids.setdefault(key, len(stat_ids) + 1)
        kind = {float: 2, int: 4, bytes: 6}.get(type(value), 5)
        return field(1, number) + field(kind, value)

    body = field(2, name)
    for line_name, events in lines.items():
        line = field(2, line_name) + field(3, 0)
        for event_name, start, duration, values in events:
            common = {key[1:]: value for key, value in values.items() if key.startswith("@")}
            number = names.setdefault(event_name, (len(names) + 1, common))[0]
            event = field(1, number) + field(2, start) + field(3, duration)
            event += b"".join(field(4, stat(k, v)) for k, v in values.items() if not k.startswith("@"))
            line += field(4, event)
        body += field(3, line)
    for event_name, (number, common) in names.items():
        metadata = field(1, number) + field(2, event_name) + b"".join(field(5, stat(k, v)) for k, v in common.items())
        body += field(4, field(1, number) + field(2, metadata))
    body += b"".join(field(6, stat(key, value)) for key, value in (stats or {}).items())
    for key, number in stat_ids.items():
        body += field(5, field(1, number) + field(2, field(1, number) + field(2, key)))
    return field(1, body)


def tpu_space(chips: int = 2, steps: int = 3, groups: str = "") -> bytes:
    """A TPU host: each step is 1 ms with a fusion, an asynchronous all-reduce, and a copy."""
    ms = 10**9
    groups = groups or "{{" + ",".join(str(chip) for chip in range(chips)) + "}}"
    start_text = (
        f"%all-reduce-start.1 = f32[1024,256]{{1,0}} all-reduce-start(f32[1024,256] %p), replica_groups={groups}"
    )
    data = b""
    for chip in range(chips):
        ops = []
        for step in range(steps):
            begin = step * ms
            shape = {"@hlo_category": "all-reduce-start", "@shape_with_layout": "f32[1024,256]{1,0}"}
            ops += [
                ("%fusion.1", begin, ms // 2, {"@hlo_category": "loop fusion", "@flops": 1000, "@bytes_accessed": 10}),
                (start_text, begin + ms // 2, ms // 100, shape),
                ("%add.7", begin + ms * 52 // 100, ms // 10, {"@hlo_category": "non-fusion elementwise"}),
                (
                    "%all-reduce-done.1 = f32[1024,256] all-reduce-done(%all-reduce-start.1)",
                    begin + ms * 7 // 10,
                    ms // 10,
                    {"@hlo_category": "all-reduce-done"},
                ),
                ("%copy-done.3", begin + ms * 8 // 10, ms // 10, {"@hlo_category": "copy-done"}),
            ]
        lines = {
            "Steps": [(str(step), step * ms, ms, {}) for step in range(steps)],
            "XLA Modules": [("jit_step(1)", step * ms, ms, {"run_id": step}) for step in range(steps)],
            "XLA Ops": ops,
            "Async XLA Ops": [("%async", 0, steps * ms, {})],
        }
        stats = {"device_type_string": "TPU v5e", "peak_teraflops_per_second": 197.0}
        data += plane(f"/device:TPU:{chip}", lines, stats)
    return data + plane("/host:CPU", {"python": []}) + field(4, "tpu-host")


def _shape(dims: Sequence[int], scratch: int = 0) -> bytes:
    array = field(2, 16) + b"".join(field(3, size) for size in dims)  # bf16
    return field(2, 13) + field(4, array) + field(4, field(2, 2) + field(3, scratch)) if scratch else array


def instruction(
    number: int,
    name: str,
    opcode: str,
    dims: Sequence[int],
    operands: Sequence[int] = (),
    *,
    calls: int = 0,
    target: str = "",
    config: dict[str, Any] | None = None,
    contracted: int | None = None,
) -> bytes:
    """An HloInstructionProto with results in bf16; a custom call also has scratch memory among its results."""
    data = field(1, name) + field(2, opcode) + field(3, _shape(dims, 64 if target else 0)) + field(35, number)
    data += b"".join(field(36, operand) for operand in operands)
    data += field(38, calls) if calls else b""
    data += field(28, target) if target else b""
    data += field(30, field(1, contracted)) if contracted is not None else b""
    return data + (field(43, json.dumps(config)) if config else b"")


def library_product(number: int, name: str, dims: Sequence[int], operands: Sequence[int]) -> bytes:
    """A call of cuBLASLt that contracts the last dimension of its first operand."""
    config = {"gemm_backend_config": {"dot_dimension_numbers": {"lhs_contracting_dimensions": ["1"]}}}
    return instruction(number, name, "custom-call", dims, operands, target="__cublas$lt$matmul", config=config)


def program(computations: dict[int, Sequence[bytes]]) -> bytes:
    """An HloProto: number of a computation -> its instructions."""
    parts = [b"".join(field(2, one) for one in inside) + field(5, key) for key, inside in computations.items()]
    return field(1, field(1, "jit_step") + b"".join(field(3, part) for part in parts))


def two_products() -> bytes:
    """A program of two library products, [64,32] x [32,16] and its result x [16,8], with a fusion after each."""
    return program(
        {
            2: [instruction(20, "tanh.1", "tanh", [64, 16])],
            1: [
                instruction(1, "p0", "parameter", [64, 32]),
                instruction(2, "p1", "parameter", [32, 16]),
                instruction(3, "p2", "parameter", [16, 8]),
                library_product(4, "custom-call.1", [64, 16], [1, 2]),
                instruction(5, "loop_tanh_fusion", "fusion", [64, 16], [4], calls=2),
                library_product(6, "custom-call.2", [64, 8], [5, 3]),
                instruction(7, "loop_add_fusion.1", "fusion", [64, 8], [6], calls=2),
            ],
        }
    )


def jax_gpu_space(hlo: bytes, kernels: Sequence[tuple[str, str]], steps: int = 3) -> bytes:
    """An XSpace of JAX on a GPU. In each step of 1 ms a program runs these kernels, (name, hlo_op), 100 us each.

    Kernels of one hlo_op in a step are of one launch.
    """
    us, rows, marks, calls = 10**6, [], [], []
    for step in range(steps):
        ops = list(dict.fromkeys(op for _, op in kernels))
        for at, (name, op) in enumerate(kernels):
            launch = step * len(ops) + ops.index(op) + 1
            stats = {"correlation_id": launch, "hlo_op": op, "hlo_module": "jit_step", "program_id": 7}
            rows.append((name, step * 1000 * us + (50 + 100 * at) * us, 100 * us, stats))
        marks.append(("train", step * 1000 * us, 900 * us, {"step_num": step}))
        calls += [
            ("cuGraphLaunch", step * 1000 * us + (10 + at) * us, us, {"correlation_id": step * len(ops) + at + 1})
            for at in range(len(ops))
        ]
    data = plane("/host:metadata", {"": [("jit_step(7)", 0, 0, {"@Hlo Proto": hlo})]})
    data += plane("/device:GPU:0", {"Stream #1(Compute)": rows}, {"gpu_device_name": "NVIDIA H200"})
    return data + plane("/host:CPU", {"python": [*marks, *calls]})


# --- Nsight Systems -----------------------------------------------------------------------------------------------


def write_nsys(path: Path, *, processes: int = 2, steps: int = 3, sms: int | None = 132) -> Path:
    """Write an export of `processes` ranks on one host, each with its own device, and NVTX ranges `step N`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    strings = {
        1: "nvjet_tst_192x192_64x4_2x1_v_bz_TNN",
        2: "ncclDevKernel_SendRecv",
        3: "cudaLaunchKernel_v7000",
        4: "step 1",
    }
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        db.executemany("INSERT INTO StringIds VALUES (?, ?)", strings.items())
        db.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, deviceId INT, streamId INT,"
            " correlationId INT, globalPid INT, shortName INT, demangledName INT,"
            " gridX INT, gridY INT, gridZ INT, blockX INT, blockY INT,"
            " blockZ INT, registersPerThread INT, staticSharedMemory INT, dynamicSharedMemory INT)"
        )
        db.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INT, end INT, deviceId INT, streamId INT,"
            " correlationId INT, globalPid INT, bytes INT, copyKind INT)"
        )
        db.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, end INT, globalTid INT, correlationId INT,"
            " nameId INT)"
        )
        db.execute("CREATE TABLE NVTX_EVENTS (start INT, end INT, eventType INT, text TEXT, textId INT, globalTid INT)")
        db.execute("CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INT)")
        db.execute("INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (1700000000000000000)")
        if sms:
            db.execute("CREATE TABLE TARGET_INFO_GPU (id INT, name TEXT, smCount INT, totalMemory INT)")
            db.executemany(
                "INSERT INTO TARGET_INFO_GPU VALUES (?, 'NVIDIA H100', ?, 85899345920)",
                [(rank, sms) for rank in range(processes)],
            )
        for rank in range(processes):
            process = (rank + 1) << 24
            for step in range(steps):
                begin, corr = 1_000_000 * (step + 1), 10 * step + 1
                db.execute(
                    "INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, ?, NULL, ?)",
                    (begin, begin + 900_000, f"step {step}", process + 5),
                )
                db.execute(
                    "INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, 'nccl:all_to_all, op_id = 9', NULL, ?)",
                    (begin + 30_000, begin + 50_000, process + 5),
                )
                for number, (name, offset, duration) in enumerate(((1, 100_000, 400_000), (2, 300_000, 300_000))):
                    launch = begin + 10_000 + 30_000 * number
                    db.execute(
                        "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, 3)",
                        (launch, launch + 5_000, process + 5, corr + number),
                    )
                    db.execute(
                        f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({', '.join('?' * 17)})",
                        (
                            *(begin + offset, begin + offset + duration, rank, 7 + number, corr + number, process),
                            *(name, name, 264, 1, 1, 128, 1, 1, 64, 0, 1024),
                        ),
                    )
                db.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?, ?, ?, 7, ?, ?, 4096, 1)",
                    (begin + 700_000, begin + 750_000, rank, corr + 5, process),
                )
    db.close()
    return path
