"""A ledger with damaged lines: every other line is used, every command works, and nothing ends in a traceback."""

from __future__ import annotations

import contextlib
import html
import json
import math
import os
import random
import shutil
import sys
import threading
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paths import TESTS

from cclsearch.cli import main
from cclsearch.core.errors import DamagedLedger, UserError
from cclsearch.core.values import Config, Provenance
from cclsearch.propose.base import ExpectedOutcome
from cclsearch.record.event import (
    EVENT,
    LEDGER_VERSION,
    Event,
    Note,
    SearchResumed,
    SearchStarted,
    TrialFinished,
    TrialProposed,
    decode_line,
    encode_line,
    has_checksum,
)
from cclsearch.record.ledger import LEDGER_FILE, Ledger, fold_ledger, read_events
from cclsearch.record.state import RunState
from cclsearch.record.writer import RunWriter
from cclsearch.scoring.outcome import Admission, Outcome

RECORDED = TESTS / "recorded" / "runs"
LARGE = 10 * 2**20


def fold(path: Path) -> RunState:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamagedLedger)
        return fold_ledger(path)


def sign(data: dict[str, Any]) -> bytes:
    """The line of an event with a right checksum, whatever the event."""
    data.pop("crc", None)
    body = json.dumps(data).encode()[:-1]
    return body + b',"crc":"%08x"}\n' % zlib.crc32(body)


def leaves(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(leaf for key, value in items for leaf in leaves(value, (*path, key)))]


def put(data: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = value


START = SearchStarted(time_s=1, run_id="r", engine_version="1", spec_sha256="0")


def propose(number: int, tp: int) -> TrialProposed:
    return TrialProposed(time_s=1, trial=number, config=Config(tp=tp), proposer="random")


def end(number: int, loss: float) -> TrialFinished:
    admitted = Admission(admitted=True, verdicts=())
    outcome = Outcome(provenance=Provenance.MEASURED, loss=loss, admission=admitted)
    return TrialFinished(time_s=2, trial=number, attempt=1, outcome=outcome)


ODD_VALUES = [
    *(None, True, -1, 0, 10**9, 10**30, 1e308, 5e-324, math.inf, math.nan),
    *("", "x" * 300, "\ud800", [], {}, [[[]]]),
]


def spoil_bytes(line: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(line) - 1)
    return line[:at] + bytes([rng.choice(b'\x00"{}[]:,9azZ\xff'.replace(line[at : at + 1], b""))]) + line[at + 1 :]


def spoil_field(line: bytes, rng: random.Random) -> bytes:
    data = json.loads(line)
    put(data, rng.choice(leaves(data)[1:]), rng.choice(ODD_VALUES))
    return sign(data)


def spoil_whole(line: bytes, rng: random.Random) -> bytes:
    return rng.choice(
        [b"\n", b"[" * 100_000 + b"\n", b"x" * LARGE + b"\n", line[: len(line) // 2] + b"\n", b"", line * 2]
    )


def is_newer(line: bytes) -> bool:
    """Whether the line has a right checksum and says that a newer version wrote it."""
    with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError):
        version = json.loads(line)["ledger_version"]
        return has_checksum(line) and type(version) is int and version > LEDGER_VERSION
    return False


@pytest.mark.parametrize("spoil", [spoil_bytes, spoil_field, spoil_whole], ids=["a byte", "a field", "the line"])
@pytest.mark.parametrize("ledger", sorted(RECORDED.rglob(LEDGER_FILE)), ids=lambda path: path.parent.name)
def test_one_spoiled_line_costs_at_most_its_own_trial(tmp_path, ledger, spoil):
    """A sample of the lines of each ledger; a spoiled field gets a right checksum, as a bug of ours would write it."""
    rng = random.Random(ledger.parent.name)
    lines = [encode_line(event) for event in read_events(ledger)]
    before, path = fold(ledger), tmp_path / LEDGER_FILE
    for index in sorted(rng.sample(range(len(lines)), min(6, len(lines)))):
        line = lines[index]
        spoiled = spoil(line, rng)
        path.write_bytes(b"".join([*lines[:index], spoiled, *lines[index + 1 :]]))
        if is_newer(spoiled):
            with pytest.raises(UserError, match="newer ccl-search"):
                fold(path)
            continue
        state = fold(path)
        trials = {number: trial for number, trial in state.trials.items() if number in before.trials}
        changed = [number for number, trial in before.trials.items() if trials.get(number) != trial]
        assert len(changed) <= 2, "its own trial, and the one whose number a changed number is now"
        assert sum(number not in trials for number in before.trials) <= 1
        assert list(state.trials.observe()) == list(state.trials.observe())
        assert state.best is None or state.best.loss is not None
        event = decode_line(line)
        if spoil is spoil_bytes and not isinstance(event, TrialProposed):
            assert [bad.number for bad in state.bad_lines] == [index + 1]


def test_no_event_holds_a_number_that_json_does_not_have():
    """So no derived figure can make a line unreadable."""
    outcome = {"provenance": "measured", "metrics": {"power_w": 1.0}}
    finished = {"event": "trial_finished", "time_s": 1.0, "trial": 1, "attempt": 1, "outcome": outcome}
    assert isinstance(EVENT.validate_python(finished), TrialFinished)
    for path in [("time_s",), ("outcome", "metrics", "power_w"), ("outcome", "loss"), ("outcome", "spread")]:
        for value in (math.inf, -math.inf, math.nan):
            spoiled = json.loads(json.dumps(finished))
            put(spoiled, path, value)
            with pytest.raises(ValueError, match="finite number"):
                EVENT.validate_python(spoiled)


def test_an_event_that_would_be_read_as_another_one_is_not_written(tmp_path):
    ledger = Ledger(tmp_path / LEDGER_FILE)
    good = Outcome(provenance=Provenance.MEASURED, metrics={"power_w": 1.0})
    for changes in ({"metrics": {"power_w": math.inf}}, {"loss": math.inf}, {"spread": math.nan}):
        bad = TrialFinished(trial=1, attempt=1, outcome=good).model_copy(
            update={"outcome": good.model_copy(update=changes)}
        )
        with pytest.raises(ValueError, match="would not be read"):
            ledger.append(bad)
    ledger.append(Note(topic="t", text="after"))
    ledger.close()
    assert [event.event for event in read_events(tmp_path / LEDGER_FILE)] == ["note"]


def test_expected_figures_that_are_not_finite_are_left_out():
    expects = ExpectedOutcome({"step_time_s": math.inf, "mfu": 0.4}, fits=math.nan)
    assert (expects.metrics, expects.fits) == ({"mfu": 0.4}, None)


def test_a_trial_whose_proposal_is_damaged_is_left_out_and_its_number_is_not_used_again(tmp_path):
    path = tmp_path / LEDGER_FILE
    events = [START, *(propose(n, n) for n in (1, 2, 3)), *(end(n, 1.0) for n in (1, 2, 3))]
    lines = [encode_line(event) for event in events]
    lines[3] = lines[3].replace(b"random", b"rAndom")
    path.write_bytes(b"".join(lines))
    with pytest.warns(DamagedLedger) as caught:
        state = fold_ledger(path)
    assert (list(state.trials), state.highest_trial) == ([1, 2], 3)
    assert str(caught[0].message).endswith(
        "2 lines are not used, all others are: line 4 (trial_proposed of trial 3): its checksum does not match, so it"
        " was changed after it was written; line 7 (trial_finished of trial 3): it is about trial 3, whose proposal is"
        " missing"
    )


def test_a_line_of_more_than_64_mib_is_left_out_and_the_others_are_read(tmp_path):
    path = tmp_path / LEDGER_FILE
    with path.open("wb") as file:
        file.truncate((64 << 20) + 5)
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + encode_line(Note(topic="t", text="after")))
    state = fold(path)
    assert [event.text for event in state.reported] == ["after"]
    assert [line.describe() for line in state.bad_lines] == [
        "line 1: it has 67,108,870 bytes, more than the 67,108,864 allowed"
    ]


@pytest.mark.parametrize("size", [1, 65_535, 65_536, 65_537, 200_000])
def test_a_torn_line_of_any_length_is_cut_and_nothing_before_it(tmp_path, size):
    path = tmp_path / LEDGER_FILE
    line = encode_line(Note(topic="t", text="kept"))
    for kept in (line, b""):
        path.write_bytes(kept + b"x" * size)
        Ledger(path).close()
        assert path.read_bytes() == kept


def test_a_fifo_in_place_of_the_ledger_is_refused_and_not_waited_for(tmp_path):
    path = tmp_path / LEDGER_FILE
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    end = threading.Timer(0.5, os.close, [writer])  # if a reader waited for a line, this would end the wait
    end.start()
    with pytest.raises(UserError, match="is not a regular file"):
        fold_ledger(path)
    end.join()


EDITED: dict[str, Callable[[bytes], bytes]] = {
    "CRLF": lambda data: data.replace(b"\n", b"\r\n"),
    "byte order mark": lambda data: b"\xef\xbb\xbf" + data,
    "both": lambda data: b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n"),
}


@pytest.mark.parametrize("edit", EDITED)
def test_a_ledger_that_an_editor_on_windows_saved_is_read_in_full_and_continued(tmp_path, edit):
    path = tmp_path / LEDGER_FILE
    path.write_bytes(EDITED[edit](b"".join(map(encode_line, (START, propose(1, 1), propose(2, 2))))))
    ledger = Ledger(path)
    ledger.append(Note(topic="t", text="after"))
    ledger.close()
    state = fold_ledger(path)
    assert (state.bad_lines, state.run_id) == ([], "r")
    assert [trial.config for trial in state.trials.values()] == [Config(tp=1), Config(tp=2)]
    assert [event.event for event in read_events(path)][-1] == "note"


@pytest.mark.parametrize("name", [LEDGER_FILE, "search.yaml", "lock"])
@pytest.mark.parametrize("odd", ["a link to itself", "a FIFO", "a link to a device", "UTF-16"])
def test_an_odd_file_of_a_run_is_refused_in_one_line_or_replaced_and_never_waited_for(damaged, cli, name, odd):
    path = damaged.parent / name
    text = path.read_text() if path.exists() else "{}"
    path.unlink(missing_ok=True)
    if odd == "a FIFO":
        os.mkfifo(path)
    elif odd == "UTF-16":
        path.write_bytes(text.encode("utf-16"))
    else:
        path.symlink_to(name if odd == "a link to itself" else "/dev/zero")
    os.utime(path, (0, 0), follow_symlinks=False)
    if name == "lock":
        assert main(["status", RUN]) == 0
        with pytest.warns(DamagedLedger), RunWriter(damaged.parent):
            assert path.is_file()
        return
    for command in ("status", "resume"):
        [line] = cli.err([command, RUN]).splitlines()
        assert name in line
        assert any(word in line for word in ("is not a regular file", "symbolic links", "UTF-16", "must be UTF-8"))


CONTESTED = "trial 1 was proposed twice, and this may be about either configuration"
MERGED: dict[str, tuple[list[Event], dict[int, float | None], list[str]]] = {
    "an end again": ([START, propose(1, 1), end(1, 2.0), end(1, 2.0)], {1: 2.0}, ["trial 1 had ended before"]),
    "another end": ([START, propose(1, 1), end(1, 2.0), end(1, 1.0)], {1: 2.0}, ["trial 1 had ended before"]),
    "one copy after the other": (
        [START, propose(1, 1), end(1, 2.0), propose(1, 4), end(1, 0.5)],
        {1: 2.0},
        ["trial 1 was proposed before", "trial 1 had ended before"],
    ),
    "by time": (
        [START, propose(1, 1), propose(1, 4), end(1, 0.5), end(1, 2.0), propose(2, 2), end(2, 3.0)],
        {1: None, 2: 3.0},
        ["trial 1 was proposed before", CONTESTED, CONTESTED],
    ),
    "by time, and resumed": (
        [START, propose(1, 1), propose(1, 4), end(1, 0.5), SearchResumed(engine_version="1", budget=9), end(1, 2.0)],
        {1: 2.0},
        ["trial 1 was proposed before", CONTESTED],
    ),
    "the same proposal twice": (
        [START, propose(1, 1), propose(1, 1), end(1, 2.0)],
        {1: 2.0},
        ["trial 1 was proposed before"],
    ),
    "in another order": (
        [START, end(1, 2.0), propose(1, 1)],
        {1: None},
        ["it is about trial 1, whose proposal is missing"],
    ),
    "another search": (
        [START, START.model_copy(update={"run_id": "other"}), propose(1, 1), end(1, 2.0)],
        {1: 2.0},
        ["the search 'r' began before"],
    ),
}


@pytest.mark.parametrize("merged", MERGED)
def test_no_event_of_merged_ledgers_changes_what_a_trial_was_or_how_it_ended(tmp_path, merged):
    """Copies of a run that were continued separately, and whose ledgers git or rsync put together."""
    path = tmp_path / LEDGER_FILE
    events, losses, problems = MERGED[merged]
    path.write_bytes(b"".join(map(encode_line, events)))
    state = fold(path)
    ends = {number: trial.outcome and trial.outcome.loss for number, trial in state.trials.items()}
    assert (ends, [line.problem for line in state.bad_lines]) == (losses, problems)
    assert [number for number, loss in losses.items() if loss is None] == [trial.number for trial in state.unfinished]
    assert (state.run_id, state.num_spent, state.trials[1].config) == ("r", len(losses), Config(tp=1))


@pytest.fixture
def damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with the recorded run `measured`, one line of its ledger spoiled: the end of its last trial."""
    shutil.copytree(RECORDED / RUN, tmp_path / "runs" / RUN)
    path = tmp_path / "runs" / RUN / LEDGER_FILE
    (tmp_path / "ccl-search.yaml").write_text("")
    monkeypatch.chdir(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    last = max(index for index, line in enumerate(lines) if b'"trial_finished"' in line)
    lines[last] = lines[last].replace(b'"attempt":', b'"attempt":"x",  "was":')
    path.write_bytes(b"".join(lines))
    return path


RUN = "measured"
OF_ONE_RUN = [f"status {RUN} --json", f"best {RUN} --json", f"show {RUN} 1", f"admit {RUN}", f"export {RUN} --to csv"]


@pytest.mark.parametrize("command", ["status", f"status {RUN}", *OF_ONE_RUN, f"report {RUN}"])
def test_every_command_uses_what_remains_and_says_once_what_is_missing(damaged, capsys, command):
    before = damaged.read_bytes()
    assert main(command.split()) in (0, 1)
    out, err = capsys.readouterr()
    assert err.count("line is not used") == 1, (out, err)
    assert "trial_finished of trial" in err
    assert "Traceback" not in out + err
    assert damaged.read_bytes() == before
    assert sys.exc_info() == (None, None, None)


IN_OUTPUT = [f"status {RUN} --json", "status --json", f"show {RUN} 1 --json", f"pareto {RUN} --json"]


@pytest.mark.parametrize("command", [*IN_OUTPUT, f"report {RUN}", f"pareto {RUN}"])
def test_what_a_person_or_a_program_reads_later_names_the_lines_as_the_terminal_does(damaged, capsys, command):
    assert main(command.split()) == 0
    out, err = capsys.readouterr()
    line = err.partition(": ")[2].strip().replace(str(damaged.parent.parent) + "/", "")
    assert line.startswith(f"'{RUN}/ledger.jsonl': 1 line is not used, all others are: line ")
    pages = [path.read_text() for path in damaged.parent.glob("*.html")]
    assert line in html.unescape(pages[0]) if pages else json.dumps(line)[1:-1] in out
