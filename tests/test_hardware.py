"""Accelerators are found by each of their names, and by no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from cclsearch.card.hardware import find_accelerator, load_accelerators, match_accelerator
from cclsearch.core.errors import UserError

SIXTEEN_BIT = {"v100": "fp16"}


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("h100", "h100"),
        ("nvidia_h100", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("a100-40", "a100-40"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("AMD Instinct MI300X", "mi300x"),
        ("TPU v4", "tpu-v4"),
        ("TPU v5 lite", "tpu-v5e"),
        ("TPU v5e", "tpu-v5e"),
        ("TPU v5p", "tpu-v5p"),
        ("TPU v6 lite", "tpu-v6e"),
        ("tpu_v6e", "tpu-v6e"),
        ("cpu", "cpu"),
    ],
)
def test_device_names_resolve_to_their_accelerator(name: str, key: str) -> None:
    assert find_accelerator(name).name == key


@pytest.mark.parametrize(
    "name",
    ["gh100x", "h100x", "h10", "NVIDIA H100 PCIe", "NVIDIA A100-PG506-230", "GH200 480GB", "v6", "", "gpu", "NVIDIA"],
)
def test_a_name_that_only_resembles_a_known_one_is_unknown(name: str) -> None:
    assert match_accelerator(name) is None
    with pytest.raises(UserError, match="there is no accelerator"):
        find_accelerator(name)


def test_memory_decides_between_variants_and_is_required() -> None:
    assert find_accelerator("nvidia_a100", 40).name == "a100-40"
    assert find_accelerator("nvidia_a100", 79.2).name == "a100-80"
    assert match_accelerator("nvidia_a100") is None
    with pytest.raises(UserError, match="may be a100-40 and a100-80"):
        find_accelerator("nvidia_a100")


@pytest.mark.parametrize(("memory_gib", "key"), [(39.4, "a100-40"), (79.2, "a100-80")])
def test_the_number_of_a_board_is_decided_by_its_memory(memory_gib: float, key: str) -> None:
    assert find_accelerator("NVIDIA A100-PG509-200", memory_gib).name == key


def test_more_memory_than_the_chip_has_is_no_match() -> None:
    with pytest.raises(UserError, match="not 141 GiB"):
        find_accelerator("h100", 141)


@pytest.mark.parametrize("key", sorted(load_accelerators()))
def test_every_entry_is_complete_and_plausible(key: str) -> None:
    chip = load_accelerators()[key]
    assert chip.source
    assert chip.scale_up_gbps > chip.scale_out_gbps
    assert chip.peak_flops_of(SIXTEEN_BIT.get(key, "bf16")) is not None
    assert chip.peak_flops_of("bfloat16") == chip.peak_flops.get("bf16")
    assert bool(chip.slices) == (chip.kind == "tpu")
    assert len({len(shape) for shape in chip.slices}) <= 1
    assert chip.nominal == (key == "cpu")


def test_published_numbers_are_kept() -> None:
    h100, a100 = find_accelerator("h100"), find_accelerator("a100-40")
    assert (h100.peak_flops["bf16"], h100.memory_gib, h100.hbm_bytes_per_s) == (989.4e12, 80, 3.35e12)
    assert (a100.peak_flops["bf16"], a100.memory_bytes, a100.scale_up_gbps) == (312e12, 40 * 2**30, 2400)
    v5e = find_accelerator("tpu-v5e")
    assert (v5e.peak_flops["bf16"], v5e.scale_up_gbps, v5e.scale_out_gbps) == (197e12, 1600, 25)


OWN = """accelerators:
  mychip:
    {kind: gpu, aliases: [my_chip], memory_gib: 24, peak_flops: {bf16: 1.0e+14}, memory_gb_per_s: 1000,
     scale_up_gbps: 64, scale_out_gbps: 10, scale_up_latency_us: 3, scale_out_latency_us: 9, source: mine}
"""


def test_a_project_may_add_an_accelerator(project: Path) -> None:
    assert match_accelerator("My Chip") is None
    (project / "hardware.yaml").write_text(OWN)
    assert find_accelerator("My Chip").name == "mychip"
    assert find_accelerator("h100").name == "h100"


def test_an_invalid_field_of_an_added_accelerator_is_named(project: Path) -> None:
    (project / "hardware.yaml").write_text(OWN.replace("memory_gib: 24", "memory_gib: -1"))
    with pytest.raises(UserError, match=r"hardware\.yaml: accelerators\.mychip: memory_gib"):
        find_accelerator("h100")
