"""A real Slurm for tests; the fixture `cluster` of conftest.py shares one among all files of a worker."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REQUIRED = os.environ.get("CCL_REQUIRE_SLURM") == "1"


@dataclass
class Cluster:
    """A running Slurm; `ask` runs one of its commands."""

    folder: Path
    port: int

    def up(self, *options: str) -> None:
        """Restart daemons that are down, or change the cluster."""
        run(["bash", str(HERE / "slurm-up"), str(self.folder), "--port", str(self.port), *options], timeout_s=300)

    def fail_node(self, node: str) -> None:
        run(["bash", str(HERE / "slurm-node-fail"), node, str(self.folder)])

    def ask(self, *command: str) -> str:
        return run(list(command))

    def pid(self, daemon: str) -> int:
        return int((self.folder / "run" / f"{daemon}.pid").read_text())


def run(command: list[str], timeout_s: float = 120) -> str:
    """Return the output of a command that must succeed."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@contextmanager
def start_cluster(*options: str) -> Iterator[Cluster]:
    """Start a cluster of four nodes with four declared GPUs each in its own folder; skip if that is not possible."""
    reason = find_problem()
    if reason is not None:
        pytest.fail(reason) if REQUIRED else pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="ccl-sl-", dir="/tmp"))  # short: paths of sockets are limited
    folder.chmod(0o755)
    guard, port = reserve_ports(80)
    cluster = Cluster(folder, port)
    try:
        cluster.up(*([] if REQUIRED else ["--no-install"]), *options)
        with use_cluster(cluster):
            yield cluster
    finally:
        subprocess.run(
            ["bash", str(HERE / "slurm-down"), str(folder), "--purge"], capture_output=True, timeout=180, check=False
        )
        guard.close()


@contextmanager
def use_cluster(cluster: Cluster) -> Iterator[None]:
    """Make it the cluster that Slurm's commands ask."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(cluster.folder / "etc" / "slurm.conf"))
        yield


def find_problem() -> str | None:
    """Return why no Slurm can be started here, or None."""
    if os.getuid() != 0:
        return "starting a real Slurm needs root"
    if not REQUIRED and not all(shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") for name in DAEMONS):
        return "Debian's Slurm packages are not installed (CCL_REQUIRE_SLURM=1 installs them)"
    if REQUIRED and shutil.which("apt-get") is None:
        return "Debian's packages are needed, but apt-get was not found"
    return None


DAEMONS = ("slurmctld", "slurmd", "slurmdbd", "munged", "mariadbd")


def reserve_ports(count: int) -> tuple[socket.socket, int]:
    """Return the first of `count` consecutive free ports, below the range of outgoing connections.

    The socket keeps the port after them, so that no cluster that starts at the same time chooses the same ones.
    """
    for base in range(12000 + os.getpid() % 50 * 100, 19000, 100):
        guard = socket.socket()
        try:
            guard.bind(("127.0.0.1", base + count))
        except OSError:
            guard.close()
            continue
        if all(_is_free(port) for port in range(base, base + count)):
            return guard, base
        guard.close()
    raise AssertionError("no free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
