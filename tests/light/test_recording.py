"""Recordings: reading and checking."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from paths import ROOT

from cclsearch.cli import main
from cclsearch.core.errors import UserError
from cclsearch.core.values import Config
from cclsearch.plan.plan import plan_search
from cclsearch.plan.request import SearchRequest
from cclsearch.plan.warm_start import load_warm_start
from cclsearch.recording.load import find_recordings, load_recording
from cclsearch.run.spec import SearchLimits

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
        **{"tp": (1, 2), "dp": (4, 8), "ep": (1, 2), "kernel": ("flash v2", "naive")},
        **{"activation_checkpointing": (False, True), "chunk": (0.5, 1.0)},
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
        ("status,step_time_s\nok,1\n", "at least one knob column"),
        ("tp,status,step_time_s\n", "at least one measured row"),
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


RECORDING = ROOT / "workloads" / "recordings" / "nanotron-8b-2n"


@pytest.fixture
def own(project: Path) -> Path:
    """The table of the docs page with the card of a shipped recording, in the project's folder `own`."""
    folder = project / "own"
    folder.mkdir()
    shutil.copy(RECORDING / "card.yaml", folder)
    [table] = re.findall(r"```csv\n(.*?)```", (ROOT / "docs" / "your-recording.md").read_text(), re.DOTALL)
    (folder / "trials.csv").write_text(table)
    return folder


def test_a_correct_table_is_described(own, cli):
    for given in ("own", "own/trials.csv", "own/card.yaml"):
        shown = cli.out(["recording", "check", given])
        assert "own: 4 configurations (2 ok, 1 oom, 1 failed)" in shown
        assert re.search(r"metric +peak_memory_gib +in 2 rows", shown)
        assert "best     tp=4 pp=1 dp=4 micro_batch_size=4: step time 8.99 s" in shown
    assert cli.json(["recording", "check", "nanotron-8b-2n", "--json"])["rows"] == {"failed": 79, "ok": 35}


def test_rows_of_more_accelerators_than_the_card_has_are_named(own, capsys, cli):
    assert "more than" not in cli.out(["recording", "check", "own"])
    card = (own / "card.yaml").read_text()
    (own / "card.yaml").write_text(re.sub(r"total_count: \d+", "total_count: 8", card))
    assert main(["recording", "check", "own"]) == 0
    assert "4 of 4 rows use more than the 8 accelerators of the card, such as tp=" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "right", "message"),
    [
        ("8,1,2,1,ok,19.0,18.0", "8,1,2,1,ok,19.0", "row 2: must have 7 cells; it has 6"),
        ("8,1,2,1,ok", "x,1,2,1,ok", "row 2: tp must be a whole number of at least 1; it is 'x'"),
        ("8,1,2,1,ok", "8,1,2,1,good", "row 2: status must be one of ok, oom, failed; it is 'good'"),
        ("ok,19.0", "ok,nan", "row 2: step_time_s must be a number above 0 if status is ok; it is 'nan'"),
        ("step_time_s", "time", "needs a column 'step_time_s'"),
        ("tp,pp", "tp,tp", "column names must be unique"),
        ("status", "state", "needs a column 'status'"),
    ],
)
def test_each_mistake_in_a_table_is_one_line(own, capsys, wrong, right, message):
    table = own / "trials.csv"
    table.write_text(table.read_text().replace(wrong, right, 1))
    assert main(["recording", "check", "own"]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert (captured.out, captured.err.count("\n")) == ("", 1)


def test_all_mistakes_are_named_at_once(own, cli):
    table, card = own / "trials.csv", own / "card.yaml"
    table.write_text(table.read_text().replace("8,1,2,1,ok", "-8,1,2,1,ok").replace("oom", "dead"))
    card.write_text(card.read_text().replace("num_kv_heads: 32", "num_kv_heads: 5").replace("total_count: 16", ""))
    lines = cli.err(["recording", "check", "own"]).splitlines()
    assert [any(part in line for line in lines) for part in ("row 2: tp", "row 4: status", "num_kv_heads")] == [
        True
    ] * 3
    for name in ("card.yaml", "trials.csv"):
        (own / name).unlink()
        assert f"{name} is missing" in cli.err(["recording", "check", "own"])


def test_a_column_that_nothing_uses_is_noted(own, cli):
    table = own / "trials.csv"
    table.write_text(table.read_text().replace("peak_memory_gib", "peak_memry"))
    assert "column 'peak_memry' is not used" in cli.out(["recording", "check", "own"])


def plan_tiny(**changes: object) -> SearchRequest:
    return SearchRequest("tiny", SearchLimits(budget=1), sets=("seq_len=64",), **changes)  # type: ignore[arg-type]


def test_measurements_of_ones_own_are_a_warm_start(project):
    plan = plan_search(plan_tiny())
    names = [knob.name for knob in plan.space.knobs]
    rows = [[str(plan.space.config(row)[name]).lower() for name in names] for row in (0, 1, 2)]
    cells = [
        [*row, status, time] for row, status, time in zip(rows, ("ok", "ok", "oom"), ("2.0", "1.0", ""), strict=True)
    ]
    folder = project / "mine"
    folder.mkdir()
    shutil.copy(ROOT / "workloads" / "tiny.yaml", folder / "card.yaml")
    card = (folder / "card.yaml").read_text()
    (folder / "card.yaml").write_text(re.sub(r"seq_len: \d+", "seq_len: 64", card))
    table = [[*names, "status", "step_time_s"], *cells]
    (folder / "trials.csv").write_text("\n".join(",".join(line) for line in table) + "\n")
    spec = plan_search(plan_tiny(learn_from=(str(folder),))).spec
    prior = load_warm_start(spec)
    assert [o.value("step_time_s") for o in prior] == [2.0, 1.0, None]
    assert [o.failure.kind.value if o.failure else None for o in prior] == [None, None, "out_of_memory"]
    assert all(plan.space.row(o.config) is not None for o in prior)
    with pytest.raises(UserError, match="not comparable with this search: different seq len"):
        plan_search(SearchRequest("tiny", SearchLimits(budget=1), learn_from=(str(folder),)))


def test_a_replay_does_not_learn_from_the_recording_that_it_replays(own, capsys):
    assert main(["run", "--recording", "own", "--learn-from", "own", "--dry-run"]) == 2
    assert "is the recording that this search replays" in capsys.readouterr().err
    shutil.copytree(own, own.parent / "other")
    table = own.parent / "other" / "trials.csv"
    table.write_text(table.read_text().replace("8.99", "9.5"))
    assert main(["run", "--recording", "own", "--learn-from", "other", "--budget", "2", "--quiet"]) == 0
    assert main(["run", "--recording", "own", "--learn-from", "nanotron-8b-4n", "--dry-run"]) == 0
