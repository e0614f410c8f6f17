"""`device probe`: measurements of this machine, and the entry that they give."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from cclsearch.card.hardware import find_accelerator
from cclsearch.checks.probe import probe_device


def test_a_probed_device_is_an_accelerator_of_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    found = probe_device(with_collectives=False, budget_s=0.003)
    assert found.best_rate("fp32") > 1e8
    assert found.copy_bytes_per_s > 1e7
    assert found.launch_us > 0
    assert found.all_reduce_gbps is None
    (tmp_path / "hardware.yaml").write_text(yaml.safe_dump(found.as_entry("my-card")))
    (tmp_path / "launchers").mkdir()
    monkeypatch.chdir(tmp_path)
    chip = find_accelerator("my-card")
    assert chip.nominal
    assert chip.peak_flops["fp32"] == pytest.approx(found.best_rate("fp32"), rel=1e-3)


def test_a_name_that_hardware_yaml_cannot_have_is_refused(cli) -> None:
    assert "--name must be" in cli.err(["device", "probe", "--name", "My Card: 1"])
