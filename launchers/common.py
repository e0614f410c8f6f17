"""What every run script of this folder shares: reading `config.json`, leaving `result.json`, and what a rank measures.

Only the standard library: a run script works wherever its framework does, with or without the engine beside it.
`docs/trial-contract.md` tells the contract.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FAILURE_FOLDER = "failures"
"""One JSON file a failed rank: rank, time, kind and the root exception."""

_KINDS = (
    (
        "out_of_memory",
        (
            "out of memory",
            "can't allocate memory",
            "cannot allocate memory",
            "not enough memory",
            "bad_alloc",
            "resource_exhausted",
            "memoryerror",
        ),
    ),
    (
        "communication",
        (
            "nccl",
            "gloo",
            "connection closed by peer",
            "connection reset by peer",
            "connection refused",
            "socket timeout",
            "broken pipe",
            "distnetworkerror",
            "diststoreerror",
        ),
    ),
)


class IllegalConfig(Exception):
    """This configuration can never run; the message says why."""


class MissingRequirement(Exception):
    """What this place lacks, whatever the configuration; the message says what to do. It costs no budget."""


@dataclass(frozen=True)
class Trial:
    """`config.json`, read."""

    folder: Path
    data: Mapping[str, Any]
    config: Mapping[str, Any] = field(repr=False)

    @property
    def trace_folder(self) -> Path:
        path = self.folder / "trace"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def degree(self, knob: str) -> int:
        """A parallel degree: 1 where the space has no such knob."""
        return int(self.config.get(knob, 1))

    @property
    def micro_batch_size(self) -> int:
        """Sequences per micro-batch and data-parallel rank: what the accumulation leaves, where no knob says it."""
        shared = self.degree("dp") * int(self.data["gradient_accumulation"])
        return int(self.config.get("micro_batch_size", int(self.data["global_batch_size"]) // shared))


def read_trial() -> Trial:
    """The trial that the environment names; exits with 2 and one line where it names none."""
    path = os.environ.get("CCL_CONFIG")
    if not path or not os.environ.get("CCL_TRIAL_DIR"):
        print("this run script is started by a launcher: CCL_CONFIG and CCL_TRIAL_DIR must be set", file=sys.stderr)
        raise SystemExit(2)
    with open(path, encoding="utf-8") as file:
        data = json.load(file)
    return Trial(Path(os.environ["CCL_TRIAL_DIR"]), data, data["config"])


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write by atomic rename, synced: the file is either absent or whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    with open(partial, "w", encoding="utf-8") as file:
        json.dump(data, file, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def write_result(trial: Trial, **fields: Any) -> None:
    """`result.json` of a trial that ran to its end."""
    write_json(trial.folder / "result.json", {"schema_version": 1, "status": "ok", **fields})


def write_failed_result(trial: Trial, *, kind: str, message: str) -> None:
    """`result.json` of a trial that failed, where one process knows of the whole job."""
    failure = {"stage": "run", "kind": kind, "message": message}
    write_json(trial.folder / "result.json", {"schema_version": 1, "status": "failed", "failure": failure})


def classify_failure(text: str) -> str:
    """Failure kind that an exception's text tells: out of memory, communication, or else crashed."""
    lowered = text.lower()
    for kind, marks in _KINDS:
        if any(mark in lowered for mark in marks):
            return kind
    return "crashed"


def report_failure(trial: Trial, rank: int, error: BaseException) -> None:
    """Leave this rank's root exception in `failures/`; the first by time is the trial's."""
    text = f"{type(error).__name__}: {error}".strip()
    told = ((IllegalConfig, "illegal_config"), (MissingRequirement, "launcher"), (MemoryError, "out_of_memory"))
    kind = next((kind for family, kind in told if isinstance(error, family)), None) or classify_failure(text)
    traceback.print_exception(error)
    record = {"rank": rank, "time_ns": time.time_ns(), "kind": kind, "message": text[:4000]}
    with contextlib.suppress(OSError):
        write_json(trial.folder / FAILURE_FOLDER / f"rank-{rank:05d}.json", record)


@contextlib.contextmanager
def reporting_failures(trial: Trial, rank: int) -> Iterator[None]:
    """Whatever ends the block early is reported and ends the process with 1, without the wait of a tidy shutdown."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        report_failure(trial, rank, error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def host_name() -> str:
    return socket.gethostname()


def device_name() -> str:
    """The processor's model name."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine() or "cpu"


def package_versions(*names: str) -> dict[str, str]:
    """Package -> version of those that are installed, and Python's own."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def status_bytes(key: str) -> int:
    """A size from `/proc/self/status` (`VmRSS`, `VmHWM`, `VmData`) in bytes; 0 where there is none."""
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="utf-8") as file:
        for line in file:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    return 0


class PeakMemory:
    """Peak resident memory of this process above where it stood when this was made: what model and training take."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
            file.write("5")
        self.baseline_bytes = status_bytes("VmRSS")

    def peak_bytes(self) -> int:
        peak = status_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return max(0, peak - self.baseline_bytes)


def limit_memory() -> None:
    """Let this process's data grow by `CCL_CPU_MEMORY_GIB` from here and no more: a device with so much memory."""
    budget = os.environ.get("CCL_CPU_MEMORY_GIB")
    if budget:
        limit = status_bytes("VmData") + int(float(budget) * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


@dataclass(frozen=True)
class CpuClock:
    """Busy seconds of the whole host and of this process, at one moment."""

    wall_s: float
    host_busy_s: float | None
    own_s: float

    @staticmethod
    def read() -> CpuClock:
        times = os.times()
        own = times.user + times.system + times.children_user + times.children_system
        return CpuClock(time.monotonic(), _host_busy_s(), own)


def _host_busy_s() -> float | None:
    try:
        with open("/proc/stat", encoding="utf-8") as file:
            ticks = [int(word) for word in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = (*ticks, *[0] * 8)[:8]
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def foreign_cores(start: CpuClock, end: CpuClock, own_s: float) -> float | None:
    """Cores that others kept busy between two readings, where this job's processes on the host took `own_s`."""
    if start.host_busy_s is None or end.host_busy_s is None or end.wall_s <= start.wall_s:
        return None
    return round(max(0.0, end.host_busy_s - start.host_busy_s - own_s) / (end.wall_s - start.wall_s), 3)
