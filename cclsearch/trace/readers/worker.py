"""Reads trace files one after another in a separate process: `python -m cclsearch.trace.readers.worker`.

A line of standard input is a `ReadJob` as JSON; the answer is a line with a `ReadAnswer`. The columns are saved at the
first target that can be written. The process ends when its input ends.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from cclsearch.trace.cache import save_tables
from cclsearch.trace.find import TraceFile
from cclsearch.trace.read import read_file
from cclsearch.trace.readers.job import ReadAnswer, ReadJob


def read_one(job: ReadJob) -> ReadAnswer:
    """Read the file and save its columns; a trace that cannot be read is reported."""
    path = Path(job.trace)
    tables, report = read_file(TraceFile(path, path.name, job.reader, ""))
    saved = (target for target in job.targets if tables and save_tables(Path(target), path, tables))
    return ReadAnswer(report, next(saved, ""))


def main() -> int:
    """Answer jobs until the input ends; the exit code is 0 also for traces that cannot be read."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a plugin's reader prints must not look like an answer
    decoder = msgspec.json.Decoder(ReadJob)
    try:
        for line in sys.stdin.buffer:
            answers.write(msgspec.json.encode(read_one(decoder.decode(line))) + b"\n")
    except (KeyboardInterrupt, BrokenPipeError):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
