"""Numbers as people write them: one rule for the command line, files, forms and the environment.

ASCII digits only (`int` and `float` of Python also take those of other scripts, `_`, `nan` and `inf`), within limits
that later arithmetic can bear.
"""

from __future__ import annotations

import re

MAX_TRIALS = 10**6
"""Maximum budget of a search: four times the largest ledger that was tried."""
MAX_COUNT, MAX_AMOUNT = 10**12, 1e9
"""Maximum of any other whole number, and of hours, dollars, watts and the like, which people give."""
_WHOLE = re.compile(r"[+-]?[0-9]{1,15}")
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})(?:[eE][+-]?[0-9]{1,3})?")


def parse_whole(text: str) -> int:
    """The whole number in the text; raises ValueError if it is not one of up to 15 ASCII digits."""
    if not _WHOLE.fullmatch(text.strip()):
        raise ValueError("must be a whole number in the digits 0 to 9")
    return int(text)


def parse_number(text: str) -> float:
    """The finite number in the text; raises ValueError if it is not written in ASCII digits, or infinite."""
    number = float(text) if _NUMBER.fullmatch(text.strip()) else float("inf")
    if abs(number) == float("inf"):
        raise ValueError("must be a number in the digits 0 to 9")
    return number


def read_whole(text: str, low: int, high: int) -> int:
    """The whole number in the text; raises ValueError, with the range, unless it is from `low` to `high`."""
    number = int(text) if _WHOLE.fullmatch(text.strip()) else low - 1
    if number < low:
        raise ValueError(f"must be a whole number of at least {low}, not {text[:60]!r}")
    if number > high:
        raise ValueError(f"must be at most {high:,}, not {text[:60]!r}")
    return number


def read_amount(text: str, low: float, high: float) -> float:
    """The number in the text; raises ValueError, with the range, unless it is from `low` to `high`."""
    if _NUMBER.fullmatch(text.strip()) and low <= float(text) <= high:
        return float(text)
    least = "above 0" if 0 < low < 1e-9 else f"from {low:g}"
    raise ValueError(f"must be a number {least} to {high:g}, not {text[:60]!r}")
