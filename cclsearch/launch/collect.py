"""The result of a job: its `result.json`, or the failure that its ranks' files and logs show."""

from __future__ import annotations

import contextlib
import shutil
import signal as signals
from itertools import islice
from pathlib import Path
from typing import TypeVar

from pydantic import ConfigDict, ValidationError

from cclsearch.core.job_file import (
    RESULT_BYTES,
    JobFileError,
    has_job_file,
    read_job_bytes,
    read_job_json,
    read_job_text,
    read_tail,
)
from cclsearch.core.text import one_line
from cclsearch.core.values import MEMORY_HINT, Count, Failure, FailureKind, Model, Stage
from cclsearch.launch.base import JobStatus
from cclsearch.launch.contract import (
    EVIDENCE_FILE,
    RESULT_FILE,
    STDERR_FILE,
    STDOUT_FILE,
    TRACE_FOLDER,
    RunStatus,
    TrialEnd,
)
from cclsearch.launch.fault_rules import project_rules, shipped_rules
from cclsearch.launch.log_reader import LogFault, read_logs

Result = TypeVar("Result", bound=TrialEnd)

EXIT_FILE = "exit_code"
"""Exit code of the run script as a shell saw it (128 + n after signal n), if the launcher writes one."""
FAILURES_FOLDER = "failures"
"""One JSON file per failed rank: `rank`, `time_ns`, `kind`, `message`."""

MEMORY_RAN_OUT = "the kernel killed a process of the trial because memory ran out"

AT_FAULT = " is at fault: "
"""Separates the node and the message of a failure of hardware."""
_TAIL_BYTES = 512 * 1024
_EXIT_BYTES = 16
_MESSAGE_LENGTH = 1000
_MAX_FAILURES = 65536
"""Failures of ranks that are read: one of each rank."""

_SHOWN_BY_TEXT = frozenset((FailureKind.OUT_OF_MEMORY, FailureKind.LAUNCHER, FailureKind.COMMUNICATION))


def clear_results(trial_dir: Path, *files: str) -> None:
    """Remove results of an earlier attempt, and these files or folders, so that they are not read as this one's."""
    for name in (RESULT_FILE, EVIDENCE_FILE, *files, TRACE_FOLDER, FAILURES_FOLDER):
        path = trial_dir / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif name != TRACE_FOLDER:  # a link to the attempt's folder on scratch
            path.unlink(missing_ok=True)


def explain_timeout(timeout_s: float) -> str:
    """Return the message about a trial that was ended at its time limit."""
    return f"no result after {timeout_s:g} s, so every process of the trial was ended"


def quote_last_line(trial_dir: Path) -> str:
    """Return an addition to a message: the last line on stderr; empty if there is none."""
    lines = read_tail(trial_dir / STDERR_FILE, _TAIL_BYTES).splitlines()
    last = next((line for line in reversed(lines) if any(map(str.isalnum, line))), "")  # not "====="
    return f"; its last line on stderr: {one_line(last, 300)}" if last else ""


def collect_end(trial_dir: Path, *, exit_code: int | None = None, signal: int | None = None) -> TrialEnd | Failure:
    """Return how the run of any task ended; the fields of its task are not read. Otherwise as `collect_result`."""
    return collect_result(trial_dir, TrialEnd, exit_code=exit_code, signal=signal)


def collect_result(
    trial_dir: Path, model: type[Result], *, exit_code: int | None = None, signal: int | None = None
) -> Result | Failure:
    """Return the run script's result, or the failure if there is no valid one; raises nothing for bad files.

    `model` is the task's model of `result.json`. `exit_code` and `signal` are the launcher's; without them, the
    `exit_code` file is used.
    """
    path = trial_dir / RESULT_FILE
    if has_job_file(path):
        return _read_result(path, model)
    code = _read_exit_code(trial_dir) if exit_code is None else exit_code
    if signal is None and code is not None and (code < 0 or 128 < code <= 192):
        signal = -code if code < 0 else code - 128
    reported, unread = _read_rank_failure(trial_dir)
    if reported is not None and reported.kind is not FailureKind.COMMUNICATION:
        return reported
    failure = _choose(reported, read_fault(trial_dir), _explain_end(code, signal, trial_dir))
    if unread and failure is not reported:
        failure = failure.model_copy(update={"message": _shorten(f"{failure.message}; {FAILURES_FOLDER}/{unread}")})
    return failure


def read_fault(trial_dir: Path) -> tuple[LogFault, Path] | None:
    """Return the root failure in a trial's logs, and the log; None if no line shows one."""
    return read_logs(trial_dir / name for name in (STDERR_FILE, STDOUT_FILE))


def explain_record(path: Path, model: type[Model]) -> str:
    """Return why a launcher's record in a trial's folder cannot be used; empty if it can, or if there is none."""
    try:
        model.model_validate_json(read_job_bytes(path, RESULT_BYTES))
    except FileNotFoundError:
        return ""
    except ValidationError as error:
        return f"{path.name}: {_explain_violation(error)}"
    except (OSError, JobFileError) as error:
        return str(error)
    return ""


def changed_record(problem: str) -> JobStatus:
    """Return the failure of a job that has written over its own record, which is unusable now."""
    return JobStatus.failed(FailureKind.CRASHED, f"the trial changed its own record: {one_line(problem, 300)}")


def classify_text(text: str) -> FailureKind:
    """Return the failure kind that an exception's text shows; crashed if it shows none."""
    fault = project_rules().classify(text)
    return fault.kind if fault is not None and fault.kind in _SHOWN_BY_TEXT else FailureKind.CRASHED


def is_killed(failure: Failure) -> bool:
    """Whether a process was killed by SIGKILL for a reason that nothing shows: most likely, memory ran out."""
    fault = shipped_rules().classify(failure.message)
    shows_it = MEMORY_HINT in failure.message or (fault is not None and fault.name == "killed")
    return failure.kind is FailureKind.CRASHED and shows_it


def _read_result(path: Path, model: type[Result]) -> Result | Failure:
    try:
        data = read_job_json(path, RESULT_BYTES)
    except OSError as error:
        return Failure(stage=Stage.RUN, kind=FailureKind.LAUNCHER, message=f"{RESULT_FILE} cannot be read: {error}")
    except JobFileError as error:
        return _crashed(one_line(str(error), 200))
    if isinstance(data, dict) and isinstance(data.get("schema_version", 1), int) and data.get("schema_version", 1) > 1:
        return _crashed(f"{RESULT_FILE} has schema_version {data['schema_version']}, but this version reads 1")
    try:
        result = model.model_validate(data)
    except ValidationError as error:
        return _crashed(f"{RESULT_FILE} violates the trial contract: {_explain_violation(error)}")
    if result.status is RunStatus.FAILED:
        failure = result.failure or _crashed(f"{RESULT_FILE} has status `failed` but no `failure`")
        return _own_failure(failure.stage, failure.kind, failure.message, failure.rank)
    return result


def _explain_violation(error: ValidationError) -> str:
    """Return the first wrong field, its requirement and its value."""
    first = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or "the file"
    problem = "Input should be a JSON object" if first["type"] == "model_type" else first["msg"]
    return f"{field}: {problem} ({first['input']!r:.100})"


def _read_exit_code(trial_dir: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(read_job_text(trial_dir / EXIT_FILE, _EXIT_BYTES))
    return None


class _RankFailure(Model):
    """One file of `failures/`."""

    model_config = ConfigDict(extra="ignore", coerce_numbers_to_str=True)

    rank: Count
    time_ns: Count
    kind: FailureKind
    message: str


def _read_rank_failure(trial_dir: Path) -> tuple[Failure | None, str]:
    """The first failure that a rank reported, and why a file of another rank could not be read (empty if all could).

    If a rank only lost its peer, its failure counts only if no other rank failed.
    """
    records, unread = [], ""
    for path in sorted(islice((trial_dir / FAILURES_FOLDER).glob("*.json"), _MAX_FAILURES)):
        try:
            found = _RankFailure.model_validate(read_job_json(path))
        except ValidationError as error:
            unread = f"{path.name}: {_explain_violation(error)}"
        except (OSError, JobFileError) as error:
            unread = str(error)
        else:
            failure = _own_failure(Stage.RUN, found.kind, found.message, found.rank)
            records.append((found.kind is FailureKind.COMMUNICATION, found.time_ns, failure))
    return min(records, key=lambda record: record[:2])[2] if records else None, unread


def _choose(reported: Failure | None, found: tuple[LogFault, Path] | None, end: Failure) -> Failure:
    """Return the failure that the logs show; what ranks reported, if all lost only a peer, and the logs show no cause.

    `end` says how the run script ended. A launcher's report of an exit says less, and is quoted after it.
    """
    fault = found[0] if found is not None else None
    if reported is not None and (fault is None or not fault.is_cause):
        return reported
    is_shells = fault is not None and fault.fault.name in ("killed", "fault") and fault.rank is None
    if fault is None or (is_shells and "was killed by" in end.message):
        return end
    kind, message = fault.kind, fault.message
    if kind is FailureKind.ALLOCATION_ENDED:  # of a step that the job itself asked for
        kind = FailureKind.LAUNCHER
    if fault.blames_node:
        kind, message = FailureKind.NODE_FAILED, _blame(message, fault.node)
    elif fault.fault.name == "report":
        message = f"{end.message.partition('; its last line')[0]}; {message}"
    return Failure(stage=Stage.RUN, kind=kind, message=_shorten(message), rank=fault.rank)


def _explain_end(code: int | None, signal: int | None, trial_dir: Path) -> Failure:
    if signal is not None:
        name = {known.value: known.name for known in signals.Signals}.get(signal, f"signal {signal}")
        hint = f" ({MEMORY_HINT})" if name == "SIGKILL" else ""
        end = f"was killed by {name}{hint}"
    elif code is None:
        end = f"ended without {RESULT_FILE}, and its exit code is unknown"
    else:
        end = f"exited with {code} {'and' if code else 'but'} wrote no {RESULT_FILE}"
    return _crashed(f"the run script {end}{quote_last_line(trial_dir)}")


def _own_failure(stage: Stage, kind: FailureKind, message: str, rank: int | None) -> Failure:
    """Return a failure that a job reports itself, with the kind that its message shows.

    A kind that only engine or launcher can know becomes a crash: it would end the search, or repeat the trial for
    nothing.
    """
    kind = kind if kind.counts or kind is FailureKind.LAUNCHER else FailureKind.CRASHED
    if kind in (FailureKind.CRASHED, FailureKind.COMMUNICATION):
        fault = project_rules().classify(message)
        if fault is not None and fault.bad_node:
            return Failure(stage=stage, kind=FailureKind.NODE_FAILED, message=_blame(message, None), rank=rank)
        kind = classify_text(message)
    return Failure(stage=stage, kind=kind, message=_shorten(message), rank=rank)


def _blame(message: str, node: str | None) -> str:
    return _shorten(f"the hardware of {node or 'a node'}{AT_FAULT}{message}")


def _crashed(message: str) -> Failure:
    return Failure(stage=Stage.RUN, kind=FailureKind.CRASHED, message=_shorten(message))


def _shorten(message: str) -> str:
    return one_line(message, _MESSAGE_LENGTH)
