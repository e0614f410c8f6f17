"""Energy counters of run scripts, with a simulated driver: which device, which units, and when none is given."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from packages import needs
from trials import LAUNCHERS, make_input, run_script

pytestmark = needs("torch")


@pytest.fixture
def energy(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(LAUNCHERS))
    import energy

    return energy


@pytest.fixture
def use_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    import torch

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


def test_nvidia_counter_is_that_of_the_device_of_torch(energy, use_gpu, monkeypatch):
    driver = FakeNvml()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    use_gpu(uuid="0a1b2c3d-0000-0000-0000-000000000001")
    counter = energy.open_counter()
    assert counter.device == "GPU-0a1b2c3d-0000-0000-0000-000000000001"
    assert driver.asked == counter.device.encode()
    assert (counter.read_j(), counter.read_w()) == (12.5, 250.0)
    driver.energy_code = 15  # the device is lost: a reading that fails is no energy, not a failed trial
    assert energy.read_energy(counter) is None


def test_a_device_whose_counter_cannot_be_read_has_none(energy, use_gpu, monkeypatch):
    use_gpu(uuid="MIG-5")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeNvml(energy_code=3))
    assert energy.open_counter() is None
    monkeypatch.setattr(ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError("no such library")))
    assert energy.open_counter() is None
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert energy.open_counter() is None
    assert energy.read_energy(None) is None


def test_amd_counter_multiplies_ticks_by_their_size(energy, use_gpu, monkeypatch):
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


def test_energy_of_a_step_counts_each_device_once(energy):
    assert energy.energy_per_step({"host GPU-a": 100.0, "host GPU-b": 60.0}, 2.0, 4) == 40.0
    assert energy.energy_per_step({"host GPU-a": 100.0, "": None}, 2.0, 4) is None, "one device is unknown"
    assert energy.energy_per_step({"host GPU-a": 100.0}, energy.MIN_WINDOW_S / 2, 4) is None, "a tick is too much of it"
    assert energy.energy_per_step({}, 2.0, 4) is None
    assert energy.energy_per_step({"host GPU-a": 100.0, "host GPU-b": 0.0}, 2.0, 4) is None, "a counter stood still"
    assert energy.energy_per_step({"host GPU-a": -5.0}, 2.0, 4) is None, "a counter was reset"


@pytest.fixture
def powercap(tmp_path: Path) -> Path:
    """A tree of files as Linux has it on a host with two processors (values of a real one, shortened)."""
    zones = {
        "intel-rapl:0": ("package-0", 262_143_328_850, 262_143_000_000),
        "intel-rapl:0:0": ("dram", 65_712_999_613, 1_000_000),
        "intel-rapl:0:1": ("core", 262_143_328_850, 5_000_000),
        "intel-rapl:1": ("package-1", 262_143_328_850, 40_000_000),
        "intel-rapl:2": ("psys", 262_143_328_850, 900_000_000),
        "intel-rapl-mmio:0": ("package-0", 262_143_328_850, 262_143_000_000),
    }
    for zone, (name, range_uj, energy_uj) in zones.items():
        folder = tmp_path / zone
        folder.mkdir()
        for file, value in (("name", name), ("max_energy_range_uj", range_uj), ("energy_uj", energy_uj)):
            (folder / file).write_text(f"{value}\n")
    return tmp_path


@contextlib.contextmanager
def counting(powercap: Path) -> Iterator[None]:
    """A thread counts 20 W into the files."""
    ticking, start_s = threading.Event(), time.monotonic()

    def tick() -> None:
        path = powercap / "intel-rapl:1" / "energy_uj"
        while not ticking.wait(0.005):
            partial = path.with_name("partial")
            partial.write_text(str(int((time.monotonic() - start_s) * 20e6)))
            partial.rename(path)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        yield
    finally:
        ticking.set()
        thread.join()


def test_processors_count_packages_and_memory_once_and_through_the_end_of_the_counter(energy, powercap):
    counter = energy.open_cpu_counter(powercap, "n1")
    start_j = counter.read_j()
    (powercap / "intel-rapl:0" / "energy_uj").write_text("671150\n")  # 328,850 uJ to its end, and on from 0: 1 J
    (powercap / "intel-rapl:0:0" / "energy_uj").write_text("3000000\n")
    (powercap / "intel-rapl:1" / "energy_uj").write_text("44000000\n")
    (powercap / "intel-rapl:0:1" / "energy_uj").write_text("99000000\n")
    (powercap / "intel-rapl:2" / "energy_uj").write_text("999000000\n")
    assert energy.find_used_energy(counter, start_j) == ("n1 RAPL", pytest.approx(1.0 + 2.0 + 4.0))


def test_a_host_whose_counters_cannot_be_read_reports_no_energy(energy, powercap):
    assert energy.open_cpu_counter(powercap / "none") is None
    (powercap / "intel-rapl:1" / "energy_uj").unlink()  # as for a user who is not root
    assert energy.open_cpu_counter(powercap) is None, "a part of the energy is not the energy"
    assert energy.find_used_energy(None, None) == ("", None)


def test_a_counter_that_vanishes_during_a_trial_gives_no_energy(energy, powercap):
    counter = energy.open_cpu_counter(powercap)
    start_j = counter.read_j()
    (powercap / "intel-rapl:1" / "energy_uj").write_text("")
    assert energy.find_used_energy(counter, start_j) == ("", None)


@pytest.mark.parametrize("script", ["cpu.py", "jax_cpu.py", "hf_trainer.py"])
def test_run_scripts_report_the_energy_of_processors(tmp_path, powercap, script):
    """A process counts 20 W into the files while the script runs; energy per step is then 20 W x the step time."""
    pytest.importorskip({"cpu.py": "torch", "jax_cpu.py": "jax", "hf_trainer.py": "accelerate"}[script])
    payload = make_input({"micro_batch_size": 1}, global_batch=32, seq_len=128)
    payload = payload.model_copy(update={"accelerator": "cpu", "timed_steps": 5})
    with counting(powercap):
        result = run_script(tmp_path / "job", payload, script=script, environment={"CCL_POWERCAP": str(powercap)})
    if result.timed_window_s is not None and result.timed_window_s < 0.5:
        assert result.energy_j is None, "too short to measure"
        return
    assert result.energy_j == pytest.approx(20.0 * float(np.mean(result.step_times_s)), rel=0.2)
