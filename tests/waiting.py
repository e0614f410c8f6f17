"""Waiting for what other processes do, and finding the processes of a job."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def wait_until(is_so: Callable[[], object], limit_s: float = 120.0, pause_s: float = 0.05) -> None:
    """Wait until the function returns something true; fail the test after the limit."""
    end_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end_s, f"it did not happen in {limit_s:g} s"
        time.sleep(pause_s)


def find_processes(job_name: str) -> list[int]:
    """Return the processes whose environment has that job's name."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"CCL_JOB_NAME={job_name}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found
