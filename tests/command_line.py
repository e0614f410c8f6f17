"""The command line, in the process of the tests (the fixture `cli`) or in one of its own."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from cclsearch.cli import main


class CommandLine:
    """Runs commands; each call asserts the exit code and returns what that command printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def _call(self, words: Sequence[str], code: int) -> tuple[str, str]:
        self._capsys.readouterr()
        ended = main([*words])
        printed = self._capsys.readouterr()
        assert ended == code, f"{[*words]}: {ended}\n{printed.out}{printed.err}"
        return printed.out, printed.err

    def out(self, words: Sequence[str], code: int = 0) -> str:
        """Return the standard output."""
        return self._call(words, code)[0]

    def json(self, words: Sequence[str], code: int = 0) -> Any:
        """Return the data of a command with `--json`."""
        return json.loads(self.out(words, code))

    def err(self, words: Sequence[str], code: int = 2) -> str:
        """Return the standard error."""
        return self._call(words, code)[1]


def run_command(
    *words: str,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    max_file_bytes: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own.

    `environment` is added to the one of the tests. No file can grow beyond `max_file_bytes`, as on a full disk.
    """

    def limit_files() -> None:
        if max_file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, resource.RLIM_INFINITY))

    return subprocess.run(
        [sys.executable, "-m", "cclsearch", *words],
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        preexec_fn=limit_files,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
