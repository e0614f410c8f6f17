"""Cards: accepted forms, problems by field, no guessing, and hostile files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cards
import pytest
import yaml
from cards import ABSENT, change_fields

from cclsearch.card.load import card_from_mapping, inspect_card, inspect_mapping, load_card
from cclsearch.card.model import Phase
from cclsearch.core.content import list_content, shipped_root
from cclsearch.core.errors import UserError

ARCH = {
    **{"num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128},
    **{"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256},
}
SHIPPED = [f"wl{i}" for i in range(1, 8)] + ["tiny", "tiny-moe", "tiny-jax"]


A100 = {"model": "nvidia_a100", "memory_gb": 40, "total_count": 16, "count_per_node": 4}


def make_card(**changes: Any) -> dict[str, Any]:
    """A complete card of 16 A100; `path__to__field=value` sets a field, None removes it."""
    stated = {
        "workload.data": {"batch_size": 32, "seq_len": 1024},
        "workload.hardware.network_topo.bandwidth_gbps": [200, 2400],
        "workload.hardware.xpu_spec": dict(A100),
        "Model-executor": {"framework": {"name": "megatron-lm"}},
    }
    changes = {name.replace("__", "."): ABSENT if value is None else value for name, value in changes.items()}
    return change_fields(cards.make_card("m", dict(ARCH)), stated | changes)


ARCH_PATH = "workload__model__model_arch__"
XPU = "workload__hardware__xpu_spec__"
BANDWIDTH = "workload__hardware__network_topo__bandwidth_gbps"


def write(folder: Path, data: Any, name: str = "c.yaml") -> str:
    path = folder / name
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_workload_is_a_complete_training_card(name):
    card = load_card(name)
    assert (card.name, card.phase, card.notes) == (name, Phase.TRAINING, ())
    raw = yaml.safe_load((shipped_root() / "workloads" / f"{name}.yaml").read_text())
    assert raw["sources"], "every number names its source"


def test_shipped_recordings_name_source_and_licence():
    cards = {
        folder.name: yaml.safe_load((folder / "card.yaml").read_text(encoding="utf-8"))
        for folder in sorted((shipped_root() / "workloads" / "recordings").iterdir())
        if folder.is_dir()
    }
    assert {card["licence"] for card in cards.values()} == {"Apache-2.0"}
    sources = {"nanotron": "ultra-scale", "srv": "aiconfigurator", "gpustack": "gpustack"}
    assert {name.partition("-")[0] for name in cards} == set(sources)
    assert [n for n, card in cards.items() if sources[n.partition("-")[0]] not in card["source"].lower()] == []


def test_widths_directly_under_model_are_read_as_in_older_cards():
    data = make_card(workload__model__model_arch=None)
    data["workload"]["model"] |= ARCH
    assert card_from_mapping(data, "old") == card_from_mapping(make_card(), "old")


def test_names_of_hugging_face_configurations_are_accepted():
    data = make_card(workload__model__moe=True)
    arch = data["workload"]["model"]["model_arch"]
    arch |= {"n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2}
    moe = card_from_mapping(data, "m").arch.moe
    assert (moe.num_experts, moe.top_k, moe.expert_intermediate_size, moe.num_shared_experts) == (64, 6, 1408, 2)


def test_missing_widths_are_listed_with_their_settings_and_never_guessed(tmp_path):
    path = write(tmp_path, make_card(workload__model__model_arch=None))
    with pytest.raises(UserError) as caught:
        load_card(path)
    message = str(caught.value)
    assert message.startswith(path)
    assert "\n" not in message
    assert f"workload.model.model_arch has no {', '.join(sorted(ARCH, key=message.index))}: give" in message
    assert [field for field in ARCH if f"--set {field}=N" not in message] == []
    settings = [f"{field}={value}" for field, value in ARCH.items()]
    assert load_card(path, sets=settings).arch.hidden_size == 4096


def test_a_partial_card_can_be_inspected():
    data = make_card(workload__data__batch_size="N/A", workload__model__model_arch__num_layers=None)
    report = inspect_mapping(data, "p", "p.yaml")
    assert report.card is None
    assert [problem.field.rsplit(".", 1)[-1] for problem in report.blocking] == ["num_layers", "batch_size"]
    assert report.values["seq_len"] == 1024
    assert report.values["accelerator"] == "a100-40"


def test_swapped_bandwidths_are_used_in_the_right_order_and_reported():
    report = inspect_mapping(make_card(**{BANDWIDTH: [2400, 200]}), "s", "s.yaml")
    assert (report.card.hardware.scale_out_gbps, report.card.hardware.scale_up_gbps) == (200, 2400)
    assert "used as [200, 2400]" in report.notes[0]
    assert "bandwidth_gbps" in report.card.notes[0]


@pytest.mark.parametrize(
    ("pair", "used"), [(["N/A", 800], (200, 800)), (["TBD", "TBD"], (200, 2400)), ("x", (200, 2400))]
)
def test_the_catalogue_replaces_bandwidths_that_are_not_numbers(pair, used):
    card = card_from_mapping(make_card(**{BANDWIDTH: pair}), "b")
    assert (card.hardware.scale_out_gbps, card.hardware.scale_up_gbps) == used
    assert card.notes
    assert "scale_out_gbps" in {inferred.field for inferred in card.inferred}


@pytest.mark.parametrize(
    ("model", "memory_gib", "why"),
    [
        ("nvidia_h100", 80, "memory_gb 80; source: the catalogue of accelerators"),
        ("nvidia_a100", 40, "sold with 40 or 80 GiB, and what fits into 40 fits into all"),
        ("V100", 16, "sold with 16 or 32 GiB"),
        ("NVIDIA A100-SXM4-80GB", 80, "the accelerator's name 'NVIDIA A100-SXM4-80GB'"),
        ("MI250X", 64, "the catalogue of accelerators: every mi250x-gcd has 64 GiB"),
    ],
)
def test_missing_memory_is_that_of_the_smallest_size_that_is_sold_and_a_note_says_so(model, memory_gib, why):
    found = card_from_mapping(make_card(**{f"{XPU}model": model, f"{XPU}memory_gb": None}), "a")
    assert found.hardware.memory_gib == memory_gib
    assert any(why in remark for remark in found.remarks)


def test_the_memory_of_an_unknown_accelerator_is_asked_for():
    with pytest.raises(UserError, match="give --set peak_flops=N --set memory_gb_per_s=N --set memory_gb=N"):
        card_from_mapping(make_card(**{f"{XPU}model": "mychip", f"{XPU}memory_gb": None}), "u")


def test_a_card_may_state_more_memory_than_the_catalogue_and_a_note_says_so():
    card = card_from_mapping(make_card(**{f"{XPU}model": "H100-SXM-96GB-HBM2e", f"{XPU}memory_gb": 96}), "u")
    assert (card.hardware.accelerator, card.hardware.memory_gib, card.hardware.chip.memory_gib) == ("h100", 96, 96)
    assert "is sold with 80 GiB: the card's 96 is used" in card.notes[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({ARCH_PATH + "num_kv_heads": 5}, "num_kv_heads must divide num_heads: 5 does not divide 32"),
        ({ARCH_PATH + "num_layers": 0}, "num_layers must be a whole number above 0, not 0"),
        ({ARCH_PATH + "num_layers": -1}, "not -1"),
        ({ARCH_PATH + "num_layers": True}, "not True"),
        ({ARCH_PATH + "num_layers": 1.5}, "not 1.5"),
        ({ARCH_PATH + "num_layers": float("nan")}, "not nan"),
        ({ARCH_PATH + "num_layers": float("inf")}, "not inf"),
        ({ARCH_PATH + "num_layers": [32]}, r"not \[32\]"),
        ({XPU + "total_count": 10**30}, "at most 1e"),
        ({XPU + "memory_gb": "lots"}, "memory_gb must be a number above 0"),
        ({"workload__model__phase": "finetune"}, "phase must be training or inference"),
        ({"workload__model__moe": "maybe"}, "moe must be true or false"),
        ({"workload__model__moe": True}, "num_experts is missing, but the model is a mixture of experts"),
        ({ARCH_PATH + "num_experts": 4, ARCH_PATH + "top_k": 8}, "moe"),
        ({"workload__data": ["x"]}, r"workload\.data has no batch_size, seq_len"),
        ({"workload__hardware__network_topo__torus": [4, 2]}, "4x2 is 8 chips, not 16"),
    ],
)
def test_invalid_fields_are_named(changes, message):
    if message == "moe":
        changes |= {"workload__model__moe": True, ARCH_PATH + "expert_intermediate_size": 64}
        message = "top_k must be at most num_experts: 8 is above 4"
    with pytest.raises(UserError, match=message):
        card_from_mapping(make_card(**changes), "impossible")


def test_overlays_and_then_settings_override_the_card(tmp_path):
    base = write(tmp_path, make_card())
    over = write(tmp_path, {"workload": {"data": {"seq_len": 4096, "batch_size": None}}}, "over.yaml")
    card = load_card(base, overlays=[over], sets=["global_batch_size=64", "workload.model.precision=bfloat16"])
    assert (card.number("seq_len"), card.number("global_batch_size"), card.precision) == (4096, 64, "bf16")


@pytest.mark.parametrize("setting", ["hidden=1", "hidden_size", "=3", "seq_len=", "workload.nothing=3", "name=x"])
def test_a_setting_of_an_unknown_field_is_rejected(setting):
    with pytest.raises(UserError, match="--set"):
        load_card("wl2", sets=[setting])


def test_an_inference_card_loads():
    assert card_from_mapping(make_card(workload__model__phase="serving"), "s").phase is Phase.INFERENCE
    data = make_card(workload__model__phase="inference", workload__data__batch_size=None)
    data["workload"]["data"]["max-num-seqs"] = 128
    card = card_from_mapping(data, "i")
    assert (card.phase, card.number("batch_size")) == (Phase.INFERENCE, 128)


def test_an_unknown_workload_lists_the_known_ones():
    with pytest.raises(UserError, match=r"tiny-moe.*wl7"):
        load_card("wl8")
    assert set(SHIPPED) <= set(list_content("workloads", ".yaml"))


def alias_bomb() -> str:
    levels = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    return "\n".join(["a0: &a0 [x, x]", *levels, "workload: *a11"])


def merge_bomb() -> str:
    levels = [f"m{i}: &m{i} {{<<: [{', '.join([f'*m{i - 1}'] * 4)}], k{i}: 1}}" for i in range(1, 20)]
    return "\n".join(["m0: &m0 {x: 1, y: 2}", *levels])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "just words",
        "- a\n- b\n",
        "workload: [",
        "workload: 5\n",
        "a: 1\na: 2\n",
        "workload: !!python/object/apply:os.system ['true']\n",
        "workload: &w {model: *w}\n",
        "[" * 5000,
        "x: " + "[" * 200 + "]" * 200,
        "{a: 1}: 2\n? [x, y]\n: 3\n",
        "n: " + "9" * 6000 + "\n",
        "d: 2026-13-99\n",
        alias_bomb(),
        merge_bomb(),
        "\x00\x01",
    ],
)
def test_hostile_files_are_one_line_errors(tmp_path, text):
    path = write(tmp_path, text)
    with pytest.raises(UserError) as caught:
        load_card(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000 + len(path)


def test_binary_files_are_rejected(tmp_path):
    (tmp_path / "b.yaml").write_bytes(b"workload: \xff\xfe\n")
    with pytest.raises(UserError, match="UTF-8"):
        load_card(str(tmp_path / "b.yaml"))


def test_terminal_escapes_in_a_card_do_not_reach_the_card():
    card = card_from_mapping(make_card(description="a\x1b[31m\u202ered\ncard"), "e")
    assert card.title == "ared card"


def test_anchors_and_infinities_of_published_cards_are_accepted(tmp_path):
    text = yaml.safe_dump(make_card()) + "runs:\n- config: &id {tp: 4}\n  score: .inf\n- config: *id\n  score: .nan\n"
    assert inspect_card(write(tmp_path, text)).card is not None


@pytest.mark.parametrize("prefix", ["num_accelerators", "total_count", "workload.hardware.xpu_spec.total_count"])
def test_fields_have_the_names_of_cards_profiles_and_output_on_the_command_line(prefix):
    hardware = load_card("wl2", sets=(f"{prefix}=8", "accelerators_per_node=8", "memory_gib=38")).hardware
    assert (hardware.num_accelerators, hardware.accelerators_per_node, hardware.memory_gib) == (8, 8, 38)
