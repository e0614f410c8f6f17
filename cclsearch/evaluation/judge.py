"""An exception in our own judging of a trial becomes an outcome of that trial, so that it cannot end the search."""

from __future__ import annotations

import errno
import traceback
from collections.abc import Callable

from cclsearch.core.errors import TrialError, UserError
from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import one_line
from cclsearch.core.values import Failure, FailureKind, Provenance, Stage
from cclsearch.record.event import TrialFinished, encode_line
from cclsearch.run.trial_folder import JUDGING_ERROR_FILE
from cclsearch.scoring.evaluate import evaluate_failure
from cclsearch.scoring.outcome import Outcome

MAX_TRACEBACK_CHARS = 1 << 16
DISK_ERRNOS = frozenset(
    getattr(errno, name)
    for name in (
        *("ENOENT", "ENOSPC", "EDQUOT", "EROFS", "EFBIG", "EIO", "ESTALE", "ENOTCONN", "EMFILE", "ENFILE"),
        *("ETIMEDOUT", "EHOSTDOWN", "ENODEV", "ENOLCK"),
    )
    if hasattr(errno, name)
)
"""Errors of the disk and its file system, not of the trial: they stop the search, which continues later."""


def judge(evaluate: Callable[[], Outcome], provenance: Provenance) -> tuple[Outcome, str]:
    """The outcome that `evaluate` returns, or a `judging_error` with its traceback, secrets masked.

    An outcome that the ledger could not hold is such an error too. A UserError is raised, and so is an OSError of the
    disk: a later attempt may succeed.
    """
    try:
        outcome = evaluate()
        encode_line(TrialFinished(trial=1, attempt=1, outcome=outcome))
        return outcome, ""
    except UserError:
        raise
    except TrialError as error:
        return evaluate_failure(error.failure, provenance), ""
    except Exception as error:  # our own code: whatever is wrong with it must not cost the other trials
        if isinstance(error, OSError) and error.errno in DISK_ERRNOS:
            raise
        text = redact("".join(traceback.format_exception(error))[-MAX_TRACEBACK_CHARS:])
        last = one_line(redact("".join(traceback.format_exception_only(error))), 500)
        message = f"{last}; an error of ccl-search, not of the configuration: see {JUDGING_ERROR_FILE}"
        failure = Failure(stage=Stage.SCORE, kind=FailureKind.JUDGING_ERROR, message=message)
        return evaluate_failure(failure, provenance), text.encode(errors="replace").decode()


def is_judging_error(outcome: Outcome) -> bool:
    """Whether judging failed, so that the trial has no verdict yet."""
    return outcome.failure is not None and outcome.failure.kind is FailureKind.JUDGING_ERROR
