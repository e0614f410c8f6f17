"""The lock of a run folder: owned by one running process, free after a kill or a reboot."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cclsearch.core.errors import UserError
from cclsearch.record.event import Note, encode_line
from cclsearch.record.ledger import LEDGER_FILE, read_events
from cclsearch.record.lock import STALE_AFTER_S, FolderLock, is_locked
from cclsearch.record.writer import RunWriter

NEW_NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


def holder(**changes: object) -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    start = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    me = {"host": socket.gethostname(), "boot": boot, "pid": os.getpid(), "start": start, "purpose": "search"}
    return json.dumps({**me, **changes})


def test_a_second_process_is_rejected_with_the_holder(tmp_path):
    with FolderLock(tmp_path):
        assert is_locked(tmp_path)
        here = rf"in use by process {os.getpid()} on {re.escape(socket.gethostname())} \(search\)"
        with pytest.raises(UserError, match=here), FolderLock(tmp_path):
            pass
    assert not is_locked(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from cclsearch.record.lock import FolderLock\n"
        "lock = FolderLock(Path(sys.argv[1])); lock.__enter__(); print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(UserError), FolderLock(tmp_path):
            pass
        process.kill()
        process.wait(timeout=60)
    with FolderLock(tmp_path):
        assert is_locked(tmp_path)


@pytest.mark.parametrize(
    "changes", [{"boot": "another boot"}, {"start": "1"}, {"pid": 2**22 + 1, "start": "1"}, {"pid": "no number"}]
)
def test_a_lock_from_before_a_reboot_or_of_a_reused_pid_is_stale(tmp_path, changes):
    (tmp_path / "lock").write_text(holder(**changes))
    os.utime(tmp_path / "lock", (1, 1))  # before this boot
    assert not is_locked(tmp_path)
    with FolderLock(tmp_path):
        assert is_locked(tmp_path)


@pytest.mark.parametrize(("answer", "runs"), [(PermissionError, True), (ProcessLookupError, False)])
def test_a_holder_without_a_known_start_runs_if_a_signal_can_reach_it_or_is_refused(
    tmp_path, monkeypatch, answer, runs
):
    """Without `/proc`, the kernel says only whether there is such a process, perhaps another user's."""

    def refuse(*_: int) -> None:
        raise answer

    (tmp_path / "lock").write_text(holder())
    monkeypatch.setattr("cclsearch.core.processes.start_ticks", lambda pid: None)
    monkeypatch.setattr(os, "kill", refuse)
    assert is_locked(tmp_path) is runs


def test_a_lock_of_another_host_is_valid_while_it_is_refreshed(tmp_path):
    path = tmp_path / "lock"
    path.write_text(holder(host="another-host", pid_ns="pid:[1]"))
    with pytest.raises(UserError, match=r"another-host \(search\)"), FolderLock(tmp_path):
        pass
    old = time.time() - STALE_AFTER_S - 5
    os.utime(path, (old, old))
    with FolderLock(tmp_path):
        assert is_locked(tmp_path)


def test_another_machine_with_the_same_name_keeps_its_lock(tmp_path):
    """Its boot is another one, but the lock was refreshed after this machine started."""
    (tmp_path / "lock").write_text(holder(boot="the boot of another machine"))
    with pytest.raises(UserError, match="in use"), FolderLock(tmp_path):
        pass


@pytest.mark.parametrize("hard_links", [True, False])
def test_a_search_in_another_pid_namespace_keeps_its_lock_until_it_ends(tmp_path, hard_links):
    """Each side cannot see the other's processes; the kernel says whether the lock is held, whatever its age."""
    code = (
        "import os, sys; from pathlib import Path; from cclsearch.record.lock import FolderLock\n"
        "def refuse(*names): raise PermissionError(1, 'no links')\n"
        f"os.link = os.link if {hard_links} else refuse\n"
        "with FolderLock(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    command = [*NEW_NAMESPACE, sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        if process.stdout.readline() != b"held\n":
            pytest.skip("no PID namespace can be made here")
        os.utime(tmp_path / "lock", (1, 1))
        with pytest.raises(UserError, match=r"in another PID namespace, such as a container\)"), FolderLock(tmp_path):
            pass
        assert not [path for path in tmp_path.iterdir() if path.name != "lock"]
        process.kill()  # its child, the search, is killed with it
        process.wait(timeout=60)
    wait_until_free(tmp_path)
    with FolderLock(tmp_path):
        inner = [*NEW_NAMESPACE, sys.executable, "-c", code, str(tmp_path)]
        refused = subprocess.run(inner, input=b"", capture_output=True, timeout=60, check=False)
        assert b"in use by process" in refused.stderr
        assert is_locked(tmp_path)


def test_a_lock_of_another_namespace_on_a_file_system_without_locks_goes_by_its_age(tmp_path):
    path = tmp_path / "lock"
    path.write_text(holder(pid_ns="pid:[1]", held=False))
    assert is_locked(tmp_path)
    old = time.time() - STALE_AFTER_S - 5
    os.utime(path, (old, old))
    assert not is_locked(tmp_path)


def wait_until_free(folder: Path) -> None:
    deadline = time.monotonic() + 60
    while is_locked(folder) and time.monotonic() < deadline:
        time.sleep(0.02)


def test_the_lock_works_without_hard_links(tmp_path, monkeypatch):
    def refuse(*names: object, **options: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with FolderLock(tmp_path), pytest.raises(UserError, match="in use"), FolderLock(tmp_path):
        pass


def test_exactly_one_of_many_processes_takes_over_a_stale_lock(tmp_path):
    (tmp_path / "lock").write_text(holder(boot="another boot"))
    os.utime(tmp_path / "lock", (1, 1))
    code = (
        "import sys, time; from pathlib import Path; from cclsearch.record.lock import FolderLock\n"
        "from cclsearch.core.errors import UserError\n"
        "try:\n"
        "    with FolderLock(Path(sys.argv[1])): print('got it', flush=True); sys.stdin.read()\n"
        "except UserError: print('refused', flush=True)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    started = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(4)]
    answers = [process.stdout.readline().strip() for process in started if process.stdout]
    for process in started:
        process.communicate(timeout=60)
    assert sorted(answers) == [b"got it", b"refused", b"refused", b"refused"]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here")
def test_a_zombie_process_does_not_keep_the_lock(tmp_path):
    code = (
        "import sys; from pathlib import Path; from cclsearch.record.lock import FolderLock\n"
        "FolderLock(Path(sys.argv[1])).__enter__(); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert is_locked(tmp_path)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not is_locked(tmp_path)
        with FolderLock(tmp_path):
            assert is_locked(tmp_path)


def test_a_search_that_counted_as_dead_does_not_write_after_its_successor(tmp_path):
    note = Note(time_s=1.0, topic="test", text="one")
    with RunWriter(tmp_path) as writer:
        writer.record(note)
        path = tmp_path / "lock"
        own = path.read_text()
        path.unlink()
        writer.record(note)
        assert path.read_text() == own, "a deleted lock file is recreated"
        path.write_text(json.dumps({**json.loads(own), "pid": 1, "host": "elsewhere"}))
        before = (tmp_path / LEDGER_FILE).read_bytes()
        with pytest.raises(UserError, match="taken over by process 1 on elsewhere"):
            writer.record(note)
        assert (tmp_path / LEDGER_FILE).read_bytes() == before
    assert "elsewhere" in path.read_text(), "the other's lock stays"


def test_a_ledger_written_by_another_process_is_not_overwritten(tmp_path):
    note = Note(time_s=1.0, topic="test", text="one")
    with RunWriter(tmp_path) as writer:
        writer.record(note)
        with (tmp_path / LEDGER_FILE).open("ab") as other:
            other.write(encode_line(note))
        with pytest.raises(UserError, match="another process"):
            writer.record(note)
    assert len(list(read_events(tmp_path / LEDGER_FILE))) == 2


def test_a_search_whose_folder_was_replaced_stops_before_it_writes(tmp_path):
    note = Note(time_s=1.0, topic="test", text="one")
    folder = tmp_path / "r"
    folder.mkdir()
    with RunWriter(folder) as writer:
        writer.record(note)
        folder.rename(tmp_path / "away")
        folder.mkdir()
        (folder / LEDGER_FILE).write_bytes(b"")
        with pytest.raises(OSError, match="tale"):
            writer.record(note)
    assert (folder / LEDGER_FILE).read_bytes() == b""
    assert not (folder / "lock").exists()
    assert len(list(read_events(tmp_path / "away" / LEDGER_FILE))) == 1
