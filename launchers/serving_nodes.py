"""A server over several nodes: the run script runs on each of them; node 0 leads, the others follow.

Launchers start a script with `runner: process` once per node and state CCL_PROCESS_ID, CCL_NUM_PROCESSES and
CCL_COORDINATOR: an address of node 0 and a port that is free there. Node 0 listens on that port. Each of the other
nodes connects once and keeps the connection until the trial ends, so that either side notices when the other is gone.
The nodes need no shared file system. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import IllegalConfig, MissingRequirement, host_name

JOIN_S = 300.0
"""Seconds that nodes may start apart: as long as the node program of Slurm waits for the first node's address."""
LEAVE_S = 20.0
"""Seconds that node 0 waits for the other nodes to end their processes."""
MOST_LINE_BYTES = 65536
FIRST_PORT, TRIES = 20_000, 200
PORTS_OF_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")
SILENT_S, PROBES = 10, 3
"""A connection to a node without power is given up after `PROBES` unanswered probes, `SILENT_S` seconds apart."""


class NodeFailed(Exception):
    """A node failed, or did not come; the message says which and why."""


class Reported(SystemExit):
    """Ends this node's script: node 0 knows what happened here, and reports it."""


_KINDS = {kind.__name__: kind for kind in (IllegalConfig, MissingRequirement, MemoryError)}


@dataclass(frozen=True)
class Place:
    """Which node this process runs on, and where node 0 listens."""

    node: int = 0
    num_nodes: int = 1
    host: str = "127.0.0.1"
    port: int = 0

    @classmethod
    def read(cls) -> Place:
        """Return the place that the launcher states; one node if it states none."""
        num_nodes = int(os.environ.get("CCL_NUM_PROCESSES", "1"))
        if num_nodes == 1:
            return cls()
        host, _, port = os.environ["CCL_COORDINATOR"].rpartition(":")
        return cls(int(os.environ["CCL_PROCESS_ID"]), num_nodes, host.strip("[]"), int(port))


def find_open_port(host: str = "") -> int:
    """Return a port that is free now, on all interfaces or the one of `host`.

    An engine may bind it a minute later. So it is not one of those that the system gives to connections meanwhile.
    """
    for port in random.SystemRandom().sample(range(FIRST_PORT, _read_first_of_connections()), TRIES):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _read_first_of_connections() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return max(FIRST_PORT + TRIES, int(PORTS_OF_CONNECTIONS.read_text().split()[0]))
    return FIRST_PORT + 10 * TRIES


class Peer:
    """A connection between two nodes: one JSON object a line."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._unread = b""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", SILENT_S), ("TCP_KEEPINTVL", SILENT_S), ("TCP_KEEPCNT", PROBES)):
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    @property
    def address(self) -> str:
        """This node's address on the network of the connection."""
        return str(self._socket.getsockname()[0])

    @property
    def remote_address(self) -> str:
        """The other node's address."""
        return str(self._socket.getpeername()[0])

    def send(self, **said: Any) -> None:
        """Send one message; nothing happens if the other side is gone, which `receive` finds out."""
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(said).encode() + b"\n")

    def receive(self, limit_s: float | None) -> dict[str, Any] | None:
        """Return the next message, empty if there is none within the limit; None if the other side is gone."""
        self._socket.settimeout(limit_s)
        while b"\n" not in self._unread:
            try:
                part = self._socket.recv(MOST_LINE_BYTES)
            except TimeoutError:
                return {}
            except OSError:
                return None
            if not part or len(self._unread) > MOST_LINE_BYTES:
                return None
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            said = json.loads(line)
        except ValueError:
            return None
        return said if isinstance(said, dict) else None

    def close(self) -> None:
        self._socket.close()


@dataclass
class Leader:
    """Node 0's side: the nodes that joined, and what went wrong with the first that failed."""

    peers: dict[int, Peer] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    addresses: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Address of each of them on the network, and a port that is free there."""
    peak_bytes: dict[int, int] = field(default_factory=dict)
    """Peak resident memory of each of them, once they have ended."""
    lost: str = ""
    _kind: type[Exception] = NodeFailed
    _is_ending: bool = False
    _threads: list[threading.Thread] = field(default_factory=list)

    @property
    def address(self) -> str:
        """Node 0's address, as the others reach it."""
        return next((peer.address for peer in self.peers.values()), "127.0.0.1")

    def watch(self, on_loss: Callable[[], None]) -> None:
        """Call `on_loss` once, from another thread, as soon as a node reports a failure or is gone."""
        for node, peer in self.peers.items():
            thread = threading.Thread(target=self._watch_one, args=(node, peer, on_loss), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _watch_one(self, node: int, peer: Peer, on_loss: Callable[[], None]) -> None:
        said = peer.receive(None)
        if said is not None and "peak_bytes" in said:
            self.peak_bytes[node] = int(said["peak_bytes"])
            peer.receive(None)
        if self._is_ending or self.lost:
            return
        why = "its run script ended, or the node is gone" if said is None else str(said.get("failed"))
        self._kind = _KINDS.get(str((said or {}).get("kind")), NodeFailed)
        self.lost = f"node {node} ({self.hosts[node]}): {why}"
        on_loss()

    def require_all(self) -> None:
        """Raise NodeFailed, or an exception of the kind that a node reported, if one has failed."""
        if self.lost:
            raise self._kind(self.lost)

    def end(self) -> None:
        """Have the other nodes end their processes, and wait until they have."""
        self._is_ending = True
        for peer in self.peers.values():
            peer.send(end=True)
        end_s = time.monotonic() + LEAVE_S
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        for peer in self.peers.values():
            peer.close()


@contextlib.contextmanager
def leading(place: Place, nonce: str, plan: Mapping[str, Any], limit_s: float = JOIN_S) -> Iterator[Leader]:
    """Wait until every node has joined, give each the plan, and end them after the block; NodeFailed if one is missing.

    Who does not know the trial's nonce is not of this trial and is turned away.
    """
    leader, end_s = Leader(), time.monotonic() + limit_s
    if place.num_nodes == 1:
        yield leader
        return
    with _listen(place) as listener:
        try:
            while len(leader.peers) < place.num_nodes - 1:
                listener.settimeout(max(0.01, end_s - time.monotonic()))
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    missing = sorted({*range(1, place.num_nodes)} - {*leader.peers})
                    words = f"node {missing[0]}" if len(missing) == 1 else f"nodes {', '.join(map(str, missing))}"
                    raise NodeFailed(f"{words} did not reach node 0 within {limit_s:g} s") from None
                _welcome(leader, place, nonce, Peer(connection))
            for peer in leader.peers.values():
                peer.send(plan=plan)
            yield leader
        finally:
            leader.end()


def _listen(place: Place) -> socket.socket:
    try:
        return socket.create_server(("", place.port), backlog=place.num_nodes)
    except OSError as error:
        raise NodeFailed(f"node 0 cannot listen on port {place.port}, on which the nodes meet: {error}") from None


def _welcome(leader: Leader, place: Place, nonce: str, peer: Peer) -> None:
    said = peer.receive(5.0) or {}
    node, port = said.get("node"), said.get("port", 0)
    is_known = said.get("nonce") == nonce and isinstance(port, int)
    if not is_known or node in leader.peers or node not in range(1, place.num_nodes):
        peer.close()
        return
    leader.peers[node], leader.hosts[node] = peer, str(said.get("host", ""))[:100]
    leader.addresses[node] = peer.remote_address, port


@contextlib.contextmanager
def following(
    place: Place, nonce: str, limit_s: float = JOIN_S, port: int = 0
) -> Iterator[tuple[Peer, dict[str, Any]]]:
    """Join node 0 and yield the connection and the plan; node 0 reports what the block raises, if it is still there.

    `port` is a free one of this node, on which node 0 may reach what the block starts.
    """
    peer = _connect(place, limit_s)
    try:
        peer.send(node=place.node, host=host_name(), nonce=nonce, port=port)
        said = peer.receive(limit_s)
        if said is not None and "end" in said:  # before it began: another node is missing, as node 0 reports
            raise Reported(0)
        if not said or "plan" not in said:
            raise NodeFailed("connection closed by peer: node 0 is gone")
        yield peer, said["plan"]
    except Exception as error:
        peer.send(failed=f"{type(error).__name__}: {error}"[:1000], kind=type(error).__name__)
        if "end" in (peer.receive(LEAVE_S) or {}):
            raise Reported(0) from error
        raise
    finally:
        peer.close()


def _connect(place: Place, limit_s: float) -> Peer:
    end_s = time.monotonic() + limit_s
    while True:
        try:
            return Peer(socket.create_connection((place.host, place.port), timeout=5.0))
        except OSError as error:
            if time.monotonic() > end_s:
                words = f"node 0 did not listen on {place.host}:{place.port} within {limit_s:g} s: {error}"
                raise NodeFailed(words) from None
            time.sleep(0.2)


def await_end(peer: Peer, require_alive: Callable[[], None]) -> None:
    """Return when node 0 ends the trial; raises NodeFailed if it is gone, and what `require_alive` raises."""
    while True:
        require_alive()
        said = peer.receive(0.5)
        if said is None:
            raise NodeFailed("connection closed by peer: node 0 is gone")
        if "end" in said:
            return
