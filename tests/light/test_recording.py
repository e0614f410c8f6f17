"""A recorded landscape becomes a card, a space and rows; problems are reported by file and row."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from paths import ROOT

from cclsearch.core.errors import UserError
from cclsearch.core.values import Config
from cclsearch.recording.load import find_recordings, load_recording

LANDSCAPES = ROOT / "benchmarks" / "landscapes"
CARD = (LANDSCAPES / "nanotron-1b-1n" / "card.yaml").read_text(encoding="utf-8")


def write_landscape(folder: Path, table: str, card: str = CARD) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "card.yaml").write_text(card, encoding="utf-8")
    (folder / "trials.csv").write_text(table, encoding="utf-8")
    return folder


def test_shipped_landscapes_load_with_their_work_and_source():
    recordings = [load_recording(path) for path in find_recordings(LANDSCAPES)]
    assert len(recordings) == 19
    for recording in recordings:
        assert recording.card.source
        assert recording.card.licence in {"Apache-2.0", "MIT"}
        assert len(recording.rows) == len(recording.space)
        assert not recording.notes


def test_recorded_rows_match_the_rows_of_the_space():
    recording = load_recording(LANDSCAPES / "nanotron-8b-2n")
    for row in (0, 17, len(recording.rows) - 1):
        assert recording.space.config(row) == recording.rows[row].config
        assert recording.look_up(dict(recording.rows[row].config)) is recording.rows[row]
    assert recording.look_up({"tp": 3}) is None
    assert recording.best_value == 8.98923


def test_knob_columns_become_text_booleans_and_numbers(tmp_path):
    table = (
        "tp,dp,ep,kernel,activation_checkpointing,chunk,grad_accum,status,step_time_s\n"
        "1,8,1,flash v2,True,0.5,8,ok,2.0\n"
        "2,4,2,naive,False,1,8,oom,\n"
        "1,8,1,flash v2,true,0.5,8,ok,1.5\n"
    )
    recording = load_recording(write_landscape(tmp_path / "a", table))
    choices = {knob.name: knob.choices for knob in recording.space.knobs}
    assert choices == {
        "tp": (1, 2),
        "dp": (4, 8),
        "ep": (1, 2),
        "kernel": ("flash v2", "naive"),
        "activation_checkpointing": (False, True),
        "chunk": (0.5, 1.0),
    }
    assert len(recording.rows) == 2
    assert recording.rows[0].metrics.get("step_time_s") == 1.5, "the fastest of duplicate rows is kept"
    assert "duplicate rows dropped" in recording.notes[0]
    assert recording.rows[1].config == Config(
        tp=2, dp=4, ep=2, kernel="naive", activation_checkpointing=False, chunk=1.0
    )


def test_a_card_without_widths_is_completed_with_notes(tmp_path):
    lines = [line for line in CARD.splitlines() if "hidden_size" not in line and "num_layers" not in line]
    table = "tp,dp,status,step_time_s\n1,8,ok,2.0\n2,4,ok,3.0\n"
    recording = load_recording(write_landscape(tmp_path / "a", table, "\n".join(lines)))
    assert recording.card.arch.hidden_size % recording.card.arch.num_heads == 0
    assert [note for note in recording.notes if "hidden_size is missing" in note]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("", "the file is empty"),
        ("tp,status\n1,ok\n", "needs a column 'step_time_s'"),
        ("status,step_time_s\nok,1\n", "at least one knob column"),
        ("tp,status,step_time_s\n", "at least one measured row"),
        ("tp,status,step_time_s\n1,fine,1\n", "row 2: status must be one of"),
        ("tp,status,step_time_s\n1,ok,nan\n", "row 2: step_time_s must be a number above 0"),
        ("tp,status,step_time_s\n1,ok\n", "row 2: must have 3 cells"),
        ("tp,status,step_time_s\n1,ok,1\nx,ok,1\n", "row 3: tp must be a whole number"),
        ("tp,status,step_time_s\n1,oom,\n", "at least one row with status ok"),
    ],
)
def test_a_bad_table_is_named_by_file_and_row(tmp_path, table, message):
    folder = write_landscape(tmp_path / "bad", table)
    with pytest.raises(UserError, match=r"trials\.csv") as caught:
        load_recording(folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_card_without_the_fixed_work_is_rejected(tmp_path):
    lines = [line for line in CARD.splitlines() if "seq_len" not in line]
    folder = write_landscape(tmp_path / "a", "tp,status,step_time_s\n1,ok,1\n", "\n".join(lines))
    with pytest.raises(UserError, match="seq_len"):
        load_recording(folder)


def test_folders_without_landscapes_are_rejected(tmp_path):
    with pytest.raises(UserError, match="no landscape"):
        find_recordings(tmp_path)
    with pytest.raises(UserError, match="there is no folder"):
        find_recordings(tmp_path / "nowhere")
    shutil.copytree(LANDSCAPES / "nanotron-1b-1n", tmp_path / "x" / "y")
    assert find_recordings(tmp_path) == [tmp_path / "x" / "y"]
