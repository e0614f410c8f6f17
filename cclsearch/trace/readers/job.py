"""What a reading process is asked and what it answers (see `cclsearch.trace.pool`)."""

from __future__ import annotations

import msgspec

from cclsearch.trace.events import FileReport


class ReadJob(msgspec.Struct):
    """One trace file to read."""

    reader: str
    trace: str
    targets: list[str]


class ReadAnswer(msgspec.Struct):
    """How reading it went, and where the columns are; "" if they could not be saved."""

    report: FileReport
    target: str = ""
