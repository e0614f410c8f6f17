"""Searches that are interrupted, and run scripts that fail."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from waiting import find_processes, wait_until

from cclsearch.cli import main
from cclsearch.core.values import FailureKind
from cclsearch.record.ledger import LEDGER_FILE
from cclsearch.run.folder import load_run

REPLAY = ["run", "--workload", "wl2", "--launcher", "replay"]


def start_search(project: Path, *command: str, **streams: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "cclsearch", *command], cwd=project, **streams)


def wait_for_event(ledger: Path, name: str) -> None:
    wait_until(lambda: ledger.exists() and f'"event":"{name}"'.encode() in ledger.read_bytes())


def test_an_interrupt_cancels_the_running_trial_and_resume_retries_it(project):
    write_framework(project, ["hang", "exception"])
    folder = project / "runs" / "r"
    process = start_search(
        project, *MINE, "--budget", "2", stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    try:
        wait_for_event(folder / LEDGER_FILE, "trial_submitted")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait(timeout=60)
    assert b"Traceback" not in err
    assert process.returncode == 1
    assert b"continue: ccl-search resume r" in out
    run = load_run(folder)
    assert run.status == "stopped"
    [unfinished] = run.state.unfinished
    assert unfinished.handle is None
    assert find_processes("r-t0001-a1") == []
    (project / "launchers" / "mine.py").write_text("raise ValueError('another script')")
    assert main(["resume", "r", "--quiet"]) == 1
    state = load_run(folder).state
    assert [t.outcome.failure.message for t in state.trials.values() if t.outcome and t.outcome.failure] == [
        "ValueError: another script"
    ] * 2


def test_a_search_stops_cleanly_when_its_output_is_closed(project):
    process = start_search(
        project, *REPLAY, "--budget", "60", "--name", "r", "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.readline()
    process.stdout.close()
    stderr = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=120) in (0, 1)
    assert b"Traceback" not in stderr
    run = load_run(project / "runs" / "r")
    assert run.status == "stopped"
    assert "the reader of the output has gone" in run.state.stopped.reason
    assert run.state.unfinished == [] or all(trial.handle is None for trial in run.state.unfinished)


FRAMEWORK = {
    "title": "a framework whose run script fails as asked",
    "script": "mine.py",
    "runner": "process",
    "knobs": [
        {"name": "tp", "choices": [4]},
        {"name": "dp", "choices": [1]},
        {"name": "pp", "choices": [1]},
        {"name": "micro_batch_size", "choices": [1]},
        {"name": "ending", "choices": ["no_result", "invalid_json", "signal", "exception", "hang"]},
    ],
}
SCRIPT = """
import os, signal, time
ending = os.environ["CCL_ENDING"]
if ending == "invalid_json":
    open(os.path.join(os.environ["CCL_TRIAL_DIR"], "result.json"), "w").write("{not json")
elif ending == "signal":
    os.kill(os.getpid(), signal.SIGSEGV)
elif ending == "exception":
    raise ValueError("the cause")
elif ending == "hang":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
"""
MINE = ["run", "--workload", "tiny", "--framework", "mine", "--launcher", "local", "--sampler", "grid", "--name", "r"]


def write_framework(project: Path, endings: list[str]) -> None:
    (project / "launchers").mkdir()
    knobs = [{**knob, "choices": endings} if knob["name"] == "ending" else knob for knob in FRAMEWORK["knobs"]]  # type: ignore
    (project / "launchers" / "mine.framework.yaml").write_text(yaml.safe_dump({**FRAMEWORK, "knobs": knobs}))
    (project / "launchers" / "mine.py").write_text(SCRIPT)


def test_each_failure_of_a_run_script_is_recorded_with_its_kind(project, capsys):
    write_framework(project, ["no_result", "invalid_json", "signal", "exception", "hang"])
    assert main([*MINE, "--budget", "5", "--timeout-min", "0.2"]) == 1
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert "continue: ccl-search resume r --budget 10" in captured.out
    trials = load_run(project / "runs" / "r").state.trials.values()
    failures = {str(t.config["ending"]): t.outcome.failure for t in trials if t.outcome and t.outcome.failure}
    expected = {
        "no_result": (FailureKind.CRASHED, "exited with 0 but wrote no result.json"),
        "invalid_json": (FailureKind.CRASHED, "result.json is not JSON"),
        "signal": (FailureKind.CRASHED, "killed by SIGSEGV"),
        "exception": (FailureKind.CRASHED, "ValueError: the cause"),
        "hang": (FailureKind.TIMEOUT, "no result after 12 s"),
    }
    assert set(failures) == set(expected)
    for ending, (kind, message) in expected.items():
        assert failures[ending].kind is kind, ending
        assert message in failures[ending].message
