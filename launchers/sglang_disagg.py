"""Run script `sglang-disagg`: renders SGLang servers that only prefill, others that only decode, and their router.

Nothing is run: their transfer of keys and values needs GPUs. Each server is on one machine; together they may be on
several. Options were read by the parsers of SGLang 0.5.23 and sglang-router 0.3.2 (`make test-sglang`).

Knobs: `devices` (all accelerators), `prefill_workers`, `prefill_gpus_per_worker`, `decode_workers`,
`decode_gpus_per_worker`, `kv_connector`; and those of `sglang_serve.py` but its degrees, which every server has.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from typing import Any

from common import IllegalConfig, LaunchForm, MissingRequirement, Trial, run_rank
from serving_apart import OWN_KNOBS, Seat, place_servers
from serving_proxy import PREFILL
from sglang_serve import render_command

CONNECTOR = "kv_connector"
CONNECTORS = ("mooncake", "nixl")
ROUTER_PORT, FIRST_PORT, FIRST_BOOTSTRAP_PORT = 8000, 8100, 8998


def name_node(seat: Seat) -> str:
    """Return the placeholder for the address of a server's node."""
    return f"NODE_{seat.node}"


def render_server(data: Mapping[str, Any], seat: Seat, model: str) -> list[str]:
    """Return the command of one server, without the interpreter."""
    connector = str(data["config"].get(CONNECTOR, CONNECTORS[0]))
    if connector not in CONNECTORS:
        raise IllegalConfig(f"{CONNECTOR} must be {' or '.join(CONNECTORS)}, not {connector!r}")
    config = {knob: value for knob, value in data["config"].items() if knob not in (*OWN_KNOBS, CONNECTOR)}
    alone = {**data, "config": {"tp": seat.size, **config}, "num_ranks": seat.size, "ranks_per_node": seat.size}
    words = render_command(alone, model, FIRST_PORT + seat.number)
    words[words.index("--host") + 1] = name_node(seat)
    words += ["--base-gpu-id", str(seat.first)] if seat.first else []
    words += ["--disaggregation-mode", seat.role, "--disaggregation-transfer-backend", connector]
    if seat.role == PREFILL:
        words += ["--disaggregation-bootstrap-port", str(FIRST_BOOTSTRAP_PORT + seat.number)]
    return words


def render_router(seats: list[Seat]) -> list[str]:
    """Return the command of the router, without the interpreter."""
    words = ["-m", "sglang_router.launch_router", "--pd-disaggregation"]
    for seat in seats:
        words += [f"--{seat.role}", f"http://{name_node(seat)}:{FIRST_PORT + seat.number}"]
        words += [str(FIRST_BOOTSTRAP_PORT + seat.number)] if seat.role == PREFILL else []
    return [*words, "--host", "127.0.0.1", "--port", str(ROUTER_PORT)]


def show_launch(data: Mapping[str, Any]) -> LaunchForm:
    """Return how to start the router, and in notes each server, with SGLang alone."""
    seats = place_servers(data)
    servers = [shlex.join(["python", *render_server(data, seat, "MODEL")]) for seat in seats]
    return LaunchForm(
        "sglang_router",
        ["python", *render_router(seats)],
        "the parsers of SGLang 0.5.23 and sglang-router 0.3.2, in `make test-sglang`; nothing was run",
        notes=[
            *(f"Before, on node {seat.node}: {words}" for seat, words in zip(seats, servers, strict=True)),
            "MODEL is the checkpoint: a folder or its name on the hub. NODE_0 and so on are addresses of the nodes that"
            " the others reach, in a network that you trust.",
            "--context-length is the longest request of the card: raise it for longer ones, and measure again.",
        ],
    )


def serve(trial: Trial) -> None:
    """Raise: trials of it are rendered only."""
    raise MissingRequirement(
        "sglang-disagg configurations are rendered, not run: start the commands of `ccl-search space explain --launch`,"
        " or search with vllm-disagg"
    )


if __name__ == "__main__":
    sys.exit(run_rank(serve, show_launch))
