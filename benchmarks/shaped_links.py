"""Network namespaces with shaped links between them, for tests and benchmarks on one machine; needs root.

    sudo python benchmarks/shaped_links.py cube COMMAND...    # with namespaces cube0 to cube3, removed afterwards

Every namespace is used as a node, or as a device of one. A bridge joins them; `tc` (htb) limits each ordered pair by
the destination address. netem is not needed, so latency stays that of the machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

CUBE = ((0, 100, 100, 200), (100, 0, 200, 100), (100, 200, 0, 100), (200, 100, 100, 0))
"""Mbit/s between four namespaces: 100 for each NVLink of the first four GPUs of a DGX-1 with V100, half of its mesh."""
SHAPES = {"cube": CUBE}
LIMIT_S = 600
"""Of one `ip` or `tc`: the kernel lets network namespaces wait for each other, and a busy machine for much longer."""


def can_shape() -> bool:
    """Return whether this process may create namespaces with shaped links."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        return False
    tried = f"cclcan{os.getpid()}"
    try:
        _run("ip", "netns", "add", tried)
        _run("ip", "-n", tried, "link", "add", "a0", "type", "veth", "peer", "name", "b0")
        _run("tc", "-n", tried, "qdisc", "add", "dev", "a0", "root", "handle", "1:", "htb", "default", "1")
    except (OSError, subprocess.SubprocessError):
        return False
    finally:
        subprocess.run(["ip", "netns", "del", tried], capture_output=True, check=False)
    return True


@contextlib.contextmanager
def shaped(mbit_s: Sequence[Sequence[float]], prefix: str = "") -> Iterator[list[str]]:
    """Yield the names of namespaces whose links have these rates, from row to column; they are removed afterwards.

    Names are `prefix` and a number; without one they are of this process alone.
    """
    prefix = prefix or f"ccl{os.getpid() % 100000}n"
    names = [f"{prefix}{k}" for k in range(len(mbit_s))]
    bridge = f"{prefix}br"
    try:
        _run("ip", "netns", "add", bridge)
        _run("ip", "-n", bridge, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", bridge, "link", "set", "br0", "up")
        for k, name in enumerate(names):
            _add_node(bridge, name, k)
        for k, name in enumerate(names):
            _shape(name, k, mbit_s[k])
        yield names
    finally:
        for name in (*names, bridge):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _add_node(bridge: str, name: str, k: int) -> None:
    _run("ip", "netns", "add", name)
    _run("ip", "-n", name, "link", "set", "lo", "up")
    _run("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"p{k}", "netns", bridge)
    _run("ip", "-n", name, "addr", "add", f"10.201.0.{k + 1}/24", "dev", "eth0")
    _run("ip", "-n", name, "link", "set", "eth0", "up")
    _run("ip", "-n", bridge, "link", "set", f"p{k}", "master", "br0", "up")


def _shape(name: str, k: int, rates: Sequence[float]) -> None:
    """Limit what the namespace sends to each other one; everything else, such as ARP, is not limited."""
    device = ["tc", "-n", name]
    _run(*device, "qdisc", "add", "dev", "eth0", "root", "handle", "1:", "htb", "default", "1", "r2q", "100")
    _run(*device, "class", "add", "dev", "eth0", "parent", "1:", "classid", "1:1", "htb", "rate", "10gbit")
    for other, rate in enumerate(rates):
        if other == k:
            continue
        kbit, number = f"{round(rate * 1000)}kbit", f"1:{10 + other}"
        burst = ["burst", "32k", "cburst", "32k"]
        _run(*device, "class", "add", "dev", "eth0", "parent", "1:", "classid", number, "htb", "rate", kbit, *burst)
        match = ["u32", "match", "ip", "dst", f"10.201.0.{other + 1}/32", "flowid", number]
        _run(*device, "filter", "add", "dev", "eth0", "parent", "1:", "protocol", "ip", *match)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_S)


def main(argv: Sequence[str]) -> int:
    """Run a command while the namespaces of a shape exist; returns its exit code."""
    if len(argv) < 2 or argv[0] not in SHAPES:
        print(f"usage: shaped_links.py {{{','.join(SHAPES)}}} COMMAND...", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the namespaces are removed
    with shaped(SHAPES[argv[0]], argv[0]):
        return subprocess.run(argv[1:], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
