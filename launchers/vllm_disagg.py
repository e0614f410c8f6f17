"""Run script `vllm-disagg`: serves the card's model with vLLM servers that only prefill and others that only decode.

They are behind `serving_proxy.py`, on one machine or several: the script runs on each, and each server is on one of
them. A connector of vLLM moves keys and values between servers: NIXL (`pip install nixl`), or by a folder of one
machine vLLM's ExampleConnector, which is made for tests. Tried with vLLM 0.32.0 on a CPU, also over two nodes; on GPUs
it was not tried.

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
from serving_apart import OWN_KNOBS as KNOBS_OF_ALL
from serving_apart import ROLES, Seat, place_servers, read_groups
from serving_model import count_nodes
from serving_nodes import find_open_port
from serving_proxy import DECODE, PREFILL
from serving_run import Share
from vllm_serve import KV_CACHE_GIB, PROGRAM, measure, prepare, render_command

PROXY = Path(__file__).with_name("serving_proxy.py")
CONNECTOR = "kv_connector"
NIXL, FOLDER = "NixlConnector", "ExampleConnector"
"""Connectors. NIXL's requests say where their keys and values are; a folder's are found by the prompt."""
OWN_KNOBS = KNOBS_OF_ALL | {CONNECTOR}


def read_connector(data: Mapping[str, Any]) -> str:
    """Return the connector; raises IllegalConfig if it cannot move keys and values between these servers."""
    connector, nodes = str(data["config"].get(CONNECTOR, NIXL)), count_nodes(data)
    if connector not in (NIXL, FOLDER):
        raise IllegalConfig(f"{CONNECTOR} must be {NIXL} or {FOLDER}, not {connector!r}")
    if connector == FOLDER and nodes > 1:
        raise IllegalConfig(f"{CONNECTOR} must be {NIXL} on {nodes} nodes: {FOLDER} writes to a folder of one of them")
    return connector


def render_transfer(connector: str, folder: str) -> str:
    """Return the value of `--kv-transfer-config`."""
    more = {} if connector == NIXL else {"kv_connector_extra_config": {"shared_storage_path": folder}}
    return json.dumps({CONNECTOR: connector, "kv_role": "kv_both", **more})


def render_server(data: Mapping[str, Any], role: str, model: str, port: int | str, folder: str) -> list[str]:
    """Return the command of one server of a role, without the interpreter."""
    _, size = read_groups(data)[role]
    config = {knob: value for knob, value in data["config"].items() if knob not in OWN_KNOBS}
    alone = {**data, "config": {"tp": size, **config}, "num_ranks": size, "ranks_per_node": size}
    transfer = render_transfer(read_connector(data), folder)
    return [*render_command(alone, model, port), "--kv-transfer-config", transfer]


def show_launch(data: Mapping[str, Any]) -> LaunchForm:
    """Return how to start a server of each role with vLLM alone."""
    kv_cache, seats = data["config"].get(KV_CACHE_GIB), place_servers(data)
    nodes = max(seat.node for seat in seats) + 1
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
            *([describe_seats(seats, nodes)] if nodes > 1 else []),
        ],
    )


def describe_seats(seats: Sequence[Seat], nodes: int) -> str:
    """Return which servers each node has, as a sentence."""
    words = []
    for node in range(nodes):
        counts = {role: sum(seat.node == node and seat.role == role for seat in seats) for role in ROLES}
        kinds = " and ".join(f"{count} that {role}" for role, count in counts.items() if count)
        words.append(f"node {node} has {kinds}")
    return (
        f"Servers by node: {'; '.join(words)}. There, VLLM_NIXL_SIDE_CHANNEL_HOST and --host are an address of the node"
        " that the others reach, in a network that you trust."
    )


def plan_servers(
    data: Mapping[str, Any], model: str, folder: str, more: Sequence[str], share: Share | None = None
) -> list[dict[str, Any]]:
    """Return number, role, port, command and environment of every server of this node, each with accelerators of its
    own; on node 0 also number, role, host and port of those of other nodes."""
    share = share or Share()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    size_of_node = int(data.get("ranks_per_node") or data["config"]["devices"])
    devices = visible.split(",") if visible else [str(number) for number in range(size_of_node)]
    planned: list[dict[str, Any]] = []
    for seat in place_servers(data):
        server: dict[str, Any] = {"number": seat.number, "role": seat.role}
        if seat.node == share.place.node:
            port, channel = find_open_port(), find_open_port()
            server["port"] = port
            server["command"] = [*PROGRAM, *render_server(data, seat.role, model, port, folder), *more]
            server["environment"] = {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": share.address,
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(channel),
                "CUDA_VISIBLE_DEVICES": ",".join(devices[seat.first : seat.first + seat.size]),
            }
            planned.append(server)
        elif share.place.node == 0:
            server["host"], server["port"] = share.others[seat.node]
            planned.append(server)
    return planned


def serve(trial: Trial) -> None:
    """Run the whole trial."""
    groups, is_nixl = read_groups(trial.data), read_connector(trial.data) == NIXL
    place_servers(trial.data)
    model, more = prepare(trial)
    folder = trial.folder / "kv"
    if not is_nixl:
        folder.mkdir(exist_ok=True)

    def command(port: int, share: Share) -> Sequence[str]:
        path = trial.folder / f"servers-{share.place.node}.json"
        plan: dict[str, Any] = {"workers": plan_servers(trial.data, model, str(folder), more, share)}
        plan |= {"passes_parameters": is_nixl, "secret": trial.data.get("nonce", "")}
        plan |= {"relay": {"host": share.address, "port": share.port}} if share.place.node else {}
        path.write_text(json.dumps(plan), encoding="utf-8")
        return [sys.executable, str(PROXY), str(path), str(port)]

    try:
        measure(trial, command, 1, copies=sum(count for count, _ in groups.values()))
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # keys and values of every prompt


if __name__ == "__main__":
    sys.exit(run_rank(serve, show_launch))
