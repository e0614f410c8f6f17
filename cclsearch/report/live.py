"""Draws the progress of a search on a terminal, again each second and at each event, whatever its size is then."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console, Group
from rich.live import Live

from cclsearch.report.progress import LiveNote, Progress, render_progress

REDRAW_S = 1.0
LOOK_S = 0.2
"""Seconds between two looks for a new event, or for another size of the terminal."""
Show = Callable[[Progress], None]


class _Screen:
    """The lines on the terminal, and the thread that keeps them up to date."""

    def __init__(self, console: Console, live_note: LiveNote) -> None:
        self._console, self._live_note = console, live_note
        self._progress: Progress | None = None
        self._drawn: tuple[Progress | None, tuple[int, int], int] | None = None
        self._live = self._open()
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="live-table", daemon=True)

    def show(self, progress: Progress) -> None:
        """Show this from the next look on."""
        self._progress = progress

    def start(self) -> None:
        self._live.start()
        self._thread.start()

    def finish(self) -> None:
        """Remove the table, and print it once more with every row, so that it can be scrolled."""
        self._finished.set()
        self._thread.join()
        with contextlib.suppress(OSError):  # the terminal has gone
            self._live.stop()
            if self._progress is not None:
                for line in render_progress(self._progress, self._console.width, None, time.time(), self._live_note):
                    self._console.print(line, highlight=False, soft_wrap=True)

    def _open(self) -> Live:
        return Live(console=self._console, auto_refresh=False, transient=True, vertical_overflow="crop")

    def _keep(self) -> None:
        with contextlib.suppress(OSError):
            while not self._finished.wait(LOOK_S):
                self._draw_if_due()

    def _draw_if_due(self) -> None:
        progress, size = self._progress, tuple(self._console.size)
        wanted = (progress, (size[0], size[1]), int(time.monotonic() / REDRAW_S))
        if progress is None or wanted == self._drawn:
            return
        if self._drawn is not None and self._drawn[1] != wanted[1]:
            # The terminal has broken the drawn lines, so their number is unknown: begin on an empty screen.
            self._live.stop()
            self._console.clear()
            self._live = self._open()
            self._live.start()
        self._drawn = wanted
        lines = render_progress(progress, size[0], size[1] - 1, time.time(), self._live_note)
        self._live.update(Group(*lines), refresh=True)


@contextlib.contextmanager
def live_screen(console: Console, live_note: LiveNote = lambda _: "") -> Iterator[Show]:
    """A function that shows the progress it is given; at the end the whole table stays on the terminal."""
    screen = _Screen(console, live_note)
    screen.start()
    try:
        yield screen.show
    finally:
        screen.finish()
