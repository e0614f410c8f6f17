"""Accelerators are found by each of their names, and by no other."""

from __future__ import annotations

import pytest
import yaml

from cclsearch.card.hardware import find_accelerator, find_usual, load_accelerators, match_accelerator
from cclsearch.card.load import load_card
from cclsearch.card.model import Hardware
from cclsearch.cli import main
from cclsearch.core.errors import UserError
from cclsearch.launch.profile import profile_from_mapping
from cclsearch.plan.hardware import resolve_hardware

SIXTEEN_BIT = {"v100": "fp16", "v100-pcie": "fp16", "t4": "fp16"}


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("nvidia_h100", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("AMD Instinct MI300X", "mi300x"),
        ("TPU v5 lite", "tpu-v5e"),
        ("tpu_v6e", "tpu-v6e"),
        ("TPUv6e-Trillium", "tpu-v6e"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("NVIDIA GH200 144G HBM3e", "gh200-144"),
        ("Intel Gaudi 2", "gaudi2"),
        ("HL-325L", "gaudi3"),
        ("AWS Trainium", "trainium1"),
    ],
)
def test_device_names_resolve_to_their_accelerator(name, key):
    assert find_accelerator(name).name == key


@pytest.mark.parametrize(
    "name",
    ["gh100x", "h100x", "h10", "NVIDIA H100 XYZ", "NVIDIA A100-PG506-230", "GB10X 480GB", "v6", "", "gpu", "NVIDIA"],
)
def test_a_name_that_only_resembles_a_known_one_is_unknown(name):
    assert match_accelerator(name) is None
    with pytest.raises(UserError, match="there is no accelerator"):
        find_accelerator(name)


def test_memory_decides_between_variants_and_is_required():
    assert find_accelerator("nvidia_a100", 40).name == "a100-40"
    assert find_accelerator("nvidia_a100", 79.2).name == "a100-80"
    assert match_accelerator("nvidia_a100") is None
    with pytest.raises(UserError, match="may be a100-40 and a100-80"):
        find_accelerator("nvidia_a100")


@pytest.mark.parametrize(
    ("name", "memory_gib", "key"),
    [
        ("NVIDIA A100-PG509-200", 39.4, "a100-40"),
        ("NVIDIA A100-PG509-200", 79.2, "a100-80"),
        ("NVIDIA GH200 480GB", 95.6, "gh200-96"),
        ("NVIDIA GH200 480GB", 143.0, "gh200-144"),
    ],
)
def test_neither_the_number_of_a_board_nor_the_memory_of_its_cpu_is_that_of_the_accelerator(name, memory_gib, key):
    assert find_accelerator(name, memory_gib).name == key
    with pytest.raises(UserError, match=r"may be (a100-40 and a100-80|gh200-96 and gh200-144)"):
        find_accelerator(name)


def test_more_memory_than_the_chip_has_is_no_match():
    with pytest.raises(UserError, match="not 141 GiB"):
        find_accelerator("h100", 141)


@pytest.mark.parametrize("key", sorted(load_accelerators()))
def test_every_entry_is_complete_and_plausible(key):
    chip = load_accelerators()[key]
    assert all(find_accelerator(alias, chip.memory_gib) == chip for alias in (key, *chip.aliases))
    assert chip.source
    assert chip.scale_up_gbps >= chip.scale_out_gbps
    assert list(chip.sizes_gib) == sorted({chip.memory_gib, *chip.variants_gib})
    for wide, narrow in (("bf16", "fp8"), ("fp8", "fp4"), ("fp32", "bf16")):
        assert chip.peak_flops.get(wide, 0) <= chip.peak_flops.get(narrow, 1e18)
    assert chip.peak_flops_of(SIXTEEN_BIT.get(key, "bf16")) is not None
    assert chip.peak_flops_of("bfloat16") == chip.peak_flops.get("bf16")
    assert bool(chip.slices) == (chip.kind == "tpu")
    assert len({len(shape) for shape in chip.slices}) <= 1
    assert chip.nominal == (key == "cpu")


def test_published_numbers_are_kept():
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


def test_a_project_may_add_an_accelerator_and_a_wrong_field_is_named(project):
    assert match_accelerator("My Chip") is None
    (project / "hardware.yaml").write_text(OWN)
    assert find_accelerator("My Chip").name == "mychip"
    assert find_accelerator("h100").name == "h100"
    (project / "hardware.yaml").write_text(OWN.replace("memory_gib: 24", "memory_gib: -1"))
    with pytest.raises(UserError, match=r"hardware\.yaml: accelerators\.mychip: memory_gib"):
        find_accelerator("h100")


def test_names_without_a_size_stand_for_the_smallest_that_is_sold():
    usual = find_usual("nvidia a100")
    assert usual.name == "a100-40"
    assert find_usual("wonder-9000") is None


def test_a_scale_up_domain_beyond_the_node_reaches_the_card():
    card = load_card("wl2", sets=("accelerator=GB200", "memory_gb=186", "total_count=144", "count_per_node=4"))
    assert (card.hardware.accelerators_per_node, card.hardware.domain) == (4, 72)
    assert load_card("wl2").hardware.domain == 4


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("bf16", "fp32"), ("fp16", "fp16"), ("fp8", "fp16"), ("fp32", "fp32"), ("tf32", "fp32"), ("mxfp8", "fp16")],
)
def test_a_precision_without_a_rate_is_computed_in_a_wider_one(precision, dtype):
    assert find_accelerator("v100").rate_for(precision)[0] == dtype
    assert find_accelerator("tpu-v4").rate_for("fp32")[0] == "bf16"
    assert find_accelerator("gb200").rate_for("nvfp4")[0] == "fp4"


@pytest.mark.parametrize("command", [["space"], ["predict"], ["run"]])
def test_an_unknown_accelerator_stops_every_command_and_lists_the_numbers_to_give(command, project, cli):
    unknown = [*command, "--workload", "wl1", "--set", "accelerator=h10o", "--overlay", "no-memory"]
    (project / "workloads").mkdir(exist_ok=True)
    (project / "workloads" / "no-memory.yaml").write_text("workload: {hardware: {xpu_spec: {memory_gb: N/A}}}\n")
    error = cli.err(unknown)
    assert error.count("\n") == 1
    assert "(did you mean 'h100'? `ccl-search accelerators` lists the known ones)" in error
    assert "--set peak_flops=N --set memory_gb_per_s=N --set memory_gb=N" in error


def test_an_accelerator_that_the_card_describes_is_predicted_from_its_numbers(project, cli):
    def predict(*sets: str) -> float:
        words = [word for setting in sets for word in ("--set", setting)]
        found = cli.json(["predict", "--workload", "wl1", "--top", "1", "--json", *words])
        return float(found["configurations"][0]["step_time_s"])

    own = ("accelerator=mine", "memory_gb=40", "memory_gb_per_s=1555")
    assert predict(*own, "peak_flops=312e12") == pytest.approx(predict(), rel=0.05)
    assert predict(*own, "peak_flops=31.2e12") > 3 * predict(*own, "peak_flops=312e12")
    (project / "no-links.yaml").write_text("workload: {hardware: {network_topo: {bandwidth_gbps: N/A}}}\n")
    words = [word for setting in (*own, "peak_flops=1e14") for word in ("--set", setting)]
    shown = cli.out(["space", "--workload", "wl1", "--overlay", "no-links.yaml", *words])
    assert "scale_up_gbps 2400, scale_out_gbps 200; source: a usual data-center GPU, because 'mine' is not" in shown


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("total_count=16", "scale_up_gbps 2400, scale_out_gbps 200; source: the catalogue of accelerators"),
        ("total_count=4", "scale_up_gbps 2400; source: the catalogue of accelerators"),
    ],
)
def test_links_that_a_card_does_not_state_are_inferred(setting, said, project, cli):
    (project / "no-links.yaml").write_text("workload: {hardware: {network_topo: {bandwidth_gbps: [N/A, ~]}}}\n")
    words = ["--workload", "wl1", "--overlay", "no-links.yaml", "--set", setting]
    assert f"inferred: {said}" in cli.out(["predict", *words, "--top", "1"])


@pytest.mark.parametrize("rates", ["-1", "fast", "{bf16: -1}", "[1]", "1e30", "{}"])
def test_rates_of_a_card_must_be_numbers(rates):
    with pytest.raises(UserError, match="peak_flops must be a number above 0"):
        load_card("wl1", sets=("accelerator=mine", "memory_gb_per_s=1", f"peak_flops={rates}"))


def test_accelerators_are_listed_with_their_sources(cli):
    listed = cli.out(["accelerators"])
    assert all(f"\n{name} " in listed for name in ("v100", "gb300", "mi355x", "trainium2", "tpu-v7"))
    assert cli.out(["accelerators", "a100"]).count("NVIDIA A100 Tensor Core GPU datasheet") == 2
    (chip,) = cli.json(["accelerators", "NVIDIA GB200", "--json"])
    assert (chip["name"], chip["scale_up_domain"]) == ("gb200", 72)
    assert main(["accelerators", "wonder"]) == 2


def test_the_accelerator_of_a_profile_replaces_all_figures_of_the_cards(project, capsys):
    def resolve(hardware: str, *sets: str) -> tuple[Hardware, tuple[str, ...]]:
        profile = profile_from_mapping(yaml.safe_load(f"{{launcher: local, hardware: {{{hardware}}}}}"), name="site")
        return resolve_hardware(load_card("wl1", sets=sets), profile)

    card = load_card("wl1").hardware
    assert (card.accelerator, card.scale_up_gbps) == ("a100-40", 2400)
    hardware, notes = resolve("accelerator: NVIDIA GB200", "peak_flops=1e12")
    assert (hardware.accelerator, hardware.memory_gib, hardware.scale_up_domain) == ("gb200", 186, 72)
    assert (hardware.peak_flops, hardware.scale_up_gbps, hardware.chip.peak_flops["bf16"]) == (None, None, 2500e12)
    assert "gb200 with 186 GiB, from the catalogue of accelerators" in notes[0]
    assert resolve("accelerator: nvidia_a100, memory_gib: 40") == (card, ())
    own, _ = resolve("accelerator: mine, peak_flops: 2.0e+14, memory_gb_per_s: 900, memory_gib: 24")
    assert (own.chip.rate_for("bf16"), own.memory_gib) == (("bf16", 2e14), 24)
    with pytest.raises(UserError, match=r"'h10o' is not a known accelerator .*'h100'.*add peak_flops: N, mem"):
        resolve("accelerator: h10o, memory_gib: 80")


@pytest.mark.parametrize(("gbps", "is_noted"), [(3600, False), (3000, False), (7000, True), (1200, True)])
def test_scale_up_links_far_from_the_catalogue_are_noted(gbps, is_noted):
    card = load_card("wl2", sets=("accelerator=h100", "memory_gb=80", f"bandwidth_gbps=[400,{gbps}]"))
    assert card.hardware.scale_up_gbps == gbps
    assert any("h100 has 3600 per direction" in note for note in card.notes) is is_noted


def test_both_directions_of_scale_up_links_are_halved_unless_the_field_itself_says_so():
    sets = ("accelerator=h100", "memory_gb=80", "bandwidth_gbps=[400,7200]")
    card = load_card("wl2", sets=sets)
    assert card.hardware.scale_up_gbps == 3600
    assert any("has 7200 inside a node, twice the 3600 that h100 has per direction" in note for note in card.notes)
    stated = load_card("wl2", sets=(*sets, "scale_up_gbps=7200"))
    assert stated.hardware.scale_up_gbps == 7200
