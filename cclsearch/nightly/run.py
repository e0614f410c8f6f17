"""A whole night: the lock, the searches, the comparison, what is written, pruned and told."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cclsearch.core.atomic_file import write_atomically
from cclsearch.core.errors import UserError
from cclsearch.core.redact import declare_secret, redact
from cclsearch.nightly.assemble import JobNights, assemble_jobs, assemble_summary
from cclsearch.nightly.config import NightlyConfig
from cclsearch.nightly.night import NightRun, plan_jobs
from cclsearch.nightly.page import render_night
from cclsearch.nightly.prune import Pruned, prune_evidence
from cclsearch.nightly.summary import NightSummary, render_markdown, render_message
from cclsearch.nightly.webhook import send_webhook
from cclsearch.nightly.window import NIGHTS_FOLDER, SUMMARY_FILE, find_window, nights_folder
from cclsearch.record.lock import FolderLock, is_locked
from cclsearch.search.jobs import StopSignal

MAX_HISTORY_NIGHTS = 60
"""Earlier nights that the page lists."""


class NightBusyError(Exception):
    """Another night runs in this runs folder; the text says whose."""


class NightBrokenError(Exception):
    """The night began, and what it found cannot be written down; the text says why."""


def run_night(
    config: NightlyConfig, runs: Path, *, stop: StopSignal, say: Callable[[str], None] = lambda line: None
) -> NightSummary:
    """Run one night and leave its summary; raises NightBusyError while another runs, UserError for bad input.

    Raises NightBrokenError where the disk fails it: there is no summary then.
    """
    if config.webhook_env is not None:
        declare_secret(config.webhook_env)
    plans = plan_jobs(config)
    lock_folder = runs / NIGHTS_FOLDER
    try:
        lock_folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {str(lock_folder)!r}: {error.strerror}") from None
    lock = FolderLock(lock_folder, purpose="nightly")
    try:
        lock.__enter__()
    except UserError as error:
        if is_locked(lock_folder):
            raise NightBusyError(str(error)) from None
        raise
    with lock_held(lock):
        window = find_window(config, runs, time.time())
        night = NightRun(config, runs, window, stop=stop, lock=lock, say=say, plans=plans)
        try:
            night.run()
            return finish_night(night)
        except BrokenPipeError:
            raise  # whoever read the output is gone: no fault of the disk
        except OSError as error:
            raise NightBrokenError(
                f"cannot go on writing {str(window.folder)!r}: {error.strerror or error}; every finished trial is kept:"
                " make room, then start the night again"
            ) from None


class lock_held:
    """Context manager that gives an entered lock back."""

    def __init__(self, lock: FolderLock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__(None, None, None)


def finish_night(night: NightRun) -> NightSummary:
    """Compare, prune, write summary and page, tell the chat; returns the summary.

    A night that a signal stopped before its end is summed up as it stands, and prunes nothing: a stop must be quick.
    """
    config, window = night.config, night.window
    jobs, is_stopped = assemble_jobs(night), night.is_stopped
    ours = {state.folder.name for state in night.states.values() if state.folder is not None}
    if is_stopped:
        pruned = Pruned()
    else:
        pruned = prune_evidence(night.runs, config.name, config.keep, tonight=window.stamp, ours=ours)
    summary = assemble_summary(night, jobs, pruned, is_stopped=is_stopped)
    summary = NightSummary.model_validate_json(redact(summary.model_dump_json()))
    write_summary(night, summary, jobs)
    if config.webhook_env is not None:
        problem = send_webhook(config.webhook_env, redact(render_message(summary)))
        if problem is not None:
            summary = summary.model_copy(update={"notes": (*summary.notes, problem)})
            write_summary(night, summary, jobs)
    return summary


def write_summary(night: NightRun, summary: NightSummary, jobs: Sequence[JobNights]) -> None:
    """Leave `summary.json`, `summary.md` and the page in the night's folder, and as the latest of the series."""
    home = nights_folder(night.runs, night.config.name)
    page = redact(render_night(summary, jobs, read_summaries(home, before=night.window.stamp)))
    texts = {"report.html": page, "summary.md": render_markdown(summary)}
    texts[SUMMARY_FILE] = summary.model_dump_json(indent=1) + "\n"
    for folder in (night.window.folder, home):
        for name, text in texts.items():
            write_atomically(folder / name, text)


def read_summaries(home: Path, *, before: str) -> list[NightSummary]:
    """Summaries of earlier nights, the oldest first; what cannot be read is left out."""
    found = []
    for path in sorted(home.glob(f"*/{SUMMARY_FILE}"))[-MAX_HISTORY_NIGHTS:]:
        if path.parent.name >= before:
            continue
        try:
            found.append(NightSummary.model_validate_json(path.read_bytes()))
        except (OSError, ValueError):
            continue
    return found
