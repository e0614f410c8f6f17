"""The nights of a runs folder, from the summaries that `ccl-search nightly` left."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cclsearch.core.errors import UserError
from cclsearch.nightly.run import read_summaries
from cclsearch.nightly.summary import NightSummary
from cclsearch.nightly.window import NIGHTS_FOLDER, nights_folder

_LAST = "99999999-999999"


@dataclass(frozen=True)
class NightSeries:
    """The nights of one configuration, the oldest first."""

    name: str
    nights: Sequence[NightSummary]


def list_series(runs: Path) -> list[str]:
    """The names of the series of nights."""
    try:
        with os.scandir(runs / NIGHTS_FOLDER) as found:
            return sorted(item.name for item in found if item.is_dir(follow_symlinks=False) and item.name.isprintable())
    except OSError:
        return []


def read_series(runs: Path, name: str) -> NightSeries:
    """A series with its nights; raises UserError if there is none of exactly that name."""
    if name not in list_series(runs):
        raise UserError(f"there are no nights {name!r} here")
    return NightSeries(name, read_summaries(nights_folder(runs, name), before=_LAST))
