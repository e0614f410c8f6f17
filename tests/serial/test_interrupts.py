"""A search that is interrupted, or whose output is closed: it cancels its jobs and can be resumed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from test_run_script_failures import MINE, write_framework

from cclsearch.cli import main
from cclsearch.record.ledger import LEDGER_FILE
from cclsearch.run.folder import load_run

REPLAY = ["run", "--workload", "wl2", "--launcher", "replay"]


def start_search(project: Path, *command: str, **streams: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "cclsearch", *command], cwd=project, **streams)


def wait_for_event(ledger: Path, name: str) -> None:
    deadline = time.monotonic() + 120
    while not (ledger.exists() and f'"event":"{name}"'.encode() in ledger.read_bytes()):
        assert time.monotonic() < deadline, f"the ledger has no event {name} after 120 s"
        time.sleep(0.05)


def test_an_interrupt_cancels_the_running_trial_and_resume_retries_it(project: Path) -> None:
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


def find_processes(job_name: str) -> list[str]:
    """Return the processes whose environment contains that job's name."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"CCL_JOB_NAME={job_name}\0".encode() in path.read_bytes() + b"\0" and str(path) not in found:
                found.append(str(path))
        except OSError:
            continue
    return found


def test_a_search_stops_cleanly_when_its_output_is_closed(project: Path) -> None:
    process = start_search(
        project, *REPLAY, "--budget", "60", "--name", "r", "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    stderr = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=120) in (0, 1)
    assert b"Traceback" not in stderr
    run = load_run(project / "runs" / "r")
    assert run.status == "stopped"
    assert run.state.stopped is not None
    assert "the reader of the output has gone" in run.state.stopped.reason
    assert run.state.unfinished == [] or all(trial.handle is None for trial in run.state.unfinished)
