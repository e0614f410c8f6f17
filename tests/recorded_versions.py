"""Runs and projects of released versions, copied into a test's folder as if that version had just written them.

`recorded/runs-0.1.0/KIND` contains the files that version 0.1.0 wrote, with these changes: paths are the placeholders
`@PROJECT@` (the project of the run), `@SHIPPED@` (the folder of the shipped `launchers/` and `workloads/`) and
`@VENV@`; the host is `host1`, or `@HOST@` in a lock; traces are compressed again (`.json.gz` and `.pb` as `.xz`);
traces of retried attempts, one of the two files of each XLA trace, column caches, and all traces of `failed` are
omitted; the recorded night is dated a year earlier, so that every night of a test comes after it.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import lzma
import os
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cclsearch
from cclsearch.cli import main

ROOT = Path(__file__).parents[1]
RECORDED = Path(__file__).parent / "recorded" / "runs-0.1.0"
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


def call(*words: str, code: int = 0) -> CommandResult:
    """Run one `ccl-search` command in this process; its exit code must be `code`."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        found = main(list(words))
    return _check(CommandResult(found, out.getvalue(), err.getvalue()), words, code)


def call_in_subprocess(*words: str, plugin: Path, code: int = 0) -> CommandResult:
    """Run one command in a new process, with the packages of the folder `plugin` installed."""
    paths = [str(plugin), str(ENGINE), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", cclsearch.__name__, *words]
    result = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return _check(CommandResult(result.returncode, result.stdout, result.stderr), words, code)


def _check(result: CommandResult, words: tuple[str, ...], code: int) -> CommandResult:
    assert result.code == code, f"{words} ended with {result.code}: {result.out}{result.err}"
    return result


def copy_run(project: Path, kind: str, *, shipped: Path | None = None) -> Path:
    """Copy a recorded run to `runs/KIND` of that project and return its folder.

    `shipped`: the folder of the shipped content at that version; by default the present one.
    """
    return _copy(RECORDED / kind, project / "runs" / kind, project, shipped)


def copy_project(kind: str, target: Path) -> Path:
    """Copy a whole project of the recorded version with its runs to `target`."""
    return _copy(RECORDED / kind, target, target)


def _copy(source: Path, target: Path, project: Path, shipped: Path | None = None) -> Path:
    """Copy a fixture and replace its placeholders with real paths.

    A ledger contains the SHA-256 of `search.yaml` and of each `result.json`: both are computed again after the
    replacement. So a test sees an unedited run; it does not test how the recorded version computed the hashes.
    """
    placeholders = {
        "@PROJECT@": str(project),
        "@SHIPPED@": str(shipped or find_shipped_content()),
        "@VENV@": sys.prefix,
        "@HOST@": socket.gethostname(),
    }
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        to = target / path.relative_to(source)
        to.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".xz":
            _unpack(path, to.with_suffix(""))
        elif path.suffix == ".gz":
            to.write_bytes(path.read_bytes())
        else:
            text = path.read_text(encoding="utf-8")
            for placeholder, real in placeholders.items():
                text = text.replace(placeholder, real)
            to.write_text(text, encoding="utf-8")
        if path.name == "lock":
            os.utime(to, (1, 1))  # of a machine that started again since
    for ledger in target.rglob("ledger.jsonl"):
        _update_hashes(ledger)
    return target


def _unpack(packed: Path, target: Path) -> None:
    data = lzma.decompress(packed.read_bytes())
    if target.suffix == ".json":
        target, data = target.with_suffix(".json.gz"), gzip.compress(data, compresslevel=1, mtime=0)
    target.write_bytes(data)


def _update_hashes(ledger: Path) -> None:
    lines = ledger.read_text(encoding="utf-8").splitlines(keepends=True)
    for i, line in enumerate(lines):
        event = json.loads(line)
        if event["event"] == "search_started":
            old, path = event["spec_sha256"], ledger.parent / "search.yaml"
        elif event["event"] == "trial_finished" and event["result_sha256"]:
            old, path = event["result_sha256"], ledger.parent / "trials" / f"{event['trial']:04d}" / "result.json"
        else:
            continue
        lines[i] = line.replace(old, hashlib.sha256(path.read_bytes()).hexdigest())
    ledger.write_text("".join(lines), encoding="utf-8")


def find_shipped_content() -> Path:
    """Return the folder of the shipped content, which may be up to two levels below the root of the repository."""
    for above in ("", "*/", "*/*/"):
        for found in sorted(ROOT.glob(f"{above}workloads/recordings/nanotron-8b-2n/trials.csv")):
            return found.parents[3]
    raise AssertionError("the shipped recordings are not in the repository")


def read_ledger(run: Path) -> list[dict[str, Any]]:
    """Return the events of a run."""
    return [json.loads(line) for line in (run / "ledger.jsonl").read_text(encoding="utf-8").splitlines()]


def count_finishes(run: Path) -> Counter[int]:
    """Return the number of `trial_finished` events per trial; it must be 1 for each."""
    return Counter(event["trial"] for event in read_ledger(run) if event["event"] == "trial_finished")


def format_config(config: dict[str, Any]) -> str:
    """Return a configuration as every command shows it: `tp=4 pp=1`."""
    shown = {True: "true", False: "false"}
    return " ".join(f"{knob}={shown[v] if isinstance(v, bool) else v}" for knob, v in config.items())
