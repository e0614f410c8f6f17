"""Energy and power counters of GPUs: NVML on NVIDIA devices, AMD SMI on AMD's (not tried on a real one).

NVML is called through ctypes: it comes with the driver, its Python package does not come with torch.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MIN_WINDOW_S = 0.5
"""Energy over a shorter window is not reported: counters advance in ticks of up to 0.1 s (our choice: a fifth)."""


@dataclass(frozen=True)
class EnergyCounter:
    """The counter of one device."""

    device: str
    """Unique over hosts and processes: several ranks may share a device, whose energy counts once."""
    read_j: Callable[[], float]
    """Returns joules since some fixed moment."""
    read_w: Callable[[], float]
    """Returns the power now in watts."""


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
