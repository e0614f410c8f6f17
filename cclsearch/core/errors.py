"""The three kinds of error.

`UserError` is for the user to fix: one line, exit code 2, nothing started. `TrialError` is the failure of one trial: it
is recorded and the search continues. Any other exception is a bug of this program and shows its traceback.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from cclsearch.core.values import Failure


class UserError(Exception):
    """Unusable input; the message says what is required, what was found, and what to do."""


class UnavailableError(UserError):
    """The system that runs the jobs does not answer now: the input is fine, and a later attempt may succeed."""


class Notice(UserWarning):
    """Something to know although the work continues. The command line prints each message once."""


class DamagedLedger(Notice):
    """Lines of a ledger cannot be read; everything else of it is used."""


class BrokenPlugin(Notice):
    """A plugin cannot be imported or clashes with another: it is left out; everything else works."""


class TrialError(Exception):
    """One trial failed; `failure` is recorded in the ledger."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def refuse_newer(path: Path, version: object, supported: int) -> None:
    """Raise UserError if the file at `path` states a later version of its format than this program reads."""
    if isinstance(version, int) and version > supported:
        raise UserError(
            f"{str(path)!r} was written by a newer ccl-search (version {version}, this one reads up to {supported}):"
            " upgrade with `pip install --upgrade ccl-search`"
        )


@contextlib.contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a UserError that names `path` and the reason."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {str(path)!r}: {error.strerror or error}") from None


@contextlib.contextmanager
def reading_from(path: Path) -> Iterator[None]:
    """Name `path` in an OSError of the block: a failed read names no file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def require_writable(path: Path, option: str) -> None:
    """Check before long work that a file can be written at `path`; else UserError names the option. Leaves no file."""
    folder = path.absolute().parent
    with writing_to(path):
        if not folder.is_dir():
            raise UserError(f"{option}: folder {str(folder)!r} does not exist; create it, or name a file elsewhere")
        if path.is_dir():
            raise UserError(f"{option}: {str(path)!r} is a folder; name a file")
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
