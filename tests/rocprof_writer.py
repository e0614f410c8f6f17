"""Makes documents as `rocprofv3 --output-format json` writes them."""

from __future__ import annotations

from typing import Any

KINDS = (
    ("NONE", ()),
    ("HIP_RUNTIME_API", ("hipLaunchKernel", "hipMemcpyAsync")),
    ("KERNEL_DISPATCH", ("NONE",)),
    ("MEMORY_COPY", ("MEMORY_COPY_NONE", "MEMORY_COPY_HOST_TO_DEVICE")),
    ("MARKER_CORE_RANGE_API", ("roctxThreadRangeA",)),
    ("RCCL_API", ("ncclAllReduce",)),
    ("HSA_CORE_API", ("hsa_signal_store_screlease",)),
)
KERNELS = {
    7: "Cijk_Ailk_Bljk_BBS_BH_MT256x256x64",
    8: "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)",
}
_KIND_OF = {"hip_api": 1, "kernel_dispatch": 2, "memory_copy": 3, "marker_api": 4, "rccl_api": 5, "hsa_api": 6}


def record(domain: str, start: int, end: int, corr: int, operation: int = 0, **more: Any) -> dict[str, Any]:
    """Return a record of a domain; times in ns."""
    ids = {"internal": corr, "external": 0, **more.pop("ids", {})}
    times = {"start_timestamp": start, "end_timestamp": end}
    return {"size": 64, "kind": _KIND_OF[domain], "operation": operation, "thread_id": 9, "correlation_id": ids} | {
        **times,
        **more,
    }


def dispatch(start: int, end: int, corr: int, kernel: int, *, agent: int = 102, stream: int = 0) -> dict[str, Any]:
    """Return a dispatch of 8 workgroups of 256 work items."""
    info = {
        "size": 72,
        "agent_id": {"handle": agent},
        "queue_id": {"handle": 3},
        "kernel_id": kernel,
        "group_segment_size": 1024,
        "workgroup_size": {"x": 256, "y": 1, "z": 1},
        "grid_size": {"x": 2048, "y": 1, "z": 1},
    }
    return record("kernel_dispatch", start, end, corr, dispatch_info=info, stream_id={"handle": stream})


def rocprof_process(**domains: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one process with two devices (agents 102 and 103)."""
    agents = [
        {"size": 312, "id": {"handle": 100}, "type": 1, "name": "a processor", "mem_banks": [{"size_in_bytes": 1}]},
        *(
            {
                "size": 312,
                "id": {"handle": 102 + i},
                "type": 2,
                "logical_node_type_id": i,
                "product_name": "AMD Instinct MI300X",
                "cu_count": 304,
                "mem_banks": [{"size_in_bytes": 1 << 30}, {"size_in_bytes": 1 << 30}],
            }
            for i in range(2)
        ),
    ]
    symbols = [{"size": 0, "kernel_id": 0, "formatted_kernel_name": "0"}] + [
        {"size": 88, "kernel_id": number, "kernel_name": "mangled.kd", "formatted_kernel_name": name}
        for number, name in KERNELS.items()
    ]
    marks = [
        {"key": r["correlation_id"]["internal"], "value": f"step {i}"} for i, r in enumerate(domains["marker_api"])
    ]
    return {
        "metadata": {"node": {"hostname": "node7"}, "pid": 5, "command": ["python", "train.py"]},
        "agents": agents,
        "counters": [],
        "strings": {
            "callback_records": [],
            "buffer_records": [{"kind": kind, "operations": list(names)} for kind, names in KINDS],
            "marker_api": marks,
            "correlation_id": {"external": []},
            "att_filenames": ['odd } ] " \\ , {'],
        },
        "kernel_symbols": symbols,
        "callback_records": {"counter_collection": []},
        "buffer_records": domains,
    }


def training_process(steps: int = 3) -> dict[str, Any]:
    """Return a process whose steps copy 4096 bytes, run a GEMM and an all-reduce on a stream of its own."""
    lists: dict[str, list[dict[str, Any]]] = {domain: [] for domain in (*_KIND_OF,)}
    for step in range(steps):
        at, corr = 1_000_000 + step * 10_000, 100 * step + 1
        lists["marker_api"].append(record("marker_api", at, at + 5000, corr))
        lists["hip_api"].append(record("hip_api", at + 50, at + 90, corr + 1, 1))
        lists["hip_api"].append(record("hip_api", at + 100, at + 200, corr + 2))
        lists["hip_api"].append(record("hip_api", at + 320, at + 380, corr + 4))
        lists["hsa_api"].append(record("hsa_api", at + 110, at + 120, corr + 3, ids={"ancestor": corr + 2}))
        lists["rccl_api"].append(record("rccl_api", at + 300, at + 400, corr + 5))
        ends = {"src_agent_id": {"handle": 100}, "dst_agent_id": {"handle": 102}, "bytes": 4096}
        lists["memory_copy"].append(record("memory_copy", at + 500, at + 600, corr + 1, 1, **ends))
        lists["kernel_dispatch"].append(dispatch(at + 1000, at + 4000, corr + 3, 7, stream=5))
        lists["kernel_dispatch"].append(dispatch(at + 3000, at + 6000, corr + 4, 8, stream=6))
    return rocprof_process(**lists)


def rocprof_document(*processes: dict[str, Any]) -> dict[str, Any]:
    """Return the document of these processes."""
    return {"rocprofiler-sdk-tool": list(processes)}
