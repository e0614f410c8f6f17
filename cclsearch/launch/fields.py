"""Types of profile fields that reach a script or a command line."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

CONTROL = re.compile(r"[\x00-\x1f\x7f]")
SECRET_ADVICE = (
    "looks like a secret, and a job's environment is stored with its results;"
    " remove it, or read it from a file of yours in a line of `setup`"
    " (a `local` profile passes a variable of the search itself: `pass_environment`)"
)


def check_word(value: str) -> str:
    """Return the value if it is one word of a command line: no line break, no leading dash, not empty."""
    if not value.strip():
        raise ValueError("must not be empty")
    if CONTROL.search(value):
        raise ValueError("must not contain a line break or a control character")
    if value.startswith("-"):
        raise ValueError("must not start with a dash (it would be read as an option)")
    return value


def check_line(value: str) -> str:
    """Return the value if it is one line of shell."""
    if CONTROL.search(value.replace("\t", " ")):
        raise ValueError("must be one line without control characters")
    return value


Word = Annotated[str, AfterValidator(check_word)]
ShellLine = Annotated[str, AfterValidator(check_line)]
