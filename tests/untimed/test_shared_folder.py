"""Several users and searches in one project, with real users: who reads, continues and breaks what."""

from __future__ import annotations

import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from users import GROUP, find_problem, run_as, start_as

ALICE, BOB = 61501, 61502
HOLD = """
import sys, time
from pathlib import Path
from cclsearch.record.lock import FolderLock
with FolderLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Path]:
    """A project of a group: its folder has the group's set-group-ID bit."""
    reason = find_problem()
    if reason is not None:
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="ccl-lab-", dir="/tmp"))
    shutil.chown(folder, group=GROUP)
    folder.chmod(0o2775)
    (folder / "ccl-search.yaml").write_text("{}\n")
    yield folder
    shutil.rmtree(folder)


def search(user: int, name: str, lab: Path, umask: str = "002") -> tuple[int, str, str]:
    return run_as(user, umask, "run", "-w", "wl2", "-b", "2", "--name", name, "--quiet", folder=lab)


def test_two_users_search_at_once_and_one_continues_the_search_of_the_other(lab):
    words = ("-m", "cclsearch", "run", "-w", "wl2", "-b", "2", "--quiet", "--name")
    names = {"alice": ALICE, "bob": BOB, "same": ALICE}
    started = [start_as(user, "002", *words, name, folder=lab) for name, user in names.items()]
    started.append(start_as(BOB, "002", *words, "same", folder=lab))
    ended = [(process.communicate(timeout=180)[1], process.returncode) for process in started]
    assert [code for _, code in ended[:2]] == [0, 0]
    assert sorted(code for _, code in ended[2:]) == [0, 2], "of two searches of one name, one starts"
    refused = next(error for error, code in ended[2:] if code == 2)
    assert "same' exists already" in refused or "same' is in use by process" in refused
    code, _, error = run_as(BOB, "002", "resume", "alice", "-b", "4", "--quiet", folder=lab)
    assert (code, error) == (0, "")
    code, out, _ = run_as(ALICE, "002", "status", "alice", folder=lab)
    assert code == 0
    assert "4 of 4 trials admitted" in out
    assert run_as(BOB, "002", "tag", "alice", "good", folder=lab)[0] == 0
    files = [path for path in (lab / "runs").rglob("*") if path.is_file()]
    assert [path for path in files if path.stat().st_gid != GROUP or not path.stat().st_mode & stat.S_IWGRP] == []


def test_with_the_usual_umask_others_read_a_run_and_cannot_write_to_it(lab):
    assert search(ALICE, "readable", lab, umask="022")[0] == 0
    code, out, _ = run_as(BOB, "022", "show", "readable", "1", folder=lab)
    assert code == 0
    assert "trial 1" in out
    before = (lab / "runs" / "readable" / "ledger.jsonl").read_bytes()
    for words in (("resume", "readable", "-b", "4"), ("tag", "readable", "mine"), ("report", "readable")):
        code, _, error = run_as(BOB, "022", *words, folder=lab)
        assert (code, error.count("\n")) == (2, 1)
        assert "Permission denied" in error
    assert (lab / "runs" / "readable" / "ledger.jsonl").read_bytes() == before


def test_a_private_run_has_no_file_for_others_and_does_not_disturb_them(lab):
    assert search(ALICE, "private", lab, umask="077")[0] == 0
    files = [lab / "runs" / "private", *(lab / "runs" / "private").rglob("*")]
    assert [path for path in files if stat.S_IMODE(path.stat().st_mode) & 0o077] == []
    code, out, error = run_as(BOB, "002", "status", folder=lab)
    assert (code, error) == (0, "")
    assert "private" not in out
    assert search(BOB, "after-private", lab)[0] == 0
    assert "private" in run_as(ALICE, "002", "status", folder=lab)[1]


def test_a_damaged_run_of_another_user_is_named_and_the_others_are_listed(lab):
    assert search(ALICE, "whole", lab)[0] == 0
    broken = lab / "runs" / "broken"
    broken.mkdir(mode=0o755, exist_ok=True)
    (broken / "search.yaml").write_text("[")
    out = run_as(BOB, "002", "status", folder=lab)[1]
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert "unreadable" in lines["broken"]
    assert "2 of 2 trials admitted" in lines["whole"]
    assert search(BOB, "after-broken", lab)[0] == 0
    shutil.rmtree(broken)


def test_the_lock_of_another_users_search_holds_until_its_process_ends(lab):
    assert search(ALICE, "locked", lab)[0] == 0
    holder = start_as(ALICE, "002", "-c", HOLD, str(lab / "runs" / "locked"), folder=lab)
    assert holder.stdout.readline() == "held\n"
    code, _, error = run_as(BOB, "002", "resume", "locked", "-b", "3", folder=lab)
    assert code == 2
    assert f"is in use by process {holder.pid} on" in error
    holder.kill()
    holder.communicate()
    time.sleep(0.1)
    assert run_as(BOB, "002", "resume", "locked", "-b", "3", "--quiet", folder=lab)[0] == 0
