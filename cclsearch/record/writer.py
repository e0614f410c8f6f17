"""The writer of a run folder: its lock, its ledger, its state, and callbacks for events."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from cclsearch.core.content import TRIALS_FOLDER, trial_folder
from cclsearch.core.errors import UserError
from cclsearch.core.job_file import has_job_file
from cclsearch.record.event import MAX_TRIAL, Event
from cclsearch.record.ledger import LEDGER_FILE, Ledger, fold_ledger
from cclsearch.record.lock import FolderLock
from cclsearch.record.state import RunState

Watcher = Callable[[Event, RunState], None]
"""Called after each event is on disk (a live table, plain lines, JSON lines)."""


def list_trial_folders(folder: Path) -> dict[int, Path]:
    """Number -> folder of each trial in a run folder, in order; links and other names are left out."""
    try:
        found = [path for path in (folder / TRIALS_FOLDER).iterdir() if path.name.isdecimal() and path.name.isascii()]
    except OSError:
        return {}
    numbered = sorted((int(path.name), path) for path in found if path.is_dir() and not path.is_symlink())
    return {number: path for number, path in numbered if path == trial_folder(folder, number) and number < MAX_TRIAL}


class RunWriter:
    """Context manager that locks a run folder; only `record` changes the state of the search."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = RunState()
        self.lock = FolderLock(folder)
        self._watchers: list[Watcher] = []
        self._ledger: Ledger | None = None
        self._highest_folder = 0

    def __enter__(self) -> RunWriter:
        self.lock.__enter__()
        try:
            path = self.folder / LEDGER_FILE
            self.state = fold_ledger(path) if has_job_file(path) else RunState(path)
            self._ledger = Ledger(path)
            self._highest_folder = max(list_trial_folders(self.folder), default=0)
        except OSError as error:
            self.lock.__exit__(None, None, None)
            raise UserError(f"cannot open {str(path)!r}: {error.strerror or error}; nothing was changed") from None
        except BaseException:
            self.lock.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ledger:
            self._ledger.close()
        self.lock.__exit__(kind, error, trace)

    def watch(self, watcher: Watcher) -> None:
        """Call this function after each event from now on."""
        self._watchers.append(watcher)

    @contextlib.contextmanager
    def watching(self, watcher: Watcher) -> Iterator[None]:
        """Call this function after each event until the context ends."""
        self._watchers.append(watcher)
        try:
            yield
        finally:
            self._watchers.remove(watcher)

    def record(self, event: Event) -> None:
        """Write one event, apply it to the state, call the watchers; UserError if another process wrote here."""
        assert self._ledger is not None, "the ledger is not open"
        self._ledger.check_present()
        self.lock.check_held()
        self.state.apply(event, self._ledger.append(event))
        self.lock.refresh()
        for watch in self._watchers:
            watch(event, self.state)

    @property
    def next_trial(self) -> int:
        """Number of the next trial: above every trial in the ledger, and above every trial folder that was here."""
        return max(self.state.highest_trial, self._highest_folder) + 1

    def check_present(self) -> None:
        """Raise OSError if the run folder is gone or replaced: then a missing file in it proves nothing."""
        assert self._ledger is not None, "the ledger is not open"
        self._ledger.check_present()

    def trial_folder(self, number: int) -> Path:
        """Folder with the evidence of a trial, for example `trials/0007`."""
        return trial_folder(self.folder, number)
