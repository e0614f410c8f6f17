"""The ledger: appended events survive a kill, a full disk and an incomplete line."""

from __future__ import annotations

import errno
import json
import os
import zlib
from pathlib import Path

import pytest

from cclsearch.core.errors import DamagedLedger, UserError
from cclsearch.core.values import Config, Failure, FailureKind, Stage
from cclsearch.propose.agent.providers.cost import LlmLimits
from cclsearch.propose.events import (
    ArbiterMove,
    ArbiterPhase,
    ArbiterState,
    DecisionKind,
    ExpectedOutcome,
    LlmLimitsSet,
    LlmTurn,
    ReportedEvent,
    SubmittedConfig,
)
from cclsearch.record.event import (
    BadLine,
    ConfigsHeldBack,
    EndKind,
    Event,
    Note,
    ProposalRefused,
    RetryKind,
    SearchStarted,
    SearchStopped,
    SpaceGrown,
    TrialProposed,
    TrialRetried,
    encode_line,
    explain_bad_lines,
)
from cclsearch.record.ledger import LEDGER_FILE, Ledger, LedgerFollower, fold_ledger, read_events


def note(text: str) -> Note:
    return Note(time_s=1.0, topic="test", text=text)


def write(path: Path, *texts: str) -> None:
    ledger = Ledger(path)
    for text in texts:
        ledger.append(note(text))
    ledger.close()


def texts(path: Path) -> list[str]:
    return [event.text for event in read_events(path) if isinstance(event, Note)]


def test_events_come_back_in_order(tmp_path):
    path = tmp_path / "ledger.jsonl"
    write(path, "a", "b\nwith a newline", "ü")
    assert texts(path) == ["a", "b\nwith a newline", "ü"]


@pytest.mark.parametrize("cut", [1, 2, 10, 40])
def test_an_incomplete_last_line_is_ignored_and_cut_before_the_next_write(tmp_path, cut):
    path = tmp_path / "ledger.jsonl"
    write(path, "kept", "torn")
    data = path.read_bytes()
    path.write_bytes(data[:-cut])
    assert texts(path) == ["kept"]
    write(path, "after")
    assert texts(path) == ["kept", "after"]


def test_a_full_disk_leaves_the_ledger_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.append(note("before"))
    real = os.pwrite

    def write_20_bytes_once(fd: int, data: bytes, offset: int) -> int:
        if len(data) > 80:
            return real(fd, data[:20], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", write_20_bytes_once)
    with pytest.raises(OSError, match="No space"):
        ledger.append(note("x" * 15))
    monkeypatch.setattr(os, "pwrite", real)
    ledger.append(note("after"))
    ledger.close()
    assert texts(path) == ["before", "after"]


def bad_lines(path: Path) -> list[BadLine]:
    """Fold the ledger, which must warn about exactly the lines that it does not use."""
    with pytest.warns(DamagedLedger) as caught:
        found = fold_ledger(path).bad_lines
    assert [str(warning.message) for warning in caught] == [explain_bad_lines(path, found)]
    return found


def test_each_line_ends_with_the_checksum_of_the_bytes_before_it(tmp_path):
    path = tmp_path / "ledger.jsonl"
    write(path, "a", "ü")
    for line in path.read_bytes().splitlines():
        data, mark, end = line.rpartition(b',"crc":"')
        assert (mark, end) == (b',"crc":"', b'%08x"}' % zlib.crc32(data))
        assert list(json.loads(line))[-1] == "crc"


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (b'"text":"b"', b'"text":"c"', "line 2 (note): its checksum does not match"),
        (b',"crc":"', b',"crd":"', "line 2 (note): it has no checksum"),
        (b'"}\n{"event":"note","time_s":1.0,"text":"c"', b'"\n{"event":"note","time_s":1.0,"text":"c"', "no checksum"),
    ],
)
def test_a_changed_line_is_not_used_and_named_with_its_number(tmp_path, old, new, problem):
    path = tmp_path / "ledger.jsonl"
    write(path, "a", "b", "c")
    first, rest = path.read_bytes().split(b"\n", 1)
    assert old in rest
    path.write_bytes(first + b"\n" + rest.replace(old, new, 1))
    [line] = bad_lines(path)
    assert (line.number, line.trial) == (2, None)
    assert problem in line.describe()
    assert texts(path) == ["a", "c"]


def test_every_event_comes_back_as_it_was_written(tmp_path):
    submitted = SubmittedConfig(Config(tp=2), ExpectedOutcome({"step_time_s": 1.5}), rationale="why")
    failure = Failure(stage=Stage.RUN, kind=FailureKind.PREEMPTED, message="gone")
    events: list[Event] = [
        SearchStarted(time_s=1, run_id="r", engine_version="1", spec_sha256="0"),
        ConfigsHeldBack(time_s=1, num_configs=3, text="too large"),
        LlmTurn(time_s=2, turn=1, decision=DecisionKind.SUBMIT, submitted=(submitted,), beliefs={"pipeline": "slower"}),
        ArbiterMove(time_s=2, before=ArbiterPhase.SEEDS, after=ArbiterState(ArbiterPhase.LLM, 3)),
        LlmLimitsSet(time_s=3, limits=LlmLimits(max_usd=2.0)),
        ProposalRefused(time_s=3, proposer="llm", config=Config(tp=3), text="not in the search space"),
        SpaceGrown(time_s=4, choices={"tp": (1, 2, 4)}, space_sha256="1", space_size=9),
        TrialProposed(time_s=5, trial=1, config=Config(tp=2), proposer="llm", expects=submitted.expects),
        TrialRetried(time_s=6, trial=1, attempt=1, kind=RetryKind.FAILURE, reason="preempted", failure=failure),
        SearchStopped(time_s=7, kind=EndKind.SIGNAL, reason="stopped by SIGINT"),
    ]
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    for event in events:
        ledger.append(event)
    ledger.close()
    assert list(read_events(path)) == events
    state = fold_ledger(path)
    assert state.reported == [event for event in events if isinstance(event, ReportedEvent)]
    assert state.trials[1].retries == (events[8],)
    assert state.stopped == events[-1]


def test_a_ledger_of_a_newer_version_is_rejected_with_what_to_do(tmp_path):
    path = tmp_path / "ledger.jsonl"
    start = SearchStarted(time_s=0, run_id="r", engine_version="9", spec_sha256="0").model_dump(mode="json")
    path.write_text(json.dumps({**start, "ledger_version": 99, "unheard_of": 1}) + "\n")
    with pytest.raises(UserError, match=r"newer ccl-search.*upgrade"):
        list(read_events(path))


def test_a_folder_without_a_ledger_is_not_a_run_folder(tmp_path):
    with pytest.raises(UserError, match="is not a run folder"):
        list(read_events(tmp_path / "ledger.jsonl"))


def test_a_follower_reads_each_line_once_and_begins_anew_if_the_ledger_is_replaced(tmp_path):
    path = tmp_path / LEDGER_FILE
    write(path, "one", "two", "three")
    follower = LedgerFollower(path)
    first = next(iter(follower.read()))
    assert isinstance(first, Note)
    assert first.text == "one"
    assert [event.text for event in follower.read() if isinstance(event, Note)] == ["two", "three"]
    assert list(follower.read()) == []
    with path.open("ab") as file:
        file.write(encode_line(note("four"))[:-5])
    assert list(follower.read()) == [], "the line is not complete"
    with path.open("ab") as file:
        file.write(encode_line(note("four"))[-5:])
    assert [event.text for event in follower.read() if isinstance(event, Note)] == ["four"]
    assert [event.text for event in follower.state.reported] == ["one", "two", "three", "four"]
    path.unlink()
    write(path, "other")
    assert [event.text for event in follower.read() if isinstance(event, Note)] == ["other"]
    assert [event.text for event in follower.state.reported] == ["other"]
    path.unlink()
    with pytest.raises(UserError, match="has no ledger"):
        list(follower.read())
