"""Following a search from another terminal, and what people add to it: `watch`, `logs`, `tag`, `note`."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from terminals import Terminal

from cclsearch.cli import main
from cclsearch.record.ledger import LEDGER_FILE
from cclsearch.record.lock import FolderLock
from cclsearch.run.annotations import ANNOTATIONS_FILE, MAX_NOTE, read_annotations
from cclsearch.run.folder import load_run
from cclsearch.run.trial_folder import attempt_folder

SECRET = "sk-ant-" + "api03-" + "q8Zr5Kx2Wm7Tn4Vb9Yc3Lp6Hd1Js0Gf" * 2


@pytest.fixture
def searched(project: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The folder of a recorded search of 3 trials."""
    assert main(["run", "-w", "wl2", "--launcher", "replay", "--budget", "3", "--name", "r", "--quiet"]) == 0
    capsys.readouterr()
    return project / "runs" / "r"


@pytest.fixture
def unfinished(searched: Path) -> Path:
    """The same search as it was while trial 3 ran; it has written to its attempt's folder."""
    ledger = searched / LEDGER_FILE
    lines = ledger.read_text().splitlines(keepends=True)
    end = next(n for n, line in enumerate(lines) if '"trial_finished"' in line and '"trial":3' in line)
    ledger.write_text("".join(lines[:end]))
    folder = attempt_folder(searched / "trials" / "0003", 1)
    folder.mkdir(parents=True)
    (folder / "stdout.log").write_text(f"step 1\n[rank1]: loss 2 \x1b[2J\nOPENAI_API_KEY={SECRET}\n")
    return searched


def test_tags_and_notes_are_kept_beside_the_ledger_while_a_search_has_the_lock(searched, cli):
    ledger = (searched / LEDGER_FILE).read_bytes()
    with FolderLock(searched):
        assert main(["tag", "r", "paper", "h100", "paper"]) == 0
        assert main(["note", "r", "after", "the driver update"]) == 0
        assert main(["note", "r", "2", f"slow link \x1b[2J {SECRET}"]) == 0
    assert main(["tag", "r", "h100", "--remove"]) == 0
    assert (searched / LEDGER_FILE).read_bytes() == ledger
    assert SECRET not in (searched / ANNOTATIONS_FILE).read_text()
    shown = cli.out(["status", "r"]).splitlines()
    assert shown[1:4] == ["tags: paper", "note: after the driver update", "note on trial 2: slow link [secret]"]
    assert cli.out(["status"]).rstrip().endswith("[paper]")
    assert cli.json(["tag", "r", "--json"]) == ["paper"]
    assert main(["report", "r", "--no-png"]) == 0
    page = (searched / "report.html").read_text()
    assert "paper" in page
    assert "slow link [secret]" in page
    assert main(["run", "-w", "wl2", "--launcher", "replay", "--budget", "1", "--name", "s", "--quiet"]) == 0
    assert main(["report", "--all", "--no-png", "--out", "all.html"]) == 0
    assert "r [paper]" in Path("all.html").read_text()


def test_lines_that_are_no_annotation_are_left_out_and_a_torn_one_spoils_no_other(searched):
    assert main(["tag", "r", "one"]) == 0
    path = searched / ANNOTATIONS_FILE
    hostile = ["[]", "{", '{"kind":"tag","text":"\\u001b[2J","time_s":1}', '{"kind":"no","text":"x","time_s":1}']
    path.write_text(path.read_text() + "\n".join(hostile) + '\n{"kind":"tag","text":"to')
    assert main(["tag", "r", "two"]) == 0
    assert read_annotations(searched).tags == ("one", "two")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tag r a/b", "'a/b' is not a tag"),
        ("tag r --remove", "TAG is missing"),
        ("tag r x --remove", "the run has no tag 'x'; its tags: none"),
        (f"tag r {SECRET[:38]}", "looks like a secret"),
        ("note r 9 text", "there is no trial 9"),
        ("note r 2", "TEXT is missing"),
        (f"note r {'x' * (MAX_NOTE + 1)}", "more than the 2,000 allowed"),
        ("logs r 9", "there is no trial 9"),
        ("logs r 1", "trial 1 has no stdout.log: its figures are recorded, nothing ran"),
        ("logs r 1 --stderr -f", "trial 1 has no stderr.log"),
    ],
)
def test_a_mistake_writes_nothing(line, message, searched, cli):
    assert message in cli.err(line.split())
    assert not (searched / ANNOTATIONS_FILE).exists()


def test_logs_are_made_plain_masked_and_filtered_by_rank(unfinished, cli):
    assert cli.out(["logs", "r", "3"]) == "step 1\n[rank1]: loss 2 \nOPENAI_API_KEY=[secret]\n"
    assert cli.out(["logs", "r", "3", "--rank", "1"]) == "[rank1]: loss 2 \n"
    assert "nothing of rank 7" in cli.err(["logs", "r", "3", "--rank", "7"], 0)
    log = attempt_folder(unfinished / "trials" / "0003", 1) / "stdout.log"
    log.unlink()
    log.symlink_to("/etc/passwd")
    assert "symbolic link" in cli.err(["logs", "r", "3"])


def test_logs_follow_a_trial_until_its_search_no_longer_runs(unfinished, capsys):
    log = attempt_folder(unfinished / "trials" / "0003", 1) / "stdout.log"
    lock = FolderLock(unfinished)
    lock.__enter__()

    def write_more() -> None:
        time.sleep(0.8)
        with log.open("a") as file:
            file.write("step 2\nst")
            file.flush()
            time.sleep(0.5)
            file.write("ep 3")
        lock.__exit__(None, None, None)

    thread = threading.Thread(target=write_more)
    thread.start()
    assert main(["logs", "r", "3", "-f"]) == 0
    thread.join()
    assert capsys.readouterr().out.splitlines()[-2:] == ["step 2", "step 3"]


def test_watch_shows_a_finished_search_and_changes_nothing(searched, capsys, cli):
    before = {path: path.stat().st_mtime_ns for path in searched.rglob("*")}
    shown = cli.out(["watch", "r"])
    assert [line[:9] for line in shown.splitlines()[:3]] == ["trial   1", "trial   2", "trial   3"]
    assert "ended: the budget is used up" in shown
    assert main(["watch", "r", "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (events[0]["event"], events[-1]["event"]) == ("search_started", "summary")
    assert {path: path.stat().st_mtime_ns for path in searched.rglob("*")} == before


def test_watch_follows_events_until_the_search_is_killed(unfinished, cli):
    lock = FolderLock(unfinished)
    lock.__enter__()
    threading.Timer(1.0, lock.__exit__, (None, None, None)).start()
    shown = cli.out(["watch", "r"])
    assert "trial   2" in shown
    assert "killed: its process has gone" in shown
    assert load_run(unfinished).state.num_unfinished == 1


def test_watch_on_a_terminal_shows_the_running_trial_and_leaves_on_ctrl_c(unfinished):
    with FolderLock(unfinished):
        terminal = Terminal("watch", "r", folder=unfinished.parent.parent, columns=70, rows=20)
        lines = terminal.wait(lambda t: any("1 running" in line for line in t.lines))
        row = next(line for line in lines if line.split()[:1] == ["3"])
        assert "running" in row or "waiting" in row
        terminal.type("\x03")
        assert terminal.finish() == 0
        assert "no longer watched; the search was not touched" in "\n".join(terminal.lines)
