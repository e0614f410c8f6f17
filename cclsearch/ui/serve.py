"""Runs the web application on this machine until Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from cclsearch.core.errors import UserError
from cclsearch.ui.guard import Permissions

HOST = "127.0.0.1"
"""Anybody who reaches the port may read all runs, so nothing outside this machine reaches it."""


def serve(runs: Path, port: int, allowed: Permissions, say: Callable[[str], None]) -> None:
    """Serve a folder of runs; `say` gets the address. Raises UserError if the port cannot be used."""
    import uvicorn

    from cclsearch.charts.chart import page_script
    from cclsearch.ui.app import make_app, warm_up

    with _listen(port) as listener:
        address = f"http://{HOST}:{listener.getsockname()[1]}/"
        config = uvicorn.Config(
            make_app(runs, allowed), log_level="error", access_log=False, lifespan="off", server_header=False,
            ws="none", timeout_graceful_shutdown=1, h11_max_incomplete_event_size=32 * 1024,
        )  # fmt: skip
        for number in (signal.SIGINT, signal.SIGTERM):  # a background job of a script would ignore Ctrl-C
            signal.signal(number, signal.default_int_handler)
        threading.Thread(target=page_script, daemon=True).start()  # bundled while the first page is read
        warm_up()
        say(address + (f"#token={allowed.token}" if allowed.any else ""))
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])


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
