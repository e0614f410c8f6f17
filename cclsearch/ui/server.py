"""Serves the application on this machine until Ctrl-C, and closes connections that wait for their clients."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from cclsearch.charts.chart import page_script
from cclsearch.core.errors import UserError
from cclsearch.ui.app import make_app, warm_up
from cclsearch.ui.guard import Permissions

HOST = "127.0.0.1"
"""Anybody who reaches the port may read all runs, so nothing outside this machine reaches it."""
IDLE_S = 10.0
"""Seconds in which a client sends a whole request, or reads some of an answer; else its connection is closed."""
END_S = 0.7
"""Seconds after Ctrl-C at which the process ends, even if a thread still reads: it writes nothing."""


class _Connection(H11Protocol):
    _timer: asyncio.TimerHandle | None = None
    _unread = 0
    """Bytes of an answer that the client had not read at the last look."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look_later()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look_later()

    def _look_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._unread = self.transport.get_write_buffer_size()
        self._timer = self.loop.call_later(IDLE_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        waits = self.cycle is None or self.cycle.response_complete or self.cycle.more_body
        if waits or 0 < self._unread <= self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self._look_later()


class _Server(uvicorn.Server):
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end; a thread that is stuck in a file does not delay it."""
        super().handle_exit(sig, frame)
        last = threading.Timer(END_S, _end_now)
        last.daemon = True
        last.start()


def _end_now() -> None:
    sys.stdout.flush()
    os._exit(0)


def serve(runs: Path, port: int, allowed: Permissions, say: Callable[[str], None]) -> None:
    """Serve a folder of runs; `say` gets the address. Raises UserError if the port cannot be used."""
    with _listen(port) as listener:
        address = f"http://{HOST}:{listener.getsockname()[1]}/"
        config = uvicorn.Config(
            make_app(runs, allowed), log_level="error", access_log=False, lifespan="off", server_header=False,
            http=_Connection, ws="none", timeout_graceful_shutdown=1, h11_max_incomplete_event_size=32 * 1024,
        )  # fmt: skip
        for number in (signal.SIGINT, signal.SIGTERM):  # a background job of a script would ignore Ctrl-C
            signal.signal(number, signal.default_int_handler)
        threading.Thread(target=page_script, daemon=True).start()  # bundled while the first page is read
        warm_up()
        say(address + (f"#token={allowed.token}" if allowed.any else ""))
        with contextlib.suppress(KeyboardInterrupt):
            _Server(config).run(sockets=[listener])


def _listen(port: int) -> socket.socket:
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
        listener.listen(128)
    except (OSError, OverflowError) as error:
        listener.close()
        why = getattr(error, "strerror", None) or "it is not a port"
        raise UserError(f"port {port} cannot be used ({why}): choose another with --port (0: any free one)") from None
    return listener
