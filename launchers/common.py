"""Shared by the run scripts of this folder: read `config.json`, write `result.json`, measure memory and CPU use.

Standard library only: a run script works wherever its framework does, with or without the engine installed.
`docs/trial-contract.md` describes the contract.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import platform
import resource
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

_read_clock = time.clock_gettime  # bound now: replacing a function of `time` later does not change it

FAILURE_FOLDER = "failures"
"""One JSON file per failed rank: rank, time, kind and the root exception."""

DEVICES = "CCL_RANK_DEVICES"
"""Device of each rank of a node, if the trial's `places` put its ranks on other devices than those of their number."""
DEVICES_SET = "CCL_RANK_DEVICES_SET"
"""Set once the devices are in that order, so that processes that a rank starts do not change it again."""
SHOW_LAUNCH = "--show-launch"
"""Given this option, a run script prints how its framework runs the configuration without it, and exits."""

# Adam's first steps move each weight by about the rate, whatever its gradient. At one rate for all widths, losses of
# wide models that differ by rounding drift apart: 0.85e9 parameters, bf16, an H200, compiled or not: 0.9 % in 8 steps.
LEARNING_RATE, RATE_WIDTH = 1e-3, 256
"""Adam's rate up to this hidden size; wider models' falls in proportion (Yang et al. 2022, muP, table 8)."""


class IllegalConfig(Exception):
    """This configuration can never run; the message says why."""


class MissingRequirement(Exception):
    """Something is missing on this machine for every configuration; the message says what to do. Costs no budget."""


class EndedEarly(SystemExit):
    """The result is written, and the framework's loop, which would run further steps, is left: `reporting_failures`
    ends with it, so that the rank returns as after the last step."""


@dataclass(frozen=True)
class Trial:
    """The parsed `config.json`, and the trial's folder."""

    folder: Path
    data: Mapping[str, Any]
    config: Mapping[str, Any] = field(repr=False)

    @property
    def trace_folder(self) -> Path:
        path = self.folder / "trace"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def degree(self, knob: str) -> int:
        """Return a parallel degree; 1 if the search space has no such knob."""
        return int(self.config.get(knob, 1))

    @property
    def mark(self) -> str:
        """Annotation that the profiled steps contain in every rank's trace: it shows whose trace it is."""
        return f"ccl-search::{self.data.get('nonce', '')}"

    @property
    def micro_batch_size(self) -> int:
        """Sequences per micro-batch and data-parallel rank; without such a knob, derived from the accumulation."""
        shared = self.degree("dp") * int(self.data["gradient_accumulation"])
        return int(self.config.get("micro_batch_size", int(self.data["global_batch_size"]) // shared))

    def require_whole_batch(self) -> None:
        """Raise IllegalConfig unless the data-parallel ranks train the global batch in one step."""
        dp, accumulation = self.degree("dp"), int(self.data["gradient_accumulation"])
        trained = dp * self.micro_batch_size * accumulation
        if trained != self.data["global_batch_size"]:
            raise IllegalConfig(
                f"dp {dp} x micro-batch {self.micro_batch_size} x accumulation {accumulation} must be the global batch"
                f" of {self.data['global_batch_size']}, but is {trained}"
            )

    def require_data_parallel(self) -> None:
        """Raise IllegalConfig unless every rank is a data-parallel one and they train the global batch in one step."""
        self.require_whole_batch()
        dp = self.degree("dp")
        if dp != self.data["num_ranks"]:
            raise IllegalConfig(f"dp must be the number of ranks, {self.data['num_ranks']}, but it is {dp}")


def read_trial() -> Trial:
    """Return the trial that the environment names; exit with 2 and one line if it names none."""
    path = os.environ.get("CCL_CONFIG")
    if not path or not os.environ.get("CCL_TRIAL_DIR"):
        print("CCL_CONFIG and CCL_TRIAL_DIR must be set: a launcher starts this run script", file=sys.stderr)
        raise SystemExit(2)
    with open(path, encoding="utf-8") as file:
        data = json.load(file)
    return Trial(Path(os.environ["CCL_TRIAL_DIR"]), data, data["config"])


@dataclass(frozen=True)
class LaunchForm:
    """How to run one configuration with the framework alone, in the framework's own form."""

    title: str
    command: Sequence[str]
    checked: str
    """What checked the form: the framework's own parser, a list of its options, or nothing."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Name -> text of the files that the command reads from the current folder."""
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    """What to do before, and how a trial differs from the command, one sentence each."""


def print_launch(trial: Trial, show_launch: Callable[[Mapping[str, Any]], LaunchForm]) -> bool:
    """Print the form as one line of JSON if the command line asks for it; returns whether it did."""
    is_asked = SHOW_LAUNCH in sys.argv
    if is_asked:
        from power_caps import describe_by_hand

        form = show_launch(trial.data)
        by_hand = describe_by_hand(trial.config, str(trial.data.get("accelerator", "cpu")))
        form = replace(form, notes=[*by_hand, *form.notes])
        if devices := os.environ.get(DEVICES):
            form = replace(form, environment={**form.environment, _visible_variable(trial.data): devices})
        print(json.dumps(asdict(form)))
    return is_asked


def run_rank(
    train: Callable[[Trial], None], show_launch: Callable[[Mapping[str, Any]], LaunchForm] | None = None
) -> int:
    """Run this rank of the trial that the environment names, or print its launch; returns the exit code."""
    trial = read_trial()
    if show_launch is None or not print_launch(trial, show_launch):
        with reporting_failures(trial, int(os.environ.get("RANK", os.environ.get("CCL_PROCESS_ID", "0")))):
            train(trial)
    return 0


def _visible_variable(data: Mapping[str, Any]) -> str:
    """Return the variable that names the devices which a process sees: torch reads it for CUDA, or for ROCm."""
    return "HIP_VISIBLE_DEVICES" if str(data.get("accelerator", "")).startswith("mi") else "CUDA_VISIBLE_DEVICES"


def order_devices(data: Mapping[str, Any]) -> None:
    """Make the devices of this node visible in the order that the trial asks for, before a library opens them.

    Local rank k then has the device with position `CCL_RANK_DEVICES[k]` among those that were visible before.
    """
    asked = os.environ.get(DEVICES)
    if not asked or DEVICES_SET in os.environ:
        return
    order = [int(device) for device in asked.split(",")]
    variable = _visible_variable(data)
    visible = os.environ.get(variable)
    names = visible.split(",") if visible else list(map(str, range(max(order) + 1)))
    if max(order) >= len(names):
        raise IllegalConfig(
            f"device_order asks for {max(order) + 1} devices, but {variable} is {visible!r}: every rank must see all"
            " devices of its node (Slurm: --gpus-per-node or --gres, without --gpus-per-task and --gpu-bind)"
        )
    os.environ.update({variable: ",".join(names[device] for device in order), DEVICES_SET: "1"})
    print(f"{variable}={os.environ[variable]}", flush=True)


def find_packages_first() -> None:
    """Search this folder last for modules: some run scripts have the names of packages, such as `megatron`."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != here] + [str(here)]


def torchrun_words(data: Mapping[str, Any]) -> list[str]:
    """Return torchrun and its options for the ranks of one trial, placed as launchers place them.

    NODE_RANK and HEAD_NODE stand for the node's number from 0 and the name of node 0.
    """
    ranks, per_node = int(data["num_ranks"]), int(data["ranks_per_node"])
    if ranks <= per_node:
        return ["torchrun", "--standalone", f"--nproc-per-node={ranks}"]
    nodes = [f"--nnodes={-(-ranks // per_node)}", "--node-rank=NODE_RANK", f"--nproc-per-node={per_node}"]
    return ["torchrun", *nodes, "--master-addr=HEAD_NODE", "--master-port=29500"]


def torchrun_notes(data: Mapping[str, Any]) -> list[str]:
    """Return what to do on several nodes, one sentence each."""
    ranks, per_node = int(data["num_ranks"]), int(data["ranks_per_node"])
    if ranks <= per_node:
        return []
    notes = ["Run the command on every node: NODE_RANK is the node's number from 0, HEAD_NODE the name of node 0."]
    return notes + ([f"The last node has --nproc-per-node={ranks % per_node}."] if ranks % per_node else [])


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write the file by atomic rename, synced: it is either absent or complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    with open(partial, "w", encoding="utf-8") as file:
        json.dump(data, file, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def write_result(trial: Trial, **fields: Any) -> None:
    """Write `result.json` of a trial that completed, or with the status `pruned` of one that ended early."""
    write_json(trial.folder / "result.json", {"schema_version": 1, "status": "ok", **fields})


def say_phase(trial: Trial, rank: int, phase: str) -> None:
    """Say what the trial does (`starting`, `warm-up`, `timing`, `profiling`, `writing`), for people who watch it."""
    if rank == 0:
        with contextlib.suppress(OSError):
            partial = trial.folder / f".phase.{os.getpid()}"
            partial.write_text(phase, encoding="utf-8")
            os.replace(partial, trial.folder / "phase")


STEPS_BEFORE_STOP = 3
"""Timed steps after which a trial may end early."""


def learning_rate(arch: Mapping[str, Any]) -> float:
    """Return the constant rate of AdamW at which the card's model is trained."""
    return LEARNING_RATE * min(1.0, RATE_WIDTH / arch["hidden_size"])


def is_too_slow(trial: Trial, step_times_s: Sequence[float]) -> bool:
    """Return whether the trial ends now: it may, and each of its first timed steps, by the slowest rank, is too slow.

    `config.json` has the limit (`stop_above`). Ask once, after `STEPS_BEFORE_STOP` timed steps.
    """
    limit = trial.data.get("stop_above")
    return limit is not None and min(step_times_s) > float(limit)


WINDOW_WAIT_S = 120.0
"""Seconds that a script waits for a search to answer; one that was killed may be resumed meanwhile."""
_WINDOW_POLL_S = 0.005


def open_window(trial: Trial, number: int = 1) -> str:
    """Ask the search for the nonce of a timed window, in one process only; "" if the search does not answer.

    Call it last before the window, number 1 first: from the answer to `close_window` the search reads its own clock.
    """
    if not trial.data.get("opens_window"):
        return ""
    asked, answer = (trial.folder / f"window-{number}.{end}" for end in ("asked", "nonce"))
    asked.touch()
    end_s = time.monotonic() + WINDOW_WAIT_S
    while answer.name not in os.listdir(trial.folder):  # NFS caches the absence of one name, but not a list
        if time.monotonic() > end_s:
            asked.unlink(missing_ok=True)
            break
        time.sleep(_WINDOW_POLL_S)
    return answer.read_text(encoding="utf-8") if answer.exists() else ""


def close_window(trial: Trial, results: Iterable[object], number: int = 1) -> None:
    """Leave a digest of what was computed in the window, as soon as it is known: losses, or digests of answers."""
    if trial.data.get("opens_window"):
        digest = hashlib.sha256("\n".join(map(str, results)).encode()).hexdigest()
        partial = trial.folder / f".window-{number}.{os.getpid()}"
        partial.write_text(digest, encoding="utf-8")
        os.replace(partial, trial.folder / f"window-{number}.closed")


def use_nonce(trial: Trial, nonce: str) -> None:
    """Take the data of the steps from now on from where the nonce says; every rank calls it. "": as before."""
    if nonce:
        cast("dict[str, Any]", trial.data)["window_offset"] = int(nonce[:12], 16)


def number_step(data: Mapping[str, Any], step: int) -> int:
    """Return the number of a step's batch among all that the seed makes: the nonce of the timed window moves it."""
    return step + int(data.get("window_offset", 0))


def report_failure(trial: Trial, rank: int, error: BaseException) -> None:
    """Write this rank's root exception to `failures/`; the first by time counts as the trial's failure.

    The engine reads from the message of a `crashed` rank whether memory ran out or a peer was lost.
    """
    text = f"{type(error).__name__}: {error}".strip()
    kinds = ((IllegalConfig, "illegal_config"), (MissingRequirement, "launcher"), (MemoryError, "out_of_memory"))
    kind = next((kind for family, kind in kinds if isinstance(error, family)), "crashed")
    traceback.print_exception(error)
    record = {"rank": rank, "time_ns": time.time_ns(), "kind": kind, "message": text[:4000]}
    with contextlib.suppress(OSError):
        write_json(trial.folder / FAILURE_FOLDER / f"rank-{rank:05d}.json", record)


@contextlib.contextmanager
def reporting_failures(trial: Trial, rank: int) -> Iterator[None]:
    """Report any exception of the block and exit with 1 at once, without waiting for an orderly shutdown.

    `EndedEarly` only ends the block. During it the node's devices have the power limit and clock of the trial's knobs.
    """
    from power_caps import hold_power

    try:
        order_devices(trial.data)
        with hold_power(trial):
            yield
    except EndedEarly:
        return
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        report_failure(trial, rank, error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def number_sequences(global_batch: int, *, rank: int, ranks: int) -> Iterator[int]:
    """Yield the numbers of the sequences that one data-parallel rank trains, in order, without end.

    Step k trains the sequences k x `global_batch` to (k + 1) x `global_batch` - 1, with any number of ranks.
    """
    share = global_batch // ranks
    for step in itertools.count():
        first = step * global_batch + rank * share
        yield from range(first, first + share)


def window_clock_s() -> float:
    """Return the kernel's monotonic clock in seconds, for `timed_window_s`: step times are read from another clock."""
    return _read_clock(time.CLOCK_MONOTONIC)


def host_name() -> str:
    return socket.gethostname()


def node_name() -> str:
    """The node as its scheduler names it, and host files must; else the host's name."""
    named = os.environ.get("CCL_NODE_NAME") or os.environ.get("SLURMD_NODENAME")
    return named or host_name()


def device_name() -> str:
    """Return the processor's model name."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine() or "cpu"


def package_versions(*names: str) -> dict[str, str]:
    """Return package -> version of the installed ones among these packages, and Python's version."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def status_bytes(key: str, process: int | str = "self") -> int:
    """Return a size from `/proc/PROCESS/status` (`VmRSS`, `VmHWM`, `VmData`) in bytes; 0 if it is missing."""
    with contextlib.suppress(OSError), open(f"/proc/{process}/status", encoding="utf-8") as file:
        for line in file:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    return 0


class PeakMemory:
    """Peak resident memory of this process above its value at construction: the memory of model and training."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
            file.write("5")
        self.baseline_bytes = status_bytes("VmRSS")

    def peak_bytes(self) -> int:
        peak = status_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return max(0, peak - self.baseline_bytes)


def limit_memory() -> None:
    """Limit the further growth of this process's data to `CCL_CPU_MEMORY_GIB`, like a device with that much memory."""
    budget = os.environ.get("CCL_CPU_MEMORY_GIB")
    if budget:
        limit = status_bytes("VmData") + int(float(budget) * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


@dataclass(frozen=True)
class CpuClock:
    """Busy CPU seconds of the whole host and of this process at one moment."""

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
    """Return the CPU cores that other processes used between two readings; this job's processes used `own_s`."""
    if start.host_busy_s is None or end.host_busy_s is None or end.wall_s <= start.wall_s:
        return None
    return round(max(0.0, end.host_busy_s - start.host_busy_s - own_s) / (end.wall_s - start.wall_s), 3)
