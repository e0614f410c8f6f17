"""The ledger: appended events survive a kill, a full disk and an incomplete line."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from cclsearch.core.errors import UserError
from cclsearch.record.event import Note, SearchStarted
from cclsearch.record.ledger import Ledger, read_events


def note(text: str) -> Note:
    return Note(time_s=1.0, topic="test", text=text)


def write(path: Path, *texts: str) -> None:
    ledger = Ledger(path)
    for text in texts:
        ledger.append(note(text))
    ledger.close()


def texts(path: Path) -> list[str]:
    return [event.text for event in read_events(path) if isinstance(event, Note)]


def test_events_come_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, "a", "b\nwith a newline", "ü")
    assert texts(path) == ["a", "b\nwith a newline", "ü"]


@pytest.mark.parametrize("cut", [1, 2, 10, 40])
def test_an_incomplete_last_line_is_ignored_and_cut_before_the_next_write(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, "kept", "torn")
    data = path.read_bytes()
    path.write_bytes(data[:-cut])
    assert texts(path) == ["kept"]
    write(path, "after")
    assert texts(path) == ["kept", "after"]


def test_a_full_disk_leaves_the_ledger_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.append(note("before"))
    real = os.pwrite

    def full(fd: int, data: bytes, offset: int) -> int:
        if len(data) > 20:
            return real(fd, data[:20], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(
        os, "pwrite", lambda fd, data, at: real(fd, data[:20], at) if len(data) > 80 else full(fd, data, at)
    )
    with pytest.raises(OSError, match="No space"):
        ledger.append(note("x" * 50))
    monkeypatch.setattr(os, "pwrite", real)
    ledger.append(note("after"))
    ledger.close()
    assert texts(path) == ["before", "after"]


def test_a_damaged_line_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, "a", "b")
    path.write_bytes(path.read_bytes().replace(b'"text":"b"', b'"text":7'))
    with pytest.raises(UserError, match="line 2"):
        list(read_events(path))


def test_a_ledger_of_a_newer_version_is_rejected_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    start = SearchStarted(time_s=0, run_id="r", engine_version="9", spec_sha256="0").model_dump(mode="json")
    path.write_text(json.dumps({**start, "ledger_version": 99, "unheard_of": 1}) + "\n")
    with pytest.raises(UserError, match=r"newer ccl-search.*upgrade"):
        list(read_events(path))


def test_a_folder_without_a_ledger_is_not_a_run_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run folder"):
        list(read_events(tmp_path / "ledger.jsonl"))
