"""What libraries lose of guarantees that parts of our own keep: reasons of `docs/architecture.md`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from cclsearch.core import processes
from cclsearch.core.errors import UserError
from cclsearch.record.lock import FolderLock


def test_psutils_start_time_moves_when_the_clock_is_set_and_ours_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock or a job that is recorded today must be recognized after NTP has set the clock."""
    psutil = pytest.importorskip("psutil")
    own = tmp_path / str(os.getpid())
    own.mkdir()
    shutil.copyfile(f"/proc/{os.getpid()}/stat", own / "stat")
    found = []
    for boot_s in (1_700_000_000, 1_700_003_600):  # what the kernel computes from the clock, before and after it is set
        (tmp_path / "stat").write_text(f"cpu  1 2 3 4\nbtime {boot_s}\n")
        monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
        monkeypatch.setattr(processes, "_PROC", tmp_path)
        psutil._pslinux.BOOT_TIME = None
        found.append((psutil.Process(os.getpid()).create_time(), processes.start_ticks(os.getpid())))
        monkeypatch.undo()
    assert found[1][0] - found[0][0] == pytest.approx(3600)
    assert found[1][1] == found[0][1]


def test_filelock_refuses_without_naming_the_holder(tmp_path: Path) -> None:
    """A refusal names process, host and command, so that the user can stop the right one."""
    filelock = pytest.importorskip("filelock")
    with FolderLock(tmp_path), pytest.raises(UserError, match=rf"in use by process {os.getpid()} on \S+ \(search\)"):
        FolderLock(tmp_path).__enter__()
    with filelock.FileLock(tmp_path / "other"), pytest.raises(filelock.Timeout) as caught:
        filelock.FileLock(tmp_path / "other", timeout=0).acquire()
    assert str(os.getpid()) not in str(caught.value).replace(str(tmp_path), "")


def test_protobuf_reads_nothing_of_a_message_that_is_cut() -> None:
    """An XSpace file is one message. Ours are read up to the cut (`test_a_file_cut_inside_a_node_is_partial`)."""
    descriptors = pytest.importorskip("google.protobuf.descriptor_pb2")
    message = pytest.importorskip("google.protobuf.message")
    whole = descriptors.FileDescriptorProto(name="trace", package="x" * 100).SerializeToString()
    with pytest.raises(message.DecodeError):
        descriptors.FileDescriptorProto().ParseFromString(whole[:-1])
