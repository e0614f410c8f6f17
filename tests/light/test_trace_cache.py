"""The cache of parsed traces: in the user's folder only, bounded, and shared by processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import trace_writer as write
from paths import ROOT

from cclsearch.trace.files import cache
from cclsearch.trace.files.cache import cache_path
from cclsearch.trace.read import read_traces


def test_nothing_is_written_beside_a_trace(tmp_path):
    write.write_kineto(tmp_path / "rank0.json")
    read_traces(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.json"]
    assert isinstance(read_traces(tmp_path).tables[0].ts_ns.base, np.memmap)


def test_without_a_folder_that_can_be_written_there_is_no_cache(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    write.write_kineto(tmp_path / "traces" / "rank0.json")
    assert read_traces(tmp_path / "traces").status == "ok"
    assert (tmp_path / "file").read_text() == ""


def test_a_relative_cache_folder_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_path(Path("rank0.json")).is_relative_to(tmp_path / ".cache" / "ccl-search")


def test_a_user_without_a_home_has_no_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for an id that no user of a container has
    monkeypatch.chdir(tmp_path)
    write.write_kineto(tmp_path / "traces" / "rank0.json")
    assert read_traces(tmp_path / "traces").status == "ok"
    assert [path.name for path in tmp_path.iterdir()] == ["traces"]


def test_beyond_its_size_the_cache_loses_the_files_that_were_not_used_for_longest(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    traces = [write.write_kineto(tmp_path / f"run{n}" / "rank0.json") for n in range(4)]
    for age, trace in enumerate(traces[:3]):
        read_traces(trace.parent)
        os.utime(cache_path(trace), (1000.0 + age, 1000.0 + age))
    killed = cache_path(traces[0]).with_name("x.unfinished")
    killed.write_bytes(b"1")
    os.utime(killed, (1000.0, 1000.0))
    read_traces(traces[0].parent)  # uses the oldest
    monkeypatch.setattr(cache, "MAX_CACHE_BYTES", 3 * cache_path(traces[0]).stat().st_size)
    read_traces(traces[3].parent)
    assert [cache_path(trace).exists() for trace in traces] == [True, False, True, True]
    assert not killed.exists()


def test_processes_that_read_and_delete_at_the_same_time_get_the_same_tables(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for n in range(3):
        write.write_kineto(
            tmp_path / "traces" / f"{n}" / "rank0.json", write.kineto_document(write.gpu_events(steps=3 + n))
        )
    program = (
        "import sys; from cclsearch.trace.files import cache; from cclsearch.trace.read import read_traces;"
        "cache.MAX_CACHE_BYTES = 1;"
        "print({len(read_traces(f'{sys.argv[1]}/{n}').tables[0].steps) for _ in range(40) for n in range(3)})"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "traces")]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate()[0].strip() for process in running] == ["{3, 4, 5}"] * 3
    assert len(list((tmp_path / "cache").rglob("*.ccl-columns"))) <= 1
