"""What a job leaves in place of its files is never waited for, read without bound, or a traceback."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from cclsearch.core.job_file import JobFileError, hash_job_file, parse_json, read_job_bytes, read_job_json, read_tail
from cclsearch.core.values import FailureKind, Model
from cclsearch.launch.collect import collect_end, collect_result
from cclsearch.launch.slurm.job_files import read_object
from cclsearch.tasks.training.contract import TrainingResult
from cclsearch.trace.files.run_log import read_run_log


def make_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the address of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def make_sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(30 << 30)


ODD: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a folder": Path.mkdir,
    "a socket": make_socket,
    "a symbolic link": lambda path: path.symlink_to("/dev/zero"),
    "32,212,254,720 bytes": make_sparse,
}


@pytest.mark.parametrize("what", ODD)
def test_what_is_not_a_small_regular_file_is_a_failure_of_the_trial_that_says_so(tmp_path, what):
    ODD[what](tmp_path / "result.json")
    found = collect_result(tmp_path, TrainingResult)
    assert (found.kind, what in found.message) == (FailureKind.CRASHED, True)
    assert hash_job_file(tmp_path / "result.json") is None
    assert read_object(tmp_path / "result.json") == {}
    assert read_run_log(tmp_path) is None


@pytest.mark.parametrize("what", ODD)
@pytest.mark.parametrize("name", ["failures/0.json", "exit_code", "stderr.log", "stdout.log"])
def test_odd_files_beside_a_missing_result_leave_the_end_that_the_launcher_saw(tmp_path, what, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    ODD[what](tmp_path / name)
    found = collect_end(tmp_path, exit_code=3)
    assert (found.kind, "exited with 3" in found.message) == (FailureKind.CRASHED, True)
    if name.startswith("failures"):
        assert f"0.json {'has' if 'bytes' in what else 'is'} {what}" in found.message


DEEP = "[" * 200_000
BAD_FAILURES = {
    '{"rank": Infinity, "time_ns": 1, "kind": "crashed", "message": "x"}': ": rank: Input should be a valid integer",
    '{"rank": 0, "time_ns": 1e400, "kind": "crashed", "message": "x"}': ": time_ns: Input should be a valid integer",
    '{"rank": 0, "time_ns": 1, "kind": "no_such_kind", "message": "x"}': ": kind: Input should be 'out_of_memory'",
    '{"rank": 0, "time_ns": 1, "kind": "crashed", "message": "\\ud800"}': " is not JSON: 'utf-8' codec can't encode",
    DEEP: " is not JSON: it is nested too deeply",
    '{"rank": true, "time_ns": 1, "kind": "crashed", "message": "x"}': ": rank: Input should be a valid integer (True)",
    "7": ": the file: Input should be a JSON object (7)",
    '{"rank": ' + "9" * 5000 + "}": " is not JSON",
}


@pytest.mark.parametrize("text", BAD_FAILURES, ids=range(len(BAD_FAILURES)))
def test_a_failure_of_a_rank_that_cannot_be_read_is_named_in_the_failure_of_the_trial(tmp_path, text):
    (tmp_path / "failures").mkdir()
    (tmp_path / "failures" / "0.json").write_text(text)
    found = collect_end(tmp_path, exit_code=1)
    assert f"failures/0.json{BAD_FAILURES[text]}" in found.message
    whole = {"rank": 1, "time_ns": 5, "kind": "out_of_memory", "message": "no memory left"}
    (tmp_path / "failures" / "1.json").write_text(json.dumps(whole))
    found = collect_end(tmp_path, exit_code=1)
    assert (found.kind, found.rank, found.message) == (FailureKind.OUT_OF_MEMORY, 1, "no memory left")


BAD_RESULTS = {
    DEEP: "is not JSON: it is nested too deeply",
    '{"status": "ok", "peak_memory_bytes": [1' + "0" * 400 + "]}": "is not JSON: int too large to convert to float",
    '{"status": "ok", "peak_memory_bytes": [1' + "0" * 30 + "]}": "peak_memory_bytes.0",
    '{"status": "ok", "world_size": 1e300}': "world_size",
    '{"status": "failed", "failure": {"stage": "run", "kind": "crashed", "message": "' + "x" * 5000 + '"}}': "xxx…",
    "\udcff\udcfe": "is not JSON: 'utf-8' codec can't decode",
}


@pytest.mark.parametrize("text", BAD_RESULTS, ids=range(len(BAD_RESULTS)))
def test_a_result_that_cannot_be_parsed_is_a_short_failure_that_says_why(tmp_path, text):
    (tmp_path / "result.json").write_bytes(text.encode(errors="surrogateescape"))
    found = collect_result(tmp_path, TrainingResult)
    assert (found.kind, BAD_RESULTS[text] in found.message) == (FailureKind.CRASHED, True)
    assert len(found.message) <= 1000


def test_a_whole_number_beyond_64_bits_is_a_float():
    assert parse_json(f"[{2**63 - 1}, {2**63}, -{2**70}]") == [2**63 - 1, float(2**63), float(-(2**70))]
    assert [type(value) for value in parse_json(f"[{2**63 - 1}, {2**63}]")] == [int, float]


def test_a_file_is_read_up_to_its_limit_and_not_beyond(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("[1, 2]")
    assert (read_job_bytes(path, 6), read_job_json(path, 6)) == (b"[1, 2]", [1, 2])
    assert (read_tail(path, 2), read_tail(path, 6), read_tail(path, 100)) == ("2]", "[1, 2]", "[1, 2]")
    with pytest.raises(JobFileError, match=r"a\.json has 6 bytes, more than the 5 allowed"):
        read_job_bytes(path, 5)


def test_a_result_of_more_than_64_mib_is_not_read(tmp_path):
    with (tmp_path / "result.json").open("wb") as file:
        file.truncate((64 << 20) + 1)
    found = collect_result(tmp_path, TrainingResult)
    assert found.message == "result.json has 67,108,865 bytes, more than the 67,108,864 allowed"


def test_a_record_that_a_job_replaced_by_a_fifo_is_a_missing_record(tmp_path):
    class Record(Model):
        pid: int

    os.mkfifo(tmp_path / "job.json")
    assert Record.read(tmp_path / "job.json") is None
    (tmp_path / "other.json").write_text('{"pid": 7}')
    assert Record.read(tmp_path / "other.json") == Record(pid=7)
