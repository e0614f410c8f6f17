"""What the tricks of serving share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import Trial

Trick = Callable[[Trial], None]
TRICKS: dict[str, Trick] = {}
SERVER_TRICK = "server_trick"
"""File in the trial's folder that names the server's part of a trick."""


def trick(function: Trick) -> Trick:
    """Register a trick under the function's name."""
    TRICKS[function.__name__] = function
    return function


def name_trick(trial: Trial) -> str:
    """Return the trick of this trial; `honest` if it has none."""
    runs = next(folder.parent for folder in trial.folder.parents if folder.name == "trials")
    config = json.loads(Path(os.environ["CCL_CONFIG"]).read_text())["config"]
    return str(json.loads((runs / "tricks.json").read_text()).get(json.dumps(config, sort_keys=True), "honest"))


def change(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a function by what `make` returns for it."""
    setattr(owner, name, make(getattr(owner, name)))
