"""Real sshd processes on loopback addresses: the workers of a slice, each with its own home folder.

Used by tests, the fake `gcloud` and `benchmarks/tpu.py`. Killing a worker is like losing a machine: sshd and every
process started from it end at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

SSHD = "/usr/sbin/sshd"
MARK = "CCL_TEST_WORKER"


def find_sshd_problem() -> str | None:
    """Return why workers cannot be started here, or None."""
    for program in (SSHD, "ssh", "scp", "ssh-keygen"):
        if shutil.which(program) is None:
            return f"{program} was not found"
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):
            os.makedirs("/run/sshd", exist_ok=True)
    return None


@dataclass(frozen=True)
class Worker:
    """One machine: its address, port and folder."""

    address: str
    port: int
    folder: Path

    @property
    def home(self) -> Path:
        return self.folder / "home"

    def start(self) -> None:
        """Start sshd and wait until it listens."""
        (self.folder / "sshd.pid").unlink(missing_ok=True)
        subprocess.run(
            [SSHD, "-f", str(self.folder / "sshd_config"), "-E", str(self.folder / "sshd.log")],
            check=True,
            timeout=60,
            env={**os.environ, MARK: str(self.folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection((self.address, self.port), timeout=5):
                return
            time.sleep(0.02)
        raise TimeoutError(f"sshd did not come up: {(self.folder / 'sshd.log').read_text()}")

    def processes(self) -> list[int]:
        """Return every process of the machine except sshd's own."""
        return [pid for pid in _marked(f"{MARK}={self.folder}") if pid not in self._sshd()]

    def kill(self) -> None:
        """Kill sshd, its connections and every process that they started."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            running = {*self._sshd(), *self._connections(), *_marked(f"{MARK}={self.folder}")}
            if not running:
                return
            for pid in running:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def _sshd(self) -> list[int]:
        with contextlib.suppress(OSError, ValueError):
            pid = int((self.folder / "sshd.pid").read_text())
            if str(self.folder) in Path(f"/proc/{pid}/cmdline").read_text():
                return [pid]
        return []

    def _connections(self) -> list[int]:
        """Return the children of sshd that serve a connection."""
        parents = self._sshd()
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                if int(stat.read_text().rpartition(")")[2].split()[1]) in parents:
                    found.append(int(stat.parent.name))
        return found


def make_key(folder: Path) -> Path:
    """Make a key pair for the workers' user; return the private key's path."""
    key = folder / "key"
    if not key.exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True, timeout=60)
    return key


def make_worker(folder: Path, key: Path, number: int, *, python_folder: Path) -> Worker:
    """Set up a machine without starting it; `python_folder` is first in its PATH."""
    (folder / "home").mkdir(parents=True, exist_ok=True)
    address = f"127.0.0.{number + 1}"
    worker = Worker(address, _free_port(address), folder)
    host_key = folder / "host_key"
    if not host_key.exists():
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(host_key)], check=True, timeout=60)
    shutil.copyfile(f"{key}.pub", folder / "authorized_keys")
    entry = folder / "entry.sh"  # what a login on the machine sets: home folder and PATH, nothing of this process
    entry.write_text(
        "#!/bin/sh\n"
        f"export HOME='{worker.home}' {MARK}='{folder}' PATH='{python_folder}':/usr/local/bin:/usr/bin:/bin\n"
        'cd "$HOME" && exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"\n'
    )
    sftp = next(
        (p for p in ("/usr/lib/openssh/sftp-server", "/usr/libexec/openssh/sftp-server") if os.path.exists(p)), ""
    )
    (folder / "sshd_config").write_text(
        f"ListenAddress {address}:{worker.port}\nHostKey {host_key}\nPidFile {folder / 'sshd.pid'}\nUsePAM no\n"
        f"AuthorizedKeysFile {folder / 'authorized_keys'}\nStrictModes no\nPasswordAuthentication no\n"
        f"PermitRootLogin yes\nMaxStartups 100\nForceCommand /bin/sh {entry}\n"
        + (f"Subsystem sftp {sftp}\n" if sftp else "")
    )
    (folder / "worker.json").write_text(json.dumps({"address": address, "port": worker.port}))
    return worker


def load_worker(folder: Path) -> Worker:
    """Return the machine of that folder."""
    data = json.loads((folder / "worker.json").read_text())
    return Worker(data["address"], data["port"], folder)


def own_user() -> str:
    return pwd.getpwuid(os.geteuid()).pw_name


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _marked(entry: str) -> list[int]:
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            pid = int(environ.parent.name)
            if pid != os.getpid() and entry.encode() in environ.read_bytes().split(b"\0"):
                state = (environ.parent / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX":
                    found.append(pid)
    return found
