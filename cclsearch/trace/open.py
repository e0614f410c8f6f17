"""Opens the path that a user gives: a trace file, a folder of traces, or a trial's folder with its configuration."""

from __future__ import annotations

import os
from pathlib import Path

import orjson

from cclsearch.card.model import Card
from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line
from cclsearch.core.values import Config
from cclsearch.trace.files.run_log import TRACE_FOLDER
from cclsearch.trace.read import read_traces
from cclsearch.trace.view import TraceView

CONFIG_FILE = "config.json"
RUN_FILE = "search.yaml"
"""A folder with this file is a run folder, whose trials have traces of their own."""


def open_trace(
    path: Path,
    *,
    card: Card | None = None,
    config: Config | None = None,
    baseline: TraceView | None = None,
    workers: int = 1,
) -> TraceView:
    """Return the view of the traces at `path`; a trial's folder provides the configuration unless one is passed.

    Raises UserError if the path does not exist or may not be read. The content of the files never raises: the trace set
    names the faults.
    """
    if not os.path.exists(path):
        raise UserError(f"{str(path)!r} does not exist: give a trace file, a folder of traces or a trial's folder")
    if os.path.isfile(path / RUN_FILE):
        raise UserError(
            f"{str(path)!r} is a run folder: give one of its trials, for example {path / 'trials' / '0001'}"
        )
    try:
        with os.scandir(path) if os.path.isdir(path) else path.open("rb"):
            pass
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    folder = path / TRACE_FOLDER if os.path.isdir(path / TRACE_FOLDER) else path
    config_file = path / CONFIG_FILE
    if config is None and folder != path and os.path.isfile(config_file):
        config = read_config(config_file)
    return TraceView(read_traces(folder, workers=workers), card=card, config=config, baseline=baseline, workers=workers)


def read_config(path: Path) -> Config:
    """Return the knobs of a `config.json`: a trial's input (its `config` field) or a plain object of knobs."""
    if not os.path.isfile(path):
        raise UserError(f"the configuration file {str(path)!r} does not exist")
    try:
        data = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON ({one_line(str(error))})") from error
    knobs = data.get("config", data) if isinstance(data, dict) else None
    if not isinstance(knobs, dict) or not all(isinstance(v, bool | int | float | str) for v in knobs.values()):
        raise UserError(f"{path}: must be a JSON object that maps knobs to plain values")
    return Config(knobs)
