"""Cards that leave their hardware, or a number of the work, to the search: they load, and nothing is guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from cards import ABSENT, change_fields, make_card

from cclsearch.card.load import inspect_card, load_card, require_stated
from cclsearch.cli import main
from cclsearch.core.errors import UserError
from cclsearch.plan.plan import plan_search
from cclsearch.plan.request import SearchRequest
from cclsearch.run.spec import SearchLimits

PROFILE = "launcher: slurm\nhardware: {accelerator: NVIDIA H100, num_accelerators: 16, accelerators_per_node: 8}\n"
ASKS = "give --set accelerator=NAME --set total_count=N --set count_per_node=N"


def write(path: Path, hardware: Any = ABSENT, **data: Any) -> str:
    """A card of Llama-3.1-8B with that hardware section."""
    changes = {"workload.hardware": hardware} | {f"workload.data.{name}": value for name, value in data.items()}
    path.write_text(yaml.safe_dump(change_fields(make_card(), changes)), "utf-8")
    return str(path)


@pytest.fixture
def bare(project: Path) -> str:
    (project / "launchers").mkdir(exist_ok=True)
    (project / "launchers" / "mine.yaml").write_text(PROFILE)
    return write(project / "bare.yaml")


@pytest.mark.parametrize(
    ("hardware", "remark"),
    [
        ({}, ""),
        ("N/A", ""),
        ("", ""),
        ([{"xpu_spec": {"model": "h100"}}], "workload.hardware must be a section, not [{"),
        ("8 x H100", "workload.hardware must be a section, not '8 x H100': not used"),
        ({"xpu_spec": ["h100", 8, 8]}, "workload.hardware.xpu_spec must be a section, not ["),
        ({"xpu_spec": {"model": "TBD", "total_count": "", "count_per_node": None, "memory_gb": "n/a"}}, ""),
        (
            {"network_topo": {"topology": "torus", "torus": [4, 4], "bandwidth_gbps": ["N/A", 800]}},
            "for scale_out_gbps",
        ),
    ],
)
def test_a_card_without_hardware_loads_and_says_so(hardware, remark, tmp_path, cli):
    card = write(tmp_path / "odd.yaml", hardware)
    report = inspect_card(card)
    stated = require_stated(report).hardware
    assert (stated.accelerator, stated.num_accelerators, stated.accelerators_per_node) == (None, None, None)
    assert report.card is None
    assert any(remark in each for each in ("", *require_stated(report).remarks))
    out = cli.out(["card", "check", card])
    assert "no hardware stated" in out
    assert f"states no hardware: {ASKS}, or for the hardware a profile" in out
    assert cli.json(["card", "show", card, "--json"])["open"] == report.say_open()
    with pytest.raises(UserError, match=ASKS) as caught:
        load_card(card)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"model": "h100", "total_count": "eight", "count_per_node": 8}, "total_count must be a whole number above 0"),
        ({"model": ["h100"], "total_count": 8, "count_per_node": 8}, "model must be text"),
        ({"model": "abacus"}, "'abacus', which is not a known accelerator"),
    ],
)
def test_stated_hardware_that_is_wrong_is_still_refused(spec, message, bare, cli):
    card = write(Path("wrong.yaml"), {"xpu_spec": spec})
    for command in (["card", "check", card], ["space", "--workload", card, "--launcher", "mine"]):
        for line in cli.err(command).splitlines():
            assert message in line


@pytest.mark.parametrize("command", ["space", "predict", "run --dry-run", "run --dry-run --launcher simulate"])
def test_nothing_starts_without_hardware(command, bare, project, cli):
    error = cli.err([*command.split(), "--workload", bare])
    assert f"{ASKS}, or a profile whose `hardware` has it (--launcher NAME)" in error
    assert error.count("\n") == 1
    assert not (project / "runs").exists()


@pytest.mark.parametrize("command", ["space", "predict --top 1", "run --dry-run"])
def test_hardware_comes_from_the_profile_or_from_settings(command, bare, capsys):
    words = [*command.split(), "--workload", bare]
    assert main([*words, "--launcher", "mine"]) == 0
    sets = ("accelerator=h100", "total_count=16", "count_per_node=8")
    assert main([*words, *(word for each in sets for word in ("--set", each))]) == 0


def test_what_the_profile_gave_is_frozen_with_its_source(bare):
    spec = plan_search(SearchRequest(bare, SearchLimits(budget=1), launcher="mine")).spec
    hardware = spec.card.hardware
    assert (hardware.accelerator, hardware.num_accelerators, hardware.accelerators_per_node) == ("h100", 16, 8)
    assert type(spec.card).model_validate_json(spec.card.model_dump_json()) == spec.card
    sources = {each.field: each.source for each in spec.card.inferred}
    assert sources["accelerator"] == sources["total_count"] == "the profile mine"


def test_a_profile_completes_a_part_and_describes_an_unknown_accelerator(bare, cli):
    part = write(Path("part.yaml"), {"xpu_spec": {"model": "h100"}})
    assert "states no total_count, count_per_node: give" in cli.out(["card", "check", part])
    counts = "launcher: slurm\nhardware: {num_accelerators: 4, accelerators_per_node: 4"
    Path("launchers/counts.yaml").write_text(f"{counts}}}\n")
    assert main(["space", "--workload", part, "--launcher", "counts"]) == 0
    error = cli.err(["space", "--workload", bare, "--launcher", "counts"])
    assert "workload.hardware.xpu_spec.model is missing: give --set accelerator=NAME" in error
    own = "accelerator: abacus, memory_gib: 90, peak_flops: 1.0e+14, memory_gb_per_s: 1000"
    Path("launchers/own.yaml").write_text(f"{counts}, {own}}}\n")
    card = plan_search(SearchRequest(bare, SearchLimits(budget=1), launcher="own")).spec.card
    assert (card.hardware.memory_gib, card.hardware.chip.peak_flops) == (90, {"bf16": 1e14})


def test_a_profile_changes_the_hardware_and_knobs_of_space_and_predict(bare, cli):
    Path("launchers/small.yaml").write_text(
        "launcher: slurm\nframework: megatron\nhardware: {num_accelerators: 2, accelerators_per_node: 2}\n"
        "knobs: [{name: tp, choices: [1, 2]}]\n"
    )
    found = cli.json(["space", "--workload", "wl2", "--launcher", "small", "--json"])
    assert found["framework"] == "megatron"
    assert {knob["name"]: knob["choices"] for knob in found["knobs"]}["tp"] == [1, 2]
    assert main(["predict", "--recording", "nanotron-8b-2n", "--launcher", "small"]) == 2
    assert "name it with --recording instead" in cli.err(["space", "--workload", "wl2", "--launcher", "replay"])


def test_a_replay_gives_its_own_hardware(bare):
    spec = plan_search(SearchRequest(bare, SearchLimits(budget=1), recording="nanotron-8b-2n")).spec
    assert spec.card.hardware.accelerator == "h100"


def test_a_number_of_the_work_is_asked_for_and_never_taken_from_a_profile(bare, cli):
    card = write(Path("open.yaml"), batch_size=None)
    space = ["space", "--workload", card, "--launcher", "mine"]
    assert "states no hardware and no batch_size: give" in cli.out(["card", "check", card])
    assert "workload.data.batch_size is missing: give --set batch_size=N" in cli.err(space)
    assert main([*space, "--set", "batch_size=32"]) == 0


@pytest.mark.parametrize(
    ("name", "named"), [("torchrun", "'torchrun'"), ("PyTorch", "'PyTorch'"), (None, "no framework")]
)
def test_a_framework_without_a_run_script_lists_those_that_can_run_the_card(name, named, tmp_path, cli):
    card = tmp_path / "a.yaml"
    card.write_text(yaml.safe_dump(change_fields(make_card(), {"Model-executor.framework.name": name})))
    error = cli.err(["space", "--workload", str(card)])
    assert named in error
    assert "--framework (deepspeed, hf-trainer, maxtext, megatron, nanotron, torchtitan)" in error
    assert error.count("\n") == 1
    cpu = ["--set", "accelerator=cpu", "--set", "memory_gb=4", "--set", "total_count=2", "--set", "count_per_node=2"]
    assert "(cpu, " in cli.err(["space", "--workload", str(card), *cpu])
