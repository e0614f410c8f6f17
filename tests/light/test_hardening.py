"""External faults: a full disk, planted secrets, hostile text. No trial is lost, no secret leaks."""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import run_command
from paths import ROOT

from cclsearch.cli import main
from cclsearch.loop.loop import run_search
from cclsearch.loop.session import Changes, begin_or_resume, open_session
from cclsearch.record.event import TrialFinished
from cclsearch.record.ledger import LEDGER_FILE, read_events
from cclsearch.record.writer import RunWriter
from cclsearch.run.log_masking import scrub_logs

RECORDING = ROOT / "workloads" / "recordings" / "nanotron-8b-2n"
SEARCH = ["run", "--workload", "wl2", "--launcher", "replay", "--name", "r", "--quiet"]
KEYS = {
    "ANTHROPIC_API_KEY": "sk-ant-planted-0123456789abcdef",
    "MY_SERVICE_TOKEN": "planted-token-value-42",
    "DB_PASSWORD": "planted-pass-word",
}


def finished(folder: Path) -> list[int]:
    return [event.trial for event in read_events(folder / LEDGER_FILE) if isinstance(event, TrialFinished)]


def run_on_a_full_disk(project: Path, *words: str, max_bytes: int) -> str:
    """Run a command whose files cannot grow beyond `max_bytes`; it must end with one line, which is returned."""
    done = run_command(*words, cwd=project, max_file_bytes=max_bytes)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    return done.stderr


@pytest.mark.parametrize("max_bytes", [9_000, 33_333])
def test_a_full_disk_stops_the_search_with_one_line_and_resume_continues(project, max_bytes):
    error = run_on_a_full_disk(project, *SEARCH, "--budget", "30", max_bytes=max_bytes)
    assert "every finished trial is kept" in error
    before = finished(project / "runs" / "r")
    assert main(["resume", "r", "--quiet"]) == 0
    after = finished(project / "runs" / "r")
    assert after[: len(before)] == before
    assert sorted(after) == list(range(1, 31))


def test_resume_on_a_full_disk_fails_with_one_line(project):
    assert main([*SEARCH, "--budget", "2"]) == 0
    max_bytes = (project / "runs" / "r" / LEDGER_FILE).stat().st_size + 20
    resume = ["resume", "r", "--budget", "4", "--quiet"]
    assert "every finished trial is kept" in run_on_a_full_disk(project, *resume, max_bytes=max_bytes)
    assert main(resume) == 0
    assert finished(project / "runs" / "r") == [1, 2, 3, 4]


@pytest.mark.parametrize("form", ["csv", "parquet", "optuna", "ccl-bench", "report"])
def test_a_full_disk_leaves_no_incomplete_output(project, form):
    assert main([*SEARCH, "--budget", "2"]) == 0
    before = set(project.rglob("*"))
    arguments = ["report", "r", "--no-png"] if form == "report" else ["export", "r", "--to", form]
    assert "cannot write" in run_on_a_full_disk(project, *arguments, max_bytes=400)
    assert set(project.rglob("*")) - before <= {project / "runs" / "r" / "ccl-bench"}
    assert main(arguments) == 0, "it works once there is space"


def test_a_night_on_a_full_disk_ends_in_one_line_and_runs_once_there_is_space(project):
    jobs = "jobs: [{workload: wl2, launcher: replay, name: a, budget: {trials: 4}}]"
    (project / "nightly.yaml").write_text(jobs)
    night = ["nightly", "nightly.yaml", "--once"]
    assert "cannot" in run_on_a_full_disk(project, *night, max_bytes=100)
    assert main(night) == 0


def test_a_search_whose_ledger_was_lost_does_not_run_its_trials_again(project, cli):
    assert main([*SEARCH, "--budget", "3"]) == 0
    ledger = project / "runs" / "r" / LEDGER_FILE
    kept, results = ledger.read_bytes(), everything_under(project / "runs" / "r" / "trials")
    for left in (None, kept[:40]):
        ledger.unlink(missing_ok=True)
        if left is not None:
            ledger.write_bytes(left)
        assert "restore that file" in cli.err(["resume", "r"])
    ledger.write_bytes(kept)
    assert main(["resume", "r", "--budget", "4", "--quiet"]) == 0
    assert finished(project / "runs" / "r") == [1, 2, 3, 4]
    assert everything_under(project / "runs" / "r" / "trials").startswith(results[:200])


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE, errno.ENOSPC])
def test_a_failing_file_system_gives_one_line(project, number, monkeypatch, cli):
    assert main([*SEARCH, "--budget", "3"]) == 0
    real = os.open

    def failing(path: Any, *arguments: Any, **more: Any) -> int:
        if Path(path).name == "result.json":
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *arguments, **more)

    monkeypatch.setattr(os, "open", failing)
    [line] = cli.err(["admit", "r"]).splitlines()
    assert "result.json" in line
    assert os.strerror(number) in line


def test_a_clock_that_jumps_uses_up_no_hours(project):
    assert main([*SEARCH, "--budget", "1", "--max-hours", "1"]) == 0
    run = project / "runs" / "r"
    jumps = itertools.cycle((0.0, 172_800.0, -172_800.0))
    session = replace(open_session(run), now_s=lambda: time.time() + next(jumps))
    with RunWriter(run) as writer:
        begin_or_resume(writer, session, Changes(budget=4))
        run_search(writer, session)
        assert writer.state.ended.reason == "the budget is used up"
    assert finished(run) == [1, 2, 3, 4]


def everything_under(folder: Path) -> str:
    return "\n".join(p.read_bytes().decode("utf-8", "replace") for p in sorted(folder.rglob("*")) if p.is_file())


@pytest.fixture
def landscape(project: Path) -> Callable[..., Path]:
    """Return a function that writes the recording with other fields of its card, and with a first knob `kernel`."""

    def write(kernels: Sequence[str] = (), **fields: str) -> Path:
        folder = project / "landscape"
        folder.mkdir()
        card = yaml.safe_load((RECORDING / "card.yaml").read_text())
        (folder / "card.yaml").write_text(yaml.safe_dump(card | fields))
        header, *rows = (RECORDING / "trials.csv").read_text().splitlines()
        if kernels:
            header, rows = f"kernel,{header}", [f'"{kernels[n % 2]}",{row}' for n, row in enumerate(rows)]
        (folder / "trials.csv").write_text("\n".join([header, *rows]) + "\n")
        return folder

    return write


def test_planted_secrets_do_not_appear_in_any_output(project, landscape, monkeypatch, capsys):
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    folder = landscape(
        description=f"key {KEYS['ANTHROPIC_API_KEY']}",
        source=f"https://user:{KEYS['DB_PASSWORD']}@host.example/x {KEYS['MY_SERVICE_TOKEN']}",
    )
    assert main([*SEARCH[:-1], "--recording", str(folder), "--budget", "4"]) == 0
    for command in ("report r", "status r", "show r 1"):
        assert main(command.split()) == 0
    shown = capsys.readouterr()
    held = everything_under(project / "runs") + shown.out + shown.err
    assert [name for name, value in KEYS.items() if value in held] == []


def test_a_secret_in_a_job_log_is_masked_when_the_trial_finishes(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_SERVICE_TOKEN", KEYS["MY_SERVICE_TOKEN"])
    (tmp_path / "stdout.log").write_bytes(b"as it is \xff\n" * 3)
    (tmp_path / "stderr.log").write_text(f"a {KEYS['MY_SERVICE_TOKEN']} b\n{KEYS['ANTHROPIC_API_KEY']}\nlast")
    scrub_logs(tmp_path)
    assert (tmp_path / "stdout.log").read_bytes() == b"as it is \xff\n" * 3
    assert (tmp_path / "stderr.log").read_text() == "a [secret] b\n[secret]\nlast"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stderr.log", "stdout.log"]


HOSTILE = (
    "\x1b]0;title\x07\x1b[2J<script>alert(1)</script>$(touch owned)`touch owned`;touch owned;../../../etc \u202etxt"
)


def test_hostile_text_in_a_recording_is_shown_as_text(project, landscape, cli):
    kernels = [HOSTILE.replace("\x1b", "").replace("\x07", "").replace(",", ""), "plain"]
    folder = landscape(kernels, source=HOSTILE, description=HOSTILE)
    assert main([*SEARCH[:-1], "--recording", str(folder), "--budget", "6"]) == 0
    assert main(["status", "r"]) == 0
    shown = cli.out(["report", "r"])
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert list(project.rglob("owned")) == []
    assert "<script>alert(1)" not in (project / "runs" / "r" / "report.html").read_text()


def test_a_run_folder_left_empty_by_a_kill_is_reused(project, cli):
    folder = project / "runs" / "r"
    folder.mkdir(parents=True)
    (folder / ".search.yaml.torn").write_text("schema_ver")
    assert main([*SEARCH, "--budget", "2"]) == 0
    assert "exists already" in cli.err([*SEARCH, "--budget", "2"])
