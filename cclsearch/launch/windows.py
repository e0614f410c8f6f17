"""Timed windows: a run script asks when its window opens, and the search answers with a nonce, unknown until then.

Each window has three files in the attempt's folder: `window-1.asked` of the script, `window-1.nonce` of the search, and
`window-1.closed` of the script with the digest of what it computed. The file system's change times, which no user can
set, say how long the window took.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from cclsearch.core.job_file import JobFileError, open_job_file
from cclsearch.launch.contract import TimedWindow

MAX_WINDOWS = 1000
"""Windows of an attempt that are answered."""
POLL_S = 0.03
"""Seconds between two looks at the folders of running jobs: a script waits half of that for its nonce."""
_DIGEST_BYTES = 64


class WindowKeeper:
    """A thread that answers the windows of running jobs while the search does other things."""

    def __init__(self) -> None:
        self._windows: dict[Path, list[TimedWindow]] = {}
        self._first: dict[Path, str] = {}
        """Folder -> nonce of its first window, if it recomputes another trial."""
        self._whole: set[Path] = set()
        """Folders that were watched since their jobs were submitted."""
        self._lock = threading.Lock()
        self._is_running = False

    def watch(self, folder: Path, known: Sequence[TimedWindow] = (), *, first: str = "", is_new: bool = False) -> None:
        """Answer the windows of this attempt from now on; `known` are those that the ledger has."""
        with self._lock:
            if folder in self._windows:
                return
            self._windows[folder], self._first[folder] = list(known), first
            if is_new:
                self._whole.add(folder)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._work, name="timed windows", daemon=True).start()

    def list_opened(self, folder: Path) -> tuple[TimedWindow, ...]:
        """Return the windows of this attempt that were opened so far."""
        with self._lock:
            return tuple(self._windows.get(folder, ()))

    def end(self, folder: Path, known: Sequence[TimedWindow] = ()) -> tuple[TimedWindow, ...]:
        """Return the windows of an attempt that has ended.

        If it opened none that this search saw, although the search did not run all the time: one without a nonce.
        """
        with self._lock:
            windows = self._windows.pop(folder, list(known))
            is_whole = folder in self._whole
            self._look(folder, windows, is_answering=is_whole)
            self._whole.discard(folder)
        return tuple(windows) if windows or is_whole else (TimedWindow(),)

    def stop(self) -> None:
        """End the thread; jobs that open a window later wait for `resume`, and not for ever."""
        with self._lock:
            self._windows.clear()

    def _work(self) -> None:
        while self._is_running:
            time.sleep(POLL_S)
            with self._lock:
                for folder, windows in self._windows.items():
                    self._look(folder, windows)
                self._is_running = bool(self._windows)

    def _look(self, folder: Path, windows: list[TimedWindow], *, is_answering: bool = True) -> None:
        """Close and open windows as the files say; the next one opens only after the last is closed."""
        try:
            names = set(os.listdir(folder))  # NFS caches the absence of one name, but not a list
        except OSError:
            return
        last = len(windows)
        if windows and windows[-1].seconds is None and f"window-{last}.closed" in names:
            windows[-1] = _close(folder / f"window-{last}.closed", windows[-1])
        if folder not in self._whole:  # opened while no search ran, or by one that was killed before it was recorded
            while not names.isdisjoint(f"window-{last + 1}.{end}" for end in ("nonce", "closed")):
                windows.append(TimedWindow())
                last += 1
        is_free = not windows or windows[-1].seconds is not None
        if is_answering and is_free and last < MAX_WINDOWS and f"window-{last + 1}.asked" in names:
            nonce = self._first.get(folder, "") if not windows else ""
            windows.append(_answer(folder / f"window-{last + 1}.nonce", nonce or secrets.token_hex(8)))


def _answer(path: Path, nonce: str) -> TimedWindow:
    """Write the nonce; returns the window that opens with that. A job that prevents it will not know the nonce."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        partial.write_text(nonce, encoding="utf-8")
        os.replace(partial, path)
        opened_ns = path.lstat().st_ctime_ns
    except OSError:
        opened_ns = time.time_ns()
    return TimedWindow(nonce=nonce, opened_ns=opened_ns)


def _close(path: Path, window: TimedWindow) -> TimedWindow:
    """Return the window as closed: when the file was written, and the digest in it; unchanged if it cannot be read."""
    try:
        with open_job_file(path) as file:
            digest = file.read(_DIGEST_BYTES).decode(errors="replace")
            seconds = (os.fstat(file.fileno()).st_ctime_ns - window.opened_ns) / 1e9
    except (OSError, JobFileError):
        return window
    return window.model_copy(update={"seconds": seconds, "digest": digest})
