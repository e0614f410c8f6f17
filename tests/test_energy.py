"""Energy counters of run scripts, with a simulated driver: which device, which units, and when none is given."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from trials import LAUNCHERS

torch = pytest.importorskip("torch")


@pytest.fixture
def energy(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(LAUNCHERS))
    import energy

    return energy


@pytest.fixture
def use_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def use(*, hip: str | None = None, **properties: Any) -> None:
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**properties))

    return use


class FakeNvml:
    """A driver with one device of 250 W that has used 12.5 J so far."""

    def __init__(self, *, energy_code: int = 0) -> None:
        self.energy_code, self.asked = energy_code, b""

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        self.asked, handle._obj.value = uuid, 7
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, out: Any) -> int:
        out._obj.value = 12_500
        return self.energy_code

    def nvmlDeviceGetPowerUsage(self, handle: Any, out: Any) -> int:
        out._obj.value = 250_000
        return 0


def test_nvidia_counter_is_that_of_the_device_of_torch(energy: Any, use_gpu: Any, monkeypatch: Any) -> None:
    driver = FakeNvml()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    use_gpu(uuid="0a1b2c3d-0000-0000-0000-000000000001")
    counter = energy.open_counter()
    assert counter.device == "GPU-0a1b2c3d-0000-0000-0000-000000000001"
    assert driver.asked == counter.device.encode()
    assert (counter.read_j(), counter.read_w()) == (12.5, 250.0)
    driver.energy_code = 15  # the device is lost: a reading that fails is no energy, not a failed trial
    assert energy.read_energy(counter) is None


def test_a_device_whose_counter_cannot_be_read_has_none(energy: Any, use_gpu: Any, monkeypatch: Any) -> None:
    use_gpu(uuid="MIG-5")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeNvml(energy_code=3))
    assert energy.open_counter() is None
    monkeypatch.setattr(ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError("no such library")))
    assert energy.open_counter() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert energy.open_counter() is None
    assert energy.read_energy(None) is None


def test_amd_counter_multiplies_ticks_by_their_size(energy: Any, use_gpu: Any, monkeypatch: Any) -> None:
    asked = []
    amdsmi = SimpleNamespace(
        amdsmi_init=lambda: None,
        amdsmi_get_processor_handle_from_bdf=lambda address: asked.append(address) or "handle",
        amdsmi_get_energy_count=lambda handle: {"energy_accumulator": 2_000_000, "counter_resolution": 15.3},
        amdsmi_get_power_info=lambda handle: {"average_socket_power": "N/A", "current_socket_power": 612},
        amdsmi_get_gpu_device_uuid=lambda handle: "u",
    )
    monkeypatch.setitem(sys.modules, "amdsmi", amdsmi)
    use_gpu(hip="6.4", pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    counter = energy.open_counter()
    assert asked == ["0000:c1:00.0"]
    assert counter.read_j() == pytest.approx(30.6)
    assert counter.read_w() == 612.0


def test_energy_of_a_step_counts_each_device_once(energy: Any) -> None:
    assert energy.energy_per_step({"host GPU-a": 100.0, "host GPU-b": 60.0}, 2.0, 4) == 40.0
    assert energy.energy_per_step({"host GPU-a": 100.0, "": None}, 2.0, 4) is None, "one device is unknown"
    assert energy.energy_per_step({"host GPU-a": 100.0}, energy.MIN_WINDOW_S / 2, 4) is None, "a tick is too much of it"
    assert energy.energy_per_step({}, 2.0, 4) is None
    assert energy.energy_per_step({"host GPU-a": 100.0, "host GPU-b": 0.0}, 2.0, 4) is None, "a counter stood still"
    assert energy.energy_per_step({"host GPU-a": -5.0}, 2.0, 4) is None, "a counter was reset"
