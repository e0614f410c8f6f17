"""The live table of a search: what fits on a terminal of any size, and what a real one shows while it runs."""

from __future__ import annotations

import io
import itertools
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console
from terminals import Terminal

from cclsearch.cli import main
from cclsearch.core.terminal import can_redraw, print_wrapped
from cclsearch.launch.base import Handle
from cclsearch.launch.contract import PHASE_FILE, TrialPhase
from cclsearch.propose.agent.providers.cost import Cost
from cclsearch.propose.agent.providers.types import Usage
from cclsearch.propose.events import LlmTurn
from cclsearch.report.progress import (
    LiveNote,
    Progress,
    ProgressObserver,
    format_duration,
    list_varied_knobs,
    render_progress,
)
from cclsearch.run.folder import Run, load_run
from cclsearch.run.phase import read_phase
from cclsearch.run.trial_folder import attempt_folder
from cclsearch.space.table import Knob, Space

RUN = ("run", "--workload", "wl2", "--launcher", "replay")
KNOBS = ("tp", "pp", "dp", "zero_stage", "micro_batch_size")
SLOW = """
import json, os, time
from pathlib import Path
folder = Path(os.environ["CCL_TRIAL_DIR"])
(folder / "phase").write_text("timing")
print("step 1", flush=True)
time.sleep(0.4)
text = f"no {os.environ['CCL_MICRO_BATCH_SIZE']} \\x1b[2J\\x1b]0;x\\x07 of it"
failure = {"stage": "run", "kind": "crashed", "message": text}
(folder / "result.json").write_text(json.dumps({"schema_version": 1, "status": "failed", "failure": failure}))
"""


@pytest.fixture
def searched(project: Path) -> Run:
    """A recorded search of 18 trials, the size of the issue's 80x24 example."""
    assert main([*RUN, "--budget", "18", "--name", "r", "--quiet"]) == 0
    return load_run(project / "runs" / "r")


def running(run: Run, number: int = 18) -> Progress:
    """The progress of the run as if its last trial still ran, on nodes."""
    progress = ProgressObserver(run.spec, run.folder).observe(run.state, KNOBS, is_running=True)
    last = next(trial for trial in progress.trials if trial.number == number)
    folder = attempt_folder(run.trial_folder(number), 2)
    handle = Handle(launcher="slurm", job_name="j", job_id="1", trial_dir=folder)
    now = replace(last, outcome=None, attempt=2, attempt_s=1000.0, handle=handle)
    trials = tuple(now if trial.number == number else trial for trial in progress.trials)
    return replace(progress, trials=trials, node_hours=1.5, typical_s=120.0, num_spent=16, started_s=400.0)


def draw(progress: Progress, width: int, height: int | None, now_s: float, note: LiveNote = lambda _: "") -> list[str]:
    """The lines of the table on a terminal of that width."""
    console = Console(width=width, color_system=None, file=io.StringIO())
    with console.capture() as captured:
        console.print(render_progress(progress, width, height, now_s, note))
    return captured.get().splitlines()


@pytest.mark.parametrize(("width", "height"), [(80, 23), (60, 23), (200, 60), (40, 10), (132, 8), (20, 4), (5, 2)])
def test_the_table_fits_and_keeps_the_best_the_newest_and_the_footer(searched, width, height):
    progress = running(searched)
    lines = draw(progress, width, height, 1060.0)
    assert len(lines) <= height
    assert all(cell_len(line) <= width for line in lines)
    if width < 40:
        return
    text = "\n".join(lines)
    assert "2 of 18 trials left; 1 running; 11m 00s" in text
    first = [line.split()[0] for line in lines]
    assert {"18", str(progress.best)} <= set(first)
    shown = [int(word) for word in first if word.isdecimal() and int(word) > 2] if height < 20 else []
    assert shown == sorted(shown)


def test_knobs_have_columns_in_their_order_and_short_heads_in_a_narrow_terminal(searched):
    progress = running(searched)
    wide, narrow = (draw(progress, width, 40, 1060.0)[1].split() for width in (200, 70))
    assert wide == ["trial", *KNOBS, "time", "by", "result"]
    assert "micro_batch_size" not in narrow
    assert "mb" in narrow
    assert "tp=" not in "\n".join(draw(progress, 200, 40, 1060.0))


def test_knobs_with_one_value_have_no_column():
    codes_NK = np.array([[0, 1, 0], [0, 2, 0], [0, 0, 1]], dtype=np.int16)
    knobs = (Knob("tp", (1,)), Knob("dp", (1, 2, 4)), Knob("pp", (1, 2)))
    assert list_varied_knobs(Space(knobs, codes_NK, num_raw=6)) == ("dp", "pp")


def test_a_knob_without_room_is_named(searched):
    many = tuple(f"knob_number_{n}" for n in range(9))
    head = draw(replace(running(searched), knobs=many), 60, 20, 1060.0)[1]
    assert "result (no room: " in head


def test_the_footer_has_elapsed_time_left_and_cost(searched):
    [footer] = [line for line in draw(running(searched), 200, 40, 1060.0) if "left" in line]
    # 60 s of the running trial's 120 s, then two more
    assert footer.startswith("2 of 18 trials left; 1 running; 11m 00s elapsed; about 5m 00s left; ")
    assert "node-hours" in footer
    recorded = ProgressObserver(searched.spec, searched.folder).observe(searched.state, KNOBS, is_running=False)
    ended = draw(recorded, 200, None, time.time())
    assert len(ended) == 18 + 4
    assert ended[-1] == f"best so far: {recorded.best_text}"
    assert ended[-1].endswith(" s (recorded)")
    assert "node-hours" not in "\n".join(ended[-2:])


def test_the_phase_is_what_the_script_says_or_what_the_folder_shows(searched):
    progress = running(searched)
    [trial] = [trial for trial in progress.trials if trial.outcome is None]
    folder = attempt_folder(searched.trial_folder(trial.number), 2)
    folder.mkdir(parents=True)
    assert read_phase(searched.folder, replace(trial, handle=None)) == "waiting"
    assert read_phase(searched.folder, trial) == "submitted"
    queued = draw(progress, 200, 40, 1060.0, lambda number: f"queued: Resources \x1b[2J{number}")
    assert "queued: Resources 18, attempt 2" in "\n".join(queued)
    (folder / "stdout.log").touch()
    assert read_phase(searched.folder, trial) == "running"
    for phase, name in itertools.product(TrialPhase, (PHASE_FILE,)):
        (folder / name).write_text(f"{phase}\n")
        assert read_phase(searched.folder, trial) == phase.value
    for hostile in ("\x1b[2J", "timing " * 100_000, ""):
        (folder / PHASE_FILE).write_text(hostile)
        assert read_phase(searched.folder, trial) == "running"
    (folder / PHASE_FILE).unlink()
    (folder / PHASE_FILE).symlink_to("/dev/zero")
    assert read_phase(searched.folder, trial) == "running"
    (folder / "trace").mkdir()
    (folder / "trace" / "rank0.json.gz").touch()
    assert read_phase(searched.folder, trial) == "profiling"
    (folder / "ended.json").touch()
    assert read_phase(searched.folder, trial) == "evaluating"


def test_durations_in_words():
    assert [format_duration(s) for s in (-1, 0.4, 59, 192, 7500, 273_600)] == [
        *("0s", "0s", "59s"),
        *("3m 12s", "2h 05m", "3d 04h"),
    ]


def test_a_terminal_of_80_x_24_shows_the_running_trial_and_the_footer_to_the_end(project):
    (project / "launchers").mkdir(exist_ok=True)
    (project / "launchers" / "slow.py").write_text(SLOW)
    framework = {"name": "slow", "script": "slow.py", "runner": "process", "knobs": [], "rules": []}
    framework["knobs"] = [
        {"name": "tp", "choices": [1]},
        {"name": "dp", "choices": [1, 2, 4]},
        {"name": "micro_batch_size", "choices": [1, 2, 4, 8]},
        {"name": "activation_checkpointing", "choices": ["none", "full"]},
    ]
    (project / "launchers" / "slow.framework.yaml").write_text(json.dumps(framework))
    words = ("run", "-w", "tiny", "--framework", "slow", "--launcher", "local", "--use-fewer", "--keep-going")
    terminal = Terminal(*words, "--budget", "10", "--name", "live", folder=project)

    def shows(first: int) -> bool:
        """Whether the row of a running trial from `first` on is on the screen, and the footer."""
        lines = terminal.lines
        rows = [line for line in lines if line.split()[:1] and line.split()[0] in map(str, range(first, 11))]
        return any("timing" in row for row in rows) and any("trials left; 1 running;" in line for line in lines)

    lines = terminal.wait(lambda _: shows(7))
    assert any("crashed: no " in line for line in lines)
    assert not any("tp=" in line or "micro_batch_size=" in line for line in lines)
    terminal.resize(60, 16)
    lines = terminal.wait(lambda _: shows(9))
    assert all(cell_len(line) <= 60 for line in lines)
    assert sum("trials left" in line for line in lines) == 1
    assert terminal.finish() == 1
    assert b"\x1b]0;x" not in terminal.raw
    assert "continue: ccl-search resume live --budget 20" in terminal.lines


def test_a_process_without_an_output_prints_nothing(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    print_wrapped("ended: " + "word " * 100)
    assert not can_redraw()


def test_the_footer_says_what_the_llm_has_used(searched, monkeypatch):
    usage = Usage(input_tokens=12_000, output_tokens=300)
    turns = [LlmTurn(turn=n, cost=Cost(usage=usage, usd=0.041), text="t") for n in (1, 2)]
    run = searched
    monkeypatch.setattr(run.state, "reported", [*run.state.reported, *turns])
    progress = ProgressObserver(run.spec, run.folder).observe(run.state, KNOBS, is_running=True)
    shown = "\n".join(draw(progress, 120, 23, 1060.0))
    assert "LLM 24,600 tokens, $0.0820" in shown
