"""Formats that are recognized but not read: a reason and what to do, never `no_trace_files`."""

from __future__ import annotations

import sqlite3

import pytest
import trace_writer as write

from cclsearch.trace.events import Reason
from cclsearch.trace.read import read_traces


@pytest.mark.parametrize(
    ("name", "data", "advice"),
    [
        ("out.pftrace", b"\n\x04abcd", "--output-format json"),
        ("908_kernel_trace.csv", b'"Kind"\n', "--output-format json"),
        ("a.otf2", b"", "--output-format json"),
        ("kernels.ncu-rep", b"NVR", "nsys profile"),
        ("report.nsys-rep", b"x", "nsys export"),
        ("report.qdstrm", b"x", "QdstrmImporter"),
        ("profile.ntff", b"x", "not supported"),
        ("host.pb", b"\n\x00", "xplane.pb"),
    ],
)
def test_a_known_format_is_refused_with_what_to_do(tmp_path, name, data, advice):
    (tmp_path / name).write_bytes(data)
    for path in (tmp_path, tmp_path / name):
        found = read_traces(path)
        assert (found.status, found.reasons) == ("not_available", (Reason.FORMAT_UNSUPPORTED,))
        assert advice in found.message


def test_a_database_of_rocprofv3_is_refused_with_what_to_do(tmp_path):
    connection = sqlite3.connect(tmp_path / "7_results.db")
    connection.execute("CREATE TABLE rocpd_kernel_dispatch_7 (id INTEGER)")
    connection.commit()
    connection.close()
    found = read_traces(tmp_path)
    assert found.reasons == (Reason.FORMAT_UNSUPPORTED,)
    assert "--output-format json" in found.message


def test_beside_a_trace_that_can_be_read_it_is_left_out(tmp_path):
    write.write_kineto(tmp_path / "rank0_trace.json")
    (tmp_path / "out.pftrace").write_bytes(b"\n\x04abcd")
    found = read_traces(tmp_path)
    assert (found.status, found.reasons, list(found.tables)) == ("ok", (), [0])


@pytest.mark.parametrize("name", ["notes.txt", "config.json", "results.csv", "model.pt"])
def test_other_files_are_no_traces(tmp_path, name):
    (tmp_path / name).write_text('{"schema": "1.0", "fields": []}')
    assert read_traces(tmp_path).reasons == (Reason.NO_TRACE_FILES,)
