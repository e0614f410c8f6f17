"""Energy counters: NVML of NVIDIA GPUs, AMD SMI of AMD's (not tried on a real one), RAPL of processors (tried on a
recorded tree of files).

NVML is called through ctypes: it comes with the driver, its Python package does not come with torch. RAPL is read from
Linux's powercap files (Documentation/power/powercap/powercap.rst): whole packages, with what other processes use.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POWERCAP = Path(os.environ.get("CCL_POWERCAP", "/sys/class/powercap"))
"""Where Linux shows the counters of processors; another folder for tests."""
MIN_WINDOW_S = 0.5
"""Energy over a shorter window is not reported: counters advance in ticks of up to 0.1 s (our choice: a fifth)."""


@dataclass(frozen=True)
class EnergyCounter:
    """The counter of one device."""

    device: str
    """Unique over hosts and processes: several ranks may share a device, whose energy counts once."""
    read_j: Callable[[], float]
    """Returns joules since some fixed moment."""
    read_w: Callable[[], float] | None = None
    """Returns the power now in watts; None if only energy is counted."""


def open_cpu_counter(folder: Path = POWERCAP, host: str = "") -> EnergyCounter | None:
    """Return the counter of this host's processors, their memory included where it is counted apart; None without one.

    Since Linux 5.10 only root may read it, unless the administrator allows it.
    """
    with contextlib.suppress(OSError, ValueError):
        names = {zone: (zone / "name").read_text().strip() for zone in sorted(folder.glob("intel-rapl:*"))}
        counted = ("package-", "dram")  # `core` and `uncore` are parts of a package, `psys` contains it
        zones = [_Zone.open(zone) for zone, name in names.items() if name.startswith(counted)]
        if zones:
            return EnergyCounter(f"{host} RAPL", lambda: sum(zone.read_j() for zone in zones))
    return None


@dataclass
class _Zone:
    """One domain of RAPL, whose counter starts again at 0 after `range_uj`."""

    path: Path
    range_uj: int
    last_uj: int
    turns: int = 0

    @classmethod
    def open(cls, folder: Path) -> _Zone:
        """Return the zone; OSError or ValueError if it cannot be read."""
        path = folder / "energy_uj"
        return cls(path, int((folder / "max_energy_range_uj").read_text()), int(path.read_text()))

    def read_j(self) -> float:
        now_uj = int(self.path.read_text())
        self.turns += now_uj < self.last_uj
        self.last_uj = now_uj
        return (self.turns * self.range_uj + now_uj) / 1e6


def open_counter() -> EnergyCounter | None:
    """Return the counter of torch's current GPU; None if there is no GPU or its counter cannot be read."""
    import torch

    if not torch.cuda.is_available():
        return None
    with contextlib.suppress(Exception):  # no driver library, no permission, a slice of a device: no counter
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return _open_amd(properties) if torch.version.hip else _open_nvidia(str(properties.uuid))
    return None


def read_energy(counter: EnergyCounter | None) -> float | None:
    """Return the counter's joules; None if there is none or it cannot be read now."""
    with contextlib.suppress(Exception):
        return counter.read_j() if counter is not None else None
    return None


def find_used_energy(counter: EnergyCounter | None, start_j: float | None) -> tuple[str, float | None]:
    """Return the device, and the joules since `start_j`; None if unknown."""
    now_j = read_energy(counter)
    if counter is None or start_j is None or now_j is None:
        return "", None
    return counter.device, now_j - start_j


def energy_per_step(used: Mapping[str, float | None], window_s: float, num_steps: int) -> float | None:
    """Return joules per step of all devices together; None if one is unknown, stood still or was reset, or if the
    window is too short.

    `used` has each device's joules over the window: a device that several ranks share is in it once.
    """
    known = [joules for joules in used.values() if joules is not None and joules > 0]
    if window_s < MIN_WINDOW_S or not known or len(known) < len(used):
        return None
    return sum(known) / num_steps


def _open_nvidia(uuid: str) -> EnergyCounter:
    nvml = ctypes.CDLL("libnvidia-ml.so.1")

    def call(name: str, *arguments: Any) -> None:
        if code := getattr(nvml, name)(*arguments):
            raise OSError(f"{name} returned {code}")

    uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    handle = ctypes.c_void_p()
    call("nvmlInit_v2")
    call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))

    def read_j() -> float:
        millijoules = ctypes.c_ulonglong()
        call("nvmlDeviceGetTotalEnergyConsumption", handle, ctypes.byref(millijoules))
        return millijoules.value / 1e3

    def read_w() -> float:
        milliwatts = ctypes.c_uint()
        call("nvmlDeviceGetPowerUsage", handle, ctypes.byref(milliwatts))
        return milliwatts.value / 1e3

    read_j()
    return EnergyCounter(uuid, read_j, read_w)


def _open_amd(properties: Any) -> EnergyCounter:
    import amdsmi

    amdsmi.amdsmi_init()
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    handle = amdsmi.amdsmi_get_processor_handle_from_bdf(address)

    def read_j() -> float:
        count = amdsmi.amdsmi_get_energy_count(handle)
        microjoules = count.get("energy_accumulator", count.get("power"))  # named `power` before ROCm 6.4
        return float(microjoules * count["counter_resolution"] / 1e6)

    def read_w() -> float:
        power = amdsmi.amdsmi_get_power_info(handle)  # which of its fields are numbers depends on device and version
        fields = ("socket_power", "current_socket_power", "average_socket_power")
        return float(next(power[name] for name in fields if isinstance(power.get(name), int | float)))

    read_j()
    return EnergyCounter(f"{address} {amdsmi.amdsmi_get_gpu_device_uuid(handle)}", read_j, read_w)
