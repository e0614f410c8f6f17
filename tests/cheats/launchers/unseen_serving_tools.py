"""What the serving tricks share. No torch here: the run script has none either."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cpu_serving
import serving_load
import serving_run
from common import Trial

SERVER_TRICK = "CHEATS_SERVER"
"""What unseen_server.py does otherwise than the real server."""


def trials_of(trial: Trial) -> Path:
    return next(folder for folder in trial.folder.parents if folder.name == "trials")


def report(**changed: Any) -> None:
    """Report these values instead of the true ones; a callable gets the true one."""
    write = serving_run.write_result

    def write_changed(trial: Trial, **fields: Any) -> None:
        new = {name: value(fields[name]) if callable(value) else value for name, value in changed.items()}
        write(trial, **{**fields, **new})

    serving_run.write_result = write_changed


def use_server(what: str) -> None:
    """Start unseen_server.py with these changes (`a+b`) instead of the real server."""
    os.environ[SERVER_TRICK] = what
    cpu_serving.SERVER = Path(__file__).with_name("unseen_server.py")


Run = Callable[[Any, Any], Any]


def around_load(change: Callable[[Run, Any, Any], Any]) -> None:
    """Replace each load but the warm-up: `change(run, target, load)`; `run(target, load)` sends it truly."""
    run = serving_load.run_load

    def run_changed(target: Any, load: Any) -> Any:
        return run(target, load) if load.is_warm_up else change(run, target, load)

    serving_run.run_load = run_changed


def change_times(record: Any, change: Callable[[float], float]) -> None:
    """Apply a function to every time of a record."""
    for name in ("arrival_s", "sent_s", "end_s"):
        setattr(record, name, change(getattr(record, name)))
    record.token_times_s = [change(time_s) for time_s in record.token_times_s]
