"""Starts and stops searches for the pages, if they may: each search is a process that outlives the server."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cclsearch.core.content import list_content, list_profiles
from cclsearch.core.errors import UserError
from cclsearch.core.numbers import MAX_TRIALS, read_whole
from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import one_line, plain
from cclsearch.nightly.window import NIGHTS_FOLDER
from cclsearch.record.lock import interrupt_holder, name_holder
from cclsearch.ui.run_index import RunIndex

MAX_STARTED = 20
"""Started searches that the page remembers."""
FIRST_LOOK_S = 30.0
"""Seconds for which a start is watched for bad input, which ends it before there is a run."""


def list_choices() -> dict[str, list[str]]:
    """The workloads, launchers and objectives that the form of a new search offers."""
    return {
        "workload": list_content("workloads", ".yaml"),
        "launcher": list_profiles(),
        "objective": list_content("objectives", ".yaml"),
    }


@dataclass
class StartedSearch:
    """A search that this server started."""

    what: str
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    """An unnamed file: it disappears with the last process that has it open."""

    @property
    def last_line(self) -> str:
        """The last line that it printed, without secrets."""
        size = os.fstat(self.output.fileno()).st_size
        data = os.pread(self.output.fileno(), 4096, max(0, size - 4096))
        lines = redact(plain(data.decode(errors="replace"))).splitlines()
        return one_line(next((line for line in reversed(lines) if line.strip()), ""), 1000)

    @property
    def state(self) -> str:
        """`running`, `ended`, or its exit code."""
        code = self.process.poll()
        return "running" if code is None else "ended" if code == 0 else f"exit code {code}"


class SearchStarter:
    """Starts searches in the server's working directory, with the same runs folder."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self.started: list[StartedSearch] = []

    def start(self, fields: Mapping[str, object]) -> str:
        """Start the search that a form describes; returns a sentence. UserError, with its one line, if it refuses."""
        choices = list_choices()
        arguments = ["run"]
        for name, known in choices.items():
            if name == "workload" or fields.get(name):
                arguments.append(f"--{name}={_choose(fields, name, known)}")
        arguments.append(f"--budget={read_number(fields, 'budget', 15, 1, MAX_TRIALS)}")
        arguments.append(f"--seed={read_number(fields, 'seed', 0, 0, 2**32 - 1)}")
        name = str(fields.get("name") or "")
        arguments += [f"--name={name}"] if name else []
        return self.launch(arguments, f"search of {fields.get('workload')}")

    def resume(self, name: str) -> str:
        """Continue a search that was stopped or killed."""
        return self.launch(["resume", str(self._runs.absolute() / name)], f"resume of {name}")

    def launch(self, arguments: list[str], what: str) -> str:
        """Start a command that searches, and return a sentence once its run exists; UserError, as `start` raises it."""
        output = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the search is remembered
        command = [sys.executable, "-P", "-m", "cclsearch", *arguments, "--quiet"]
        command += ["--runs", str(self._runs.absolute())]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        found = StartedSearch(what, process, output)
        until_s = time.monotonic() + FIRST_LOOK_S
        while process.poll() is None and time.monotonic() < until_s and not self._find_run(process.pid):
            time.sleep(0.1)
        if process.poll() not in (None, 0):
            raise UserError(found.last_line.removeprefix("ccl-search: ") or f"it ended with {found.state}")
        self.started = [found, *self.started][:MAX_STARTED]
        name = self._find_run(process.pid)
        return f"{what} started" + (f": run {name}" if name else "")

    def _find_run(self, pid: int) -> str:
        """The run that a process searches; empty if it has not begun, or has ended."""
        holders = ((name, name_holder(self._runs / name)) for name in RunIndex(self._runs).list_names()[:MAX_STARTED])
        return next((name for name, holder in holders if holder is not None and holder[1] == pid), "")


def stop_search(runs: Path, folder: Path) -> str:
    """Interrupt the search of a run as Ctrl-C does; returns a sentence. UserError if that cannot be done from here."""
    holder = name_holder(folder)
    if holder is None:
        raise UserError("the search does not run any more")
    if holder == name_holder(runs / NIGHTS_FOLDER):
        raise UserError("this search is part of a night: stop the night where it was started")
    interrupt_holder(folder)
    return "the search was asked to stop: what runs is cancelled, and `resume` continues it"


def _choose(fields: Mapping[str, object], name: str, known: list[str]) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or value not in known:
        raise UserError(f"there is no {name} {one_line(str(value), 60)!r}; known: {', '.join(known)}")
    return value


def read_number(fields: Mapping[str, object], name: str, default: int, low: int, high: int) -> int:
    """The whole number of a form's field, or the default if it is empty; raises UserError if it is not one."""
    try:
        return read_whole(str(fields.get(name) or default), low, high)
    except ValueError as error:
        raise UserError(f"{name} {error}") from None
