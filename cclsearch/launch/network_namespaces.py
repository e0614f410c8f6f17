"""Starts the ranks of a job in several network namespaces of this machine, each used as a node or a device.

A program, not a module of the engine: the local launcher runs it with the standard library only. Its arguments are the
run script and `name=value` words: `namespaces`, `ranks`, `per_node` (places of a node), `namespaces_per_node` (of its
places each has an equal part), and `places` (the place of each rank).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

POLL_S = 0.05
# Each namespace has its own ports, so one number serves every job that runs alone in them.
PORT = 29517
"""Port of the rendezvous."""


def main(argv: Sequence[str]) -> int:
    """Start every rank and wait; the first failure ends the others and is the exit code."""
    script, options = argv[1], dict(word.split("=", 1) for word in argv[2:])
    namespaces = options["namespaces"].split(",")
    ranks, per_node = int(options["ranks"]), int(options["per_node"])
    spaces_per_node = int(options.get("namespaces_per_node", "1"))
    per_space = max(per_node // spaces_per_node, 1)
    places = [int(place) for place in options["places"].split(",")] if options.get("places") else list(range(ranks))
    needed = sorted({place // per_space for place in places})
    if needed[-1] >= len(namespaces):
        print(
            f"{ranks} ranks, {per_space} a namespace, need {needed[-1] + 1} namespaces: {namespaces}", file=sys.stderr
        )
        return 2
    links = {space: find_link(namespaces[space]) for space in needed}
    nodes = [place // per_node for place in places]
    head = links[places[0] // per_space][1]
    children = []
    for rank, place in enumerate(places):
        space, node = place // per_space, nodes[rank]
        variables = {
            "RANK": rank,
            "WORLD_SIZE": ranks,
            "LOCAL_RANK": nodes[:rank].count(node),
            "LOCAL_WORLD_SIZE": nodes.count(node),
            "GROUP_RANK": sorted(set(nodes)).index(node),
            "MASTER_ADDR": head,
            "MASTER_PORT": PORT,
            "GLOO_SOCKET_IFNAME": links[space][0],
            "CCL_NODE_NAME": namespaces[node * spaces_per_node],
        }
        environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
        command = ["ip", "netns", "exec", namespaces[space], sys.executable, script]
        children.append(subprocess.Popen(command, env=environment))
    return wait(children)


def find_link(namespace: str) -> tuple[str, str]:
    """Return name and IPv4 address of the namespace's first link that is not loopback."""
    command = ["ip", "-n", namespace, "-j", "-4", "addr", "show", "scope", "global"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout or "[]")
    for link in found:
        for address in link.get("addr_info", []):
            return str(link["ifname"]), str(address["local"])
    raise SystemExit(f"the network namespace {namespace!r} has no link with an IPv4 address")


def wait(children: Sequence[subprocess.Popen[bytes]]) -> int:
    """Return 0 if all end well; else end the others, and return the first failure's exit code."""
    while True:
        codes = [child.poll() for child in children]
        failed = next((code for code in codes if code), None)
        if failed is not None:
            for child in children:
                if child.poll() is None:
                    child.send_signal(signal.SIGTERM)
            return failed if failed > 0 else 128 - failed
        if all(code == 0 for code in codes):
            return 0
        time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
