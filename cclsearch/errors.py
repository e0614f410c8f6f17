"""The three ways in which something goes wrong.

`UserError` is the user's to mend: one line, exit code 2, nothing started. `TrialError` is a trial's failure: recorded,
and the search goes on. Anything else is our bug and shows its traceback.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cclsearch.values import Failure


class UserError(Exception):
    """What the user gave cannot be used; the message says what must hold, what came, and what would do."""


class TrialError(Exception):
    """One trial failed; `failure` is what the ledger keeps."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure
