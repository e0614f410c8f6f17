"""Secrets in the logs of ended trials are masked beside the search; logs that still grow are left alone."""

from __future__ import annotations

import contextlib
import gzip
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cclsearch.core.text import plain
from cclsearch.launch.base import JobState, JobStatus
from cclsearch.run import log_masking
from cclsearch.run.log_masking import DONE_FILE, PIECE_BYTES, LogMasker, scrub_logs
from cclsearch.run.trial_folder import publish_attempt

SECRET = "hf_Zq3vT8mK1xW5bN7cR2dL9fGh4jPs6yAe"


def write_log(folder: Path, name: str = "stdout.log") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(f"HF_TOKEN {SECRET}\n")
    return folder / name


def mask(run: Path, *unfinished: tuple[int, int]) -> None:
    trials = [SimpleNamespace(number=number, attempt=attempt) for number, attempt in unfinished]
    masker = LogMasker(run)
    masker.add_ended(cast(Any, SimpleNamespace(unfinished=trials)))
    masker.finish(lambda: None)


def test_logs_of_ended_and_retried_attempts_are_masked_and_those_of_running_ones_are_not(tmp_path):
    trials = tmp_path / "trials"
    ended = [write_log(trials / "0001"), write_log(trials / "0001", "failures/0.json")]
    ended += [
        write_log(trials / "0002" / "attempts" / "1", "stderr-1.log"),
        write_log(trials / "0001" / "attempts" / "1"),
    ]
    running = write_log(trials / "0002" / "attempts" / "2")
    mask(tmp_path, (2, 2))
    assert [path for path in ended if SECRET in path.read_text()] == []
    assert SECRET in running.read_text()
    mask(tmp_path)
    assert SECRET not in running.read_text()
    assert len((tmp_path / DONE_FILE).read_text().splitlines()) == 5


def test_a_masked_log_is_not_read_again_unless_it_changed(tmp_path):
    log = write_log(tmp_path / "trials" / "0001")
    mask(tmp_path)
    first = log.stat()
    mask(tmp_path)
    assert os.path.samestat(log.stat(), first)
    with log.open("a") as file:
        file.write(SECRET)
    mask(tmp_path)
    assert SECRET not in log.read_text()


def test_links_and_fifos_in_place_of_logs_are_left_alone(tmp_path):
    outside = write_log(tmp_path / "outside")
    folder = tmp_path / "trials" / "0001"
    folder.mkdir(parents=True)
    (folder / "stdout.log").symlink_to(outside)
    os.mkfifo(folder / "stderr.log")
    mask(tmp_path)
    assert SECRET in outside.read_text()


def test_what_a_job_left_beside_its_log_is_neither_waited_for_nor_written_to(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("as it was")
    logs = [write_log(tmp_path / "trials" / f"000{number}") for number in (1, 2, 3)]
    places = [log.with_name(f".{log.name}.clean") for log in logs]
    places[0].symlink_to(outside)
    places[1].mkdir()
    os.mkfifo(places[2])
    reader = os.open(places[2], os.O_RDONLY | os.O_NONBLOCK)  # so that writing to it would not wait for ever
    try:
        mask(tmp_path)
        with contextlib.suppress(BlockingIOError):
            assert os.read(reader, 100) == b""
    finally:
        os.close(reader)
    assert outside.read_text() == "as it was"
    assert [SECRET in log.read_text() for log in logs] == [False] * 3


def test_a_key_that_begins_in_one_piece_of_a_log_and_ends_in_the_next_is_masked(tmp_path):
    part = "QyNTUxOQAAACBThXCzdeUgGFSkiVzA+f6i98MRUY5qZL4Z6K1VNcVVLAAAAJDrYtfb62LX"
    line = "step 7 loss 2.5\n"
    before = line * (PIECE_BYTES // len(line))
    key = f"-----BEGIN PRIVATE KEY-----\n{part}\n" + f"{part}\n" * 20 + "-----END PRIVATE KEY-----\n"
    (tmp_path / "stdout.log").write_text(before[: -len(line)] + key + line)
    scrub_logs(tmp_path)
    text = (tmp_path / "stdout.log").read_text()
    assert part not in text
    assert text.endswith(line)


@pytest.mark.parametrize("shift", [0, 1, 7, 14, 21, 35])
def test_secrets_at_the_end_of_a_piece_of_one_long_line_are_masked(shift, tmp_path):
    """A trace on one line: its piece ends in the middle of a secret, wherever that is."""
    field, mark = f'{{"token": "{SECRET}"}},', "abcdefghij-k1"
    line = "[" + " " * (2 * PIECE_BYTES - shift - 1) + field + f'{{"password": "{mark}"}}' + "]"
    (tmp_path / "rank0.json").write_text(line)
    scrub_logs(tmp_path)
    text = (tmp_path / "rank0.json").read_text()
    assert SECRET[3:12] not in text
    assert SECRET[-8:] not in text
    assert mark[-6:] not in text


def test_separators_of_lines_and_marks_of_direction_are_removed_from_text():
    assert plain("a\u2028b\u2029c\u202ed") == "abcd"


def test_publishing_moves_logs_that_are_masked_later(tmp_path):
    attempt = tmp_path / "trials" / "0001" / "attempts" / "1"
    write_log(attempt)
    publish_attempt(attempt.parent.parent, attempt, JobStatus(state=JobState.DONE))
    mask(tmp_path)
    assert SECRET not in (tmp_path / "trials" / "0001" / "stdout.log").read_text()


@pytest.mark.parametrize("what", ["fifo", "link", "folder"])
def test_what_lies_in_place_of_the_list_of_masked_logs_is_not_waited_for_and_logs_are_masked(what, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("as it was")
    log, done = write_log(tmp_path / "trials" / "0001"), tmp_path / DONE_FILE
    {"fifo": lambda: os.mkfifo(done), "link": lambda: done.symlink_to(outside), "folder": done.mkdir}[what]()
    mask(tmp_path)
    assert SECRET not in log.read_text()
    assert outside.read_text() == "as it was"


@pytest.mark.parametrize("call", ["os.fdopen", "pathlib.Path.chmod", "pathlib.Path.replace"])
@pytest.mark.parametrize("is_after", [False, True])
def test_a_kill_while_a_log_is_masked_leaves_no_secret_once_the_search_goes_on(call, is_after, tmp_path):
    folder = tmp_path / "trials" / "0001"
    log = write_log(folder)
    with log.open("a") as file:
        file.write("step 7 loss 2.5\n" * 1000)
    owner, name = call.rsplit(".", 1)
    program = f"""
import os, pathlib, signal, sys
from cclsearch.run.log_masking import scrub_logs
real = {call}
def killed(*arguments, **named):
    if {name == "fdopen"} and "wb" not in arguments:
        return real(*arguments, **named)
    if {is_after}:
        real(*arguments, **named)
    os.kill(os.getpid(), signal.SIGKILL)
{owner}.{name} = killed
scrub_logs(pathlib.Path(sys.argv[1]))
"""
    done = subprocess.run([sys.executable, "-c", program, str(folder)], check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [path.name for path in folder.iterdir() if path != log and SECRET in path.read_text()] == []
    for _ in range(2):
        mask(tmp_path)
        assert log.read_text() == "HF_TOKEN [secret]\n" + "step 7 loss 2.5\n" * 1000
        assert [path.name for path in folder.iterdir()] == ["stdout.log"]


def test_packed_traces_and_names_of_files_are_masked_and_files_behind_links_are_not(tmp_path):
    folder, outside = tmp_path / "trials" / "0001", write_log(tmp_path / "outside")
    trace = folder / "trace" / f"rank0-{SECRET}.json.gz"
    trace.parent.mkdir(parents=True)
    trace.write_bytes(gzip.compress(f'{{"env": {{"HF_TOKEN": "{SECRET}"}}, "traceEvents": []}}'.encode()))
    (folder / "failures").symlink_to(outside.parent)
    mask(tmp_path)
    left = list(trace.parent.iterdir())
    assert [path.name for path in left] == ["rank0-secret.json.gz"]
    assert gzip.decompress(left[0].read_bytes()) == b'{"env": {"HF_TOKEN": "[secret]"}, "traceEvents": []}'
    assert SECRET in outside.read_text()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_long_wait_for_the_masker_says_so_once_and_ends_if_it_is_stopped(is_stopped, tmp_path, monkeypatch):
    log = write_log(tmp_path / "trials" / "0001")
    may_go_on, told, seconds = threading.Event(), [], []
    monkeypatch.setattr(log_masking, "_WAIT_S", 0.01)
    monkeypatch.setattr(log_masking, "_LONG_WAIT_S", 0.01)
    real = log_masking._find_logs
    monkeypatch.setattr(log_masking, "_find_logs", lambda folder: may_go_on.wait(30) and real(folder))

    def wait() -> None:
        seconds.append(1)
        if len(seconds) == 5 and not is_stopped:
            may_go_on.set()

    masker = LogMasker(tmp_path)
    masker.add(log.parent)
    masker.finish(wait, tell=told.append, is_stopped=lambda: is_stopped and len(seconds) > 3)
    assert ["1 folder" in text and "resume" in text for text in told] == [True]
    assert (SECRET in log.read_text()) == is_stopped
    may_go_on.set()
    masker.finish(lambda: None)
    assert SECRET not in log.read_text()
