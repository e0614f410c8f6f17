"""Signals of a person or a scheduler that end a search: every finished trial is kept."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

from cclsearch.loop.jobs import StopSignal
from cclsearch.record.event import EndKind


@contextlib.contextmanager
def listen_for_stop(stop: StopSignal) -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP request a clean stop; a second Ctrl-C interrupts at once."""

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        name = signal.Signals(number).name
        with contextlib.suppress(OSError):  # `print` may not be called again while it runs, as a handler may
            os.write(2, f"\n{name}: stopping the search; Ctrl-C ends it at once\n".encode())
        stop.request(f"stopped by {name}", EndKind.SIGNAL)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
