"""`ccl-search logs RUN TRIAL`: what a trial prints, also while it runs; secrets are masked."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from cclsearch.core.errors import UserError
from cclsearch.core.job_file import JobFileError, open_job_file, read_job_json
from cclsearch.core.secrets.redact import Masker, redact
from cclsearch.core.text import one_line, plain
from cclsearch.core.values import Failure
from cclsearch.launch.collect import FAILURES_FOLDER, read_fault
from cclsearch.launch.contract import STDERR_FILE, STDOUT_FILE
from cclsearch.launch.log_reader import LogFault, find_rank
from cclsearch.record.trial import Trial
from cclsearch.run.catalog import find_run
from cclsearch.run.folder import Run, load_run
from cclsearch.run.phase import find_log_folder

LOOK_S = 0.3
MAX_LINE_BYTES = 1 << 16


def run(args: argparse.Namespace) -> None:
    folder = find_run(args.run, args.runs)
    loaded, trial = _read(folder, args.trial)
    if args.why:
        _explain(loaded, trial)
        return
    name = STDERR_FILE if args.stderr else STDOUT_FILE
    masker, count = Masker(), 0
    try:
        for line in _follow(loaded, trial, name) if args.follow else _read_once(loaded, trial, name):
            text = plain(masker.mask(line).decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n"))
            if args.rank is None or find_rank(text) == args.rank:
                count += 1
                print(text, end="" if text.endswith("\n") else "\n", flush=args.follow)
    except KeyboardInterrupt:
        return  # the trial continues
    if args.rank is not None:
        _print_failure(folder, args.trial, args.rank, count)


def _read(folder: Path, number: int) -> tuple[Run, Trial]:
    loaded = load_run(folder)
    return loaded, loaded.find_trial(number)


def _open(loaded: Run, trial: Trial, name: str) -> BinaryIO | None:
    path = find_log_folder(loaded.folder, trial) / name
    try:
        return open_job_file(path)
    except FileNotFoundError:
        return None
    except JobFileError as error:
        raise UserError(f"trial {trial.number}: {error}") from None
    except OSError as error:
        raise UserError(f"cannot read {str(path)!r}: {error.strerror}") from None


def _read_once(loaded: Run, trial: Trial, name: str) -> Iterator[bytes]:
    file = _open(loaded, trial, name)
    if file is None:
        figures = loaded.spec.provenance.value
        why = f"its figures are {figures}, nothing ran" if figures != "measured" else "nothing was written"
        hint = "; `-f` waits for it" if trial.outcome is None and loaded.is_running else ""
        raise UserError(f"trial {trial.number} has no {name}: {why}{hint}")
    with file:
        while line := file.readline(MAX_LINE_BYTES):
            yield line


def _follow(loaded: Run, trial: Trial, name: str) -> Iterator[bytes]:
    """Yield the lines of the trial's attempts as they come, until it has ended or its search no longer runs."""
    folder, number = loaded.folder, trial.number
    if trial.outcome is not None or not loaded.is_running:
        yield from _read_once(loaded, trial, name)
        return
    attempt, file, left, is_last = trial.attempt, None, b"", False
    while True:
        file = file or _open(loaded, trial, name)
        while file is not None and (line := file.readline(MAX_LINE_BYTES)):
            left += line
            if left.endswith(b"\n") or len(left) >= MAX_LINE_BYTES:
                yield left
                left = b""
        if trial.attempt != attempt or is_last:
            if left:
                yield left
            if file is not None:
                file.close()
            if is_last:
                return
            attempt, file, left = trial.attempt, None, b""
            print(f"attempt {attempt} of trial {number}", file=sys.stderr, flush=True)
            continue
        began_s = time.monotonic()
        loaded, trial = _read(folder, number)
        is_last = trial.outcome is not None or not loaded.is_running  # read once more: the end may have come since
        time.sleep(max(LOOK_S, 4 * (time.monotonic() - began_s)))


def _explain(loaded: Run, trial: Trial) -> None:
    """Print why the trial failed: what was recorded, and the root failure in the logs that are there now."""
    for number, retry in enumerate(trial.retries, 1):
        print(f"attempt {number} does not count: {one_line(retry.reason, 2000)}")
    failure = trial.outcome.failure if trial.outcome else None
    state = "did not fail" if trial.outcome else "has not ended"
    print(f"trial {trial.number}: {state if failure is None else _describe(failure)}")
    found = read_fault(find_log_folder(loaded.folder, trial))
    if found is None:
        print("its logs: no line shows a failure")
        return
    fault, path = found
    print(f"its logs: {path.name}, line {fault.line}{f', node {fault.node}' if fault.node else ''}: {_describe(fault)}")
    if fault.blames_node:
        print("the machine is at fault, not the configuration: the trial is repeated, on Slurm without that node")


def _describe(failure: Failure | LogFault) -> str:
    rank = "" if failure.rank is None else f" (rank {failure.rank})"
    return f"{failure.kind.describe()}{rank}: {one_line(redact(failure.message), 2000)}"


def _print_failure(folder: Path, number: int, rank: int, count: int) -> None:
    """Print the root exception of a failed rank, and say so if no line names the rank."""
    _, trial = _read(folder, number)
    path = find_log_folder(folder, trial) / FAILURES_FOLDER / f"rank-{rank:05d}.json"
    try:
        record = read_job_json(path)
        print(f"failure of rank {rank}: {one_line(redact(str(record['message'])), 2000)}")
    except (OSError, JobFileError, KeyError, TypeError):
        if not count:
            where = "no line begins with its rank, and the rank reported no failure"
            print(f"ccl-search: nothing of rank {rank}: {where}; without --rank, all lines are shown", file=sys.stderr)
