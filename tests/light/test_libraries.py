"""What libraries lose of guarantees that parts of our own keep: reasons of `docs/architecture.md`."""

from __future__ import annotations

import os
import shutil
import sys

import pytest
from shells import complete_typed

from cclsearch.core import processes
from cclsearch.core.errors import UserError
from cclsearch.record.lock import FolderLock


def test_psutils_start_time_moves_when_the_clock_is_set_and_ours_does_not(tmp_path, monkeypatch):
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


def test_filelock_refuses_without_naming_the_holder(tmp_path):
    """A refusal names process, host and command, so that the user can stop the right one."""
    filelock = pytest.importorskip("filelock")
    with FolderLock(tmp_path), pytest.raises(UserError, match=rf"in use by process {os.getpid()} on \S+ \(search\)"):
        FolderLock(tmp_path).__enter__()
    with filelock.FileLock(tmp_path / "other"), pytest.raises(filelock.Timeout) as caught:
        filelock.FileLock(tmp_path / "other", timeout=0).acquire()
    assert str(os.getpid()) not in str(caught.value).replace(str(tmp_path), "")


def test_protobuf_reads_nothing_of_a_message_that_is_cut():
    """An XSpace file is one message. Ours are read up to the cut (`test_a_file_cut_inside_a_node_is_partial`)."""
    descriptors = pytest.importorskip("google.protobuf.descriptor_pb2")
    message = pytest.importorskip("google.protobuf.message")
    whole = descriptors.FileDescriptorProto(name="trace", package="x" * 100).SerializeToString()
    with pytest.raises(message.DecodeError):
        descriptors.FileDescriptorProto().ParseFromString(whole[:-1])


def test_argcomplete_offers_nothing_after_an_assignment_in_zsh(tmp_path):
    """`test_a_person_gets_names_in_the_second_command_and_inside_quotes` is what ours does there."""
    argcomplete = pytest.importorskip("argcomplete")
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    program = tmp_path / "mine"
    program.write_text(
        f"#!{sys.executable}\nimport argparse, argcomplete\nparser = argparse.ArgumentParser()\n"
        "run = parser.add_subparsers().add_parser('run')\nrun.add_argument('-w', choices=['onlyone'])\n"
        "argcomplete.autocomplete(parser)\n"
    )
    program.chmod(0o755)
    env = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)}
    found = {}
    for line in ("mine run -w on", "X=1 mine run -w on", "true && mine run -w on"):
        for name in ("ready", "typed"):
            (tmp_path / name).unlink(missing_ok=True)
        found[line] = complete_typed("zsh", argcomplete.shellcode(["mine"], shell="zsh"), line, tmp_path, env)
    assert found == {
        "mine run -w on": "mine run -w onlyone ",
        "X=1 mine run -w on": "X=1 mine run -w on",
        "true && mine run -w on": "true && mine run -w on",
    }
