"""`ccl-search dashboard RUN`: optuna-dashboard on the study of a run, on this machine only, until Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
import warnings
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from cclsearch.core.errors import UserError
from cclsearch.loop.session import rebuild_space
from cclsearch.run.catalog import find_run, name_run
from cclsearch.run.folder import Run, load_run
from cclsearch.study.view import STUDY_FILE, StudyView

HOST = "127.0.0.1"
"""The dashboard has no password, so nothing outside this machine reaches it."""


class _Server(ThreadingMixIn, WSGIServer):
    """Answers each request in a thread of its own."""

    daemon_threads = True


class _QuietHandler(WSGIRequestHandler):
    """Prints no line per request."""

    def log_message(self, format: str, *args: object) -> None: ...


def run(args: argparse.Namespace) -> None:
    try:
        import optuna_dashboard
    except ImportError:
        raise UserError(
            "optuna-dashboard is not installed: run `pip install 'ccl-search[dashboard]'` or"
            " `pip install optuna-dashboard`"
        ) from None
    folder = find_run(args.run, args.runs)
    with tempfile.TemporaryDirectory(prefix="ccl-search-") as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        app = optuna_dashboard.wsgi(_open_storage(_find_study(load_run(folder), Path(scratch))))
        with _listen(app, args.port) as server:
            name = name_run(folder, args.runs)
            print(f"{name}: http://{HOST}:{server.server_port}  (Ctrl-C ends it, not the search)", flush=True)
            for number in (signal.SIGINT, signal.SIGTERM):  # a background job of a script would ignore Ctrl-C
                signal.signal(number, signal.default_int_handler)
            with contextlib.suppress(KeyboardInterrupt):
                server.serve_forever()
    print()


def _find_study(loaded: Run, scratch: Path) -> Path:
    """Return the file of the study: brought up to date unless the search does that; elsewhere if it cannot be."""
    path = loaded.folder / STUDY_FILE
    if loaded.is_running and path.is_file():
        return path
    for folder in (loaded.folder, scratch):
        problems: list[str] = []
        view = StudyView(folder, loaded.spec, rebuild_space(loaded.spec).knobs, problems.append)
        view.open(loaded.state)
        if not problems:
            return folder / STUDY_FILE
        print(f"ccl-search: {problems[0]}; the dashboard shows a copy, made from the ledger", file=sys.stderr)
    raise UserError(f"the study of {loaded.spec.run_id} cannot be written")


def _open_storage(path: Path) -> object:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return JournalStorage(JournalFileBackend(str(path)))


def _listen(app: Any, port: int) -> WSGIServer:
    try:
        return make_server(HOST, port, app, server_class=_Server, handler_class=_QuietHandler)
    except (OSError, OverflowError):
        raise UserError(f"port {port} cannot be used: choose another with --port (0: any free one)") from None
