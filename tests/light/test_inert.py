"""Configurations that differ only in knobs without effect are one configuration."""

import numpy as np
import pytest
from paths import ROOT

from cclsearch.analysis.report_pages import neighbor_rows
from cclsearch.card.load import load_card
from cclsearch.core.values import Config
from cclsearch.recording.load import load_recording
from cclsearch.space.build import build_space
from cclsearch.space.framework import load_framework
from cclsearch.space.inert import InertWhen
from cclsearch.space.knobs import KnobMeaning, register_knob
from cclsearch.space.table import Knob, space_from_rows
from cclsearch.stats.kernel import read_features

CARD = (ROOT / "benchmarks/landscapes/nanotron-1b-1n/card.yaml").read_text()


def write_recording(folder, lines):
    (folder / "card.yaml").write_text(CARD)
    (folder / "trials.csv").write_text("\n".join(lines) + "\n")
    return load_recording(folder)


def test_of_recorded_rows_that_differ_in_a_knob_without_effect_the_better_one_is_kept(tmp_path):
    table = ["tp,dp,sequence_parallel,status,step_time_s"]
    table += ["1,2,false,ok,4.0", "1,2,true,ok,3.9", "2,1,false,ok,5.0", "2,1,true,ok,4.5"]
    recording = write_recording(tmp_path, table)
    assert sorted(recording.values) == [3.9, 4.5, 5.0]
    assert any("1 row dropped: the same run" in note for note in recording.notes)
    both = [recording.space.row({"tp": 1, "dp": 2, "sequence_parallel": value}) for value in (False, True)]
    assert both[0] == both[1] is not None
    assert recording.values[both[0]] == 3.9
    other = [recording.space.row({"tp": 2, "dp": 1, "sequence_parallel": value}) for value in (False, True)]
    assert other[0] != other[1]


def test_a_row_without_a_twin_keeps_its_recorded_values(tmp_path):
    table = ["tp,dp,sequence_parallel,status,step_time_s"]
    recording = write_recording(tmp_path, [*table, "1,2,true,ok,4.0", "2,1,false,ok,5.0"])
    row = recording.space.row({"tp": 1, "dp": 2, "sequence_parallel": False})
    assert recording.space.config(row)["sequence_parallel"] is True


def test_a_configuration_of_an_enumerated_space_is_found_by_another_value_of_a_knob_without_effect():
    card = load_card("wl2")
    space = build_space(card, load_framework("megatron"))
    row = next(n for n in range(len(space)) if space.config(n)["tp"] == 1 and space.config(n)["pp"] > 1)
    config = dict(space.config(row))
    assert config["sequence_parallel"] is False
    assert space.row({**config, "sequence_parallel": True}) == row
    assert space.row({**config, "tp": 2}) != row


@pytest.fixture
def dropout():
    from cclsearch.space import knobs

    yield register_knob(KnobMeaning("dropout_rate", neutral=0, inert_when={"dropout": (False,)}))
    knobs.KNOBS.pop("dropout_rate")
    knobs._ALIASES.pop("dropout_rate")


def test_a_registered_knob_says_with_which_values_of_another_it_changes_nothing(dropout):
    knobs = [Knob("dropout", (False, True)), Knob("dropout_rate", (0, 1, 2))]
    rows = [Config({"dropout": on, "dropout_rate": rate}) for on in (False, True) for rate in (0, 1, 2)]
    features = read_features(space_from_rows(knobs, rows))
    assert len(np.unique(np.hstack([features.numbers_ND, features.categories_NC]), axis=0)) == 4


def test_a_framework_file_says_it_with_a_rule_of_kind_same():
    found = load_framework("cpu").find_inert("bucket_mib")
    assert found == (InertWhen((("zero_stage", (1,)),), 0),)


def test_a_value_that_is_replaced_may_leave_another_knob_without_effect():
    stages = Knob("inner", (0, 1), inert_when=(InertWhen((("outer", (0,)),), 0),))
    outer = Knob("outer", (0, 1), inert_when=(InertWhen((("switch", (False,)),), 0),))
    knobs = [stages, outer, Knob("switch", (False, True))]
    rows = [{"inner": 1, "outer": 1, "switch": False}, {"inner": 0, "outer": 0, "switch": False}]
    space = space_from_rows(knobs, rows)
    assert space.masked_NK[0].tolist() == space.masked_NK[1].tolist()


def test_a_configuration_is_not_its_own_neighbour_by_a_knob_without_effect():
    space = build_space(load_card("wl2"), load_framework("megatron"))
    row = next(n for n in range(len(space)) if space.config(n)["tp"] == 1)
    found = neighbor_rows(space, space.config(row))
    assert row not in found
    assert any(other is not None for other in found)
