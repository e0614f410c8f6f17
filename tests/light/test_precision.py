"""Precision is work: it varies only if the card lists alternatives, and every trial then names its own."""

from __future__ import annotations

import pytest
from paths import ROOT

from cclsearch.card.load import load_card
from cclsearch.core.errors import UserError
from cclsearch.recording.load import load_recording
from cclsearch.space.build import build_space
from cclsearch.space.framework import load_framework
from cclsearch.space.parse import parse_knob
from cclsearch.stats.closed_form import predict_space

ALTERNATIVE = "alternative_precisions=[bf16]"


def test_a_card_without_alternatives_has_one_precision_in_every_trial():
    card = load_card("wl2")
    assert card.precisions == ("bf16",)
    assert not build_space(card, load_framework("megatron")).has("precision")
    assert card.for_trial({"tp": 1}) is card


@pytest.mark.parametrize("knob", ["precision=bf16,fp16", "precision=fp8"])
def test_a_knob_cannot_change_the_precision_that_the_card_fixes(knob):
    with pytest.raises(UserError, match=r"precision is part of the work, and wl2 allows bf16 \(list others in"):
        build_space(load_card("wl2"), load_framework("megatron"), [parse_knob(knob)])


def test_the_command_line_narrows_listed_precisions_and_refuses_others(project, cli):
    fixed = ["space", "--workload", "wl2", "--knob", "precision=fp16"]
    assert "precision is part of the work, and wl2 allows bf16" in cli.err(fixed)
    assert "precision" in cli.out([*fixed, "--set", "alternative_precisions=[fp16]"])


def test_listed_alternatives_double_the_space_and_can_be_narrowed():
    plain, frame = load_card("wl2"), load_framework("megatron")
    card = load_card("wl2", sets=("alternative_precisions=[fp16]",))
    space = build_space(card, frame)
    assert len(space) == 2 * len(build_space(plain, frame))
    assert set(space.column("precision").tolist()) == {"bf16", "fp16"}
    narrowed = build_space(card, frame, [parse_knob("precision=fp16")])
    assert set(narrowed.column("precision").tolist()) == {"fp16"}
    assert (card.for_trial({"precision": "fp16"}).precision, card.for_trial({"tp": 1}).precision) == ("fp16", "bf16")


def test_a_framework_must_support_every_listed_precision():
    card = load_card("wl2", sets=("alternative_precisions=[fp8]",))
    with pytest.raises(UserError, match=r"workload\.model\.alternative_precisions must be one of .*, not 'fp8'"):
        build_space(card, load_framework("torchtitan"))


def test_each_precision_is_predicted_as_a_card_of_it_alone():
    frame = load_framework("megatron")
    both = load_card("wl2", sets=("alternative_precisions=[fp32]",))
    space = build_space(both, frame)
    prediction = predict_space(both, space)
    assert prediction is not None
    for precision in ("bf16", "fp32"):
        alone = load_card("wl2", sets=(f"workload.model.precision={precision}",))
        expected = predict_space(alone, build_space(alone, frame))
        assert expected is not None
        rows = space.matching({"precision": precision})
        assert prediction.value_N[rows].tolist() == pytest.approx(expected.value_N.tolist())
        assert prediction.memory_gib_N[rows].tolist() == pytest.approx(expected.memory_gib_N.tolist())
        assert sum(prediction.parts.values())[rows].tolist() == pytest.approx(expected.value_N.tolist())


def test_a_recording_keeps_the_rows_in_precisions_that_its_card_lists(tmp_path):
    source = ROOT / "workloads" / "recordings" / "nanotron-8b-2n"
    card = (source / "card.yaml").read_text()
    header, *rows = (source / "trials.csv").read_text().splitlines()
    odd = ["fp16" if n % 3 == 0 else "bf16" for n in range(len(rows))]
    table = [f"precision,{header}", *(f"{precision},{row}" for precision, row in zip(odd, rows, strict=True))]
    (tmp_path / "trials.csv").write_text("\n".join(table) + "\n")
    (tmp_path / "card.yaml").write_text(card)
    fixed = load_recording(tmp_path)
    assert (len(fixed.rows), set(fixed.space.column("precision"))) == (odd.count("bf16"), {"bf16"})
    assert any(f"{odd.count('fp16')} of {len(rows)} rows left out" in note for note in fixed.notes)
    listed = card.replace("precision: bf16", "precision: bf16\n    alternative_precisions: [fp16]")
    assert listed != card
    (tmp_path / "card.yaml").write_text(listed)
    both = load_recording(tmp_path)
    assert (len(both.rows), set(both.space.column("precision"))) == (len(rows), {"bf16", "fp16"})


@pytest.mark.parametrize("given", ["fp8", "[]", "[[bf16]]"])
def test_alternatives_must_be_a_list_of_dtypes(given):
    notes = "alternative_precisions must be a list of dtypes"
    with pytest.raises(UserError, match=notes):
        load_card("wl2", sets=(f"workload.model.alternative_precisions={given}",))
