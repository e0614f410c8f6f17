"""Cards in CCL-Bench's form, which tests change field by field."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

ABSENT = object()
"""In place of a value: the card has no such field."""


def make_card(family: str = "llama-3.1-8b", arch: dict[str, Any] | None = None, **other: Any) -> dict[str, Any]:
    """Return a card that states no shape except `arch`; `other` are top-level fields."""
    model = {"phase": "training", "moe": False, "granularity": "model_fwd_bwd_pass", "precision": "bf16"}
    return {
        "version": 1,
        "workload": {
            "model": {**model, "model_family": family, "model_arch": arch},
            "data": {"batch_size": 4, "seq_len": 512, "dataset": "c4"},
            "hardware": {
                "network_topo": {"topology": "slingshot", "bandwidth_gbps": [200, 2000]},
                "xpu_spec": {"model": "h100", "memory_gb": 80, "total_count": 8, "count_per_node": 4},
                "driver_version": "cuda_12.4",
            },
        },
        "Model-executor": {
            "framework": {"name": "torchtitan-0.1.0"},
            "model_plan_parallelization": {"dp_replicate": 1, "dp_shard": 2, "tp": 4, "pp": 1, "cp": 1, "pp_mb": 2},
            "communication_library": {"name": "NCCL", "version": "2.18.5", "env": {"NCCL_DEBUG": "INFO"}},
            "protocol_selection": ["rocev2", "p2p"],
        },
        **other,
    }


def change_fields(card: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the card with other values at these paths, such as `workload.model.phase`."""
    changed = copy.deepcopy(card)
    for path, value in changes.items():
        *parents, last = path.split(".")
        part = changed
        for name in parents:
            part = part[name]
        if value is ABSENT:
            part.pop(last, None)
        else:
            part[last] = value
    return changed
