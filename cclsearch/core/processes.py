"""Processes of this machine: identify one across process-id reuse, find those of a job, terminate them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from typing import Self  # not in Python before 3.11, with which workers of a TPU VM import this module

_PROC = Path("/proc")


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Identifier of this boot; empty if unknown. Start times can be compared only within one boot."""
    with contextlib.suppress(OSError):
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return ""


def pid_namespace() -> str:
    """Return this process's PID namespace (`pid:[4026531836]`), in which its id is valid; empty if unknown."""
    with contextlib.suppress(OSError):
        return os.readlink(_PROC / "self/ns/pid")
    return ""


def start_ticks(pid: int) -> int | None:
    """Start time of that process in clock ticks since boot; None if there is no such process, or it is a zombie."""
    try:
        fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


class ProcessIdentity(NamedTuple):
    """One process, as files keep it: its number alone may be another process's after a reboot or in a container."""

    pid: int
    boot: str
    start: str
    """Clock ticks since boot; empty if unknown: it had ended, is a zombie, or there is no /proc."""
    pid_ns: str = ""

    @classmethod
    def of(cls, pid: int) -> Self:
        """Return the identity of a process of this machine."""
        ticks = start_ticks(pid)
        return cls(pid, boot_id(), "" if ticks is None else str(ticks), pid_namespace())

    @property
    def is_of_this_boot(self) -> bool:
        """Whether it started after this machine's last boot."""
        return self.boot == boot_id()

    @property
    def is_elsewhere(self) -> bool:
        """Whether it has another PID namespace, in which its number means another process or none."""
        return self.pid_ns not in ("", pid_namespace())

    def is_running(self) -> bool:
        """Whether it runs and is visible from here; False for a process in another namespace."""
        is_here = self.is_of_this_boot and not self.is_elsewhere and self.start != ""
        return is_here and self.start == type(self).of(self.pid).start


def boot_clock_s() -> float:
    """Seconds since boot, suspension included: nothing sets this clock. Comparable within one boot."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def process_age_s(ticks: int) -> float:
    """Seconds since the start of a process of this boot, given its start time in clock ticks."""
    return max(0.0, boot_clock_s() - ticks / os.sysconf("SC_CLK_TCK"))


def count_oom_kills() -> int:
    """Number of processes that the kernel has killed for memory since boot; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError):
        lines = (_PROC / "vmstat").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
    return 0


def find_processes_by_variable(variable: str, prefix: str) -> dict[int, dict[str, str]]:
    """Processes of this user whose environment `variable` starts with `prefix`: process id -> `CCL_*` variables."""
    pids = (int(folder.name) for folder in _PROC.glob("[0-9]*"))
    known = ((pid, read_variables(pid)) for pid in pids)
    return {pid: found for pid, found in known if variable in found and found[variable].startswith(prefix)}


def read_variables(pid: int) -> dict[str, str]:
    """The `CCL_*` variables of a process of this user; empty if it has ended, or is a zombie, or another user's."""
    try:
        entries = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if entry.startswith(b"CCL_"))
    found = {name: value for name, _, value in pairs}
    return found if found and start_ticks(pid) is not None else {}


def measure_load(seconds: float = 1.0) -> float | None:
    """The CPU cores that all processes but this one use now, measured over some seconds; None if nothing says."""
    busy_s, own_s, since_s = _read_busy_s(), time.process_time(), time.monotonic()
    time.sleep(seconds)
    later_s = _read_busy_s()
    if busy_s is None or later_s is None:
        return None
    return max(0.0, later_s - busy_s - (time.process_time() - own_s)) / (time.monotonic() - since_s)


def _read_busy_s() -> float | None:
    """CPU seconds of all processes since the boot, as `proc_stat(5)` counts them; None without that file."""
    try:
        words = (_PROC / "stat").read_text().split(maxsplit=9)[1:9]
        user, nice, system, _, _, irq, softirq, steal = map(int, words)
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def terminate_processes(pids: Iterable[int], *, grace_s: float = 2.0, wait_s: float = 20.0) -> bool:
    """Send SIGTERM, then SIGKILL after `grace_s`; return whether all processes ended."""
    started = {pid: ticks for pid in pids if pid != os.getpid() and (ticks := start_ticks(pid)) is not None}
    _signal_all(started, signal.SIGTERM)
    if not _wait_gone(started, grace_s):
        _signal_all(started, signal.SIGKILL)
    return _wait_gone(started, wait_s)


def _signal_all(started: dict[int, int], number: signal.Signals) -> None:
    for pid, ticks in started.items():
        if start_ticks(pid) == ticks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def _wait_gone(started: dict[int, int], wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while any(start_ticks(pid) == ticks for pid, ticks in started.items()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
