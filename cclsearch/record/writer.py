"""The writer of a run folder: its lock, its ledger, its state, and callbacks for events."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from cclsearch import __version__
from cclsearch.core.errors import UserError
from cclsearch.record.event import LEDGER_VERSION, Event, LedgerUpgraded
from cclsearch.record.ledger import LEDGER_FILE, Ledger, fold_ledger
from cclsearch.record.lock import FolderLock
from cclsearch.record.state import RunState

Watcher = Callable[[Event, RunState], None]
"""Called after each event is on disk (a live table, plain lines, JSON lines)."""


class RunWriter:
    """Context manager that locks a run folder; only `record` changes the state of the search."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = RunState()
        self.lock = FolderLock(folder)
        self._watchers: list[Watcher] = []
        self._ledger: Ledger | None = None

    def __enter__(self) -> RunWriter:
        self.lock.__enter__()
        try:
            path = self.folder / LEDGER_FILE
            self.state = fold_ledger(path) if path.exists() else RunState(path)
            self._ledger = Ledger(path)
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

    def record(self, event: Event) -> None:
        """Write one event, apply it to the state, call the watchers; UserError if another process wrote here."""
        assert self._ledger is not None, "the ledger is not open"
        self._ledger.check_present()
        self.lock.check_held()
        if self.state.ledger_version < LEDGER_VERSION:
            upgraded = LedgerUpgraded(time_s=event.time_s, engine_version=__version__)
            self.state.apply(*self._ledger.append(upgraded))
        self.state.apply(*self._ledger.append(event))
        self.lock.refresh()
        for watch in self._watchers:
            watch(event, self.state)

    def check_present(self) -> None:
        """Raise OSError if the run folder is gone or replaced: then a missing file in it proves nothing."""
        assert self._ledger is not None, "the ledger is not open"
        self._ledger.check_present()

    def trial_folder(self, number: int) -> Path:
        """Folder with the evidence of a trial, for example `trials/0007`."""
        return self.folder / "trials" / f"{number:04d}"
