"""Read `--log-to NAME[:PLACE]`: the tracker and its place."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass

from cclsearch.core.errors import UserError
from cclsearch.tracking.base import TRACKERS, Tracker


@dataclass(frozen=True)
class LogTarget:
    """One tracker that was asked for, and checked."""

    text: str
    """Text that the user typed."""
    tracker: Tracker

    @property
    def name(self) -> str:
        """The tracker's name."""
        return self.text.partition(":")[0]


def open_targets(texts: Iterable[str]) -> tuple[LogTarget, ...]:
    """Return the targets, each once; raises UserError for one that is unknown, lacks its package or cannot be used."""
    return tuple(LogTarget(text, _open(text)) for text in dict.fromkeys(texts))


def _open(text: str) -> Tracker:
    name, _, place = text.partition(":")
    try:
        return TRACKERS.get(name).from_place(place)
    except UserError as error:
        raise UserError(f"--log-to {name}: {error}") from None


def require_package(module: str, extra: str) -> None:
    """Raise UserError that says how to install the package of a tracker, if it is missing."""
    if importlib.util.find_spec(module) is None:
        raise UserError(f"the package {module!r} is not installed: pip install 'ccl-search[{extra}]'")
