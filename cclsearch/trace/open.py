"""Opens whatever a user points at: a trace file, a folder of traces, or a trial's folder with its configuration."""

from __future__ import annotations

import os
from pathlib import Path

import orjson

from cclsearch.card.model import Card
from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line
from cclsearch.core.values import Config
from cclsearch.trace.read import read_traces
from cclsearch.trace.view import TraceView

TRACE_FOLDER = "trace"
CONFIG_FILE = "config.json"
RUN_FILE = "search.yaml"
"""Tells the folder of a whole search, whose trials have traces of their own."""


def open_trace(
    path: Path,
    *,
    card: Card | None = None,
    config: Config | None = None,
    baseline: TraceView | None = None,
    workers: int = 1,
) -> TraceView:
    """The view over the traces at `path`; a trial's folder gives its own configuration unless one is handed in.

    Raises UserError where nothing is at the path, or what is there may not be read. What the files hold never raises:
    the trace set says what is wrong.
    """
    if not os.path.exists(path):
        raise UserError(f"there is nothing at {str(path)!r}: give a trace file, a folder of traces or a trial's folder")
    if os.path.isfile(path / RUN_FILE):
        raise UserError(
            f"{str(path)!r} is the folder of a search: name one of its trials, as {path / 'trials' / '0001'}"
        )
    try:
        with os.scandir(path) if os.path.isdir(path) else path.open("rb"):
            pass
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    folder = path / TRACE_FOLDER if os.path.isdir(path / TRACE_FOLDER) else path
    beside = path / CONFIG_FILE
    if config is None and folder != path and os.path.isfile(beside):
        config = read_config(beside)
    return TraceView(read_traces(folder, workers=workers), card=card, config=config, baseline=baseline)


def read_config(path: Path) -> Config:
    """The knobs of a `config.json`: a trial's input (its `config` field) or a plain object of knobs."""
    if not os.path.isfile(path):
        raise UserError(f"there is no configuration file {str(path)!r}")
    try:
        data = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON ({one_line(str(error))})") from error
    knobs = data.get("config", data) if isinstance(data, dict) else None
    if not isinstance(knobs, dict) or not all(isinstance(v, bool | int | float | str) for v in knobs.values()):
        raise UserError(f"{path}: must hold an object of knobs and plain values")
    return Config(knobs)
