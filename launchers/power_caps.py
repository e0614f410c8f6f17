"""Knobs `power_cap_w` and `gpu_clock_mhz`: set on this node's devices before a trial, restored whatever ends it.

The run script starts this file as a process of its own, the supervisor, which changes the devices and waits for the end
of its standard input: the kernel closes it however the script ends. A supervisor that is killed itself leaves a record,
from which the next trial restores first. NVIDIA GPUs by NVML, processor packages by RAPL's powercap files. Standard
library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import IllegalConfig, MissingRequirement, Trial

POWER_CAP, GPU_CLOCK = "power_cap_w", "gpu_clock_mhz"
KNOBS = (POWER_CAP, GPU_CLOCK)
UNCHANGED = "default"
"""Value of a knob that leaves the devices as they are."""
RECORDS = Path(os.environ.get("CCL_POWER_RECORDS", "/var/tmp/ccl-search-power"))
"""Folder of the records of one host; another for tests."""
LEFT = "left.json"
"""What a supervisor has changed, while it runs; what it left, if it was killed."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
RESTORE_S = 30.0
"""Seconds that restoring may take."""
NO_PERMISSION = 4
"""NVML_ERROR_NO_PERMISSION."""


def find_wanted(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the knobs of a configuration that change the devices."""
    return {knob: int(config[knob]) for knob in KNOBS if config.get(knob, UNCHANGED) != UNCHANGED}


def describe_by_hand(config: Mapping[str, Any], accelerator: str) -> list[str]:
    """Return how to set the same by hand, one sentence each."""
    wanted = find_wanted(config)
    if POWER_CAP in wanted and accelerator == "cpu":
        path = "/sys/class/powercap/intel-rapl:*/constraint_0_power_limit_uw"
        return [f"Before it, as root on each node: write {wanted[POWER_CAP] * 1_000_000} to {path}."]
    words = {POWER_CAP: "nvidia-smi -pl {}", GPU_CLOCK: "nvidia-smi -lgc {}"}
    return [f"Before it, as root on each node: {words[knob].format(value)}." for knob, value in wanted.items()]


@contextlib.contextmanager
def hold_power(trial: Trial) -> Iterator[None]:
    """Hold this node's devices at the trial's power limit and clock during the block, on one rank of the node.

    Without these knobs, only restore what a supervisor that was killed has left.
    """
    wanted = find_wanted(trial.config)
    if os.environ.get("LOCAL_RANK", "0") != "0" or not (wanted or (RECORDS / LEFT).is_file()):
        yield
        return
    order = {"wanted": wanted, "on_cpu": trial.data.get("accelerator", "cpu") == "cpu"}
    environment = {name: value for name, value in os.environ.items() if name != "CCL_JOB_NAME"}  # it outlives the job
    supervisor = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), json.dumps(order)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True,
    )  # fmt: skip
    assert supervisor.stdin is not None
    assert supervisor.stdout is not None
    said = json.loads(supervisor.stdout.readline() or '{"error": "the process that sets them ended"}')
    if "error" in said:
        supervisor.wait()
        raise (IllegalConfig if said.get("is_illegal") else MissingRequirement)(said["error"])
    print(f"power: {said['set']}", flush=True)
    try:
        yield
    finally:
        supervisor.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            supervisor.wait(RESTORE_S)
        if supervisor.returncode:
            print("power: not restored; the next trial with these knobs restores first", file=sys.stderr, flush=True)


# ---- the supervisor ------------------------------------------------------------------------------------------------


class Refused(Exception):
    """The devices cannot be set so; `is_illegal` if no device of this kind could."""

    def __init__(self, message: str, *, is_illegal: bool = False) -> None:
        super().__init__(message)
        self.is_illegal = is_illegal


@dataclass(frozen=True)
class Setting:
    """One value of one device."""

    name: str
    """Unique on this host."""
    before: int
    after: int
    write: Callable[[int], None]
    """Sets a value; `before` restores."""
    words: str
    """What is set, for people."""


def rapl_settings(watts: int, folder: Path) -> list[Setting]:
    """Return the long-term limit of each processor package (Documentation/power/powercap/powercap.rst)."""
    found = []
    for zone in sorted(folder.glob("intel-rapl:*")):
        if (zone / "name").read_text().strip().startswith("package-"):
            names = sorted(zone.glob("constraint_*_name"))
            number = next((p.name.split("_")[1] for p in names if p.read_text().strip() == "long_term"), None)
            if number is not None:
                found.append(_rapl_setting(zone, number, watts))
    if not found:
        raise Refused(f"{POWER_CAP}: no processor package has a power limit in {folder} (RAPL)")
    return found


def _rapl_setting(zone: Path, number: str, watts: int) -> Setting:
    path, most = zone / f"constraint_{number}_power_limit_uw", zone / f"constraint_{number}_max_power_uw"
    most_uw = int(most.read_text()) if most.is_file() else 0
    if 0 < most_uw < watts * 1_000_000:
        words = f"{POWER_CAP} {watts} is above the {most_uw / 1e6:g} W of {zone.name}"
        raise Refused(words, is_illegal=True)

    def write(microwatts: int) -> None:
        try:
            path.write_text(f"{microwatts}\n")
        except OSError as error:
            raise Refused(f"{POWER_CAP} cannot be set: {path}: {error.strerror}; root may set it") from None

    return Setting(str(zone), int(path.read_text()), watts * 1_000_000, write, f"{zone.name} {watts} W")


def nvidia_settings(wanted: Mapping[str, int]) -> list[Setting]:
    """Return the limits and clocks of the NVIDIA GPUs that this trial sees."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        raise Refused(f"{' and '.join(wanted)} need NVIDIA's driver library libnvidia-ml.so.1 on this node") from None

    def call(name: str, *arguments: Any) -> None:
        if code := getattr(nvml, name)(*arguments):
            why = "no permission; root may set it" if code == NO_PERMISSION else f"NVML error {code}"
            raise Refused(f"{' and '.join(wanted)} cannot be set: {name}: {why}")

    call("nvmlInit_v2")
    found = []
    for uuid, handle in _visible_gpus(call):
        if watts := wanted.get(POWER_CAP):
            found.append(_nvidia_limit(call, uuid, handle, watts))
        if megahertz := wanted.get(GPU_CLOCK):
            found.append(_nvidia_clock(call, uuid, handle, megahertz))
    if not found:
        raise Refused(f"{' and '.join(wanted)}: this trial sees no NVIDIA GPU")
    return found


def _visible_gpus(call: Callable[..., None]) -> list[tuple[str, ctypes.c_void_p]]:
    """Return UUID and handle of each GPU that CUDA_VISIBLE_DEVICES leaves."""
    count, gpus = ctypes.c_uint(), []
    call("nvmlDeviceGetCount_v2", ctypes.byref(count))
    for index in range(count.value):
        handle, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(96)
        call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        call("nvmlDeviceGetUUID", handle, uuid, ctypes.c_uint(96))
        gpus.append((uuid.value.decode(), handle))
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return gpus
    words = [word.strip() for word in named.split(",") if word.strip()]
    if any(word.startswith("MIG-") for word in words):
        raise Refused("a part of a GPU (MIG) has no power limit or clock of its own")
    by_name = {**{str(index): gpu for index, gpu in enumerate(gpus)}, **{gpu[0]: gpu for gpu in gpus}}
    return [by_name[word] for word in words if word in by_name]


def _nvidia_limit(call: Callable[..., None], uuid: str, handle: ctypes.c_void_p, watts: int) -> Setting:
    before, least, most = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    call("nvmlDeviceGetPowerManagementLimit", handle, ctypes.byref(before))
    call("nvmlDeviceGetPowerManagementLimitConstraints", handle, ctypes.byref(least), ctypes.byref(most))
    if not least.value <= watts * 1000 <= most.value:
        bounds = f"{least.value / 1e3:g} to {most.value / 1e3:g} W"
        raise Refused(f"{POWER_CAP} {watts} is outside the {bounds} of {uuid}", is_illegal=True)

    def write(milliwatts: int) -> None:
        call("nvmlDeviceSetPowerManagementLimit", handle, ctypes.c_uint(milliwatts))

    return Setting(f"{uuid} power", before.value, watts * 1000, write, f"{uuid} {watts} W")


def _nvidia_clock(call: Callable[..., None], uuid: str, handle: ctypes.c_void_p, megahertz: int) -> Setting:
    def write(value: int) -> None:
        if value:
            call("nvmlDeviceSetGpuLockedClocks", handle, ctypes.c_uint(value), ctypes.c_uint(value))
        else:  # NVML does not say which clocks were locked before: the driver's own choice is restored
            call("nvmlDeviceResetGpuLockedClocks", handle)

    return Setting(f"{uuid} clock", 0, megahertz, write, f"{uuid} {megahertz} MHz")


def find_settings(wanted: Mapping[str, int], *, on_cpu: bool) -> list[Setting]:
    """Return what is to be set on this node; raises Refused."""
    if not on_cpu:
        return nvidia_settings(wanted)
    if GPU_CLOCK in wanted:
        raise Refused(f"{GPU_CLOCK}: a processor is not a GPU", is_illegal=True)
    from energy import POWERCAP

    try:
        return rapl_settings(wanted[POWER_CAP], POWERCAP)
    except (OSError, ValueError) as error:
        raise Refused(f"{POWER_CAP} cannot be set: {error}") from None


def restore_left(record: Path) -> None:
    """Restore what a supervisor that was killed has left; raises Refused if that fails."""
    with contextlib.suppress(FileNotFoundError):
        left = json.loads(record.read_text())
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # it may have set devices that this trial does not see
        for setting in find_settings(left["wanted"], on_cpu=left["on_cpu"]):
            if setting.name in left["before"]:
                setting.write(left["before"][setting.name])
        record.unlink()


def supervise(order: Mapping[str, Any], say: Callable[..., None]) -> int:
    """Set the devices, wait until the trial has ended, restore; returns the exit code."""
    RECORDS.mkdir(parents=True, exist_ok=True)
    visible, record = os.environ.get("CUDA_VISIBLE_DEVICES"), RECORDS / LEFT
    with (RECORDS / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not order["wanted"]:  # what it left is its own
                say(set="")
                return 0
            raise Refused("another trial on this node holds its devices at a power limit or clock") from None
        restore_left(record)
        if not order["wanted"]:
            say(set="what an earlier trial had left is restored")
            return 0
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        settings = find_settings(order["wanted"], on_cpu=order["on_cpu"])
        before = {setting.name: setting.before for setting in settings}
        record.write_text(json.dumps({**order, "before": before}))
        try:
            for setting in settings:
                setting.write(setting.after)
            say(set=", ".join(setting.words for setting in settings))
            with contextlib.suppress(InterruptedError):
                sys.stdin.buffer.read()
        finally:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            failed = [setting for setting in settings if not _restore(setting)]
            if not failed:
                record.unlink(missing_ok=True)
        return 1 if failed else 0


def _restore(setting: Setting) -> bool:
    """Return whether the value from before the trial was set."""
    with contextlib.suppress(Refused):
        setting.write(setting.before)
        return True
    return False


def _interrupt(number: int, frame: Any) -> None:
    raise InterruptedError


def main() -> int:
    def say(**said: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # the script has ended meanwhile
            print(json.dumps(said), flush=True)

    for number in SIGNALS:
        signal.signal(number, _interrupt)
    try:
        return supervise(json.loads(sys.argv[1]), say)
    except (Refused, InterruptedError) as error:
        say(error=str(error) or "interrupted", is_illegal=getattr(error, "is_illegal", False))
        return 1
    except OSError as error:
        say(error=f"power limits and clocks cannot be recorded in {RECORDS}: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
