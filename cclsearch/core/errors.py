"""The three ways in which something goes wrong.

`UserError` is the user's to mend: one line, exit code 2, nothing started. `TrialError` is a trial's failure: recorded,
and the search goes on. Anything else is our bug and shows its traceback.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from cclsearch.core.values import Failure


class UserError(Exception):
    """What the user gave cannot be used; the message says what must hold, what came, and what would do."""


class UnavailableError(UserError):
    """What runs the jobs does not answer now: nothing of the user's is wrong, and a later try may do."""


class TrialError(Exception):
    """One trial failed; `failure` is what the ledger keeps."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@contextlib.contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Around what writes where the user said: an OSError in it is a UserError that names `path` and the reason."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {str(path)!r}: {error.strerror or error}") from None


def require_writable(path: Path, option: str) -> None:
    """Before long work: raises UserError that names the option where no file can be written at `path`; none is left."""
    folder = path.absolute().parent
    with writing_to(path):
        if not folder.is_dir():
            raise UserError(f"{option}: there is no folder {str(folder)!r} to write into")
        if path.is_dir():
            raise UserError(f"{option}: {str(path)!r} is a folder: name a file")
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
