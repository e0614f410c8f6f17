"""Runs `ccl-search` commands in a new process and reads what they left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cclsearch

ENGINE = Path(cclsearch.__file__).parents[1]


@dataclass(frozen=True)
class CommandResult:
    """The exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def call_in_subprocess(*words: str, plugin: Path, code: int = 0) -> CommandResult:
    """Run one command in a new process, with the packages of the folder `plugin` installed."""
    paths = [str(plugin), str(ENGINE), *filter(None, [os.environ.get("PYTHONPATH")])]
    result = subprocess.run(
        [sys.executable, "-m", cclsearch.__name__, *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == code, f"{words} ended with {result.returncode}: {result.stdout}{result.stderr}"
    return CommandResult(result.returncode, result.stdout, result.stderr)


def count_finishes(run: Path) -> Counter[int]:
    """Return the number of `trial_finished` events per trial; it must be 1 for each."""
    events = map(json.loads, (run / "ledger.jsonl").read_text(encoding="utf-8").splitlines())
    return Counter(event["trial"] for event in events if event["event"] == "trial_finished")
