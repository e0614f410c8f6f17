"""Runs and projects of released versions, put into a test's folder as if that version had just written them there.

`recorded/runs-0.1.0/KIND` holds what version 0.1.0 left on disk, with these changes: paths are the placeholders
`@PROJECT@` (the project that held the run), `@SHIPPED@` (the folder of the shipped `launchers/` and `workloads/`) and
`@VENV@`; the host is `host1`, or `@HOST@` in a lock; traces are packed again (`.json.gz` and `.pb` as `.xz`); traces of
attempts that did not count, one twin of each XLA trace, column caches, and all traces of `failed` are left out; the
recorded night is moved to a year earlier, so that every night of a test comes after it.
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
class Done:
    """What a command left: its exit code and its output."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def call(*words: str, code: int = 0) -> Done:
    """One command of the command line, in this process; its exit code must be `code`."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        found = main(list(words))
    return _check(Done(found, out.getvalue(), err.getvalue()), words, code)


def call_apart(*words: str, plugin: Path, code: int = 0) -> Done:
    """The same in a process of its own, with the packages of that folder installed."""
    paths = [str(plugin), str(ENGINE), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", cclsearch.__name__, *words]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return _check(Done(done.returncode, done.stdout, done.stderr), words, code)


def _check(done: Done, words: tuple[str, ...], code: int) -> Done:
    assert done.code == code, f"{words} ended with {done.code}: {done.out}{done.err}"
    return done


def put_run(project: Path, kind: str, *, shipped: Path | None = None) -> Path:
    """The run folder `runs/KIND` of that project, as the recorded version left it.

    `shipped`: where the shipped content lay for that version; where it lies now if not given.
    """
    return _put(RECORDED / kind, project / "runs" / kind, project, shipped)


def put_project(kind: str, target: Path) -> Path:
    """A whole project of the recorded version with its runs, at `target`."""
    return _put(RECORDED / kind, target, target)


def _put(source: Path, target: Path, project: Path, shipped: Path | None = None) -> Path:
    """Copy a fixture and put real paths in.

    A ledger holds the SHA-256 of `search.yaml` and of each `result.json`: both are taken again from the files as they
    are after the paths were put in. So a test sees an unedited run; it says nothing of how the hashes were first taken.
    """
    words = {
        "@PROJECT@": str(project),
        "@SHIPPED@": str(shipped or find_shipped()),
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
            for word, real in words.items():
                text = text.replace(word, real)
            to.write_text(text, encoding="utf-8")
    for ledger in target.rglob("ledger.jsonl"):
        _hash_again(ledger)
    return target


def _unpack(packed: Path, target: Path) -> None:
    data = lzma.decompress(packed.read_bytes())
    if target.suffix == ".json":
        target, data = target.with_suffix(".json.gz"), gzip.compress(data, compresslevel=1, mtime=0)
    target.write_bytes(data)


def _hash_again(ledger: Path) -> None:
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


def find_shipped() -> Path:
    """The folder of the shipped content, wherever the repository keeps it."""
    for above in ("", "*/", "*/*/"):
        for found in sorted(ROOT.glob(f"{above}workloads/recordings/nanotron-8b-2n/trials.csv")):
            return found.parents[3]
    raise AssertionError("the shipped recordings are not in the repository")


def read_ledger(run: Path) -> list[dict[str, Any]]:
    """The events of a run."""
    return [json.loads(line) for line in (run / "ledger.jsonl").read_text(encoding="utf-8").splitlines()]


def count_ends(run: Path) -> Counter[int]:
    """Trial -> how often it came to its end; a sound search has 1 for each."""
    return Counter(event["trial"] for event in read_ledger(run) if event["event"] == "trial_finished")


def write_config(config: dict[str, Any]) -> str:
    """A configuration as every command shows it: `tp=4 pp=1`."""
    shown = {True: "true", False: "false"}
    return " ".join(f"{knob}={shown[v] if isinstance(v, bool) else v}" for knob, v in config.items())
