"""Draw the progress of a search on a terminal, some times a second, at the terminal's size at that moment."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console, RenderableType
from rich.live import Live

from cclsearch.report.progress import LiveNote, Progress, render_progress

REDRAWS_PER_S = 2
Show = Callable[[Progress], None]


class _LiveTable(Live):
    """The progress that was shown last, drawn by the thread of `rich.Live`."""

    def __init__(self, console: Console, live_note: LiveNote) -> None:
        self.progress: Progress | None = None
        self._live_note, self._size = live_note, console.size
        super().__init__(console=console, refresh_per_second=REDRAWS_PER_S, transient=True, vertical_overflow="crop")

    def refresh(self) -> None:
        with contextlib.suppress(OSError):  # the terminal has gone
            if self.console.size != self._size:
                # The terminal has broken the drawn lines, so their number is unknown: begin on an empty screen.
                self.console.clear()
                self._size = self.console.size
            super().refresh()

    def get_renderable(self) -> RenderableType:
        return self.render(self._size.height - 1)

    def render(self, height: int | None) -> RenderableType:
        """The table in at most `height` lines; all rows if the height is None."""
        if self.progress is None:
            return ""
        return render_progress(self.progress, self._size.width, height, time.time(), self._live_note)


@contextlib.contextmanager
def live_screen(console: Console, live_note: LiveNote = lambda _: "") -> Iterator[Show]:
    """A function that shows the progress it is given; at the end the whole table stays on the terminal."""
    live = _LiveTable(console, live_note)

    def show(progress: Progress) -> None:
        live.progress = progress

    live.start()
    try:
        yield show
    finally:
        with contextlib.suppress(OSError):
            live.stop()
            console.print(live.render(None))
