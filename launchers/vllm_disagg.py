"""Run script `vllm-disagg`: serves the card's model with vLLM servers that only prefill and others that only decode.

All servers are on one machine, behind `serving_proxy.py`. A connector of vLLM moves keys and values between them: NIXL
(`pip install nixl`), or on a folder vLLM's ExampleConnector, which is made for tests. Tried with vLLM 0.32.0 on a CPU;
on GPUs it was not tried.

Knobs: `devices` (all accelerators), `prefill_workers`, `prefill_gpus_per_worker`, `decode_workers`,
`decode_gpus_per_worker`, `kv_connector`; and those of `vllm_serve.py` but its degrees, which every server has.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import IllegalConfig, LaunchForm, Trial, run_rank
from serving_model import require_one_machine
from serving_nodes import find_open_port
from serving_proxy import DECODE, PREFILL
from serving_run import Share
from vllm_serve import KV_CACHE_GIB, PROGRAM, measure, prepare, render_command

PROXY = Path(__file__).with_name("serving_proxy.py")
ROLES = (PREFILL, DECODE)
CONNECTOR = "kv_connector"
NIXL, FOLDER = "NixlConnector", "ExampleConnector"
"""Connectors. NIXL's requests say where their keys and values are; a folder's are found by the prompt."""
OWN_KNOBS = frozenset(
    {"devices", CONNECTOR, *(f"{role}_{part}" for role in ROLES for part in ("workers", "gpus_per_worker"))}
)


def read_groups(data: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the servers of each role, and the accelerators of each; IllegalConfig if `devices` is not their sum."""
    config = data["config"]
    groups = {role: (int(config[f"{role}_workers"]), int(config[f"{role}_gpus_per_worker"])) for role in ROLES}
    total, devices = sum(count * size for count, size in groups.values()), int(config["devices"])
    if min(count for count, _ in groups.values()) < 1:
        raise IllegalConfig("prefill_workers and decode_workers must be at least 1")
    if total != devices:
        raise IllegalConfig(f"the servers have {total} accelerators together, but devices is {devices}")
    require_one_machine(data)
    return groups


def render_transfer(connector: str, folder: str) -> str:
    """Return the value of `--kv-transfer-config`."""
    if connector not in (NIXL, FOLDER):
        raise IllegalConfig(f"{CONNECTOR} must be {NIXL} or {FOLDER}, not {connector!r}")
    more = {} if connector == NIXL else {"kv_connector_extra_config": {"shared_storage_path": folder}}
    return json.dumps({CONNECTOR: connector, "kv_role": "kv_both", **more})


def render_server(data: Mapping[str, Any], role: str, model: str, port: int | str, folder: str) -> list[str]:
    """Return the command of one server of a role, without the interpreter."""
    _, size = read_groups(data)[role]
    config = {knob: value for knob, value in data["config"].items() if knob not in OWN_KNOBS}
    alone = {**data, "config": {"tp": size, **config}, "num_ranks": size, "ranks_per_node": size}
    transfer = render_transfer(str(data["config"].get(CONNECTOR, NIXL)), folder)
    return [*render_command(alone, model, port), "--kv-transfer-config", transfer]


def show_launch(data: Mapping[str, Any]) -> LaunchForm:
    """Return how to start a server of each role with vLLM alone."""
    kv_cache = data["config"].get(KV_CACHE_GIB)
    back = " ".join(["vllm", *render_server(data, DECODE, "MODEL", 8200, "FOLDER")[:-1]])
    (fronts, _), (backs, _) = (read_groups(data)[role] for role in ROLES)
    return LaunchForm(
        "vllm serve",
        ["vllm", *render_server(data, PREFILL, "MODEL", 8100, "FOLDER")],
        "vLLM 0.32.0's own parser, in `make test-vllm`",
        environment={} if kv_cache is None else {"VLLM_CPU_KVCACHE_SPACE": str(kv_cache)},
        notes=[
            f"This is one of {fronts} servers that prefill; one of {backs} that decode is: {back} with the same value.",
            "Each server has its own accelerators (CUDA_VISIBLE_DEVICES), port and VLLM_NIXL_SIDE_CHANNEL_PORT.",
            "Requests go through a proxy that asks a prefill server for one token first: launchers/serving_proxy.py.",
        ],
    )


def plan_servers(data: Mapping[str, Any], model: str, folder: str, more: Sequence[str]) -> list[dict[str, Any]]:
    """Return role, port, command and environment of every server, each with accelerators of its own."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    devices = visible.split(",") if visible else [str(number) for number in range(int(data["config"]["devices"]))]
    planned = []
    for role, (count, size) in read_groups(data).items():
        for _ in range(count):
            own, devices = devices[:size], devices[size:]
            port, channel = find_open_port(), find_open_port()
            meet = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(channel)}
            command = [*PROGRAM, *render_server(data, role, model, port, folder), *more]
            environment = {**meet, "CUDA_VISIBLE_DEVICES": ",".join(own)}
            planned.append({"role": role, "port": port, "command": command, "environment": environment})
    return planned


def serve(trial: Trial) -> None:
    """Run the whole trial."""
    groups = read_groups(trial.data)
    model, more = prepare(trial)
    folder, path = trial.folder / "kv", trial.folder / "servers.json"
    folder.mkdir(exist_ok=True)

    def command(port: int, _: Share) -> Sequence[str]:
        planned = plan_servers(trial.data, model, str(folder), more)
        is_nixl = trial.config.get(CONNECTOR, NIXL) == NIXL
        path.write_text(json.dumps({"workers": planned, "passes_parameters": is_nixl}), encoding="utf-8")
        return [sys.executable, str(PROXY), str(path), str(port)]

    try:
        measure(trial, command, 1, copies=sum(count for count, _ in groups.values()))
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # keys and values of every prompt


if __name__ == "__main__":
    sys.exit(run_rank(serve, show_launch))
