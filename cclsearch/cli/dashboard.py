"""`ccl-search dashboard RUN`: optuna-dashboard on the study of a run, on this machine only, until Ctrl-C."""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path

from uvicorn.middleware.wsgi import WSGIMiddleware  # type: ignore[attr-defined]

from cclsearch.core.errors import UserError
from cclsearch.loop.session import rebuild_space
from cclsearch.run.catalog import find_run, name_run
from cclsearch.run.folder import Run, load_run
from cclsearch.study.view import STUDY_FILE, StudyView
from cclsearch.ui.app import serve


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
        app = WSGIMiddleware(optuna_dashboard.wsgi(_open_storage(_find_study(load_run(folder), Path(scratch)))))
        name = name_run(folder, args.runs)
        # The dashboard has no password: `serve` lets nothing outside this machine reach it.
        serve(app, args.port, lambda address: print(f"{name}: {address} (Ctrl-C ends it, not the search)", flush=True))
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
