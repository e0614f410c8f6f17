"""The `in-process` launcher: calls a function of the caller of the Python API for each trial, in this process.

No run script declares what ran and no trace shows it, so every result is marked `caller-measured`.
"""

from __future__ import annotations

import math
import shlex
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from cclsearch.card.model import Card
from cclsearch.card.task import TASKS
from cclsearch.core.atomic_file import write_atomically
from cclsearch.core.errors import UserError
from cclsearch.core.numbers import parse_number
from cclsearch.core.processes import find_processes_by_variable, terminate_processes
from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import one_line
from cclsearch.core.values import Failure, FailureKind, Model, Provenance, Stage, Value
from cclsearch.launch.base import Check, Handle, InstantLauncher, Job, JobState, JobStatus, submit_error, write_model
from cclsearch.launch.collect import (
    classify_text,
    clear_results,
    collect_end,
    explain_timeout,
    quote_last_line,
    read_fault,
)
from cclsearch.launch.command import TRIAL_DIR, Command
from cclsearch.launch.contract import RESULT_FILE, STDERR_FILE, RunStatus, TrialResult, make_result
from cclsearch.launch.profile import LAUNCHERS, Profile
from cclsearch.space.table import Space

Measure = Callable[[dict[str, Value]], float | Mapping[str, float]]
"""Measures one configuration: its primary metric (of training: seconds of a step), or metrics by name with that one."""


def ELSEWHERE(config: dict[str, Value]) -> float:
    """Is given in place of a function if `ccl-search tell` brings the results; it is never called."""
    return math.nan


_MESSAGE_LENGTH = 500
_running: dict[Path, tuple[Handle, threading.Thread]] = {}
"""Folder of an attempt -> its job, while a thread of this process measures it, whichever launcher started it."""

_cancelled: set[Path] = set()
"""Folders of attempts whose command is to end."""


class InProcessSettings(Model):
    """The launcher's own fields."""

    threads: int = Field(default=1, ge=1)
    """Calls at a time; with 1, the function runs in the thread that searches."""
    command: Command | None = None
    """What measures in place of a function."""


@LAUNCHERS.register("in-process")
class InProcessLauncher(InstantLauncher):
    """Measures trials with a function; it cannot be ended from outside, so there is no time limit of a trial."""

    name = "in-process"
    provenance = Provenance.CALLER

    def __init__(self, threads: int = 1, run_dir: Path | None = None, command: Command | None = None) -> None:
        self.max_parallel = threads
        self.command = command
        self.poll_interval_s = 0.1 if command else 0.0 if threads == 1 else 0.02
        self.is_measuring = False
        """Whether the thread that searches is inside the function."""
        self._run_dir = run_dir
        self._function: Measure | None = None
        self._card: Card | None = None

    @classmethod
    def from_profile(cls, profile: Profile) -> InProcessLauncher:
        """Return the launcher, still without its function."""
        settings = profile.read_settings(InProcessSettings)
        return cls(settings.threads, profile.run_dir, settings.command)

    def use_workload(self, card: Card, space: Space) -> None:
        """Take the card, whose task says which metric the function must return."""
        self._card = card

    def use_function(self, function: Measure | None, run_id: str) -> None:
        """Take the function; UserError if there is none."""
        if function is None and self.command is None:
            raise UserError(
                f"the trials of {run_id!r} are measured by a function of Python, which only its program has: continue"
                f" with `cclsearch.resume({run_id!r}, measure)` there, or `ccl-search ask {run_id}`"
            )
        self._function = function

    def cancel(self, handles: Sequence[Handle]) -> None:
        """End commands, and wait until functions have returned: nothing can end these from outside."""
        for handle in handles:
            _cancelled.add(handle.trial_dir)
            if (running := _running.get(handle.trial_dir)) is not None:
                running[1].join()

    def find(self, run_id: str) -> list[Handle]:
        """Return the jobs of that run that threads of this process still measure."""
        root = self._run_dir.absolute() if self._run_dir else None
        running = [handle for handle, thread in list(_running.values()) if thread.is_alive()]
        return [
            handle
            for handle in running
            if handle.job_name.startswith(f"{run_id}-t") and (root is None or root in handle.trial_dir.parents)
        ]

    def render(self, job: Job) -> str:
        """Return a comment that takes the place of a job script."""
        if self.command is not None:
            return f"cd {shlex.quote(self.command.folder)}\n{self.command.fill(job.payload.config, job.trial_dir)}\n"
        return f"# no job: the caller's function measures {job.payload.config}\n"

    def check(self) -> list[Check]:
        """Return one line on the measurements that are possible with it."""
        detail = "measures trials with a function of Python: `cclsearch.search(card, measure)`"
        return [Check(name="function", ok=True, detail=detail)]

    def _serve(self, job: Job, handle: Handle) -> Handle:
        """Call the function: at once, or in a thread of its own if several may run."""
        try:
            clear_results(job.trial_dir, STDERR_FILE)
            if self._function is ELSEWHERE:
                return handle
            if self.max_parallel == 1 and self.command is None:
                self.is_measuring = True
                self._measure(job)
            else:
                thread = threading.Thread(target=self._measure_in_thread, args=(job,), name=job.name)
                _running[job.trial_dir] = (handle, thread)
                thread.start()
        except OSError as error:
            raise submit_error(f"could not write to the trial's folder: {error}") from None
        finally:
            self.is_measuring = False
        return handle

    def _status(self, handle: Handle) -> JobStatus:
        running = _running.get(handle.trial_dir)  # before the result is looked for: a thread writes it, then ends
        if (handle.trial_dir / RESULT_FILE).is_file():
            return JobStatus(state=JobState.DONE)
        if self._function is ELSEWHERE or (running is not None and running[1].is_alive()):
            return JobStatus(state=JobState.RUNNING, note="it is being measured")
        if self.command is not None:  # of a search that was killed
            terminate_processes(find_processes_by_variable(TRIAL_DIR, str(handle.trial_dir)))
        ended = "the process that called the function ended before it returned"
        return JobStatus.failed(FailureKind.NODE_FAILED, ended)

    def _measure_in_thread(self, job: Job) -> None:
        try:
            self._measure(job)
        finally:
            _running.pop(job.trial_dir, None)

    def _run(self, command: Command, job: Job) -> None:
        """Run the command and write `result.json`, unless it was cancelled."""
        card, folder, begin_s, start_s = self._card, job.trial_dir, time.time(), time.monotonic()
        assert card is not None, "the session gives the launcher its card"
        try:
            code = command.run(job.payload.config, folder, lambda: folder in _cancelled)
            elapsed_s = time.monotonic() - start_s
            if code is None:
                return
            if code == 0:
                figures = {"elapsed_s": elapsed_s, **command.read_figures(folder, begin_s)}
                write_model(folder / RESULT_FILE, _make_result(card, figures, "the command has"))
                return
            end = collect_end(folder, exit_code=code)
            if not isinstance(end, Failure) or (code > 0 and read_fault(folder) is None):
                text = f"the command ended with exit code {code}{quote_last_line(folder)}"
                end = _fail(FailureKind.CRASHED, redact(text))
            failure = end
        except TimeoutError:
            failure = _fail(FailureKind.TIMEOUT, explain_timeout(command.timeout_s))
        except (ValueError, OSError, UserError) as error:  # a figure or a file is not there, or not readable
            failure = _fail(FailureKind.CRASHED, one_line(redact(str(error)), _MESSAGE_LENGTH))
        write_model(folder / RESULT_FILE, _make_failed(card, failure))

    def _measure(self, job: Job) -> None:
        """Call the function and write `result.json`; its exception is the trial's failure, except Ctrl-C."""
        if self.command is not None and self._function is None:
            self._run(self.command, job)
            return
        function, card = self._function, self._card
        assert function is not None, "the session gives the launcher its function"
        assert card is not None, "the session gives the launcher its card"
        outer = sys.exception()
        try:
            returned = function(dict(job.payload.config))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            result = _make_failed(card, _explain(error, outer))
            write_atomically(job.trial_dir / STDERR_FILE, redact("".join(traceback.format_exception(error))))
        else:
            result = _make_result(card, returned)
        self.is_measuring = False
        write_model(job.trial_dir / RESULT_FILE, result)


def _fail(kind: FailureKind, message: str) -> Failure:
    return Failure(stage=Stage.RUN, kind=kind, message=message)


def _make_result(card: Card, returned: object, who: str = "measure(config) returned") -> TrialResult:
    """Return the result of a call that returned; a failed one if it returned no valid measurement."""
    try:
        metrics = _read_metrics(returned, TASKS.get(card.task).primary)
        return make_result(card, metrics, status=RunStatus.OK, caller=True)
    except (_BadReturn, ValidationError) as error:
        text = f"{who} {one_line(redact(repr(returned)), 120)}: {one_line(str(error), 300)}"
        return _make_failed(card, Failure(stage=Stage.RUN, kind=FailureKind.CRASHED, message=text))


def read_told(card: Card, value: float | None, metrics: Sequence[str], failure: str | None) -> TrialResult:
    """Return the result that `ccl-search tell` states; raises UserError for one that is not a measurement."""
    if failure is not None:
        text = one_line(redact(failure), _MESSAGE_LENGTH)
        return _make_failed(card, Failure(stage=Stage.RUN, kind=classify_text(text), message=text))
    primary = TASKS.get(card.task).primary
    pairs = [pair.partition("=") for pair in metrics] + ([(primary, "=", str(value))] if value is not None else [])
    try:
        given = {name: parse_number(text) for name, _, text in pairs}
        return make_result(card, _read_metrics(given, primary), status=RunStatus.OK, caller=True)
    except ValueError as error:
        raise UserError(f"the result is not a measurement: {one_line(str(error), 300)}") from None


class _BadReturn(ValueError):
    """The function returned something that is not a measurement."""


def _read_metrics(returned: object, primary: str) -> dict[str, float]:
    """Return the metrics that a function returned; `_BadReturn` names the wrong or missing one."""
    given = returned if isinstance(returned, Mapping) else {primary: returned}
    metrics = {}
    for name, value in given.items():
        if not isinstance(name, str):
            raise _BadReturn(f"the name of a metric must be a text, not {name!r}")
        metrics[name] = _read_number(name, value)
    if not metrics.get(primary, 0.0) > 0:
        raise _BadReturn(f"it must be {primary} or a mapping with it, a number above 0")
    return metrics


def _read_number(name: str, value: Any) -> float:
    """A number, also of numpy or torch, as a float; never a text or a truth value."""
    try:
        number = math.nan if isinstance(value, str | bytes | bool) else float(value)
    except Exception:  # `__float__` is foreign code: a tensor of several elements raises errors of its own
        number = math.nan
    if not math.isfinite(number):
        raise _BadReturn(f"{name} must be a finite number")
    return number


def _make_failed(card: Card, failure: Failure) -> TrialResult:
    return make_result(card, {}, status=RunStatus.FAILED, failure=failure, caller=True)


def _explain(error: BaseException, outer: BaseException | None) -> Failure:
    """Return the failure for an exception, from the root of its causes; never of the caller's own kind."""
    root, seen = error, {id(outer)}
    while id(root) not in seen:
        seen.add(id(root))
        cause = root.__cause__ or (None if root.__suppress_context__ else root.__context__)
        root = root if cause is None or id(cause) in seen else cause
    text = one_line(redact("".join(traceback.format_exception_only(root))), _MESSAGE_LENGTH)
    return Failure(stage=Stage.RUN, kind=classify_text(text), message=text)
