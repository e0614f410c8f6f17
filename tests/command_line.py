"""The command line in the process of the tests: the fixture `cli`."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
